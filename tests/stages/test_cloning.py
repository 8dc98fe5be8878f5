"""Copies of many tensors at once are those of one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pure_loop._internal import tree_ops
from pure_loop._internal.tree_ops import clone_all

TENSORS = {
    "a vector": torch.tensor([1.0, float("nan")]),
    "a count": torch.tensor(3),
    "nothing": torch.zeros(0, 2),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 2).t(),
    "expanded": torch.ones(3).expand(2, 3),
    "complex": torch.tensor([1j]),
    "half": torch.ones(2, dtype=torch.float16),
    "sparse": torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True),
}


@pytest.mark.parametrize("at_once", [True, False])
def test_each_is_the_clone_of_one(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:  # torch before 2.12
        monkeypatch.setattr(tree_ops, "foreach_clone", None)
    for copy, (name, tensor) in zip(clone_all(list(TENSORS.values())), TENSORS.items(), strict=True):
        expected = tensor.clone()
        assert (copy.dtype, copy.shape, copy.layout) == (expected.dtype, expected.shape, expected.layout), name
        assert torch.equal(copy.to_dense().nan_to_num(7.0), expected.to_dense().nan_to_num(7.0)), name
        if copy.layout is torch.strided:
            assert copy.stride() == expected.stride(), name
            assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr(), name
    assert clone_all([]) == []


def test_inside_of_vmap_and_grad() -> None:
    def doubled(x: Tensor) -> Tensor:
        one, other = clone_all([x, x])
        return one + other

    assert torch.equal(torch.func.vmap(doubled)(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    assert torch.equal(torch.func.grad(lambda x: doubled(x).sum())(torch.ones(2)), torch.full((2,), 2.0))
