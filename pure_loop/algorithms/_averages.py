"""Averages of parameters and buffers in the algorithm state: what can be averaged, and the State that has one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State

__all__ = ["averageable", "averaged", "begun", "widened"]


def averageable(tensors: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    """Those that can be averaged."""
    return FrozenDict(
        (name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex()
    )


def widened(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex64) if tensor.dtype.itemsize < 8 else tensor
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def begun(average: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The average of those buffers that are there now: a new one, or one of another shape or dtype, begins as it is."""
    if average.keys() == tensors.keys() and all(_is_of(old, tensors[name]) for name, old in average.items()):
        return average
    return {
        name: average[name] if name in average and _is_of(average[name], tensor) else tensor
        for name, tensor in tensors.items()
    }


def _is_of(average: Tensor, tensor: Tensor) -> bool:
    """Whether an average is of tensors of this shape and dtype."""
    widened = (torch.float16, torch.bfloat16)
    dtypes = [torch.float32 if item.dtype in widened else item.dtype for item in (average, tensor)]
    return average.shape == tensor.shape and dtypes[0] is dtypes[1]


def averaged(state: State, name: str = "ema") -> State:
    """The State with the average of ``ema`` or ``swa`` as its parameters and buffers: ``averaged(state).module()``.

    Integers (BatchNorm's count of batches, weights that are quantised) are not averaged: they are the State's own.

    Raises:
        ArgumentError: the State has no average of this name.
        ResumeError: the average of a parameter has another shape than the parameter.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.algorithms import ema
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...     optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", algorithms=[ema(half_life="4ba")]))
    >>> averaged(state).module()
    Linear(in_features=2, out_features=1, bias=True)
    """
    memory = state.algorithm_state.get(name)
    if not isinstance(memory, Mapping) or not {"params", "buffers"} <= memory.keys():
        raise ArgumentError(
            f"this State has no average named {name!r}: it has algorithm state of {sorted(state.algorithm_state)}. "
            "Evaluate a State that was trained with algorithms=[pl.algorithms.ema(...)], or swa(...); a module, or a "
            "State from before FIT_START, has no average yet."
        )
    # Ahead of a forward, which broadcasts.
    for name, tensor in memory["params"].items():
        if name in state.params and tensor.shape != state.params[name].shape:
            raise ResumeError(
                f"the average of params[{name!r}] has shape {tuple(tensor.shape)}, and the parameter "
                f"{tuple(state.params[name].shape)}: it is of another model, or was altered."
            )
    return state.replace(params=_with(state.params, memory["params"]), buffers=_with(state.buffers, memory["buffers"]))


def _with(tensors: Mapping[str, Tensor], average: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(
        (
            name,
            # A buffer may have taken another shape or dtype since the last update.
            average[name].to(tensor.device, tensor.dtype)
            if name in average and _is_of(average[name], tensor)
            else tensor,
        )
        for name, tensor in tensors.items()
    )
