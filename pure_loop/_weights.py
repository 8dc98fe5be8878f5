"""How much each microbatch of a batch counts, such that the gradient doesn't depend on the split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop.errors import DataError

__all__ = ["Weights", "is_number", "mean_of", "of_numbers", "power_of_two"]


_INT = {int}


def is_number(value: float | Tensor) -> bool:
    """Whether it is no tensor: to ask a number whether it is one takes long."""
    return type(value) is float or type(value) is int or not isinstance(value, Tensor)


@attrs.frozen
class Weights:
    """The factors of a batch's microbatches.

    The loss of a microbatch is a mean, so its gradient counts by its samples (or tokens): the mean of
    means is wrong where the last one is smaller. Each gradient is multiplied by its weight over the power
    of two at or above the sum, which is exact, and the total is divided once at the end: where all
    arithmetic is exact, every split gives the same bits, and a batch of 2**k samples needs no division.

    Attributes:
        shares: what each microbatch's gradient is multiplied by, at most 1.
        divisor: what the sum of gradients is divided by, in (0.5, 1].
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
            DataError: weights that are negative, not finite or add up to zero; names the batch.
        """
        if total is None and set(map(type, weights)) == _INT and (found := of_numbers(tuple(weights))) is not None:
            return found
        # Those of a step that is being compiled have no numbers.
        known = [isinstance(w, Tensor) and w.device.type == "cpu" and not hasattr(w, "fake_mode") for w in weights]
        read = tuple(w.item() if isinstance(w, Tensor) and here else w for w, here in zip(weights, known, strict=True))
        if any(isinstance(weight, Tensor) for weight in read):
            if len(read) == 1 and total is None:
                return cls((1.0,), 1.0, (1.0,))
            total = sum(read) if total is None else total
            power = power_of_two(total)
            return cls(tuple(w / power for w in read), total / power, tuple(w / total for w in read))
        found = of_numbers(read, total)
        if found is None:
            raise DataError(
                f"the microbatches of batch {batch} weigh {list(read)}: weights are finite, not negative, and not "
                "all zero. By default a microbatch weighs its samples; task=pl.Task(weight=...) says otherwise."
            )
        return found


def power_of_two(total: Any) -> Any:
    """The power of two at or above a number, or above a tensor of shape (), where it is found on its device.

    >>> power_of_two(5), power_of_two(8)
    (8.0, 8.0)
    """
    if isinstance(total, Tensor):
        return torch.exp2(torch.ceil(torch.log2(torch.as_tensor(total, dtype=torch.float32))))
    mantissa, exponent = math.frexp(total)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


@lru_cache(maxsize=256)
def of_numbers(weights: tuple[float, ...], whole: float | None = None) -> Weights | None:
    """:meth:`Weights.of` for numbers; None where they can't be weights."""
    total = sum(weights) if whole is None else whole
    if not (math.isfinite(total) and total > 0 and min(weights) >= 0):
        return None
    power = power_of_two(total)
    return Weights(tuple(w / power for w in weights), total / power, tuple(w / total for w in weights))


def mean_of(losses: list[Any], fractions: Sequence[Any]) -> Any:
    """The loss of a batch from those of its microbatches; None where none of them counts."""
    share = fractions[0]
    equal = is_number(share) and share * len(losses) == 1 and fractions.count(share) == len(losses)
    if equal and len(losses) > 1 and not any(isinstance(loss, dict) for loss in losses):
        return torch.stack(losses).mean()  # an operation costs as much as much of a small microbatch
    mean: Any = None
    for loss, fraction in zip(losses, fractions, strict=True):
        mean = _accumulate(mean, loss, fraction)
    return mean


def _accumulate(mean: Any, loss: Any, fraction: Any) -> Any:
    if is_number(fraction) and fraction == 0:
        return mean  # the loss of a microbatch that counts nothing may be NaN
    if isinstance(loss, dict):
        before = mean or dict.fromkeys(loss)
        return {name: _accumulate(before.get(name), value, fraction) for name, value in loss.items()}
    if mean is None:
        return loss * fraction
    if type(mean) is type(loss) is torch.Tensor and is_number(fraction):
        return torch.add(mean, loss, alpha=fraction)  # one operation, of which a microbatch has few
    return mean + loss * fraction
