"""What saving costs the step that follows: 25 million parameters with the moments of AdamW, 300 MB a checkpoint.

Wall-clock time from one batch's end to the next, what the loop does to save included, beside that of the batches on
either side that follow no save; medians of one run. The batches are W3's, eight of 128 tokens: with smaller ones a step
is little else than writing the parameters anew, and a copy of them as long as it.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch

import pure_loop as pl
from bench.performance.workloads import SCALED, WORKLOADS, Endless, Workload
from pure_loop.callbacks import CheckpointSaver

__all__ = ["measure"]

Clocks: TypeAlias = tuple[float, float]

# A save, the batch that follows, one for the writer to be done, and one to compare with.
PERIOD = 4


def measure(saves: int, workload: Workload | None = None) -> dict[str, dict[str, float]]:
    """For each loop milliseconds of the step after a save and of an ordinary one, and their ratio."""
    if workload is None:
        tokens = next(each for each in WORKLOADS if each.name == "W3").batch
        workload = attrs.evolve(SCALED, batch=tokens)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, ends in {
            "hand-written, torch.save": _by_hand(workload, Path(folder)),
            **{
                f"pl.fit, CheckpointSaver, donate={d!r}": _ours(workload, Path(folder) / str(d), d)
                for d in ("auto", True, False)
            },
        }.items():
            found[name] = _compare(ends, saves)
    return found


def _compare(ends: Iterator[Clocks], saves: int) -> dict[str, float]:
    times = [next(ends) for _ in range(PERIOD * (saves + 1) + 1)]
    wall, thread = ([b[clock] - a[clock] for a, b in itertools.pairwise(times)] for clock in (0, 1))
    after, ordinary = wall[PERIOD::PERIOD], wall[PERIOD - 1 :: PERIOD]
    return {
        "after_ms": statistics.median(after) * 1e3,
        "ordinary_ms": statistics.median(ordinary) * 1e3,
        "ratio": _ratio(wall),
        "thread_ratio": _ratio(thread),
    }


def _ratio(steps: list[float]) -> float:
    """The median of steps after a save, each beside the ordinary ones on either side of it; the first period warms up.

    A machine changes its speed by more than what a save costs, and stays so for some steps.
    """
    after, ordinary = steps[PERIOD::PERIOD], steps[PERIOD - 1 :: PERIOD]
    beside = map(statistics.fmean, itertools.pairwise(ordinary))
    return statistics.median(one / other for one, other in zip(after, beside, strict=True))


def _clocks() -> Clocks:
    """Wall-clock time, and the CPU time of the thread that trains, which other processes disturb less."""
    return time.perf_counter(), time.thread_time()


def _by_hand(workload: Workload, folder: Path) -> Iterator[Clocks]:
    torch.manual_seed(0)
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for batch, (inputs, targets) in enumerate(Endless(workload.data()), 1):
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        yield _clocks()
        if batch % PERIOD == 1:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "hand.pt")


def _ours(workload: Workload, folder: Path, donate: Any) -> Iterator[Clocks]:
    torch.manual_seed(0)
    saver = CheckpointSaver(folder, interval=lambda state: state.timestamp.batch % PERIOD == 1, keep_last=1)
    stream = pl.fit(
        workload.model(),
        Endless(workload.data()),
        loss=workload.loss,
        optimizer=pl.optim.adamw(lr=1e-3),
        max_duration="1000000ba",
        batches_per_epoch=1_000_000,
        callbacks=[saver],
        donate=donate,
    )
    for event, state in stream:  # noqa: B007
        if event is pl.Event.BATCH_END:
            yield _clocks()
