"""Graphs that are cut at an optimizer's kernel: what they compute, and where the cut would change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema
from pure_loop.compile import kernels, lowering, record
from pure_loop.compile.kernels import cut, origin
from pure_loop.errors import NonFiniteError
from pure_loop.frozendict import FrozenDict
from tests.support.models import CLASSES, FEATURES, batches
from tests.support.streams import leaves

pytestmark = pytest.mark.usefixtures("interpreted", "many_are_few")

EPOCHS = {Event.EPOCH_END}
DATA = batches((8, 8, 8), 1)


MANY = kernels.TENSORS


@pytest.fixture
def many_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tensors are many, parameters and two averages of each: more take longer to trace, and show no more."""
    monkeypatch.setattr(kernels, "TENSORS", 24)


def deep(layers: int = 5) -> nn.Module:
    with pl.random.seeded(3):
        hidden = [part for _ in range(layers - 2) for part in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), *hidden, nn.Linear(FEATURES, CLASSES))


def strange() -> nn.Module:
    """Parameters that are frozen, tied and unused, and one that doesn't lie in memory as others do."""
    module = deep()
    module[0].weight.requires_grad_(False)
    module[3].weight = module[1].weight
    module.unused = nn.Parameter(torch.ones(2))
    module[5].weight = nn.Parameter(module[5].weight.detach().t())
    return module


def fit(model: Any = deep, **settings: Any) -> list[tuple[Event, pl.State]]:
    settings = {"optimizer": pl.optim.adamw(lr=pl.schedules.linear(1e-2, 1e-3, "3ep")), "watch": EPOCHS} | settings
    return list(pl.fit(model(), settings.pop("data", DATA), loss=cross_entropy, max_duration="3ep", **settings))


def same_but_for_rounding(settings: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """Compare with eager steps; gives the kernels that graphs called."""
    with record() as made:
        given = fit(compile=True, **settings)
    settings = {name: value for name, value in settings.items() if name != "steps_per_call"}
    for (event, one), (wanted, other) in zip(given, fit(**settings), strict=True):
        assert event is wanted
        expected = leaves(other)
        for path, value in leaves(one).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, expected[path], rtol=1e-5, atol=1e-6, equal_nan=True, msg=path)
            else:
                assert value == expected[path] or value == pytest.approx(expected[path]), path
    return [(each.segment, each.kernels) for each in made]


PARTS = pl.optim.partition(
    {"weights": pl.optim.adamw(lr=1e-2), "rest": pl.optim.adam(lr=1e-3)},
    lambda name, tensor: "weights" if tensor.ndim > 1 else "rest",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"steps_per_call": 3}, marks=pytest.mark.thorough),
        {"watch": {Event.BATCH_END}, "microbatch_size": 3, "clip_grad": 1.0},
        pytest.param(
            {"optimizer": pl.optim.adam(lr=1e-2, amsgrad=True, weight_decay=0.1, maximize=True)},
            marks=pytest.mark.thorough,
        ),
        {"algorithms": [ema(half_life="3ba")], "steps_per_call": 2},
        {"watch": {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}},
    ],
    ids=["plain", "several a call", "microbatches", "amsgrad", "average", "update alone"],
)
def test_a_list_of_many_tensors_is_one_call(settings: dict[str, Any]) -> None:
    name = settings["optimizer"].name if "optimizer" in settings else "adamw"
    *_, (_, kernels) = same_but_for_rounding(settings)
    assert kernels == (f"{name} of 10 tensors",)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"algorithms": [ema(half_life="3ba")]}], ids=["plain", "average"])
def test_nothing_is_copied_that_the_kernel_writes_to(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(graph: Any, places: Any) -> Any:
        made.append(cut(graph, places))
        return made[-1]

    monkeypatch.setattr(lowering, "cut", noted)
    fit(compile=True, **settings)
    (pieces,) = made
    (output,) = (node for node in pieces.first.graph.nodes if node.op == "output")
    assert not [node for node in output.args[0] if origin(node).op == "placeholder"]


@pytest.mark.slow
def test_two_parts_are_two_calls() -> None:
    assert same_but_for_rounding({"model": lambda: deep(9), "optimizer": PARTS}) == [
        ("step", ("adamw of 9 tensors", "adam of 9 tensors"))
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("layers", "found"), [(6, ("adamw of 12 tensors",)), (5, ())])
def test_how_many_are_many(layers: int, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TENSORS", MANY)
    assert same_but_for_rounding({"model": lambda: deep(layers)}) == [("step", found)]


@pl.algorithm(Event.AFTER_TRAIN_BATCH, init=lambda state: state.params)
def before(state: pl.State) -> pl.State:
    return state.remember("before", state.params)


@pl.algorithm(Event.AFTER_TRAIN_BATCH, Event.BATCH_END, init=lambda state: torch.zeros(()), name="distance")
def distance(state: pl.State) -> pl.State:
    """Of the last weight from what it was."""
    weight = state.params["0.weight"].sum()
    memory = weight if state.event is Event.AFTER_TRAIN_BATCH else weight - state.algorithm_state["distance"]
    return state.remember("distance", memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": lambda: deep(3)},
        {"model": strange},
        pytest.param({"nonfinite": "skip"}, marks=pytest.mark.thorough),
        {"algorithms": [before]},
        pytest.param({"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9)}, marks=pytest.mark.thorough),
    ],
    ids=["few tensors", "another layout", "steps that may be left out", "an algorithm remembers", "sgd"],
)
def test_elsewhere_it_is_taken_to_pieces(settings: dict[str, Any]) -> None:
    assert {kernels for _, kernels in same_but_for_rounding(settings)} == {()}


def test_what_is_computed_from_old_parameters_before_the_step_is_no_hindrance() -> None:
    assert same_but_for_rounding({"algorithms": [distance]}) == [("step", ("adamw of 10 tensors",))]


@pl.algorithm(
    Event.BATCH_END,
    init=lambda state: FrozenDict(sum=torch.zeros(FEATURES, FEATURES), then=torch.zeros(FEATURES * FEATURES)),
    name="both",
)
def both(state: pl.State) -> pl.State:
    """Remembers a sum, and a view of a copy of what it was before."""
    memory, weight = state.algorithm_state["both"], state.params["0.weight"]
    copy = weight.clone()
    copy.copy_(memory["sum"])
    return state.remember("both", FrozenDict(sum=memory["sum"] + weight, then=copy.view(-1)))


@pytest.mark.slow
def test_a_copy_of_what_is_written_in_the_end_shows_what_was_there_before() -> None:
    assert same_but_for_rounding({"algorithms": [both]}) == [("step", ("adamw of 10 tensors",))]


@pytest.mark.slow
def test_an_update_that_is_not_finite_is_found() -> None:
    with pytest.raises(NonFiniteError, match=r"batch 0 .*optimizer's step"):
        fit(compile=True, data=[(x, y) for x, y in DATA], algorithms=[spoil])


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def spoil(state: pl.State) -> pl.State:
    last = list(state.grads)[-1]
    return state.replace(grads={**state.grads, last: state.grads[last] * float("nan")})


@pytest.mark.slow
def test_states_stay_what_they_were() -> None:
    kept = [(state, {path: tensor.clone() for path, tensor in state.params.items()}) for _, state in fit(compile=True)]
    for state, numbers in kept:
        assert all(torch.equal(state.params[name], tensor) for name, tensor in numbers.items())
