"""Lion against another implementation of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop.optim import Optimizer, lion
from tests.support.optimizing import DTYPES, batches, named, ours, tensors, theirs

DECAYS = [{}, {"weight_decay": 0.3}, {"weight_decay": 0.01, "independent_decay": True}]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("options", DECAYS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_class_of_pytorch_optimizer(dtype: torch.dtype, options: dict[str, Any], maximize: bool) -> None:
    cls: Any = pytest.importorskip("pytorch_optimizer.optimizer").Lion
    reference = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": options.get("weight_decay", 0.0)}
    reference |= {"fixed_decay": options.get("independent_decay", False), "maximize": maximize}
    start, steps = tensors(0, dtype), batches(0, dtype, 20)
    mine = ours(lion(0.01, (0.8, 0.95), **options, maximize=maximize), start, steps)
    for (params, _), expected in zip(mine, theirs(lambda p: cls(p, **reference), start, steps), strict=True):
        torch.testing.assert_close(list(params.values()), expected)


def test_every_element_moves_by_the_rate() -> None:
    start, gradients = tensors(0, torch.float64), tensors(1, torch.float64)
    (_, (params, _)) = ours(lion(0.25), start, [gradients])
    for before, after, gradient in zip(start, params.values(), gradients, strict=True):
        torch.testing.assert_close(after, before - 0.25 * gradient.sign(), rtol=0, atol=1e-15)


def test_complex_parameters_and_several_dtypes() -> None:
    start = [torch.ones(3, dtype=torch.complex64), torch.ones(3, dtype=torch.float64), torch.ones(3)]
    gradients = [torch.full((3,), 2 - 3j), torch.ones(3, dtype=torch.float64), -torch.ones(3)]
    (_, (params, _)) = ours(lion(0.25), start, [gradients])
    assert [tensor[0].item() for tensor in params.values()] == [0.75 + 0.25j, 0.75, 1.25]


def test_decay_that_is_independent_of_the_rate() -> None:
    start = named([torch.ones(2, dtype=torch.float64)])
    still = named([torch.zeros(2, dtype=torch.float64)])

    def shrunk(optimizer: Optimizer) -> float:
        params, _ = optimizer.update(still, optimizer.init(start), start, pl.Timestamp())
        return params["p0"][0].item()

    assert shrunk(lion(0.5, weight_decay=0.01)) == 0.995
    assert shrunk(lion(0.5, weight_decay=0.01, independent_decay=True)) == 0.99
    assert shrunk(lion(0.0, weight_decay=0.01, independent_decay=True)) == 0.99
