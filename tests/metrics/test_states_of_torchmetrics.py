"""States that metrics of torchmetrics don't declare: carried as declared ones are, or refused by ``from_torchmetrics``.

Tried as neighbours: wrappers (Running, RunningMean, MinMaxMetric, MetricTracker, ClasswiseWrapper, MultioutputWrapper,
collections, compositions); own classes with numbers, lists and dicts in plain attributes, buffers that
are written to, states declared in an update, counts of updates, metrics in a plain list, objects, class attributes,
values that are kept from one compute to the next; two evaluators, two runs, resumed in the middle of an epoch from a
file, microbatches, compiled, on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.aggregation import MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import (
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.metrics import from_torchmetrics
from pure_loop.metrics._base import Metric
from tests.support.runs import equal, mlp, points, stream
from tests.support.tiers import examples
from tests.support.worlds import pool


class Own(torchmetrics.Metric):
    """Sums of batches in many places."""

    total: Tensor
    written: Tensor

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

    def compute(self) -> dict[str, Tensor]:
        assert self.last is not None
        return {
            "count": torch.tensor(self.count),
            "updates": torch.tensor(self.update_count),
            "mean": torch.tensor(sum(self.sums)) / self.count,
            "even": self.by_parity["even"],
            "odd": self.by_parity["odd"],
            "last": self.last,
            "written": self.written,
            "total": self.total,
        }


class DeclaresLater(torchmetrics.Metric):
    """Its number of classes is that of the first batch."""

    per_class: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = False

    def update(self, preds: Tensor, target: Tensor) -> None:
        if not self.is_ready:
            self.add_state("per_class", torch.zeros(preds.shape[1]), "sum")
            self.is_ready = True
        self.per_class = self.per_class + preds.sum(0)

    def compute(self) -> Tensor:
        return self.per_class


MAKERS: dict[str, Callable[[], Any]] = {
    "running sum": lambda: Running(MulticlassAccuracy(3), window=2),
    "own": Own,
    "declares later": DeclaresLater,
    "classwise": lambda: ClasswiseWrapper(MulticlassF1Score(3, average=None)),
    "collection": lambda: torchmetrics.MetricCollection({"a": Own(), "b": Running(MulticlassAccuracy(3), window=3)}),
    "nested": lambda: ClasswiseWrapper(MulticlassF1Score(3, average=None), prefix="c_"),
    "composition": lambda: 1 - Running(MulticlassAccuracy(3), window=3),
    "equal at first": lambda: torchmetrics.MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)]),
}
PARTS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def batches_of(sizes: list[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(size, 3, generator=generator), torch.randint(3, (size,), generator=generator)) for size in sizes
    ]


def by_itself(make: Callable[[], Any], parts: list[tuple[Tensor, Tensor]]) -> Any:
    metric = make()
    for outputs, targets in parts:
        metric.update(outputs, targets)
    return metric.compute()


def carried(metric: Metric, parts: list[tuple[Tensor, Tensor]], accumulator: Any = None) -> Any:
    accumulator = metric.init() if accumulator is None else accumulator
    for outputs, targets in parts:
        accumulator = metric.update(accumulator, outputs, (None, targets))
    return accumulator


@pytest.mark.parametrize("kind", MAKERS)
@examples(10, 100)
@given(first=PARTS, second=PARTS, seed=st.integers(0, 99))
def test_states_are_values(kind: str, first: list[int], second: list[int], seed: int) -> None:
    """Two sequences of updates of one metric, in turns, have the values that each has in an object of its own."""
    metric, one, other = from_torchmetrics(MAKERS[kind]()), batches_of(first, seed), batches_of(second, seed + 100)
    accumulators: list[Any] = [metric.init(), metric.init()]
    for number in range(max(len(one), len(other))):
        for place, parts in enumerate((one, other)):
            accumulators[place] = carried(metric, parts[number : number + 1], accumulators[place])
            metric.compute(accumulators[place])  # which changes nothing
    for accumulator, parts in zip(accumulators, (one, other), strict=True):
        torch.testing.assert_close(metric.compute(accumulator), by_itself(MAKERS[kind], parts))
    again = carried(metric, one[1:], carried(metric, one[:1]))
    equal(again, accumulators[0])


def test_a_running_sum_by_hand() -> None:
    """Of 1, 2, 3 the last two: 5, and 6 of all."""
    metric = from_torchmetrics(Running(SumMetric(), window=2), targets=lambda batch: None)
    mean = from_torchmetrics(RunningMean(window=2), targets=lambda batch: None)
    data = [(torch.tensor([[float(value)]]), torch.zeros(1, dtype=torch.int64)) for value in (1, 2, 3)]
    assert metric.compute(carried(metric, data)) == 5.0
    assert mean.compute(carried(mean, data)) == 2.5
    evaluators = {label: pl.Evaluator(data, metrics=[metric, mean], interval="1ep") for label in ("one", "two")}
    same = torch.nn.Linear(1, 1)
    same.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    for _ in range(2):
        state = pl.run(pl.evaluate(same, evaluators))
        for label in evaluators:
            assert {name: float(value) for name, value in state.metrics[label].items()} == {
                "Running": 5.0, "RunningMean": 2.5
            }  # fmt: skip


def test_the_metric_that_was_passed_stays_as_it_was() -> None:
    own = Own()
    own.update(torch.ones(1, 3), torch.tensor([0]))
    from_torchmetrics(own)
    assert own.count == own.update_count == 1
    assert own.sums == [3.0]


def train_with(metric: Metric, start: Any = None, **options: Any) -> list[Any]:
    """The values in training and of two evaluators after each batch."""
    data = points(4)
    evaluators = {label: pl.Evaluator(points(2, seed=seed), metrics=[metric]) for label, seed in (("a", 1), ("b", 2))}
    settings: dict[str, Any] = {"evaluators": evaluators, "eval_interval": "1ba", "train_metrics": [metric]}
    start = mlp() if start is None else start
    return [
        (state.timestamp.batch, state)
        for event, state in stream(start, data, **{**settings, **options})
        if event is Event.BATCH_CHECKPOINT
    ]


@pytest.mark.parametrize("kind", ["own", "running sum", "collection"])
def test_in_training_resumed_and_beside_other_evaluators(kind: str, tmp_path: Path) -> None:
    metric = from_torchmetrics(MAKERS[kind]())
    whole = train_with(metric, microbatch_size=2, donate=False)
    module = mlp()
    for label, seed in (("a", 1), ("b", 2)):
        module = whole[-1][1].module(training=False)
        with torch.no_grad():
            wanted = by_itself(MAKERS[kind], [(module(x), y) for x, y in points(2, seed=seed)])
        torch.testing.assert_close(whole[-1][1].metrics[label][metric.name], wanted)
    for _, state in (whole[1], whole[5]):
        pl.save(state, tmp_path / "middle.safetensors")
        loaded = pl.load(tmp_path / "middle.safetensors", model=mlp())
        resumed = train_with(from_torchmetrics(MAKERS[kind]()), loaded, microbatch_size=2)
        equal(resumed[-1][1].metrics, whole[-1][1].metrics)
        equal(resumed[-1][1].algorithm_state, whole[-1][1].algorithm_state)


@pytest.mark.usefixtures("interpreted")
def test_compiled() -> None:
    metric = from_torchmetrics(Running(MulticlassAccuracy(3), window=2))
    eager, compiled = (
        [float(state.metrics["train"]["Running"]) for _, state in train_with(metric, compile=traced, strict=False)]
        for traced in (False, True)
    )
    assert compiled == pytest.approx(eager)


# What can't be carried.


class KeepsTheBest(torchmetrics.Metric):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.best = -1.0
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total += preds.sum()

    def compute(self) -> Tensor:
        self.best = max(self.best, float(self.total))
        return torch.tensor(self.best)


class DeclaresAgain(DeclaresLater):
    def update(self, preds: Tensor, target: Tensor) -> None:
        self.is_ready = "per_class" in self._defaults
        super().update(preds, target)


class Counter:
    def __init__(self) -> None:
        self.count = 0


class KeepsAnObject(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.counter.count += 1

    def compute(self) -> Tensor:
        return torch.tensor(self.counter.count)


class KeepsAList(torchmetrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"all": [MeanMetric()]}

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.parts["all"][0].update(preds)

    def compute(self) -> Any:
        return self.parts["all"][0].compute()


class KeepsInItsClass(torchmetrics.Metric):
    updates = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        type(self).updates += 1

    def compute(self) -> Tensor:
        return torch.tensor(type(self).updates)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MinMaxMetric(BinaryAccuracy()), r"compute\(\) changes min_val, max_val,"),
        (lambda: MinMaxMetric(MulticlassAccuracy(5)), r"compute\(\) changes min_val, max_val,"),
        (
            lambda: torchmetrics.MetricCollection({"a": MinMaxMetric(BinaryAccuracy())}),
            r"compute\(\) changes a\.min_val, a\.max_val,",
        ),
        (KeepsTheBest, r"KeepsTheBest\): compute\(\) changes best,"),
        (DeclaresAgain, r"update\(\) declares the state per_class again"),
        (KeepsAnObject, r"counter is a .*\.Counter, and changes in update\(\)"),
        (KeepsAList, r"keeps metrics in the dict self\.parts.*ModuleList"),
        (KeepsInItsClass, r"keeps something outside of its attributes"),
    ],
    ids=["minmax", "minmax of classes", "minmax in a collection", "best", "declared again", "object", "list", "class"],
)
def test_states_that_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        from_torchmetrics(make())


def test_a_tracker_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="give an instance of a metric of torchmetrics"):
        from_torchmetrics(MetricTracker(BinaryAccuracy()))


class OfTexts(KeepsTheBest):
    """What no trial fits."""

    def update(self, preds: list[str], target: list[str]) -> None:
        self.total += sum(len(text.split()) for text in preds)


def test_what_no_trial_shows_is_refused_by_the_first_value() -> None:
    metric = from_torchmetrics(OfTexts())
    accumulator = metric.update(metric.init(), ["a b"], (None, ["a"]))
    with pytest.raises(ArgumentError, match=r"compute\(\) changes best,"):
        metric.compute(accumulator)


def test_what_is_not_declared_serves_one_rank() -> None:
    assert from_torchmetrics(Running(SumMetric(), 2)).merge is None
    assert from_torchmetrics(Own()).merge is None
    assert from_torchmetrics(MultioutputWrapper(torchmetrics.MeanSquaredError(), 2)).merge is not None


@pytest.mark.slow
def test_on_two_ranks() -> None:
    """A trial by itself waits for no other rank, and sums of both are those of all samples."""

    def program(rank: int) -> float:
        metric = from_torchmetrics(ClasswiseWrapper(MulticlassF1Score(3, average=None)))
        evaluators = {"val": pl.Evaluator(points(2, size=6), metrics=[metric])}
        state = pl.run(pl.evaluate(mlp(), evaluators, parallel="replicate"))
        return float(state.metrics["val"]["ClasswiseWrapper"]["multiclassf1score_1"])

    metric = MulticlassF1Score(3, average=None)
    module = mlp().eval()
    for inputs, targets in points(2, size=6):
        metric.update(module(inputs).detach(), targets)
    assert pool().run(program) == pytest.approx([float(metric.compute()[1])] * 2)


def test_metrics_that_were_equal_at_first_go_apart() -> None:
    """torchmetrics updates one of them alone from then on, and gives its states to the others."""
    data = [(torch.eye(3)[[1, 2]], torch.tensor([1, 2])), (torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 1, 1, 0]))]

    def make() -> Any:
        return torchmetrics.MetricCollection(
            {"a": MulticlassAccuracy(3, average=None), "b": MulticlassAccuracy(3, average=None, ignore_index=0)}
        )

    metric = from_torchmetrics(make())
    value = metric.compute(carried(metric, data[:1]))
    for first in (data, data[::-1]):
        value = metric.compute(carried(metric, first))
        for name, alone in make().items():
            torch.testing.assert_close(value[name], by_itself(lambda alone=alone: alone, first))
