"""The optimizers of this library: a rule is a record, of which the kernel computes the step.

A kernel writes to lists of tensors, in the order of the parameters. ``overwrite`` lets it write to the tensors of its
arguments, and ``update`` to copies of them. A rule adds the structure of the optimizer state, schedules, and parameters
without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import clone_all
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.kernels import are_alike, check_state, in_order, laid_out
from pure_loop.optim.optimizer import (
    Grads,
    InTorch,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    as_schedule,
    fixed_rate,
    options_in_step,
    rate_at,
)
from pure_loop.ranges import Between, Range, Setting
from pure_loop.ranges.strengths import Strength
from pure_loop.time import Timestamp

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
        arguments: the hyperparameters by name, as ``{**locals()}`` has them in a function that they are given to.
        memories: keys of the optimizer state that hold one tensor like the parameter for each.
        counts: whether the optimizer state holds ``step`` and ``skipped``, and the kernel is given the number of the
            step for each parameter, of those that it took part in.
        marks_first: whether the optimizer state holds ``started``, and the kernel is called once for the parameters
            that make their first step, and once for the others.
        takes_found_inf: see :class:`Optimizer`.
        in_torch: the state as that of a class of torch.
        lr: the learning rate.
        options: the other hyperparameters, some of which may be schedules.
        fixed: all of them, where they are the same in each step; else None.
    """

    name: str
    kernel: RuleKernel
    arguments: Mapping[str, Any]
    memories: tuple[str, ...]
    counts: bool = False
    marks_first: bool = False
    takes_found_inf: bool = False
    in_torch: Callable[[Rule], InTorch] | None = None
    lr: RateFunction = attrs.field(init=False)
    options: FrozenDict[str, Any] = attrs.field(init=False)
    fixed: StepOptions | None = attrs.field(init=False)

    @lr.default
    def _lr(self) -> RateFunction:
        return as_schedule(self.name, self.arguments["lr"])

    @options.default
    def _options(self) -> FrozenDict[str, Any]:
        return FrozenDict((key, value) for key, value in self.arguments.items() if key != "lr")

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
        return Optimizer(
            name=self.name,
            init=self.init,
            update=self.update,
            overwrite=self.overwrite,
            fits=self.fits,
            takes_found_inf=self.takes_found_inf,
            lr=self.lr,
            options=self.options,
            spreads_nonfinite=spreads_nonfinite,
            takes_lr_scale=True,
            elementwise=elementwise,
            in_torch=None if self.in_torch is None else self.in_torch(self),
        )

    def init(self, params: Params) -> OptState:
        result: dict[str, Any] = {}
        if self.counts:
            device = next(iter(params.values())).device if params else None
            result["step"] = torch.zeros((), dtype=torch.float32, device=device)
            result["skipped"] = FrozenDict(dict.fromkeys(params, 0))
        for key in self.memories:
            result[key] = FrozenDict((name, torch.zeros_like(p, requires_grad=False)) for name, p in params.items())
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
        options = {**options, "found_inf": found_inf, "first": False}
        if not fits:  # else they were checked when they were seen to fit
            check_state(self.name, opt_state, self.keys)
        mappings = {"grads": grads, **opt_state}
        step, values, names = mappings.pop("step", None), list(params.values()), list(params)
        lists = in_order(mappings, names)
        gradients, memories = lists["grads"], [lists[key] for key in self.memories]
        started = lists.get("started", [])
        alike = are_alike(values, gradients, *([] if fits else [values, *memories]))
        with torch.set_grad_enabled(False):
            tensor_lists = [values, gradients, *memories] if alike else laid_out(names, values, gradients, memories)
            # So far this rule has written to nothing, and from here on it refuses nothing.
            steps: list[Tensor] = []
            if step is not None:
                step.add_(1 if found_inf is None else 1 - found_inf[0])
                # Bias correction counts the steps that a parameter took part in.
                steps = [step - missed if missed else step for missed in lists["skipped"]]
            if alike and all(started):  # as most are
                self.kernel(options, values, gradients, memories, steps)
                return params, opt_state
            self._run_by_kind(options, tensor_lists, steps, started)
            for tensor, copied in zip(chain(values, *memories), chain(tensor_lists[0], *tensor_lists[2:]), strict=True):
                if copied is not tensor:
                    tensor.copy_(copied)
        return params, _noted(opt_state, grads)

    def _run_by_kind(
        self, options: StepOptions, lists: list[list[Any]], steps: list[Tensor], started: list[bool]
    ) -> None:
        """Let the kernel write where there is a gradient, to tensors of one device and dtype at a time.

        Args:
            options: for the kernel.
            lists: parameters, gradients and memories, as :func:`laid_out` gives them.
            steps: one step count a parameter, shape (); empty for a kernel that counts nothing.
            started: whether a parameter has made its first step; empty where that makes no difference.
        """
        kinds: dict[tuple[torch.device, torch.dtype, bool], list[int]] = {}
        for index, (param, grad) in enumerate(zip(lists[0], lists[1], strict=True)):
            if grad is not None:
                first = bool(started) and not started[index]
                kinds.setdefault((param.device, param.dtype, first), []).append(index)
        for (device, dtype, first), used in kinds.items():
            tensors = [[listed[index] for index in used] for listed in lists]
            if dtype.is_complex:
                # Elementwise in the real and the imaginary part, as torch.optim treats complex parameters.
                tensors = [list(map(torch.view_as_real, listed)) for listed in tensors]
            counts = [steps[index].to(device) for index in used] if steps else []
            self.kernel({**options, "first": first}, tensors[0], tensors[1], tensors[2:], counts)

    def fits(self, opt_state: OptState, params: Params) -> bool:
        """Whether parameters and memories lie in memory as the kernel needs it; see :class:`Optimizer`."""
        check_state(self.name, opt_state, self.keys)
        values, memories = list(params.values()), {key: opt_state[key] for key in self.memories}
        return are_alike(values, values, *in_order(memories, list(params)).values())


def _copied(tensors: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    return FrozenDict(zip(tensors, clone_all(list(tensors.values())), strict=True))


def _noted(opt_state: OptState, grads: Grads) -> OptState:
    """The optimizer state with what has changed in it on the host."""
    changed: dict[str, FrozenDict[str, Any]] = {}
    used = {name: grad is not None for name, grad in grads.items()}
    if "skipped" in opt_state and not all(used.values()):
        counts = opt_state["skipped"].items()
        changed["skipped"] = FrozenDict((name, count + (not used[name])) for name, count in counts)
    if "started" in opt_state:
        started = FrozenDict((name, before or used[name]) for name, before in opt_state["started"].items())
        if started != opt_state["started"]:
            changed["started"] = started
    return FrozenDict({**opt_state, **changed}) if changed else opt_state


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


class Rate(Range):
    """A learning rate: a finite number of at least 0, or a schedule."""

    typical = (1e-3, 1e-2, 0.1)
    reads_schedules = True

    def read(self, setting: Setting, value: Any) -> RateFunction:
        return as_schedule(setting.where, value)

    def in_words(self, setting: Setting) -> str:
        return "number at least 0, or a schedule"

    def outside(self, setting: Setting) -> tuple[Any, ...]:
        return -1.0, math.nan, math.inf, "1", True, [1]


class DecayRates(Range):
    """Two numbers in [0, 1), each of which may be a schedule."""

    typical = ((0.9, 0.999), (0.8, 0.95), (0.0, 0.5))

    def read(self, setting: Setting, value: Any) -> tuple[Strength, Strength]:
        example = f"{setting.name}=(0.9, 0.999)"
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ArgumentTypeError(
                f"{setting.where}: {setting.name} must be two numbers, such as {example}, got {value!r}"
            )
        bounds = Between(0, 1, example=f"{setting.where}({example})")
        first, second = (
            attrs.evolve(setting, name=f"{setting.name}[{index}]", range=bounds, scheduled=True).read(item)
            for index, item in enumerate(value)
        )
        return first, second

    def in_words(self, setting: Setting) -> str:
        return "two numbers at least 0 and less than 1, or schedules"

    def outside(self, setting: Setting) -> tuple[Any, ...]:
        return (0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9, "ab"
