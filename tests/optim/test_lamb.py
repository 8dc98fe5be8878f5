"""LAMB against another implementation of it, and the length of its steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.optim import lamb
from tests.support.optimizing import batches, named, ours, tensors, theirs


# The class corrects no bias of squares (and with adam_debias none), caps the norm of a parameter, and adds eps to that
# of a step.
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3, "weight_decouple": False}),
        (
            {"weight_decay": 0.01, "independent_decay": True},
            {"weight_decay": 0.01, "weight_decouple": True, "fixed_decay": True},
        ),
    ],
    ids=str,
)
def test_it_is_the_class_of_pytorch_optimizer(
    options: dict[str, Any], reference: dict[str, Any], maximize: bool
) -> None:
    cls: Any = pytest.importorskip("pytorch_optimizer.optimizer").Lamb
    unbounded = type("Unbounded", (cls,), {"clamp": torch.inf})
    common: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-14, "maximize": maximize}
    start, steps = tensors(0, torch.float64), batches(0, torch.float64, 20)
    mine = ours(lamb(**common, **options, bias_correction=False), start, steps)
    expected = theirs(lambda p: unbounded(p, **common, **reference, adam_debias=True), start, steps)
    for (params, _), values in zip(mine, expected, strict=True):
        torch.testing.assert_close(list(params.values()), values, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(st.sampled_from([0.0, 1e-3, 0.1, 0.9]), st.sampled_from([0.0, 0.1]), st.integers(0, 99))
def test_each_tensor_moves_by_the_rate_times_its_norm(lr: float, weight_decay: float, seed: int) -> None:
    start, steps = tensors(seed, torch.float64), batches(seed, torch.float64, 3)
    results = ours(lamb(lr, weight_decay=weight_decay), start, steps)
    for (before, _), (after, _) in itertools.pairwise(results):
        for name in before:
            torch.testing.assert_close((after[name] - before[name]).norm(), lr * before[name].norm())


def test_with_bias_correction_the_first_direction_is_that_of_signs() -> None:
    start, gradients = tensors(0, torch.float64), tensors(1, torch.float64)
    (_, (params, _)) = ours(lamb(0.1, eps=0.0), start, [gradients])
    for before, after, gradient in zip(start, params.values(), gradients, strict=True):
        expected = before - 0.1 * before.norm() / max(before.numel(), 1) ** 0.5 * gradient.sign()
        torch.testing.assert_close(after, expected)


def test_a_parameter_of_zeros_moves_by_the_rate_alone() -> None:
    (_, (params, _)) = ours(lamb(0.5, eps=0.0), [torch.zeros(2)], [[torch.tensor([3.0, -2.0])]])
    torch.testing.assert_close(params["p0"], torch.tensor([-0.5, 0.5]))
    (_, (params, _)) = ours(lamb(0.5), [torch.ones(2)], [[torch.zeros(2)]])
    assert params["p0"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_do_not_overflow(dtype: torch.dtype) -> None:
    start, gradients = [torch.full((4096,), 2000.0, dtype=dtype)], [torch.ones(4096, dtype=dtype)]
    (_, (params, _)) = ours(lamb(0.5, eps=1e-3), start, [gradients])
    torch.testing.assert_close(params["p0"], torch.full((4096,), 1000.0, dtype=dtype))


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    start, gradients = tensors(0, torch.float64, [(3, 2)]), tensors(1, torch.float64, [(3, 2)])
    (_, (real, _)) = ours(lamb(0.1, weight_decay=0.1), start, [gradients])
    pairs = [[torch.view_as_complex(tensor) for tensor in some] for some in (start, gradients)]
    (_, (params, _)) = ours(lamb(0.1, weight_decay=0.1), pairs[0], [pairs[1]])
    torch.testing.assert_close(torch.view_as_real(params["p0"]), real["p0"])


def test_the_optimizer_state_of_another_is_refused() -> None:
    assert not lamb().elementwise
    start = named([torch.ones(2)])
    with pytest.raises(pl.errors.ResumeError, match="lamb: opt_state must hold"):
        lamb().update(start, pl.optim.lion().init(start), start, pl.Timestamp())
