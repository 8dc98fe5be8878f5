"""What is printed: reprs in one line without numbers of tensors, tables for notebooks, and names that there are not."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop._internal import hints
from pure_loop.testing import Outcome, Report
from tests.support.problem import fit, points

DATA = points()


def mine(state: pl.State) -> pl.State:
    return state


def negative(outputs: Any, batch: Any) -> Any:
    return -outputs.sum()


EMA = "ema(half_life='2ep', warmup=False, offload=False, buffers=())"
LONG = pl.FrozenDict({f"{number}": number for number in range(25)})
NESTED = pl.FrozenDict(weight=torch.zeros(2, 3), count=3, inner=pl.FrozenDict(b=torch.ones((), dtype=torch.int64)))
REPRS: dict[str, Any] = {
    "sam(rho=0.1, epsilon=1e-12, interval=1, adaptive=False, gap=0.0)": lambda: pl.algorithms.sam(rho=0.1),
    "gradient_clipping(kind='norm', threshold=1.0, name='mine')": lambda: pl.algorithms.gradient_clipping(
        "norm", 1.0, name="mine"
    ),
    "Algorithm('mine', batch_end)": lambda: pl.Algorithm("mine", {pl.Event.BATCH_END: mine}),
    f"compose({EMA}, lookahead(interval=5, rate=0.5))": lambda: pl.compose(
        pl.algorithms.ema("2ep"), pl.algorithms.lookahead()
    ),
    "Evaluator(list of 3, metrics=[accuracy()], interval='10ba')": lambda: pl.Evaluator(
        DATA, interval="10ba", metrics=[pl.metrics.accuracy()]
    ),
    "Evaluator(list_iterator)": lambda: pl.Evaluator(iter(DATA)),
    "accuracy(axis=-1)": lambda: pl.metrics.accuracy(axis=-1),
    "Task(loss=negative)": lambda: pl.Task(loss=negative),
    "ConsoleLogger(interval='100ba')": lambda: pl.loggers.ConsoleLogger("100ba"),
    "InMemoryLogger()": pl.loggers.InMemoryLogger,
    "CheckpointSaver(folder='run', interval='1ep')": lambda: pl.callbacks.CheckpointSaver("run", interval="1ep"),
    "warmup(time='2ba', schedule=cosine(time='3ep', peak=0.1))": lambda: pl.schedules.warmup(
        "2ba", pl.schedules.cosine("3ep", peak=0.1)
    ),
    "Timestamp(epoch=1, batch=12)": lambda: pl.Timestamp(epoch=1, batch=12),
    "FrozenDict({'weight': tensor (2, 3) float32, 'count': 3, 'inner': FrozenDict({'b': tensor () int64})})": (
        lambda: NESTED
    ),
    "FrozenDict({" + ", ".join(f"'{n}': {n}" for n in range(20)) + ", ... 5 more})": lambda: LONG,
    "every('10ba')": lambda: pl.every("10ba"),
}


def test_reprs() -> None:
    assert {wanted: repr(make()) for wanted, make in REPRS.items()} == {wanted: wanted for wanted in REPRS}
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


def test_no_number_of_a_tensor_is_read() -> None:
    loud, scalar = torch.zeros(3).as_subclass(Loud), torch.zeros(()).as_subclass(Loud)
    assert repr(pl.FrozenDict(a=loud)) == "FrozenDict({'a': tensor (3,) float32})"
    assert "tensor (3,) float32" in pl.FrozenDict(a=loud)._repr_html_()
    assert "tensor () float32" in pl.FrozenDict(a=scalar)._repr_html_()


def test_tables_for_notebooks() -> None:
    state = pl.run(fit(evaluators={"<val>": DATA}))
    table, measured = state._repr_html_(), state.metrics["<val>"]
    assert table.startswith("<table><caption>State</caption>")
    assert "<td>params</td><td>4 tensors, 67 numbers</td>" in table
    assert "<val>" not in table
    assert f"<td>loss</td><td>{float(measured['loss']):.6g}</td>" in measured._repr_html_()
    kept = [state for event, state in fit(donate=True, strict=None) if event is pl.Event.BATCH_END]
    assert "<td>params</td><td>overwritten by the next step</td>" in kept[0]._repr_html_()
    report = Report("mine <1>", (Outcome("purity", "no input changes", "passed", 3),), problem="it never ran")
    table = report._repr_html_()
    assert "<caption>mine &lt;1&gt;: 1 passed. it never ran</caption>" in table
    assert "<tr><td>purity</td><td>no input changes</td><td>passed</td><td>3</td><td></td></tr>" in table


MODULES = """algorithms callbacks checkpoint compile distributed gradients loggers metrics optim errors order random
    schedules stages testing testing.laws testing.laws.of_callbacks testing.laws.of_scripts testing.ranks
    testing.strategies typing"""


def test_public_modules_list_public_names_alone() -> None:
    for name in MODULES.split():
        module = importlib.import_module(f"pure_loop.{name}")
        assert dir(module) == sorted(module.__all__), name
        assert all(getattr(module, listed) is not None for listed in dir(module)), name


def test_names_of_other_libraries_are_answered() -> None:
    for package, texts in hints._HINTS.items():
        module = importlib.import_module(package)
        for name, text in ((name, text) for names, text in texts.items() for name in names.split()):
            assert name not in dir(module), name
            with pytest.raises(AttributeError) as caught:
                getattr(module, name)
            assert str(caught.value) == f"module {package!r} has no attribute {name!r}: {text}"
    tools = "Tuner lr_finder BatchSizeFinder auto_scale_batch_size fast_dev_run ModelSummary Profiler to_onnx"
    for name in tools.split():
        assert hints.hint("pure_loop", name) is not None, name
    of_composer = """ActivationMonitor CheckpointSaver EarlyStopper EvalOutputLogging FreeOutputs LoadCheckpoint
        LRMonitor MemoryMonitor MemorySnapshot NaNMonitor OOMObserver OptimizerMonitor RuntimeEstimator SpeedMonitor
        SystemMetricsMonitor ThresholdStopper"""
    for name in of_composer.split():
        assert name in dir(pl.callbacks) or hints.hint("pure_loop.callbacks", name) is not None, name
    with pytest.raises(AttributeError, match="no attribute 'Evaluater'; did you mean 'Evaluator'"):
        pl.Evaluater  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'unheard_of'$"):
        pl.unheard_of  # type: ignore[attr-defined]  # noqa: B018


def test_their_arguments_stand_for_arguments_that_there_are() -> None:
    modules = (pl.schedules, pl.callbacks, pl.loggers)
    listed = [pl.fit, pl.evaluate, pl.predict, pl.optim.adamw, pl.load, pl.algorithms.early_stopping]
    listed += [
        pl.algorithms.reduce_on_plateau,
        *(getattr(module, name) for module in modules for name in module.__all__),
    ]
    parameters = {each for function in listed for each in inspect.signature(function).parameters}
    for names, parameter, text in hints.ARGUMENTS:
        assert parameter in parameters
        assert not re.search(r"\{\{", text.format(3, name="fit", call=""))
        assert parameter not in names.split()
