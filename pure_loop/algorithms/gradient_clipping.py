"""Gradient clipping: by the global norm, by value, or unit by unit.

With the threshold ``c``, gradients ``g`` and weights ``w``::

    norm      g' = g min(1, c / |g|)              |g| over all parameters; https://arxiv.org/abs/1211.5063
    value     g' = min(max(g, -c), c)             element by element
    adaptive  g' = g min(1, c max(|w|, 1e-3) / |g|)   for each output unit; https://arxiv.org/abs/2102.06171
    parameter g' = g min(1, c / |g|)              |g| of each parameter alone
    quantile  as norm, with the c-quantile of the last 1000 norms; https://arxiv.org/abs/2007.14469

The arithmetic is in :mod:`pure_loop.gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from pure_loop import gradients
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.ranges import Above, OneOf, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["gradient_clipping"]

Kind = Literal["norm", "value", "adaptive", "parameter", "quantile"]

# A threshold of any size serves these.
_BY_SIZE = ("norm", "value", "adaptive", "parameter")
_KINDS = OneOf(*_BY_SIZE, "quantile", typical=_BY_SIZE, example='gradient_clipping("norm", 1.0)')
_WINDOW = 1000


@checked
def gradient_clipping(
    kind: Annotated[Kind, _KINDS],
    threshold: Annotated[Strength, Above(0, typical=(0.01, 8.0), example='gradient_clipping("norm", 1.0)')],
    *,
    exclude: Callable[[str], bool] | None = None,
    name: str = "gradient_clipping",
) -> Algorithm:
    """Clip the gradients of each batch, at AFTER_TRAIN_BATCH.

    Algorithms apply in reverse there: in ``[gradient_clipping(...), sam()]`` what SAM found is clipped, in
    ``[sam(), gradient_clipping(...)]`` what SAM starts from. ``fit(clip_grad=...)`` clips wherever gradients are
    computed. A gradient that is NaN or infinite stays so, and the loop deals with it as ``nonfinite=`` says.

    With ``"norm"``, ``state.grad_norm`` is the norm before clipping from there on.

    Args:
        kind: ``"norm"`` scales all gradients so that their global norm is at most the threshold; ``"value"``
            clamps each element; ``"adaptive"`` scales each output unit's gradient (row of a matrix, filter of a
            convolution) to at most the threshold times the norm of its weights; ``"parameter"`` scales the gradient of
            each parameter to at most the threshold; ``"quantile"`` is ``"norm"`` with a threshold that follows the
            norms: their quantile, over the last 1000 batches with a finite one.
        threshold: above 0; a number, or a schedule. Usual are 1.0 for the norm, 0.01 for adaptive clipping, and 0.1 for
            a quantile, which is below 1.
        exclude: a function of the name of a parameter: those for which it returns True keep their gradient, and do not
            count in a norm. The paper leaves the last layer out of adaptive clipping.
        name: another one, if there are several.

    Raises:
        ArgumentError: a kind that there is not, or a threshold that is not above 0 and finite.
        ArgumentTypeError: a threshold that is no number.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(1, 2, bias=False))
    >>> state = state.replace(grads={"weight": torch.tensor([[3.0], [4.0]])})
    >>> gradient_clipping("norm", 1.0)(state).grads["weight"].T
    tensor([[0.6000, 0.8000]])
    """

    if exclude is not None and not callable(exclude):
        raise ArgumentTypeError(
            f"gradient_clipping: exclude={exclude!r} is not a function of a parameter's name: "
            'exclude=lambda name: name.startswith("head").'
        )
    if kind == "quantile":
        _refuse_no_part(threshold)

    def clip(state: State) -> State:
        all_grads = state.grads
        assert all_grads is not None
        grads = all_grads if exclude is None else {key: grad for key, grad in all_grads.items() if not exclude(key)}
        limit: Any = strength_at(threshold, state.timestamp)
        if kind in ("norm", "quantile"):
            norm = gradients.global_norm(grads)
            before = norm if state.grad_norm is None else state.grad_norm  # clipped by fit already, or by another
            state = state.replace(grad_norm=before)
            if kind == "quantile":
                _refuse_no_part(limit)
                memory = _with_norm(state.algorithm_state[name], norm)
                limit = torch.nanquantile(memory["norms"], torch.zeros((), device=norm.device) + limit)
                state = state.remember(name, memory)
            clipped = gradients.clip_by_norm(grads, limit, norm=norm)
        elif kind == "value":
            clipped = gradients.clip_by_value(grads, limit)
        elif kind == "parameter":
            clipped = FrozenDict((key, gradients.clip_by_norm({key: grad}, limit)[key]) for key, grad in grads.items())
        else:
            clipped = gradients.clip_adaptively(grads, state.params, limit)
        return state.replace(grads=clipped if exclude is None else {**all_grads, **clipped})

    def begin(state: State) -> FrozenDict[str, Tensor]:
        norms = torch.full((_WINDOW,), math.nan, device=state.device)
        return FrozenDict(norms=norms, count=torch.zeros((), dtype=torch.int64, device=state.device))

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: clip}, init=begin if kind == "quantile" else None)


def _refuse_no_part(threshold: object) -> None:
    """
    Raises:
        ArgumentError: it is a number that is no part of a whole.
    """
    if isinstance(threshold, float | int) and threshold >= 1:
        raise ArgumentError(
            f'gradient_clipping: threshold={threshold:g} with "quantile": it is the part of the norms that lies below, '
            'such as gradient_clipping("quantile", 0.1).'
        )


def _with_norm(memory: Mapping[str, Tensor], norm: Tensor) -> FrozenDict[str, Tensor]:
    """The last norms with one more, in the place of the oldest; one that is not finite is left out."""
    norms, count = memory["norms"], memory["count"]
    finite = norm.isfinite()
    here = (torch.arange(_WINDOW, device=norms.device) == count % _WINDOW) & finite
    return FrozenDict(norms=torch.where(here, norm.to(norms.dtype), norms), count=count + finite)
