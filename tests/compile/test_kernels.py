"""Graphs that are cut at an optimizer's kernel: what they compute, and where the cut would change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import ema
from pure_loop.compile import kernels, lowering, record
from pure_loop.compile.kernels import cut, origin
from pure_loop.errors import NonFiniteError
from tests.support.compiling import BATCHES, EPOCHS, FIVE, assert_close, fit
from tests.support.problem import CLASSES, FEATURES

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
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


@pl.algorithm(Event.AFTER_TRAIN_BATCH, Event.BATCH_END, init=lambda state: torch.zeros(()), name="distance")
def distance(state: pl.State) -> pl.State:
    """Of the last weight from what it was."""
    weight = state.params["0.weight"].sum()
    memory = weight if state.event is Event.AFTER_TRAIN_BATCH else weight - state.algorithm_state["distance"]
    return state.remember("distance", memory)


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
    "what is computed from old parameters before": ({"algorithms": [distance]}, SIX),
    "a copy of what is written in the end": ({"algorithms": [both]}, SIX),
    "few tensors": ({"model": lambda: nn.Linear(FEATURES, CLASSES)}, ()),
    "another layout": ({"model": strange}, ()),
    "steps that may be left out": ({"nonfinite": "skip"}, ()),
    "an algorithm remembers parameters": ({"algorithms": [before]}, ()),
}


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


def test_an_update_that_is_not_finite_is_found() -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def spoil(state: pl.State) -> pl.State:
        last = list(state.grads)[-1]
        return state.replace(grads={**state.grads, last: state.grads[last] * float("nan")})

    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(deep, data=FIVE[:1], compile=True, algorithms=[spoil])
