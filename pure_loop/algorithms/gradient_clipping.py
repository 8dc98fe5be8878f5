"""Gradient clipping: by the global norm, by value, or unit by unit.

With the threshold ``c``, gradients ``g`` and weights ``w``::

    norm      g' = g min(1, c / |g|)              |g| over all parameters; https://arxiv.org/abs/1211.5063
    value     g' = min(max(g, -c), c)             element by element
    adaptive  g' = g min(1, c max(|w|, 1e-3) / |g|)   for each output unit; https://arxiv.org/abs/2102.06171

The arithmetic is in :mod:`pure_loop.gradients`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pure_loop import gradients
from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.ranges import Above, OneOf, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["gradient_clipping"]

Kind = Literal["norm", "value", "adaptive"]


@checked
def gradient_clipping(
    kind: Annotated[Kind, OneOf("norm", "value", "adaptive", example='gradient_clipping("norm", 1.0)')],
    threshold: Annotated[Strength, Above(0, typical=(0.01, 8.0), example='gradient_clipping("norm", 1.0)')],
    *,
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
            convolution) to at most the threshold times the norm of its weights.
        threshold: above 0; a number, or a schedule. Usual are 1.0 for the norm, and 0.01 for adaptive clipping.
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

    def clip(state: State) -> State:
        grads = state.grads
        assert grads is not None
        limit = strength_at(threshold, state.timestamp)
        if kind == "norm":
            norm = gradients.global_norm(grads)
            before = norm if state.grad_norm is None else state.grad_norm  # clipped by fit already, or by another
            return state.replace(grads=gradients.clip_by_norm(grads, limit, norm=norm), grad_norm=before)
        if kind == "value":
            return state.replace(grads=gradients.clip_by_value(grads, limit))
        return state.replace(grads=gradients.clip_adaptively(grads, state.params, limit))

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: clip})
