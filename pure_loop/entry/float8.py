"""``precision="amp_fp8"``: linear layers that multiply in 8-bit floats, put into the model at INIT.

Each product of a linear layer, of its forward and its backward, takes matrices that are scaled and rounded to float8;
all else is computed as with ``amp_bf16``. Micikevicius et al., FP8 Formats for Deep Learning:
https://arxiv.org/abs/2209.05433. The layers are those of torchao; their weights, and so State and checkpoints, stay as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pure_loop._internal.lazy import require
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError, ModelError
from pure_loop.event import Event
from pure_loop.precision import Precision
from pure_loop.state import State

NAME = "amp_fp8"
_LEAST_CAPABILITY = (8, 9)
# Products in float8 take rows of multiples of 16 numbers.
_MULTIPLE = 16


def refuse_float8(precision: Precision, device: torch.device) -> None:
    """
    Raises:
        ArgumentError: this device doesn't multiply in float8.
        MissingExtraError: torchao is not installed.
    """
    if not precision.float8:
        return
    require("torchao", "fp8", 'precision="amp_fp8"')
    if precision.emulate or _multiplies_in_float8(device):
        return
    raise ArgumentError(
        f'precision="amp_fp8" needs a GPU that multiplies in float8 (of NVIDIA, compute capability 8.9 and newer, '
        f'such as H100 and RTX 4090), and this device is {device}: write precision="amp_bf16".'
    )


def _multiplies_in_float8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def converting(precision: Precision) -> Algorithm:
    """The algorithm that converts the model at INIT, after those that change it otherwise."""

    def convert(state: State) -> State:
        return in_float8(state, precision)

    return Algorithm(NAME, {Event.INIT: convert})


def in_float8(state: State, precision: Precision) -> State:
    """The State with linear layers in float8; the State itself where it has them, or the precision has none.

    Raises:
        ModelError: no layer can be converted.
    """
    if not precision.float8:
        return state
    linear = _layer_class()
    if any(isinstance(module, linear) for module in state.model.skeleton.modules()):
        return state
    refuse_no_layer(state.model.skeleton)
    return state.with_module(_converted(state.module(), precision))


def refuse_no_layer(module: nn.Module) -> None:
    """
    Raises:
        ModelError: no layer of the module can be converted.
    """
    if not _convertible(module) and not any(isinstance(layer, _layer_class()) for layer in module.modules()):
        raise ModelError(
            f'precision="amp_fp8" finds no layer in {type(module).__name__} to convert: it serves nn.Linear itself, '
            f'with in_features and out_features that are multiples of {_MULTIPLE}. Write precision="amp_bf16".'
        )


def changes_at_init(algorithms: Sequence[Algorithm]) -> bool:
    """Whether others than the conversion change the model at INIT."""
    return any(Event.INIT in algorithm.handlers for algorithm in algorithms if algorithm.name != NAME)


def _layer_class() -> Any:
    return require("torchao.float8.float8_linear", "fp8", 'precision="amp_fp8"').Float8Linear


def _convertible(module: nn.Module) -> list[nn.Linear]:
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear and layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0
    ]


def _converted(module: nn.Module, precision: Precision) -> nn.Module:
    """The module with its linear layers in float8, by the same names, with their hooks; shared ones stay shared."""
    float8 = require("torchao.float8", "fp8", 'precision="amp_fp8"')
    # The number of rows of a batch is summed over in the backward, and is padded to a multiple of 16.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=precision.emulate)
    linear = _layer_class()
    layers: dict[nn.Module, nn.Module] = {}
    for layer in _convertible(module):
        float8_layer = linear.from_float(layer, config)
        for key, value in vars(layer).items():
            if key not in vars(float8_layer) or key.endswith("_hooks") or key == "training":
                vars(float8_layer)[key] = copy.copy(value)
        layers[layer] = float8_layer
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child in layers:
                parent._modules[name] = layers[child]
    return layers.get(module, module)
