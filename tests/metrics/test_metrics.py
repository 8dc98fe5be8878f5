"""Each metric is its formula on all samples together, however they are split into batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAUROC, MulticlassCalibrationError, MulticlassF1Score

import pure_loop as pl
from pure_loop import metrics as m
from pure_loop.errors import ArgumentError, DataError
from tests.support import problem
from tests.support.refused import Refusal, check
from tests.support.tiers import examples
from tests.support.worlds import pool

CLASSES = 6
splits = st.lists(st.integers(1, 19), max_size=3)
"""Places where samples are cut into microbatches."""


def measured(metric: Any, outputs: Tensor, targets: Tensor, cuts: Any = ()) -> Any:
    """Its value, which has to be the same in the order of microbatches, in reverse and as ranks put it together."""
    places = sorted({cut for cut in cuts if cut < len(targets)})
    parts = list(zip(outputs.tensor_split(places), targets.tensor_split(places), strict=True))

    def update(accumulator: Any, part: tuple[Tensor, Tensor]) -> Any:
        return metric.update(accumulator, part[0], (None, part[1]))

    first, *rest = [
        metric.compute(reduce(update, parts, metric.init())),
        metric.compute(reduce(update, reversed(parts), metric.init())),
        metric.compute(reduce(metric.merge, [update(metric.init(), part) for part in parts])),
    ]
    for value in rest:
        torch.testing.assert_close(value, first, equal_nan=True)
    return first


def of_classes(score: Callable[..., Any], **settings: Any) -> Callable[[Tensor, Tensor], Any]:
    """A score of scikit-learn's, which takes the classes that occur, or all where it gives one number each."""
    if settings.get("average", 1) is None:
        settings["labels"] = range(CLASSES)
    return lambda outputs, targets: score(targets, outputs.argmax(1), zero_division=0, **settings)


def matrix(outputs: Tensor, targets: Tensor, normalize: Any = None) -> Any:
    return sk.confusion_matrix(targets, outputs.argmax(1), labels=range(CLASSES), normalize=normalize)


def right(outputs: Tensor, targets: Tensor, k: int = 1) -> Any:
    return (outputs.topk(k, dim=1).indices == targets[:, None]).any(1).float().mean()


def calibration(outputs: Tensor, targets: Tensor) -> Any:
    return MulticlassCalibrationError(CLASSES, 7)(outputs.softmax(dim=1), targets)


# A metric of scores, and its formula for those samples whose targets count.
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Any]]] = {
    "accuracy": (m.accuracy, right),
    "top_k": (partial(m.top_k, 3), partial(right, k=3)),
    "perplexity": (m.perplexity, lambda outputs, targets: cross_entropy(outputs, targets).exp()),
    "expected_calibration_error": (partial(m.expected_calibration_error, 7), calibration),
    "confusion_matrix": (m.confusion_matrix, matrix),
}
for _way in ("true", "pred", "all"):
    FORMULAS[f"confusion_matrix, {_way}"] = partial(m.confusion_matrix, normalize=_way), partial(matrix, normalize=_way)
for _metric, _score, _averages in (
    (m.f1, sk.f1_score, ("macro", "micro", "weighted", None)),
    (m.dice, sk.f1_score, ("macro", "micro", None)),
    (m.mean_iou, sk.jaccard_score, ("macro", None)),
):
    for _average in _averages:
        name = f"{_metric.__name__}, {_average}"
        FORMULAS[name] = partial(_metric, average=_average), of_classes(_score, average=_average)
# Whose outputs may be classes, too.
TAKES_CLASSES = ("confusion_matrix", "f1", "dice", "mean_iou")


def test_each_metric_of_the_library_has_a_formula() -> None:
    found = {name.partition(",")[0] for name in FORMULAS}
    assert found == {*m.__all__} - {"Metric", "loss", "mean", "dice_loss", "from_torchmetrics"}


@pytest.mark.parametrize("metric", sorted({name.partition(",")[0] for name in FORMULAS}))
@examples(15, 300)
@given(seed=st.integers(0, 999), samples=st.integers(2, 20), cuts=splits, ignored=st.sets(st.integers(1, 19)))
def test_a_metric_is_its_formula_however_samples_are_split(
    metric: str, seed: int, samples: int, cuts: list[int], ignored: set[int]
) -> None:
    generator = problem.noise(seed)
    outputs = torch.randn(samples, CLASSES, generator=generator)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    counts = torch.tensor([index not in ignored or metric == "expected_calibration_error" for index in range(samples)])
    counted = outputs[counts], targets[counts]
    targets = targets.where(counts, -100)
    for name, (make, formula) in FORMULAS.items():
        if name.partition(",")[0] == metric:
            wanted = formula(*counted)
            np.testing.assert_allclose(measured(make(), outputs, targets, cuts), wanted, atol=1e-6, rtol=1e-5)
            if metric in TAKES_CLASSES:
                found = measured(make(classes=CLASSES), outputs.argmax(1), targets, cuts)
                np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=name)


def test_pixels_scores_of_two_classes_and_what_does_not_count() -> None:
    generator = problem.noise()
    outputs = torch.randn(2, CLASSES, 3, 5, generator=generator)
    targets = torch.randint(CLASSES, (2, 3, 5), generator=generator)
    expected = sk.confusion_matrix(targets.flatten(), outputs.argmax(1).flatten()).tolist()
    assert measured(m.confusion_matrix(), outputs, targets).tolist() == expected
    assert measured(m.confusion_matrix(axis=-1), outputs.movedim(1, -1), targets).tolist() == expected
    logits, binary = torch.tensor([[-1.0], [2.0], [0.5], [3.0]]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert measured(m.confusion_matrix(threshold=0.0), logits, binary).tolist() == [[1, 1], [0, 2]]
    assert float(measured(m.f1(average="binary", threshold=0.0), logits, binary)) == pytest.approx(0.8)
    assert float(measured(m.f1(average="binary", threshold=9.0), logits, binary)) == 0.0
    predicted = torch.tensor([0, 0, 1, 1])
    ignored = torch.tensor([0, 1, 1, 255])
    assert float(measured(m.mean_iou(2, ignore_index=255), predicted, ignored)) == pytest.approx(0.5)
    assert measured(m.f1(2), predicted, torch.full((4,), -100)).isnan()
    assert m.f1().compute(m.f1().init()).isnan()
    # A confidence of 1 is in the last bin.
    outputs, targets = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.99, 0.01]]), torch.tensor([0, 1, 0])
    found = measured(m.expected_calibration_error(10, probabilities=True), outputs, targets)
    assert float(found) == pytest.approx((2.99 - 2) / 3)
    assert repr(m.confusion_matrix(3, normalize="true")) == "confusion_matrix(classes=3, normalize='true')"


def test_tokens_weigh_the_same_in_batches_of_any_length_and_are_summed_in_float32() -> None:
    """2 tokens of likelihood exp(-1) and 6 of exp(-2): the mean of the batches' perplexities would be 5.05."""
    metric, accumulator = m.perplexity(), m.perplexity().init()
    for tokens, nll in ((2, 1.0), (6, 2.0)):
        logits = torch.tensor([math.exp(-nll), 1 - math.exp(-nll)]).log().expand(1, tokens, 2)
        accumulator = metric.update(accumulator, logits, (None, torch.zeros(1, tokens).long()))
    assert float(metric.compute(accumulator)) == pytest.approx(5.754603, abs=1e-5)
    half = torch.zeros(1, 4096, 2, dtype=torch.float16)
    assert float(measured(metric, half, torch.zeros(1, 4096).long())) == pytest.approx(2.0, abs=1e-4)


def test_a_metric_of_a_part_of_the_outputs_and_of_other_targets() -> None:
    generator = problem.noise()
    logits, tokens = torch.randn(2, 5, 7, generator=generator), torch.randint(7, (2, 5), generator=generator)
    metric = m.perplexity().on(outputs=lambda o: o["logits"][:, :-1], targets=lambda batch: batch["labels"][:, 1:])
    value = metric.compute(metric.update(metric.init(), {"logits": logits}, {"labels": tokens}))
    torch.testing.assert_close(value, cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).exp())


@examples(20, 300)
@given(st.integers(1, 4), st.booleans(), st.floats(0.1, 2.0))
def test_the_dice_loss_is_its_formula(samples: int, pixels: bool, smooth: float) -> None:
    shape, generator = (samples, 3, 2, 5) if pixels else (samples, 3), problem.noise(samples)
    outputs = torch.rand(shape, dtype=torch.float64, generator=generator).softmax(dim=1)
    targets = torch.randint(3, shape[:1] + shape[2:], generator=generator)
    both = torch.stack([(targets == label).double() for label in range(3)], dim=1)
    (p, t), last = (each.flatten(2) if pixels else each[..., None] for each in (outputs, both)), 2
    expected = 1 - (2 * (p * t).sum(last) + smooth) / (p.sum(last) + t.sum(last) + smooth)
    for given_targets in (targets, both):
        torch.testing.assert_close(m.dice_loss(outputs, given_targets, smooth=smooth), expected.mean())
    assert m.dice_loss(both, targets, smooth=smooth) == 0


def test_the_dice_loss_trains_alike_however_batches_are_split() -> None:
    model = nn.Sequential(problem.mlp(), nn.Softmax(dim=1))
    whole, parts = (problem.run(model, loss=m.dice_loss, microbatch_size=size) for size in (None, 2))
    problem.close(parts.params, whole.params)


two, image = torch.zeros(2).long(), torch.zeros(2, 3)
REFUSED = [
    Refusal(says, lambda metric=metric, given=given: measured(metric(), *given), DataError, (says,))
    for says, metric, *given in (
        ("have 3 classes along axis 1", partial(m.confusion_matrix, 4), image, two),
        ("write pl.metrics.confusion_matrix(classes=10)", m.confusion_matrix, two, two),
        ("the target 3 is no class: with 3 classes they are 0 to 2", m.confusion_matrix, image, torch.tensor([0, 3])),
        ("the output 2 is no class", partial(m.confusion_matrix, 2), torch.tensor([0, 2]), torch.tensor([0, 1])),
        ("threshold=0.5) needs outputs with one score", partial(m.f1, threshold=0.5, average="binary"), image, two),
        ("the target 0.5 is no class", partial(m.confusion_matrix, threshold=0.5), two.float(), two + 0.5),
        ("confusion_matrix needs outputs of scores", m.confusion_matrix, two.float(), two),
        ("top_k(k=7): outputs of shape (2, 3) have 3 classes", partial(m.top_k, 7), image, two),
        ("perplexity: the target 3 is no class", m.perplexity, image, two + 3),
    )
] + [
    Refusal("no loss of shapes", lambda: m.dice_loss(image, torch.zeros(3).long()), DataError, ("targets (3,)",)),
    Refusal("no loss of classes", lambda: m.dice_loss(image, two + 3), DataError, ("the target 3 is no class",)),
    Refusal("smoothing", lambda: m.dice_loss(image, two, smooth=-1.0), ArgumentError, ("smooth",)),
    Refusal("a part of the loss", lambda: m.loss().on(outputs=abs), ArgumentError, ("'loss' is of the loss",)),
]


def test_what_does_not_fit_is_named() -> None:
    for refusal in REFUSED:
        check(refusal)


@pytest.mark.slow  # each process imports torchmetrics
def test_ranks_measure_what_one_rank_does() -> None:
    """Of batches of 5, 1 and 4 samples, so that the second rank has none of one of them."""

    def results(**options: Any) -> dict[str, Any]:
        metrics = [
            *(m.loss(), m.accuracy(), m.top_k(2), m.f1(average=None), m.dice(), m.mean_iou(), m.confusion_matrix()),
            *(m.perplexity(), m.expected_calibration_error(), m.mean(lambda outputs, batch: outputs.sum(1), "total")),
            m.from_torchmetrics(MulticlassF1Score(3)),
            m.from_torchmetrics(MulticlassAUROC(3), outputs=lambda outputs: outputs.softmax(dim=1)),
        ]
        evaluator = pl.Evaluator(problem.points(size=(5, 1, 4), seed=1), metrics=metrics, microbatch_size=2)
        state = pl.run(pl.evaluate(problem.mlp(), {"val": evaluator}, loss=cross_entropy, **options))
        return dict(state.metrics["val"])

    for found in pool().run(lambda rank: results(parallel="replicate")):
        torch.testing.assert_close(found, results())
