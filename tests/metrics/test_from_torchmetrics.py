"""Metrics of torchmetrics: their values in an evaluation and in training, and their states, declared or not, as values.

Tried: sums and lists, wrappers, collections, compositions; classes of one's own with numbers, lists and dicts in plain
attributes, buffers that are written to, states declared in an update. What can't be carried is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric, Running

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.metrics import from_torchmetrics
from tests.metrics.test_metrics import measured, splits
from tests.support import problem
from tests.support.refused import Refusal, check
from tests.support.streams import assert_same
from tests.support.tiers import examples


class Own(torchmetrics.Metric):
    """Sums of batches in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.sums: list[float] = []
        self.by_parity = {"even": torch.zeros(()), "odd": torch.zeros(())}
        self.last: Tensor | None = None
        self.register_buffer("written", torch.zeros(()))
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        value = preds.sum()
        self.by_parity["odd" if self.count % 2 else "even"] += value
        self.count += 1
        self.sums.append(float(value))
        self.last = value
        self.written += value
        self.total += value

    def compute(self) -> dict[str, Any]:
        numbers = {"count": torch.tensor(self.count), "updates": torch.tensor(self.update_count), **self.by_parity}
        mean = torch.tensor(sum(self.sums)) / self.count
        return numbers | {"mean": mean, "last": self.last, "written": self.written, "total": self.total}


class DeclaresLater(torchmetrics.Metric):
    """Its number of classes is that of the first batch."""

    is_ready = False

    def update(self, preds: Tensor, target: Tensor) -> None:
        if not self.is_ready:
            self.add_state("per_class", torch.zeros(preds.shape[1]), "sum")
            self.is_ready = True
        self.per_class = self.per_class + preds.sum(0)

    def compute(self) -> Tensor:
        return self.per_class


def f1(**options: Any) -> Any:
    return MulticlassF1Score(3, **options)


def running(window: int = 2) -> Any:
    return Running(MulticlassAccuracy(3), window=window)


collection = torchmetrics.MetricCollection
# Those that ranks can merge, and others.
MERGED: dict[str, Callable[[], Any]] = {
    "lists": lambda: MulticlassAUROC(3),
    "classwise": lambda: ClasswiseWrapper(f1(average=None), prefix="c_"),
    "collection": lambda: collection({"a": f1(), "b": MulticlassAUROC(3)}),
    "composition": lambda: 1 - f1(),
    # torchmetrics updates one of them alone while they are equal, and gives its states to the others.
    "equal at first": lambda: collection(
        {"a": MulticlassAccuracy(3, average=None), "b": MulticlassAccuracy(3, average=None, ignore_index=0)}
    ),
}
ALONE: dict[str, Callable[[], Any]] = {
    "running": running,
    "own": Own,
    "declares later": DeclaresLater,
    "both": lambda: collection({"a": Own(), "b": running(3)}),
    "composed": lambda: 1 - running(3),
}
PARTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def batches_of(sizes: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[:, :3].softmax(1), y) for x, y in problem.points(size=tuple(sizes), seed=seed)]


def by_itself(make: Callable[[], Any], parts: list[tuple[Tensor, Tensor]]) -> Any:
    metric = make()
    if isinstance(metric, collection) and isinstance(metric["b"], MulticlassAccuracy):
        return {name: by_itself(lambda alone=alone: alone, parts) for name, alone in metric.items()}
    for outputs, targets in parts:
        metric.update(outputs, targets)
    return metric.compute()


def carried(metric: Any, parts: list[tuple[Tensor, Tensor]], accumulator: Any = None) -> Any:
    accumulator = metric.init() if accumulator is None else accumulator
    for outputs, targets in parts:
        accumulator = metric.update(accumulator, outputs, (None, targets))
    return accumulator


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.parametrize("kind", [*MERGED, *ALONE])
@examples(8, 100)
@given(first=PARTS, second=PARTS, seed=st.integers(0, 99), cuts=splits)
def test_states_are_values(kind: str, first: list[int], second: list[int], seed: int, cuts: list[int]) -> None:
    """Two sequences of updates of one metric, in turns, have the values that each has in an object of its own.

    So have parts of a batch that are merged.
    """
    make = (MERGED | ALONE)[kind]
    own = make()
    metric, both = from_torchmetrics(own), (batches_of(first, seed), batches_of(second, seed + 100))
    accumulators: list[Any] = [metric.init(), metric.init()]
    for number in range(max(map(len, both))):
        for place, parts in enumerate(both):
            accumulators[place] = carried(metric, parts[number : number + 1], accumulators[place])
            metric.compute(accumulators[place])  # which changes nothing
    for accumulator, parts in zip(accumulators, both, strict=True):
        torch.testing.assert_close(metric.compute(accumulator), by_itself(make, parts))
    again = carried(metric, both[0][1:], carried(metric, both[0][:1]))
    assert_same({"": again}, {"": accumulators[0]}, kind)
    assert kind != "lists" or not own.update_called
    assert (metric.merge is None) == (kind in ALONE)
    if kind in MERGED:
        ((outputs, targets),) = batches_of([12], seed)
        found = measured(from_torchmetrics(make()), outputs, targets, cuts)
        torch.testing.assert_close(found, by_itself(make, [(outputs, targets)]))


def test_largest_and_smallest_are_merged_and_what_was_passed_stays_as_it_was() -> None:
    values = torch.tensor([1.0, 7.0, -3.0])
    for cls, expected in ((torchmetrics.MaxMetric, 7.0), (torchmetrics.MinMetric, -3.0)):
        metric = from_torchmetrics(cls(), targets=lambda batch: None)
        assert measured(metric, values, torch.zeros(3), [1, 2]) == expected
    assert from_torchmetrics(torchmetrics.PearsonCorrCoef()).merge is None
    assert from_torchmetrics(MulticlassConfusionMatrix(2)).compute(from_torchmetrics(f1()).init()).isnan()
    own = Own()
    own.update(torch.ones(1, 3), torch.tensor([0]))
    from_torchmetrics(own)
    assert (own.count, own.update_count, own.sums) == (1, 1, [3.0])


def test_in_loggers_and_beside_the_same_metric_of_the_library() -> None:
    logger = pl.loggers.InMemoryLogger()
    theirs = from_torchmetrics(MulticlassConfusionMatrix(3), outputs=lambda o: o.argmax(dim=1), name="theirs")
    classwise = from_torchmetrics(ClasswiseWrapper(f1(average=None), labels=["a", "b", "c"]))
    evaluator = pl.Evaluator(problem.points(), metrics=[pl.metrics.confusion_matrix(), theirs, classwise])
    state = pl.run(pl.evaluate(problem.mlp(), {"val": evaluator}, loss=problem.cross_entropy, loggers=[logger]))
    assert torch.equal(state.metrics["val"]["theirs"], state.metrics["val"]["confusion_matrix"])
    assert {f"val/ClasswiseWrapper/multiclassf1score_{label}" for label in "abc"} <= logger.metrics.keys()
    assert repr(theirs).endswith("MulticlassConfusionMatrix, outputs=<lambda>, name='theirs')")


def train_with(metric: Any, start: Any = None, **options: Any) -> list[pl.State]:
    """With the values in training and of two evaluators after each batch."""
    evaluators = {label: pl.Evaluator(problem.points(2, seed=i), metrics=[metric]) for i, label in enumerate("ab")}
    options |= {"evaluators": evaluators, "eval_interval": "1ba", "train_metrics": [metric], "max_duration": "1ep"}
    stream = problem.fit(start, problem.points(4), **options)
    return [state for event, state in stream if event is Event.BATCH_CHECKPOINT]


def test_in_training_resumed_from_a_file_and_beside_other_evaluators(tmp_path: Path) -> None:
    whole = train_with(from_torchmetrics(ALONE["both"]()), microbatch_size=2, donate=False)
    module = whole[-1].module(training=False)
    for seed, label in enumerate("ab"):
        with torch.no_grad():
            wanted = by_itself(ALONE["both"], [(module(x), y) for x, y in problem.points(2, seed=seed)])
        (found,) = whole[-1].metrics[label].values()
        torch.testing.assert_close(found, wanted)
    pl.save(whole[1], tmp_path / "middle.safetensors")
    loaded = pl.load(tmp_path / "middle.safetensors", model=problem.mlp())
    resumed = train_with(from_torchmetrics(ALONE["both"]()), loaded, microbatch_size=2)
    for field in ("metrics", "algorithm_state"):
        assert_same({"": getattr(resumed[-1], field)}, {"": getattr(whole[-1], field)}, field)


@pytest.mark.usefixtures("interpreted")
def test_compiled() -> None:
    eager, compiled = (
        [float(state.metrics["train"]["Running"]) for state in train_with(from_torchmetrics(running()), **options)]
        for options in ({}, {"compile": True, "strict": False})
    )
    assert compiled == pytest.approx(eager)


# What can't be carried.


class KeepsTheBest(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.best = -1.0
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, preds: Any, target: Any) -> None:
        self.total += preds.sum()

    def compute(self) -> Tensor:
        self.best = max(self.best, float(self.total))
        return torch.tensor(self.best)


class OfTexts(KeepsTheBest):
    """What no trial fits."""

    def update(self, preds: list[str], target: list[str]) -> None:
        self.total += sum(len(text.split()) for text in preds)


class DeclaresAgain(DeclaresLater):
    def update(self, preds: Tensor, target: Tensor) -> None:
        self.is_ready = "per_class" in self._defaults
        super().update(preds, target)


class Holder:
    count = 0

    def update(self, preds: Tensor) -> None:
        self.count += 1


class Keeps(torchmetrics.Metric):
    """Keeps a thing that counts in an attribute, or as an attribute of its class."""

    updates = 0

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = {"all": [own]} if isinstance(own, torchmetrics.Metric) else own

    def update(self, preds: Tensor, target: Tensor) -> None:
        if self.own is None:
            type(self).updates += 1
        else:
            (self.own["all"][0] if isinstance(self.own, dict) else self.own).update(preds)

    def compute(self) -> Any:
        return self.own["all"][0].compute() if isinstance(self.own, dict) else torch.tensor(self.updates)


def text_then_compute() -> None:
    metric = from_torchmetrics(OfTexts())
    metric.compute(metric.update(metric.init(), ["a b"], (None, ["a"])))


def alone() -> pl.Stream:
    return problem.fit(evaluators={"val": pl.Evaluator(problem.points(), metrics=[MulticlassAUROC(3)])})


REFUSED: list[tuple[type[Exception], Any, str]] = [
    (
        ArgumentError,
        lambda: collection({"a": MinMaxMetric(BinaryAccuracy())}),
        "compute() changes a.min_val, a.max_val",
    ),
    (ArgumentError, KeepsTheBest, "KeepsTheBest): compute() changes best,"),
    (ArgumentError, DeclaresAgain, "update() declares the state per_class again"),
    (ArgumentError, lambda: Keeps(Holder()), ".Holder, and changes in update()"),
    (ArgumentError, lambda: Keeps(MeanMetric()), "keeps metrics in the dict self.own"),
    (ArgumentError, lambda: Keeps(None), "keeps something outside of its attributes"),
    (ArgumentTypeError, lambda: MetricTracker(f1()), "give an instance of a metric of torchmetrics"),
    (ArgumentTypeError, lambda: MulticlassF1Score, "the class MulticlassF1Score; give an instance"),
    (ArgumentTypeError, lambda: from_torchmetrics(f1(), outputs=3), "outputs=3 is not a function"),  # type: ignore[arg-type]
    (ArgumentError, text_then_compute, "compute() changes best,"),
    (ArgumentTypeError, alone, "write pl.metrics.from_torchmetrics(MulticlassAUROC(...))"),
]


def test_what_can_not_be_carried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, make, says in REFUSED:
        check(Refusal(says, lambda make=make: from_torchmetrics(make()), error, (says,)))
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pl.errors.MissingExtraError, match=r"pip install 'pure_loop\[torchmetrics\]'"):
        from_torchmetrics(3)


def test_an_error_of_the_value_names_metric_and_evaluator() -> None:
    evaluator = pl.Evaluator(problem.points(2, 32), metrics=[from_torchmetrics(BinaryAUROC())])
    with pytest.raises(IndexError) as caught:  # two classes are measured, and there are three
        pl.run(pl.evaluate(problem.mlp(), {"val": evaluator}, loss=problem.cross_entropy))
    assert any("raised by the metric 'BinaryAUROC'" in note and "'val'" in note for note in caught.value.__notes__)
