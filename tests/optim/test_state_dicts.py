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
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.optim import from_torch, load_state_dict, partition, to_state_dict
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
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Branches(bias)


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 4, generator=g), torch.randn(4, 4, generator=g)) for _ in range(BATCHES)]


def by_hand(module: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        mse(module(inputs), targets).backward()
        optimizer.step()
    optimizer.zero_grad()


def fitted(start: Any, optimizer: pl.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> pl.State:
    return pl.run(pl.fit(start, data, loss=mse, optimizer=optimizer, max_duration=f"{len(data)}ba"))


def assert_same(params: Any, module: nn.Module) -> None:
    for name, param in module.named_parameters():
        assert torch.equal(params[name], param), name


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


def of_class(cls: Any, **options: Any) -> Rule:
    return lambda: from_torch(cls, **options), cls, options


RULES: dict[str, Rule] = {
    "adamw": ours(pl.optim.adamw, torch.optim.AdamW, lr=0.02),
    "amsgrad": ours(pl.optim.adamw, torch.optim.AdamW, lr=0.02, amsgrad=True, betas=(0.8, 0.95)),
    "adam": ours(pl.optim.adam, torch.optim.Adam, lr=0.02, weight_decay=0.1, maximize=True),
    "sgd": ours(pl.optim.sgd, torch.optim.SGD, lr=0.1),
    "momentum": ours(pl.optim.sgd, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "muon": (
        lambda: pl.optim.muon(lr=0.02, adjust_lr="match_rms_adamw"),
        torch.optim.Muon,
        {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
    ),
    **{
        cls.__name__: of_class(cls)
        for cls in (
            *(torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam),
            *(torch.optim.RAdam, torch.optim.Adafactor, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD),
            *(torch.optim.Rprop, torch.optim.Muon, AddsInTheFirstStep, Grows),
        )
    },
}


@pytest.mark.parametrize("name", RULES)
@examples(2, 40)
@given(point=st.integers(1, BATCHES - 1))
def test_a_run_continues_a_loop_by_hand_and_the_reverse(name: str, point: int) -> None:
    make, cls, options = RULES[name]
    bias = cls is not torch.optim.Muon
    data, optimizer = batches(), make()
    if name == "momentum":  # torch's fused SGD takes no mixture of parameters that have made a step and others
        data[0][0][0, 0] = 1.0
    module = model(bias)
    hand = cls(module.parameters(), **options)
    by_hand(module, hand, data[:point])
    state = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
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
    data = data[point:]  # the first batch doesn't use the layer
    module = model()
    hand = torch.optim.SGD(module.parameters(), **options, foreach=True)
    by_hand(module, hand, data[:1])
    state = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
    assert dict(state.opt_state["started"])["sometimes.weight"] is False
    by_hand(module, hand, data[1:8])
    torch.testing.assert_close(dict(fitted(state, optimizer, data[1:8]).params), dict(module.named_parameters()))
    state = fitted(model(), optimizer, data[:1])
    other = state.module()
    hand = torch.optim.SGD(other.parameters())
    hand.load_state_dict(to_state_dict(state, optimizer))
    by_hand(other, hand, data[1:8])
    torch.testing.assert_close(dict(other.named_parameters()), dict(module.named_parameters()))


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Biases first: the order of the parts, not of the model."""
    named = list(module.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.3},
    ]


@pytest.mark.parametrize("make", [pl.optim.adamw, lambda **options: from_torch(torch.optim.AdamW, **options)])
def test_parts_are_groups_in_their_order(make: Any) -> None:
    data = batches()
    fused = {"fused": True} if make is not pl.optim.adamw else {}
    optimizer = partition(
        {"biases": make(lr=0.02, weight_decay=0.0, **fused), "weights": make(lr=0.01, weight_decay=0.3, **fused)},
        label=lambda name, tensor: "biases" if tensor.ndim < 2 else "weights",
    )
    module = model()
    hand = torch.optim.AdamW(groups(module), lr=0.01, fused=True)
    by_hand(module, hand, data[:7])
    state = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
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
    with pytest.raises(ArgumentError, match=r"'matrices' is torch\.optim\.Muon, .*part='matrices'"):
        to_state_dict(state, optimizer)
    with pytest.raises(ArgumentError, match=r"part='bias': partition has the parts \['matrices', 'rest'\]"):
        to_state_dict(state, optimizer, part="bias")
    plain = pl.optim.adamw()
    one = fitted(model(), plain, data[:1])
    with pytest.raises(ArgumentError, match="adamw has no parts"):
        to_state_dict(one, plain, part="rest")
    module = state.module()
    dicts = {label: to_state_dict(state, optimizer, part=label) for label in ("matrices", "rest")}
    again = load_state_dict(pl.State.create(module), optimizer, dicts)  # before torch's own takes its tensors
    hands = [
        torch.optim.Muon([p for p in module.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in module.parameters() if p.ndim < 2]),
    ]
    for hand, saved in zip(hands, dicts.values(), strict=True):
        hand.load_state_dict(saved)
    for inputs, targets in data[10:]:
        mse(module(inputs), targets).backward()
        for hand in hands:
            hand.step()
            hand.zero_grad()
    assert_same(fitted(again, optimizer, data[10:]).params, module)
    with pytest.raises(ArgumentError, match=r"'matrices' is torch\.optim\.Muon"):
        load_state_dict(again, optimizer, dicts["rest"])


@pytest.mark.parametrize("every", [False, True])
def test_frozen_parameters_have_no_state(every: bool) -> None:
    """Whether a loop by hand has given them to its optimizer or not."""
    data, optimizer, module = batches(), pl.optim.adamw(lr=0.02), model()
    module.get_submodule("first").requires_grad_(False)
    hand = torch.optim.AdamW([p for p in module.parameters() if every or p.requires_grad], lr=0.02, fused=True)
    by_hand(module, hand, data[:5])
    state = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
    by_hand(module, hand, data[5:])
    state = fitted(state, optimizer, data[5:])
    assert_same(state.params, module)
    saved = to_state_dict(state, optimizer)
    assert saved["param_groups"][0]["param_names"] == [name for name, p in module.named_parameters() if p.requires_grad]


def test_names_go_before_the_order() -> None:
    data, optimizer, module = batches(), pl.optim.adamw(lr=0.02), model()
    hand = torch.optim.AdamW(list(module.named_parameters())[::-1], lr=0.02, fused=True)
    by_hand(module, hand, data[:5])
    saved = hand.state_dict()
    state = load_state_dict(pl.State.create(module), optimizer, saved)
    del saved["param_groups"][0]["param_names"]
    with pytest.raises(ResumeError, match=r"exp_avg of parameter 'first\.weight'.*in another order. Name them"):
        load_state_dict(pl.State.create(module), optimizer, saved)
    by_hand(module, hand, data[5:])
    assert_same(fitted(state, optimizer, data[5:]).params, module)


def test_both_sides_keep_their_tensors() -> None:
    for make, cls, _ in (RULES["adamw"], RULES["momentum"], RULES["RMSprop"]):
        data, optimizer = batches(), make()
        state = fitted(model(), optimizer, data[:4])
        saved = to_state_dict(state, optimizer)
        expected = copy.deepcopy(saved)
        module = state.module()
        hand = cls(module.parameters())
        hand.load_state_dict(saved)
        by_hand(module, hand, data[4:])
        loaded = load_state_dict(pl.State.create(module), optimizer, hand.state_dict())
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


class Counts(torch.optim.SGD):
    """It keeps a number outside of its state dict."""

    calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()


class Own(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}


def test_what_has_no_state_dict_is_refused() -> None:
    data = batches()[:1]

    def written(optimizer: pl.optim.Optimizer) -> dict[str, Any]:
        return to_state_dict(fitted(model(), optimizer, data), optimizer)

    with pytest.raises(ArgumentError, match=r"no class of torch\.optim has the state of lion"):
        written(pl.optim.lion())
    with pytest.raises(ArgumentError, match=r"no class of torch\.optim has the state of lamb"):
        written(pl.optim.lamb())
    with pytest.raises(ArgumentError, match=r"no class of torch\.optim has the state of lion"):
        load_state_dict(pl.State.create(model()), pl.optim.lion(), {"state": {}, "param_groups": []})
    with pytest.raises(
        ArgumentError, match=r"adamw\(independent_decay=True\) has no counterpart in torch\.optim\.AdamW"
    ):
        written(pl.optim.adamw(independent_decay=True))
    assert written(pl.optim.sgd(independent_decay=True))["state"] == {}  # there is no decay
    with pytest.raises(ArgumentError, match=r"from_torch\(Counts\): Counts keeps calls as attributes"):
        written(from_torch(Counts))
    with pytest.raises(ArgumentError, match=r"Own has a state_dict\(\) of its own"):
        written(from_torch(Own))
    with pytest.raises(ResumeError, match="has no optimizer state yet"):
        to_state_dict(pl.State.create(model()), pl.optim.adamw())
    with pytest.raises(ResumeError, match="made by another optimizer than sgd"):
        to_state_dict(fitted(model(), pl.optim.adamw(), data), pl.optim.sgd(momentum=0.9))
    with pytest.raises(ArgumentTypeError, match=r"a State is needed, got a Branches.*State\.create"):
        to_state_dict(model(), pl.optim.adamw())  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="the optimizer that fit is given"):
        to_state_dict(pl.State.create(model()), torch.optim.AdamW)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    module = model()
    start = pl.State.create(module)

    def made(cls: Any, over: nn.Module = module, **options: Any) -> dict[str, Any]:
        hand = cls(over.parameters(), **options)
        by_hand(over, hand, batches()[:8])
        return hand.state_dict()  # type: ignore[no-any-return]

    adamw = pl.optim.adamw()
    with pytest.raises(ArgumentError, match=r"betas=\(0\.5, 0\.9\), and pl\.optim\.adamw has betas=\(0\.9, 0\.999\)"):
        load_state_dict(start, adamw, made(torch.optim.AdamW, betas=(0.5, 0.9)))
    with pytest.raises(ArgumentError, match=r"weight_decay=0\.5, and from_torch\(RMSprop\) has weight_decay=0"):
        load_state_dict(start, from_torch(torch.optim.RMSprop), made(torch.optim.RMSprop, weight_decay=0.5))
    with pytest.raises(ArgumentError, match="decoupled_weight_decay=False"):
        load_state_dict(start, adamw, made(torch.optim.Adam, weight_decay=0.01))
    with pytest.raises(ResumeError, match=r"holds \['momentum_buffer'\] for parameter .*another class than AdamW"):
        load_state_dict(start, pl.optim.adamw(weight_decay=0.0), made(torch.optim.SGD, momentum=0.9))
    with pytest.raises(ResumeError, match=r"holds \['square_avg', 'step'\] .*another class than Adagrad"):
        load_state_dict(start, from_torch(torch.optim.Adagrad), made(torch.optim.RMSprop))
    wider = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4), nn.Linear(4, 4))
    with pytest.raises(ResumeError, match=r"holds \(7, 4\) torch\.float32 as exp_avg of parameter 'first\.weight'"):
        load_state_dict(start, adamw, made(torch.optim.AdamW, wider))
    with pytest.raises(ResumeError, match=r"has 4 parameters, and 6 are trained there"):
        load_state_dict(start, adamw, made(torch.optim.AdamW, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    grouped = torch.optim.AdamW(groups(module)).state_dict()
    with pytest.raises(ResumeError, match=r"has 2 parameter groups, and adamw has 1: write pl\.optim\.partition"):
        load_state_dict(start, adamw, grouped)
    named = torch.optim.AdamW(nn.Linear(2, 2).named_parameters()).state_dict()
    with pytest.raises(ResumeError, match=r"names \['weight', 'bias'\], and the optimizer trains \['first\.weight'"):
        load_state_dict(start, adamw, named)
    with pytest.raises(ArgumentTypeError, match=r"has the keys 'state' and 'param_groups', and this one has \['model'"):
        load_state_dict(start, adamw, {"model": 1, "optimizer": 2})
    with pytest.raises(ArgumentTypeError, match="got a AdamW"):
        load_state_dict(start, adamw, torch.optim.AdamW(module.parameters()))  # type: ignore[arg-type]
    half = pl.State.create(model().bfloat16())
    with pytest.raises(ResumeError, match=r"holds \(5, 4\) torch\.float32 as exp_avg .*torch\.bfloat16"):
        load_state_dict(half, adamw, made(torch.optim.AdamW))


@pytest.mark.parametrize(
    ("state", "param_groups", "match"),
    [
        (None, [], "state is a NoneType, not a dict"),
        ({}, None, "param_groups is a NoneType, not a list"),
        ({}, [{}], r"param_groups\[0\] is no dict with a list 'params'"),
        ({}, ["lr"], r"param_groups\[0\] is no dict"),
        ({}, [{"params": 3}], r"param_groups\[0\] is no dict with a list"),
        ({0: [1]}, [{"params": [0]}], r"state\[0\] is a list, not a dict"),
    ],
)
def test_what_is_no_state_dict_is_refused(state: Any, param_groups: Any, match: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"torch_optimizer\.state_dict\(\), and here {match}"):
        load_state_dict(pl.State.create(model()), pl.optim.adamw(), {"state": state, "param_groups": param_groups})


@pytest.mark.parametrize("step", [-3.0, 1.5, float("nan"), float("inf"), [1.0, 2.0], "3", None])
def test_a_step_that_is_no_count_is_refused(step: Any) -> None:
    module, optimizer = model(), pl.optim.adamw()
    state_dict = to_state_dict(fitted(module, optimizer, batches()[:1]), optimizer)
    state_dict["state"][0]["step"] = step if step is None or isinstance(step, str) else torch.tensor(step)
    with pytest.raises(ResumeError, match=r"as step of parameter 'first\.weight', which is no count of steps"):
        load_state_dict(pl.State.create(module), optimizer, state_dict)


def test_betas_in_one_tensor_are_compared() -> None:
    module, optimizer = model(), pl.optim.adamw()
    state_dict = to_state_dict(fitted(module, optimizer, batches()[:1]), optimizer)
    state_dict["param_groups"][0]["betas"] = torch.tensor([0.5, 0.9])
    with pytest.raises(ArgumentError, match=r"and pl\.optim\.adamw has betas=\(0\.9, 0\.999\)"):
        load_state_dict(pl.State.create(module), optimizer, state_dict)
