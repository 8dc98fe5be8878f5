"""Gyro dropout: a fixed set of subnetworks, a few of which are trained together for a while.

Of ``subnetworks`` masks of each dropout layer, ``concurrent`` are chosen for a period of
``concurrent / subnetworks`` of all batches, and the sample with the number r in its batch uses the one with the number
``r mod concurrent``::

    y = x mask / (1 - p)         https://proceedings.mlsys.org/paper_files/paper/2022 (Lee et al., Gyro Dropout)

A mask is computed from its number and that of the feature, and is not stored.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from pure_loop._internal.records import set_class
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._spans import as_span
from pure_loop.algorithms._surgery import LayerFilter, with_layers
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.random import derive, generator
from pure_loop.ranges import AtLeast, Between, checked
from pure_loop.state import State
from pure_loop.time import Time, TimeLike, Timestamp, TimeUnit

__all__ = ["apply_gyro_dropout", "gyro_dropout", "masks"]

SERVES = "dropout"

# Odd constants of 64 bits, of SplitMix64 (https://doi.org/10.1145/2660193.2660195), as signed integers.
_SUBNETWORK, _FEATURE = -7046029254386353131, -4417276706812531889
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def _mixed(bits: Tensor) -> Tensor:
    """A hash of 64-bit integers; their products wrap around. Shifts are made logical by what they are masked with."""
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _FIRST
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


def masks(layer: int, subnetworks: Tensor, features: int, p: float) -> Tensor:
    """The features of each subnetwork that are kept.

    Args:
        layer: a number of the layer, so that layers differ; a 64-bit integer.
        subnetworks: their numbers, (k,), int64.
        features: how many there are.
        p: the share that is left out.

    Returns:
        (k, ``features``), bool.

    >>> masks(0, torch.tensor([1, 2]), 4, 0.5)
    tensor([[False, False, False,  True],
            [ True, False,  True, False]])
    """
    place = torch.arange(features, device=subnetworks.device)
    bits = _mixed(_mixed(layer + subnetworks[:, None] * _SUBNETWORK + place * _FEATURE))
    # The 53 bits that a float64 has, as a number in [0, 1). Compared as integers, which any device has.
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF) >= int(p * 2**53)


class GyroDropout(nn.Dropout):
    """Dropout with the masks of a few subnetworks, in turn along the first dimension."""

    buffer: str
    layer_buffer: str

    def forward(self, input: Tensor) -> Tensor:
        """(n, ...) to the same shape and dtype; in eval mode the input itself."""
        if not self.training or not self.p:
            return input
        if self.p == 1:  # as nn.Dropout has it: nothing is kept, and there is no scale
            return input * 0
        subnetworks: Tensor = getattr(self, self.buffer)
        count, features = len(input), input.shape[1:].numel()
        table = masks(getattr(self, self.layer_buffer), subnetworks, features, self.p)
        rows = torch.arange(count, device=input.device) % len(subnetworks)
        mask = table[rows].view(input.shape).to(input.dtype)
        return input * mask / (1 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, concurrent={len(getattr(self, self.buffer))}"


@checked
def apply_gyro_dropout(
    module: nn.Module,
    p: Annotated[float | None, Between(0, 1)] = None,
    *,
    concurrent: Annotated[int, AtLeast(1)] = 16,
    seed: int = 0,
    name: str = "gyro_dropout",
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
) -> nn.Module:
    """A copy of a module with the masks of subnetworks in its dropout layers; the module stays as it was.

    Changed are layers of the class ``nn.Dropout`` itself. Each gets a buffer of the numbers of the subnetworks that
    are trained now, from 0, which is not saved with the module.

    Args:
        p: the share that is left out, in [0, 1); None: that of each layer.
        concurrent: how many subnetworks are trained together.
        seed: of the masks.
        name: the buffer of a layer is called ``<name>_subnetworks``.
        only, exclude: functions of (name, layer): which layers are changed, and which are not.

    Raises:
        ModelError: there is no such layer; says what there is.
        ArgumentError: a number out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> apply_gyro_dropout(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), concurrent=4)[1]
    GyroDropout(p=0.2, concurrent=4)
    """

    def change(path: str, layer: nn.Module) -> bool | str:
        if isinstance(layer, GyroDropout):
            return f"{path} is a GyroDropout already"
        if type(layer) is not nn.Dropout:
            return False
        gyro = set_class(layer, GyroDropout)
        gyro.buffer, gyro.layer_buffer = f"{name}_subnetworks", f"{name}_layer"
        gyro.p = gyro.p if p is None else p
        device = next((tensor.device for tensor in module.parameters()), None)
        gyro.register_buffer(gyro.buffer, torch.arange(concurrent, device=device), persistent=False)
        number = torch.tensor(derive(seed, "gyro_dropout", path), device=device)
        gyro.register_buffer(gyro.layer_buffer, number, persistent=False)
        return True

    return with_layers(module, change, "gyro_dropout", "nn.Dropout", only, exclude)


@checked
def gyro_dropout(
    p: Annotated[float | None, Between(0, 1, typical=())] = None,
    *,
    subnetworks: Annotated[int, AtLeast(1, typical=(4, 6))] = 256,
    concurrent: Annotated[int, AtLeast(1, typical=(2, 3))] = 16,
    period: TimeLike | None = None,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    name: str = "gyro_dropout",
) -> Algorithm:
    """Gyro dropout in the place of dropout, put into the model at INIT.

    Subnetworks are chosen at BATCH_START where a period begins, the same on all ranks and when training resumes. With a
    ``microbatch_size`` that is a multiple of ``concurrent`` the gradient does not depend on microbatches. The module
    given to ``fit`` stays as it was; :func:`apply_gyro_dropout` is the same for a module of your own.

    Args:
        p: the share of features that is left out, in [0, 1); None: that of each layer.
        subnetworks: how many there are.
        concurrent: how many of them are trained together; at most ``subnetworks``.
        period: how long they are: ``"100ba"``; None: ``concurrent / subnetworks`` of the duration of training.
        only, exclude: as in :func:`apply_gyro_dropout`.
        name: another one, if there are several; masks are those of the seed and the name.

    Raises:
        ArgumentError: a number out of range, or more ``concurrent`` than ``subnetworks``; in training: no period, and a
            duration in epochs of a length that is not known.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no ``nn.Dropout``.

    >>> import pure_loop as pl
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 1))
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> stream = pl.fit(net, data * 8, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.01), max_duration="1ep",
    ...                 algorithms=[gyro_dropout(subnetworks=4, concurrent=2)])
    >>> buffer = "1.gyro_dropout_subnetworks"
    >>> chosen = [state.buffers[buffer].tolist() for event, state in stream if event == "batch_end"]
    >>> chosen[0] == chosen[3], chosen[0] == chosen[4], len(set(chosen[0]))
    (True, False, 2)
    """
    if concurrent > subnetworks:
        raise ArgumentError(
            f"gyro_dropout: concurrent={concurrent} of subnetworks={subnetworks}: no more can be trained together than "
            "there are."
        )
    length = None if period is None else as_span(period, "period", "gyro_dropout")
    if length is not None and not length:
        raise ArgumentError(f'gyro_dropout: period={period!r} is no time at all; leave it out: period="10ba".')

    span = Time(concurrent / subnetworks, TimeUnit.DURATION) if length is None else length

    def period_at(timestamp: Timestamp) -> int:
        """The number of the period in which a batch lies, from 0."""
        batches = _in_batches(span, timestamp)
        if batches is not None:
            return timestamp.batch // max(1, int(batches + 1e-9))
        duration = timestamp.max_duration
        if span.unit is TimeUnit.DURATION and duration is not None and duration.unit is TimeUnit.EPOCH:
            raise ArgumentError(
                f"gyro_dropout: how many batches {str(span)!r} of {str(duration)!r} are is not known, as the "
                'length of the dataloader is not: write the period in batches, gyro_dropout(period="100ba").'
            )
        return int(timestamp.get(span.unit) / span.value + 1e-9)

    def operate(state: State) -> State:
        seed = derive(state.seed, name)
        module = apply_gyro_dropout(
            state.module(), p, concurrent=concurrent, seed=seed, name=name, only=only, exclude=exclude
        )
        return with_subnetworks(state.with_module(module), 0)

    def with_subnetworks(state: State, number: int) -> State:
        random = generator(state.seed, name, "subnetworks", number)
        drawn = torch.randperm(subnetworks, generator=random)[:concurrent].to(state.device)
        names = [key for key in state.buffers if key.rpartition(".")[2] == f"{name}_subnetworks"]
        return state.replace(buffers={**state.buffers, **dict.fromkeys(names, drawn)})

    def choose(state: State) -> State:
        timestamp, number = state.timestamp, period_at(state.timestamp)
        began = not timestamp.batch or number != period_at(state.previous_timestamp)
        return with_subnetworks(state, number) if began else state

    return Algorithm(name, {Event.INIT: operate, Event.BATCH_START: choose})


def _in_batches(time: Time, timestamp: Timestamp) -> float | None:
    """A time in batches; None: how many they are is not known."""
    amount, unit = time.exact, time.unit
    if unit is TimeUnit.DURATION and timestamp.max_duration is not None:
        amount, unit = amount * timestamp.max_duration.exact, timestamp.max_duration.unit
    if unit is TimeUnit.EPOCH and timestamp.batches_per_epoch:
        return float(amount * timestamp.batches_per_epoch)
    return float(amount) if unit is TimeUnit.BATCH else None
