"""What is printed: reprs in one line without numbers of tensors, tables for notebooks, and names that there are not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop._internal import hints
from pure_loop.testing import Outcome, Report

DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3


def mine(state: pl.State) -> pl.State:
    return state


def negative(outputs: Any, batch: Any) -> Any:
    return -outputs.sum()


REPRS: dict[str, tuple[Any, str]] = {
    "algorithm": (
        lambda: pl.algorithms.sam(rho=0.1),
        "sam(rho=0.1, epsilon=1e-12, interval=1, adaptive=False, gap=0.0)",
    ),
    "algorithm of another name": (
        lambda: pl.algorithms.gradient_clipping("norm", 1.0, name="mine"),
        "gradient_clipping(kind='norm', threshold=1.0, name='mine')",
    ),
    "algorithm of one's own": (
        lambda: pl.Algorithm("mine", {pl.Event.BATCH_END: mine}),
        "Algorithm('mine', batch_end)",
    ),
    "times in algorithms": (
        lambda: pl.algorithms.ema("100ba"),
        "ema(half_life='100ba', warmup=False, offload=False, buffers=())",
    ),
    "composition": (
        lambda: pl.compose(pl.algorithms.ema("2ep"), pl.algorithms.lookahead()),
        "compose(ema(half_life='2ep', warmup=False, offload=False, buffers=()), lookahead(interval=5, rate=0.5))",
    ),
    "evaluator": (
        lambda: pl.Evaluator(DATA, interval="10ba", metrics=[pl.metrics.accuracy()]),
        "Evaluator(list of 3, metrics=[accuracy()], interval='10ba')",
    ),
    "plain evaluator": (lambda: pl.Evaluator(iter(DATA)), "Evaluator(list_iterator)"),
    "metric": (lambda: pl.metrics.accuracy(axis=-1), "accuracy(axis=-1)"),
    "task": (lambda: pl.Task(loss=negative), "Task(loss=negative)"),
    "logger": (lambda: pl.loggers.ConsoleLogger("100ba"), "ConsoleLogger(interval='100ba')"),
    "plain logger": (pl.loggers.InMemoryLogger, "InMemoryLogger()"),
    "saver": (
        lambda: pl.callbacks.CheckpointSaver("run", interval="1ep"),
        "CheckpointSaver(folder='run', interval='1ep')",
    ),
    "schedule": (
        lambda: pl.schedules.warmup("2ba", pl.schedules.cosine("3ep", peak=0.1)),
        "warmup(time='2ba', schedule=cosine(time='3ep', peak=0.1))",
    ),
    "timestamp": (lambda: pl.Timestamp(epoch=1, batch=12), "Timestamp(epoch=1, batch=12)"),
    "mapping": (
        lambda: pl.FrozenDict(
            weight=torch.zeros(2, 3), count=3, inner=pl.FrozenDict(b=torch.ones((), dtype=torch.int64))
        ),
        "FrozenDict({'weight': tensor (2, 3) float32, 'count': 3, 'inner': FrozenDict({'b': tensor () int64})})",
    ),
    "long mapping": (
        lambda: pl.FrozenDict({f"{number}": number for number in range(25)}),
        "FrozenDict({" + ", ".join(f"'{n}': {n}" for n in range(20)) + ", ... 5 more})",
    ),
    "stream": (
        lambda: pl.fit(
            nn.Linear(2, 1), DATA, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"
        ),
        "Stream of (event, state), not started",
    ),
    "cadence": (lambda: pl.every("10ba"), "every('10ba')"),
}


@pytest.mark.parametrize("name", REPRS)
def test_reprs(name: str) -> None:
    make, wanted = REPRS[name]
    assert repr(make()) == wanted


class Loud(torch.Tensor):
    """Numbers of this tensor may not be read."""

    def __repr__(self, **_: Any) -> str:
        raise AssertionError("a number was read")

    item = tolist = __repr__  # type: ignore[assignment]


def test_no_number_of_a_tensor_is_read() -> None:
    loud = torch.zeros(3).as_subclass(Loud)
    assert repr(pl.FrozenDict(a=loud)) == "FrozenDict({'a': tensor (3,) float32})"
    assert "tensor (3,) float32" in pl.FrozenDict(a=loud)._repr_html_()
    scalar = torch.zeros(()).as_subclass(Loud)
    assert "tensor () float32" in pl.FrozenDict(a=scalar)._repr_html_()


def test_a_stream_says_whether_it_has_begun_and_ended() -> None:
    make, _ = REPRS["stream"]
    stream: Any = make()
    next(stream)
    assert repr(stream) == "Stream of (event, state), started"
    pl.run(stream)
    assert repr(stream) == "Stream of (event, state), ended"


def test_tables_for_notebooks() -> None:
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.0)}
    state = pl.run(pl.fit(nn.Linear(2, 1), DATA, max_duration="1ep", evaluators={"<val>": DATA}, **options))
    table = state._repr_html_()
    assert table.startswith("<table><caption>State</caption>")
    assert "<td>params</td><td>2 tensors, 3 numbers</td>" in table
    assert "<val>" not in table
    measured = state.metrics["<val>"]
    assert f"<td>loss</td><td>{float(measured['loss']):.6g}</td>" in measured._repr_html_()


def test_a_state_that_was_overwritten_has_a_table() -> None:
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.0), "donate": True}
    stream = pl.fit(nn.Linear(2, 1), DATA, max_duration="1ep", **options)
    kept = [state for event, state in stream if event is pl.Event.BATCH_END]
    assert "<td>params</td><td>overwritten by the next step</td>" in kept[0]._repr_html_()


def test_reports_have_a_table() -> None:
    report = Report("mine <1>", (Outcome("purity", "no input changes", "passed", 3),), problem="it never ran")
    table = report._repr_html_()
    assert "<caption>mine &lt;1&gt;: 1 passed. it never ran</caption>" in table
    assert "<tr><td>purity</td><td>no input changes</td><td>passed</td><td>3</td><td></td></tr>" in table


MODULES = (
    *("algorithms", "callbacks", "checkpoint", "compile", "distributed", "gradients", "loggers", "metrics", "optim"),
    *("errors", "order", "random", "schedules", "stages", "testing", "testing.laws", "testing.laws.of_callbacks"),
    *("testing.laws.of_scripts", "testing.ranks", "testing.strategies", "typing"),
)


@pytest.mark.parametrize("name", MODULES)
def test_public_modules_list_public_names_alone(name: str) -> None:
    module = importlib.import_module(f"pure_loop.{name}")
    assert dir(module) == sorted(module.__all__)
    for listed in dir(module):
        assert getattr(module, listed) is not None


def test_names_of_other_libraries_are_answered() -> None:
    for package, texts in hints._HINTS.items():
        module = importlib.import_module(package)
        for names, text in texts.items():
            for name in names.split():
                assert name not in dir(module), name
                assert not hasattr(module, name), name
                with pytest.raises(AttributeError) as caught:
                    getattr(module, name)
                assert str(caught.value) == f"module {package!r} has no attribute {name!r}: {text}"


TOOLS_ELSEWHERE = "Tuner lr_finder BatchSizeFinder auto_scale_batch_size fast_dev_run ModelSummary Profiler to_onnx"


@pytest.mark.parametrize("name", TOOLS_ELSEWHERE.split())
def test_a_tool_of_another_library_is_answered(name: str) -> None:
    assert hints.hint("pure_loop", name) is not None


OF_COMPOSER = """ActivationMonitor CheckpointSaver EarlyStopper EvalOutputLogging FreeOutputs LoadCheckpoint LRMonitor
    MemoryMonitor MemorySnapshot NaNMonitor OOMObserver OptimizerMonitor RuntimeEstimator SpeedMonitor
    SystemMetricsMonitor ThresholdStopper"""


@pytest.mark.parametrize("name", OF_COMPOSER.split())
def test_a_callback_of_composer_is_there_or_answered(name: str) -> None:
    if name in dir(pl.callbacks):
        assert issubclass(getattr(pl.callbacks, name), pl.Callback)
    else:
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': "):
            getattr(pl.callbacks, name)


def test_a_name_that_is_nearly_one() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Evaluater'; did you mean 'Evaluator'"):
        pl.Evaluater  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'unheard_of'$"):
        pl.unheard_of  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("old", ["t", "t_max", "every", "period", "step_size"])
def test_old_and_other_names_of_a_time(old: str) -> None:
    for schedule in (pl.schedules.cosine, pl.schedules.step, pl.schedules.cosine_restarts, pl.schedules.polynomial):
        with pytest.raises(TypeError, match=rf"{schedule.__name__} has no argument '{old}': write time=\"3ep\""):
            schedule(**{old: "3ep"})
