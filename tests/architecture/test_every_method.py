"""Each algorithm, callback, logger, schedule and metric of the library keeps what all of its kind have to keep.

What holds for each optimizer, besides its arguments and its docstring, is in tests/optim.

What there is is read from the packages, and settings are drawn from the ranges in their signatures, so a new method
is tried without a line here. What is peculiar to one stands in its module: ``SERVES``, what it needs of a problem,
``NEEDS_DEVICE``, and ``EXPECTED_FAILURES``, laws that it can't keep, with the reason.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loop as pl
from pure_loop.ranges import alternatives_in, settings_of
from pure_loop.testing import check_algorithm, check_callback, laws, plans
from pure_loop.testing._compositions import ACROSS_MEMBERS, ALGORITHMS, built
from pure_loop.testing.problems import as_problem
from tests.conftest import THOROUGH
from tests.support.optimizing import RULES
from tests.support.problem import convnet, images
from tests.support.problem import run as train
from tests.support.samples import sample, simplest
from tests.support.served import module_of, required, served

# Variables that keep the packages of trackers from any network.
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "SLACK_TOKEN": "x"}
OFFLINE |= {"COMET_START_ONLINE": "false", "NEPTUNE_MODE": "offline"}


def members(package: ModuleType, base: type | None = None) -> list[Any]:
    """What a package has of a kind: subclasses, or functions that are named like their modules."""
    found = [getattr(package, name) for name in package.__all__]
    if base is not None:
        return [each for each in found if isinstance(each, type) and issubclass(each, base) and each is not base]
    return [each for each in found if inspect.isfunction(each) and each.__module__.endswith(f".{each.__name__}")]


CALLBACKS = members(pl.callbacks, pl.Callback)
LOGGERS = members(pl.loggers, pl.Logger)
SCHEDULES = members(pl.schedules, pl.schedules.Schedule)
METRICS = members(pl.metrics)
METHODS = [*ALGORITHMS.values(), *ACROSS_MEMBERS.values(), *CALLBACKS, *LOGGERS, *SCHEDULES, *METRICS, *RULES.values()]


def test_nothing_is_left_out() -> None:
    assert {"blurpool", "ema", "gradient_clipping", "label_smoothing", "sam"} <= ALGORITHMS.keys()
    names = {each.__name__ for each in (*CALLBACKS, *LOGGERS, *SCHEDULES, *METRICS)}
    assert {"SpeedMonitor", "CheckpointSaver", "InMemoryLogger", "cosine", "product", "accuracy", "loss"} <= names


# All


def test_settings_outside_of_their_ranges_are_refused(tmp_path: Path) -> None:
    for method in METHODS:
        settings, needed = settings_of(method), required(method, tmp_path)
        ways = alternatives_in(settings)
        exclusive = {setting.name for way in ways for setting in way}
        rows = [(setting, {each.name for each in way}) for way in ways for setting in way]
        rows += [(setting, {name}) for name, setting in settings.items() if name not in exclusive]
        for setting, way in rows:
            others = {name: value for name, value in needed.items() if name not in way}
            for value in setting.outside:
                with pytest.raises((pl.errors.ArgumentError, pl.errors.ArgumentTypeError), match=setting.name):
                    method(**{**others, setting.name: value})


def test_a_misspelt_argument_is_refused_with_what_there_is(tmp_path: Path) -> None:
    for method in METHODS:
        with pytest.raises(TypeError, match=f"{method.__name__} has no argument 'strenght'"):
            method(**required(method, tmp_path), strenght=1)


def test_its_head_is_a_row_of_the_docs() -> None:
    for method in METHODS:
        head = inspect.getdoc(module_of(method)) or ""
        assert head.partition("\n\n")[0].endswith("."), f"{method.__name__}: the first sentence of the module"
        assert ">>>" in (inspect.getdoc(method) or ""), f"{method.__name__}: a doctest"
        assert "Annotated" not in str(inspect.signature(method))


# Algorithms


# Of which one example takes as long as ten of the others.
LATER = dict.fromkeys(["compile_equality", "world_size", "rank_agreement"], "tried in the slow tier")


def drawn(factory: Any) -> Any:
    """The algorithm with settings in their ranges, and what it needs besides."""
    ranged = settings_of(factory)
    return built(factory, **{name: st.just(value) for name, value in required(factory).items() if name not in ranged})


def options_of(factory: Any) -> dict[str, Any]:
    """What it trains, and the laws that its module says it can't keep."""
    problem = served(factory)
    expected = {"expected_failures": getattr(module_of(factory), "EXPECTED_FAILURES", {})}
    return expected if problem is None else {**expected, "problems": problem}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_keep_laws_on_one_rank(name: str) -> None:
    factory = ALGORITHMS[name]
    options = options_of(factory)
    options["expected_failures"] = {law: why for law, why in options["expected_failures"].items() if law not in LATER}
    check_algorithm(simplest(drawn(factory)), max_examples=1, skip=LATER, **options)


@pytest.mark.slow  # on simulated ranks, from disk and compiled, too
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_keep_every_law(name: str) -> None:
    factory = ALGORITHMS[name]
    options, algorithms = options_of(factory), drawn(factory)
    separable = "problems" not in options or as_problem(options["problems"]).separable
    examples = 3 if name == "selective_backprop" else 2  # that ranks choose apart shows in some batches alone
    for algorithm in [simplest(algorithms), *(sample(algorithms, 4) if THOROUGH else [])]:
        report = check_algorithm(algorithm, max_examples=20 if THOROUGH else examples, thorough=True, **options)
        skipped = {outcome.law: outcome.reason for outcome in report.outcomes if outcome.result == "skipped"}
        # Models with BatchNorm or dropout train otherwise on parts of a batch.
        assert skipped.keys() == {*laws.UNAVAILABLE, *(() if separable else ("microbatch_invariance", "world_size"))}
        assert all(skipped.values())


# Callbacks and loggers


def lacking(method: Any, folder: Path) -> str:
    """What this machine lacks that the method needs; "": nothing."""
    if getattr(module_of(method), "NEEDS_DEVICE", "cpu") == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        method(**required(method, folder))
    except pl.errors.MissingExtraError as error:
        return str(error)
    return ""


Make = Callable[[type], Any]


@pytest.fixture
def make(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a callback or logger of this class, or skips the test where this machine lacks what it needs.

    Trackers stay offline, and what is written without a folder goes to that of the test.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)

    def made(method: type) -> Any:
        if method.__name__ == "SlackLogger":
            monkeypatch.setattr("slack_sdk.WebClient.chat_postMessage", lambda *_, **message: message)
        lacks = lacking(method, tmp_path)
        if lacks:
            pytest.skip(lacks)
        # Runs of one case follow one another in one folder, which a logger makes.
        overwrites = {"overwrite": True} if "overwrite" in inspect.signature(method).parameters else {}
        return method(**required(method, tmp_path / "runs" / "1"), **overwrites)

    return made


@pytest.mark.slow  # trackers take seconds to begin a run
@pytest.mark.parametrize("method", [*CALLBACKS, *LOGGERS], ids=lambda method: method.__name__)
def test_callbacks_and_loggers_keep_every_law(method: Any, make: Make) -> None:

    module = module_of(method)
    options: dict[str, Any] = {"expected_failures": getattr(module, "EXPECTED_FAILURES", {})}
    serves = getattr(module, "SERVES", None)
    if serves == "images":
        options["problems"] = "convolution"
    if serves == "evaluations":
        options["plans"] = plans(min_evaluators=1)
    report = check_callback(lambda: make(method), max_examples=3, **options)
    assert report.ok
    assert {outcome.result for outcome in report.outcomes} <= {"passed", "expected failure"}


def recorded(callback: Any) -> dict[str, list[int]]:
    """At which batches a run records a name, of images whose loss has parts."""

    def loss(outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        entropy = functional.cross_entropy(outputs, targets)
        return {"total": entropy, "entropy": entropy.detach()}

    logger = pl.loggers.InMemoryLogger()
    options = {"loss": loss, "callbacks": [callback], "loggers": [logger], "evaluators": {"val": images(1)}}
    train(convnet(), images(), max_duration="2ep", **options)
    entries = {name: logger.series(name)[0] for name in logger.metrics}
    for kind in (logger.tables, logger.images):
        entries |= {name: [timestamp.batch for timestamp, *_ in values] for name, values in kind.items()}
    return entries


@pytest.mark.parametrize("method", CALLBACKS, ids=lambda method: method.__name__)
def test_a_callback_begins_anew_in_each_run(method: Any, make: Make) -> None:
    callback = make(method)
    assert recorded(callback) == recorded(callback), "what it keeps of a run it forgets in fit_start"


class Reads(TorchDispatchMode):
    """Counts where code takes a number out of a tensor."""

    def __init__(self, callback: Any) -> None:
        super().__init__()
        self.count = 0
        names = {event.value for event in pl.Event if "batch" in event.value} & {*dir(callback)}
        for name in names:
            setattr(callback, name, functools.partial(self._watched, getattr(callback, name)))

    def _watched(self, method: Any, *arguments: Any) -> Any:
        with self:
            return method(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


# Where it writes a line a batch: on a CPU alone.
READS_ON_A_CPU = {"FlightRecorder"}


@pytest.mark.parametrize("method", CALLBACKS, ids=lambda method: method.__name__)
def test_a_callback_waits_for_no_device_inside_a_batch(method: Any, make: Make) -> None:
    callback = make(method)
    reads = Reads(callback)
    recorded(callback)
    assert (reads.count > 0) == (method.__name__ in READS_ON_A_CPU), "no .item(), float(tensor), `if tensor`"


WITH_FILES = [method for method in LOGGERS if {"path", "folder"} & required(method).keys()]


@pytest.mark.parametrize("method", WITH_FILES, ids=lambda method: method.__name__)
def test_a_logger_replaces_no_record_of_another_run(method: Any, tmp_path: Path) -> None:
    first, second = (method(**required(method, tmp_path)) for _ in range(2))
    train(convnet(), images(), loggers=[first], run_name="first")
    with pytest.raises(pl.errors.RunExistsError):  # csv_file.py is a model: in_the_way, discard, overwrite=
        train(convnet(), images(), loggers=[second], run_name="second")


# Schedules

TIMESTAMPS = [
    pl.Timestamp(batch=batch, epoch=batch // 3, batch_in_epoch=batch % 3, batches_per_epoch=3) for batch in range(12)
]


@pytest.mark.parametrize("method", SCHEDULES, ids=lambda method: method.__name__)
def test_schedules_are_functions_of_the_timestamp(method: Any) -> None:
    for schedule in (
        sample(built(method), 10) if settings_of(method) and _is_drawn(method) else [method(**required(method))]
    ):
        found = [schedule(timestamp) for timestamp in TIMESTAMPS]
        assert all(isinstance(value, float | int) for value in found)
        assert [schedule(timestamp) for timestamp in reversed(TIMESTAMPS)][::-1] == found
        assert [(2 * schedule)(timestamp) for timestamp in TIMESTAMPS] == pytest.approx([2 * value for value in found])
        if not any(each.kind is each.VAR_POSITIONAL for each in inspect.signature(method).parameters.values()):
            assert attrs.evolve(schedule) == schedule
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        assert schedule.fixed_value is None or set(found) == {schedule.fixed_value}


def _is_drawn(method: Any) -> bool:
    return all(
        name in settings_of(method) or parameter.default is not parameter.empty
        for name, parameter in inspect.signature(method).parameters.items()
    )


# Metrics


@pytest.mark.parametrize("method", METRICS, ids=lambda method: method.__name__)
def test_metrics_are_the_same_however_samples_are_batched(method: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(6, 3, generator=generator), torch.randint(6, (6,), generator=generator)
    model = nn.Linear(3, 6)
    found = []
    for sizes in ([6], [1, 3, 2], [2, 2, 2]):
        data = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
        metric = method(**required(method))
        state = pl.run(
            pl.evaluate(model, {"test": pl.Evaluator(data, metrics=[metric])}, loss=functional.cross_entropy)
        )
        found.append(state.metrics["test"][metric.name])
    for value in found:
        torch.testing.assert_close(value, found[0])


@pytest.mark.parametrize("method", METRICS, ids=lambda method: method.__name__)
def test_metrics_of_parts_are_merged(method: Any) -> None:
    """What several ranks do with theirs."""
    metric = method(**required(method))
    generator = torch.Generator().manual_seed(0)
    parts = []
    whole = metric.init()
    for _ in range(2):
        outputs, targets = torch.randn(3, 6, generator=generator), torch.randint(6, (3,), generator=generator)
        given = (functional.cross_entropy(outputs, targets), 3) if metric.of_loss else outputs
        parts.append(metric.update(metric.init(), given, (None, targets)))
        whole = metric.update(whole, given, (None, targets))
    assert metric.merge is not None
    merged = metric.compute(metric.merge(*parts))
    torch.testing.assert_close(merged, metric.compute(whole))
