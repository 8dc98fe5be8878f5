"""Runs that are killed: a process that imports everything once, and forks a child for each run.

Started by :class:`Killer`; ``python -m tests.support.killed_runs`` reads orders from its input, one JSON a line, and
answers each with one. Forking is safe here: the process has one thread.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event
from tests.support import problem
from tests.support import streams as sameness

BATCHES = 30
"""How many batches a run has, in three epochs."""


class Rows(Dataset[Any]):
    """Rows, each of which takes some seconds to load."""

    def __init__(self, seconds: float) -> None:
        (self.tensors,), self.seconds = problem.points(1, size=56), seconds

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.seconds)
        return tuple(tensor[index] for tensor in self.tensors)


def run(seen: Any, *, workers: int = 0, persistent: bool = False, seconds: float = 0.0, **options: Any) -> pl.State:
    """Train with everything that remembers something.

    Args:
        seen: told of each finished batch, and of each evaluation as it begins (True) and ends (False).
        workers, persistent: of the loaders.
        seconds: how long each row of a batch takes to load.
        **options: of ``fit``.
    """
    data = Rows(seconds)
    shared: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    stream = problem.fit(
        problem.noisy(),
        DataLoader(data, batch_size=6, shuffle=True, **shared),
        [pl.algorithms.sam(rho=0.05, interval=2), pl.algorithms.ema(half_life="4ba")],
        optimizer=pl.optim.sgd(lr=pl.schedules.cosine("1dur", peak=0.1, warmup="3ba"), momentum=0.9, nesterov=True),
        max_duration="3ep",
        seed=3,
        strict=False,
        evaluators={"val": pl.Evaluator(DataLoader(data, batch_size=28, **shared), interval="7ba")},
        **options,
    )
    for event, state in stream:
        if event in (Event.BATCH_END, Event.EVAL_BEFORE_ALL, Event.EVAL_AFTER_ALL):
            seen(state.timestamp.batch, event is Event.EVAL_BEFORE_ALL)
    assert state.timestamp.batch == BATCHES
    return state


def digest(state: pl.State) -> str:
    """Of all leaves of a State, wall-clock seconds excepted."""
    found = hashlib.sha256()
    for path, leaf in sorted(sameness.leaves(state).items()):
        value = leaf
        if isinstance(leaf, torch.Tensor):
            value = (str(leaf.dtype), tuple(leaf.shape), leaf.contiguous().view(-1).view(torch.uint8).tolist())
        found.update(repr((path, value)).encode())
    return found.hexdigest()


DEFAULTS: dict[str, Any] = dict.fromkeys(("after", "batch", "rename", "evaluation", "twice", "group"), 0)
DEFAULTS |= {"kill": None, "saver": None}


class Killer:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        command, root = [sys.executable, "-m", "tests.support.killed_runs"], Path(__file__).parents[2]
        pipe: Any = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root)

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)

    def __call__(self, **order: Any) -> dict[str, Any]:
        """Run in a child, and end it.

        Args:
            kill: the signal that it is sent; None: it runs to its end.
            after: seconds from its start, or from the end of that batch, to the signal.
            batch: the signal is sent when it has finished this batch.
            rename: after that batch the process kills itself just before its n-th rename, inside a save; 0: it doesn't.
            evaluation: and when it evaluates after that.
            twice: send the signal again at once.
            group: to its whole group, workers included, as Ctrl-C is sent; or to the process alone.
            saver: arguments of a CheckpointSaver, if there is one.
            **order: other options are of :func:`run`.

        Returns:
            ``how``: as which exception or with which signal it ended, or "end". ``batch``: the last batch that it
            finished, in the whole run. ``state``: the digest of its last State, if it came to its end. ``stderr``: what
            it wrote there.
        """
        options = {name: value for name, value in order.items() if name not in DEFAULTS}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**DEFAULTS, **order, "options": options}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def _ending(error: BaseException) -> dict[str, Any]:
    return {"how": type(error).__name__, "code": getattr(error, "code", None), "text": str(error)}


def _child(order: dict[str, Any], seen: mmap.mmap, answer: int) -> None:
    before, options = _handlers(), order["options"]
    if order["saver"] is not None:
        options["callbacks"] = [pl.callbacks.CheckpointSaver(**order["saver"])]

    def count(batch: int, evaluates: bool) -> None:
        seen[:5] = batch.to_bytes(4, "little") + bytes([evaluates])

    renames = 0

    def kill_at_rename(event: str, _: object) -> None:
        nonlocal renames
        if event == "os.rename" and int.from_bytes(seen[:4], "little") >= order["batch"]:
            renames += 1
            if renames == order["rename"]:
                os.kill(os.getpid(), order["kill"])

    if order["rename"]:
        sys.addaudithook(kill_at_rename)
    told: dict[str, Any]
    try:
        told = {"how": "end", "state": digest(run(count, **options))}
    except BaseException as error:
        told = _ending(error)
    told["handlers"] = _handlers() == before
    os.write(answer, json.dumps(told).encode())


def _obey(order: dict[str, Any], seen: mmap.mmap) -> dict[str, Any]:
    seen[:5] = bytes(5)
    answer, to = os.pipe()
    with tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            try:
                os.close(answer)
                os.setsid()
                os.dup2(stderr.fileno(), 2)
                _child(order, seen, to)
            except BaseException as error:
                # The second of two signals, which came while the child told how the first one had ended it.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                os.write(to, json.dumps({**_ending(error), "handlers": True}).encode())
            finally:
                os._exit(0)
        os.close(to)
        status = None if order["kill"] is None or order["rename"] else _send(order, seen, child)
        with open(answer, "rb") as file:
            text = file.read()  # to its end: workers have it open as well
        status = os.waitpid(child, 0)[1] if status is None else status
        stderr.seek(0)
        said = stderr.read().decode(errors="replace")
    if not text:
        told = {"how": signal.Signals(os.WTERMSIG(status)).name}
    else:  # of two answers the first
        told = json.JSONDecoder().raw_decode(text.decode())[0]
    return {**told, "batch": int.from_bytes(seen[:4], "little"), "stderr": said}


def _send(order: dict[str, Any], seen: mmap.mmap, child: int) -> int | None:
    """Send the signal at its moment; gives the status of the child, if it ended before."""
    deadline, status = time.monotonic() + 120, None
    while os.getpgid(child) != child:
        time.sleep(0.0002)
    while status is None and time.monotonic() < deadline:
        if int.from_bytes(seen[:4], "little") >= order["batch"] and seen[4] >= order["evaluation"]:
            break
        time.sleep(0.0002)
        status = _ended(child)
    time.sleep(order["after"])
    status = _ended(child) if status is None else status
    for _ in range(1 + order["twice"]):
        if status is None:
            (os.killpg if order["group"] else os.kill)(child, order["kill"])
            time.sleep(0.002 * order["twice"])
    return status


def _ended(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return status if pid else None


def main() -> None:
    torch.set_num_threads(1)
    # Save, load and train once, so that children don't import what is imported late each for itself.
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            run(lambda *_: None, autoresume=folder)
    assert threading.active_count() == 1
    seen = mmap.mmap(-1, 5)
    for line in sys.stdin:
        print(json.dumps(_obey(json.loads(line), seen)), flush=True)


if __name__ == "__main__":
    main()
