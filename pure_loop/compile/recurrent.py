"""Recurrent layers run eagerly, between graphs.

In a graph a layer over a long sequence is thousands of operations, on which a compiler takes minutes, while torch's own
kernels go through it in one call. So a forward that calls one is not traced, with the loss and the backward that hang
on it; the update is compiled all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["RecurrentLayerError", "recurrent_layer", "refusing_recurrent_layers"]

_FUNCTIONS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class RecurrentLayerError(RuntimeError):
    """A recurrent layer was called while a step was traced."""


def recurrent_layer(module: nn.Module) -> str | None:
    """The name of the first recurrent layer of a model, or its class's where it is the model; None without one.

    >>> recurrent_layer(nn.ModuleDict({"encoder": nn.LSTM(2, 3), "head": nn.Linear(3, 1)}))
    'encoder'
    >>> recurrent_layer(nn.GRU(2, 3))
    'GRU'
    """
    layers = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.RNNBase))
    return next((name or type(layer).__name__ for name, layer in layers), None)


class refusing_recurrent_layers(TorchFunctionMode):  # noqa: N801 - a context
    """Inside, on this thread, a call of a recurrent layer is an error."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _FUNCTIONS:
            raise RecurrentLayerError(function.__name__)
        return function(*args, **(kwargs or {}))
