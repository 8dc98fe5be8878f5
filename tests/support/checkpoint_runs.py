"""What tests of checkpoints share: models, a run, small limits, and the errors for a file that is refused."""

from __future__ import annotations

import contextlib
import logging
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import pure_loop as pl
from pure_loop.errors import CheckpointError


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def wide() -> nn.Module:
    """Some 200 kB a checkpoint."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5000), nn.Tanh(), nn.Linear(5000, 1))


_generator = torch.Generator().manual_seed(0)
DATA = [(torch.randn(4, 2, generator=_generator), torch.zeros(4, 1)) for _ in range(4)]


def fit(start: Any, data: Any = DATA, **options: Any) -> Any:
    arguments = {
        "loss": nn.functional.mse_loss,
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9),
        "max_duration": "2ep",
        "algorithms": [pl.algorithms.ema(half_life="3ba")],
        "evaluators": {"val": DATA[:1]},
    }
    return pl.fit(start, data, **{**arguments, **options})


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


def little_memory() -> contextlib.AbstractContextManager[None]:
    """A few more megabytes than the process has by now."""
    if not Path("/proc/self/statm").exists():
        return contextlib.nullcontext()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limited(resource.RLIMIT_AS, pages * resource.getpagesize() + (64 << 20))


def refused(path: Path, **options: Any) -> str:
    """That a file is refused, by an error of ours that names it; gives the text."""
    with pytest.raises(CheckpointError) as caught:
        pl.load(path, model=small(), **options)
    assert str(path) in str(caught.value)
    return str(caught.value)


def hidden(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.startswith(".")]
