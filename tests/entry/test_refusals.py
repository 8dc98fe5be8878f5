"""What users write by mistake: an error of ours and of Python's that fits, which says what to write instead.

What can be told from the arguments is told by the call itself, before any event and before any data is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import CheckpointNotFoundError, ModelError, ResumeError, WrappedModelError
from tests.support import problem
from tests.support.refused import Refusal, check

SGD, WEIGHT = pl.optim.sgd(lr=0.1), "0.weight"


class Watched(list[Any]):
    """Data that knows whether it was touched."""

    drawn = 0

    def __iter__(self) -> Iterator[Any]:
        Watched.drawn += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        Watched.drawn += 1
        return super().__getitem__(index)


DATA = Watched(problem.points())
X, Y = DATA[0]


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    """Without the checks of ``strict``, which are slow and would come first."""
    return problem.fit(model, data, **{"max_duration": "2ba", "strict": None, **changes})


def evaluate(evaluators: Any = DATA, **changes: Any) -> Any:
    return pl.evaluate(net(), evaluators, **{"loss": functional.cross_entropy, **changes})


def state(**fields: Any) -> Any:
    return pl.State.create(net()).replace(**fields)


def net() -> nn.Module:
    return problem.mlp()


def of(error: type[Exception]) -> Callable[..., Refusal]:
    return lambda call, *says: Refusal(says[0], call, error, says)


def given(error: type[Exception], *says: str, **arguments: Any) -> Refusal:
    """A call of fit."""
    return Refusal(f"fit({', '.join(arguments)}): {says[0]}", lambda: fit(**arguments), error, says)


TYPES, VALUES, TIMES = pl.errors.ArgumentTypeError, pl.errors.ArgumentError, pl.errors.TimeFormatError
TYPE, VALUE, DATA_ERROR, RESUME = map(of, (TYPES, VALUES, pl.errors.DataError, ResumeError))
ACCURACY = pl.metrics.accuracy()


def identity(state: pl.State) -> pl.State:
    return state


def named(name: str, event: Event = Event.BATCH_END) -> pl.Algorithm:
    return pl.algorithm(event, name=name)(identity)


SETTINGS = [
    given(VALUES, "train_dataloader has 3 batches, and", "can only be cut", batches_per_epoch=60),
    given(VALUES, "has 2 batches, by batches_per_step=2", batches_per_epoch=3, batches_per_step=2),
    given(VALUES, "add compile=True", steps_per_call=2),
    given(VALUES, 'in the order "current" only', steps_per_call=2, compile=True, order="2021"),
    given(VALUES, "'amp_bf16'", "'amp_fp16'", "'fp32'", precision="fp16"),
    given(TIMES, '"2ep"', '"10ba"', '"1h30m"', max_duration="3"),
    given(VALUES, "fraction of itself", '"3ep"', max_duration="0.5dur"),
    given(VALUES, "counts iterations", "iteration_length", max_duration="3iter"),
    given(TIMES, "can't read '1 hour 30 min' as a time", '(did you mean "1h30m"?)', eval_interval="1 hour 30 min"),
    given(TYPES, 'such as "1ep"; 0 means never', eval_interval=None),
    given(TYPES, "eval_interval is the function", "<lambda>(state)", eval_interval=lambda event, state: True),
    given(VALUES, "evaluator 'eval'", "1iter", '"1ep"', evaluators=DATA, eval_interval="1iter"),
    given(VALUES, '"1e6tok"', iteration_length="2ba"),
    given(VALUES, "leave iteration_length out", iteration_length="1ep", order="2021"),
    given(VALUES, "norm is above 0", clip_grad=0),
    given(TYPES, "a norm such as 1.0, or a function", clip_grad="1"),
    given(TYPES, "clip_grad is the function", "<lambda>(grads, params)", clip_grad=lambda grads: grads),
    given(TYPES, "watch={Event.BATCH_END}", watch="batch_end"),
    given(CheckpointNotFoundError, "there is no checkpoint at x.safetensors", load_path="x.safetensors"),
    given(TYPES, "3 is no path", load_path=3),
    given(TYPES, 'autoresume="runs/1"', autoresume=True),
    given(VALUES, "train_metrics has two metrics of one name", train_metrics=[ACCURACY, ACCURACY]),
    given(VALUES, "the label 'train' of an evaluator is", train_metrics=ACCURACY, evaluators={"train": DATA}),
    given(VALUES, "two algorithms", train_metrics=ACCURACY, algorithms=[named("train_metrics")]),
    given(VALUES, 'called "microbatch_size"', algorithms=[named("microbatch_size")], microbatch_size="auto"),
]

# Calls with other arguments, and what the names of other libraries are here.
CALLS = [
    given(TYPES, "fit has no argument 'epochs'", 'write max_duration="3ep"', epochs=3),
    given(TYPES, "no argument 'lr'", "write optimizer=pl.optim.adamw(lr=0.001)", lr=1e-3),
    given(TYPES, "no argument 'microbatchsize'", "did you mean microbatch_size=?", microbatchsize=4),
    given(TYPES, "no argument 'zork'", "it has model_or_state, train_dataloader, loss,", zork=4),
    given(TYPES, "given train_dataloader twice", "leave one of them out", train_dataloader=DATA),
    TYPE(lambda: pl.fit(net(), DATA, epochs=3), "no argument 'epochs'", "fit also needs optimizer: pl.fit(mo"),
    TYPE(lambda: pl.fit(net(), DATA), "fit needs optimizer and max_duration", 'max_duration="3ep"'),
    TYPE(lambda: pl.fit(model=net()), "no argument 'model'", "write it first and without a name: pl"),
    TYPE(lambda: pl.fit(net(), DATA, id), "takes 2 arguments without their names", "was given 3"),
    TYPE(lambda: pl.explain(net(), DATA, epochs=3), "explain has no argument 'epochs'"),
    TYPE(lambda: pl.evaluate(net()), "evaluate needs evaluators", '{"val": dataloader}'),
    TYPE(lambda: pl.largest_microbatch(net(), DATA), "optimizer"),
    TYPE(lambda: pl.schedules.cosine(t_max="3ep"), "cosine has no argument 't_max': write time=\"3ep\""),
    TYPE(lambda: pl.loggers.CSVLogger(save_dir="runs"), "write path=..., the path of the file and not"),
    TYPE(lambda: pl.drive(identity), "not a generator", "call the function, drive(script(state))"),
    TYPE(lambda: pl.drive(fit()), "script is a stream of fit", "fit(..., algorithms=[...])"),
    given(TYPES, "optimizer= is a list", "pl.optim.partition", "pl.drive", optimizer=[SGD, SGD]),
    TYPE(lambda: fit(optimizer=torch.optim.AdamW(net().parameters())), "Write pl.optim.adamw(lr=...) or", "in place"),
    given(TYPES, "the class Adagrad. Write pl.optim.from_torch(torch.optim.Ada", optimizer=torch.optim.Adagrad),
    given(TYPES, "the function 'adam'", "call it: pl.optim.adam(lr=3e-4)", optimizer=pl.optim.adam),
    given(TYPES, "pl.optim.adamw(lr=3e-4)", optimizer=1e-3),
]


class WithLoss(nn.Linear):
    """Its loss is one of torch's own, which takes targets and no batch."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.loss = nn.CrossEntropyLoss()


NO_LOSS = pl.Evaluator(DATA, metrics=[ACCURACY])
LOSSES_AND_EVALUATORS = [
    given(TYPES, "'cross_entropy' of type str", "torch.nn.functional.cross_entropy", loss="cross_entropy"),
    given(VALUES, "Bilinear has parameters", "submodule of the model", loss=nn.Bilinear(2, 2, 1)),
    given(VALUES, "Bilinear has parameters", loss=pl.Task(loss=nn.Bilinear(2, 2, 1))),
    given(TYPES, "two arguments", "<lambda>(outputs, targets)", loss=lambda outputs: 0),
    given(VALUES, "no loss", "pl.Task(loss=...)", "give Sequential a method loss(outputs, batch)", loss=None),
    given(VALUES, "no loss: give loss=", model=WithLoss(), loss=None),
    given(
        TYPES,
        "fit has no argument 'task': write loss=pl.Task(..., loss=lambda outputs, batch: function(",
        task=pl.Task(),
    ),
    TYPE(lambda: pl.Task(forward=3), "forward must be a function, such as lambda model, batch: ...", "got 3"),
    TYPE(lambda: pl.Evaluator(DATA, loss=nn.MSELoss), "Evaluator: loss is the class MSELoss"),
    TYPE(lambda: pl.Task(loss=nn.MSELoss), "pl.Task: loss is the class MSELoss; give an instance: MSELoss()"),
    given(TYPES, "call it: pl.Task.from_transformers()", loss=pl.Task.from_transformers),
    TYPE(lambda: pl.predict(net(), DATA, task=identity), "pl.predict: task must be a Task, such as pl.Task(for"),
    given(TYPES, "needs a label", '{"val": ...', evaluators=[NO_LOSS]),
    given(TYPES, "write a mapping of labels", "{'val': ...}", evaluators=[("val", NO_LOSS)]),
    given(VALUES, "evaluators has the label 'val' twice", evaluators=[("val", NO_LOSS)] * 2),
    given(TYPES, "label 1 is not a text", evaluators={1: DATA}),
    TYPE(lambda: fit(evaluators={"val": pl.Evaluator(DATA, metrics="f1")}), "evaluator 'val'", "write pl.metrics.f1()"),
    TYPE(lambda: evaluate(None), "evaluators=None", "mapping of labels"),
    DATA_ERROR(lambda: evaluate([]), "evaluator 'eval'", "0 batches"),
]


def defined(function: Any = identity, **changes: Any) -> Callable[[], Any]:
    return lambda: pl.algorithm(Event.INIT, **changes)(function)


def made(name: Any, handlers: Any, **changes: Any) -> Callable[[], Any]:
    return lambda: pl.Algorithm(name, handlers, **changes)


AT_END = {Event.BATCH_END: identity}
ALGORITHMS = [
    given(VALUES, "two algorithms are named 'a'", "name='a_2'", algorithms=[named("a"), named("b"), named("a")]),
    given(VALUES, "are named 'b'", algorithms=[pl.compose(named("a"), named("b")), named("b")]),
    given(TYPES, "identity in algorithms=", "bound to no event", "pl.algorithm(Event.BATCH_E", algorithms=[identity]),
    given(TYPES, "call it: pl.algorithms.ema(...)", algorithms=[pl.algorithms.ema]),
    given(TYPES, "the class Algorithm", algorithms=[pl.Algorithm]),
    given(TYPES, "of type SpeedMonitor", "callbacks=", algorithms=[pl.callbacks.SpeedMonitor()]),
    given(TYPES, "give a list", algorithms={"a": named("a")}),
    VALUE(lambda: pl.algorithm(identity), "'identity' binds no event", "@pl.algorithm(Event.BATCH_END"),
    VALUE(lambda: pl.algorithm(), "binds no event", "pl.algorithm(Event.BATCH_END)"),
    VALUE(made("x", {}), "algorithm 'x' binds no event", "{Event.BATCH_END: function}"),
    TYPE(lambda: pl.algorithm([Event.BATCH_END])(identity), "one by one", "pl.algorithm(Event.BATCH_START, E"),
    TYPE(made("x", [Event.BATCH_END]), "algorithm 'x'", "mapping of events to functions"),
    TYPE(made("x", {Event.BATCH_END: 3}), "algorithm 'x' at BATCH_END", "3 is not a function"),
    TYPE(made("", AT_END), "not empty"),
    TYPE(made("x", AT_END, claims="mixes targets"), "claims='mixes targets'", "give a set of texts"),
    TYPE(defined(lambda a, b, c: a), "takes 3 arguments", "(state, stages)"),
    TYPE(defined(lambda event, state: state), "(event, state)", "state.event"),
    TYPE(defined(init=lambda: 3), "init=", "function of (state)"),
    of(TIMES)(defined(when="often"), "when='often'", '"10ba"'),
    VALUE(lambda: pl.algorithm(Event.BATCH_END, when="1ep")(identity), "would never run: every 1ep"),
    of(TIMES)(lambda: pl.every("1.5ep"), "'1.5ep'", "whole numbers", '"2ep"'),
]


def observed(error: type[Exception], callbacks: Any, *says: str) -> Refusal:
    return given(error, *says, callbacks=callbacks)


LACKING: Any = type("Mine", (pl.Callback,), {})
SHORT: Any = type("Mine", (pl.Callback,), {"batch_end": lambda self, state: None})
CALLBACKS = [
    observed(VALUES, [LACKING()], "Mine observes no event", "epoch_end(self, state, logger)"),
    observed(TYPES, [SHORT()], "batch_end(state)", "def batch_end(self, state, logger)"),
    observed(TYPES, [lambda state: None], "two arguments", "<lambda>(event, state)"),
    observed(TYPES, [pl.Callback], "the class Callback", "Callback()"),
    observed(TYPES, [named("a")], "the algorithm Algorithm('a', batch_end)", "algorithms="),
    observed(TYPES, [3], "holds 3 of type int", "function of (event, state)"),
    observed(TYPES, None, "callbacks=None", "give a list"),
    given(TYPES, "loggers= holds", loggers=[print]),
]


class Bare(nn.Module):
    """Its layers are in a plain list, where torch doesn't find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]


class Unset(nn.Module):
    """It says not how its weight begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


class Twice(nn.Module):
    """Its weight stands in a plain list too, where no other tensor is put in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.decayed = {"weights": [self.layer.weight]}


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    """What fully_shard mixes into a module's class."""


class Sharded(FSDPModule, nn.Linear): ...


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda gradient: gradient * 0)
    return model


# Each is refused by fit, by evaluate and by State.create.
MODELS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (nn.ReLU, ModelError, "ReLU has no parameters"),
    (Bare, ModelError, "plain list"),
    (lambda: net().requires_grad_(False), ModelError, "requires_grad_(True)"),
    (lambda: nn.LazyLinear(3), ModelError, "'weight' of a lazy module"),
    (lambda: nn.Embedding(3, 3, max_norm=1.0), ModelError, "torch.renorm"),
    (lambda: nn.Sequential(Twice()), ModelError, "model.0.decayed holds '0.layer.weight'"),
    (hooked, ModelError, "parameter 'weight' has a hook"),
    (lambda: nn.Sequential(DistributedDataParallel(net())), WrappedModelError, "model.0 is replicated"),
    (lambda: Sharded(4, 3), WrappedModelError, "fully_shard"),
    (lambda: torch.compile(net(), backend="eager"), WrappedModelError, "model._orig_mod"),
    (lambda: torch.jit.script(net()), WrappedModelError, "TorchScript"),
    (lambda: nn.Linear, TYPES, "the class Linear"),
    (lambda: net().state_dict(), TYPES, "model.load_state_dict"),
    (lambda: identity, TYPES, "torch.nn.Module nor a pure_loop State"),
    (lambda: DATA, TYPES, "the model comes first"),
]


def dataset(size: int) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 4), torch.zeros(size))


LOADERS = [
    DATA_ERROR(lambda: fit(data=DataLoader(dataset(0))), "0 batches", "dataset empty"),
    DATA_ERROR(lambda: fit(data=DataLoader(dataset(3), 4, drop_last=True)), "0 batches", "drop_last=True"),
    given(TYPES, "batches(), not batches", data=lambda: iter(DATA)),
    given(TYPES, "the model comes first", "fit(model, train_dataloader", data=net()),
    TYPE(lambda: pl.predict(net(), None), "NoneType is no dataloader"),
]


def kept(stream: Any, at: Event) -> pl.State:
    return next(state for event, state in stream if event is at)


def trained(start: Any = None, optimizer: Any = None) -> pl.State:
    """With the memory of AdamW."""
    adamw = pl.optim.adamw(lr=0.01)
    return kept(problem.fit(start, optimizer=optimizer or adamw, max_duration="1ba"), Event.BATCH_END)


LINEAR, WIDE = (pl.State.create(model) for model in (nn.Linear(4, 3), nn.Linear(4, 9)))
AFRESH = "fit(state.replace(opt_state=None), ...)"


def resuming(start: Callable[[], pl.State], *says: str, **changes: Any) -> Refusal:
    return RESUME(
        lambda: fit(start(), **{"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "2ep"} | changes), *says
    )


def evaluated() -> pl.State:
    return kept(evaluate(problem.points()), Event.EVAL_STANDALONE_START)


def predicted() -> pl.State:
    return kept(pl.predict(net(), problem.points()), Event.PREDICT_BATCH_END)


AMSGRAD, MOMENTUM = pl.optim.adamw(lr=0.1, amsgrad=True), pl.optim.sgd(lr=0.1, momentum=0.9)
FROZEN = of(pl.errors.FrozenStateError)
STATES = [
    resuming(evaluated, "EVAL_STANDALONE_START", "the State that you evaluated"),
    resuming(predicted, "PREDICT_BATCH_END", "the State that you predicted from"),
    resuming(lambda: trained().replace(model=LINEAR.model), "missing ['bias', 'weight']", "state.with_module(mod"),
    RESUME(lambda: pl.evaluate(LINEAR.replace(params=WIDE.params), DATA), "params['weight'] has shape"),
    resuming(lambda: state(frozen={"9"}), "frozen names '9', which the model doesn't have"),
    resuming(trained, "it holds step, skipped, exp_avg", "needs step", "max_exp_avg_sq", AFRESH, optimizer=AMSGRAD),
    resuming(trained, "it holds step, skipped", "sgd needs nothing", AFRESH, optimizer=SGD),
    resuming(lambda: LINEAR.replace(opt_state=trained().opt_state), "by adamw for another model"),
    resuming(lambda: LINEAR.replace(opt_state=trained(WIDE).opt_state), "['exp_avg']['weight'] has shape (9, 4)"),
    VALUE(lambda: fit(trained(), seed=5), "seed=5", "has seed 0", "fit(state.replace(seed=5), ...)"),
    FROZEN(lambda: setattr(state(), "loss", 1), "state.loss can't be changed", "state.replace(loss=...)"),
    VALUE(lambda: state(zork=1), "no field 'zork'; it has model, params,", "state.remember(name, memory)"),
    VALUE(lambda: state(gradients={}), "no field 'gradients' (gradients are state.grads"),
    TYPE(lambda: state(grads=[1]), "grads is a mapping", "list", "state.grads"),
    TYPE(lambda: state(frozen=WEIGHT), "set of names of parameters", "'0.weight' of type str"),
    TYPE(lambda: state()["params"], "state['params']", "write state.params"),
    TYPE(lambda: state()[WEIGHT], "state.params['0.weight']"),
    TYPE(lambda: state()[0], "state[0]", "a record"),
]
TABLES = [SETTINGS, CALLS, LOSSES_AND_EVALUATORS, ALGORITHMS, CALLBACKS, LOADERS, STATES]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0].name)
def test_the_call_says_what_to_write_and_draws_no_data(table: list[Refusal]) -> None:
    for refusal in table:
        Watched.drawn = 0
        check(refusal)
        assert Watched.drawn == 0, refusal.name


def load(**given: Any) -> Any:
    return pl.load("nowhere", model=net(), **given)


# Of any other value, the argument and the value are named.
SHOWN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (fit, {"microbatch_size": "Auto", "batches_per_epoch": 0, "batches_per_step": 1.5, "steps_per_call": 0}),
    (fit, {"seed": "0", "strict": 1, "deterministic": "yes", "order": "2020", "nonfinite": "ignore", "clock": 3}),
    (fit, {"donate": "never", "compile": "maybe", "device": "gpu", "run_name": 3, "iteration_length": "3 epochs"}),
    (fit, {"max_duration": 1.5, "eval_interval": 1.5, "clip_grad": -1.0}),
    (evaluate, {"strict": 1, "seed": "0"}),
    (lambda **given: pl.predict(net(), DATA, **given), {"seed": 1.5}),
    (lambda **given: pl.drive((pair for pair in ()), **given), {"strict": "no"}),
    (lambda **given: pl.explain(net(), DATA, optimizer=SGD, max_duration="1ep", **given), {"depth": -1}),
    (lambda **given: pl.Evaluator(DATA, **given), {"interval": "often", "batches": 0, "microbatch_size": True}),
    (lambda **given: pl.State.create(net(), **given), {"seed": 1.5}),
    (lambda **given: state().count_batch(**given), {"samples": -1}),
    (lambda **given: state().module(**given), {"training": 1}),
    (load, {"weights_only": 1, "strict": "yes"}),
    (lambda **given: pl.progress(fit(), **given), {"refresh_seconds": -1}),
    (pl.distributed.Parallel, {"timeout": 0, "bucket_cap_mb": float("nan"), "find_unused_parameters": 3}),
    (lambda **given: pl.optim.from_torch(torch.optim.Adagrad, **given), {"lr": -1.0}),
    (lambda **given: pl.callbacks.LRMonitor(SGD, **given), {"name": 3}),
    (pl.metrics.accuracy, {"axis": 0.5}),
]


def test_a_value_that_an_argument_does_not_take_is_shown_with_its_name() -> None:
    for call, arguments in SHOWN:
        for name, value in arguments.items():
            with pytest.raises((VALUES, TYPES, TIMES), match=rf"\b{name}\b") as caught:
                pytest.fail(f"{name}={value!r} is accepted: {call(**{name: value})}")
            assert repr(value) in str(caught.value)


@pytest.mark.filterwarnings("ignore")  # torch deprecates TorchScript, and importing its compiler warns
def test_models_that_would_train_wrongly_are_refused_at_each_door() -> None:
    doors = fit, lambda model: pl.evaluate(model, DATA, loss=functional.cross_entropy), pl.State.create
    for make, error, says in MODELS:
        model, Watched.drawn = make(), 0
        for door in doors:
            check(Refusal(says, lambda door=door, model=model: door(model), error, (says,)))
        assert Watched.drawn == 0


def test_a_model_without_numbers_is_taken_by_fit_alone_and_where_it_can_be_initialised() -> None:
    meta = nn.Linear(4, 3, device="meta")
    for door in (lambda: pl.evaluate(meta, DATA, loss=functional.cross_entropy), lambda: pl.State.create(meta)):
        check(Refusal("to_empty", door, ModelError, ("to_empty",)))
    unset = nn.Sequential(nn.Linear(4, 3), Unset()).to("meta")
    check(Refusal("reset", lambda: fit(unset), ModelError, ("1 is a Unset on the meta device", "reset_parameters()")))


def test_mappings_of_a_state_are_not_written_to() -> None:
    params = state().params
    weight = params[WEIGHT]
    writes: dict[str, tuple[Any, ...]] = {"__setitem__": (WEIGHT, X), "__delitem__": (WEIGHT,), "pop": (WEIGHT,)}
    writes |= {"update": ({WEIGHT: X},), "__ior__": ({WEIGHT: X},), "setdefault": ("more", X), "clear": ()}
    for method, given in writes.items():
        with pytest.raises(pl.errors.FrozenDictError, match=re.escape("state.replace(...)")):
            getattr(params, method)(*given)
    assert params[WEIGHT] is weight


def test_between_boundaries_the_next_one_is_named() -> None:
    pairs = list(problem.fit(evaluators=pl.Evaluator(problem.points(1), interval="2ba"), max_duration="1ep"))
    keepable = {*map(str, pl.order.BOUNDARIES), "fit_end"}
    for index, (event, start) in enumerate(pairs):
        if event in keepable:
            continue
        following = next(later for later, _ in pairs[index:] if later in keepable)
        if event is Event.BEFORE_DATALOADER:
            following = Event.BATCH_END  # not known there: the last one of an epoch finds no batch
        says = f"kept at {event.name}, in the middle", f"Keep the one at {following.name}", "Boundaries are AFTER_LOAD"
        check(RESUME(lambda start=start: fit(start, max_duration="2ep"), *says))


def test_every_error_is_ours_and_a_builtin() -> None:
    errors = [getattr(pl.errors, name) for name in pl.errors.__all__]
    for error in (each for each in errors if not issubclass(each, Warning)):
        assert issubclass(error, pl.PureLoopError)
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert builtins[0] is not Exception or error is pl.PureLoopError, f"{error.__name__} is none of Python's"
        assert error.__doc__


def test_the_base_of_errors_is_at_the_top_and_the_earlier_names_are_not_listed() -> None:
    names = {*pl.errors.__all__}
    assert names & {*dir(pl), *pl.__all__} == {"PureLoopError"}
    assert all(getattr(pl, name) is getattr(pl.errors, name) for name in names)
    with pytest.raises(AttributeError, match=r"did you mean 'errors\.ArgumentError'"):
        pl.ArgumentErorr  # type: ignore[attr-defined]  # noqa: B018
