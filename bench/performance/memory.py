"""The peak of parameters, gradients and optimizer's memory, by allocation: what torch's allocator was asked for.

A GPT of 25 million parameters on a batch of eight tokens, so that activations are a hundredth of it. torch's profiler
writes down every allocation and release; from them comes how much was alive at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.profiler import profile

from bench.performance.loops import BASE, Loop
from bench.performance.turns import Turns
from bench.performance.workloads import SCALED, SCALED_MICROBATCHES

__all__ = ["measure", "peaks"]

# A loop lets go of what it began with when it begins its second step.
FIRST, LATER = 2, 3


def measure(loops: Sequence[Loop]) -> dict[str, dict[str, float]]:
    """For each loop the peak of its first two steps, and that of the steps after them, in MB and as a ratio.

    And the latter for batches that go through in four microbatches.
    """
    found = {}
    for loop in loops:
        first, later = peaks(partial(loop.turns, SCALED))
        _, apart = peaks(partial(loop.turns, SCALED_MICROBATCHES))
        found[loop.name] = {"first_mb": first / 1e6, "mb": later / 1e6, "microbatches_mb": apart / 1e6}
    for values in found.values():
        for key in ("", "microbatches_"):
            values[f"{key}ratio"] = values[f"{key}mb"] / found[BASE][f"{key}mb"]
    return found


def peaks(begin: Callable[[], Turns], first_steps: int = FIRST) -> tuple[int, int]:
    """Bytes alive at once, at most, from the beginning of a loop: until its first steps are done, and from then on."""
    # Not torch.profiler's, which makes a Python object of each operation: checks of the first steps make many.
    with _silent(), profile(profile_memory=True) as whole:
        turns = begin()
        turns.run(first_steps)
        middle = _mark()
        turns.run(LATER)
        end = _mark()
        turns.close()
    alive, first, later, marks = 0, 0, 0, 0
    for event in sorted(_memory_events(whole), key=lambda each: each.start_ns()):
        size = event.nbytes()
        if abs(size) in (middle, end):
            marks += size > 0
            continue
        alive += size
        if marks == 0:
            first = max(first, alive)
        elif marks == 1:
            later = max(later, alive)
    assert marks == 2, marks
    return first, later


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The profiler says on the standard error, past Python's, that it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


_MARK = itertools.count(1_000_003, 64 * 1024)


def _mark() -> int:
    """An allocation of a size that occurs nowhere else; how much it was."""
    size = next(_MARK)
    torch.empty(size, dtype=torch.uint8)
    return size


def _memory_events(whole: Any) -> list[Any]:
    return [event for event in whole.kineto_results.events() if event.name() == "[memory]"]
