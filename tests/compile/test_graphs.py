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
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import ema, gradient_clipping
from pure_loop.compile import kernels, lowering, record
from pure_loop.compile.kernels import cut, origin
from pure_loop.compile.refusals import recurrent_layer
from pure_loop.random.seeds import derive, seeded_all
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
)
from tests.support.problem import CLASSES, FEATURES, cross_entropy, points

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


class Layer(nn.GRU):
    """The model itself is one."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x[:, None].expand(-1, 5, 4))[0][:, -1]
        return out


def test_recurrent_layers_run_eagerly_wherever_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Written out, the steps of a long sequence alone would take minutes."""
    layers = [net(packed, partial(layer, 1, 3)) for layer in (nn.GRU, nn.LSTM)]
    begin = time.process_time()
    for model in (*layers, partial(Layer, 4, 3, batch_first=True)):
        same({"model": model, "data": FIVE[:1], "max_duration": "1ba"})
    assert time.process_time() - begin < 40
    assert recurrent_layer(Layer(4, 3)) == "Layer"
    optimizer = pl.optim.sgd(lr=0.1)
    pl.explain(layers[1](), FIVE, loss=cross_entropy, optimizer=optimizer, max_duration="1ep", compile=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "forward and backward run eagerly: one is a recurrent layer" in said


# Graphs that are cut at an optimizer's kernel: what they compute, and where the cut would change it.


@pytest.fixture
def many_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 tensors are many, parameters and two averages of each: more take longer to trace, and show no more."""
    monkeypatch.setattr(kernels, "TENSORS", 12)


def deep(layers: int = 3) -> nn.Module:
    hidden = [part for _ in range(layers - 2) for part in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), *hidden, nn.Linear(FEATURES, CLASSES))


def strange() -> nn.Module:
    """Parameters that are frozen, tied and unused, and one that doesn't lie in memory as others do."""
    module = deep(5)
    module[0].weight.requires_grad_(False)
    module[3].weight = module[1].weight
    module.unused = nn.Parameter(torch.ones(2))
    module[5].weight = nn.Parameter(module[5].weight.detach().t())
    return module


PARTS = pl.optim.partition(
    {"weights": pl.optim.adamw(lr=1e-2), "rest": pl.optim.adam(lr=1e-3)},
    lambda name, tensor: "weights" if tensor.ndim > 1 else "rest",
)


@pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda state: state.params)
def before(state: pl.State) -> pl.State:
    return state.remember("before", state.params)


ZEROS = FrozenDict(sum=torch.zeros(FEATURES, FEATURES), then=torch.zeros(FEATURES * FEATURES))


@pl.algorithm(Event.BATCH_END, init=lambda state: ZEROS)
def both(state: pl.State) -> pl.State:
    """Remembers a sum, and a view of a copy of what it was before."""
    memory, weight = state.algorithm_state["both"], state.params["0.weight"]
    copy = weight.clone()
    copy.copy_(memory["sum"])
    return state.remember("both", FrozenDict(sum=memory["sum"] + weight, then=copy.view(-1)))


SIX = ("adamw of 6 tensors",)
FOUR = ("adamw of 4 tensors", "adam of 4 tensors")
# Settings, and the kernels that the last graph calls; elsewhere the optimizer is taken to pieces.
CALLED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, SIX),
    "microbatches": ({"watch": BATCHES, "microbatch_size": 3, "clip_grad": 1.0}, SIX),
    "several steps a call, and an average": ({"algorithms": [ema(half_life="3ba")], "steps_per_call": 2}, SIX),
    "two parts": ({"model": lambda: deep(4), "optimizer": PARTS}, FOUR),
    "a copy of what is written in the end": ({"algorithms": [both]}, SIX),
    "few tensors": ({"model": lambda: nn.Linear(FEATURES, CLASSES)}, ()),
    "another layout": ({"model": strange}, ()),
    "steps that may be left out": ({"nonfinite": "skip"}, ()),
    "an algorithm remembers parameters": ({"algorithms": [before]}, ()),
}


@pytest.mark.usefixtures("many_are_few")
@pytest.mark.parametrize("name", CALLED)
def test_a_list_of_many_tensors_is_one_call_and_nothing_else_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(lowering, "cut", lambda graph, places: made.append(cut(graph, places)) or made[-1])
    settings, wanted = CALLED[name]
    settings = {"model": deep, "data": FIVE[:2], "watch": EPOCHS} | settings
    steps = settings.pop("steps_per_call", 1)
    with record() as graphs:
        given = fit(compile=True, steps_per_call=steps, **settings)
    assert_close(given, fit(**settings), 1e-5)
    assert graphs[-1].kernels == wanted
    if name == "plain":  # nothing is copied that the kernel writes to
        (output,) = (node for node in made[0].first.graph.nodes if node.op == "output")
        assert not [node for node in output.args[0] if origin(node).op == "placeholder"]
