"""How much each microbatch of a batch counts, such that the gradient doesn't depend on the split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop.errors import DataError

__all__ = [
    "WEIGHTS_ARE",
    "Weights",
    "counted_loss",
    "has_numbers",
    "is_number",
    "is_readable",
    "of_numbers",
    "power_of_two",
    "read_weight",
    "wide",
    "wide_dtype",
]


_INT = {int}
WEIGHTS_ARE = (
    "weights are finite, not negative, and not all zero. By default a microbatch weighs its samples, or what a loss of "
    "torch divides by; task=pl.Task(weight=...) says otherwise."
)


def is_number(value: float | Tensor | None) -> bool:
    """Whether it is no tensor: to ask a number whether it is one takes long."""
    return type(value) is float or type(value) is int or not isinstance(value, Tensor)


@attrs.frozen
class Weights:
    """The factors of a batch's microbatches.

    The loss of a microbatch is a mean, so its gradient counts by its samples (or tokens): the mean of
    means is wrong where the last one is smaller. Each gradient is multiplied by its weight over the power
    of two at or above the sum, which is exact, and the total is divided once at the end: where all
    arithmetic is exact, every split gives the same bits, and a batch of 2**k samples needs no division.

    Where all weights are 0 the divisor is 0: the loss of such a batch is a mean over nothing, NaN. Weights that are
    tensors without numbers at hand (on another device, or in a step that is being compiled) give factors that are
    tensors of shape ().

    Attributes:
        shares: what each microbatch's gradient is multiplied by, at most 1.
        divisor: what the sum of gradients is divided by, in (0.5, 1], or 0.
        fractions: how much of the batch's loss each microbatch's loss is; they add up to 1.

    >>> Weights.of([4, 2], batch=0)
    Weights(shares=(0.5, 0.25), divisor=0.75, fractions=(0.6666666666666666, 0.3333333333333333))
    """

    shares: tuple[Any, ...]
    divisor: Any
    fractions: tuple[Any, ...]

    @classmethod
    def of(cls, weights: Sequence[float | Tensor], batch: int, total: float | Tensor | None = None) -> Weights:
        """The factors for microbatches of these weights: numbers, or tensors of shape () on any device.

        ``total`` is the weight of the whole batch where other ranks have a part of it.

        Raises:
            DataError: weights that are negative, not finite or no numbers; names the batch.
        """
        if total is None and set(map(type, weights)) == _INT and (result := of_numbers(tuple(weights))) is not None:
            return result
        read: tuple[Any, ...] = tuple(read_weight(weight, f"a microbatch of batch {batch}") for weight in weights)
        if any(isinstance(weight, Tensor) for weight in read):
            read = tuple(map(wide, read))
            if len(read) == 1 and total is None:
                return cls((1.0,), 1.0, (read[0] / read[0],))  # NaN where it is 0
            total = sum(read) if total is None else total
            power = power_of_two(total)
            return cls(tuple(w / power for w in read), total / power, tuple(w / total for w in read))
        result = of_numbers(read, total)
        if result is None:
            raise DataError(f"the microbatches of batch {batch} weigh {list(read)}: {WEIGHTS_ARE}")
        return result

    @classmethod
    def of_sum(cls, pieces: int) -> Weights:
        """The factors for the microbatches of a loss that is a sum, and not a mean: it is the sum of theirs.

        >>> Weights.of_sum(2)
        Weights(shares=(1.0, 1.0), divisor=1.0, fractions=(1.0, 1.0))
        """
        return cls((1.0,) * pieces, 1.0, (1.0,) * pieces)

    def mean_of(self, losses: list[Any], *, always: bool = False) -> Any:
        """The loss of a batch from those of its microbatches; None where none of them counts.

        None, too, where there is one that counts, which is that of the batch as it stands, unless ``always``.
        """
        share = self.fractions[0]
        if len(losses) == 1 and not always and (type(share) is float or is_number(share)):
            return None
        equal = is_number(share) and share * len(losses) == 1 and self.fractions.count(share) == len(losses)
        if equal and len(losses) > 1 and not any(isinstance(loss, dict) for loss in losses):
            return torch.stack(losses).mean()  # an operation costs as much as much of a small microbatch
        mean: Any = None
        for loss, fraction in zip(losses, self.fractions, strict=True):
            mean = _accumulate(mean, loss, fraction)
        if all(map(is_number, self.fractions)) or mean is None:
            return mean
        if isinstance(mean, dict):
            return {name: _narrowed(value, losses[0][name]) for name, value in mean.items()}
        return _narrowed(mean, losses[0])


def has_numbers(tensor: Tensor) -> bool:
    """Whether it has numbers: a tensor of a step that is being made into a graph has none."""
    return not hasattr(tensor, "fake_mode")


def is_readable(tensor: Tensor) -> bool:
    """Whether it has numbers that can be read without waiting for a device."""
    return tensor.device.type == "cpu" and has_numbers(tensor)


def read_weight(weight: Any, what: str) -> Any:
    """A weight as a number, where it can be read without waiting for a device; else a tensor of shape ().

    Raises:
        DataError: no number, or a tensor of several; names ``what`` weighs so.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise DataError(
                f"{what} weighs a tensor of shape {tuple(weight.shape)} and dtype {weight.dtype}; a weight is one real "
                "number: pl.Task(weight=lambda batch: (batch[1] != -100).sum())."
            )
        return weight.item() if is_readable(weight) else weight.reshape(())
    if not isinstance(weight, Real) and not hasattr(weight, "__float__"):
        raise DataError(
            f"{what} weighs {weight!r} of type {type(weight).__name__}; is a `return` missing in pl.Task(weight=...)? "
            "A weight is a number, or a tensor of shape ()."
        )
    return weight


def wide(weight: Any) -> Any:
    """A weight in float64, where the device has it: a quotient of integers has torch's default dtype."""
    if not isinstance(weight, Tensor):
        return weight
    return weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)


def power_of_two(total: Any) -> Any:
    """The power of two at or above a number, or above a tensor of shape (), where it is found on its device.

    Of 0 it is 1.

    >>> power_of_two(5), power_of_two(8)
    (8.0, 8.0)
    """
    if isinstance(total, Tensor):
        return torch.exp2(torch.ceil(torch.log2(torch.where(total == 0, 1, wide(total)))))
    mantissa, exponent = math.frexp(total)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


@lru_cache(maxsize=256)
def of_numbers(weights: tuple[float, ...], whole: float | None = None) -> Weights | None:
    """:meth:`Weights.of` for numbers; None where they can't be weights."""
    total = sum(weights) if whole is None else whole
    if not (math.isfinite(total) and total >= 0 and min(weights) >= 0):
        return None
    power = power_of_two(total)
    fractions = tuple(w / total for w in weights) if total else weights
    return Weights(tuple(w / power for w in weights), total / power, fractions)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """What sums are kept in: half precision would lose small numbers, and float64 is not to be rounded."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _accumulate(mean: Any, loss: Any, fraction: Any) -> Any:
    if is_number(fraction) and fraction == 0:
        return mean  # the loss of a microbatch that counts nothing may be NaN
    if isinstance(loss, dict):
        before = mean or dict.fromkeys(loss)
        return {name: _accumulate(before.get(name), value, fraction) for name, value in loss.items()}
    if not is_number(fraction):
        part = counted_loss(loss, fraction) * (fraction.to(wide_dtype(loss)) if isinstance(loss, Tensor) else fraction)
        return part if mean is None else mean + part
    if mean is None:
        return loss * fraction
    if type(mean) is type(loss) is torch.Tensor:
        return torch.add(mean, loss, alpha=fraction)  # one operation, of which a microbatch has few
    return mean + loss * fraction


def _narrowed(mean: Any, loss: Any) -> Any:
    """A mean in the dtype of the losses: where weights are tensors, sums are kept in a wider one."""
    return mean.to(loss.dtype) if isinstance(mean, Tensor) and isinstance(loss, Tensor) else mean


def counted_loss(loss: Any, weight: Any) -> Any:
    """A loss of this weight, in the dtype of sums; 0 instead of NaN where the weight, a tensor, is 0.

    >>> counted_loss(torch.tensor(float("nan")), torch.tensor(0)), counted_loss(torch.tensor(2.0), torch.tensor(3))
    (tensor(0.), tensor(2.))
    """
    if is_number(weight):
        return loss
    value = loss.detach().to(wide_dtype(loss)) if isinstance(loss, Tensor) else torch.as_tensor(loss)
    return torch.where(weight == 0, torch.zeros_like(value), value)
