"""Confusion matrix, against scikit-learn's definition by hand and in a real evaluation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger
from pure_loop.metrics import confusion_matrix
from tests.metrics.measuring import measured, splits
from tests.support.runs import mlp, noise, points

CLASSES = 4


def by_hand(predicted: list[int], targets: list[int]) -> list[list[int]]:
    pairs = list(zip(targets, predicted, strict=True))
    return [[pairs.count((row, column)) for column in range(CLASSES)] for row in range(CLASSES)]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 3, -100])), min_size=1, max_size=20), splits)
def test_it_counts_pairs_however_they_are_split(pairs: list[tuple[int, int]], cuts: list[int]) -> None:
    predicted, targets = map(list, zip(*pairs, strict=True))
    counted = [(guess, target) for guess, target in pairs if target != -100]
    expected = by_hand([guess for guess, _ in counted], [target for _, target in counted])
    scores = torch.nn.functional.one_hot(torch.tensor(predicted), CLASSES).float()
    for outputs, settings in ((torch.tensor(predicted), {"classes": CLASSES}), (scores, {})):
        assert measured(confusion_matrix(**settings), outputs, torch.tensor(targets), cuts).tolist() == expected


def test_normalized_by_rows_columns_and_in_all() -> None:
    predicted, targets = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    for normalize, expected in {
        "true": [[1, 0, 0], [1 / 3, 2 / 3, 0], [0, 0, 0]],
        "pred": [[0.5, 0, 0], [0.5, 1, 0], [0, 0, 0]],
        "all": [[0.25, 0, 0], [0.25, 0.5, 0], [0, 0, 0]],
    }.items():
        matrix = measured(confusion_matrix(3, normalize=normalize), predicted, targets)
        torch.testing.assert_close(matrix, torch.tensor(expected))


def test_pixels_of_images_and_scores_of_two_classes() -> None:
    generator = noise()
    outputs = torch.randn(2, CLASSES, 3, 5, generator=generator)
    targets = torch.randint(CLASSES, (2, 3, 5), generator=generator)
    expected = by_hand(outputs.argmax(1).flatten().tolist(), targets.flatten().tolist())
    assert measured(confusion_matrix(), outputs, targets).tolist() == expected
    assert measured(confusion_matrix(axis=-1), outputs.movedim(1, -1), targets).tolist() == expected
    logits, binary = torch.tensor([[-1.0], [2.0], [3.0]]), torch.tensor([0.0, 0.0, 1.0])
    assert measured(confusion_matrix(threshold=0.0), logits, binary).tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize(
    ("settings", "outputs", "targets", "text"),
    [
        ({"classes": 4}, torch.zeros(2, 3), torch.zeros(2).long(), "have 3 classes along axis 1"),
        ({}, torch.zeros(2).long(), torch.zeros(2).long(), r"write pl.metrics.confusion_matrix\(classes=10\)"),
        ({}, torch.zeros(2, 3), torch.tensor([0, 3]), "the target 3 is no class: with 3 classes they are 0 to 2"),
        ({"classes": 2}, torch.tensor([0, 2]), torch.tensor([0, 1]), "the output 2 is no class"),
        ({"threshold": 0.5}, torch.zeros(2, 3), torch.zeros(2), r"threshold=0.5\) needs outputs with one score"),
        ({"threshold": 0.5}, torch.zeros(2), torch.tensor([0.5, 1.0]), "the target 0.5 is no class"),
        ({}, torch.zeros(2), torch.zeros(2).long(), "confusion_matrix needs outputs of scores"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict, outputs: torch.Tensor, targets: torch.Tensor, text: str) -> None:
    with pytest.raises(pl.DataError, match=text):
        measured(confusion_matrix(**settings), outputs, targets)


def test_loggers_are_given_a_table() -> None:
    logger, data = InMemoryLogger(), points(2)
    evaluator = pl.Evaluator(data, metrics=[confusion_matrix()])
    state = pl.run(pl.evaluate(mlp(), {"val": evaluator}, loss=torch.nn.functional.cross_entropy, loggers=[logger]))
    matrix = state.metrics["val"]["confusion_matrix"]
    assert matrix.sum() == 10
    assert torch.equal(matrix.sum(dim=1), torch.cat([targets for _, targets in data]).bincount(minlength=3))
    ((_, columns, rows),) = logger.tables["val/confusion_matrix"]
    assert (columns, rows) == (["0", "1", "2"], matrix.tolist())


def test_its_repr_is_the_call() -> None:
    assert repr(confusion_matrix()) == "confusion_matrix()"
    assert repr(confusion_matrix(3, normalize="true")) == "confusion_matrix(classes=3, normalize='true')"
    with pytest.raises(pl.ArgumentError, match="normalize"):
        confusion_matrix(normalize="rows")  # type: ignore[arg-type]
