"""What tests of checkpoints share: a run, its folder, small limits, and the errors for a file that is refused."""

from __future__ import annotations

import contextlib
import functools
import logging
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CheckpointError
from tests.support import problem

DATA = problem.points(4)
small = problem.noisy


def wide() -> nn.Module:
    """Some 200 kB a checkpoint."""
    with pl.random.seeded(0):
        return nn.Sequential(nn.Linear(problem.FEATURES, 5000), nn.Tanh(), nn.Linear(5000, problem.CLASSES))


def fit(start: Any = None, **options: Any) -> pl.Stream:
    """Two epochs of four batches, with a momentum, an average, an evaluation, and the clock of the machine."""
    settings = {
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9),
        "algorithms": [pl.algorithms.ema(half_life="3ba")],
        "evaluators": {"val": DATA[:1]},
        "strict": False,
        "clock": time.monotonic,
        "data": DATA,
        **options,
    }
    return problem.fit(small() if start is None else start, **settings)


@functools.cache
def trained() -> pl.State:
    """The last State of that run."""
    return pl.run(fit())


def state_at(batch: int = 0, epoch: int = 0, position: Event | None = None, seed: int = 0, **fields: Any) -> pl.State:
    """A State that has finished so much."""
    now = pl.Timestamp(batch=batch, epoch=epoch, sample=4 * batch, **fields)
    return pl.State.create(small(), seed=seed).replace(timestamp=now, event=position, position=position)


@contextlib.contextmanager
def place(kind: str) -> Iterator[str]:
    """A folder that isn't there yet: ``"local"``, or by fsspec ``"file"`` or ``"memory"``."""
    with tempfile.TemporaryDirectory() as made:
        try:
            yield {"local": f"{made}/run", "file": f"file://{made}/run", "memory": f"memory://{made}/run"}[kind]
        finally:
            MemoryFileSystem.store.clear()
            MemoryFileSystem.pseudo_dirs[:] = [""]


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What is said to the log of checkpoints."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pure_loop.checkpoint")
    log.addHandler(handler)
    before, log.propagate = log.propagate, False
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.propagate = before


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def little_memory(more: int = 64 << 20) -> contextlib.AbstractContextManager[None]:
    """So many more bytes than the process has by now."""
    if not Path("/proc/self/statm").exists():
        return contextlib.nullcontext()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limited(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def refused(path: Path, **options: Any) -> str:
    """That a file is refused, by an error of ours that names it; gives the text."""
    with pytest.raises(CheckpointError) as caught:
        pl.load(path, **{"model": small(), **options})
    assert str(path) in str(caught.value)
    return str(caught.value)


def names(folder: Any, hidden: bool = False) -> list[str]:
    """What is in a folder, but for links; or of it what is hidden."""
    found = sorted(path.name for path in Path(folder).iterdir() if not path.is_symlink())
    return [name for name in found if name.startswith(".")] if hidden else found
