"""The optimizers of this library: a rule is a record, of which the kernel computes the step.

A kernel writes to lists of tensors, in the order of the parameters. ``overwrite`` lets it write to the tensors of its
arguments, and ``update`` to copies of them. A rule adds the structure of the optimizer state, schedules, and parameters
without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import clone_all
from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.kernels import are_alike, check_state, in_order, laid_out, run_in_place, zeros_like
from pure_loop.optim.optimizer import (
    Grads,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    fixed_rate,
    options_in_step,
    rate_at,
)
from pure_loop.time import Timestamp

if TYPE_CHECKING:
    from pure_loop.optim._in_torch import RuleInTorch

__all__ = ["Rule", "StepOptions", "add_multiple", "add_multiple_", "between", "decay_", "shrink_"]

# The hyperparameters of one step: of schedules the values, in a step that is compiled float64 tensors of shape (). With
# "lr", the rate; "found_inf", None or what `overwrite` was given; and "first", see Rule.marks_first.
StepOptions: TypeAlias = Mapping[str, Any]
# (options, params, grads, memories, steps) -> None, which writes to params and memories.
RuleKernel: TypeAlias = Callable[[StepOptions, list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]], None]


@attrs.frozen(kw_only=True)
class Rule:
    """An optimizer as a record.

    Attributes:
        name: of the optimizer.
        kernel: writes the step to lists of tensors of one device and real dtype.
        lr: the learning rate.
        memories: keys of the optimizer state that hold one tensor like the parameter for each.
        options: the other hyperparameters, some of which may be schedules.
        counts: whether the optimizer state holds ``step`` and ``skipped``, and the kernel is given the number of the
            step for each parameter, of those that it took part in.
        marks_first: whether the optimizer state holds ``started``, and the kernel is called once for the parameters
            whose first step it is, and once for the others.
        takes_found_inf: see :class:`Optimizer`.
        told: more options for the kernel, made of all parameters that are stepped at once.
        in_torch: the state as that of a class of torch.
    """

    name: str
    kernel: RuleKernel
    lr: RateFunction
    memories: tuple[str, ...]
    options: Mapping[str, Any]
    counts: bool = False
    marks_first: bool = False
    takes_found_inf: bool = False
    told: Callable[[list[Tensor]], StepOptions] | None = None
    in_torch: type[RuleInTorch] | None = None
    # The hyperparameters where they are the same in each step.
    fixed: StepOptions | None = attrs.field(init=False)

    @fixed.default
    def _fixed(self) -> StepOptions | None:
        rate, values = fixed_rate(self.lr), self.options.values()
        scheduled = any(map(callable, chain.from_iterable(v if isinstance(v, tuple) else (v,) for v in values)))
        return None if rate is None or scheduled else {**self.options, "lr": rate}

    @property
    def keys(self) -> tuple[str, ...]:
        """The names in the optimizer state."""
        counted, marked = ("step", "skipped") if self.counts else (), ("started",) if self.marks_first else ()
        return (*counted, *self.memories, *marked)

    def optimizer(self, *, spreads_nonfinite: bool = False, elementwise: bool = False) -> Optimizer:
        """The optimizer; for the arguments see :class:`Optimizer`."""
        in_torch = None
        if self.in_torch is not None:
            in_torch = self.in_torch(name=self.name, lr=self.lr, options=self.options, memories=self.memories)
        return Optimizer(
            name=self.name,
            init=self.init,
            update=self.update,
            overwrite=self.overwrite,
            fits=self.fits,
            takes_found_inf=self.takes_found_inf,
            lr=self.lr,
            options=FrozenDict(self.options),
            spreads_nonfinite=spreads_nonfinite,
            takes_lr_scale=True,
            elementwise=elementwise,
            in_torch=in_torch,
        )

    def init(self, params: Params) -> OptState:
        result: dict[str, Any] = {}
        if self.counts:
            device = next(iter(params.values())).device if params else None
            result["step"] = torch.zeros((), dtype=torch.float32, device=device)
            result["skipped"] = FrozenDict(dict.fromkeys(params, 0))
        result |= {key: zeros_like(params) for key in self.memories}
        if self.marks_first:
            result["started"] = FrozenDict(dict.fromkeys(params, False))
        return FrozenDict(result)

    def update(
        self, grads: Grads, opt_state: OptState, params: Params, timestamp: Timestamp
    ) -> tuple[Params, OptState]:
        """The step on copies of what it writes to."""
        check_state(self.name, opt_state, self.keys)
        with torch.set_grad_enabled(False):
            copies = {key: _copied(opt_state[key]) for key in self.memories}
            if self.counts:
                copies["step"] = opt_state["step"].clone()
            return self.overwrite(grads, FrozenDict({**opt_state, **copies}), _copied(params), timestamp)

    def overwrite(
        self,
        grads: Grads,
        opt_state: OptState,
        params: Params,
        timestamp: Timestamp,
        *,
        found_inf: Tensor | None = None,
        fits: bool = False,
    ) -> tuple[Params, OptState]:
        if found_inf is not None and not self.takes_found_inf:
            raise ArgumentError(f"{self.name} with these options takes no found_inf: see Optimizer.takes_found_inf")
        options: StepOptions | None = self.fixed if type(timestamp) is Timestamp else None
        if options is None:
            options = {**options_in_step(self.options, timestamp), "lr": rate_at(self.name, self.lr, timestamp)}
        if not fits:  # else they were checked when they were seen to fit
            check_state(self.name, opt_state, self.keys)
        names = list(params)
        gradients = in_order(grads, names)
        skipped: list[int] = in_order(opt_state["skipped"], names, "skipped") if self.counts else []
        started: list[bool] = in_order(opt_state["started"], names, "started") if self.marks_first else []
        memories = [in_order(opt_state[key], names, key) for key in self.memories]
        given = lists = [list(params.values()), *memories]
        alike = (fits or are_alike(given[0], *given)) and are_alike(given[0], gradients)  # as most are
        with torch.set_grad_enabled(False):
            if not alike:
                lists, gradients = laid_out(names, given, gradients)
            # So far this rule has written to nothing, and from here on it refuses nothing.
            changed = {} if alike and not started else _noted(names, gradients, skipped, started)
            steps: list[Tensor] = []
            if self.counts:
                step = opt_state["step"].add_(1 if found_inf is None else 1 - found_inf[0])
                # Bias correction counts the steps that a parameter took part in.
                steps = [step - missed if missed else step for missed in skipped]
            for first in (False,) if all(started) else (True, False):
                chosen = gradients
                if started:
                    chosen = [g if before is not first else None for g, before in zip(gradients, started, strict=True)]
                options = {**options, "found_inf": found_inf, "first": first}
                if self.told is not None:
                    options |= self.told([p for p, grad in zip(lists[0], chosen, strict=True) if grad is not None])
                kernel = partial(self.kernel, options)
                if alike and all(started):
                    kernel(lists[0], chosen, lists[1:], steps)
                else:
                    run_in_place(kernel, lists[0], chosen, lists[1:], steps)
            for tensor, copied in zip(chain(*given), chain(*lists), strict=True) if lists is not given else ():
                if copied is not tensor:
                    tensor.copy_(copied)
        return params, FrozenDict({**opt_state, **changed}) if changed else opt_state

    def fits(self, opt_state: OptState, params: Params) -> bool:
        """Whether parameters and memories lie in memory as the kernel needs it; see :class:`Optimizer`."""
        check_state(self.name, opt_state, self.keys)
        tensors = list(params.values())
        return are_alike(tensors, tensors, *[in_order(opt_state[key], list(params), key) for key in self.memories])


def _copied(tensors: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(zip(tensors, clone_all(list(tensors.values())), strict=True))


def _noted(
    names: list[str], grads: list[Tensor | None], skipped: list[int], started: list[bool]
) -> dict[str, FrozenDict[str, Any]]:
    """What changes in the optimizer state on the host."""
    result: dict[str, FrozenDict[str, Any]] = {}
    if skipped and any(grad is None for grad in grads):
        counts = (count + (grad is None) for count, grad in zip(skipped, grads, strict=True))
        result["skipped"] = FrozenDict(zip(names, counts, strict=True))
    now = [before or grad is not None for before, grad in zip(started, grads, strict=bool(started))]
    if now != started:
        result["started"] = FrozenDict(zip(names, now, strict=True))
    return result


def decay_(params: list[Tensor], options: StepOptions) -> None:
    """Shrink the parameters by ``lr * weight_decay``, or independently of the learning rate by ``weight_decay``."""
    decay = options["weight_decay"]
    shrink_(params, decay if options["independent_decay"] else options["lr"] * decay)


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


def add_multiple(tensors: Any, added: list[Tensor], factor: Any) -> list[Tensor]:
    """``tensors + factor * added``; the factor is as that of :func:`add_multiple_`."""
    if isinstance(factor, Tensor):
        return list(torch._foreach_add(tensors, torch._foreach_mul(added, factor.to(added[0]))))
    return list(torch._foreach_add(tensors, added, alpha=factor))


def between(starts: list[Tensor], ends: Any, weight: Any) -> list[Tensor]:
    """``starts + weight * (ends - starts)``; the weight is as the factor of :func:`add_multiple_`."""
    if isinstance(weight, Tensor):
        return [start.lerp(end, weight.to(start)) for start, end in zip(starts, ends, strict=True)]
    return list(torch._foreach_lerp(starts, ends, weight))
