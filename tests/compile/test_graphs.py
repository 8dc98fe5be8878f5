"""How many graphs a run makes, and of what: one serves all steps that differ in numbers alone."""

from __future__ import annotations

import random
import time
from functools import partial
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
from tests.support.compiling import (
    BATCHES,
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


POSSIBLE: dict[str, Any] = {"compile": "where possible", "max_duration": "2ba"}
SIZES = points(size=(8, 8, 5))
RAGGED: dict[str, Any] = {"watch": {Event.AFTER_BACKWARD}, "max_duration": "3ba", "data": SIZES}
BEFORE = {Event.BEFORE_LOSS, Event.BEFORE_BACKWARD}
LOSS_PIECES = "BEFORE_LOSS to BEFORE_BACKWARD"
CLIPPING = [gradient_clipping("norm", 1.0)]
# Settings of a run, and what its graphs are of.
GRAPHS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "numbers that change": ({"algorithms": [anneal, count, ema(half_life="3ba")]}, ["step"]),
    "another shape or decision": ({"algorithms": [every_third], "data": SIZES[:1] * 4 + SIZES[2:]}, ["step"] * 4),
    "evaluations": ({"evaluators": points(2, 8, 2), "eval_interval": "1ba"}, ["step", "evaluation"]),
    "AFTER_LOSS": ({"watch": {Event.AFTER_LOSS}}, ["forward to loss", "update"]),
    "AFTER_FORWARD": ({"watch": {Event.AFTER_FORWARD}}, ["forward", LOSS_PIECES, "update"]),
    "two in between": ({"watch": BEFORE}, ["forward to AFTER_FORWARD", "loss to AFTER_LOSS", "update"]),
    "every event": ({"watch": None, "max_duration": "2ba"}, ["forward", "loss", "update"]),
    "batches of two sizes": (RAGGED, ["microbatch", "update", "microbatch"]),
    "where an algorithm could look": (RAGGED | {"algorithms": CLIPPING}, ["microbatch", "update"] * 2),
    "an algorithm that runs eagerly": (
        {"algorithms": [reads], "watch": BATCHES, **POSSIBLE},
        ["forward", LOSS_PIECES, "update"],
    ),
    "a loss that runs eagerly": (
        {"loss": clipped, "watch": {Event.AFTER_FORWARD, *BATCHES}, **POSSIBLE},
        ["forward", "update"],
    ),
    "a recurrent layer": (PROBLEMS["a recurrent layer"] | {"watch": BATCHES, "max_duration": "2ba"}, ["update"]),
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


def packed(self: Net, x: Tensor) -> Tensor:
    """A layer over packed sequences of up to 200 steps."""
    lengths = torch.arange(len(x)) + 193
    sequence = x.repeat(1, 50)[..., None]
    _, last = self.one(nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True, enforce_sorted=False))
    out: Tensor = self.two((last[0] if isinstance(last, tuple) else last)[0])
    return out


def functional(self: Net, x: Tensor) -> Tensor:
    settings = (False, 1, 0.0, self.training, False, False)
    weights = [self.one.weight, self.two.weight]
    found: Tensor = torch.rnn_tanh(x[None], x.new_zeros(1, len(x), 3), weights, *settings)[0][0]  # type: ignore[arg-type]
    return found


class Layer(nn.GRU):
    """The model itself is one."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x[:, None].expand(-1, 5, 4))[0][:, -1]
        return out


def test_recurrent_layers_run_eagerly_wherever_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Written out, the steps of a long sequence alone would take minutes."""
    layers = [net(packed, partial(layer, 1, 3)) for layer in (nn.GRU, nn.LSTM)]
    begin = time.process_time()
    for model in (*layers, net(functional), partial(Layer, 4, 3, batch_first=True)):
        same({"model": model, "data": FIVE[:1], "max_duration": "1ba"})
    assert time.process_time() - begin < 40
    assert recurrent_layer(Layer(4, 3)) == "Layer"
    optimizer = pl.optim.sgd(lr=0.1)
    pl.explain(layers[1](), FIVE, loss=cross_entropy, optimizer=optimizer, max_duration="1ep", compile=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "forward and backward run eagerly: one is a recurrent layer" in said
