"""Optimizers refuse at the door what they can't use, say what to write, and have written to nothing."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import schedules
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import (
    Optimizer,
    adam,
    adamw,
    evaluation_params,
    from_torch,
    kernels,
    load_state_dict,
    master_weights,
    muon,
    partition,
    sgd,
    to_state_dict,
)
from pure_loop.schedules import linear
from pure_loop.time import Timestamp
from tests.support import problem
from tests.support.optimizing import RULES, assert_same, named
from tests.support.refused import Refusal, check, rows
from tests.support.scripted import Holds

ours: Any = pl.optim
layer: Any = nn.Linear(1, 1)
reference = torch.optim.SGD([torch.zeros(1)], lr=0.1)
schedulers = torch.optim.lr_scheduler


def made_by(cls: Any, body: Callable[[Any], None], **options: Any) -> Callable[[], Any]:
    """``from_torch`` of a class whose step is this."""
    return lambda: from_torch(type("Made", (cls,), {"step": lambda self, closure=None: body(self)}), **options)


def groups_of(*groups: Any) -> type[torch.optim.Optimizer]:
    def made(self: Any, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, [{"params": params}, *groups], {})

    return type("Groups", (torch.optim.Optimizer,), {"__init__": made, "step": lambda self, closure=None: None})


class Custom:
    pass


def mark(self: Any) -> None:
    for param in self.param_groups[0]["params"]:
        param.momentum = 1


def has_a_generator(self: Any) -> None:
    self.generator = getattr(self, "generator", torch.Generator())


def needs_a_closure(self: Any) -> None:
    raise AssertionError("a closure is needed")


# What an optimizer is made of


# Ranges of numbers are asked of every optimizer in tests/architecture, by their signatures.
MADE = [
    Refusal("rate", lambda: adamw(lr=math.nan), ArgumentError, ("adamw: lr must be a finite number of at least 0",)),
    Refusal("second beta", lambda: adam(betas=(0.9, 1.0)), ArgumentError, ("adam: betas[1] must be", "less than 1")),
    Refusal("one beta", lambda: ours.adamw(betas=0.9), ArgumentTypeError, ("adamw: betas must be two numbers",)),
    Refusal("text", lambda: ours.adamw(lr="0.1"), ArgumentTypeError, ("got '0.1' of type str", "adamw(lr=3e-4), or a")),
    Refusal("class", lambda: ours.adamw(lr=schedules.cosine), ArgumentTypeError, ("lr is the class cosine; give a",)),
    Refusal("class", lambda: ours.sgd(momentum=linear), ArgumentTypeError, ("sgd: momentum is the class linear",)),
    Refusal("no timestamp", lambda: ours.sgd(lr=lambda: 0.1), ArgumentTypeError, ("called as <lambda>(timestamp)",)),
    Refusal("parameters", lambda: ours.adamw(layer.parameters()), ArgumentTypeError, ("adamw is given the",)),
    Refusal("model", lambda: ours.sgd(layer), ArgumentTypeError, ("sgd is given the parameters by fit",)),
    Refusal("rate twice", lambda: ours.adamw(layer, lr=1), ArgumentTypeError, ("adamw was given lr twice",)),
    Refusal("another name", lambda: ours.adamw(learning_rate=1), ArgumentTypeError, ("'learning_rate': write lr=1",)),
    Refusal("one of two", lambda: ours.adam(beta1=0.9), ArgumentTypeError, ("'beta1': write betas=(0.9, 0.999)",)),
    Refusal("a typo", lambda: ours.sgd(momentun=0.9), ArgumentTypeError, ("'momentun'; did you mean momentum=?",)),
    Refusal("nesterov", lambda: sgd(0.1, weight_decay=0.1, nesterov=True), ArgumentError, ("needs a momentum",)),
    Refusal("damped", lambda: sgd(0.1, 0.9, dampening=0.1, nesterov=True), ArgumentError, ("no dampening",)),
    Refusal("adjust_lr", lambda: ours.muon(adjust_lr="adamw"), ArgumentError, ("muon: adjust_lr must be",)),
    Refusal("Muon", lambda: ours.Muon, AttributeError, ("muon(lr=0.02)",)),
    Refusal("adafactor", lambda: ours.adafactor, AttributeError, ("from_torch(torch.optim.Adafactor",)),
    Refusal("StepLR", lambda: ours.sgd(lr=schedulers.StepLR), ArgumentTypeError, ("lr is torch's scheduler StepLR",)),
    Refusal(
        "a plateau",
        lambda: ours.from_torch(torch.optim.RMSprop, lr=schedulers.ReduceLROnPlateau(reference)),
        ArgumentTypeError,
        ("lr is torch's scheduler ReduceLROnPlateau", "function of", "a metric"),
    ),
    Refusal("no rate", lambda: ours.Optimizer(name="mine", init=dict, update=print, lr=0.1), ArgumentTypeError,
            ("Optimizer 'mine': lr must be a function, got 0.1",)),
    Refusal("no parts", lambda: partition({}, label=lambda name, tensor: "a"), ArgumentTypeError, ("needs a mapping",)),
    Refusal("a part", lambda: ours.partition({"a": torch.optim.SGD}, label=print), ArgumentTypeError, ("'a' must",)),
    Refusal("a label", lambda: ours.partition({"a": adamw()}, label="a"), ArgumentTypeError, ("label must be a",)),
    Refusal("copies", lambda: ours.master_weights(torch.optim.AdamW), ArgumentTypeError, ("master_weights needs",)),
    # of a class of torch's
    Refusal("LBFGS", lambda: from_torch(torch.optim.LBFGS), ArgumentError, ("LBFGS.step(closure) runs the model",)),
    Refusal("closure", made_by(torch.optim.SGD, needs_a_closure), ArgumentError, ("Error: a closure is needed",)),
    Refusal("invalid", lambda: from_torch(torch.optim.AdamW, betas=(1.5, 0.9)), ArgumentError, ("failed", "Invalid")),
    Refusal("option", lambda: from_torch(torch.optim.AdamW, learning_rate=1), ArgumentError, ("unexpected keyword",)),
    Refusal("lr", lambda: from_torch(torch.optim.AdamW, lr=-1.0), ArgumentError, ("lr must be a finite number of at",)),
    Refusal("no class", lambda: ours.from_torch(nn.Linear), ArgumentTypeError, ("subclass of torch.optim.Optimizer",)),
    Refusal("an instance", lambda: ours.from_torch(reference), ArgumentTypeError, ("give the class",)),
    Refusal("groups", lambda: from_torch(groups_of({"params": [torch.zeros(1)]})), ArgumentError,
            ("made 2 parameter groups", "partition")),
    Refusal("no option lr", lambda: from_torch(groups_of(), lr=schedules.constant(1.0)), ArgumentError, ("keyword",)),
    Refusal("marks", made_by(torch.optim.SGD, mark), ArgumentError, ("sets attributes on the parameters: momentum",)),
    Refusal("generators", made_by(torch.optim.SGD, has_a_generator), ArgumentError, ("self.generator is a torch",)),
]  # fmt: skip


@rows(MADE)
def test_what_makes_no_optimizer(refusal: Refusal) -> None:
    check(refusal)


KEPT: dict[str, tuple[Any, str, str]] = {
    "object": (lambda p: Custom(), "state", "state[param]['kept'] is a tests.optim.test_errors.Custom"),
    "object in a list": (lambda p: [Custom()], "group", "param_groups[0]['kept'][0] is a "),
    "attribute": (lambda p: Custom(), "attribute", "self.kept is a "),
    "iterator": (lambda p: itertools.count(1), "attribute", "self.kept is a itertools.count"),
    "default dict": (lambda p: collections.defaultdict(int), "state", "is a collections.defaultdict"),
    "parameter": (lambda p: p, "state", "is a parameter of the model itself"),
    "parameter's memory": (lambda p: p.data, "state", "shares memory with a parameter"),
    "keyed by parameters": (lambda p: {p: 1}, "state", "has parameters, or their id(), as keys"),
    "keyed by id": (lambda p: {id(p): 1}, "attribute", "has parameters, or their id(), as keys"),
    "sparse": (lambda p: torch.ones(2, 2).to_sparse(), "state", "layout torch.sparse_coo"),
    "generator": (lambda p: torch.Generator(), "state", "is a torch"),
}


def test_what_a_class_keeps_and_no_run_could_resume() -> None:
    for name, (make, place, says) in KEPT.items():
        call = lambda make=make, place=place: from_torch(Holds, make=make, place=place)  # noqa: E731
        check(Refusal(name, call, ArgumentError, ("from_torch(Holds): training ", "could not be resumed: ", says)))


# An update


PARAMS = FrozenDict(w=torch.ones(2, 3), b=torch.ones(3))
WRONG: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], type[Exception], str]] = {
    "shape": (
        lambda grads, state: (grads | {"w": torch.ones(3, 2)}, state),
        ArgumentError,
        "gradient of 'w' has shape (3, 2), its parameter has shape (2, 3)",
    ),
    "dtype": (
        lambda grads, state: (grads | {"w": torch.ones(2, 3).bfloat16()}, state),
        ArgumentError,
        "gradient of 'w' has dtype torch.bfloat16, its parameter has dtype torch.float32",
    ),
    "missing": (lambda grads, state: (FrozenDict(w=grads["w"]), state), ArgumentError, "missing ['b']; grads needs"),
    "unknown": (lambda grads, state: (grads | {"v": grads["b"]}, state), ArgumentError, "not a parameter ['v']"),
    "sparse": (lambda grads, state: (grads | {"w": torch.ones(2, 3).to_sparse()}, state), ArgumentError, "is sparse"),
    "another's state": (lambda grads, state: (grads, FrozenDict(other=1)), ResumeError, "another optimizer, or this o"),
    "no state": (lambda grads, state: (grads, None), ResumeError, "state.replace(opt_state=optimizer.init"),
}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    **{name: make for name, make in RULES.items() if name != "muon"},
    "momentum": lambda: sgd(momentum=0.9),
    "from_torch": lambda: from_torch(torch.optim.AdamW),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_no_update_takes_is_refused_before_anything_is_written(name: str) -> None:
    """What a kernel may be given is asked once of each rule: it would write in another tensor's memory."""
    optimizer, grads = OPTIMIZERS[name](), FrozenDict(w=torch.ones(2, 3), b=torch.ones(3))
    opt_state = optimizer.init(PARAMS)
    kept = {key: torch.clone(tensor) for key, tensor in PARAMS.items()}
    for wrong, (change, error, says) in WRONG.items():
        if name == "from_torch" and wrong in ("sparse", "another's state", "no state"):
            continue  # which fit refuses, and some classes take
        for step in (optimizer.update, optimizer.overwrite):
            given, memory = change(grads, opt_state)
            call = lambda: step(given, memory, PARAMS, Timestamp())  # type: ignore[misc]  # noqa: E731
            check(Refusal(wrong, call, error, (says,)))
    assert_same(dict(PARAMS), kept)
    assert_same(opt_state, optimizer.init(PARAMS))
    never = {"lr": lambda timestamp: math.nan}
    for make in [RULES[name]] if name in RULES else []:
        call = lambda: make(**never).overwrite(grads, opt_state, PARAMS, Timestamp())  # type: ignore[misc]  # noqa: E731
        check(Refusal("rate", call, ArgumentError, ("the learning rate must be finite", "at Timestamp(epoch=0")))
    assert_same(dict(PARAMS), kept)


def test_memory_of_another_model() -> None:
    for optimizer in (adamw(), sgd(momentum=0.9)):
        for other, says in (
            (torch.zeros(4, 3), "state of 'p0' (from another model?) has shape (4, 3), its parameter has shape (2, 3)"),
            (None, "missing ['p0'], not a parameter ['v']"),
        ):
            params = named([torch.zeros(2, 3)])
            memory = optimizer.init(FrozenDict(v=torch.zeros(2, 3)) if other is None else named([other]))
            call = lambda: optimizer.update(params, memory, params, Timestamp())  # noqa: E731
            check(Refusal("another model", call, ResumeError, (says,)))
    meta = lambda: kernels.match_layout(torch.ones(3, device="meta"), torch.ones(3), "it")  # noqa: E731
    check(Refusal("device", meta, ArgumentError, ("it has device meta, its parameter has device cpu",)))
    wrong = lambda: adamw(amsgrad=True).update(params, adamw().init(params), params, Timestamp())  # noqa: E731
    check(Refusal("other options", wrong, ResumeError, ("or this one with other options",)))


def test_a_schedule_that_gives_no_number_is_named() -> None:
    for value in (None, torch.ones(2), "0.1", [0.1]):
        for make in (adamw, lambda lr: from_torch(torch.optim.Adagrad, lr=lr)):

            def falling(timestamp: Timestamp) -> Any:
                return value

            says = "the learning rate must be a number, and falling gave", f"of type {type(value).__name__}"
            optimizer: Any = make(lr=falling)  # type: ignore[operator, call-arg]
            call = lambda: optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, Timestamp())  # noqa: E731
            check(Refusal("no number", call, ArgumentTypeError, says))


def test_a_schedule_that_leaves_the_range_is_named_with_its_batch() -> None:
    falling = linear(0.125, -0.125, "2ba")
    for make, says in (
        (lambda: sgd(0.1, momentum=falling), "sgd: momentum must be"),
        (lambda: sgd(0.1, weight_decay=falling), "sgd: weight_decay must be"),
        (lambda: adamw(betas=(falling, 0.9)), "adamw: betas[0] must be"),
    ):
        call = lambda: problem.fit(optimizer=make())  # noqa: E731
        check(Refusal(says, call, ArgumentError, (says, "got -0.125", "gave it for batch 2"), at_once=False))


def test_parameters_that_a_rule_does_not_take() -> None:
    params = named([torch.ones(2), torch.ones(3)])
    parts = partition({"a": adamw(), "b": sgd()}, label=lambda name, tensor: "c" if name == "p1" else "a")
    says = ("parameter 'p1' (shape (3,)) is 'c', and the optimizers are ['a', 'b']",)
    check(Refusal("label", lambda: parts.init(params), ArgumentError, says))
    says = ("parameter 'p0' has shape (2,)", "pl.optim.partition")
    check(Refusal("vectors", lambda: muon().init(params), ArgumentError, says))
    waves = named([torch.ones(2, 2, dtype=torch.complex64)])
    check(Refusal("complex", lambda: muon().init(waves), ArgumentError, ("matrices of real numbers",)))


# A State of another optimizer


def test_states_of_others_are_refused_by_name() -> None:
    """Another class, other options, other parameters, other shapes; inside of a partition, too."""
    wider, longer = nn.Linear(4, 5), nn.Sequential(problem.mlp(), nn.Linear(3, 3))
    for wrap in (lambda made: made, lambda made: partition({"all": made}, label=lambda name, tensor: "all")):

        def trained(made: Optimizer) -> pl.State:
            return problem.run(optimizer=wrap(made), max_duration="1ba")

        state = trained(from_torch(torch.optim.Adam))
        short = problem.run(nn.Linear(4, 3), optimizer=wrap(from_torch(torch.optim.Adam)), max_duration="1ba")
        for start, made, says in (
            (
                state,
                from_torch(torch.optim.AdamW),
                "another optimizer than from_torch(AdamW): by from_torch of 'torch.",
            ),
            (state, from_torch(torch.optim.Adam, amsgrad=True), "with other options"),
            (short.with_module(wider), from_torch(torch.optim.Adam), "a step from it fails"),
            (
                state.with_module(longer),
                from_torch(torch.optim.Adam),
                "for another model: it is that of other parameters",
            ),
            (trained(adamw()), from_torch(torch.optim.Adam), "another optimizer"),
            (state, adamw(), "another optimizer than adamw"),
        ):
            call = lambda: problem.fit(start, optimizer=wrap(made))  # noqa: E731
            check(Refusal(says, call, ResumeError, (says,)))


def test_copies_of_other_parameters_are_refused() -> None:
    half, data = problem.mlp().bfloat16(), [(x.bfloat16(), y) for x, y in problem.points(1)]
    state = problem.run(half, data, optimizer=master_weights(adamw(0.01)))
    wide = state.replace(params={name: param.float() for name, param in state.params.items()})
    plain = problem.run(half, data, optimizer=adamw(0.01))
    for start, optimizer, says in (
        (state, adamw(0.01), "another optimizer than adamw: it holds master, inner"),
        (state, master_weights(sgd(0.01, momentum=0.9)), "another optimizer than sgd"),
        (plain, master_weights(adamw(0.01)), "another optimizer than master_weights(adamw): it holds step"),
        (wide, master_weights(adamw(0.01)), "copies of other parameters than the model has in half precision"),
    ):
        check(Refusal(says, lambda: problem.fit(start, data, optimizer=optimizer), ResumeError, (says,)))
    assert repr(master_weights(sgd(0.1))).startswith("master_weights(sgd)(lr=0.1, momentum=0.0")


# State dicts


class Counts(torch.optim.SGD):
    """It keeps a number outside of its state dict."""

    calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()


class Own(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"mine": 1}


def written(optimizer: Any, made: Optimizer | None = None, **options: Any) -> Callable[[], Any]:
    """The state dict of a run with ``made``."""
    return lambda: to_state_dict(problem.run(optimizer=made or optimizer, max_duration="1ba"), optimizer, **options)


def loaded(optimizer: Optimizer, given: Any, half: bool = False) -> Callable[[], Any]:
    """``given`` makes a state dict, or is one."""
    module = problem.mlp().bfloat16() if half else problem.mlp()
    return lambda: load_state_dict(pl.State.create(module), optimizer, given() if callable(given) else given)


def by_hand(cls: Any, model: nn.Module | None = None, **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        module = problem.mlp() if model is None else model
        hand = cls(module.parameters(), **options)
        module(torch.ones(2, 4)).sum().backward()
        hand.step()
        return hand.state_dict()

    return made


def with_step(step: Any) -> Callable[[], Any]:
    def made() -> Any:
        state_dict = by_hand(torch.optim.AdamW)()
        state_dict["state"][0]["step"] = step
        return state_dict

    return made


def with_betas() -> Any:
    state_dict = by_hand(torch.optim.AdamW)()
    state_dict["param_groups"][0]["betas"] = torch.tensor([0.5, 0.9])
    return state_dict


def two_groups() -> Any:
    params = list(problem.mlp().parameters())
    return torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}]).state_dict()


def nameless() -> Any:
    named_dict = torch.optim.AdamW(list(problem.mlp().named_parameters())[::-1]).state_dict()
    hand = by_hand(torch.optim.AdamW)()
    return {"state": {3 - key: value for key, value in hand["state"].items()}, "param_groups": [
        {key: value for key, value in named_dict["param_groups"][0].items() if key != "param_names"}
    ]}  # fmt: skip


new = pl.State.create(problem.mlp())
two = partition({"matrices": muon(0.02), "rest": adamw(0.01)}, label=lambda n, p: "matrices" if p.ndim == 2 else "rest")
shorter, other_shapes = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
STATE_DICTS = [
    Refusal("lion", written(pl.optim.lion()), ArgumentError, ("no class of torch.optim has the state of lion",)),
    Refusal("copies", written(master_weights(sgd())), ArgumentError, ("has the state of master_weights",)),
    Refusal("to lion", loaded(pl.optim.lion(), {}), ArgumentError, ("no class of torch.optim has the state of lion",)),
    Refusal("independent", written(adamw(independent_decay=True)), ArgumentError, ("has no counterpart in",)),
    Refusal("counts", written(from_torch(Counts)), ArgumentError, ("Counts keeps calls as attributes",)),
    Refusal("own", written(from_torch(Own)), ArgumentError, ("Own has a state_dict() of its own",)),
    Refusal("new", lambda: to_state_dict(new, adamw()), ResumeError, ("has no optimizer state yet",)),
    Refusal("another", written(sgd(momentum=0.9), adamw()), ResumeError, ("made by another optimizer than sgd",)),
    Refusal("no State", lambda: ours.to_state_dict(layer, adamw()), ArgumentTypeError, ("got a Linear",)),
    Refusal("torch's", lambda: ours.to_state_dict(new, reference), ArgumentTypeError, ("the optimizer that fit",)),
    Refusal("several", written(two), ArgumentError, ("'matrices' is torch.optim.Muon, ", "part='matrices'")),
    Refusal("part", written(two, part="bias"), ArgumentError, ("partition has the parts ['matrices', 'rest']",)),
    Refusal("no parts", written(adamw(), part="rest"), ArgumentError, ("adamw has no parts",)),
    Refusal("one for two", loaded(two, by_hand(torch.optim.AdamW)), ArgumentError, ("'matrices' is torch.optim.Muon",)),
    Refusal("betas", loaded(adamw(), by_hand(torch.optim.AdamW, betas=(0.5, 0.9))), ArgumentError,
            ("betas=(0.5, 0.9), and pl.optim.adamw has betas=(0.9, 0.999)",)),
    Refusal("betas in a tensor", loaded(adamw(), with_betas), ArgumentError, ("has betas=(0.9, 0.999)",)),
    Refusal("decay", loaded(from_torch(torch.optim.RMSprop), by_hand(torch.optim.RMSprop, weight_decay=0.5)),
            ArgumentError, ("weight_decay=0.5, and from_torch(RMSprop) has weight_decay=0",)),
    Refusal("coupled", loaded(adamw(), by_hand(torch.optim.Adam, weight_decay=0.01)), ArgumentError,
            ("decoupled_weight_decay=False",)),
    Refusal("SGD", loaded(adamw(weight_decay=0.0), by_hand(torch.optim.SGD, momentum=0.9)), ResumeError,
            ("holds ['momentum_buffer'] for parameter ", "another class than AdamW")),
    Refusal("Adagrad", loaded(from_torch(torch.optim.Adagrad), by_hand(torch.optim.RMSprop)), ResumeError,
            ("holds ['square_avg', 'step'] ", "another class than Adagrad")),
    Refusal("shapes", loaded(adamw(), by_hand(torch.optim.AdamW, other_shapes)), ResumeError,
            ("holds (7, 4) torch.float32 as exp_avg of parameter '0.weight'",)),
    Refusal("order", loaded(adamw(), nameless), ResumeError, ("in another order. Name them",)),
    Refusal("fewer", loaded(adamw(), by_hand(torch.optim.AdamW, shorter)), ResumeError,
            ("has 2 parameters, and 4 are trained there",)),
    Refusal("groups", loaded(adamw(), two_groups), ResumeError, ("has 2 parameter groups, and adamw has 1",)),
    Refusal("names", loaded(adamw(), torch.optim.AdamW(layer.named_parameters()).state_dict()), ResumeError,
            ("names ['weight', 'bias'], and the optimizer trains ['0.weight'",)),
    Refusal("keys", loaded(adamw(), {"model": 1}), ArgumentTypeError, ("and this one has ['model'",)),
    Refusal("no dict", loaded(adamw(), reference), ArgumentTypeError, ("got a SGD",)),
    Refusal("half", loaded(adamw(), by_hand(torch.optim.AdamW), half=True), ResumeError, ("torch.bfloat16",)),
    Refusal("modes", lambda: evaluation_params(problem.run(optimizer=sgd(0.1), max_duration="1ba"), sgd(0.1)),
            ArgumentError, ("has one set of parameters", "package schedulefree")),
    Refusal("new modes", lambda: evaluation_params(new, sgd(0.1)), ResumeError, ("no optimizer state yet",)),
]  # fmt: skip


@rows(STATE_DICTS)
def test_what_is_no_state_dict_of_the_optimizer(refusal: Refusal) -> None:
    check(refusal)


def test_what_is_no_state_dict() -> None:
    for state, groups, says in (
        (None, [], "state is a NoneType, not a dict"),
        ({}, None, "param_groups is a NoneType, not a list"),
        ({}, ["lr"], "param_groups[0] is no dict"),
        ({}, [{"params": 3}], "param_groups[0] is no dict with a list"),
        ({0: [1]}, [{"params": [0]}], "state[0] is a list, not a dict"),
    ):
        call = loaded(adamw(), {"state": state, "param_groups": groups})
        check(Refusal(says, call, ArgumentTypeError, (f"torch_optimizer.state_dict(), and here {says}",)))
    for step in (torch.tensor(-3.0), torch.tensor(1.5), torch.tensor(math.inf), torch.tensor([1.0, 2.0]), "3", None):
        says = "as step of parameter '0.weight', which is no count of steps"
        check(Refusal(repr(step), loaded(adamw(), with_step(step)), ResumeError, (says,)))
