"""Optimizers whose step is a few operations on lists of tensors: what these have in common.

A rule is a kernel and the names of what it keeps for each parameter. :func:`optimizer_of` adds the structure of the
optimizer state, schedules, parameters without a gradient, and donated memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.kernels import (
    check_state,
    gradients_of,
    layout_of,
    memory_of,
    run_kernel,
    set_layout,
    with_layout,
    zeros_like,
)
from pure_loop.optim.optimizer import (
    Grads,
    LearningRate,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    as_schedule,
    rate_at,
    stateless_overwrite,
    strength_in_step,
)
from pure_loop.ranges.strengths import Strength
from pure_loop.time import Timestamp

__all__ = ["Numbers", "add_multiple_", "between", "decay_", "optimizer_of", "shrink_"]

Numbers: TypeAlias = Mapping[str, Any]  # floats; in a step that is compiled also float64 tensors of shape ()
# (numbers, params, grads, memories, steps) -> None, which writes to params and memories; numbers["lr"] is the rate.
RuleKernel: TypeAlias = Callable[[Numbers, list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]], None]


def optimizer_of(
    name: str,
    kernel: RuleKernel,
    *,
    lr: LearningRate,
    memories: tuple[str, ...],
    numbers: Mapping[str, Strength],
    options: Mapping[str, Any],
    counts: bool = False,
    elementwise: bool = False,
    spreads_nonfinite: bool = False,
) -> Optimizer:
    """The optimizer of a kernel.

    Args:
        name: of the optimizer.
        kernel: writes the step to lists of tensors of one device and dtype.
        lr: the learning rate, or a schedule.
        memories: keys of the optimizer state that hold one tensor like the parameter for each.
        numbers: hyperparameters that may be schedules; the kernel is given their values.
        options: what the repr shows.
        counts: whether the optimizer state holds ``step`` and ``skipped``, and the kernel is given the number of the
            step for each parameter, of those that it took part in.
        elementwise: see :class:`Optimizer`.
        spreads_nonfinite: see :class:`Optimizer`.
    """
    rule = _Rule(name, kernel, as_schedule(name, lr), memories, FrozenDict(numbers), counts)
    return Optimizer(
        name=name,
        init=rule.init,
        update=rule.update,
        overwrite=stateless_overwrite(partial(rule.update, overwrite=True)),
        overwrites_mappings_only=True,
        lr=rule.lr,
        options=FrozenDict(options),
        spreads_nonfinite=spreads_nonfinite,
        takes_lr_scale=True,
        elementwise=elementwise,
    )


@attrs.frozen
class _Rule:
    name: str
    kernel: RuleKernel
    lr: RateFunction
    memories: tuple[str, ...]
    numbers: Mapping[str, Strength]
    counts: bool

    def init(self, params: Params) -> OptState:
        counted: dict[str, Any] = {}
        if self.counts:
            device = next(iter(params.values())).device if params else None
            counted["step"] = torch.zeros((), dtype=torch.float32, device=device)
            counted["skipped"] = FrozenDict(dict.fromkeys(params, 0))
        return FrozenDict({**counted, **{key: zeros_like(params) for key in self.memories}})

    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp, *, overwrite: bool = False
    ) -> tuple[Params, OptState]:
        numbers = {name: strength_in_step(number, timestamp) for name, number in self.numbers.items()}
        numbers["lr"] = rate_at(self.name, self.lr, timestamp)
        with GradMode(False):
            return self._update(grads, opt_state, params, numbers, overwrite)

    def _update(
        self, grads: Grads, opt_state: OptState, params: Params, numbers: Numbers, overwrite: bool
    ) -> tuple[Params, OptState]:
        counted = ("step", "skipped") if self.counts else ()
        check_state(self.name, opt_state, (*counted, *self.memories))
        names, values = list(params), list(params.values())
        gradients = gradients_of(grads, names)
        kept = [opt_state[key] for key in self.memories]
        new_state, steps = self.counted(opt_state, names, gradients) if self.counts else ({}, [])
        new, memories, layout = run_kernel(
            partial(self.step, numbers),
            names,
            values,
            gradients,
            [memory_of(opt_state, key, names) for key in self.memories],
            steps,
            layout_of(params, kept),
            overwrite,
        )
        if new is values:  # they were written to
            set_layout(layout, params, *kept)
            return params, FrozenDict({**opt_state, **new_state})
        for key, memory in zip(self.memories, memories, strict=True):
            new_state[key] = with_layout(names, memory, layout)
        return with_layout(names, new, layout), FrozenDict(new_state)

    def step(
        self,
        numbers: Numbers,
        params: list[Tensor],
        grads: list[Tensor],
        memories: list[list[Tensor]],
        steps: list[Tensor],
    ) -> None:
        """The kernel, for lists of one device and one real dtype."""
        first = params[0]
        if first.is_complex() or any(p.dtype is not first.dtype or p.device != first.device for p in params):
            raise RuntimeError("the tensors are of several kinds, or complex: run_kernel then calls it for each kind")
        self.kernel(numbers, params, grads, memories, steps)

    def counted(
        self, opt_state: OptState, names: list[str], gradients: list[Tensor | None]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """The counts after this step, and for each parameter the number of steps that it took part in."""
        skipped = memory_of(opt_state, "skipped", names)
        step = opt_state["step"] + 1
        steps = [step - missed if missed else step for missed in skipped]
        missed = [count + (gradient is None) for count, gradient in zip(skipped, gradients, strict=True)]
        return {"step": step, "skipped": FrozenDict(zip(names, missed, strict=True))}, steps


def decay_(params: list[Tensor], numbers: Numbers, independent: bool) -> None:
    """Shrink the parameters by ``lr * weight_decay``, or independently of the learning rate by ``weight_decay``."""
    decay = numbers["weight_decay"]
    shrink_(params, decay if independent else numbers["lr"] * decay)


def shrink_(params: list[Tensor], amount: Any) -> None:
    """``params *= 1 - amount``; the amount is as the factor of :func:`add_multiple_`."""
    if isinstance(amount, Tensor):
        for param in params:
            param.mul_((1 - amount).to(param))
    elif amount:
        torch._foreach_mul_(params, 1 - amount)


def add_multiple_(params: list[Tensor], directions: Any, factor: Any) -> None:
    """``params += factor * directions``; the factor is a float, or in a compiled step a float64 tensor of shape ()."""
    if isinstance(factor, Tensor):
        torch._foreach_add_(params, torch._foreach_mul(directions, factor.to(params[0])))
    else:
        torch._foreach_add_(params, directions, alpha=factor)


def between(starts: list[Tensor], ends: Any, weight: Any) -> list[Tensor]:
    """``starts + weight * (ends - starts)``; the weight is as the factor of :func:`add_multiple_`."""
    if isinstance(weight, Tensor):
        return [start.lerp(end, weight.to(start)) for start, end in zip(starts, ends, strict=True)]
    return list(torch._foreach_lerp(starts, ends, weight))
