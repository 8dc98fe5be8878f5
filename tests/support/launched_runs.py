"""A run that a launcher starts on several ranks, kills, and starts again: each rank writes a digest of each State.

``python -m tests.support.launched_runs FOLDER``: what srun and mpirun start; Ray calls :func:`train`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import optree
import torch
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import local_tensor
from tests.support.killed_runs import digest
from tests.support.problem import fit, noisy, points

MOMENTS = (Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
"""Where a rank may be killed."""
DEFAULTS: dict[str, Any] = {"kills": 0, "who": None, "sent": signal.SIGKILL, "epochs": 2, "parallel": "replicate"}
DEFAULTS |= {"timeout": 30, "stop_before": None}


def local(state: pl.State) -> pl.State:
    """The State with this rank's shards in place of sharded tensors."""

    def shard(leaf: Any) -> Any:
        return local_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return optree.tree_map(shard, state, namespace="pure_loop")  # type: ignore[return-value]


def order(folder: Path, **options: Any) -> None:
    """Write down what the ranks are to do.

    Args:
        folder: a new one.
        **options: ``kills``: how many times a rank is killed; ``who``: which, else it is drawn; ``sent``: by which
            signal; ``epochs``: of 8 batches; ``parallel``: ``"replicate"`` or ``"shard"``; ``timeout``: seconds until a
            rank that doesn't answer is an error; ``stop_before``: of the CheckpointSaver, by a clock that goes on by a
            second each time that it is read.
    """
    folder.mkdir()
    (folder / "order.json").write_text(json.dumps(options))


def train(folder: Path, **options: Any) -> pl.State:
    """Train as it was ordered, from where an earlier attempt was saved."""
    told = {**DEFAULTS, **json.loads((folder / "order.json").read_text())}
    rank, ranks = pl.distributed.rank(), pl.distributed.world_size()
    attempt = len(list(folder.glob(f"{rank}.*")))
    # All ranks draw alike: who is killed, where, and how many batches after the start.
    draw = random.Random(f"{attempt} {told['kills']}")
    who, moment, later = draw.randrange(ranks), draw.choice(MOMENTS), draw.randint(1, 5)
    later += 4 * (attempt == 0)  # with the other rank, which has saved batch 3 by then
    who = who if told["who"] is None else told["who"]
    torch.set_num_threads(1)
    (tensors,) = points(1, size=64)
    clock = {} if told["stop_before"] is None else {"clock": _Clock()}
    stream = fit(
        noisy(),
        DataLoader(TensorDataset(*tensors), batch_size=8, shuffle=True),
        [pl.algorithms.sam(rho=0.05, interval=2), pl.algorithms.ema(half_life="4ba")],
        optimizer=pl.optim.adamw(lr=pl.schedules.cosine("1dur", peak=0.01, warmup="3ba")),
        max_duration=f"{told['epochs']}ep",
        seed=3,
        strict=False,
        parallel=pl.distributed.Parallel(kind=told["parallel"], timeout=told["timeout"]),
        autoresume=pl.callbacks.CheckpointSaver(str(folder / "saved"), interval="3ba", stop_before=told["stop_before"]),
        watch={Event.FIT_START, Event.BATCH_END, moment},
        **clock,
        **options,
    )
    last = None
    with (folder / f"{rank}.{attempt}").open("w") as log:
        for event, state in stream:
            batch = state.timestamp.batch
            if event is Event.FIT_START:
                last = batch + later if attempt < told["kills"] else None
            if event is Event.BATCH_END:
                print(batch, digest(local(state)), file=log, flush=True)
            if event is moment and rank == who and batch == last:
                print("killed", event.name, file=log, flush=True)
                os.kill(os.getpid(), told["sent"])
        print("ended", digest(local(state)), file=log, flush=True)
    return state


class _Clock:
    """Goes on by a second each time that it is asked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def attempts(folder: Path, rank: int) -> list[dict[str, str]]:
    """What a rank wrote in each attempt: digests by batch, "killed", "ended"."""
    number = len(list(folder.glob(f"{rank}.*")))
    return [dict(line.split() for line in (folder / f"{rank}.{i}").read_text().splitlines()) for i in range(number)]


def check_bitwise(given: Path, wanted: Path, *, ranks: int = 2, starts: int | None = 1, killed: bool = True) -> int:
    """Every State of every attempt is that of the run that was left alone, bit by bit, and so is the last.

    Args:
        given, wanted: folders of the two.
        ranks: of both.
        starts: how many attempts there were; None: two or more.
        killed: whether one rank was killed in each attempt but the last.

    Returns:
        How many attempts there were.

    Raises:
        AssertionError: it is not so.
    """
    where = []
    for rank in range(ranks):
        (reference,) = attempts(wanted, rank)
        found = attempts(given, rank)
        assert len(found) == starts or (starts is None and len(found) > 1), f"{len(found)} attempts"
        for number, said in enumerate(found):
            where += [number] * ("killed" in said)
            for batch, state in said.items():
                assert batch == "killed" or state == reference[batch], f"rank {rank}, attempt {number}, batch {batch}"
        assert ["ended" in said for said in found] == [False] * (len(found) - 1) + [True]
        assert {batch for said in found for batch in said} - {"killed"} == set(reference)
        begun = [next(map(int, filter(str.isdecimal, said)), 0) for said in found]
        assert len(found) == 1 or begun[-1] > 1, "it began again, and did not resume"
    assert sorted(where) == list(range(len(found) - 1 if killed else 0))
    return len(found)


def main() -> None:
    started, folder = time.monotonic(), Path(sys.argv[1])
    try:
        train(folder)
    except pl.errors.DistributedError as error:
        (folder / f"error{pl.distributed.rank()}").write_text(f"{time.monotonic() - started:.1f} {error}")
        raise


if __name__ == "__main__":
    main()
