"""A State holds what a module does."""

from __future__ import annotations

import torch
from torch import nn

import pure_loop as pl

__all__ = ["assert_holds"]


def assert_holds(state: pl.State, module: nn.Module, where: str = "") -> None:
    """The State, and its module, hold what this one does: names, numbers, dtypes, and what is persistent."""
    made = state.module()
    for params, buffers in (
        (state.params, state.buffers),
        (dict(made.named_parameters()), dict(made.named_buffers())),
    ):
        for held, named in ((params, dict(module.named_parameters())), (buffers, dict(module.named_buffers()))):
            assert held.keys() == named.keys(), where
            for name, tensor in named.items():
                assert held[name].dtype == tensor.dtype, (where, name)
                assert torch.equal(held[name].detach(), tensor.detach()), (where, name)
    assert made.state_dict().keys() == module.state_dict().keys(), where
    for name, submodule in module.named_modules():
        assert made.get_submodule(name)._buffers.keys() == submodule._buffers.keys(), where
