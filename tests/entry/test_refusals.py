"""What users write by mistake: an error of ours and of Python's that fits, which says what to write instead.

What can be told from the arguments is told by the call itself, before any event and before any data is drawn; what
only shows when it runs is told at the first event that shows it.
"""

from __future__ import annotations

import re
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
from pure_loop.callbacks import CheckpointSaver
from pure_loop.entry.settings import Settings
from pure_loop.errors import CheckpointNotFoundError, LossError, ModelError, ResumeError, WrappedModelError
from tests.support import problem
from tests.support.refused import Refusal, check, rows

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


def of(error: type[Exception], at_once: bool = True) -> Callable[..., Refusal]:
    return lambda name, call, *says: Refusal(name, call, error, says, at_once)


def given(error: type[Exception], *says: str, **arguments: Any) -> Refusal:
    """A call of fit; a number or a text that is passed is in the message, with the name of its argument."""
    name = ", ".join(re.sub(r" at 0x\w+", "", f"{key}={value!r}")[:40] for key, value in arguments.items())
    if len(arguments) == 1 and isinstance(next(iter(arguments.values())), int | float | str):
        says = (*says, name) if name.partition("=")[0] in SHOWN else says
    return Refusal(f"fit({name})", lambda: fit(**arguments), error, says)


TYPES, VALUES, TIMES = pl.ArgumentTypeError, pl.ArgumentError, pl.TimeFormatError
TYPE, VALUE, DATA_ERROR, RESUME = map(of, (TYPES, VALUES, pl.DataError, ResumeError))
SHOWN = {each.name for each in attrs.fields(Settings)} - {"load_path", "train_metrics", "callbacks", "train_dataloader"}
ACCURACY, AUTO = pl.metrics.accuracy(), {"microbatch_size": "auto"}


def identity(state: pl.State) -> pl.State:
    return state


def named(name: str, event: Event = Event.BATCH_END) -> pl.Algorithm:
    return pl.algorithm(event, name=name)(identity)


SETTINGS = [
    given(VALUES, "whole number of at least 1", '"auto"', microbatch_size=0),
    given(TYPES, '"auto"', microbatch_size="Auto"),
    given(VALUES, "whole number of at least 1", batches_per_epoch=0),
    given(VALUES, "train_dataloader has 3 batches, and", "can only be cut", batches_per_epoch=60),
    given(VALUES, "has 2 batches, by batches_per_step=2", batches_per_epoch=3, batches_per_step=2),
    given(TYPES, "whole number of at least 1", batches_per_step=1.5),
    given(VALUES, "whole number", steps_per_call=0),
    given(VALUES, "add compile=True", steps_per_call=2),
    given(VALUES, 'in the order "current" only', steps_per_call=2, compile=True, order="2021"),
    given(TYPES, "whole number", seed="0"),
    given(VALUES, "'amp_bf16'", "'amp_fp16'", "'fp32'", precision="fp16"),
    given(TIMES, '"2ep"', '"10ba"', '"1h30m"', max_duration="3"),
    given(TIMES, "not negative", max_duration=-1),
    given(TYPES, '"2ep"', max_duration=1.5),
    given(VALUES, "fraction of itself", '"3ep"', max_duration="0.5dur"),
    given(VALUES, "counts iterations", "iteration_length", max_duration="3iter"),
    given(TIMES, "can't read '1 hour 30 min' as a time", '(did you mean "1h30m"?)', eval_interval="1 hour 30 min"),
    given(TYPES, '"1ep"', eval_interval=1.5),
    given(TYPES, 'such as "1ep"; 0 means never', eval_interval=None),
    given(TYPES, "eval_interval is the function", "<lambda>(state)", eval_interval=lambda event, state: True),
    given(VALUES, "evaluator 'eval'", "1iter", '"1ep"', evaluators=DATA, eval_interval="1iter"),
    given(TIMES, '"2ep" (epochs), or "1e6tok"', iteration_length="3 epochs"),
    given(VALUES, '"1e6tok"', iteration_length="2ba"),
    given(VALUES, "leave iteration_length out", iteration_length="1ep", order="2021"),
    given(VALUES, "norm is above 0", clip_grad=0),
    given(TYPES, "a norm such as 1.0, or a function", clip_grad="1"),
    given(TYPES, "clip_grad is the function", "<lambda>(grads, params)", clip_grad=lambda grads: grads),
    given(VALUES, '"2021"', order="2020"),
    given(VALUES, '"skip"', nonfinite="ignore"),
    given(VALUES, '"auto"', donate="never"),
    given(VALUES, '"where possible"', compile="maybe"),
    given(TYPES, "True or False", strict=1),
    given(TYPES, "True or False", deterministic="yes"),
    given(VALUES, "'batch_ends'", "did you mean Event.BATCH_END", watch={"batch_ends"}),
    given(TYPES, "watch={Event.BATCH_END}", watch="batch_end"),
    given(VALUES, "cuda", device="gpu"),
    given(TYPES, '"cuda:0"', device=0.5),
    given(TYPES, "seconds", clock=3),
    given(TYPES, '"baseline-1"', run_name=3),
    given(VALUES, "leave verify= out", verify="0ba"),
    given(VALUES, "single batches", verify="1ep"),
    given(TYPES, '"100ba"', verify=100),
    given(CheckpointNotFoundError, "there is no checkpoint at x.safetensors", load_path="x.safetensors"),
    given(TYPES, "3 is no path", load_path=3),
    given(TYPES, 'autoresume="runs/1"', autoresume=True),
    given(TYPES, "train_metrics: 'accuracy' in metrics is no metric", train_metrics="accuracy"),
    given(VALUES, "train_metrics has two metrics of one name", train_metrics=[ACCURACY, ACCURACY]),
    given(VALUES, "the label 'train' of an evaluator is", train_metrics=ACCURACY, evaluators={"train": DATA}),
    given(VALUES, "two algorithms", train_metrics=ACCURACY, algorithms=[named("train_metrics")]),
    given(VALUES, 'algorithm is called "microbatch_size"', algorithms=[named("microbatch_size")], **AUTO),
]

# Calls with other arguments, and what the names of other libraries are here.
CALLS = [
    given(TYPES, "fit has no argument 'epochs'", 'write max_duration="3ep"', epochs=3),
    given(TYPES, "no argument 'lr'", "write optimizer=pl.optim.adamw(lr=0.001)", lr=1e-3),
    given(TYPES, "DataLoader(dataset, batch_size=64)", "microbatch_size=", batch_size=64),
    given(TYPES, "no argument 'microbatchsize'", "did you mean microbatch_size=?", microbatchsize=4),
    given(TYPES, "write pl.rehearse(...)", fast_dev_run=True),
    given(TYPES, 'stop_before="19h50m"', max_time="20h"),
    given(TYPES, "no argument 'zork'", "it has model_or_state, train_dataloader, loss,", zork=4),
    given(TYPES, "given train_dataloader twice", "leave one of them out", train_dataloader=DATA),
    TYPE("wrong", lambda: pl.fit(net(), DATA, epochs=3), "no argument 'epochs'", "fit also needs optimizer: pl.fit(mo"),
    TYPE("two missing", lambda: pl.fit(net(), DATA), "fit needs optimizer and max_duration", 'max_duration="3ep"'),
    TYPE("three missing", lambda: pl.fit(net()), "needs train_dataloader and optimizer and max_duration"),
    TYPE("first", lambda: pl.fit(model=net()), "no argument 'model'", "write it first and without a name: pl"),
    TYPE("third", lambda: pl.fit(net(), DATA, id), "takes 2 arguments without their names", "was given 3"),
    TYPE("explain", lambda: pl.explain(net(), DATA, epochs=3), "fit has no argument 'epochs'"),
    VALUE("depth", lambda: pl.explain(net(), DATA, optimizer=SGD, max_duration=1, depth=-1), "depth"),
    TYPE("evaluate needs", lambda: pl.evaluate(net()), "evaluate needs evaluators", '{"val": dataloader}'),
    TYPE("evaluate", lambda: evaluate(metrics=[]), "evaluate has no argument 'metrics'", "pl.Evaluator(dataloader, me"),
    TYPE("predict", lambda: pl.predict(net(), DATA, max_duration=1), "predict has no argument 'max_duration'"),
    TYPE("predict needs", lambda: pl.predict(net()), "predict needs dataloader: pl.predict(model, dataloader"),
    TYPE("largest size needs", lambda: pl.largest_microbatch(net(), DATA), "optimizer"),
    TYPE("Evaluator", lambda: pl.Evaluator(DATA, metric=[]), "no argument 'metric'; did you mean metrics=?"),
    TYPE("t_max", lambda: pl.schedules.cosine(t_max="3ep"), "cosine has no argument 't_max': write time=\"3ep\""),
    TYPE("save_top_k", lambda: CheckpointSaver("runs", save_top_k=3), 'keep_best=3, metric="val/loss", mode='),
    TYPE("save_dir", lambda: pl.loggers.CSVLogger(save_dir="runs"), "write path=..., the path of the file and not"),
    TYPE("no generator", lambda: pl.drive(identity), "not a generator", "call the function, drive(script(state))"),
    TYPE("a stream of fit", lambda: pl.drive(fit()), "script is a stream of fit", "fit(..., algorithms=[...])"),
]


def of_torch() -> Any:
    return fit(optimizer=torch.optim.AdamW(net().parameters()))


OPTIMIZERS = [
    given(TYPES, "optimizer= is a list", "pl.optim.partition", "pl.drive", optimizer=[SGD, SGD]),
    TYPE("torch's", of_torch, "is a torch.optim.AdamW", "in place", "Write pl.optim.adamw(lr=...) or", "from_torch"),
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
LOSSES = [
    given(TYPES, "the class CrossEntropyLoss", "CrossEntropyLoss()", loss=nn.CrossEntropyLoss),
    given(TYPES, "'cross_entropy' of type str", "torch.nn.functional.cross_entropy", loss="cross_entropy", seed=0),
    given(VALUES, "Bilinear has parameters", "submodule of the model", loss=nn.Bilinear(2, 2, 1)),
    given(TYPES, "two arguments", "<lambda>(outputs, targets)", loss=lambda outputs: 0),
    given(VALUES, "no loss", "pl.Task(loss=...)", "give Sequential a method loss(outputs, batch)", loss=None),
    given(VALUES, "no loss: give loss=", model=WithLoss(), loss=None),
    VALUE("of one of two", lambda: evaluate({"val": NO_LOSS, "more": DATA}, loss=None), "no loss: give loss="),
    VALUE("two losses", lambda: fit(task=pl.Task(loss=lambda o, b: 0)), "loss= is given, and task= has a loss, too"),
    given(VALUES, "loss= and task= are both a Task", loss=pl.Task(), task=pl.Task()),
    given(TYPES, "pl.Task(forward=..., loss=...)", task=3),
    TYPE("fields of a task", lambda: pl.Task(forward=3), "pl.Task(forward=3)", "give a function"),
    TYPE("an evaluator's loss", lambda: pl.Evaluator(DATA, loss=nn.MSELoss), "Evaluator: loss is the class MSELoss"),
]

METRIC = ("evaluator 'val'", "is no metric", "pl.metrics.accuracy()", "pl.metrics.mean")
EVALUATORS = [
    given(TYPES, "needs a label", '{"val": ...', evaluators=[NO_LOSS]),
    given(TYPES, "write a mapping of labels", "{'val': ...}", evaluators=[("val", NO_LOSS)]),
    given(VALUES, "evaluators has the label 'val' twice", evaluators=[("val", NO_LOSS)] * 2, seed=0),
    given(TYPES, "label 1 is not a text", evaluators={1: DATA}),
    given(TYPES, "evaluator 'val'", "NoneType is no dataloader", evaluators={"val": None}),
    given(pl.DataError, "evaluator 'val'", "0 batches", evaluators={"val": []}),
    TYPE("metric's name", lambda: fit(evaluators={"val": pl.Evaluator(DATA, metrics="accuracy")}), *METRIC),
    of(TIMES)("often", lambda: pl.Evaluator(DATA, interval="often"), "Evaluator", "interval", "'often'"),
    VALUE("batches=0", lambda: pl.Evaluator(DATA, batches=0), "Evaluator", "batches", "0"),
    TYPE("size=True", lambda: pl.Evaluator(DATA, microbatch_size=True), "Evaluator", "microbatch_size", "True"),
    TYPE("none to evaluate", lambda: evaluate(None), "evaluators=None", "mapping of labels"),
    DATA_ERROR("none in evaluate", lambda: evaluate([]), "evaluator 'eval'", "0 batches"),
]


def defined(function: Any = identity, **changes: Any) -> Callable[[], Any]:
    return lambda: pl.algorithm(Event.INIT, **changes)(function)


def made(name: Any, handlers: Any, **changes: Any) -> Callable[[], Any]:
    return lambda: pl.Algorithm(name, handlers, **changes)


AT_END = {Event.BATCH_END: identity}
ALGORITHMS = [
    given(VALUES, "two algorithms are named 'a'", "name='a_2'", algorithms=[named("a"), named("b"), named("a")]),
    given(VALUES, "are named 'b'", algorithms=[pl.compose(named("a"), named("b")), named("b")], seed=0),
    given(TYPES, "identity in algorithms=", "bound to no event", "pl.algorithm(Event.BATCH_E", algorithms=[identity]),
    given(TYPES, "if it makes one, call it: ema(...)", algorithms=[pl.algorithms.ema]),
    given(TYPES, "the class Algorithm", algorithms=[pl.Algorithm]),
    given(TYPES, "of type SpeedMonitor", "callbacks=", algorithms=[pl.callbacks.SpeedMonitor()]),
    given(TYPES, "algorithms=None", "give a list", algorithms=None),
    given(TYPES, "give a list", algorithms={"a": named("a")}),
    VALUE("no brackets", lambda: pl.algorithm(identity), "'identity' binds no event", "@pl.algorithm(Event.BATCH_END"),
    VALUE("no event", lambda: pl.algorithm(), "binds no event", "pl.algorithm(Event.BATCH_END)"),
    VALUE("no handler", made("x", {}), "algorithm 'x' binds no event", "{Event.BATCH_END: function}"),
    VALUE("near an event", lambda: pl.algorithm("after_los")(identity), "'after_los' is not", "mean Event.AFTER_LOSS?"),
    VALUE("unknown event", lambda: pl.algorithm("lunch")(identity), "'lunch' is not an event", "INIT, BEFORE_LOAD"),
    TYPE("list", lambda: pl.algorithm([Event.BATCH_END])(identity), "one by one", "pl.algorithm(Event.BATCH_START, E"),
    TYPE("list of handlers", made("x", [Event.BATCH_END]), "algorithm 'x'", "mapping of events to functions"),
    TYPE("3 as handler", made("x", {Event.BATCH_END: 3}), "algorithm 'x' at BATCH_END", "3 is not a function"),
    TYPE("empty name", made("", AT_END), "not empty"),
    TYPE("claims", made("x", AT_END, claims="mixes targets"), "claims='mixes targets'", "give a set of texts"),
    TYPE("handler of three", defined(lambda a, b, c: a), "takes 3 arguments", "(state, stages)"),
    TYPE("handler of events", defined(lambda event, state: state), "(event, state)", "state.event"),
    TYPE("init=3", defined(init=3), "'identity': init=3", "init=lambda state: 0"),
    TYPE("init of none", defined(init=lambda: 3), "init=", "function of (state)"),
    of(TIMES)("when=often", defined(when="often"), "when='often'", '"10ba"'),
    TYPE("when=0.5", defined(when=0.5), "when=0.5", '"10ba"', "function of the State"),
    TYPE("when of events", defined(when=lambda e, s: True), "when is the function", "<lambda>(state)"),
    VALUE("never due", lambda: pl.algorithm(Event.BATCH_END, when="1ep")(identity), "would never run: every 1ep"),
    of(TIMES)("part of an epoch", lambda: pl.every("1.5ep"), "'1.5ep'", "whole numbers", '"2ep"'),
]


def callback(**methods: Any) -> pl.Callback:
    return type("Mine", (pl.Callback,), methods)()


def observe(self: Any, state: Any, logger: Any) -> None:
    pass


def observed(row: Callable[..., Refusal], name: str, callbacks: Any, *says: str) -> Refusal:
    return row(name, lambda: fit(callbacks=callbacks), *says)


METHOD = "def batch_end(self, state, logger)"
CALLBACKS = [
    observed(VALUE, "epoch_ends", [callback(epoch_ends=observe, batch_end=observe)], "did you mean epoch_end("),
    observed(VALUE, "on_batch_end", [callback(on_batch_end=observe)], "'on_batch_end'", "did you mean batch_end("),
    observed(VALUE, "training_start", [callback(training_start=observe)], "'training_start'", "mean fit_start("),
    observed(VALUE, "eval_start_all", [callback(batch_end=observe, eval_start_all=observe)], "'eval_start_all'"),
    observed(VALUE, "none", [callback()], "Mine observes no event", "epoch_end(self, state, logger)"),
    observed(TYPE, "method", [callback(batch_end=lambda self, state: None)], "batch_end(state)", METHOD),
    observed(TYPE, "function of a state", [lambda state: None], "two arguments", "<lambda>(event, state)"),
    observed(TYPE, "class of callbacks", [pl.Callback], "the class Callback", "Callback()"),
    observed(TYPE, "algorithm", [named("a")], "the algorithm Algorithm('a', batch_end)", "algorithms="),
    observed(TYPE, "a number in a list", [3], "holds 3 of type int", "function of (event, state)"),
    observed(TYPE, "callbacks=None", None, "callbacks=None", "give a list"),
    given(TYPES, "loggers= holds", loggers=[print]),
]


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


class FSDPModule:
    """What fully_shard mixes into a module's class."""


class Sharded(FSDPModule, nn.Linear):
    pass


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda gradient: gradient * 0)
    return model


# Each is refused by fit, by evaluate and by State.create.
MODELS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no parameters": (nn.ReLU, ModelError, "ReLU has no parameters"),
    "layers in a list": (Bare, ModelError, "plain list"),
    "frozen": (lambda: net().requires_grad_(False), ModelError, "requires_grad_(True)"),
    "lazy": (lambda: nn.LazyLinear(3), ModelError, "'weight' of a lazy module"),
    "meta": (lambda: nn.Linear(4, 3, device="meta"), ModelError, "to_empty"),
    "max_norm": (lambda: nn.Embedding(3, 3, max_norm=1.0), ModelError, "torch.renorm"),
    "twice": (lambda: nn.Sequential(Twice()), ModelError, "model.0.decayed holds '0.layer.weight'"),
    "hook": (hooked, ModelError, "parameter 'weight' has a hook"),
    "DDP": (lambda: DistributedDataParallel(net()), WrappedModelError, "DistributedDataParallel). pure_loop calls"),
    "inside": (lambda: nn.Sequential(DistributedDataParallel(net())), WrappedModelError, "model.0 is replicated"),
    "FSDP2": (lambda: Sharded(4, 3), WrappedModelError, "fully_shard"),
    "DataParallel": (lambda: nn.DataParallel(net()), WrappedModelError, "model.module"),
    "compiled": (lambda: torch.compile(net(), backend="eager"), WrappedModelError, "model._orig_mod"),
    "scripted": (lambda: torch.jit.script(net()), WrappedModelError, "TorchScript"),
    "class": (lambda: nn.Linear, TYPES, "the class Linear"),
    "state_dict": (lambda: net().state_dict(), TYPES, "model.load_state_dict"),
    "function": (lambda: identity, TYPES, "torch.nn.Module nor a pure_loop State"),
    "data": (lambda: DATA, TYPES, "the model comes first"),
}


def dataset(size: int) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 4), torch.zeros(size))


LOADERS = [
    given(pl.DataError, "train_dataloader", "0 batches", data=[]),
    DATA_ERROR("empty dataset", lambda: fit(data=DataLoader(dataset(0))), "0 batches", "dataset empty"),
    DATA_ERROR("drop_last", lambda: fit(data=DataLoader(dataset(3), 4, drop_last=True)), "0 batches", "drop_last=True"),
    TYPE("dataset", lambda: fit(data=dataset(8)), "is a dataset", "DataLoader(dataset, batch_size"),
    TYPE("tensor", lambda: fit(data=X), "Tensor is no dataloader", "TensorDataset"),
    given(TYPES, "batches(), not batches", data=lambda: iter(DATA)),
    TYPE("a model as data", lambda: fit(data=net()), "the model comes first", "fit(model, train_dataloader"),
    TYPE("None to predict", lambda: pl.predict(net(), None), "NoneType is no dataloader"),
]


@attrs.frozen(eq=False, kw_only=True)
class Wider(pl.State):
    extra: Any = None


def kept(stream: Any, at: Event) -> pl.State:
    return next(state for event, state in stream if event is at)


def trained(optimizer: Any = None, **changes: Any) -> pl.State:
    """With the memory of AdamW."""
    adamw = pl.optim.adamw(lr=0.01)
    return kept(problem.fit(optimizer=optimizer or adamw, max_duration="1ba"), Event.BATCH_END).replace(**changes)


LINEAR, WIDE = (pl.State.create(model) for model in (nn.Linear(4, 3), nn.Linear(4, 9)))
AFRESH = "fit(state.replace(opt_state=None), ...)"


def resuming(name: str, start: Callable[[], pl.State], *says: str, **changes: Any) -> Refusal:
    options = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "2ep", **changes}
    return RESUME(name, lambda: fit(start(), **options), *says)


def evaluated() -> pl.State:
    return kept(evaluate(problem.points()), Event.EVAL_STANDALONE_START)


def predicted() -> pl.State:
    return kept(pl.predict(net(), problem.points()), Event.PREDICT_BATCH_END)


AMSGRAD, MOMENTUM = pl.optim.adamw(lr=0.1, amsgrad=True), pl.optim.sgd(lr=0.1, momentum=0.9)
NEEDS = ("another optimizer than adamw", "it holds step, skipped, exp_avg", "needs step", "max_exp_avg_sq", AFRESH)
FROZEN = of(pl.FrozenStateError)
STATES = [
    resuming("of an evaluation", evaluated, "EVAL_STANDALONE_START", "the State that you evaluated"),
    resuming("of a prediction", predicted, "PREDICT_BATCH_END", "the State that you predicted from"),
    resuming("other names", lambda: trained(model=LINEAR.model), "missing ['bias', 'weight']", "state.with_module(mod"),
    resuming("other shapes", lambda: LINEAR.replace(params=WIDE.params), "params['weight'] has shape (9, 4) in this S"),
    RESUME("to evaluate", lambda: pl.evaluate(LINEAR.replace(params=WIDE.params), DATA), "params['weight'] has shape"),
    resuming("unknown frozen", lambda: state(frozen={"9"}), "frozen names '9', which the model doesn't have"),
    resuming("fewer memories", trained, *NEEDS, optimizer=AMSGRAD),
    resuming("no memory", lambda: trained(SGD), "it holds nothing, and sgd needs momentum_buffer", optimizer=MOMENTUM),
    resuming("too many memories", trained, "it holds step, skipped", "sgd needs nothing", AFRESH, optimizer=SGD),
    resuming("memory of names", lambda: LINEAR.replace(opt_state=trained().opt_state), "by adamw for another model"),
    resuming(
        "memory of shapes", lambda: LINEAR.replace(opt_state=memory_of(WIDE)), "['exp_avg']['weight'] has shape (9, 4)"
    ),
    VALUE("another seed", lambda: fit(trained(), seed=5), "seed=5", "has seed 0", "fit(state.replace(seed=5), ...)"),
    FROZEN("set", lambda: setattr(state(), "loss", 1), "state.loss can't be changed", "state.replace(loss=...)"),
    FROZEN("delete", lambda: delattr(state(), "grads"), "state = state.replace(grads=...)"),
    FROZEN("set a new one", lambda: setattr(Wider.create(net()), "extra", 1), "state.replace(extra=...)"),
    VALUE("near a field", lambda: state(paramz=1), "State has no field 'paramz' (did you mean 'params'?)"),
    VALUE("no field", lambda: state(zork=1), "no field 'zork'; it has model, params,", "state.remember(name, memory)"),
    VALUE("gradients", lambda: state(gradients={}), "no field 'gradients' (gradients are state.grads"),
    TYPE("params=3", lambda: state(params=3), "params is a mapping", "int", "state.params"),
    TYPE("grads=3", lambda: state(grads=[1]), "grads is a mapping", "list", "state.grads"),
    TYPE("frozen as text", lambda: state(frozen=WEIGHT), "set of names of parameters", "'0.weight' of type str"),
    TYPE("a field's item", lambda: state()["params"], "state['params']", "write state.params"),
    TYPE("a parameter's item", lambda: state()[WEIGHT], "state.params['0.weight']"),
    TYPE("a number's item", lambda: state()[0], "state[0]", "a record"),
    TYPE("State.create(seed=)", lambda: pl.State.create(net(), seed=1.5), "seed=1.5"),
    VALUE("count_batch", lambda: state().count_batch(samples=-1), "samples", "-1"),
    TYPE("module(training=)", lambda: state().module(training=1), "training", "1"),
]


def memory_of(start: pl.State) -> Any:
    return kept(problem.fit(start, optimizer=pl.optim.adamw(lr=0.01)), Event.BATCH_END).opt_state


# What only shows when it runs ----------------------------------------------------------------------------------------


def at(event: Event, function: Any) -> pl.Algorithm:
    return pl.algorithm(event, name="mine")(function)


def mine(event: Event, name: str, function: Any, *says: str, error: Any = pl.AlgorithmStructureError) -> Refusal:
    """What an algorithm does at an event."""

    def call() -> Any:
        settings = {"evaluators": problem.points(1), "max_duration": "1ep", "optimizer": MOMENTUM}
        return fit(algorithms=[at(event, function)], **settings)

    return Refusal(f"{name} at {event}", call, error, ("lgorithm 'mine'", f"at {event.name}", *says), at_once=False)


def puts(make: Callable[[torch.Tensor], Any], name: str = WEIGHT) -> Callable[[pl.State], pl.State]:
    return lambda state: state.replace(params={**state.params, name: make(state.params[WEIGHT])})


def sets(**fields: Any) -> Callable[[pl.State], pl.State]:
    """To a value, or to a function of the field."""
    return lambda state: state.replace(
        **{name: value(getattr(state, name)) if callable(value) else value for name, value in fields.items()}
    )


def again(state: pl.State, stages: Any) -> pl.State:
    return stages.gradients(state)


def reshaped(memory: Any) -> Any:
    return {"momentum_buffer": pl.FrozenDict((name, each[None]) for name, each in memory["momentum_buffer"].items())}


INIT, START, FORWARD, LOSS = Event.INIT, Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS
BACKWARD, GRADS, TRAINED, END = Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END
RETURN, OLD = {"error": pl.AlgorithmReturnError}, {"error": LossError}
OF_ANOTHER = Wider(model=LINEAR.model, params=LINEAR.params)
MINE = [
    mine(INIT, "None", lambda state: None, "returned None", "return state.replace(...)", "`return state`", **RETURN),
    mine(LOSS, "two", lambda state: (state, state), "returned tuple, not a State", "state.replace(...)", **RETURN),
    mine(Event.EVAL_START, "module", lambda state: state.module(), "returned Sequential, not a State", **RETURN),
    mine(Event.FIT_END, "Wider", lambda state: OF_ANOTHER, "a Wider where it was given a State", **RETURN),
    mine(END, "shape", puts(lambda w: w[:2]), "params['0.weight'] from (8, 4)", "to (2, 4)"),
    mine(END, "dtype", puts(lambda w: w.double()), "torch.float32", "to (8, 4) torch.float64"),
    mine(END, "device", puts(lambda w: w.to("meta")), "on cpu to", "on meta"),
    mine(END, "float", puts(lambda w: 3.0), "put float into params['0.weight']", "not a tensor"),
    mine(END, "name", puts(lambda w: w, "more"), "unknown ['more']", "Keep the names", "state.with_module"),
    mine(END, "names", lambda s: s.replace(params={WEIGHT: s.params[WEIGHT]}), "missing ['0.bias', '2.bias'"),
    mine(END, "buffers", sets(buffers={"x": X}), "names in buffers", "unknown ['x']"),
    mine(GRADS, "part", sets(grads=lambda g: {n: t[:1] for n, t in g.items()}), "grads['0.weight'] from (8, 4)"),
    mine(TRAINED, "no grads", sets(grads=lambda grads: {}), "names in grads", "missing"),
    mine(TRAINED, "grads=None", sets(grads=None), "grads", "multiply them by 0"),
    mine(END, "no memory", sets(opt_state=None), "changed", "opt_state"),
    mine(END, "more memory", sets(opt_state=lambda memory: {**memory, "more": X}), "the structure of opt_state"),
    mine(END, "memory", sets(opt_state=reshaped), "the shape or dtype of opt_state['momentum_buffer']['0."),
    mine(END, "time", sets(timestamp=pl.Timestamp(batch=9)), "changed timestamp", "only the loop counts"),
    mine(END, "seed", sets(seed=9), "changed seed", "pl.random.derive"),
    mine(END, "position", sets(position=INIT), "position", "only the loop"),
    mine(END, "event", sets(event=INIT), "returned a State of INIT", "had kept"),
    mine(END, "lunch", sets(event="lunch"), "returned a State of 'lunch'", "changed state.event"),
    mine(INIT, "structure", lambda s: s.replace(model=net()), "model to a Sequential", "state.with_module(module)"),
    mine(END, "model", lambda s: s.with_module(nn.Linear(4, 3)), "changed model", "at INIT, with state.with_module"),
    mine(START, "batch", sets(batch=None), "changed batch to None", "the step needs it"),
    mine(FORWARD, "microbatch", sets(microbatch=None), "changed microbatch to None"),
    mine(START, "scale", sets(loss_scale=2.0), "changed loss_scale to a float", "'amp_fp16'"),
    mine(END, "skipped", sets(skipped=1), "changed skipped to a int", "a tensor"),
    mine(END, "nonfinite", sets(nonfinite=None), "changed nonfinite to a NoneType", "a tensor"),
    mine(START, "stop", sets(stop=True), "changed stop", "set it at BATCH_CHECKPOINT"),
    mine(Event.EVAL_END, "stop", sets(stop=True), "changed stop", "keep it in algorithm_state"),
    mine(END, "tensor", sets(stop=torch.tensor(True)), "stop to tensor(True) of type Tensor", "bool(tensor)"),
    mine(Event.BEFORE_TRAIN_BATCH, "frozen", sets(frozen={WEIGHT}), "changed frozen", "at BATCH_START"),
    mine(TRAINED, "frozen", sets(frozen={WEIGHT}), "changed frozen", "at BATCH_START"),
    mine(Event.EVAL_END, "frozen", sets(frozen={WEIGHT}), "changed frozen", "at BATCH_START"),
    mine(END, "no parameter", sets(frozen={"9"}), "frozen", "names '9', which the model doesn't have"),
    mine(INIT, "all frozen", lambda s: s.replace(frozen=set(s.params)), "nothing would be left to train"),
    mine(Event.AFTER_FORWARD, "decay", puts(lambda w: w * 0.9), "replaced params at", "AFTER_BACKWARD on"),
    mine(BACKWARD, "decay", puts(lambda w: w * 0.9), "replaced params at BEFORE_BACKWARD", "BEFORE_FORWARD or earlier"),
    mine(LOSS, "vector", sets(loss=lambda loss: loss.expand(2)), "the loss that", ", batch 0, has shape", **OLD),
    mine(LOSS, "no total", sets(loss=lambda loss: {"main": loss}), "needs the key 'total'", **OLD),
    mine(BACKWARD, "detached", sets(loss=lambda loss: loss.detach()), "has no graph", **OLD),
    mine(GRADS, "loss", sets(loss=1.0), "is 1.0 of type float", **OLD),
    mine(TRAINED, "loss", sets(loss=1.0), "is 1.0 of type float", **OLD),
    mine(START, "write", lambda s: setattr(s, "loss", 1), "raised by algorithm", error=pl.FrozenStateError),
    mine(END, "pop", lambda s: s.params.pop(WEIGHT), "raised by algorithm", error=pl.FrozenDictError),
    mine(END, "misspelt", sets(losss=3), "raised by algorithm", "batch 1", error=VALUES),
    mine(GRADS, "again", again, "stages.gradients was called at AFTER_BACKWARD", error=VALUES),
    *[
        mine(event, "grads", lambda s: s.grads is None, "Bind the algorithm to one of", error=pl.GradientsNotReadyError)
        for event in (INIT, BACKWARD, Event.BATCH_CHECKPOINT, Event.EVAL_BATCH_END)
    ],
]


class NoLoss(nn.Linear):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return None


ELSEWHERE = nn.Linear(4, 3)


class CallsAnother(nn.Linear):
    """A module whose forward calls a model of a global name, whose parameters are not its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ELSEWHERE(x)


def nothing(outputs: Any, batch: Any) -> Any:
    return None


def of_another() -> Any:
    model = nn.Linear(4, 3)
    return fit(model, loss=lambda outputs, y: functional.cross_entropy(outputs, y) + model.weight.square().sum())


def second(name: str, make: Callable[[Any, Any, Any], Any], *says: str) -> Refusal:
    """A loss that is good for one batch and bad from the second on."""

    def call() -> Any:
        calls = []

        def loss(outputs: Any, targets: Any) -> Any:
            calls.append(1)
            good = functional.cross_entropy(outputs, targets)
            return good if len(calls) == 1 else make(good, outputs, targets)

        return fit(loss=loss)

    return BAD_LOSS(f"loss of {name}", call, "of batch 1", *says)


def on(batch: Any, name: str, *says: str) -> Refusal:
    return BAD_DATA(name, lambda: fit(data=[batch]), *says)


def clips(row: Callable[..., Refusal], name: str, clip: Any, *says: str) -> Refusal:
    return row(f"clips {name}", lambda: fit(clip_grad=clip), "clip_grad=<lambda>", *says)


def measuring(give: Callable[[Any], Any]) -> Callable[[], Any]:
    evaluator = pl.Evaluator(problem.points(2), metrics=[pl.metrics.mean(lambda o, b: give(o), "acc")])
    return lambda: evaluate({"val": evaluator})


def without_length() -> Any:
    return type("Empty", (), {"__iter__": lambda self: iter([])})()


BAD_DATA, BAD_TYPE, BAD_VALUE = of(pl.DataError, False), of(TYPES, False), of(VALUES, False)
BAD_LOSS, BAD_MODEL, BAD_RETURN = of(LossError, False), of(ModelError, False), of(pl.CallbackReturnError, False)
FIRST = "the loss at AFTER_LOSS of batch 0, which"
OTHER_SIZE = (X, Y[:3])
HELD_OUT = {"good": [(X, Y)], "held out": [(X, Y), OTHER_SIZE]}
NO_SPLIT = {"data": [(X, Y, object())], "loss": pl.Task(forward=lambda model, batch: model(batch[0]), loss=nothing)}
OWN_LOSS = ("the loss in evaluation, which nothing(outputs, targets) returned, is None", "in evaluator 'eval', batch 0")
EACH, SPLIT = functional.cross_entropy, "microbatches of 2"
RUNS: dict[str, list[Refusal]] = {}
RUNS["losses"] = [
    second("shape (4,)", lambda loss, o, t: EACH(o, t, reduction="none"), "(4,)", "loss.mean()"),
    second("shape (1,)", lambda loss, o, t: loss[None], "shape (1,)", "one number"),
    second("whole numbers", lambda loss, o, t: (o.argmax(1) == t).sum(), "torch.int64", "can't be differentiated"),
    second("a float", lambda loss, o, t: loss.item(), "of type float", "without .item() or float()"),
    second("nothing", lambda loss, o, t: None, "None of type NoneType", "is a `return` missing?"),
    second("two", lambda loss, o, t: (loss, o), "of type tuple", "a dict of such with the key 'total'"),
    second("no total", lambda loss, o, t: {"main": loss}, "keys ['main']", "needs the key 'total'"),
    second("total (1,)", lambda loss, o, t: {"total": loss[None]}, "shape (1,)"),
    second("part (4, 3)", lambda loss, o, t: {"total": loss, "part": o}, "the part 'part', which is of shape (4, 3)"),
    second("part 'x'", lambda loss, o, t: {"total": loss, "part": "x"}, "the part 'part', which is a str"),
    second("no graph", lambda loss, o, t: loss.detach(), "does not depend on any parameter", "detached", ".item()"),
]
RUNS["whose losses"] = [
    BAD_LOSS("a task's", lambda: fit(loss=pl.Task(loss=nothing)), f"{FIRST} nothing(outputs, batch) returned,"),
    BAD_LOSS("a module's", lambda: fit(loss=nn.CrossEntropyLoss(reduction="none")), f"{FIRST} CrossEntropyLoss(outpu"),
    BAD_LOSS("a model's", lambda: fit(NoLoss(4, 3), loss=None), f"{FIRST} the model's loss(outputs, batch) returned,"),
    BAD_LOSS("another tensor's", lambda: fit(loss=lambda o, t: torch.ones((), requires_grad=True)), "parameter"),
    BAD_MODEL("another model's", lambda: fit(CallsAnother(4, 3)), "parameter"),
    BAD_MODEL("holds the module", of_another, "shape (3, 4)", "state.params"),
    BAD_LOSS("evaluated", lambda: evaluate([(X, Y)], loss=nothing), *OWN_LOSS),
    BAD_LOSS("evaluated (4,)", lambda: evaluate([(X, Y)], loss=lambda o, t: o.sum(1)), "has shape (4,)"),
    BAD_LOSS("evaluated no total", lambda: evaluate([(X, Y)], loss=lambda o, t: {"main": o.sum()}), "key 'total'"),
]
RUNS["batches"] = [
    on(X, "a tensor", "a batch is a Tensor of 4, tensor (4, 4) float32", "(inputs, targets)", "model(batch)"),
    on((X, Y, Y), "three", "a tuple of 3", "tensor (4,) int64, tensor (4,) int64)", "pl.Task(forward=", "(batch[0])"),
    on({"ids": X}, "a dict", "a dict of 1, {'ids': tensor (4, 4) float32}", "pl.Task(forward=", "model(batch['ids'])"),
    on("text", "a text", "can't count the samples", "type str", "raised by batch 0 of train_dataloader"),
    on((X[0, 0], 3), "a scalar", "can't count the samples", "type tuple", "but (tensor () float32, int)"),
    on((X[:0], Y[:0]), "no sample", "batch 0"),
    on(
        OTHER_SIZE, "two sizes", "batch[0]: 4", "batch[1]: 3, in (tensor (4, 4) float32, tensor (3,)", "first dimension"
    ),
    BAD_DATA(
        "sizes held out", lambda: fit(evaluators=HELD_OUT), "batch[1]: 3", "raised in evaluator 'held out', batch"
    ),
    BAD_DATA("sizes evaluated", lambda: evaluate(HELD_OUT), "batch[1]: 3", "raised in evaluator 'held out', batch 1"),
]
RUNS["data"] = [
    BAD_DATA("an iterator of none", lambda: fit(data=iter([])), "train dataloader gave no batch in epoch 0"),
    BAD_DATA("no batch", lambda: fit(data=without_length()), "train dataloader gave no batch in epoch 0"),
    BAD_DATA("exhausted", lambda: fit(data=iter(DATA), max_duration="2ep"), "iterator is exhausted", "batches_per_epo"),
    BAD_DATA("not to be split", lambda: fit(**NO_SPLIT, microbatch_size=2), "split batch[2]", SPLIT, "batch_size=None"),
]
RUNS["counts and metrics"] = [
    BAD_DATA(
        "weight", lambda: fit(task=pl.Task(weight=lambda batch: -1.0)), "batch 0", "finite, not negative", "Task("
    ),
    BAD_DATA("no weight", lambda: fit(task=pl.Task(weight=lambda batch: 0.0)), "batch 0", "finite, not negative"),
    BAD_DATA("no tokens", lambda: fit(max_duration="9tok"), "batch 0", "no tokens", "pl.Task(tokens="),
    BAD_TYPE("one number a batch", measuring(lambda o: o.mean()), "metric 'acc': its function gave a tensor of shape"),
    BAD_TYPE("a float a batch", measuring(lambda o: 0.5), "a float", "one number a sample"),
    BAD_DATA("7 classes", lambda: fit(train_metrics=pl.metrics.confusion_matrix(7)), "confusion_matrix", "train_metri"),
]
RUNS["clipping"] = [
    clips(BAD_TYPE, "to None", lambda g, p: None, "returned NoneType", "by name"),
    clips(BAD_VALUE, "to nothing", lambda g, p: {}, "other names", "missing ['0.bias'"),
    clips(BAD_VALUE, "more", lambda g, p: {**g, "x": X}, "unknown ['x']"),
    clips(BAD_TYPE, "to floats", lambda g, p: {**g, "0.bias": 0.5}, "float for '0.bias'"),
    clips(BAD_VALUE, "dtypes", lambda g, p: {n: t.double() for n, t in g.items()}, "dtype torch.float64", "'0.weight'"),
    clips(BAD_VALUE, "shapes", lambda g, p: {n: t[None] for n, t in g.items()}, "shape (1, ", "'0.weight'"),
    clips(BAD_VALUE, "devices", lambda g, p: {n: t.to("meta") for n, t in g.items()}, "device meta", "'0.weight'"),
]
RUNS["callbacks"] = [
    observed(
        BAD_RETURN, "batch_end", callback(batch_end=lambda *_: 3), "Mine returned int at BATCH_END", "@pl.algorit"
    ),
    observed(BAD_RETURN, "run_event", callback(run_event=lambda *_: 3), "callback Mine returned int at INIT"),
    observed(
        BAD_RETURN, "a function", lambda event, state: 3, "callback <lambda> returned int at INIT", "and return n"
    ),
]
TABLE = [*SETTINGS, *CALLS, *OPTIMIZERS, *LOSSES, *EVALUATORS, *ALGORITHMS, *CALLBACKS, *LOADERS, *STATES]


@rows(TABLE)
def test_the_call_says_what_to_write_and_draws_no_data(refusal: Refusal) -> None:
    Watched.drawn = 0
    check(refusal)
    assert Watched.drawn == 0


@pytest.mark.filterwarnings("ignore")  # torch deprecates TorchScript, and importing its compiler warns
def test_models_that_would_train_wrongly_are_refused_at_each_door() -> None:
    doors = fit, lambda model: pl.evaluate(model, DATA, loss=EACH), pl.State.create
    for name, (make, error, says) in MODELS.items():
        model, Watched.drawn = make(), 0
        for door in doors:
            check(Refusal(name, lambda door=door, model=model: door(model), error, (says,)))
        assert Watched.drawn == 0


@pytest.mark.parametrize("subject", RUNS)
def test_what_only_shows_when_it_runs(subject: str) -> None:
    for refusal in RUNS[subject]:
        check(refusal)


@pytest.mark.parametrize("event", sorted({refusal.name.rpartition(" ")[2] for refusal in MINE}))
def test_an_algorithm_is_named_with_its_event_which_does_not_come(event: str) -> None:
    for refusal in [refusal for refusal in MINE if refusal.name.endswith(f" at {event}")]:
        seen: list[str] = []

        def call(refusal: Refusal = refusal, seen: list[str] = seen) -> Iterator[Any]:
            for at, state in refusal.call():
                seen.append(at)
                yield at, state

        check(attrs.evolve(refusal, call=call))
        assert event not in seen, refusal.name


def test_mappings_of_a_state_are_not_written_to() -> None:
    params = state().params
    weight = params[WEIGHT]
    writes: list[Callable[[], Any]] = [
        *(lambda: params.__setitem__(WEIGHT, X), lambda: params.__delitem__(WEIGHT), lambda: params.pop(WEIGHT)),
        *(
            lambda: params.update({WEIGHT: X}),
            lambda: params.__ior__({WEIGHT: X}),
            lambda: params.setdefault("more", X),
        ),
        params.clear,
    ]
    for write in writes:
        check(Refusal("write", write, pl.FrozenDictError, ("read-only", "state.replace(...)")))
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
        says = (
            f"kept at {event.name}, in the middle",
            f"Keep the one at {following.name}",
            "Boundaries are AFTER_LOAD",
        )
        check(Refusal(event, lambda start=start: fit(start, max_duration="2ep"), ResumeError, says))


def test_numbers_and_flags_of_other_doors() -> None:
    """Functions that declare no ranges in their signatures."""
    for call, name, value in (
        (evaluate, "strict", 1),
        (evaluate, "seed", "0"),
        (lambda **given: pl.predict(net(), DATA, **given), "seed", 1.5),
        (lambda **given: pl.drive((pair for pair in ()), **given), "strict", "no"),
        (lambda **given: pl.load("nowhere", model=net(), **given), "weights_only", 1),
        (lambda **given: pl.load("nowhere", model=net(), **given), "strict", "yes"),
        (lambda **given: pl.progress(fit(), **given), "refresh_seconds", -1),
        (pl.distributed.Parallel, "timeout", 0),
        (pl.distributed.Parallel, "bucket_cap_mb", float("nan")),
        (pl.distributed.Parallel, "find_unused_parameters", 3),
        (lambda **given: pl.optim.from_torch(torch.optim.Adagrad, **given), "lr", -1.0),
        (lambda **given: pl.callbacks.LRMonitor(SGD, **given), "name", 3),
        (pl.metrics.accuracy, "axis", 0.5),
    ):
        with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError)) as caught:
            call(**{name: value})
        assert name in str(caught.value)
        assert repr(value) in str(caught.value)


def test_what_would_be_refused_is_not_offered() -> None:
    for name, text, refused_there in (
        ("max_duration", "soon", ["0.5dur"]),
        ("eval_interval", "often", ["iter"]),
        ("iteration_length", "long", ["dur", "ba", "sp", "iter", "90s"]),
    ):
        said = str(check(given(TIMES, **{name: text}))).replace(name, "").replace("half of max_duration", "")
        assert not [each for each in refused_there if f'"{each}' in said or f'{each}"' in said], said


def test_every_error_is_ours_and_a_builtin() -> None:
    for error in [getattr(pl, name) for name in pl.errors.__all__]:
        assert issubclass(error, pl.PureLoopError)
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert builtins[0] is not Exception or error is pl.PureLoopError, f"{error.__name__} is none of Python's"
        assert error.__doc__


def test_names_of_rows_are_their_own() -> None:
    names = [refusal.name for refusal in (*TABLE, *MINE)]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
