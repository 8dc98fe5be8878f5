"""Top k, perplexity and expected calibration error, against torchmetrics at random inputs and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.text import Perplexity

import pure_loop as pl
from pure_loop.metrics import accuracy, expected_calibration_error, perplexity, top_k
from tests.metrics.measuring import measured, splits
from tests.support.runs import noise

SEEDS = st.integers(0, 10_000)


def drawn(seed: int, samples: int = 12, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = noise(seed)
    outputs = torch.randn(samples, classes, generator=generator)
    return outputs, torch.randint(classes, (samples,), generator=generator)


@given(SEEDS, splits, st.integers(1, 6))
def test_top_k_is_that_of_torchmetrics(seed: int, cuts: list[int], k: int) -> None:
    outputs, targets = drawn(seed)
    expected = MulticlassAccuracy(6, top_k=k, average="micro")(outputs, targets)
    torch.testing.assert_close(measured(top_k(k), outputs, targets, cuts), expected)
    if k == 1:
        torch.testing.assert_close(measured(accuracy(), outputs, targets, cuts), expected)
    targets[::2] = -100
    expected = MulticlassAccuracy(6, top_k=k, average="micro")(outputs[1::2], targets[1::2])
    torch.testing.assert_close(measured(top_k(k), outputs, targets, cuts), expected)


def test_top_k_of_fewer_classes_is_refused() -> None:
    with pytest.raises(pl.DataError, match=r"top_k\(k=7\): outputs of shape \(12, 6\) have 6 classes"):
        measured(top_k(7), *drawn(0))


@given(SEEDS, splits)
def test_perplexity_is_that_of_torchmetrics(seed: int, cuts: list[int]) -> None:
    generator = noise(seed)
    outputs = torch.randn(12, 3, 7, generator=generator)
    targets = torch.randint(7, (12, 3), generator=generator)
    targets[torch.rand(12, 3, generator=generator) < 0.3] = -100
    torch.testing.assert_close(
        measured(perplexity(), outputs, targets, cuts), Perplexity(ignore_index=-100)(outputs, targets)
    )
    torch.testing.assert_close(
        measured(perplexity(ignore_index=0), outputs, targets.clamp(min=0), cuts),
        Perplexity(ignore_index=0)(outputs, targets.clamp(min=0)),
    )


def test_tokens_weigh_the_same_in_batches_of_any_length() -> None:
    """2 tokens of likelihood exp(-1) and 6 of exp(-2): the mean of the batches' perplexities would be 5.05."""
    metric, accumulator = perplexity(), perplexity().init()
    for tokens, nll in ((2, 1.0), (6, 2.0)):
        likelihood = math.exp(-nll)
        logits = torch.tensor([likelihood, 1 - likelihood]).log().expand(1, tokens, 2)
        accumulator = metric.update(accumulator, logits, (None, torch.zeros(1, tokens).long()))
    assert float(metric.compute(accumulator)) == pytest.approx(5.754603, abs=1e-5)


def test_perplexity_of_logits_in_half_precision_is_summed_in_float32() -> None:
    outputs, targets = torch.zeros(1, 4096, 2, dtype=torch.float16), torch.zeros(1, 4096).long()
    assert float(measured(perplexity(), outputs, targets)) == pytest.approx(2.0, abs=1e-4)
    with pytest.raises(pl.DataError, match="perplexity: the target 2 is no class"):
        measured(perplexity(), outputs, targets + 2)


def test_perplexity_of_a_model_that_predicts_its_own_inputs() -> None:
    logits, tokens = torch.randn(2, 5, 7, generator=noise()), torch.randint(7, (2, 5), generator=noise())
    metric = perplexity().on(outputs=lambda o: o["logits"][:, :-1], targets=lambda batch: batch["labels"][:, 1:])
    value = metric.compute(metric.update(metric.init(), {"logits": logits}, {"labels": tokens}))
    torch.testing.assert_close(value, Perplexity()(logits[:, :-1], tokens[:, 1:]))
    with pytest.raises(pl.ArgumentError, match="'loss' is of the loss"):
        pl.metrics.loss().on(outputs=lambda o: o)


@given(SEEDS, splits, st.integers(2, 20), st.booleans())
def test_calibration_error_is_that_of_torchmetrics(seed: int, cuts: list[int], bins: int, probabilities: bool) -> None:
    outputs, targets = drawn(seed)
    metric = expected_calibration_error(bins, probabilities=probabilities)
    found = measured(metric, outputs.softmax(dim=1) if probabilities else outputs, targets, cuts)
    torch.testing.assert_close(found, MulticlassCalibrationError(6, bins)(outputs.softmax(dim=1), targets))


def test_a_confidence_of_1_is_in_the_last_bin() -> None:
    outputs, targets = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.99, 0.01]]), torch.tensor([0, 1, 0])
    found = measured(expected_calibration_error(10, probabilities=True), outputs, targets)
    assert float(found) == pytest.approx((2.99 - 2) / 3)
