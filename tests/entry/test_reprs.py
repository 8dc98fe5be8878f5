"""What is printed: reprs in one line without numbers of tensors, tables for notebooks, and names that there are not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop._internal import hints
from pure_loop.testing import Outcome, Report
from tests.support.problem import fit, points

DATA = points()


def negative(outputs: Any, batch: Any) -> Any:
    return -outputs.sum()


EMA, A = "ema(half_life='2ep', warmup=False, offload=False, buffers=())", pl.algorithms
LONG = pl.FrozenDict({f"{number}": number for number in range(25)})
NESTED = pl.FrozenDict(weight=torch.zeros(2, 3), count=3, inner=pl.FrozenDict(b=torch.ones((), dtype=torch.int64)))
REPRS: dict[str, Any] = {
    "gradient_clipping(kind='norm', threshold=1.0, name='mine')": A.gradient_clipping("norm", 1.0, name="mine"),
    "Algorithm('mine', batch_end)": pl.Algorithm("mine", {pl.Event.BATCH_END: lambda state: state}),
    f"compose({EMA}, lookahead(interval=5, rate=0.5))": pl.compose(A.ema("2ep"), A.lookahead()),
    "Evaluator(list of 3, metrics=[accuracy()], interval='10ba')": pl.Evaluator(
        DATA, interval="10ba", metrics=[pl.metrics.accuracy()]
    ),
    "Evaluator(list_iterator)": pl.Evaluator(iter(DATA)),
    "Task(loss=negative)": pl.Task(loss=negative),
    "ConsoleLogger(interval='100ba')": pl.loggers.ConsoleLogger("100ba"),
    "CheckpointSaver(folder='run', interval='1ep')": pl.callbacks.CheckpointSaver("run", interval="1ep"),
    "warmup(time='2ba', schedule=constant(0.1))": pl.schedules.warmup("2ba", pl.schedules.constant(0.1)),
    "Timestamp(epoch=1, batch=12)": pl.Timestamp(epoch=1, batch=12),
    "FrozenDict({'weight': tensor (2, 3) float32, 'count': 3, 'inner': FrozenDict({'b': tensor () int64})})": NESTED,
    "FrozenDict({" + ", ".join(f"'{n}': {n}" for n in range(20)) + ", ... 5 more})": LONG,
    "every('10ba')": pl.every("10ba"),
}


def test_reprs() -> None:
    assert {wanted: repr(value) for wanted, value in REPRS.items()} == {wanted: wanted for wanted in REPRS}
    stream = fit()
    said = [repr(stream)]
    next(stream)
    said.append(repr(stream))
    pl.run(stream)
    said.append(repr(stream))
    assert said == [f"Stream of (event, state), {how}" for how in ("not started", "started", "ended")]


class Loud(torch.Tensor):
    """Numbers of this tensor may not be read."""

    def __repr__(self, **_: Any) -> str:
        raise AssertionError("a number was read")

    item = tolist = __repr__  # type: ignore[assignment]


def test_tables_for_notebooks_and_reprs_read_no_number_of_a_tensor() -> None:
    loud, scalar = torch.zeros(3).as_subclass(Loud), torch.zeros(()).as_subclass(Loud)
    assert repr(pl.FrozenDict(a=loud)) == "FrozenDict({'a': tensor (3,) float32})"
    assert "tensor () float32" in pl.FrozenDict(a=scalar)._repr_html_()
    state = pl.run(fit(evaluators={"<val>": DATA}))
    table, measured = state._repr_html_(), state.metrics["<val>"]
    assert table.startswith("<table><caption>State</caption>")
    assert "<td>params</td><td>4 tensors, 67 numbers</td>" in table
    assert "<val>" not in table
    assert f"<td>loss</td><td>{float(measured['loss']):.6g}</td>" in measured._repr_html_()
    kept = [state for event, state in fit(donate=True, strict=None) if event is pl.Event.BATCH_END]
    assert "<td>params</td><td>overwritten by the next step</td>" in kept[0]._repr_html_()
    report = Report("mine <1>", (Outcome("purity", "no input changes", "passed", 3),), problem="it never ran")
    assert "<caption>mine &lt;1&gt;: 1 passed. it never ran</caption>" in report._repr_html_()
    assert "<tr><td>purity</td><td>no input changes</td><td>passed</td><td>3</td><td>" in report._repr_html_()


MODULES = """algorithms callbacks checkpoint compile distributed gradients loggers metrics optim errors order random
    schedules stages testing testing.laws testing.laws.of_callbacks testing.laws.of_scripts testing.ranks
    testing.strategies typing"""
OF_COMPOSER = """ActivationMonitor CheckpointSaver EarlyStopper EvalOutputLogging FreeOutputs LoadCheckpoint
    LRMonitor MemoryMonitor MemorySnapshot NaNMonitor OOMObserver OptimizerMonitor RuntimeEstimator SpeedMonitor
    SystemMetricsMonitor ThresholdStopper"""


def test_public_modules_list_public_names_alone_and_names_of_other_libraries_are_answered() -> None:
    for name in MODULES.split():
        module = importlib.import_module(f"pure_loop.{name}")
        assert dir(module) == sorted(module.__all__), name
        assert all(getattr(module, listed) is not None for listed in dir(module)), name
    for package, texts in hints._HINTS.items():
        module = importlib.import_module(package)
        for name, text in ((name, text) for names, text in texts.items() for name in names.split()):
            with pytest.raises(AttributeError) as caught:
                getattr(module, name)
            assert str(caught.value) == f"module {package!r} has no attribute {name!r}: {text}"
    for name in [
        "Tuner",
        "lr_finder",
        "BatchSizeFinder",
        "auto_scale_batch_size",
        "fast_dev_run",
        "ModelSummary",
        "Profiler",
    ]:
        assert hints.hint("pure_loop", name) is not None, name
    for name in OF_COMPOSER.split():
        assert name in dir(pl.callbacks) or hints.hint("pure_loop.callbacks", name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Evaluater'; did you mean 'Evaluator'"):
        pl.Evaluater  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'unheard_of'$"):
        pl.unheard_of  # type: ignore[attr-defined]  # noqa: B018


def test_arguments_of_other_libraries_stand_for_arguments_that_there_are() -> None:
    listed = [
        pl.fit,
        pl.evaluate,
        pl.predict,
        pl.optim.adamw,
        pl.load,
        pl.progress,
        A.early_stopping,
        A.reduce_on_plateau,
    ]
    for module in (pl.schedules, pl.callbacks, pl.loggers):
        listed += [getattr(module, name) for name in module.__all__]
    parameters = {each for function in listed for each in inspect.signature(function).parameters}
    for names, parameter, text in hints.ARGUMENTS:
        assert parameter in parameters
        assert "{{" not in text.format(3, name="fit", call="")
        assert parameter not in names.split()
