"""Gradient noise: Gaussian noise on the gradients, less and less of it.

With the gradient ``g`` of the batch with the number ``t``, counted from 0::

    g' = g + n,   n ~ Normal(0, eta / (1 + t)^gamma)     variance; https://arxiv.org/abs/1511.06807
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.tree_ops import shard_like
from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.random import generator
from pure_loop.ranges import Above, AtLeast, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["gradient_noise"]


@checked
def gradient_noise(
    eta: Annotated[Strength, Above(0)] = 0.01,
    gamma: Annotated[float, AtLeast(0)] = 0.55,
    *,
    name: str = "gradient_noise",
) -> Algorithm:
    """Gaussian noise on the gradients of each batch, at AFTER_TRAIN_BATCH.

    The noise is a function of the seed, the name and the number of the batch: a run that is resumed has the same, and
    so has each of several ranks. ``state.grad_norm`` stays the norm without noise. Put it before ``gradient_clipping``
    to add noise to clipped gradients: algorithms apply in reverse there.

    Args:
        eta: the variance for the first batch; the paper tries 0.01, 0.3 and 1; a number, or a schedule.
        gamma: how fast it falls; 0: not at all.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(grads={"weight": torch.zeros(1, 2), "bias": None})
    >>> noisy = gradient_noise()(state).grads
    >>> noisy["weight"].abs().max() > 0, noisy["bias"]
    (tensor(True), None)
    """

    def add(state: State) -> State:
        grads = state.grads
        assert grads is not None
        batch = state.timestamp.batch
        deviation: float = (strength_at(eta, state.timestamp) / (1 + batch) ** gamma) ** 0.5
        random = generator(state.seed, name, batch, device=state.device)

        def noisy(grad: Tensor) -> Tensor:
            noise = torch.randn(grad.shape, dtype=grad.dtype, device=grad.device, generator=random)
            return grad + deviation * shard_like(noise, grad)

        # In the order of the names, which is that of every model that has them.
        return state.replace(
            grads={key: None if (grad := grads[key]) is None else noisy(grad) for key in sorted(grads)}
        )

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: add})
