"""The optimizer state as torch's state dict: a loop by hand continues a run, and a run a loop by hand, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop.optim import from_torch, load_state_dict, partition, to_state_dict
from pure_loop.random import seeded
from tests.support.problem import noise
from tests.support.scripted import AddsInTheFirstStep
from tests.support.tiers import examples

mse = nn.functional.mse_loss
BATCHES = 20
Rule = tuple[Callable[[], pl.optim.Optimizer], type[torch.optim.Optimizer], dict[str, Any]]


class Branches(nn.Module):
    """A layer that only some batches use."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5, bias=bias), nn.Linear(5, 4, bias=bias)
        self.sometimes = nn.Linear(4, 5, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if x[0, 0] > 0:
            hidden = hidden + self.sometimes(x)
        return self.last(hidden.tanh())  # type: ignore[no-any-return]


def model(bias: bool = True) -> nn.Module:
    with seeded(1):
        return Branches(bias)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = noise()
    return [(torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(BATCHES)]


def by_hand(module: nn.Module, optimizers: Any, data: list[tuple[Tensor, Tensor]]) -> Any:
    """The state dict of one of torch's optimizers, or of several, after these batches."""
    several = optimizers if isinstance(optimizers, list) else [optimizers]
    for inputs, targets in data:
        module.zero_grad()
        mse(module(inputs), targets).backward()
        for optimizer in several:
            optimizer.step()
    module.zero_grad()
    return several[0].state_dict()


def fitted(start: Any, optimizer: pl.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> pl.State:
    return pl.run(pl.fit(start, data, loss=mse, optimizer=optimizer, max_duration=f"{len(data)}ba"))


def assert_same(params: Any, module: nn.Module, **tolerance: float) -> None:
    for name, param in module.named_parameters():
        torch.testing.assert_close(params[name], param.detach(), **{"rtol": 0, "atol": 0, **tolerance})


class Grows(torch.optim.Optimizer):
    """Its group has what it learns: an option that changes, and one that it adds."""

    def __init__(self, params: Any, lr: float = 0.01, d: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": d})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] *= 1.1
            group["k"] = group.get("k", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * group["d"] / group["k"])


def ours(make: Callable[..., pl.optim.Optimizer], cls: Any, **options: Any) -> Rule:
    return lambda: make(**options), cls, {**options, "fused": True}


OURS: dict[str, Rule] = {
    "amsgrad": ours(pl.optim.adamw, torch.optim.AdamW, lr=0.02, amsgrad=True, betas=(0.8, 0.95)),
    "adam": ours(pl.optim.adam, torch.optim.Adam, lr=0.02, weight_decay=0.1, maximize=True),
    "sgd": ours(pl.optim.sgd, torch.optim.SGD, lr=0.1),
    "momentum": ours(pl.optim.sgd, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "muon": (
        lambda: pl.optim.muon(lr=0.02, adjust_lr="match_rms_adamw"),
        torch.optim.Muon,
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
    ),
}
OF_TORCH = ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adafactor", "Adadelta", "Adamax", "ASGD", "Rprop")
CLASSES = [*(getattr(torch.optim, name) for name in OF_TORCH), torch.optim.Muon, AddsInTheFirstStep, Grows]


@pytest.mark.parametrize("name", OURS)
@examples(2, 40)
@given(point=st.integers(1, BATCHES - 1))
def test_a_run_continues_a_loop_by_hand_and_the_reverse(name: str, point: int) -> None:
    check(OURS[name], point, every=name == "momentum")


@examples(8, 500)
@given(cls=st.sampled_from(CLASSES), point=st.integers(1, BATCHES - 1))
def test_so_it_is_with_classes_of_torch(cls: Any, point: int) -> None:
    check((lambda: from_torch(cls), cls, {}), point)


def check(rule: Rule, point: int, every: bool = False) -> None:
    make, cls, options = rule
    bias = cls is not torch.optim.Muon
    data, optimizer = batches(), make()
    if every:  # torch's fused SGD takes no mixture of parameters that have made a step and others
        data[0][0][0, 0] = 1.0
    module = model(bias)
    hand = cls(module.parameters(), **options)
    saved = by_hand(module, hand, data[:point])
    state = load_state_dict(pl.State.create(module), optimizer, saved)
    by_hand(module, hand, data[point:])
    assert_same(fitted(state, optimizer, data[point:]).params, module)

    state = fitted(model(bias), optimizer, data[:point])
    other = state.module()
    hand = cls(other.parameters(), lr=123.0)  # the state dict brings its options
    hand.load_state_dict(to_state_dict(state, optimizer))
    by_hand(other, hand, data[point:])
    assert_same(dict(other.named_parameters()), module)


def test_dampening_notes_which_parameters_have_begun() -> None:
    """The buffer of the first step is the gradient, undamped: also of a layer that is used for the first time later."""
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    data, optimizer = batches(), pl.optim.sgd(**options)
    point = next(number for number, (inputs, _) in enumerate(data) if inputs[0, 0] <= 0)
    data = data[point : point + 8]  # the first batch doesn't use the layer
    module = model()
    hand = torch.optim.SGD(module.parameters(), **options, foreach=True)
    saved = by_hand(module, hand, data[:1])
    state = load_state_dict(pl.State.create(module), optimizer, saved)
    assert dict(state.opt_state["started"])["sometimes.weight"] is False
    by_hand(module, hand, data[1:])
    assert_same(fitted(state, optimizer, data[1:]).params, module, rtol=1.3e-6, atol=1e-5)
    state = fitted(model(), optimizer, data[:1])
    other = state.module()
    hand = torch.optim.SGD(other.parameters())
    hand.load_state_dict(to_state_dict(state, optimizer))
    by_hand(other, hand, data[1:])
    assert_same(dict(other.named_parameters()), module, rtol=1.3e-6, atol=1e-5)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Biases first: the order of the parts, not of the model."""
    params = list(module.parameters())
    return [
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.3},
    ]


@pytest.mark.parametrize("make", [pl.optim.adamw, lambda **options: from_torch(torch.optim.AdamW, **options)])
def test_parts_are_groups_in_their_order(make: Any) -> None:
    data, fused = batches(), {"fused": True} if make is not pl.optim.adamw else {}
    optimizer = partition(
        {"biases": make(lr=0.02, weight_decay=0.0, **fused), "weights": make(lr=0.01, weight_decay=0.3, **fused)},
        label=lambda name, tensor: "biases" if tensor.ndim < 2 else "weights",
    )
    module = model()
    hand = torch.optim.AdamW(groups(module), lr=0.01, fused=True)
    saved = by_hand(module, hand, data[:7])
    state = load_state_dict(pl.State.create(module), optimizer, saved)
    by_hand(module, hand, data[7:])
    state = fitted(state, optimizer, data[7:12])
    other = state.module()
    hand = torch.optim.AdamW(groups(other))
    hand.load_state_dict(to_state_dict(state, optimizer))
    assert [group["lr"] for group in hand.param_groups] == [0.02, 0.01]
    by_hand(other, hand, data[12:])
    assert_same(dict(other.named_parameters()), module)


def test_parts_of_several_classes_are_several_state_dicts() -> None:
    data = batches()
    optimizer = partition(
        {"matrices": pl.optim.muon(lr=0.02), "rest": pl.optim.adamw(lr=0.01)},
        label=lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest",
    )
    state = fitted(model(), optimizer, data[:10])
    module = state.module()
    dicts = {label: to_state_dict(state, optimizer, part=label) for label in ("matrices", "rest")}
    again = load_state_dict(pl.State.create(module), optimizer, dicts)  # before torch's own takes its tensors
    hands = [
        torch.optim.Muon([p for p in module.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in module.parameters() if p.ndim < 2]),
    ]
    for hand, saved in zip(hands, dicts.values(), strict=True):
        hand.load_state_dict(saved)
    by_hand(module, hands, data[10:])
    assert_same(fitted(again, optimizer, data[10:]).params, module)


@pytest.mark.parametrize("every", [False, True])
def test_frozen_parameters_have_no_state_and_names_go_before_the_order(every: bool) -> None:
    """Whether a loop by hand has given them to its optimizer or not."""
    data, optimizer, module = batches(), pl.optim.adamw(lr=0.02), model()
    module.get_submodule("first").requires_grad_(False)
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    params = [p for _, p in module.named_parameters()] if every else trained[::-1]
    hand = torch.optim.AdamW(params, lr=0.02, fused=True)
    saved = by_hand(module, hand, data[:5])
    state = load_state_dict(pl.State.create(module), optimizer, saved)
    by_hand(module, hand, data[5:])
    state = fitted(state, optimizer, data[5:])
    assert_same(state.params, module)
    assert to_state_dict(state, optimizer)["param_groups"][0]["param_names"] == [name for name, _ in trained]


def test_both_sides_keep_their_tensors() -> None:
    for make, cls, _ in (OURS["amsgrad"], OURS["momentum"], (lambda: from_torch(CLASSES[3]), CLASSES[3], {})):
        data, optimizer = batches()[:7], make()
        state = fitted(model(), optimizer, data[:4])
        saved = to_state_dict(state, optimizer)
        expected = copy.deepcopy(saved)
        module = state.module()
        hand = cls(module.parameters())
        hand.load_state_dict(saved)
        loaded = load_state_dict(pl.State.create(module), optimizer, by_hand(module, hand, data[4:]))
        kept = copy.deepcopy(to_state_dict(loaded, optimizer))
        by_hand(module, hand, data[:3])
        for before, now in ((expected, to_state_dict(state, optimizer)), (kept, to_state_dict(loaded, optimizer))):
            torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


def test_rates_are_those_of_the_next_batch() -> None:
    rate = pl.schedules.linear(1.0, 0.0, "10ba")
    optimizer = pl.optim.adamw(lr=rate, weight_decay=pl.schedules.linear(0.0, 1.0, "10ba"))
    state = fitted(model(), optimizer, batches()[:4])
    (group,) = to_state_dict(state, optimizer)["param_groups"]
    assert group["lr"] == rate(state.timestamp) == 0.6
    assert group["weight_decay"] == 0.4
    scaled = state.replace(lr_scale=torch.tensor(0.5, dtype=torch.float64))
    assert to_state_dict(scaled, optimizer)["param_groups"][0]["lr"] == 0.3
    fixed = from_torch(torch.optim.RMSprop, lr=rate)
    assert to_state_dict(fitted(model(), fixed, batches()[:4]), fixed)["param_groups"][0]["lr"] == 0.6
    still = pl.optim.sgd(independent_decay=True)  # there is no decay
    assert to_state_dict(fitted(model(), still, batches()[:1]), still)["state"] == {}
