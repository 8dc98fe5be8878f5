"""Numbers of a model that was built on the meta device, made module by module when training begins.

``torch.device("meta")`` gives a model without memory. Each module that has parameters or buffers of its own then gets
memory and its ``reset_parameters()``, torch's convention, and its numbers are handed on before the next one is made: a
rank that keeps a part of them never holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pure_loop._internal.devices import shapes_only
from pure_loop.errors import ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.checks import refuse_untrainable
from pure_loop.random import seeded
from pure_loop.state import State

Keep = Callable[[str, Tensor], Tensor]


def without_numbers(module: nn.Module, seed: int, device: torch.device) -> State:
    """The State of a module on the meta device, whose tensors have shapes, a device, and no memory.

    Raises:
        ModelError: a module in it has tensors that nothing initialises; names it.
    """
    token = shapes_only.set(True)
    try:
        refuse_untrainable(module)
        _refuse_uninitialised(module)
        state = State.create(module, seed=seed)
    finally:
        shapes_only.reset(token)

    def placeholder(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)

    return state.replace(
        params=FrozenDict((name, placeholder(tensor)) for name, tensor in state.params.items()),
        buffers=FrozenDict((name, placeholder(tensor)) for name, tensor in state.buffers.items()),
        skipped=torch.zeros((), dtype=torch.int64, device=device),
        nonfinite=torch.full((), -1, dtype=torch.int64, device=device),
    )


def _refuse_uninitialised(module: nn.Module) -> None:
    for path, layer in module.named_modules():
        owned = [name for name, tensor in _own(layer) if tensor.is_meta]
        if owned and not callable(getattr(layer, "reset_parameters", None)):
            raise ModelError(
                f"{path or 'the model'} is a {type(layer).__name__} on the meta device, and has no reset_parameters() "
                f"that would give numbers to {owned[:3]}: define it, or build the model on a device with memory."
            )


def _own(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


def initialised(state: State, keep: Keep | None = None) -> State:
    """The State with the numbers that ``torch.manual_seed(state.seed)`` and the modules, in their order, give.

    They are made on the CPU, so that they are the same on every device and for any number of ranks.

    Args:
        state: as :func:`without_numbers` gives it.
        keep: what is kept of a parameter, by its name; None: all of it.

    Raises:
        ModelError: a ``reset_parameters()`` leaves a tensor without numbers; names both.
    """
    params: dict[str, Tensor] = {}
    buffers = dict(state.buffers)
    module = state.model.copied(independent=True)
    with seeded(state.seed):
        for path, layer in module.named_modules():
            named = {".".join(filter(None, (path, name))): tensor for name, tensor in _own(layer) if tensor.is_meta}
            if not named:
                continue
            reset: Any = layer
            layer.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for _, tensor in _own(layer):
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.fill_(torch.nan)
                reset.reset_parameters()
            for name, tensor in _own(layer):
                full = ".".join(filter(None, (path, name)))
                if full not in named:
                    continue
                if bool(tensor.isnan().any()):
                    raise ModelError(
                        f"reset_parameters() of {path or 'the model'}, a {type(layer).__name__}, gives no numbers to "
                        f"{name!r}: initialise all parameters and buffers that the module itself has in it."
                    )
                whole = tensor.detach().to(state.device)
                if full in state.params and full not in params:
                    params[full] = whole if keep is None else keep(full, whole)
                elif full in buffers:
                    buffers[full] = whole
            layer.to_empty(device="meta", recurse=False)
    return state.replace(
        params=FrozenDict((name, params[name]) for name in state.params),
        buffers=FrozenDict((name, buffers[name]) for name in state.buffers),
    )
