"""Sharpness-aware minimisation: the gradient where the loss nearby is worst.

With the parameters ``w``, their gradient ``g = L'(w)`` and the radius ``rho``::

    e = rho g / (|g| + epsilon)                        https://arxiv.org/abs/2010.01412
    e = rho w^2 g / (||w| g| + epsilon)                adaptive; https://arxiv.org/abs/2102.11600
    step from w with L'(w + e)

The norm is over all parameters. The step needs the gradient a second time, at ``w + e``, which is ``s`` here::

    mean of s over groups of m samples, each with an e of its own          m-sharpness; section 4.1 of the first
    s - gap (g - (g.s / s.s) s)                       the gap, too (GSAM); https://arxiv.org/abs/2203.08065
    g + reuse |g| / |v| v,   v = s - (s.g / g.g) g    between (LookSAM); https://arxiv.org/abs/2203.02714
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop._internal.tree_ops import map_local
from pure_loop._internal.weights import is_number
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients.clipping import global_norm, in_dtypes_of, inner_product
from pure_loop.loop.batch import LoopStages
from pure_loop.random import derive
from pure_loop.ranges import Above, AtLeast, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["orthogonal_part", "perturb", "sam"]

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
        grads: their gradients; a parameter without one, or with None, stays as it is.
        rho: the distance; with ``adaptive``, measured in the size of each weight.
        epsilon: added to the norm, for gradients that are 0.
        adaptive: weigh each element by its own size, which makes the distance independent of the layers' scales.

    Returns:
        New parameters, of the same shapes and dtypes.

    >>> perturb({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}, rho=0.5)["w"]
    tensor([1.3000, 2.4000])
    """
    present = {name: grad for name in params if (grad := grads.get(name)) is not None}
    if not present:
        return FrozenDict(params)
    weights, directions = [params[name] for name in present], list(present.values())
    if adaptive:
        directions = map_local(_sized, directions, weights)
    norm = global_norm(dict(zip(present, directions, strict=True)))
    # In float32 at least: epsilon is 0 in float16.
    scale = rho / (norm.to(torch.promote_types(norm.dtype, torch.float32)) + epsilon)

    def move(weights: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        steps = in_dtypes_of(directions, torch._foreach_mul(directions, scale))
        return list(torch._foreach_add(weights, _sized(steps, weights) if adaptive else steps))

    moved = dict(zip(present, map_local(move, weights, directions), strict=True))
    return FrozenDict((name, moved.get(name, tensor)) for name, tensor in params.items())


def _sized(tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_mul(tensors, torch._foreach_abs(weights)))


@torch.no_grad()
def orthogonal_part(
    tensors: Mapping[str, Tensor | None], direction: Mapping[str, Tensor | None]
) -> FrozenDict[str, Tensor | None]:
    """What is left of tensors without their part along a direction, all of them taken as one long vector.

    Args:
        tensors: names to tensors; None stays None.
        direction: the same names.

    >>> orthogonal_part({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 2.0])})["w"]
    tensor([3., 0.])
    """
    length = inner_product(direction, direction)
    share = inner_product(tensors, direction) / torch.where(length == 0, 1.0, length)
    return _plus(tensors, direction, -share)


def _plus(
    tensors: Mapping[str, Tensor | None], terms: Mapping[str, Tensor | None], factor: Tensor
) -> FrozenDict[str, Tensor | None]:
    """``tensors + factor * terms``, name by name, in the dtypes of ``tensors``."""
    present = {
        name: (tensor, term)
        for name, tensor in tensors.items()
        if tensor is not None and (term := terms.get(name)) is not None
    }

    def added(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_add(a, in_dtypes_of(a, torch._foreach_mul(b, factor))))

    values = map_local(added, [tensor for tensor, _ in present.values()], [term for _, term in present.values()])
    return FrozenDict({**tensors, **dict(zip(present, values, strict=True))})


@checked
def sam(
    rho: Annotated[Strength, Above(0, typical=(0.01, 1.0))] = 0.05,
    epsilon: Annotated[float, Above(0, typical=())] = 1e-12,
    interval: Annotated[int, AtLeast(1, example="sam(interval=2) for every second batch")] = 1,
    adaptive: bool = False,
    *,
    m: Annotated[int | None, AtLeast(1, typical=(), example="sam(m=32)")] = None,
    reuse: Annotated[Strength | None, Above(0, typical=(), example="sam(interval=5, reuse=0.7)")] = None,
    gap: Annotated[Strength, AtLeast(0, typical=())] = 0.0,
    name: str = "sam",
) -> Algorithm:
    """Sharpness-aware minimisation: each step uses the gradient at the worst point nearby.

    At AFTER_TRAIN_BATCH it takes the gradient of the batch again, at perturbed parameters, computed as the loop
    computes it: the same microbatches, dropout masks and precision, and the other algorithms from BEFORE_FORWARD
    to AFTER_BACKWARD. With ``m``, groups draw masks of their own. Only the gradient is kept: loss, outputs, BatchNorm's
    statistics and the other algorithms' state are those at the parameters themselves. A batch with SAM takes twice as
    long.

    Args:
        rho: how far away, above 0; a number, or a schedule.
        epsilon: added to the gradient's norm, above 0.
        interval: use it for every ``interval``-th batch of the run, the first one included.
        adaptive: measure the distance in the size of each weight (ASAM); a good rho is then 10 times larger.
        m: how many samples have a perturbation of their own (m-sharpness), each group of which takes two gradients;
            None: all of a batch have one. ``clip_grad`` clips the gradient of each group. On several ranks, groups of
            this size on each rank at a time, into which the parts of a batch divide evenly, all of one weight.
        reuse: between the batches of ``interval``, add this much of the part of the last second gradient that is
            orthogonal to the first (LookSAM, where it is 0.7); a number, or a schedule. None: they take plain steps.
            ``clip_grad`` clips before this and before ``gap``, and ``gradient_clipping`` clips what comes of them.
        gap: how much of the part of the first gradient that is orthogonal to the second is taken away, which makes the
            difference of the two losses smaller (GSAM); 0: none; a number, or a schedule.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range, ``reuse`` with an interval of 1; in training, on several ranks: a batch
            that does not divide into groups of m samples.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", algorithms=[sam(rho=0.1, interval=2)])
    >>> pl.run(stream).timestamp.batch
    6
    """

    if reuse is not None and interval == 1:
        raise ArgumentError("sam: reuse is for the batches between those of interval: sam(interval=5, reuse=0.7).")

    def nearby(state: State, grads: Mapping[str, Tensor | None]) -> State:
        distance = strength_at(rho, state.timestamp)
        return state.replace(params=perturb(state.params, grads, distance, epsilon, adaptive))

    def second(state: State, stages: LoopStages) -> State:
        assert state.grads is not None
        return stages.gradients(nearby(state, state.grads)) if m is None else _by_groups(state, stages, m, name, nearby)

    def with_part_before(state: State, grads: Mapping[str, Tensor | None], share: Strength) -> State:
        before = state.algorithm_state[name]
        length = global_norm({key: before[key] for key, grad in grads.items() if grad is not None})
        size = strength_at(share, state.timestamp) * global_norm(grads) / torch.where(length == 0, 1.0, length)
        return state.replace(grads=_plus(grads, before, size))

    def sharpen(state: State, stages: LoopStages) -> State:
        grads, timestamp = state.grads, state.timestamp
        assert grads is not None
        if timestamp.batch % interval:
            return state if reuse is None else with_part_before(state, grads, reuse)
        result = second(state, stages)
        sharp = result.grads
        assert sharp is not None
        if reuse is not None:
            part = _finite_or_before(orthogonal_part(sharp, grads), state.algorithm_state[name])
            state = state.remember(name, part)
        strength = strength_at(gap, timestamp)
        if callable(gap) or strength:
            sharp = _plus(sharp, orthogonal_part(grads, sharp), torch.as_tensor(-strength))
        return state.replace(grads=sharp, grad_norm=result.grad_norm)

    def begin(state: State) -> FrozenDict[str, Tensor]:
        return FrozenDict((key, torch.zeros_like(state.params[key])) for key in state.model.trainable)

    return Algorithm(name, {Event.AFTER_TRAIN_BATCH: sharpen}, init=None if reuse is None else begin, claims=CLAIMS)


def _by_groups(
    state: State,
    stages: LoopStages,
    m: int,
    name: str,
    nearby: Callable[[State, Mapping[str, Tensor | None]], State],
) -> State:
    """The State with the mean of the second gradients of groups of m samples, each with a perturbation of its own."""
    assert state.grads is not None
    groups, task = stages.microbatches(state.batch, m), stages.task
    weights = task.weigh_parts(state.batch, groups)
    if stages.engine.exchanges:
        _refuse_uneven(groups, weights, m, state, stages)
    total = 1 if task.summed else sum(weights)
    sums: dict[str, Tensor | None] = dict.fromkeys(state.grads)
    for index, (group, weight) in enumerate(zip(groups, weights, strict=True)):
        if is_number(weight) and not weight:
            continue  # a group of padding, which has no mean
        # Each draws numbers of its own, as microbatches do.
        seed = derive(state.seed, name, index) if index else state.seed
        part = state.replace(batch=group, seed=seed)
        first = stages.gradients(part).grads
        assert first is not None
        grads = stages.gradients(nearby(part, first)).grads
        assert grads is not None
        share = 1 if task.summed else weight / total
        for key, grad in grads.items():
            before = sums[key]
            if grad is not None:
                sums[key] = grad * share if before is None else before + grad * share
    norm = None if state.grad_norm is None else global_norm(sums)
    return state.replace(grads=sums, grad_norm=norm)


def _finite_or_before(part: Mapping[str, Tensor | None], before: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    """The part of a gradient that is reused; as before, where it is not finite: of a step that is skipped."""
    finite = torch.isfinite(global_norm(part))
    parts = {key: tensor for key in before if (tensor := part[key]) is not None}

    def chosen(latest: list[Tensor], previous: list[Tensor]) -> list[Tensor]:
        return [torch.where(finite, a, b) for a, b in zip(latest, previous, strict=True)]

    results = map_local(chosen, list(parts.values()), [before[key] for key in parts])
    return FrozenDict({**before, **dict(zip(parts, results, strict=True))})


def _refuse_uneven(
    groups: list[Batch], weights: list[float | Tensor], m: int, state: State, stages: LoopStages
) -> None:
    """
    Raises:
        ArgumentError: on several ranks, where groups are not all of one size and weight, or not as many on each rank.
    """
    task = stages.task
    _, count = stages.engine.weigh(weights, state, split=True, summed=task.summed)  # all ranks call it
    samples = [task.samples(group) for group in groups]
    same = all(is_number(weight) and weight == weights[0] for weight in weights)
    if count != len(groups) or set(samples) != {m} or not same:
        raise ArgumentError(
            f"sam: this rank's part of batch {state.timestamp.batch} divides into groups of {samples} samples with the "
            f"weights {[float(weight) for weight in weights]}, and of several ranks each has {count} groups of m={m} "
            "samples of one weight: choose an m that divides the parts, and leave out uneven batches and targets that "
            "are ignored."
        )
