"""What users write by mistake: an error of ours and of the builtin that fits, which says what to write instead.

Where it can be told from the arguments, it is raised by the call itself, before any event and before any
data is drawn; what only shows when it runs is raised at the first event that shows it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from tests.models import batches

DATA = batches((4, 4, 4), seed=0)
SGD = pl.optim.sgd(lr=0.1)


class Watched(list[Any]):
    """Data that knows whether it was touched."""

    drawn = 0

    def __iter__(self) -> Iterator[Any]:
        self.drawn += 1
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self.drawn += 1
        return super().__getitem__(index)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": SGD, "max_duration": "2ba", **changes}
    return pl.fit(net() if model is None else model, data, **arguments)


def refused(call: Callable[[], Any], error: type[Exception], builtin: type[Exception], *says: str) -> None:
    """The call itself raises the error, of ours and of Python's, and says all of this."""
    assert issubclass(error, pl.PureLoopError)
    assert issubclass(error, builtin)
    with pytest.raises(error) as caught:
        call()
    check_message(caught.value, *says)


def check_message(error: BaseException, *says: str) -> None:
    message = " ".join([str(error), *getattr(error, "__notes__", [])])
    for fragment in says:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert " object at 0x" not in message or "metrics" in message or "holds" in message


def breaks(stream: Any, error: type[Exception], builtin: type[Exception], *says: str) -> list[Event]:
    """Running the stream raises the error; gives the events before it."""
    assert issubclass(error, pl.PureLoopError)
    assert issubclass(error, builtin)
    pairs: list[tuple[Event, pl.State]] = []
    with pytest.raises(error) as caught:
        pairs.extend(stream)
    check_message(caught.value, *says)
    return [event for event, _ in pairs]


# Arguments -----------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Its layers are in a plain list, where torch doesn't find them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]


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


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class FSDPModule:
    """What fully_shard mixes into a module's class."""


class Sharded(FSDPModule, nn.Linear):
    pass


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript, and people still have some
        return torch.jit.script(net())


def traced() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net(), torch.randn(1, 4))


def compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing dynamo warns
        return torch.compile(net())


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = nn.utils.weight_norm(nn.Linear(4, 3))
        return module


TYPE, VALUE = (pl.ArgumentTypeError, TypeError), (pl.ArgumentError, ValueError)
MODEL, WRAPPED = (pl.ModelError, ValueError), (pl.WrappedModelError, TypeError)

MODELS = [
    pytest.param(nn.ReLU, *MODEL, ["ReLU has no parameters", "nn.ModuleList"], id="no parameters"),
    pytest.param(Bare, *MODEL, ["Bare has no parameters", "plain list"], id="layers in a list"),
    pytest.param(
        lambda: net().requires_grad_(False), *MODEL, ["requires a gradient", "requires_grad_(True)"], id="frozen"
    ),
    pytest.param(lambda: nn.LazyLinear(3), *MODEL, ["'weight' of a lazy module", "call the model on one"], id="lazy"),
    pytest.param(lambda: nn.Linear(4, 3, device="meta"), *MODEL, ["meta device", "to_empty"], id="meta"),
    pytest.param(lambda: nn.Embedding(3, 3, max_norm=1.0), *MODEL, ["max_norm=1.0", "torch.renorm"], id="max_norm"),
    pytest.param(old_weight_norm, *MODEL, ["can't be copied", "parametrizations"], id="old weight norm"),
    pytest.param(
        lambda: nn.Sequential(Twice()), *MODEL, ["model.0.decayed holds '0.layer.weight'", "property"], id="twice"
    ),
    pytest.param(lambda: DistributedDataParallel(net()), *WRAPPED, ["DistributedData", "model.module"], id="DDP"),
    pytest.param(
        lambda: nn.Sequential(DistributedDataParallel(net())), *WRAPPED, ["model.0 is replicated"], id="DDP inside"
    ),
    pytest.param(lambda: FullyShardedDataParallel(net()), *WRAPPED, ["sharded over ranks", "model.module"], id="FSDP"),
    pytest.param(lambda: Sharded(4, 3), *WRAPPED, ["fully_shard", "as it was before"], id="FSDP2"),
    pytest.param(lambda: nn.DataParallel(net()), *WRAPPED, ["DataParallel", "model.module"], id="DataParallel"),
    pytest.param(compiled, *WRAPPED, ["torch.compile", "model._orig_mod"], id="compiled"),
    pytest.param(scripted, *WRAPPED, ["TorchScript", "nn.Module it was made from"], id="scripted"),
    pytest.param(traced, *WRAPPED, ["TorchScript"], id="traced"),
    pytest.param(lambda: nn.Linear, *TYPE, ["the class Linear", "write Linear(...)"], id="class"),
    pytest.param(lambda: net().state_dict(), *TYPE, ["OrderedDict", "model.load_state_dict"], id="state_dict"),
    pytest.param(
        lambda: lambda x: x, *TYPE, ["model is function", "torch.nn.Module nor a pure_loop State"], id="function"
    ),
    pytest.param(lambda: DATA, *TYPE, ["the model comes first", "fit(model, train_dataloader"], id="data first"),
]


@pytest.mark.parametrize(("make", "error", "builtin", "says"), MODELS)
def test_models_that_would_train_wrongly_are_refused(make: Any, error: Any, builtin: Any, says: list[str]) -> None:
    data = Watched(DATA)
    model = make()
    refused(lambda: fit(model, data), error, builtin, *says)
    assert data.drawn == 0
    refused(lambda: pl.evaluate(model, data, loss=functional.cross_entropy), error, builtin, *says)
    refused(lambda: pl.State.create(model), error, builtin, *says)


def test_a_real_ddp_module_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        refused(lambda: fit(wrapped), pl.WrappedModelError, TypeError, "replicated over ranks", "model.module")
    finally:
        torch.distributed.destroy_process_group()


def test_module_compile_is_harmless() -> None:
    """``module.compile()`` wraps nothing: the copy that is trained runs uncompiled."""
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.compile()
    assert pl.run(fit(model)).timestamp.batch == 2


LOADERS = [
    pytest.param(list, pl.DataError, ValueError, ["train_dataloader", "0 batches"], id="empty list"),
    pytest.param(
        lambda: DataLoader(TensorDataset(torch.zeros(0, 4), torch.zeros(0))),
        *(pl.DataError, ValueError, ["0 batches", "dataset empty"]),
        id="empty dataset",
    ),
    pytest.param(
        lambda: DataLoader(TensorDataset(torch.zeros(3, 4), torch.zeros(3)), batch_size=4, drop_last=True),
        *(pl.DataError, ValueError, ["0 batches", "drop_last=True"]),
        id="drop_last drops all",
    ),
    pytest.param(
        lambda: TensorDataset(torch.zeros(8, 4)),
        *TYPE,
        ["is a dataset", "DataLoader(dataset, batch_size"],
        id="dataset",
    ),
    pytest.param(lambda: torch.zeros(8, 4), *TYPE, ["Tensor is no dataloader", "TensorDataset"], id="tensor"),
    pytest.param(lambda: lambda: iter(DATA), *TYPE, ["batches(), not batches"], id="generator function"),
    pytest.param(lambda: {"train": DATA}, *TYPE, ["dict is no dataloader"], id="mapping"),
    pytest.param(lambda: None, *TYPE, ["NoneType is no dataloader"], id="None"),
    pytest.param(net, *TYPE, ["the model comes first", "fit(model, train_dataloader"], id="a model"),
]


@pytest.mark.parametrize(("make", "error", "builtin", "says"), LOADERS)
def test_data_that_gives_no_batches_is_refused(make: Any, error: Any, builtin: Any, says: list[str]) -> None:
    refused(lambda: fit(data=make()), error, builtin, *says)


@pytest.mark.parametrize("make", [lambda: iter([]), lambda: type("Empty", (), {"__iter__": lambda self: iter([])})()])
def test_data_that_turns_out_to_be_empty_is_an_error(make: Any) -> None:
    events = breaks(fit(data=make()), pl.DataError, ValueError, "train dataloader gave no batch in epoch 0")
    assert events[-1] is Event.BEFORE_DATALOADER


def test_an_exhausted_iterator_says_so() -> None:
    says = ("iterator is exhausted", "batches_per_epoch")
    breaks(fit(data=iter(DATA), max_duration="2ep"), pl.DataError, ValueError, "in epoch 1", *says)


def test_empty_data_of_evaluate_and_predict() -> None:
    model = net()
    refused(
        lambda: pl.evaluate(model, [], loss=functional.cross_entropy),
        pl.DataError,
        ValueError,
        "evaluator 'eval'",
        "0 batches",
    )
    refused(lambda: pl.predict(model, []), pl.DataError, ValueError, "0 batches")
    refused(lambda: pl.predict(model, None), *TYPE, "NoneType is no dataloader")
    refused(
        lambda: pl.evaluate(model, None, loss=functional.cross_entropy), *TYPE, "evaluators=None", "mapping of labels"
    )


def arguments() -> Iterator[Any]:
    for value, kind in ((0, VALUE), (-1, VALUE), (True, TYPE), (1.5, TYPE), ("4", TYPE)):
        for name in ("microbatch_size", "batches_per_epoch"):
            yield name, value, kind, [f"{name}={value!r}", "whole number of at least 1"]
    yield "microbatch_size", "auto", VALUE, ['microbatch_size="auto"', "this version"]
    for precision in ("fp16", "bf16", 16, None, torch.float16):
        yield "precision", precision, VALUE, [f"precision={precision!r}", "'amp_bf16'", "'amp_fp16'", "'fp32'"]
    unreadable = (pl.TimeFormatError, ValueError)
    for text in ("", " ", "3", "3 epochs", "1.5ep", "ep", "-1ep", "1ba2ep", "nanep", "2weeks"):
        for name in ("max_duration", "eval_interval", "iteration_length"):
            yield name, text, unreadable, [f"{name}={text!r}", '"2ep"', '"10ba"', '"1h30m"']
    yield "max_duration", -1, unreadable, ["max_duration=-1", "not negative"]
    for other in (1.5, True, None, [1]):
        yield "max_duration", other, TYPE, [f"max_duration={other!r}", '"2ep"']
    for other in (1.5, True, None, [1]):
        yield "eval_interval", other, TYPE, [f"eval_interval={other!r}", '"1ep"'] if other is not True else ["True"]
    yield (
        "eval_interval",
        lambda event, state: True,
        TYPE,
        ["eval_interval is the function <lambda>", "<lambda>(state)"],
    )
    yield "eval_interval", "1iter", VALUE, ["evaluator 'eval'", "1iter", '"1ep"']
    yield "max_duration", "0.5dur", VALUE, ["fraction of itself", '"3ep"']
    yield "max_duration", "3iter", VALUE, ["counts iterations", "iteration_length"]
    for length in ("2ba", 0, "0ep"):
        yield "iteration_length", length, VALUE, [f"iteration_length={length!r}", '"1e6tok"']
    for norm, kind in ((0, VALUE), (-1.0, VALUE), (float("nan"), VALUE), ("1", TYPE), (True, TYPE)):
        yield "clip_grad", norm, kind, [f"clip_grad={norm!r}", "norm"]
    yield "clip_grad", lambda grads: grads, TYPE, ["clip_grad is the function <lambda>", "<lambda>(grads, params)"]
    for seed in (1.5, "0", None, True):
        yield "seed", seed, TYPE, [f"seed={seed!r}", "whole number"]
    yield "order", "2020", VALUE, ["order='2020'", '"2021"']
    yield "nonfinite", "ignore", VALUE, ["nonfinite='ignore'", '"skip"']
    yield "watch", {"batch_ends"}, VALUE, ["'batch_ends'", "did you mean Event.BATCH_END"]
    yield "watch", "batch_end", TYPE, ["watch='batch_end'", "watch={Event.BATCH_END}"]
    yield "watch", 3, TYPE, ["watch=3", "watch={Event.BATCH_END}"]
    yield "device", "gpu", VALUE, ["device='gpu'", "cuda"]
    yield "device", 0.5, TYPE, ["device=0.5", '"cuda:0"']
    yield "clock", 3, TYPE, ["clock=3", "seconds"]
    missing = (pl.CheckpointNotFoundError, FileNotFoundError)
    yield "load_path", "x.safetensors", missing, ["there is no checkpoint at x.safetensors"]
    yield "load_path", 3, TYPE, ["3 is no path"]
    yield "autoresume", True, TYPE, ["autoresume=True", 'autoresume="runs/1"']


@pytest.mark.parametrize(("name", "value", "kind", "says"), list(arguments()))
def test_arguments_that_can_not_be_read_are_refused_before_any_data_is_drawn(
    name: str, value: Any, kind: tuple[Any, Any], says: list[str]
) -> None:
    data, held_out = Watched(DATA), Watched(DATA)
    refused(lambda: fit(data=data, **{"evaluators": held_out, name: value}), *kind, *says)
    assert data.drawn == held_out.drawn == 0


OPTIMIZERS = [
    ([SGD, SGD], ["optimizer= is a list", "pl.optim.partition", "pl.drive"]),
    (
        torch.optim.AdamW(net().parameters()),
        ["torch.optim.AdamW", "in place", "pl.optim.adamw(lr=...) or", "from_torch"],
    ),
    (torch.optim.Adagrad(net().parameters()), ["Write pl.optim.from_torch(torch.optim.Adagrad, lr=...)"]),
    (torch.optim.SGD, ["the class SGD", "pl.optim.sgd(lr=...)"]),
    (pl.optim.adam, ["the function 'adam'", "call it: pl.optim.adam(lr=3e-4)"]),
    (1e-3, ["optimizer=0.001", "pl.optim.adamw(lr=3e-4)"]),
    ("adamw", ["optimizer='adamw'", "pl.optim.adamw(lr=3e-4)"]),
    (None, ["optimizer=None", "pl.optim.adamw(lr=3e-4)"]),
]


@pytest.mark.parametrize(("optimizer", "says"), OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(optimizer: Any, says: list[str]) -> None:
    refused(lambda: fit(optimizer=optimizer), *TYPE, *says)


LOSSES = [
    ({"loss": nn.CrossEntropyLoss}, TYPE, ["the class CrossEntropyLoss", "CrossEntropyLoss()"]),
    ({"loss": "cross_entropy"}, TYPE, ["'cross_entropy' of type str", "torch.nn.functional.cross_entropy"]),
    ({"loss": nn.Bilinear(2, 2, 1)}, VALUE, ["Bilinear has parameters", "submodule of the model"]),
    ({"loss": lambda outputs: outputs.mean()}, TYPE, ["two arguments", "<lambda>(outputs, targets)"]),
    ({"loss": lambda a, b, c: a}, TYPE, ["two arguments", "<lambda>(outputs, targets)"]),
    ({"loss": None}, VALUE, ["no loss", "pl.Task(loss=...)", "give Sequential a method loss(outputs, batch)"]),
    ({"task": pl.Task(loss=lambda outputs, batch: 0)}, VALUE, ["loss= is given, and task= has a loss too"]),
    ({"loss": pl.Task(), "task": pl.Task()}, VALUE, ["loss= and task= are both a Task"]),
    ({"task": 3}, TYPE, ["task=3", "pl.Task(forward=..., loss=...)"]),
    ({"task": pl.Task}, TYPE, ["give an instance of pl.Task"]),
]


@pytest.mark.parametrize(("changes", "kind", "says"), LOSSES)
def test_what_is_no_loss_is_refused(changes: dict[str, Any], kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(**changes), *kind, *says)


@pytest.mark.parametrize("name", ["forward", "loss", "validate", "weight", "samples", "tokens", "split"])
def test_fields_of_a_task_are_functions(name: str) -> None:
    refused(lambda: pl.Task(**{name: 3}), *TYPE, f"pl.Task({name}=3)", "give a function")


EVALUATORS = [
    ([pl.Evaluator(DATA)], TYPE, ["needs a label", '{"val": ...']),
    ([DataLoader(TensorDataset(torch.zeros(4, 4)))], TYPE, ["needs a label"]),
    ({1: DATA}, TYPE, ["label 1 is not a text"]),
    ({"val": None}, TYPE, ["evaluator 'val'", "NoneType is no dataloader"]),
    ({"val": []}, (pl.DataError, ValueError), ["evaluator 'val'", "0 batches"]),
]


@pytest.mark.parametrize(("evaluators", "kind", "says"), EVALUATORS)
def test_what_is_no_evaluator_is_refused(evaluators: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(evaluators=evaluators), *kind, *says)


@pytest.mark.parametrize("metrics", ["accuracy", ["accuracy"], pl.metrics.accuracy, [lambda o, b: 0], {"a": 3}])
def test_what_is_no_metric_is_refused(metrics: Any) -> None:
    evaluator = pl.Evaluator(DATA, metrics=metrics)
    says = ("evaluator 'val'", "is no metric", "pl.metrics.accuracy()", "pl.metrics.mean")
    refused(lambda: fit(evaluators={"val": evaluator}), *TYPE, *says)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("interval", "often", (pl.TimeFormatError, ValueError)),
        ("interval", 0.5, TYPE),
        ("batches", 0, VALUE),
        ("microbatch_size", True, TYPE),
    ],
)
def test_settings_of_an_evaluator(name: str, value: Any, kind: tuple[Any, Any]) -> None:
    refused(lambda: pl.Evaluator(DATA, **{name: value}), *kind, f"Evaluator {name}={value!r}")


# Algorithms ----------------------------------------------------------------------------------------------------------


def identity(state: pl.State) -> pl.State:
    return state


def named(name: str) -> pl.Algorithm:
    return pl.algorithm(Event.BATCH_END, name=name)(identity)


LISTS = [
    ([named("a"), named("b"), named("a")], VALUE, ["two algorithms are named 'a'", "name='a_2'"]),
    ([pl.compose(named("a"), named("b")), named("b")], VALUE, ["two algorithms are named 'b'"]),
    ([identity], TYPE, ["identity in algorithms=", "bound to no event", "pl.algorithm(Event.BATCH_END)(identity)"]),
    ([pl.algorithms.ema], TYPE, ["if it makes one, call it: ema(...)"]),
    ([pl.Algorithm], TYPE, ["the class Algorithm"]),
    ([pl.callbacks.SpeedMonitor()], TYPE, ["of type SpeedMonitor", "callbacks="]),
    (None, TYPE, ["algorithms=None", "give a list"]),
    ("ema", TYPE, ["algorithms='ema'", "give a list"]),
    ({"a": named("a")}, TYPE, ["give a list"]),
]


@pytest.mark.parametrize(("algorithms", "kind", "says"), LISTS)
def test_lists_of_algorithms(algorithms: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(algorithms=algorithms), *kind, *says)


DEFINITIONS = [
    (lambda: pl.algorithm(identity), VALUE, ["'identity' binds no event", "@pl.algorithm(Event.BATCH_END)"]),
    (lambda: pl.algorithm(), VALUE, ["binds no event", "pl.algorithm(Event.BATCH_END)"]),
    (lambda: pl.Algorithm("x", {}), VALUE, ["algorithm 'x' binds no event", "{Event.BATCH_END: function}"]),
    (
        lambda: pl.algorithm("after_los")(identity),
        VALUE,
        ["'after_los' is not an event", "did you mean Event.AFTER_LOSS?"],
    ),
    (lambda: pl.algorithm("lunch")(identity), VALUE, ["'lunch' is not an event", "INIT, BEFORE_LOAD"]),
    (lambda: pl.algorithm([Event.BATCH_END])(identity), TYPE, ["one by one", "pl.algorithm(Event.BATCH_START, Event"]),
    (lambda: pl.Algorithm("x", [Event.BATCH_END]), TYPE, ["algorithm 'x'", "mapping of events to functions"]),
    (lambda: pl.Algorithm("x", {Event.BATCH_END: 3}), TYPE, ["algorithm 'x' at BATCH_END", "3 is not a function"]),
    (lambda: pl.Algorithm("", {Event.BATCH_END: identity}), TYPE, ["not empty"]),
    (lambda: pl.algorithm(Event.INIT)(lambda a, b, c: a), TYPE, ["takes 3 arguments", "(state, stages)"]),
    (lambda: pl.algorithm(Event.INIT)(lambda: 0), TYPE, ["takes 0 arguments", "(state)"]),
    (lambda: pl.algorithm(Event.INIT)(lambda event, state: state), TYPE, ["(event, state)", "state.event"]),
    (lambda: pl.algorithm(Event.INIT, init=3)(identity), TYPE, ["'identity': init=3", "init=lambda state: 0"]),
    (lambda: pl.algorithm(Event.INIT, init=lambda: 3)(identity), TYPE, ["init=", "function of (state)"]),
    (
        lambda: pl.algorithm(Event.INIT, when="often")(identity),
        (pl.TimeFormatError, ValueError),
        ["when='often'", '"10ba"'],
    ),
    (lambda: pl.algorithm(Event.INIT, when=0.5)(identity), TYPE, ["when=0.5", '"10ba"', "function of the State"]),
    (
        lambda: pl.algorithm(Event.INIT, when=lambda e, s: True)(identity),
        TYPE,
        ["when is the function", "<lambda>(state)"],
    ),
    (lambda: pl.every("1.5ep"), (pl.TimeFormatError, ValueError), ["'1.5ep'", "whole numbers", '"2ep"']),
]


@pytest.mark.parametrize(("define", "kind", "says"), DEFINITIONS)
def test_definitions_of_algorithms(define: Callable[[], Any], kind: tuple[Any, Any], says: list[str]) -> None:
    refused(define, *kind, *says)


def at(event: Event, function: Any) -> pl.Algorithm:
    return pl.algorithm(event, name="mine")(function)


@attrs.frozen(eq=False, kw_only=True)
class Wider(pl.State):
    extra: Any = None


RETURNED = [
    (lambda state: None, ["returned None", "return state.replace(...)", "`return state`"]),
    (lambda state: (state, state), ["returned tuple, not a State", "state.replace(...)"]),
    (lambda state: state.params, ["returned FrozenDict, not a State"]),
    (lambda state: state.module(), ["returned Sequential, not a State"]),
    (lambda state: Wider(model=state.model, params=state.params), ["a Wider where it was given a State", "replace"]),
]


@pytest.mark.parametrize("event", [Event.INIT, Event.AFTER_LOSS, Event.EVAL_START, Event.FIT_END])
@pytest.mark.parametrize(("handler", "says"), RETURNED)
def test_algorithms_that_return_no_state(event: Event, handler: Any, says: list[str]) -> None:
    stream = fit(algorithms=[at(event, handler)], evaluators=DATA)
    events = breaks(stream, pl.AlgorithmReturnError, TypeError, f"algorithm 'mine' at {event.name}", *says)
    assert event not in events


WEIGHT = "0.weight"


def with_param(make: Callable[[torch.Tensor], Any], name: str = WEIGHT) -> Callable[[pl.State], pl.State]:
    return lambda state: state.replace(params={**state.params, name: make(state.params[WEIGHT])})


STRUCTURES = [
    (Event.BATCH_END, with_param(lambda w: w[:2]), ["params['0.weight'] from (5, 4)", "to (2, 4)"]),
    (Event.BATCH_END, with_param(lambda w: w.double()), ["torch.float32", "to (5, 4) torch.float64"]),
    (Event.BATCH_END, with_param(lambda w: w.to("meta")), ["on cpu to", "on meta"]),
    (Event.BATCH_END, with_param(lambda w: 3.0), ["put float into params['0.weight']", "not a tensor"]),
    (Event.BATCH_END, with_param(lambda w: None), ["put NoneType into params['0.weight']"]),
    (Event.BATCH_END, with_param(lambda w: w, "more"), ["unknown ['more']", "Keep the names", "state.with_module"]),
    (
        Event.BATCH_END,
        lambda s: s.replace(params={WEIGHT: s.params[WEIGHT]}),
        ["missing ['0.bias', '2.bias'", "params"],
    ),
    (Event.BATCH_END, lambda s: s.replace(buffers={"x": s.params[WEIGHT]}), ["names in buffers", "unknown ['x']"]),
    (
        Event.AFTER_BACKWARD,
        lambda s: s.replace(grads={name: g[:1] for name, g in s.grads.items()}),
        ["grads['0.weight'] from (5, 4)", "to (1, 4)"],
    ),
    (Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads={}), ["names in grads", "missing"]),
    (
        Event.BATCH_END,
        lambda s: s.replace(timestamp=pl.Timestamp(batch=9)),
        ["changed timestamp", "only the loop counts"],
    ),
    (Event.BATCH_END, lambda s: s.replace(seed=9), ["changed seed", "pl.random.derive"]),
    (Event.BATCH_END, lambda s: s.replace(position=Event.INIT), ["position", "only the loop"]),
    (Event.BATCH_END, lambda s: s.replace(event=Event.INIT), ["returned a State of INIT"]),
    (Event.BATCH_END, lambda s: s.with_module(nn.Linear(4, 3)), ["changed model", "at INIT, with state.with_module"]),
]


@pytest.mark.parametrize(("event", "handler", "says"), STRUCTURES)
def test_algorithms_that_change_what_they_may_not(event: Event, handler: Any, says: list[str]) -> None:
    stream = fit(algorithms=[at(event, handler)])
    events = breaks(stream, pl.AlgorithmStructureError, ValueError, "algorithm 'mine' at", event.name, *says)
    assert event not in events


@pytest.mark.parametrize("event", [Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
def test_params_stay_between_forward_and_backward(event: Event) -> None:
    def decay(state: pl.State) -> pl.State:
        return state.replace(params={name: p.detach() * 0.9 for name, p in state.params.items()})

    says = (f"replaced params at {event.name}", "BEFORE_FORWARD or earlier", "AFTER_BACKWARD on")
    breaks(fit(algorithms=[at(event, decay)]), pl.AlgorithmStructureError, ValueError, *says)


def test_a_state_that_an_algorithm_kept_is_refused() -> None:
    kept: list[pl.State] = []

    def return_the_first(state: pl.State) -> pl.State:
        kept.append(state)
        return kept[0]

    says = ("algorithm 'mine' at BATCH_START", "changed timestamp")
    breaks(fit(algorithms=[at(Event.BATCH_START, return_the_first)]), pl.AlgorithmStructureError, ValueError, *says)

    kept.clear()
    both = pl.algorithm(Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, name="mine")(return_the_first)
    says = ("returned a State of BATCH_START", "had kept", "Return state.replace(...) of the State it is given")
    breaks(fit(algorithms=[both]), pl.AlgorithmStructureError, ValueError, *says)


@pytest.mark.parametrize("field", ["params", "buffers", "algorithm_state", "metrics", "grads"])
@pytest.mark.parametrize("value", [[1], 3])
def test_fields_that_are_mappings_take_mappings(field: str, value: Any) -> None:
    state = pl.State.create(net())
    refused(
        lambda: state.replace(**{field: value}), *TYPE, f"{field} is a mapping", type(value).__name__, f"state.{field}"
    )


EARLY = [e for e in Event if e not in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)]
EARLY = [e for e in EARLY if not (e.is_predict or e.name.startswith(("ITERATION", "EVAL_STANDALONE")))]


@pytest.mark.parametrize("event", EARLY)
@pytest.mark.parametrize("read", [lambda s: s.grads[WEIGHT], lambda s: s.grads is None], ids=["use", "is None"])
def test_gradients_are_not_read_before_they_exist(event: Event, read: Any) -> None:
    def reader(state: pl.State) -> pl.State:
        read(state)
        return state

    says = (f"read at {event.name}", "AFTER_BACKWARD, AFTER_TRAIN_BATCH, BATCH_END", "Bind the algorithm to one of")
    stream = fit(algorithms=[at(event, reader)], evaluators=DATA, max_duration="1ep")
    breaks(stream, pl.GradientsNotReadyError, RuntimeError, *says)


def test_gradients_are_none_to_those_who_only_look() -> None:
    seen = {}
    for event, state in fit(callbacks=[lambda event, state: seen.setdefault(event, state.grads) and None]):
        assert state.grads is None or event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)
    assert seen[Event.AFTER_LOSS] is None
    assert seen[Event.AFTER_BACKWARD] is not None


def test_exceptions_of_algorithms_say_whose_they_are() -> None:
    def broken(state: pl.State) -> pl.State:
        raise KeyError("broken")

    stream = fit(algorithms=[at(Event.BATCH_START, broken)])
    with pytest.raises(KeyError) as caught:
        pl.run(stream)
    assert caught.value.__notes__ == ["raised by algorithm 'mine' at BATCH_START, batch 0"]
    with pytest.raises(KeyError) as caught:
        pl.run(fit(algorithms=[pl.Algorithm("mine", {Event.BATCH_END: identity}, init=broken)]))
    assert caught.value.__notes__ == ["raised by init of algorithm 'mine'"]


# Callbacks -----------------------------------------------------------------------------------------------------------


def callback(**methods: Any) -> pl.Callback:
    made: pl.Callback = type("Mine", (pl.Callback,), methods)()
    return made


def returns_three(*_: Any) -> int:
    return 3


def test_callbacks_return_nothing() -> None:
    says = ("callback Mine returned int at BATCH_END", "observe and return nothing", "@pl.algorithm")
    breaks(fit(callbacks=[callback(batch_end=returns_three)]), pl.CallbackReturnError, TypeError, *says)
    breaks(fit(callbacks=[callback(run_event=returns_three)]), pl.CallbackReturnError, TypeError, "at INIT")
    says = ("callback returns_three returned int at INIT", "@pl.algorithm")
    assert breaks(fit(callbacks=[returns_three]), pl.CallbackReturnError, TypeError, *says) == []


def observe(self: Any, state: Any, logger: Any) -> None:
    pass


CALLBACKS = [
    (
        [callback(epoch_ends=observe, batch_end=observe)],
        VALUE,
        ["'epoch_ends', which is no event", "did you mean epoch_end("],
    ),
    ([callback(epoch_ends=observe)], VALUE, ["did you mean epoch_end(self, state, logger)"]),
    ([callback(on_batch_end=observe)], VALUE, ["'on_batch_end'", "did you mean batch_end("]),
    ([callback(on_train_batch_end=observe)], VALUE, ["Mine"]),
    ([callback(training_start=observe)], VALUE, ["'training_start'", "did you mean fit_start("]),
    ([callback()], VALUE, ["Mine observes no event", "epoch_end(self, state, logger)"]),
    ([callback(batch_end=lambda self, state: None)], TYPE, ["batch_end(state)", "def batch_end(self, state, logger)"]),
    ([lambda state: None], TYPE, ["two arguments", "<lambda>(event, state)"]),
    ([pl.Callback], TYPE, ["the class Callback", "Callback()"]),
    ([named("a")], TYPE, ["the algorithm Algorithm('a', batch_end)", "algorithms="]),
    ([3], TYPE, ["holds 3 of type int", "function of (event, state)"]),
    (3, TYPE, ["callbacks=3", "give a list"]),
    (None, TYPE, ["callbacks=None", "give a list"]),
]


@pytest.mark.parametrize(("callbacks", "kind", "says"), CALLBACKS)
def test_what_is_no_callback_is_refused(callbacks: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(callbacks=callbacks), *kind, *says)


@pytest.mark.parametrize("loggers", [[print], [callback(batch_end=observe)], [pl.Logger]])
def test_what_is_no_logger_is_refused(loggers: Any) -> None:
    refused(lambda: fit(loggers=loggers), *TYPE, "loggers= holds")


def test_helpers_of_a_callback_may_have_any_other_name() -> None:
    pl.run(fit(callbacks=[callback(batch_end=observe, summary=observe, epochs=lambda self: 3, _epoch_ends=observe)]))


def test_exceptions_of_callbacks_say_whose_they_are() -> None:
    def broken(self: Any, state: Any, logger: Any) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError) as caught:
        pl.run(fit(callbacks=[callback(batch_start=broken)]))
    assert caught.value.__notes__ == ["raised by callback Mine at BATCH_START, batch 0"]


# Losses and batches --------------------------------------------------------------------------------------------------


def bad_loss(make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    """A loss that is good for one batch and bad from the second on."""
    calls = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        calls.append(1)
        good = functional.cross_entropy(outputs, targets)
        return good if len(calls) == 1 else make(good, outputs, targets)

    return loss


RUNNING_LOSSES = [
    (lambda loss, o, t: functional.cross_entropy(o, t, reduction="none"), ["shape (4,)", "loss.mean()"]),
    (lambda loss, o, t: loss[None], ["shape (1,)", "one number"]),
    (lambda loss, o, t: (o.argmax(1) == t).sum(), ["dtype torch.int64", "can't be differentiated"]),
    (lambda loss, o, t: loss.item(), ["of type float", "return a tensor of shape ()"]),
    (lambda loss, o, t: None, ["None of type NoneType"]),
    (lambda loss, o, t: (loss, o), ["of type tuple", "a dict of such with the key 'total'"]),
    (lambda loss, o, t: {"main": loss}, ["keys ['main']", "needs the key 'total'"]),
    (lambda loss, o, t: {"total": loss[None]}, ["shape (1,)"]),
]


@pytest.mark.parametrize(("make", "says"), RUNNING_LOSSES)
def test_a_loss_is_one_number(make: Any, says: list[str]) -> None:
    events = breaks(fit(loss=bad_loss(make)), pl.LossError, ValueError, "the loss at AFTER_LOSS of batch 1", *says)
    assert events[-1] is Event.BEFORE_LOSS


@pytest.mark.parametrize("make", [lambda loss, o, t: loss.detach(), lambda loss, o, t: torch.tensor(1.0)])
def test_a_loss_without_a_graph_is_an_error(make: Any) -> None:
    says = ("the loss of batch 1 does not depend on any parameter", "detached", ".item()")
    breaks(fit(loss=bad_loss(make)), pl.LossError, ValueError, *says)


def closed_over() -> nn.Module:
    """A module whose forward is a closure over the original, which a copy of it doesn't follow."""
    model = net()
    forward = model.forward
    model.forward = lambda x: forward(x)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"loss": lambda outputs, targets: torch.tensor(1.0, requires_grad=True)}, pl.LossError),
        ({"model": closed_over()}, pl.ModelError),
    ],
)
def test_a_loss_that_reaches_no_parameter_is_an_error(changes: dict[str, Any], error: type[Exception]) -> None:
    """It has a graph, but of other tensors: training would go on and change nothing."""
    breaks(fit(**changes), error, ValueError, "parameter")


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BEFORE_BACKWARD])
@pytest.mark.parametrize(
    "make", [lambda loss: loss.expand(2), lambda loss: 3.0, lambda loss: None, lambda loss: {"main": loss}]
)
def test_a_loss_that_an_algorithm_spoils_is_an_error(event: Event, make: Any) -> None:
    spoil = at(event, lambda state: state.replace(loss=make(state.loss)))
    breaks(fit(algorithms=[spoil]), pl.LossError, ValueError, "batch 0")


@pytest.mark.parametrize("make", [lambda grads: None])
def test_gradients_that_an_algorithm_takes_away_are_an_error(make: Any) -> None:
    spoil = at(Event.AFTER_TRAIN_BATCH, lambda state: state.replace(grads=make(state.grads)))
    breaks(fit(algorithms=[spoil]), pl.AlgorithmStructureError, ValueError, "grads", "'mine'", "AFTER_TRAIN_BATCH")


X = torch.randn(4, 4)
Y = torch.zeros(4, dtype=torch.int64)

BATCHES = [
    (X, ["a batch is a Tensor of 4", "(inputs, targets)", "pl.Task(forward="]),
    ((X, Y, Y), ["a batch is a tuple of 3", "(inputs, targets)", "pl.Task(forward="]),
    ({"x": X}, ["a batch is a dict of 1", "pl.Task(forward="]),
    ("text", ["can't count the samples", "type str"]),
    ((X[:0], Y[:0]), ["batch 0"]),
    ((X, Y[:3]), ["batch[0]: 4", "batch[1]: 3", "first dimension"]),
]


@pytest.mark.parametrize(("batch", "says"), BATCHES)
def test_batches_that_can_not_be_used(batch: Any, says: list[str]) -> None:
    breaks(fit(data=[batch]), pl.DataError, ValueError, *says)


def test_a_batch_that_can_not_be_split_says_why() -> None:
    task = pl.Task(forward=lambda model, batch: model(batch[0]), loss=lambda outputs, batch: outputs.mean())
    stream = fit(data=[(X, Y, object())], loss=task, microbatch_size=2)
    breaks(stream, pl.DataError, ValueError, "can't split batch[2]", "microbatches of 2", "microbatch_size=None")


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_are_positive_numbers(weight: float) -> None:
    stream = fit(task=pl.Task(weight=lambda batch: weight), microbatch_size=2)
    breaks(stream, pl.DataError, ValueError, "batch 0", "finite, not negative", "task=pl.Task(weight=...)")


def test_a_duration_in_tokens_needs_tokens() -> None:
    breaks(fit(max_duration="9tok"), pl.DataError, ValueError, "batch 0", "no tokens", "pl.Task(tokens=")


CLIPPING = [
    (lambda grads, params: None, TYPE, ["clip_grad=<lambda> returned NoneType", "by name"]),
    (lambda grads, params: list(grads.values()), TYPE, ["returned list"]),
    (lambda grads, params: {}, VALUE, ["other names", "missing ['0.bias'"]),
    (lambda grads, params: {**grads, "x": X}, VALUE, ["unknown ['x']"]),
]


@pytest.mark.parametrize(("clip", "kind", "says"), CLIPPING)
def test_clipping_functions_return_gradients(clip: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    breaks(fit(clip_grad=clip), *kind, *says)


# States --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Event, pl.State]]:
    return list(
        fit(max_duration="1ep", evaluators=pl.Evaluator(DATA, interval="2ba"), optimizer=pl.optim.adamw(lr=0.01))
    )


def last(pairs: Any, wanted: Event) -> pl.State:
    state: pl.State = next(state for event, state in reversed(pairs) if event is wanted)
    return state


ADAMW: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "2ep"}
KEEPABLE = {e.name for e in pl.order.BOUNDARIES} | {"FIT_END"}


def test_going_on_from_between_boundaries_names_the_next_one(pairs: list[tuple[Event, pl.State]]) -> None:
    for index, (event, state) in enumerate(pairs):
        if event.name in KEEPABLE:
            continue
        following = next(later.name for later, _ in pairs[index:] if later.name in KEEPABLE)
        if event is Event.BEFORE_DATALOADER:
            following = "BATCH_END"  # not known there: the last one of an epoch finds no batch
        refused(
            lambda state=state: fit(state, **ADAMW),
            *(pl.ResumeError, ValueError),
            f"kept at {event.name}, in the middle",
            f"Keep the one at {following}",
            "Boundaries are AFTER_LOAD, FIT_START",
        )


def test_going_on_from_evaluation_and_prediction() -> None:
    model = net()
    kept = dict(pl.evaluate(model, DATA, loss=functional.cross_entropy)) | dict(pl.predict(model, DATA))
    says = ("EVAL_STANDALONE_START", "the State that you evaluated")
    refused(lambda: fit(kept[Event.EVAL_STANDALONE_START]), pl.ResumeError, ValueError, *says)
    says = ("PREDICT_BATCH_END", "the State that you predicted from")
    refused(lambda: fit(kept[Event.PREDICT_BATCH_END]), pl.ResumeError, ValueError, *says)


def test_a_state_of_another_model(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    linear = pl.State.create(nn.Linear(4, 3))
    wider = pl.State.create(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    error = (pl.ResumeError, ValueError)
    says = ("missing ['bias', 'weight']", "unknown ['0.bias', '0.weight'", "state.with_module(module)")
    refused(lambda: fit(kept.replace(model=linear.model), **ADAMW), *error, *says)
    says = ("params['0.weight'] has shape (6, 4) in this State and (5, 4) in its model",)
    refused(lambda: fit(kept.replace(params=wider.params), **ADAMW), *error, *says)
    refused(lambda: pl.evaluate(kept.replace(params=wider.params), DATA, loss=functional.cross_entropy), *error, *says)


def test_memory_of_another_optimizer(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    plain = pl.run(fit())
    error = (pl.ResumeError, ValueError)
    afresh = "fit(state.replace(opt_state=None), ...)"
    says = ("another optimizer than adamw", "it holds step, skipped, exp_avg", "needs step", "max_exp_avg_sq", afresh)
    refused(lambda: fit(kept, optimizer=pl.optim.adamw(lr=0.1, amsgrad=True)), *error, *says)
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    refused(
        lambda: fit(kept, optimizer=momentum), *error, "another optimizer than sgd", "needs momentum_buffer", afresh
    )
    refused(lambda: fit(plain, optimizer=momentum), *error, "it holds nothing, and sgd needs momentum_buffer", afresh)
    breaks(fit(kept, max_duration="2ep"), *error, "sgd", "exp_avg")

    linear = pl.State.create(nn.Linear(4, 3)).replace(opt_state=kept.opt_state)
    refused(lambda: fit(linear, **ADAMW), *error, "made by adamw for another model", afresh)
    wider = pl.State.create(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).replace(
        opt_state=kept.opt_state
    )
    says = ("opt_state['exp_avg']['0.weight'] has shape (5, 4)", "(6, 4)", "another model's", afresh)
    refused(lambda: fit(wider, **ADAMW), *error, *says)

    assert pl.run(fit(kept.replace(opt_state=None), max_duration="2ep")).timestamp.epoch == 2


def test_a_state_brings_its_seed(pairs: list[tuple[Event, pl.State]]) -> None:
    kept = last(pairs, Event.BATCH_END)
    refused(lambda: fit(kept, seed=5, **ADAMW), *VALUE, "seed=5", "has seed 0", "fit(state.replace(seed=5), ...)")


def test_fields_of_a_state_are_not_written_to() -> None:
    state = pl.State.create(net())
    error = (pl.FrozenStateError, AttributeError)
    for name in ("loss", "params", "grads", "nonsense"):
        says = (f"state.{name} can't be changed", f"state = state.replace({name}=...)")
        refused(lambda name=name: setattr(state, name, 1), *error, *says)
        refused(lambda name=name: delattr(state, name), *error, *says)
    wider = Wider.create(net())
    refused(lambda: setattr(wider, "extra", 1), *error, "state.replace(extra=...)")


def test_mappings_of_a_state_are_not_written_to() -> None:
    state = pl.State.create(net())
    weight = state.params[WEIGHT]
    writes: list[Callable[[Any], Any]] = [
        lambda params: params.__setitem__(WEIGHT, weight * 2),
        lambda params: params.__delitem__(WEIGHT),
        lambda params: params.update({WEIGHT: weight * 2}),
        lambda params: params.pop(WEIGHT),
        lambda params: params.clear(),
        lambda params: params.setdefault("more", weight),
        lambda params: params.__ior__({WEIGHT: weight * 2}),
    ]
    for write in writes:
        refused(
            lambda write=write: write(state.params), pl.FrozenDictError, TypeError, "read-only", "state.replace(...)"
        )
    assert state.params[WEIGHT] is weight


def test_replace_knows_its_fields() -> None:
    state = pl.State.create(net())
    says = ("State has no field 'paramz'", "it has model, params,", "state.remember(name, memory)", "subclassing")
    refused(lambda: state.replace(paramz=1), *VALUE, *says)


def test_writing_in_place_is_found_by_strict() -> None:
    def scale(state: pl.State) -> pl.State:
        state.params[WEIGHT].mul_(2)
        return state

    says = ("algorithm 'mine' changed state.params['0.weight'] in place", "x = x + 1", "state.replace(...)")
    breaks(fit(algorithms=[at(Event.BATCH_END, scale)], strict=True), pl.ImpurityError, RuntimeError, *says)


# Streams -------------------------------------------------------------------------------------------------------------


def test_scripts_and_streams() -> None:
    refused(lambda: pl.drive(lambda state: state), *TYPE, "not a generator", "call the function, drive(script(state))")
    stream = fit()
    pl.run(stream)
    refused(lambda: pl.run(stream), *VALUE, "the stream yielded nothing", "run to its end before")


def test_every_error_is_ours_and_a_builtin() -> None:
    errors = [getattr(pl, name) for name in pl.errors.__all__]
    for error in errors:
        assert issubclass(error, pl.PureLoopError)
        if error is not pl.PureLoopError:
            builtins = [base for base in error.__mro__ if base.__module__ == "builtins" and base is not object]
            assert builtins[0] is not Exception, f"{error.__name__} is no subclass of the builtin that fits"
            assert re.search(r"[.:]", error.__doc__ or ""), f"{error.__name__} says nothing"
