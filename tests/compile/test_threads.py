"""Compiled fits in several threads: one compiles after the other, and none waits for ever.

A fit inside ``seeded``, which has the global generators, stands beside a trace that seeds them.
"""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from tests.support import problem
from tests.support.compiling import Net

pytestmark = pytest.mark.usefixtures("interpreted")

# Seconds in which threads end on a busy machine; those that wait for each other never do.
ENDS = 120.0


def weight(seeding: Any, traced: Any = lambda: None) -> torch.Tensor:
    """After training with a forward that seeds, and that calls a function when it is traced."""

    def forward(self: Net, inputs: torch.Tensor) -> torch.Tensor:
        traced()
        with seeding(3):
            out: torch.Tensor = self.one(inputs) + torch.rand(3)
            return out

    with pl.random.seeded(0):
        model = Net(forward)
    return problem.run(model, compile=True, strict=None, watch={Event.BATCH_END}).params["one.weight"]


@pytest.mark.parametrize("seeding", [pl.random.seeded, pl.random.seeded_all])
def test_a_fit_inside_seeded_beside_a_trace_that_seeds(seeding: Any) -> None:
    tracing, waiting = threading.Event(), threading.Event()

    def traced() -> None:
        if not tracing.is_set():
            tracing.set()
            assert waiting.wait(ENDS)
            threading.Event().wait(0.5)  # until the other one waits for its turn

    def inside() -> Any:
        assert tracing.wait(ENDS)
        with pl.random.seeded(7):
            before = torch.rand(1).item()
            waiting.set()
            return weight(seeding), before, torch.rand(1).item()

    alone, state = weight(seeding), torch.get_rng_state()
    with pl.random.seeded(7):
        expected = torch.rand(2).tolist()
    with ThreadPoolExecutor(2) as pool:  # in this context graphs are not compiled
        one, other = (
            pool.submit(contextvars.copy_context().run, run) for run in (lambda: weight(seeding, traced), inside)
        )
        found, *drawn = other.result(ENDS)
        assert torch.equal(one.result(ENDS), alone)
    assert torch.equal(found, alone)
    assert drawn == expected  # what other threads drew meanwhile changes nothing
    assert torch.equal(torch.get_rng_state(), state)
