"""What users write by mistake as arguments: told by the call itself, before any event and before any data is drawn."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal import hints
from tests.support.refusals import DATA, SGD, TYPE, VALUE, Watched, fit, net, refused
from tests.support.streams import assert_same


def arguments() -> Iterator[Any]:
    for value, kind in ((0, VALUE), (-1, VALUE), (True, TYPE), (1.5, TYPE), ("4", TYPE), ("Auto", TYPE)):
        for name in ("microbatch_size", "batches_per_epoch", "batches_per_step"):
            yield name, value, kind, [f"{name}={value!r}", "whole number of at least 1"]
    yield "batches_per_epoch", 60, VALUE, ["batches_per_epoch=60", f"train_dataloader has {len(DATA)} batch"]
    for precision in ("fp16", "bf16", 16, None, torch.float16):
        yield "precision", precision, VALUE, [f"precision={precision!r}", "'amp_bf16'", "'amp_fp16'", "'fp32'"]
    unreadable = (pl.TimeFormatError, ValueError)
    for text in ("", " ", "3", "3 epochs", "1.5ep", "ep", "-1ep", "1ba2ep", "nanep", "2weeks"):
        for name in ("max_duration", "eval_interval"):
            yield name, text, unreadable, [f"{name}={text!r}", '"2ep"', '"10ba"', '"1h30m"']
        yield "iteration_length", text, unreadable, [f"iteration_length={text!r}", '"2ep" (epochs), or "1e6tok"']
    for text, meant in (
        ("3 epochs", "3ep"),
        ("100 steps", "100ba"),
        ("5 min", "5m"),
        ("1 hour 30 min", "1h30m"),
        ("0.5 dur", "0.5dur"),
    ):
        yield "eval_interval", text, unreadable, [f'can\'t read {text!r} as a time (did you mean "{meant}"?)']
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


@pytest.mark.parametrize(
    ("name", "text", "refused_there"),
    [
        ("max_duration", "soon", ['"0.5dur"']),
        ("max_duration", "0.5 dur", ["dur"]),
        ("eval_interval", "often", ["iter"]),
        ("iteration_length", "long", ["dur", "ba", "sp", "iter", "90s"]),
        ("iteration_length", "10 batches", ["10ba"]),
    ],
)
def test_what_would_be_refused_is_not_offered(name: str, text: str, refused_there: list[str]) -> None:
    with pytest.raises(pl.TimeFormatError) as caught:
        fit(**{name: text})
    said = str(caught.value).replace(name, "").replace(text, "").replace("half of max_duration", "")
    assert not [each for each in refused_there if f'"{each}' in said or f'{each}"' in said], said


CALLS = [
    (lambda: fit(epochs=3), ["fit has no argument 'epochs'", 'write max_duration="3ep"']),
    (lambda: fit(max_steps=500), ["fit has no argument 'max_steps'", 'write max_duration="500ba"']),
    (lambda: fit(lr=1e-3), ["fit has no argument 'lr'", "write optimizer=pl.optim.adamw(lr=0.001)"]),
    (
        lambda: fit(batch_size=64),
        ["no argument 'batch_size'", "DataLoader(dataset, batch_size=64)", "microbatch_size="],
    ),
    (lambda: fit(val_loader=DATA), ["no argument 'val_loader'", 'write evaluators={"val": dataloader}']),
    (lambda: fit(microbatchsize=4), ["no argument 'microbatchsize'", "did you mean microbatch_size=?"]),
    (lambda: fit(fast_dev_run=True), ["no argument 'fast_dev_run'", "write pl.rehearse(...)"]),
    (lambda: fit(auto_lr_find=True), ["no argument 'auto_lr_find'", "pl.lr_find(...)"]),
    (lambda: fit(profiler="simple"), ["no argument 'profiler'", "write pl.profile(pl.fit(...))"]),
    (lambda: fit(max_time="20h"), ["no argument 'max_time'", 'stop_before="19h50m"']),
    (lambda: fit(fp8=True), ["no argument 'fp8'", 'write precision="amp_fp8"']),
    (lambda: fit(zork=4), ["no argument 'zork'", "it has model_or_state, train_dataloader, loss,"]),
    (lambda: fit(train_dataloader=DATA), ["given train_dataloader twice", "leave one of them out"]),
    (
        lambda: pl.fit(net(), DATA, epochs=3),  # type: ignore[call-arg]
        [
            "fit has no argument 'epochs'",
            "fit also needs optimizer: pl.fit(model, train_dataloader, optimizer=pl.optim",
        ],
    ),
    (
        lambda: pl.fit(net(), DATA),  # type: ignore[call-arg]
        ["fit needs optimizer and max_duration", 'optimizer=pl.optim.adamw(lr=3e-4), max_duration="3ep", ...)'],
    ),
    (
        lambda: pl.fit(net()),  # type: ignore[call-arg]
        ["fit needs train_dataloader and optimizer and max_duration", "pl.fit(model, train_dataloader, optimizer="],
    ),
    (
        lambda: pl.fit(model=net(), data=DATA, optimizer=SGD, max_duration=1),  # type: ignore[call-arg]
        ["no argument 'model'", "write it first and without a name: pl.fit(model, train_dataloader, ...)", "'data'"],
    ),
    (
        lambda: pl.fit(net(), DATA, nn.functional.mse_loss),  # type: ignore[misc, call-arg]
        ["takes 2 arguments without their names", "was given 3", "loss=torch.nn.functional.cross_entropy"],
    ),
    (lambda: pl.explain(net(), DATA, epochs=3), ["fit has no argument 'epochs'", 'write max_duration="3ep"']),
    (lambda: pl.evaluate(net()), ["evaluate needs evaluators", 'evaluators={"val": dataloader})']),  # type: ignore[call-arg]
    (
        lambda: pl.evaluate(net(), DATA, metrics=[]),  # type: ignore[call-arg]
        ["evaluate has no argument 'metrics'", "pl.Evaluator(dataloader, metrics=[...])"],
    ),
    (
        lambda: pl.predict(net(), DATA, max_duration=1),  # type: ignore[call-arg]
        ["predict has no argument 'max_duration'", "it has model_or_state, dataloader, task,"],
    ),
    (lambda: pl.predict(net()), ["predict needs dataloader: pl.predict(model, dataloader)."]),  # type: ignore[call-arg]
]


@pytest.mark.parametrize(("call", "says"), CALLS, ids=range(len(CALLS)))
def test_calls_with_other_arguments_say_what_to_write(call: Any, says: list[str]) -> None:
    refused(call, *TYPE, *says)


def test_names_of_other_libraries_stand_for_arguments_that_there_are() -> None:
    functions = (pl.fit, pl.evaluate, pl.predict, pl.optim.adamw, pl.load)
    schedules = [getattr(pl.schedules, name) for name in pl.schedules.__all__]
    observers = [getattr(package, name) for package in (pl.callbacks, pl.loggers) for name in package.__all__]
    stopping = [pl.algorithms.early_stopping, pl.algorithms.reduce_on_plateau]
    listed = (*functions, *schedules, *observers, *stopping)
    parameters = {each for function in listed for each in inspect.signature(function).parameters}
    for names, parameter, text in hints.ARGUMENTS:
        assert parameter in parameters
        assert "{{" not in text.format(3, name="fit", call="")
        assert parameter not in names.split()


CALLBACKS, LOGGERS = pl.callbacks, pl.loggers
NAMES_ELSEWHERE: list[tuple[Any, str, str]] = [
    (lambda: CALLBACKS.CheckpointSaver(dirpath="runs"), "dirpath", 'write folder="runs/first"'),  # type: ignore[call-arg]
    (lambda: CALLBACKS.CheckpointSaver("runs", monitor="val/loss"), "monitor", 'metric="val/loss", the label of an'),  # type: ignore[call-arg]
    (lambda: CALLBACKS.CheckpointSaver("runs", save_top_k=3), "save_top_k", 'keep_best=3, metric="val/loss", mode='),  # type: ignore[call-arg]
    (lambda: CALLBACKS.CheckpointSaver("runs", max_to_keep=2), "max_to_keep", "write keep_last=2."),  # type: ignore[call-arg]
    (lambda: CALLBACKS.CheckpointSaver("runs", every_n_epochs=2), "every_n_epochs", 'write interval="2ep".'),  # type: ignore[call-arg]
    (lambda: CALLBACKS.CheckpointSaver("runs", every_n_train_steps=50), "every_n_train_steps", 'interval="50ba"'),  # type: ignore[call-arg]
    (lambda: CALLBACKS.SpeedMonitor(window_size=10), "window_size", "write window=10."),  # type: ignore[call-arg]
    (lambda: LOGGERS.TensorBoardLogger(log_dir="runs"), "log_dir", 'write folder="runs/first".'),  # type: ignore[call-arg]
    (lambda: LOGGERS.CSVLogger(save_dir="runs"), "save_dir", "write path=..., the path of the file and not"),  # type: ignore[call-arg]
    (lambda: LOGGERS.JSONLinesLogger("m.jsonl", flush_interval=20), "flush_interval", 'write flush="100ba".'),  # type: ignore[call-arg]
    (lambda: LOGGERS.WandBLogger(project_name="digits"), "project_name", 'write project="digits".'),  # type: ignore[call-arg]
    (lambda: LOGGERS.WandBLogger(name="first"), "name", 'write fit(..., run_name="first"), one name for all loggers.'),  # type: ignore[call-arg]
    (lambda: LOGGERS.WandBLogger(init_kwargs={}), "init_kwargs", "write options={...}."),  # type: ignore[call-arg]
    (lambda: LOGGERS.CometMLLogger(offline=True), "offline", 'write mode="offline".'),  # type: ignore[call-arg]
    (lambda: LOGGERS.MLFlowLogger(experiment_name="digits"), "experiment_name", 'write experiment="digits".'),  # type: ignore[call-arg]
    (lambda: LOGGERS.ConsoleLogger(log_interval="1ep"), "log_interval", 'write interval="100ba".'),  # type: ignore[call-arg]
    (lambda: pl.algorithms.early_stopping(monitor="val/loss"), "monitor", 'metric="val/loss"'),  # type: ignore[call-arg]
    (lambda: pl.algorithms.reduce_on_plateau(min_lr=1e-6), "min_lr", "min_scale=0.01"),  # type: ignore[call-arg]
    (lambda: fit(patience=3), "patience", 'algorithms=[pl.algorithms.early_stopping("val/loss")]'),
    (lambda: fit(log_dir="runs"), "log_dir", 'loggers=[pl.loggers.TensorBoardLogger("runs/first")]'),
    (lambda: fit(save_interval="1ep"), "save_interval", "callbacks=[pl.callbacks.CheckpointSaver(folder, interval="),
]


@pytest.mark.parametrize(("call", "name", "says"), NAMES_ELSEWHERE, ids=[name for _, name, _ in NAMES_ELSEWHERE])
def test_callbacks_and_loggers_know_names_of_other_libraries(call: Any, name: str, says: str) -> None:
    refused(call, *TYPE, f"has no argument {name!r}", says)


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
    ({"task": pl.Task(loss=lambda outputs, batch: 0)}, VALUE, ["loss= is given, and task= has a loss, too"]),
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
    refused(lambda: pl.Evaluator(DATA, **{name: value}), *kind, "Evaluator", name, repr(value))


def test_scripts_and_streams() -> None:
    refused(lambda: pl.drive(lambda state: state), *TYPE, "not a generator", "call the function, drive(script(state))")
    stream: Any = fit()
    refused(lambda: pl.drive(stream), *TYPE, "script is a stream of fit", "fit(..., algorithms=[...])")
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


def test_a_run_of_which_nothing_watched_comes_gives_the_state_in_which_it_ended() -> None:
    model = net()
    found = pl.run(fit(model, watch={Event.EVAL_END}, max_duration="2ba"))
    assert_same(found, pl.run(fit(model, max_duration="2ba")), "at the end")
