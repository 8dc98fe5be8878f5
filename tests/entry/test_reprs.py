"""What is printed: reprs in one line, a State in a few, tables for notebooks, and names that there are not."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import attrs
import pytest
import torch

import pure_loop as pl
from pure_loop._internal import hints, reprs
from pure_loop._internal.reprs import shown
from pure_loop.state import raw_opt_state, raw_params
from pure_loop.testing import Outcome, Report
from tests.support import problem
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
    "FrozenDict({'weight': tensor (2, 3) float32, 'count': 3, 'inner': FrozenDict({'b': 1})})": NESTED,
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


def test_of_tensors_only_numbers_are_read_and_of_other_classes_none() -> None:
    loud, scalar = torch.zeros(3).as_subclass(Loud), torch.zeros(()).as_subclass(Loud)
    assert repr(pl.FrozenDict(a=loud)) == "FrozenDict({'a': tensor (3,) float32})"
    assert "tensor () float32" in pl.FrozenDict(a=scalar)._repr_html_()
    said = []
    torch.func.vmap(lambda number: said.append(repr(pl.FrozenDict(a=number))) or number)(torch.ones(2))
    assert said == ["FrozenDict({'a': tensor () float32})"]  # nothing can be read inside


def test_metrics_are_printed_with_their_numbers() -> None:
    val = pl.FrozenDict({f"m{index:02}": torch.tensor(index / 4) for index in range(20)})
    numbers = ", ".join(f"'m{index:02}': {index / 4:g}" for index in range(20))
    metrics = pl.FrozenDict(val=val, by={"a": torch.ones(())})
    assert repr(metrics) == f"FrozenDict({{'val': FrozenDict({{{numbers}}}), 'by': {{'a': 1}}}})"
    rows = pl.FrozenDict(val=val, more=pl.FrozenDict({f"<{index}>": index for index in range(99)}))._repr_html_()
    assert "<tr><td>val/m01</td><td>0.25</td></tr>" in rows
    assert "<td>more/&lt;0&gt;</td>" in rows
    assert rows.endswith("<td>...</td><td>more</td></tr></table>")
    assert rows.count("<tr>") == 101
    logger = pl.loggers.InMemoryLogger()
    state = pl.run(fit(evaluators={"<val>": DATA}, loggers=[logger]))
    loss = f"{float(state.metrics['<val>']['loss']):.6g}"
    assert f"<val>/loss {loss} at batch 6" in repr(logger)
    assert f"<td>&lt;val&gt;/loss</td><td>2</td><td>6</td><td>{loss}</td>" in logger._repr_html_()
    assert (shown([logger]), repr(pl.loggers.InMemoryLogger())) == ("[InMemoryLogger()]", "InMemoryLogger()")


@attrs.frozen(eq=False, kw_only=True)
class Counted(pl.State):
    steps: int = 0


def test_a_state_says_where_it_is_and_what_has_happened() -> None:
    adamw, evaluators = pl.optim.adamw(lr=0.1), {"<val>": DATA, "b": DATA}
    states = dict(fit(evaluators=evaluators, algorithms=[A.ema("2ba")], optimizer=adamw))
    end, inside = states[pl.Event.FIT_END], states[pl.Event.AFTER_LOSS]
    metrics = "; ".join(
        f"{label}: loss {float(each['loss']):.6g}, accuracy {float(each['accuracy']):.6g}"
        for label, each in end.metrics.items()
    )
    rows = {
        "metrics": metrics,
        "model": "Sequential, 67 parameters in 4 tensors, on cpu, float32",
        "opt_state": "step, skipped, exp_avg, exp_avg_sq",
        "algorithm_state": "ema",
    }
    place = "State at FIT_END, epoch 2, batch 6"
    assert str(end).split() == " ".join([place, *(f"{name} {text}" for name, text in rows.items())]).split()
    assert max(map(len, str(end).splitlines())) <= 100
    assert end._repr_html_() == reprs.table(list(rows.items()), caption=place)
    loss = f"loss {float(inside.loss.detach()):.6g}"
    assert f"\n  loss             {loss[5:]}\n" in str(inside)
    assert repr(inside).startswith(f"State(after_loss, epoch 1, batch 5, {rows['model']}, {loss}, metrics of <val> (")
    counts = {"skipped": torch.tensor(3), "nonfinite": torch.tensor(2)}
    own = Counted.create(problem.tied(), frozen={"0.weight"}, stop=True, **counts)
    said = " ".join(str(own.replace(loss={"total": torch.ones(()), "part": torch.zeros(())}, steps=2)).split())
    assert said.startswith("Counted at no event, epoch 0, batch 0 loss total 1, part 0 model ")
    assert said.endswith("stop True skipped 3 steps nonfinite first at batch 2 steps 2")
    assert "of them frozen)" in said


def test_a_state_whose_memory_is_gone_is_printed_and_printing_lends_nothing() -> None:
    run = fit(donate=True, strict=None, optimizer=pl.optim.adamw(lr=0.1))
    kept = [state for event, state in run if event is pl.Event.BATCH_END]
    gone = "overwritten by the step of batch 1"
    assert f"Sequential, parameters {gone}" in repr(kept[0])
    assert f"<td>Sequential, parameters {gone}</td>" in kept[0]._repr_html_()
    assert f"opt_state        <opt_state, {gone}>" in str(kept[0])
    state = pl.State.create(problem.mlp(), opt_state=pl.FrozenDict(step=1), loss=torch.ones((), requires_grad=True))
    assert all((str(state), repr(state), state._repr_html_()))
    assert [getattr(each, "lent", None) for each in (raw_params(state), raw_opt_state(state))] == [None, None]
    report = Report("mine <1>", (Outcome("purity", "no input changes", "passed", 3),), problem="it never ran")
    assert "<caption>mine &lt;1&gt;: 1 passed. it never ran</caption>" in report._repr_html_()
    assert "<tr><td>purity</td><td>no input changes</td><td>passed</td><td>3</td><td>" in report._repr_html_()


def test_a_timestamp_is_printed_and_other_code_may_ask_for_attributes_that_there_are_not() -> None:
    state: Any = pl.State.create(torch.nn.Linear(2, 1))
    assert str(state.timestamp) == f"{state.timestamp}" == "epoch 0, batch 0"
    assert not {"batches", "step"} & {*dir(state.timestamp)}
    for name in ("lent", "origin", "__array__"):
        assert not hasattr(state.buffers, name), name


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
        pl.lr_find,
        pl.profile,
        pl.optim.adamw,
        pl.load,
        pl.progress,
        pl.State.module,
        A.early_stopping,
        A.ema,
        A.reduce_on_plateau,
    ]
    for module in (pl.schedules, pl.callbacks, pl.loggers):
        listed += [getattr(module, name) for name in module.__all__]
    parameters = {each for function in listed for each in inspect.signature(function).parameters}
    for names, parameter, text in hints.ARGUMENTS:
        assert parameter in parameters
        assert "{{" not in text.format(3, name="fit", call="")
        assert parameter not in names.split()
