"""How many graphs a run makes, and of what: one serves all steps that differ in numbers alone."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from threading import Barrier
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema, gradient_clipping
from pure_loop.compile import record
from pure_loop.compile.refusals import recurrent_layer
from pure_loop.random.seeds import derive, seeded_all
from tests.support import problem
from tests.support.compiling import (
    BATCHES,
    EPOCHS,
    FIVE,
    PROBLEMS,
    SHORT,
    Net,
    anneal,
    assert_close,
    every_third,
    fit,
    net,
    same,
    stream,
)
from tests.support.problem import cross_entropy, points

pytestmark = pytest.mark.usefixtures("interpreted")


@pl.algorithm(Event.BATCH_END, init=lambda state: 0)
def count(state: pl.State) -> pl.State:
    return state.remember("count", state.algorithm_state["count"] + 1)


@pl.algorithm(Event.AFTER_FORWARD)
def reads(state: pl.State) -> pl.State:
    return state.replace(outputs=state.outputs * (1 + (state.outputs.max().item() > 0)))


def clipped(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = cross_entropy(outputs, targets)
    return loss if loss.item() < 100 else loss / 2


@pl.algorithm(Event.BATCH_END, init=lambda state: torch.zeros(3))
def by_the_epoch(state: pl.State) -> pl.State:
    with seeded_all(derive(state.seed, "x", state.timestamp.epoch)):
        return state.remember("by_the_epoch", torch.rand(3) + random.random() + numpy.random.rand())


RAGGED: dict[str, Any] = {"watch": {Event.AFTER_BACKWARD}, "max_duration": "3ba"}
BEFORE = {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD}
EVALUATORS = {"evaluators": points(2, 8, 2), "eval_interval": "1ba"}
# Settings of a run, and what its graphs are of.
GRAPHS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "numbers that change": ({"algorithms": [anneal, count, ema(half_life="3ba")]}, ["step"]),
    "another shape, and another decision": (
        {"algorithms": [every_third], "data": points(size=(8, 8, 8, 8, 5), seed=1)},
        ["step"] * 4,
    ),
    "evaluations": (EVALUATORS, ["step", "evaluation"]),
    "AFTER_LOSS": ({"watch": {Event.AFTER_LOSS}}, ["forward to loss", "update"]),
    "AFTER_FORWARD": ({"watch": {Event.AFTER_FORWARD}}, ["forward", "BEFORE_LOSS to BEFORE_BACKWARD", "update"]),
    "two in between": ({"watch": BEFORE}, ["forward to AFTER_FORWARD", "loss to AFTER_LOSS", "update"]),
    "every event": ({"watch": None, "max_duration": "2ba"}, ["forward", "loss", "update"]),
    "batches of two sizes": (RAGGED | {"data": points(size=(8, 8, 5))}, ["microbatch", "update", "microbatch"]),
    "where an algorithm could look": (
        RAGGED | {"data": points(size=(8, 8, 5)), "algorithms": [gradient_clipping("norm", 1.0)]},
        ["microbatch", "update"] * 2,
    ),
    "an algorithm that runs eagerly": (
        {"algorithms": [reads], "watch": BATCHES, "compile": "where possible"},
        ["forward", "BEFORE_LOSS to BEFORE_BACKWARD", "update"],
    ),
    "a loss that runs eagerly": (
        {"loss": clipped, "watch": {Event.AFTER_FORWARD, *BATCHES}, "compile": "where possible"},
        ["forward", "update"],
    ),
    "a recurrent layer": (PROBLEMS["a recurrent layer"] | {"watch": BATCHES}, ["update"]),
    "a cell": (PROBLEMS["a cell"], ["step"]),
    "Python's and NumPy's draws by the epoch": ({"algorithms": [by_the_epoch]}, ["step"] * 2),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_run_makes_no_other_graphs(name: str) -> None:
    settings, segments = GRAPHS[name]
    with record() as made:
        given = {"compile": True} | SHORT | settings
        found = fit(**given)
    assert_close(found, fit(**given | {"compile": False}))
    assert [each.segment for each in made] == segments
    if name.startswith("another"):
        assert [each.number for each in made] == [1, 2, 3, 4]
        assert "every_third" in made[1].reason
        assert "shapes" in made[2].reason


# Recurrent layers run eagerly.


def words(layer: Any, steps: int = 6) -> Any:
    """A layer over packed sequences."""

    def forward(self: Net, x: Tensor) -> Tensor:
        sequence = x.repeat(1, -(-steps // x.shape[1]))[:, :steps, None]
        lengths = torch.arange(len(x)) % steps + 1
        packed = nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False)
        _, last = self.one(packed)
        out: Tensor = self.two((last[0] if isinstance(last, tuple) else last)[0])
        return out

    return net(forward, partial(layer, 1, 3))


def test_long_packed_sequences_take_no_longer_to_compile() -> None:
    for layer in (nn.GRU, nn.LSTM):
        begin = time.process_time()
        same({"model": words(layer, 200), "data": points(2, (8, 5), 1)})
        assert time.process_time() - begin < 20  # written out, its steps alone take minutes


def test_a_layer_that_a_function_calls_or_that_is_the_model_runs_eagerly_too(capsys: Any) -> None:
    def functional(self: Net, x: Tensor) -> Tensor:
        weights = [self.one.weight, self.two.weight]
        settings = (False, 1, 0.0, self.training, False, False)
        found: Tensor = torch.rnn_tanh(x[None], x.new_zeros(1, len(x), 3), weights, *settings)[0][0]
        return found

    class Layer(nn.GRU):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x[:, None].expand(-1, 5, 4))[0][:, -1]
            return out

    for model in (net(functional), partial(Layer, 4, 3, batch_first=True)):
        same({"model": model})
    assert recurrent_layer(Layer(4, 3)) == "Layer"
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    pl.explain(words(nn.LSTM)(), FIVE, compile=True, **settings)
    said = " ".join(capsys.readouterr().out.split())
    assert "forward and backward run eagerly: one is a recurrent layer" in said


# Threads.


def test_threads_that_compile_at_once() -> None:
    seeds = range(3)
    ready = Barrier(len(seeds))

    def trained(seed: int, *, together: bool) -> list[tuple[Event, pl.State]]:
        found = []
        for event, state in stream(problem.mlp, FIVE, compile=True, seed=seed, watch={Event.EPOCH_START, *EPOCHS}):
            if together and event is Event.EPOCH_START and state.timestamp.epoch == 0:
                ready.wait(60)
            found.append((event, state))
        return found

    with ThreadPoolExecutor(len(seeds)) as pool:
        # Whether graphs are compiled or run as they are is a variable of the context.
        threads = [pool.submit(copy_context().run, trained, seed, together=True) for seed in seeds]
        for seed, thread in zip(seeds, threads, strict=True):
            assert_close(thread.result(), trained(seed, together=False))
