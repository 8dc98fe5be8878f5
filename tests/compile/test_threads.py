"""Compiled fits in several threads: one compiles after the other, and none waits for ever.

Tried: two plain fits; a fit inside ``seeded``, which has the global generators, beside a trace that seeds them.
Machine code was tried by hand.
"""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch

import pure_loop as pl
from pure_loop import Event

# Seconds in which threads end on a busy machine; those that wait for each other never do.
ENDS = 120.0

DATA = [(torch.ones(4, 3) * number, torch.ones(4, 2)) for number in range(4)]


class Net(torch.nn.Module):
    """A forward that seeds, and that calls a function when it is traced."""

    def __init__(self, seeding, traced=lambda: None):
        super().__init__()
        with pl.random.seeded(0):
            self.layer = torch.nn.Linear(3, 2)
        self.seeding, self.traced = seeding, traced

    def forward(self, inputs):
        self.traced()
        with self.seeding(3):
            return self.layer(inputs) + torch.rand(2)


def weight(net):
    stream = pl.fit(
        net,
        DATA,
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="2ep",
        compile=True,
        watch={Event.BATCH_END},
    )
    return pl.run(stream).params["layer.weight"]


def in_threads(*functions):
    """What each function returns, all in threads at once."""
    results = {}

    def call(number, function):
        results[number] = function()

    # In this context graphs are not compiled.
    contexts = [(contextvars.copy_context().run, (call, *item)) for item in enumerate(functions)]
    threads = [threading.Thread(target=run, args=args, daemon=True) for run, args in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDS)
    assert not any(thread.is_alive() for thread in threads), "the threads wait for each other"
    return [results[number] for number in range(len(functions))]


@pytest.mark.parametrize("seeding", [pl.random.seeded, pl.random.seeded_all])
def test_two_fits_are_those_of_one_thread(seeding):
    alone = weight(Net(seeding))
    for found in in_threads(*[lambda: weight(Net(seeding))] * 2):
        assert torch.equal(found, alone)


@pytest.mark.parametrize("seeding", [pl.random.seeded, pl.random.seeded_all])
def test_a_fit_inside_seeded_beside_a_trace_that_seeds(seeding):
    tracing, waiting = threading.Event(), threading.Event()

    def traced():
        if not tracing.is_set():
            tracing.set()
            assert waiting.wait(ENDS)
            threading.Event().wait(0.5)  # until the other one waits for its turn

    def inside():
        assert tracing.wait(ENDS)
        with pl.random.seeded(7):
            before = torch.rand(1).item()
            waiting.set()
            return weight(Net(seeding)), before, torch.rand(1).item()

    alone = weight(Net(seeding))
    state = torch.get_rng_state()
    with pl.random.seeded(7):
        expected = torch.rand(2).tolist()
    one, (other, *drawn) = in_threads(lambda: weight(Net(seeding, traced)), inside)
    assert torch.equal(one, alone)
    assert torch.equal(other, alone)
    assert drawn == expected  # what other threads drew meanwhile changes nothing
    assert torch.equal(torch.get_rng_state(), state)
