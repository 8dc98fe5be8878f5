"""The digest of parameters: the same for the same bits, wherever they are, and another for others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pure_loop.checkpoint.digests import digest_of

# Small, large, and large with bytes that fill no row.
SIZES = [7, 1 << 15, 99_991]


def numbers(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_one_bit_makes_another_digest(size: int) -> None:
    tensor = numbers(size)
    digests = {digest_of({"w": tensor})}
    for index in (0, size // 2, size - 1):
        for bit in (0, 13, 30):
            changed = tensor.clone()
            changed.view(torch.int32)[index] ^= 1 << bit
            digests.add(digest_of({"w": changed}))
    assert len(digests) == 10


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("distance", [1, 2, 2048, 4096])
def test_two_numbers_swapped_make_another_digest(size: int, distance: int) -> None:
    tensor = numbers(size)
    swapped = tensor.clone()
    other = distance % size
    swapped[0], swapped[other] = tensor[other], tensor[0]
    assert digest_of({"w": swapped}) != digest_of({"w": tensor})


def test_layouts_of_the_same_numbers_have_the_same_digest() -> None:
    tensor = numbers(1 << 16).view(256, 256)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(256, 256)
    for same in (tensor.clone(), tensor.t().contiguous().t(), shifted):
        assert digest_of({"w": same}) == digest_of({"w": tensor})
    assert digest_of({"w": tensor.t()}) != digest_of({"w": tensor})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_each_dtype_has_one(dtype: torch.dtype) -> None:
    tensor = numbers(1 << 17).sign().to(dtype)
    changed = tensor.clone()
    changed[5] = changed[5] == 0
    assert digest_of({"w": tensor}) != digest_of({"w": changed})


def test_nothing_has_one() -> None:
    assert digest_of({}) == digest_of({"w": torch.empty(0)})


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_has_the_same(size: int) -> None:
    params = {"a": numbers(size), "b": numbers(3)}
    cuda = {name: tensor.cuda() for name, tensor in params.items()}
    assert digest_of(cuda) == digest_of(params)
    assert digest_of({**cuda, "b": params["b"]}) == digest_of(params)
