"""Numeric precision: autocast for the forward and the loss, and the loss scale as a value.

Mixed precision as in Micikevicius et al., "Mixed Precision Training" (https://arxiv.org/abs/1710.03740):
parameters stay in float32; ``amp_fp16`` multiplies the loss by a scale that halves when a gradient
overflows (that step is skipped) and doubles after 2000 steps without an overflow. ``amp_fp8`` changes the model, too:
``entry/float8.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.torch_private import amp_update_scale
from pure_loop.errors import ArgumentError

__all__ = ["LossScale", "Precision", "PrecisionName"]


@attrs.frozen(eq=False)
class LossScale:
    """The loss scale of ``amp_fp16``, on the device.

    Attributes:
        scale: float32, shape (): what the loss is multiplied by before the backward.
        growth_tracker: int32, shape (): steps without an overflow since the scale last changed.

    >>> scale = LossScale.initial(torch.device("cpu"))
    >>> float(scale), float(scale.update(torch.ones(1)))
    (65536.0, 32768.0)
    """

    scale: Tensor
    growth_tracker: Tensor

    INITIAL = 2.0**16
    GROWTH_FACTOR = 2.0
    BACKOFF_FACTOR = 0.5
    GROWTH_INTERVAL = 2000

    @classmethod
    def initial(cls, device: torch.device) -> LossScale:
        return cls(
            torch.full((), cls.INITIAL, dtype=torch.float32, device=device),
            torch.zeros((), dtype=torch.int32, device=device),
        )

    def update(self, found_inf: Tensor) -> LossScale:
        """The scale after a step; ``found_inf`` is float32 of shape (1,), 1 where a gradient overflowed."""
        scale, tracker = self.scale.clone(), self.growth_tracker.clone()
        amp_update_scale(scale, tracker, found_inf, self.GROWTH_FACTOR, self.BACKOFF_FACTOR, self.GROWTH_INTERVAL)
        return LossScale(scale, tracker)

    def __float__(self) -> float:
        return float(self.scale)


def _flatten(value: LossScale) -> tuple[Sequence[object], object, Sequence[str]]:
    return (value.scale, value.growth_tracker), None, ("scale", "growth_tracker")


def _unflatten(_: None, children: Iterable[PyTree]) -> LossScale:
    value = object.__new__(LossScale)
    for name, child in zip(("scale", "growth_tracker"), children, strict=True):
        object.__setattr__(value, name, child)
    return value


_pytree.register(LossScale, _flatten, _unflatten, attributes=True)


PrecisionName: TypeAlias = Literal["fp32", "amp_bf16", "amp_fp16", "amp_fp8"]
"""A precision in which the forward and the loss are computed."""


@attrs.frozen
class Precision:
    """How the forward and the loss are computed.

    Attributes:
        name: as ``fit`` takes it.
        dtype: of autocast; None: there is none.
        scaled: whether there is a loss scale.
        float8: whether linear layers multiply in 8-bit floats.
        emulate: whether such products are computed in float32, from rounded numbers, as any device can; for tests.

    >>> Precision.parse("amp_bf16").dtype
    torch.bfloat16
    """

    name: PrecisionName
    dtype: torch.dtype | None
    scaled: bool
    float8: bool = False
    emulate: bool = False

    @classmethod
    def parse(cls, name: object) -> Precision:
        """
        Raises:
            ArgumentError: an unknown name; the message lists those there are.
        """
        if isinstance(name, Precision):
            return name
        if not isinstance(name, str) or name not in _PRECISIONS:
            raise ArgumentError(f"precision={name!r} is unknown; write one of {', '.join(map(repr, _PRECISIONS))}.")
        return _PRECISIONS[name]

    def autocast(self, device: torch.device) -> Any:
        """A context in which the forward runs in this precision; None for float32, which needs none."""
        if self.dtype is None:
            return None
        return torch.autocast(device.type, dtype=self.dtype)


_PRECISIONS = {
    "fp32": Precision("fp32", None, False),
    "amp_bf16": Precision("amp_bf16", torch.bfloat16, False),
    "amp_fp16": Precision("amp_fp16", torch.float16, True),
    "amp_fp8": Precision("amp_fp8", torch.bfloat16, False, float8=True),
}
