"""F1, intersection over union and Dice, against scikit-learn at random inputs; the Dice loss, against its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score, jaccard_score

import pure_loop as pl
from pure_loop.metrics import dice, dice_loss, f1, mean_iou
from tests.metrics.measuring import measured, splits
from tests.support.runs import mlp, points, train

PREDICTED, TARGETS = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20)


def arrays(pairs: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    predicted, targets = zip(*pairs, strict=True)
    return torch.tensor(predicted), torch.tensor(targets)


@given(PAIRS, splits, st.sampled_from(["macro", "micro", "weighted", None]))
def test_f1_and_dice_are_those_of_scikit_learn(pairs: Any, cuts: list[int], average: Any) -> None:
    predicted, targets = arrays(pairs)
    labels = range(4) if average is None else None  # scikit-learn takes those that occur
    expected = f1_score(targets, predicted, labels=labels, average=average, zero_division=0)
    np.testing.assert_allclose(measured(f1(4, average=average), predicted, targets, cuts), expected, atol=1e-6)
    if average != "weighted":
        np.testing.assert_allclose(measured(dice(4, average=average), predicted, targets, cuts), expected, atol=1e-6)


@given(PAIRS, splits, st.sampled_from(["macro", None]))
def test_intersection_over_union_is_that_of_scikit_learn(pairs: Any, cuts: list[int], average: Any) -> None:
    predicted, targets = arrays(pairs)
    labels = range(4) if average is None else None
    expected = jaccard_score(targets, predicted, labels=labels, average=average, zero_division=0)
    np.testing.assert_allclose(measured(mean_iou(4, average=average), predicted, targets, cuts), expected, atol=1e-6)


def test_by_hand() -> None:
    assert measured(mean_iou(2, average=None), PREDICTED, TARGETS).tolist() == pytest.approx([0.5, 2 / 3])
    assert float(measured(mean_iou(2), PREDICTED, TARGETS)) == pytest.approx(0.583333, abs=1e-6)
    assert measured(dice(2, average=None), PREDICTED, TARGETS).tolist() == pytest.approx([2 / 3, 0.8])
    ignored = torch.tensor([0, 1, 1, 255])
    assert float(measured(mean_iou(2, ignore_index=255), PREDICTED, ignored)) == pytest.approx(0.5)


def test_f1_of_class_1_of_scores_above_a_threshold() -> None:
    logits, targets = torch.tensor([-1.0, 2.0, 0.5, 3.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert float(measured(f1(average="binary", threshold=0.0), logits, targets)) == pytest.approx(0.8)
    assert float(measured(f1(average="binary", threshold=9.0), logits, targets)) == 0.0


def test_of_no_targets_that_count_it_is_not_a_number() -> None:
    assert measured(f1(2), PREDICTED, torch.full((4,), -100)).isnan()
    assert f1().compute(f1().init()).isnan()


@given(st.integers(1, 4), st.booleans(), st.floats(0.1, 2.0))
def test_the_dice_loss_is_its_formula(samples: int, pixels: bool, smooth: float) -> None:
    shape = (samples, 3, 2, 5) if pixels else (samples, 3)
    outputs = torch.rand(shape, dtype=torch.float64).softmax(dim=1)
    targets = torch.randint(3, shape[:1] + shape[2:])
    expected = []
    for sample in range(samples):
        for label in range(3):
            p, t = outputs[sample, label], (targets[sample] == label).double()
            expected.append(1 - (2 * (p * t).sum() + smooth) / (p.sum() + t.sum() + smooth))
    loss = dice_loss(outputs, targets, smooth=smooth)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    one_hot = torch.stack([(targets == label).double() for label in range(3)], dim=1)
    torch.testing.assert_close(dice_loss(outputs, one_hot, smooth=smooth), loss)
    assert dice_loss(one_hot, targets, smooth=smooth) == 0


def test_the_dice_loss_trains_alike_however_batches_are_split() -> None:
    model = torch.nn.Sequential(mlp(), torch.nn.Softmax(dim=1))
    whole, parts = (train(model, points(), loss=dice_loss, microbatch_size=size) for size in (None, 2))
    for name, tensor in whole.params.items():
        torch.testing.assert_close(parts.params[name], tensor)


def test_what_the_dice_loss_can_not_compare_is_refused() -> None:
    with pytest.raises(pl.DataError, match=r"probabilities of shape \(n, classes, ...\).*targets \(3,\)"):
        dice_loss(torch.zeros(2, 3), torch.zeros(3).long())
    with pytest.raises(pl.DataError, match="the target 3 is no class"):
        dice_loss(torch.zeros(2, 3), torch.tensor([0, 3]))
    with pytest.raises(pl.ArgumentError, match="smooth"):
        dice_loss(torch.zeros(2, 3), torch.zeros(2).long(), smooth=-1.0)
