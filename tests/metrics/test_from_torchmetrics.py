"""Metrics of torchmetrics: their values in an evaluation, and their state as a value."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix, MulticlassF1Score

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger
from pure_loop.metrics import confusion_matrix, from_torchmetrics
from tests.metrics.measuring import measured, splits
from tests.support.runs import mlp, noise, points, stream

CLASSES = 4
MAKERS: dict[str, Any] = {
    "sums": lambda: MulticlassF1Score(CLASSES, average=None),
    "lists": lambda: MulticlassAUROC(CLASSES),
    "a wrapper": lambda: torchmetrics.ClasswiseWrapper(MulticlassF1Score(CLASSES, average=None)),
    "a collection": lambda: torchmetrics.MetricCollection([MulticlassF1Score(CLASSES), MulticlassAUROC(CLASSES)]),
    "a composition": lambda: 1 - MulticlassF1Score(CLASSES),
}


@pytest.mark.parametrize("kind", MAKERS)
@given(seed=st.integers(0, 1000), cuts=splits)
def test_values_are_those_of_torchmetrics(kind: str, seed: int, cuts: list[int]) -> None:
    generator = noise(seed)
    outputs = torch.randn(12, CLASSES, generator=generator).softmax(dim=1)
    targets = torch.randint(CLASSES, (12,), generator=generator)
    targets[:CLASSES] = torch.arange(CLASSES)
    metric = MAKERS[kind]()
    found = measured(from_torchmetrics(metric), outputs, targets, cuts)
    torch.testing.assert_close(found, MAKERS[kind]()(outputs, targets))


def test_largest_and_smallest_are_merged() -> None:
    values = torch.tensor([1.0, 7.0, -3.0])
    for cls, expected in ((torchmetrics.MaxMetric, 7.0), (torchmetrics.MinMetric, -3.0)):
        metric = from_torchmetrics(cls(), targets=lambda batch: None)
        assert measured(metric, values, torch.zeros(3), [1, 2]) == expected


def test_accumulators_are_values() -> None:
    """No update writes to an accumulator that was given, and two runs of one metric do not meet."""
    own = MulticlassConfusionMatrix(2)
    metric = from_torchmetrics(own)
    batch = torch.tensor([[1.0, 0.0]]), (None, torch.tensor([0]))
    first = metric.update(metric.init(), *batch)
    kept = {name: value.clone() for name, value in first.items()}
    second = metric.update(first, *batch)
    assert metric.compute(second).tolist() == [[2, 0], [0, 0]]
    assert metric.compute(first).tolist() == [[1, 0], [0, 0]]
    torch.testing.assert_close(first, kept)
    assert metric.compute(metric.init()).isnan()
    assert not own.update_called


def test_in_an_evaluation_with_parts_of_a_batch_and_in_loggers() -> None:
    data, logger = points(3), InMemoryLogger()
    own = MulticlassConfusionMatrix(3)
    metrics = [
        confusion_matrix(),
        from_torchmetrics(own, outputs=lambda o: o.argmax(dim=1), targets=lambda b: b[1], name="theirs"),
        from_torchmetrics(torchmetrics.ClasswiseWrapper(MulticlassF1Score(3, average=None), labels=["a", "b", "c"])),
    ]
    evaluator = pl.Evaluator(data, metrics=metrics, microbatch_size=2)
    state = pl.run(pl.evaluate(mlp(), {"val": evaluator}, loss=torch.nn.functional.cross_entropy, loggers=[logger]))
    assert torch.equal(state.metrics["val"]["theirs"], state.metrics["val"]["confusion_matrix"])
    assert {f"val/ClasswiseWrapper/multiclassf1score_{label}" for label in "abc"} <= logger.metrics.keys()
    assert repr(metrics[1]) == "from_torchmetrics(metric=MulticlassConfusionMatrix, outputs=<lambda>, " + (
        "targets=<lambda>, name='theirs')"
    )


DETECTION = """
import torch

# The operators of a torchvision for CUDA are missing beside a torch without it, and its import asks for these two.
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from torchmetrics.detection import MeanAveragePrecision

from pure_loop.metrics import from_torchmetrics

corners = torch.rand(5, 4, 2, generator=torch.Generator().manual_seed(0)) * 9
boxes = torch.cat([corners, corners + 2], dim=2)
labels = torch.arange(4) % 2
predictions = [{"boxes": b, "scores": torch.linspace(0.1, 0.9, 4), "labels": labels} for b in boxes]
targets = [{"boxes": b[:3] + 0.3, "labels": labels[:3]} for b in boxes]
expected = MeanAveragePrecision()
expected.update(predictions, targets)
metric = from_torchmetrics(MeanAveragePrecision())
parts = [metric.update(metric.init(), predictions[i::2], (None, targets[i::2])) for i in range(2)]
torch.testing.assert_close(metric.compute(metric.merge(*parts)), expected.compute())
assert 0 < expected.compute()["map"] < 1
"""


@pytest.mark.slow
def test_mean_average_precision_of_boxes_in_images() -> None:
    for package in ("torchvision", "pycocotools"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"torchmetrics needs {package} for it, which is not installed")
    subprocess.run([sys.executable, "-W", "ignore", "-c", DETECTION], check=True)


def test_states_that_can_not_be_merged_are_those_of_one_rank() -> None:
    assert from_torchmetrics(torchmetrics.PearsonCorrCoef()).merge is None
    assert from_torchmetrics(torchmetrics.MeanSquaredError()).merge is not None


def test_what_is_no_metric_of_torchmetrics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, text in ((MulticlassF1Score, "the class MulticlassF1Score"), (3, "3 of type int")):
        with pytest.raises(pl.ArgumentTypeError, match=f"metric is {text}; give an instance"):
            from_torchmetrics(value)
    with pytest.raises(pl.ArgumentTypeError, match="outputs=3 is not a function"):
        from_torchmetrics(MulticlassF1Score(3), outputs=3)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[torchmetrics\]'"):
        from_torchmetrics(3)


def test_a_metric_of_torchmetrics_by_itself_is_refused_with_what_to_write() -> None:
    evaluator = pl.Evaluator(points(), metrics=[MulticlassAUROC(CLASSES)])
    says = r"evaluator 'val'.*write pl\.metrics\.from_torchmetrics\(MulticlassAUROC\(\.\.\.\)\)"
    with pytest.raises(pl.ArgumentTypeError, match=says):
        stream(mlp(), points(), evaluators={"val": evaluator})


def test_an_error_of_the_value_names_metric_and_evaluator() -> None:
    auroc = from_torchmetrics(torchmetrics.classification.BinaryAUROC())
    data = [(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3)] * 2
    stream = pl.evaluate(
        torch.nn.Linear(3, 3), {"val": pl.Evaluator(data, metrics=[auroc])}, loss=torch.nn.functional.cross_entropy
    )
    with pytest.raises(IndexError) as caught:  # two classes are measured, and there are three
        pl.run(stream)
    assert any("raised by the metric 'BinaryAUROC'" in note and "'val'" in note for note in caught.value.__notes__)
