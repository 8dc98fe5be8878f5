"""Optimizers refuse at the door what they can't use, say what to write, and have written to nothing."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import schedules
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, kernels, master_weights, muon, partition, sgd
from pure_loop.schedules import linear
from pure_loop.time import Timestamp
from tests.support import optimizing, problem
from tests.support.optimizing import RULES, assert_same, named
from tests.support.refused import Refusal, check
from tests.support.scripted import Holds

ours: Any = pl.optim
layer: Any = nn.Linear(1, 1)
torchs: Any = torch.optim
reference = torch.optim.SGD([torch.zeros(1)], lr=0.1)
plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(reference)
Row = tuple[Any, ...]
"""What makes the mistake, and what the error says."""


def refused(error: type[Exception], *rows: Row, at_once: bool = True) -> None:
    for call, *says in rows:
        check(Refusal(says[0], call, error, tuple(says), at_once))


def made_by(body: Callable[[Any], None]) -> Any:
    """``from_torch`` of a class whose step is this."""
    return from_torch(type("Made", (torch.optim.SGD,), {"step": lambda self, closure=None: body(self)}))


def groups_of(*groups: Any) -> type[torch.optim.Optimizer]:
    def made(self: Any, params: Any) -> None:
        torch.optim.Optimizer.__init__(self, [{"params": params}, *groups], {})

    return type("Groups", (torch.optim.Optimizer,), {"__init__": made, "step": lambda self, closure=None: None})


def mark(self: Any) -> None:
    self.param_groups[0]["params"][0].momentum = 1


def needs_a_closure(self: Any) -> None:
    raise AssertionError("a closure is needed")


def test_what_makes_no_optimizer() -> None:
    """Ranges of numbers are asked of every optimizer in tests/architecture, by their signatures."""
    refused(
        ArgumentError,
        (lambda: adamw(lr=math.nan), "adamw: lr must be a finite number of at least 0"),
        (lambda: adam(betas=(0.9, 1.0)), "adam: betas[1] must be", "less than 1"),
        (lambda: sgd(0.1, weight_decay=0.1, nesterov=True), "needs a momentum"),
        (lambda: sgd(0.1, 0.9, dampening=0.1, nesterov=True), "no dampening"),
        (lambda: ours.muon(adjust_lr="adamw"), "muon: adjust_lr must be"),
        (lambda: from_torch(torchs.LBFGS), "LBFGS.step(closure) runs the model"),
        (lambda: made_by(needs_a_closure), "Error: a closure is needed"),
        (lambda: from_torch(torchs.AdamW, betas=(1.5, 0.9)), "failed", "Invalid"),
        (lambda: from_torch(torchs.AdamW, learning_rate=1), "unexpected keyword"),
        (lambda: from_torch(groups_of({"params": [torch.zeros(1)]})), "made 2 parameter groups"),
        (lambda: from_torch(groups_of(), lr=schedules.constant(1.0)), "keyword"),
        (lambda: made_by(mark), "sets attributes on the parameters: momentum"),
        (lambda: made_by(lambda self: setattr(self, "g", torch.Generator())), "self.g is a torch"),
    )
    refused(
        ArgumentTypeError,
        (lambda: ours.adamw(betas=0.9), "adamw: betas must be two numbers"),
        (lambda: ours.adamw(lr="0.1"), "got '0.1' of type str", "adamw(lr=3e-4), or a"),
        (lambda: ours.adamw(lr=schedules.cosine), "lr is the class cosine; give a"),
        (lambda: ours.sgd(lr=lambda: 0.1), "called as <lambda>(timestamp)"),
        (lambda: ours.sgd(layer), "sgd is given the parameters by fit"),
        (lambda: ours.adamw(layer, lr=1), "adamw was given lr twice"),
        (lambda: ours.adamw(learning_rate=1), "'learning_rate': write lr=1"),
        (lambda: ours.adam(beta1=0.9), "'beta1': write betas=(0.9, 0.999)"),
        (lambda: ours.sgd(momentun=0.9), "'momentun'; did you mean momentum=?"),
        (lambda: ours.sgd(lr=torchs.lr_scheduler.StepLR), "lr is torch's scheduler StepLR"),
        (lambda: from_torch(torchs.RMSprop, lr=plateau), "lr is torch's scheduler ReduceLROnPlateau", "a metric"),
        (lambda: ours.Optimizer(name="mine", init=dict, update=print, lr=1), "lr must be a function"),
        (lambda: partition({}, label=lambda name, tensor: "a"), "needs a mapping"),
        (lambda: ours.partition({"a": torchs.SGD}, label=print), "'a' must"),
        (lambda: ours.partition({"a": adamw()}, label="a"), "label must be a"),
        (lambda: ours.master_weights(torchs.AdamW), "master_weights needs"),
        (lambda: ours.from_torch(nn.Linear), "subclass of torch.optim.Optimizer"),
        (lambda: ours.from_torch(reference), "give the class"),
    )
    refused(
        AttributeError,
        (lambda: ours.Muon, "muon(lr=0.02)"),
        (lambda: ours.adafactor, "from_torch(torch.optim.Adafactor"),
    )


class Custom:
    pass


KEPT: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda p: Custom(), "state", "state[param]['kept'] is a tests.optim.test_errors.Custom"),
    (lambda p: [Custom()], "group", "param_groups[0]['kept'][0] is a "),
    (lambda p: Custom(), "attribute", "self.kept is a "),
    (lambda p: itertools.count(1), "attribute", "self.kept is a itertools.count"),
    (lambda p: collections.defaultdict(int), "state", "is a collections.defaultdict"),
    (lambda p: p, "state", "is a parameter of the model itself"),
    (lambda p: p.data, "state", "shares memory with a parameter"),
    (lambda p: {p: 1}, "state", "has parameters, or their id(), as keys"),
    (lambda p: {id(p): 1}, "attribute", "has parameters, or their id(), as keys"),
    (lambda p: torch.ones(2, 2).to_sparse(), "state", "layout torch.sparse_coo"),
    (lambda p: torch.Generator(), "state", "is a torch"),
]


def test_what_a_class_keeps_and_no_run_could_resume() -> None:
    for make, place, says in KEPT:
        call = lambda: from_torch(Holds, make=make, place=place)  # noqa: E731
        refused(ArgumentError, (call, says, "from_torch(Holds): training ", "could not be resumed: "))


# An update


PARAMS = FrozenDict(w=torch.ones(2, 3), b=torch.ones(3))
GRADS, HALF = FrozenDict(PARAMS), "gradient of 'w' has dtype torch.bfloat16, its parameter has dtype torch.float32"
WRONG: list[tuple[Any, str]] = [
    (GRADS | {"w": torch.ones(3, 2)}, "gradient of 'w' has shape (3, 2), its parameter has shape (2, 3)"),
    (GRADS | {"w": torch.ones(2, 3).bfloat16()}, HALF),
    (FrozenDict(w=GRADS["w"]), "missing ['b']; grads needs"),
    (GRADS | {"v": GRADS["b"]}, "not a parameter ['v']"),
]
SPARSE = GRADS | {"w": torch.ones(2, 3).to_sparse()}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    **{name: make for name, make in RULES.items() if name != "muon"},
    "momentum": lambda: sgd(momentum=0.9),
    "from_torch": lambda: from_torch(torch.optim.AdamW),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_no_update_takes_is_refused_before_anything_is_written(name: str) -> None:
    """What a kernel may be given is asked once of each rule: it would write in another tensor's memory."""
    optimizer = OPTIMIZERS[name]()
    opt_state, kept = optimizer.init(PARAMS), {key: tensor.clone() for key, tensor in PARAMS.items()}
    for step in (optimizer.update, optimizer.overwrite):

        def row(grads: Any, memory: Any, says: str) -> Row:
            return lambda: step(grads, memory, PARAMS, Timestamp()), says  # type: ignore[misc]

        refused(ArgumentError, *(row(grads, opt_state, says) for grads, says in WRONG))
        if name != "from_torch":  # which fit refuses, and some classes take
            refused(ArgumentError, row(SPARSE, opt_state, "is sparse"))
            refused(ResumeError, row(GRADS, FrozenDict(other=1), "another optimizer, or this o"))
            refused(ResumeError, row(GRADS, None, "state.replace(opt_state=optimizer.init"))
    assert_same(opt_state, optimizer.init(PARAMS))
    if name in RULES:
        never: Any = RULES[name](lr=lambda timestamp: math.nan)
        call = lambda: never.overwrite(GRADS, opt_state, PARAMS, Timestamp())  # noqa: E731
        refused(ArgumentError, (call, "the learning rate must be finite", "at Timestamp(epoch=0"))
    assert_same(dict(PARAMS), kept)


def test_memory_of_another_model_and_parameters_that_a_rule_does_not_take() -> None:
    params = named([torch.zeros(2, 3), torch.ones(3)])
    other = "state of 'p0' (from another model?) has shape (4, 3), its parameter has shape (2, 3)"
    for optimizer in (adamw(), sgd(momentum=0.9)):
        for memory, says in (
            (named([torch.zeros(4, 3), torch.ones(3)]), other),
            (FrozenDict(v=torch.zeros(2, 3), p1=torch.ones(3)), "missing ['p0'], not a parameter ['v']"),
        ):
            call = lambda: optimizer.update(params, optimizer.init(memory), params, Timestamp())  # noqa: E731
            refused(ResumeError, (call, says))
    parts = partition({"a": adamw(), "b": sgd()}, label=lambda name, tensor: "c" if name == "p1" else "a")
    waves, meta = named([torch.ones(2, 2, dtype=torch.complex64)]), torch.ones(3, device="meta")
    wrong = lambda: adamw(amsgrad=True).update(params, adamw().init(params), params, Timestamp())  # noqa: E731
    refused(ResumeError, (wrong, "or this one with other options"))
    refused(
        ArgumentError,
        (lambda: kernels.match_layout(meta, torch.ones(3), "it"), "it has device meta, its parameter has d"),
        (lambda: parts.init(params), "parameter 'p1' (shape (3,)) is 'c', and the optimizers are ['a', 'b']"),
        (lambda: muon().init(params), "parameter 'p1' has shape (3,)", "pl.optim.partition"),
        (lambda: muon().init(waves), "matrices of real numbers"),
    )


def test_a_schedule_that_gives_no_number_or_leaves_the_range_is_named() -> None:
    makes: list[Any] = [adamw, lambda lr: from_torch(torch.optim.Adagrad, lr=lr)]
    for value, make in itertools.product((None, torch.ones(2), "0.1", [0.1]), makes):

        def falling(timestamp: Timestamp) -> Any:
            return value

        optimizer = make(falling)
        call = lambda: optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, Timestamp())  # noqa: E731
        says = "the learning rate must be a number, and falling gave", f"of type {type(value).__name__}"
        refused(ArgumentTypeError, (call, *says))
    down = linear(0.125, -0.125, "2ba")
    for scheduled, says_so in (
        (sgd(0.1, momentum=down), "sgd: momentum must be"),
        (sgd(0.1, weight_decay=down), "sgd: weight_decay must be"),
        (adamw(betas=(down, 0.9)), "adamw: betas[0] must be"),
    ):
        call = lambda: problem.fit(optimizer=scheduled)  # noqa: E731
        refused(ArgumentError, (call, says_so, "got -0.125", "gave it for batch 2"), at_once=False)


# A State of another optimizer


def test_states_of_others_are_refused_by_name() -> None:
    """Another class, other options, other parameters, other shapes; inside of a partition, too."""
    wider, longer = nn.Linear(4, 5), nn.Sequential(problem.mlp(), nn.Linear(3, 3))
    of_adam = from_torch(torchs.Adam)
    for wrap in (lambda made: made, lambda made: partition({"all": made}, label=lambda name, tensor: "all")):

        def row(start: pl.State, made: Optimizer, *says: str) -> Row:
            return lambda: problem.fit(start, optimizer=wrap(made)), *says

        state, other = (problem.run(optimizer=wrap(made), max_duration="1ba") for made in (of_adam, adamw()))
        short = problem.run(nn.Linear(4, 3), optimizer=wrap(of_adam), max_duration="1ba")
        refused(
            ResumeError,
            row(state, from_torch(torchs.AdamW), "another optimizer than from_torch(AdamW): by from_torch of 'torch."),
            row(state, from_torch(torchs.Adam, amsgrad=True), "with other options"),
            row(short.with_module(wider), of_adam, "['exp_avg'] is (3, 4) float32, and from_torch(Adam) needs (5, 4)"),
            row(state.with_module(longer), of_adam, "for another model: it is that of other parameters"),
            row(other, of_adam, "another optimizer"),
            row(state, adamw(), "another optimizer than adamw"),
        )


def test_copies_of_other_parameters_are_refused() -> None:
    half, data = problem.mlp().bfloat16(), [(x.bfloat16(), y) for x, y in problem.points(1)]
    copies, plain = (problem.run(half, data, optimizer=made) for made in (master_weights(adamw(0.01)), adamw(0.01)))
    wide = copies.replace(params={name: param.float() for name, param in copies.params.items()})

    def row(start: pl.State, made: Optimizer, says: str) -> Row:
        return lambda: problem.fit(start, data, optimizer=made), says

    refused(
        ResumeError,
        row(copies, adamw(0.01), "another optimizer than adamw: it holds master, inner"),
        row(copies, master_weights(sgd(0.01, momentum=0.9)), "another optimizer than sgd"),
        row(plain, master_weights(adamw(0.01)), "another optimizer than master_weights(adamw): it holds step"),
        row(wide, master_weights(adamw(0.01)), "copies of other parameters than the model has in half precision"),
    )


COUNTING: list[tuple[Optimizer, tuple[str, ...]]] = [
    (adamw(lr=0.1), ()),
    (partition({"adam": adam(0.1), "sgd": sgd()}, lambda _, p: "adam" if p.ndim == 2 else "sgd"), ("adam",)),
    (master_weights(adam(lr=0.1)), ("inner",)),
]
STEPS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda step: step.repeat(3, 1), "has shape (3, 1), and with adam"),
    (lambda step: 2.0, "is a float, and adam"),
    (lambda step: step.long(), "has dtype torch.int64, and with adam"),
]


def changed(opt_state: Any, inside: tuple[str, ...], step: Any) -> Any:
    if not inside:
        return FrozenDict({**opt_state, "step": step(opt_state["step"])})
    return FrozenDict({**opt_state, inside[0]: changed(opt_state[inside[0]], inside[1:], step)})


def test_a_number_of_steps_of_another_shape_or_kind_is_named(tmp_path: Path) -> None:
    """Whatever door it comes through, and before a file's numbers are read."""
    for optimizer, inside in COUNTING:
        trained, path = problem.run(optimizer=optimizer, max_duration="1ba"), tmp_path / "x.safetensors"
        for step, says in STEPS:
            state = trained.replace(opt_state=changed(trained.opt_state, inside, step))
            pl.save(state, path)
            loads = lambda: pl.load(path, model=problem.mlp())  # noqa: E731
            refused(
                ResumeError,
                (lambda: problem.fit(state, optimizer=optimizer), "'step']", says),
                (lambda: problem.fit(optimizer=optimizer, load_path=path), "'step']", says),
                (lambda: problem.fit(loads(), optimizer=optimizer), "'step']", says),
            )


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


def written(optimizer: Any, made: Optimizer | None = None, **options: Any) -> Any:
    """The state dict of a run with ``made``."""
    return ours.to_state_dict(problem.run(optimizer=made or optimizer, max_duration="1ba"), optimizer, **options)


def loaded(optimizer: Optimizer, given: Any, model: nn.Module | None = None) -> Any:
    return ours.load_state_dict(pl.State.create(model or problem.mlp()), optimizer, given)


def hand(cls: Any, model: nn.Module | None = None, change: Any = None, **options: Any) -> Any:
    """A state dict of torch's after one step, changed in place."""
    module = model or problem.mlp()
    made = cls(module.parameters(), **options)
    optimizing.by_hand(module, [made], problem.points(1))
    result = made.state_dict()
    if change is not None:
        change(result)
    return result


def with_step(step: Any) -> Any:
    return hand(torchs.AdamW, change=lambda made: made["state"][0].update(step=step))


def test_what_is_no_state_dict_of_the_optimizer() -> None:
    params, new, of_adamw = list(problem.mlp().parameters()), pl.State.create(problem.mlp()), hand(torchs.AdamW)
    parts = {"matrices": muon(0.02), "rest": adamw(0.01)}
    two = partition(parts, label=lambda name, tensor: "matrices" if tensor.ndim == 2 else "rest")
    turned = {**of_adamw, "state": {3 - key: value for key, value in of_adamw["state"].items()}}
    shapes = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    groups = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}]).state_dict()
    names = torch.optim.AdamW(layer.named_parameters()).state_dict()
    of_rms, of_sgd = hand(torchs.RMSprop, weight_decay=0.5), hand(torchs.SGD, momentum=0.9)
    still, trained = adamw(weight_decay=0.0), problem.run(optimizer=sgd(0.1), max_duration="1ba")
    grad, rms = from_torch(torchs.Adagrad, weight_decay=0.5), from_torch(torchs.RMSprop)
    betas = lambda made: made["param_groups"][0].update(betas=torch.tensor([0.5, 0.9]))  # noqa: E731
    refused(
        ArgumentError,
        (lambda: written(pl.optim.lion()), "no class of torch.optim has the state of lion"),
        (lambda: written(master_weights(sgd())), "has the state of master_weights"),
        (lambda: written(adamw(independent_decay=True)), "has no counterpart in"),
        (lambda: written(from_torch(Counts)), "Counts keeps calls as attributes"),
        (lambda: written(from_torch(Own)), "Own has a state_dict() of its own"),
        (lambda: written(two), "'matrices' is torch.optim.Muon, ", "part='matrices'"),
        (lambda: written(two, part="bias"), "partition has the parts ['matrices', 'rest']"),
        (lambda: written(adamw(), part="rest"), "adamw has no parts"),
        (lambda: loaded(two, of_adamw), "'matrices' is torch.optim.Muon"),
        (lambda: loaded(adamw(), hand(torchs.AdamW, betas=(0.5, 0.9))), "betas=(0.5, 0.9), and pl.optim.adamw has b"),
        (lambda: loaded(adamw(), hand(torchs.AdamW, change=betas)), "has betas=(0.9, 0.999)"),
        (lambda: loaded(rms, of_rms), "weight_decay=0.5, and from_torch(RMSprop) has weight_decay=0"),
        (lambda: loaded(adamw(), hand(torchs.Adam, weight_decay=0.01)), "decoupled_weight_decay=False"),
        (lambda: ours.evaluation_params(trained, sgd(0.1)), "has one set of parameters", "package schedulefree"),
    )
    refused(
        ResumeError,
        (lambda: ours.to_state_dict(new, adamw()), "has no optimizer state yet"),
        (lambda: written(sgd(momentum=0.9), adamw()), "made by another optimizer than sgd"),
        (lambda: loaded(still, of_sgd), "holds ['momentum_buffer'] for parameter ", "another class than AdamW"),
        (lambda: loaded(grad, of_rms), "holds ['square_avg', 'step'] ", "another class than Adagrad"),
        (
            lambda: loaded(adamw(), hand(torchs.AdamW, shapes)),
            "(7, 4) torch.float32 as exp_avg of parameter",
        ),
        (lambda: loaded(adamw(), turned), "in another order. Name them"),
        (lambda: loaded(adamw(), hand(torchs.AdamW, nn.Linear(4, 3))), "has 2 parameters, and 4 are trained"),
        (lambda: loaded(adamw(), groups), "has 2 parameter groups, and adamw has 1"),
        (lambda: loaded(adamw(), names), "names ['weight', 'bias'], and the optimizer trains ['0.weight'"),
        (lambda: loaded(adamw(), of_adamw, problem.mlp().bfloat16()), "torch.bfloat16"),
        (lambda: ours.evaluation_params(new, sgd(0.1)), "no optimizer state yet"),
    )
    refused(
        ArgumentTypeError,
        (lambda: ours.to_state_dict(layer, adamw()), "Linear is not a State", "write to_state_dict(state, optimizer)"),
        (lambda: ours.to_state_dict(new, reference), "the optimizer that fit"),
        (lambda: loaded(adamw(), {"model": 1}), "and this one has ['model'"),
        (lambda: loaded(adamw(), reference), "got a SGD"),
    )


def test_what_is_no_state_dict() -> None:
    for state, groups, says in (
        (None, [], "state is a NoneType, not a dict"),
        ({}, None, "param_groups is a NoneType, not a list"),
        ({}, ["lr"], "param_groups[0] is no dict"),
        ({}, [{"params": 3}], "param_groups[0] is no dict with a list"),
        ({0: [1]}, [{"params": [0]}], "state[0] is a list, not a dict"),
    ):
        call = lambda: loaded(adamw(), {"state": state, "param_groups": groups})  # noqa: E731
        refused(ArgumentTypeError, (call, f"torch_optimizer.state_dict(), and here {says}"))
    for step in (torch.tensor(-3.0), torch.tensor(1.5), torch.tensor(math.inf), torch.tensor([1.0, 2.0]), "3", None):
        call = lambda: loaded(adamw(), with_step(step))  # noqa: E731
        refused(ResumeError, (call, "as step of parameter '0.weight', which is no count of steps"))
