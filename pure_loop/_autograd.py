"""Autograd at the price of its engine: the Python around it costs more than many a model's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:  # private to torch: what `torch.autograd.grad` itself calls, in 2.11 to 2.13
    from torch.autograd.graph import _engine_run_backward as _run_engine
except ImportError:
    _run_engine = None  # type: ignore[assignment, unused-ignore]

__all__ = ["GradMode", "gradient_of"]


class GradMode:
    """``torch.set_grad_enabled`` at a third of its price: it stands in every stage.

    >>> with GradMode(False):
    ...     torch.is_grad_enabled()
    False
    """

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._mode)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


def gradient_of(loss: Tensor, inputs: Sequence[Tensor], seed: Tensor | None = None) -> tuple[Any, ...]:
    """``torch.autograd.grad(loss, inputs, seed, allow_unused=True)`` of a scalar, without its checks of every input.

    >>> x, y = torch.tensor(3.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    >>> gradient_of(x * x, [x, y])
    (tensor(6.), None)
    """
    engine: Any = _run_engine
    if engine is None:
        return torch.autograd.grad(loss, inputs, seed, allow_unused=True)
    if seed is None:
        seed = torch.ones_like(loss)
    found: tuple[Any, ...] = engine(
        (loss,), (seed,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found
