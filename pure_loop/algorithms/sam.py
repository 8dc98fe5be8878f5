"""Sharpness-aware minimisation: the gradient where the loss nearby is worst.

With the parameters ``w``, their gradient ``g = L'(w)`` and the radius ``rho``::

    e = rho g / (|g| + epsilon)                        https://arxiv.org/abs/2010.01412
    e = rho w^2 g / (||w| g| + epsilon)                adaptive; https://arxiv.org/abs/2102.11600
    step from w with L'(w + e)

The norm is over all parameters. The step needs the gradient a second time, at ``w + e``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop._internal.dtensor import map_local
from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients import global_norm, in_dtypes_of
from pure_loop.loop.training import LoopStages
from pure_loop.ranges import Above, AtLeast, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["perturb", "sam"]

CLAIMS = frozenset({"replaces gradient"})


@torch.no_grad()
def perturb(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor | None],
    rho: float = 0.05,
    epsilon: float = 1e-12,
    adaptive: bool = False,
) -> FrozenDict[str, Tensor]:
    """The parameters at distance ``rho`` in the direction in which the loss grows fastest.

    Args:
        params: names to tensors.
        grads: their gradients; a parameter whose gradient is None, or is not there, stays as it is.
        rho: the distance; with ``adaptive``, measured in the size of each weight.
        epsilon: added to the norm, for gradients that are 0.
        adaptive: weigh each element by its own size, which makes the distance independent of the layers' scales.

    Returns:
        New parameters, of the same shapes and dtypes.

    >>> perturb({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}, rho=0.5)["w"]
    tensor([1.3000, 2.4000])
    """
    names = [name for name in params if grads.get(name) is not None]
    if not names:
        return FrozenDict(params)
    weights: list[Tensor] = [params[name] for name in names]
    directions: Any = [grads[name] for name in names]
    if adaptive:
        directions = map_local(_sized, directions, weights)
    norm = global_norm(dict(zip(names, directions, strict=True)))
    # In float32 at least: epsilon is 0 in float16.
    scale = rho / (norm.to(torch.promote_types(norm.dtype, torch.float32)) + epsilon)

    def move(weights: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        steps = in_dtypes_of(directions, torch._foreach_mul(directions, scale))
        return list(torch._foreach_add(weights, _sized(steps, weights) if adaptive else steps))

    moved = dict(zip(names, map_local(move, weights, directions), strict=True))
    return FrozenDict((name, moved.get(name, tensor)) for name, tensor in params.items())


def _sized(tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, torch._foreach_abs(weights)))


@checked
def sam(
    rho: Annotated[Strength, Above(0, typical=(0.01, 1.0))] = 0.05,
    epsilon: Annotated[float, Above(0, typical=())] = 1e-12,
    interval: Annotated[int, AtLeast(1, example="sam(interval=2) for every second batch")] = 1,
    adaptive: bool = False,
    *,
    name: str = "sam",
) -> Algorithm:
    """Sharpness-aware minimisation: each step uses the gradient at the worst point nearby.

    At AFTER_TRAIN_BATCH it takes the gradient of the batch again, at perturbed parameters, computed as the loop
    computes it: the same microbatches, dropout masks and precision, and the other algorithms from BEFORE_FORWARD
    to AFTER_BACKWARD. Only the gradient is kept: loss, outputs, BatchNorm's statistics and the other algorithms' state
    are those at the parameters themselves. A batch with SAM takes twice as long.

    Args:
        rho: how far away, above 0; a number, or a schedule.
        epsilon: added to the gradient's norm, above 0.
        interval: use it for every ``interval``-th batch of the run, the first one included.
        adaptive: measure the distance in the size of each weight (ASAM); a good rho is then 10 times larger.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", algorithms=[sam(rho=0.1, interval=2)])
    >>> pl.run(stream).timestamp.batch
    6
    """

    def sharpen(state: State, stages: LoopStages) -> State:
        if state.timestamp.batch % interval:
            return state
        grads = state.grads
        assert grads is not None
        distance = strength_at(rho, state.timestamp)
        nearby = state.replace(params=perturb(state.params, grads, distance, epsilon, adaptive))
        result = stages.gradients(nearby)
        return state.replace(grads=result.grads, grad_norm=result.grad_norm)

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: sharpen}, claims=CLAIMS)
