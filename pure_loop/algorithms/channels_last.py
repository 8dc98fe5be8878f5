"""Channels last: images and convolutions keep the channels of a pixel beside each other in memory.

Shapes and indices stay (n, channels, height, width); the strides are those of (n, height, width, channels). Kernels for
convolutions with tensor cores and on many CPUs read this order, and convert from any other.
https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._surgery import copied, nothing_fits
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.ranges import Index, checked
from pure_loop.state import State

__all__ = ["apply_channels_last", "channels_last", "in_channels_last"]

SERVES = "images"

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_channels_last(tensor: Tensor) -> Tensor:
    """A tensor of 4 or 5 dimensions with the strides of channels last, a copy where it has others; else the tensor.

    >>> in_channels_last(torch.zeros(8, 3, 3, 3)).stride()
    (27, 1, 9, 3)
    """
    memory_format = _FORMATS.get(tensor.ndim)
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


@torch.no_grad()
def apply_channels_last(module: nn.Module) -> nn.Module:
    """A copy of a module with its weights of 4 and 5 dimensions in channels last; the module stays as it was.

    Applied again it changes nothing.

    Raises:
        ModelError: it has no such weight; says what there is.
        ArgumentTypeError: not a module.

    >>> apply_channels_last(nn.Sequential(nn.Conv2d(3, 8, 3)))[0].weight.stride()
    (27, 1, 9, 3)
    """
    clone = copied(module, "apply_channels_last")
    tensors = [tensor for tensor in (*clone.parameters(), *clone.buffers()) if tensor.ndim in _FORMATS]
    if not tensors:
        raise nothing_fits("channels_last", module, [], "models with weights of 4 or 5 dimensions, of convolutions")
    for tensor in tensors:
        tensor.data = in_channels_last(tensor)
    return clone


@checked
def channels_last(*, input_key: Annotated[BatchKey, Index()] = 0, name: str = "channels_last") -> Algorithm:
    """Channels last, for the weights of the model at INIT and for the images of each batch at BEFORE_TRAIN_BATCH.

    Results are those of the other order up to rounding; only dropout of images draws in the order of memory. The
    optimizer's state and checkpoints keep the strides. The module given to ``fit`` stays as it was;
    :func:`apply_channels_last` is the same for a module of your own.

    Args:
        input_key: where in a batch the images are: an index, a key or a :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without ``input_key``.
        ModelError: in training, at INIT: the model has no weight of 4 or 5 dimensions.

    >>> import pure_loop as pl
    >>> net = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten())
    >>> data = [(torch.ones(2, 2, 3, 3), torch.tensor([0, 1]))]
    >>> state = pl.run(pl.fit(net, data, loss=nn.functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[channels_last()]))
    >>> state.params["0.weight"].stride()
    (18, 1, 6, 2)
    """

    def operate(state: State) -> State:
        return state.with_module(apply_channels_last(state.module()))

    @by_part
    def convert(state: State) -> State:
        inputs = part_of(state.batch, input_key, "channels_last", "input_key")
        if not isinstance(inputs, Tensor):
            return state
        converted = in_channels_last(inputs)
        return state if converted is inputs else state.replace(batch=with_part(state.batch, input_key, converted))

    return Algorithm(name, {Event.INIT: operate, Event.BEFORE_TRAIN_BATCH: convert})
