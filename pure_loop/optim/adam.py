"""Adam and AdamW.

With the gradient ``g`` at step ``t`` and the decay rates ``(b1, b2) = betas``::

    m = b1 m + (1 - b1) g                       exp_avg
    v = b2 v + (1 - b2) g g                     exp_avg_sq
    p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

``adam`` adds ``weight_decay * p`` to the gradient first (an L2 penalty, which the division rescales);
``adamw`` shrinks the parameter itself, ``p = (1 - lr weight_decay) p``, before the step, or with
``independent_decay`` ``p = (1 - weight_decay) p``. ``amsgrad`` divides by the largest ``v`` so far.

Adam: https://arxiv.org/abs/1412.6980. AdamW: https://arxiv.org/abs/1711.05101.
AMSGrad: https://openreview.net/forum?id=ryQu7f-RZ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode
from pure_loop._internal.scalars import cell_of, one_on
from pure_loop._internal.torch_private import fused_adam, fused_adamw
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._in_torch import AdamInTorch
from pure_loop.optim._rules import shrink_
from pure_loop.optim._settings import DecayRates, Rate
from pure_loop.optim.kernels import (
    FUSED_DEVICES,
    check_state,
    gradients_of,
    layout_of,
    memory_of,
    overwritable,
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
    fixed_rate,
    rate_at,
    stateless_overwrite,
    strength_in_step,
)
from pure_loop.ranges import AtLeast, checked
from pure_loop.ranges.strengths import Strength
from pure_loop.time import Timestamp

__all__ = ["adam", "adamw"]


@checked
def adamw(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    betas: Annotated[tuple[Strength, Strength], DecayRates()] = (0.9, 0.999),
    eps: Annotated[float, AtLeast(0)] = 1e-8,
    weight_decay: Annotated[Strength, AtLeast(0)] = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    independent_decay: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay, bit for bit ``torch.optim.AdamW(fused=True)``.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        betas: decay rates of the averages of the gradient and of its square, each in [0, 1); numbers, or functions of
            the timestamp. Bias correction takes the decay rates of the step.
        eps: added to the denominator.
        weight_decay: each step multiplies the parameters by ``1 - lr * weight_decay``; a number, or a function of the
            timestamp.
        amsgrad: divide by the largest average of squares so far; one more copy of the parameters in memory.
        maximize: climb instead of descend.
        independent_decay: multiply the parameters by ``1 - weight_decay`` instead, whatever the learning rate.

    The state holds ``step`` (how many updates, a float32 scalar on the parameters' device, shared by all
    of them), ``skipped`` (of how many of them a parameter had no gradient, an int for each), ``exp_avg`` and
    ``exp_avg_sq`` (shaped like the parameters), and with ``amsgrad`` ``max_exp_avg_sq``.

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> optimizer = adamw(lr=0.1, weight_decay=0.0)
    >>> params, grads = FrozenDict(w=torch.ones(2)), FrozenDict(w=torch.tensor([4.0, -4.0]))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp())
    >>> new["w"], params["w"], opt_state["step"]
    (tensor([0.9000, 1.1000]), tensor([1., 1.]), tensor(1.))
    """
    return _Adam.make("adamw", lr, betas, eps, weight_decay, amsgrad, maximize, independent_decay)


@checked
def adam(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    betas: Annotated[tuple[Strength, Strength], DecayRates()] = (0.9, 0.999),
    eps: Annotated[float, AtLeast(0)] = 1e-8,
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam, bit for bit ``torch.optim.Adam(fused=True)``; ``weight_decay`` is an L2 penalty.

    Everything else is as in :func:`adamw`.

    >>> adam(lr=3e-4, betas=(0.9, 0.95))
    adam(lr=0.0003, betas=(0.9, 0.95), eps=1e-08, weight_decay=0.0, amsgrad=False, maximize=False)
    """
    return _Adam.make("adam", lr, betas, eps, weight_decay, amsgrad, maximize)


_NUMBERS = ("beta1", "beta2", "weight_decay", "shrink")  # which may be schedules


def _kernel_of(name: str) -> Callable[..., None] | None:
    return fused_adamw if name == "adamw" else fused_adam


# To add a tensor takes half as long as to wrap a number first.
_one_on_cpu = one_on(torch.device("cpu"))


@attrs.frozen
class _Adam:
    name: str
    lr: RateFunction
    beta1: Any  # a float, or a schedule; in the rule of one step that is compiled a tensor
    beta2: Any
    eps: float
    weight_decay: Any
    amsgrad: bool
    maximize: bool
    shrink: Any  # weight decay that is independent of the learning rate
    memories: tuple[str, ...] = attrs.field(init=False)
    no_largest: tuple[list[Tensor], ...] = attrs.field(init=False)  # in the place of the third memory
    # Bound once, and where it is always the same the rate too: each call less is a microsecond or two of a step.
    fused: Callable[..., None] | None = attrs.field(init=False)
    rate: float | None = attrs.field(init=False)
    shrinks: bool = attrs.field(init=False)
    is_scheduled: bool = attrs.field(init=False)  # whether its numbers depend on the timestamp

    @memories.default
    def _memories(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    @no_largest.default
    def _no_largest(self) -> tuple[list[Tensor], ...]:
        return () if self.amsgrad else ([],)

    @fused.default
    def _fused(self) -> Callable[..., None] | None:
        kernel = _kernel_of(self.name)
        return kernel and partial(
            kernel,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )

    @rate.default
    def _rate(self) -> float | None:
        return fixed_rate(self.lr)

    @classmethod
    def make(
        cls,
        name: str,
        lr: LearningRate,
        betas: tuple[Strength, Strength],
        eps: float,
        weight_decay: Strength,
        amsgrad: bool,
        maximize: bool,
        independent_decay: bool = False,
    ) -> Optimizer:
        options = {
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        if name == "adamw":
            options["independent_decay"] = independent_decay
        decay, shrink = (0.0, weight_decay) if independent_decay else (weight_decay, 0.0)
        rule = cls(name, as_schedule(name, lr), *betas, eps, decay, amsgrad, maximize, shrink)
        return Optimizer(
            name=name,
            init=rule.init,
            update=rule.update,
            overwrite=stateless_overwrite(rule.overwrite, partial(rule.overwrite, unread=True)),
            overwrites_mappings_only=True,
            takes_found_inf=_kernel_of(name) is not None and not independent_decay,
            lr=rule.lr,
            options=FrozenDict(options),
            spreads_nonfinite=True,
            takes_lr_scale=True,
            elementwise=True,
            in_torch=AdamInTorch(
                name=name,
                lr=rule.lr,
                options={key: value for key, value in options.items() if key != "independent_decay"},
                independent_decay=independent_decay and weight_decay != 0,
                memories=rule.memories,
            ),
        )

    @shrinks.default
    def _shrinks(self) -> bool:
        return isinstance(self.shrink, Tensor) or bool(self.shrink)

    @is_scheduled.default
    def _is_scheduled(self) -> bool:
        return any(callable(getattr(self, name)) for name in _NUMBERS)

    def at(self, timestamp: Timestamp) -> _Adam:
        """The rule with the numbers of one step."""
        numbers = {name: strength_in_step(getattr(self, name), timestamp) for name in _NUMBERS}
        return attrs.evolve(self, **numbers)

    def init(self, params: Params) -> OptState:
        device = next(iter(params.values())).device if params else None
        return FrozenDict(
            {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "skipped": FrozenDict(dict.fromkeys(params, 0)),
                **{key: zeros_like(params) for key in self.memories},
            }
        )

    def update(
        self,
        grads: Grads,
        opt_state: OptState,
        params: Params,
        timestamp: Timestamp,
        *,
        overwrite: bool = False,
        found_inf: Tensor | None = None,
    ) -> tuple[Params, OptState]:
        if self.is_scheduled:
            return self.at(timestamp).update(
                grads, opt_state, params, timestamp, overwrite=overwrite, found_inf=found_inf
            )
        lr = rate_at(self.name, self.lr, timestamp)
        if not torch.is_grad_enabled():
            return self._update(grads, opt_state, params, lr, overwrite, found_inf)
        with GradMode(False):
            return self._update(grads, opt_state, params, lr, overwrite, found_inf)

    def overwrite(
        self,
        grads: Grads,
        opt_state: OptState,
        params: Params,
        timestamp: Timestamp,
        *,
        found_inf: Tensor | None = None,
        unread: bool = False,
    ) -> tuple[Params, OptState]:
        """:meth:`update`, written in place of params and memories, and of ``step`` where ``opt_state`` was not read."""
        if self.is_scheduled:
            rule = self.at(timestamp)
            return rule.overwrite(grads, opt_state, params, timestamp, found_inf=found_inf, unread=unread)
        prepared: Any = getattr(opt_state, "prepared", None) if unread and found_inf is None else None
        if prepared is not None:
            layout, lists, number = prepared
            if layout is getattr(params, "layout", None) is getattr(grads, "layout", None):
                assert self.fused is not None  # which they were prepared for
                fixed = self.rate if type(timestamp) is Timestamp else None
                lr = rate_at(self.name, self.lr, timestamp) if fixed is None else fixed
                number.value += 1.0
                self.fused(params._tensors, list(grads.values()), *lists, lr=lr)
                return params, opt_state
        ready = None
        if not torch.is_grad_enabled() and not any(opt_state["skipped"].values()):
            ready = overwritable(grads, opt_state, params, self.memories)
        if ready is None:
            return self.update(grads, opt_state, params, timestamp, overwrite=True, found_inf=found_inf)
        values, gradients, memories = ready
        fixed = self.rate if type(timestamp) is Timestamp else None
        lr = rate_at(self.name, self.lr, timestamp) if fixed is None else fixed
        step, fused = opt_state["step"], self.fused if values[0].is_cpu and not self.shrinks else None
        number = None
        if unread and type(step) is Tensor and step.is_cpu and step.dtype is torch.float32:
            number = cell_of(step)
            number.value += 1.0  # which takes a tenth of an operation's time
        else:
            one = _one_on_cpu if values[0].is_cpu else one_on(values[0].device)
            step = torch.add(step, one if found_inf is None else one - found_inf[0])
            opt_state = FrozenDict({**opt_state, "step": step})
        steps = [step] * len(values)
        if found_inf is None and fused is not None:
            lists = (*memories, *self.no_largest, steps)
            fused(values, gradients, *lists, lr=lr)
            if number is not None:
                opt_state.prepared = params.layout, lists, number
        else:
            self.kernel(lr, values, gradients, memories, steps, found_inf)
        return params, opt_state

    def _update(
        self, grads: Grads, opt_state: OptState, params: Params, lr: Any, overwrite: bool, found_inf: Tensor | None
    ) -> tuple[Params, OptState]:
        keys, names = self.memories, list(params)
        check_state(self.name, opt_state, ("step", "skipped", *keys))
        result = gradients_of(grads, names)
        memories = [memory_of(opt_state, key, names) for key in keys]
        layout = layout_of(params, [opt_state[key] for key in keys])
        counts = opt_state["skipped"]
        skipped = memory_of(opt_state, "skipped", names)
        step = opt_state["step"]
        if isinstance(lr, Tensor):  # in a trace, where a number is part of the graph
            step = step + 1
        else:
            one = one_on(step.device)
            step = torch.add(step, one if found_inf is None else one - found_inf[0])
        # Bias correction counts the updates that a parameter took part in.
        steps = [step - n if n else step for n in skipped] if any(skipped) else [step] * len(names)
        kernel = partial(self.kernel, lr, found_inf=found_inf)
        values = list(params.values())
        new, new_memories, layout = run_kernel(kernel, names, values, result, memories, steps, layout, overwrite)
        if [None for gradient in result if gradient is None]:
            more = [n + (g is None) for n, g in zip(skipped, result, strict=True)]
            counts = FrozenDict(zip(names, more, strict=True))
        if new is values:
            set_layout(layout, params, *(opt_state[key] for key in keys))
            return params, FrozenDict({**opt_state, "step": step, "skipped": counts})
        new_state = {"step": step, "skipped": counts}
        for key, memory in zip(keys, new_memories, strict=True):
            new_state[key] = with_layout(names, memory, layout)
        return with_layout(names, new, layout), FrozenDict(new_state)

    def kernel(
        self,
        lr: Any,
        params: list[Tensor],
        grads: list[Tensor],
        memories: list[list[Tensor]],
        steps: list[Tensor],
        found_inf: Tensor | None = None,
    ) -> None:
        if self.shrinks:
            shrink_(params, self.shrink)
        lists = params, grads, memories[0], memories[1], memories[2] if self.amsgrad else []
        if type(lr) is not float and isinstance(lr, Tensor):
            self.traced(lr, *lists, steps)
        elif self.fused is not None and params[0].device.type in FUSED_DEVICES:
            self.fused(*lists, steps, lr=lr, found_inf=found_inf)
        else:
            self.foreach(lr, *lists, steps)

    def foreach(
        self,
        lr: float,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """The same arithmetic for devices without the fused kernel; the step count never leaves the device."""
        gs: list[Tensor] | tuple[Tensor, ...] = torch._foreach_neg(grads) if self.maximize else grads
        if self.weight_decay and self.name == "adamw":
            torch._foreach_mul_(params, 1 - lr * self.weight_decay)
        elif self.weight_decay:
            gs = torch._foreach_add(gs, params, alpha=self.weight_decay)
        torch._foreach_lerp_(exp_avgs, gs, 1 - self.beta1)
        torch._foreach_mul_(exp_avg_sqs, self.beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gs, gs, 1 - self.beta2)
        if self.amsgrad:
            torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
        denominators = torch._foreach_sqrt(max_exp_avg_sqs if self.amsgrad else exp_avg_sqs)
        # In float32 a power of 0.999 keeps too few digits of its distance to 1 in the first steps.
        counts = [step.double() for step in steps]
        torch._foreach_div_(denominators, [(1 - self.beta2**n).sqrt().to(params[0]) for n in counts])
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_mul_(denominators, [(1 - self.beta1**n).to(params[0]) for n in counts])
        torch._foreach_addcdiv_(params, exp_avgs, denominators, -lr)

    def traced(
        self,
        lr: Any,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """The same for a compiler, as one operation (see pure_loop/compile/kernels.py); ``lr`` is a float64 scalar."""
        adam_op: Any = torch.ops.pure_loop.adam.default  # defined by pure_loop/compile/kernels.py, which calls this
        counts = list(dict.fromkeys(steps))
        place_of = {step: place for place, step in enumerate(counts)}  # to compare tensors would ask for their numbers
        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
        which = [place_of[step] for step in steps]
        numbers = [self.beta1, self.beta2, self.weight_decay]
        if any(isinstance(number, Tensor) for number in numbers):  # schedules, whose values are inputs of the graph
            live = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=lr.device) for number in numbers])
            new = adam_op(*lists, counts, lr, which, self.name, 0.0, 0.0, 0.0, self.eps, self.maximize, live)
        else:
            new = adam_op(*lists, counts, lr, which, self.name, *numbers, self.eps, self.maximize, None)
        for tensor, value in zip((*params, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs), new, strict=True):
            tensor.copy_(value)
