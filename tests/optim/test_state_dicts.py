"""The optimizer state as torch's state dict: a loop by hand continues a run, and a run a loop by hand, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.optim import adamw, from_torch, load_state_dict, muon, partition, to_state_dict
from tests.support import problem
from tests.support.optimizing import branches, by_hand
from tests.support.scripted import Grows
from tests.support.tiers import examples

BATCHES = 20
DATA = problem.points(BATCHES)
Data = list[tuple[Tensor, Tensor]]


def fitted(start: Any, optimizer: pl.optim.Optimizer, data: Data) -> pl.State:
    return problem.run(start, data, optimizer=optimizer, max_duration=f"{len(data)}ba", strict=False)


def check(optimizer: Any, make: Any, data: Data, point: int, module: nn.Module, tolerance: float = 0.0) -> pl.State:
    """From a point on a run is the loop by hand that it continues, and the reverse. Gives the State that was loaded.

    ``make`` has torch's optimizers, with another rate: a state dict brings its options.
    """
    parts = list(optimizer.parts) if len(make(module)) > 1 else [None]
    start, hands = copy.deepcopy(module), make(module)
    by_hand(module, hands, data[:point])
    saved = {part: hand.state_dict() for part, hand in zip(parts, hands, strict=True)}
    first = load_state_dict(pl.State.create(module), optimizer, saved if len(hands) > 1 else saved[None])
    kept = {part: copy.deepcopy(to_state_dict(first, optimizer, part=part)) for part in parts}
    (*_, wanted) = by_hand(module, hands, data[point:])
    for part, each in kept.items():  # both sides keep their tensors
        torch.testing.assert_close(to_state_dict(first, optimizer, part=part)["state"], each["state"], rtol=0, atol=0)
    problem.close(fitted(first, optimizer, data[point:]).params, wanted, tolerance)

    state = fitted(start, optimizer, data[:point])
    other = state.module()
    hands = make(other)
    for part, hand in zip(parts, hands, strict=True):
        for group in hand.param_groups:
            group["lr"] = 123.0
        hand.load_state_dict(to_state_dict(state, optimizer, part=part))
    (*_, found) = by_hand(other, hands, data[point:])
    problem.close(found, wanted, tolerance)
    return first


Rule = tuple[pl.optim.Optimizer, type[torch.optim.Optimizer], dict[str, Any]]


def ours(name: str, cls: Any, **options: Any) -> Rule:
    return getattr(pl.optim, name)(**options), cls, {**options, "fused": True}


RMS: Any = "match_rms_adamw"
OURS: dict[str, Rule] = {
    "amsgrad": ours("adamw", torch.optim.AdamW, lr=0.02, amsgrad=True, betas=(0.8, 0.95)),
    "adam": ours("adam", torch.optim.Adam, lr=0.02, weight_decay=0.1, maximize=True),
    "sgd": ours("sgd", torch.optim.SGD, lr=0.1),
    "momentum": ours("sgd", torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "muon": (muon(0.02, adjust_lr=RMS), torch.optim.Muon, {"lr": 0.02, "adjust_lr_fn": RMS}),
}
OF_TORCH = ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Adadelta", "Adamax", "ASGD", "Rprop")
CLASSES = [*(getattr(torch.optim, name) for name in OF_TORCH), torch.optim.Muon, Grows]


def check_rule(rule: Rule, point: int, data: Data = DATA) -> None:
    optimizer, cls, options = rule
    module = branches(bias=cls is not torch.optim.Muon)
    check(optimizer, lambda module: [cls(module.parameters(), **options)], data, point, module)


def test_a_run_continues_a_loop_by_hand_and_the_reverse() -> None:
    for number, (name, rule) in enumerate(OURS.items()):
        # torch's fused SGD takes no mixture of parameters that have made a step and others
        used = [(x.abs(), y) for x, y in DATA[:2]] if name == "momentum" else []
        for point in (2 + number, 11):
            check_rule(rule, point, used + DATA[len(used) :])


@examples(8, 500)
@given(cls=st.sampled_from(CLASSES), point=st.integers(1, BATCHES - 1))
def test_so_it_is_with_classes_of_torch(cls: Any, point: int) -> None:
    check_rule((from_torch(cls), cls, {}), point)


def test_dampening_notes_which_parameters_have_begun() -> None:
    """The buffer of the first step is the gradient, undamped: also of a layer that is used for the first time later."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    begin = next(number for number, (inputs, _) in enumerate(DATA) if inputs[0, 0] <= 0)
    data = DATA[begin : begin + 8]  # the first batch doesn't use the layer
    make = lambda module: [torch.optim.SGD(module.parameters(), **options, foreach=True)]  # noqa: E731
    state = check(pl.optim.sgd(**options), make, data, 1, branches(), 1e-5)
    assert dict(state.opt_state["started"])["sometimes.weight"] is False


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Biases first: the order of the parts, not of the model."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.3},
    ]


def test_parts_are_groups_in_their_order_or_several_state_dicts() -> None:
    for make in (adamw, lambda **options: from_torch(torch.optim.AdamW, fused=True, **options)):
        optimizer = partition(
            {"biases": make(lr=0.02, weight_decay=0.0), "weights": make(lr=0.01, weight_decay=0.3)},
            label=lambda name, tensor: "biases" if tensor.ndim < 2 else "weights",
        )
        hand = lambda module: [torch.optim.AdamW(groups(module), lr=0.01, fused=True)]  # noqa: E731
        state = check(optimizer, hand, DATA, 7, branches())
        assert [group["lr"] for group in to_state_dict(state, optimizer)["param_groups"]] == [0.02, 0.01]
    parts = {"matrices": muon(lr=0.02), "rest": adamw(lr=0.01)}
    several = partition(parts, label=lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest")

    def hands(module: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = ([p for p in module.parameters() if (p.ndim == 2) == each] for each in (True, False))
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, fused=True)]

    check(several, hands, DATA, 10, branches())


@pytest.mark.parametrize("every", [False, True])
def test_frozen_parameters_have_no_state_and_names_go_before_the_order(every: bool) -> None:
    """Whether a loop by hand has given them to its optimizer or not."""
    optimizer, module = adamw(lr=0.02), branches()
    module.get_submodule("first").requires_grad_(False)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    hand = torch.optim.AdamW(list(module.parameters()) if every else trained[::-1], lr=0.02, fused=True)
    by_hand(module, [hand], DATA[:5])
    state = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
    (*_, wanted) = by_hand(module, [hand], DATA[5:])
    state = fitted(state, optimizer, DATA[5:])
    problem.close({name: state.params.get(name, param) for name, param in wanted.items()}, wanted, 0.0)
    assert to_state_dict(state, optimizer)["param_groups"][0]["param_names"] == [name for name, _ in trained]


def test_rates_are_those_of_the_next_batch() -> None:
    rate = pl.schedules.linear(1.0, 0.0, "10ba")
    optimizer = adamw(lr=rate, weight_decay=pl.schedules.linear(0.0, 1.0, "10ba"))
    state = fitted(branches(), optimizer, DATA[:4])
    (group,) = to_state_dict(state, optimizer)["param_groups"]
    assert group["lr"] == rate(state.timestamp) == 0.6
    assert group["weight_decay"] == 0.4
    scaled = state.replace(lr_scale=torch.tensor(0.5, dtype=torch.float64))
    assert to_state_dict(scaled, optimizer)["param_groups"][0]["lr"] == 0.3
    fixed = from_torch(torch.optim.RMSprop, lr=rate)
    assert to_state_dict(fitted(branches(), fixed, DATA[:4]), fixed)["param_groups"][0]["lr"] == 0.6
    still = pl.optim.sgd(independent_decay=True)  # there is no decay
    assert to_state_dict(fitted(branches(), still, DATA[:1]), still)["state"] == {}
