"""Compiled fits in several threads: one compiles after the other, and none waits for ever."""

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
from tests.support.compiling import EPOCHS, FIVE, Net, assert_close, stream

pytestmark = pytest.mark.usefixtures("interpreted")

# Seconds in which threads end on a busy machine; those that wait for each other never do.
ENDS = 120.0


def in_this_context(pool: ThreadPoolExecutor, run: Any, *arguments: Any) -> Any:
    """Whether graphs are compiled or run as they are is a variable of the context."""
    return pool.submit(contextvars.copy_context().run, run, *arguments)


def test_threads_that_compile_at_once() -> None:
    ready = threading.Barrier(3)

    def trained(seed: int, together: bool) -> list[tuple[Event, pl.State]]:
        found = []
        for event, state in stream(problem.mlp, FIVE, compile=True, seed=seed, watch={Event.EPOCH_START, *EPOCHS}):
            if together and event is Event.EPOCH_START and state.timestamp.epoch == 0:
                ready.wait(ENDS)
            found.append((event, state))
        return found

    with ThreadPoolExecutor(3) as pool:
        threads = [in_this_context(pool, trained, seed, True) for seed in range(3)]
        for seed, thread in enumerate(threads):
            assert_close(thread.result(ENDS), trained(seed, False))


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
    """The first has the global generators, which the second waits for in its trace."""
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
    with ThreadPoolExecutor(2) as pool:
        one, other = in_this_context(pool, weight, seeding, traced), in_this_context(pool, inside)
        found, *drawn = other.result(ENDS)
        assert torch.equal(one.result(ENDS), alone)
    assert torch.equal(found, alone)
    assert drawn == expected  # what other threads drew meanwhile changes nothing
    assert torch.equal(torch.get_rng_state(), state)
