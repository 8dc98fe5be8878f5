"""Tensors and submodules of a private module, found in its ``__dict__``: others see no difference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pure_loop.model.mirrored import mirror


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        out: Tensor = self.norm(self.linear(x))
        return out


@pytest.fixture
def block() -> _Block:
    made = _Block()
    mirror(made)
    return made


@pytest.mark.parametrize("copied", [False, True])
def test_a_functional_call_uses_what_it_is_given(block: _Block, copied: bool) -> None:
    given = copy.deepcopy(block) if copied else block
    x = torch.randn(4, 2)
    zeros = {name: torch.zeros_like(param) for name, param in given.named_parameters()}
    assert not functional_call(given, zeros, x).any()
    assert given(x).any()


def test_a_copy_shares_nothing(block: _Block) -> None:
    other = copy.deepcopy(block)
    assert other.linear is other._modules["linear"] is not block.linear
    assert other.linear.weight is other.linear._parameters["weight"] is not block.linear.weight
    other.linear._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert not other.linear.weight.any()
    assert block.linear.weight.any()


def test_what_is_assigned_is_read(block: _Block) -> None:
    block(torch.randn(4, 2))
    block(torch.randn(4, 2))
    assert block.calls == block.state_dict()["calls"] == 2
    block.linear.bias = nn.Parameter(torch.full((2,), 3.0))
    assert block.linear.bias.tolist() == block.linear._parameters["bias"].tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    block.linear = nn.Linear(2, 5)
    assert block.linear.out_features == 5
    assert block.half().calls.dtype is torch.float16


def test_what_is_deleted_is_gone(block: _Block) -> None:
    del block.linear
    with pytest.raises(AttributeError, match="linear"):
        block.linear  # noqa: B018 - reading is what is tested
    assert block.norm._parameters.pop("bias") is not None
    with pytest.raises(AttributeError, match="bias"):
        block.norm.bias  # noqa: B018
    block._buffers.clear()
    assert not hasattr(block, "calls")


def test_a_class_attribute_hides_a_parameter_as_ever() -> None:
    layer = nn.Linear(1, 1)
    hidden = type("Hidden", (nn.Linear,), {"bias": "the class's"})
    layer.__class__ = hidden
    mirror(layer)
    assert layer.bias == "the class's"
