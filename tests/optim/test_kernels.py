"""What a kernel may be given as it is, and what is laid out first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pure_loop.optim.kernels import are_alike

ONE, OTHER = torch.zeros(2, 3), torch.zeros(4)


def test_contiguous_tensors_of_the_sizes_of_their_parameters_are_alike() -> None:
    assert are_alike([ONE, OTHER], [torch.ones(2, 3), torch.ones(4)], [torch.ones(2, 3), torch.ones(4)])


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(3, 2), id="another size"),
        pytest.param(torch.ones(3, 2).t(), id="transposed"),
        pytest.param(torch.ones(2, 6)[:, ::2], id="strided"),
        pytest.param(torch.ones(2, 3, dtype=torch.float64), id="another dtype"),
        pytest.param(torch.ones(2, 3, device="meta"), id="another device"),
        pytest.param(torch._neg_view(torch.ones(2, 3)), id="negated"),
        pytest.param(None, id="none"),
    ],
)
def test_others_are_not(tensor: Tensor | None) -> None:
    assert not are_alike([ONE, OTHER], [tensor, torch.ones(4)])
    assert not are_alike([OTHER, ONE], [torch.ones(4), tensor])


def test_complex_numbers_are_not() -> None:
    numbers = torch.ones(2, 3, dtype=torch.complex64)
    assert not are_alike([numbers], [numbers.clone()])


def test_nothing_is_not() -> None:
    assert not are_alike([], [])
