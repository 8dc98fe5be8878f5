"""Stochastic gradient descent with momentum.

With the gradient ``g`` (and ``weight_decay * p`` added to it)::

    b = momentum b + (1 - dampening) g          momentum_buffer; b = g at the first step
    p = p - lr b                                p = p - lr (g + momentum b) with nesterov

With ``independent_decay`` ``weight_decay * p`` is not added, and ``p = (1 - weight_decay) p`` precedes the step.

A buffer that starts as zeros makes ``b = g`` at the first step by itself, unless ``dampening`` scales
the gradient; only then does the state remember which parameters have made their first step.

Nesterov's momentum in this form: http://www.cs.toronto.edu/~hinton/absps/momentum.pdf.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode
from pure_loop._internal.torch_private import fused_sgd
from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim._in_torch import SGDInTorch
from pure_loop.optim._rules import shrink_
from pure_loop.optim._settings import Rate
from pure_loop.optim.kernels import (
    FUSED_DEVICES,
    Kernel,
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
from pure_loop.ranges import AtLeast, Between, checked
from pure_loop.ranges.strengths import Strength
from pure_loop.time import Timestamp

__all__ = ["sgd"]


@checked
def sgd(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    momentum: Annotated[Strength, Between(0, 1)] = 0.0,
    dampening: Annotated[float, Between(0, 1)] = 0.0,
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    independent_decay: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, equal in every step to ``torch.optim.SGD(fused=True)``.

    Half-precision parameters on a CPU are those of ``SGD(foreach=True)``: there torch's fused kernel is wrong.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        momentum: how much of the last step's direction stays in this one, in [0, 1); a number, or a function of the
            timestamp.
        dampening: how much of the gradient is kept out of the direction, from a parameter's second step on, in [0, 1).
        weight_decay: an L2 penalty, ``weight_decay * param`` added to the gradient; a number, or a function of the
            timestamp.
        nesterov: look ahead along the direction; needs ``momentum`` and no ``dampening``.
        maximize: climb instead of descend.
        independent_decay: no penalty: each step multiplies the parameters by ``1 - weight_decay`` first, whatever the
            learning rate.

    The state is empty without momentum. With it, it holds ``momentum_buffer`` (shaped like the parameters),
    and with ``dampening`` also ``started`` (a bool for each).

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.schedules import linear
    >>> from pure_loop.time import Timestamp
    >>> optimizer = sgd(lr=linear(1.0, 0.0, "4ba"))
    >>> params, grads = FrozenDict(w=torch.zeros(1)), FrozenDict(w=torch.ones(1))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp(batch=3))
    >>> new["w"], opt_state
    (tensor([-0.2500]), FrozenDict({}))
    """
    if nesterov and (momentum == 0 or dampening != 0):
        raise ArgumentError(
            f"sgd: nesterov needs a momentum and no dampening, got momentum={momentum}, dampening={dampening}; "
            "write sgd(lr, momentum=0.9, nesterov=True)"
        )
    rule = _SGD(
        lr=as_schedule("sgd", lr),
        momentum=momentum,
        dampening=dampening,
        weight_decay=0.0 if independent_decay else weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        has_buffers=momentum != 0,
        shrink=weight_decay if independent_decay else 0.0,
    )
    options = {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
        "independent_decay": independent_decay,
    }
    return Optimizer(
        name="sgd",
        init=rule.init,
        update=rule.update,
        overwrite=stateless_overwrite(partial(rule.update, overwrite=True)),
        overwrites_mappings_only=True,
        # Damping notes on the host which averages have begun.
        takes_found_inf=not rule.dampening and not independent_decay,
        lr=rule.lr,
        options=FrozenDict(options),
        spreads_nonfinite=True,
        takes_lr_scale=True,
        elementwise=True,
        in_torch=SGDInTorch(
            name="sgd",
            lr=rule.lr,
            options={key: value for key, value in options.items() if key != "independent_decay"},
            independent_decay=independent_decay and weight_decay != 0,
            memories=rule.memories,
        ),
    )


_NUMBERS = ("momentum", "weight_decay", "shrink")  # which may be schedules


@attrs.frozen
class _SGD:
    lr: RateFunction
    momentum: Any  # a float, or a schedule; in the rule of one step that is compiled a tensor
    dampening: float
    weight_decay: Any
    nesterov: bool
    maximize: bool
    has_buffers: bool
    shrink: Any  # weight decay that is independent of the learning rate

    @property
    def memories(self) -> tuple[str, ...]:
        if not self.has_buffers:
            return ()
        return ("momentum_buffer", "started") if self.dampening else ("momentum_buffer",)

    def init(self, params: Params) -> OptState:
        opt_state = {"momentum_buffer": zeros_like(params), "started": FrozenDict(dict.fromkeys(params, False))}
        return FrozenDict({key: opt_state[key] for key in self.memories})

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
        rule = self.at(timestamp) if any(callable(getattr(self, name)) for name in _NUMBERS) else self
        with GradMode(False):
            return rule._update(grads, opt_state, params, rate_at("sgd", self.lr, timestamp), overwrite, found_inf)

    def at(self, timestamp: Timestamp) -> _SGD:
        """The rule with the numbers of one step."""
        numbers = {name: strength_in_step(getattr(self, name), timestamp) for name in _NUMBERS}
        return attrs.evolve(self, **numbers)

    def _update(
        self, grads: Grads, opt_state: OptState, params: Params, lr: Any, overwrite: bool, found_inf: Tensor | None
    ) -> tuple[Params, OptState]:
        check_state("sgd", opt_state, self.memories)
        names, values = list(params), list(params.values())
        gradients = gradients_of(grads, names)
        buffers = [memory_of(opt_state, "momentum_buffer", names)] if self.has_buffers else []
        layout = layout_of(params, [opt_state["momentum_buffer"]] if self.has_buffers else [])
        new_state = dict(opt_state)
        if self.dampening and self.has_buffers:
            started = memory_of(opt_state, "started", names)
            if not all(started):
                first = [None if old else g for old, g in zip(started, gradients, strict=True)]
                gradients = [g if old else None for old, g in zip(started, gradients, strict=True)]
                layout = None
                values, buffers, _ = run_kernel(self.kernel(lr, first=True), names, values, first, buffers, [])
                now = [old or g is not None for old, g in zip(started, first, strict=True)]
                new_state["started"] = FrozenDict(zip(names, now, strict=True))
        value = values
        kernel = self.kernel(lr, found_inf=found_inf)
        values, buffers, layout = run_kernel(kernel, names, values, gradients, buffers, [], layout, overwrite)
        if overwrite and values is value and layout is not None:
            set_layout(layout, params, *([opt_state["momentum_buffer"]] if self.has_buffers else []))
            return params, FrozenDict(new_state)
        if self.has_buffers:
            new_state["momentum_buffer"] = with_layout(names, buffers[0], layout)
        return with_layout(names, values, layout), FrozenDict(new_state)

    def kernel(self, lr: Any, first: bool = False, found_inf: Tensor | None = None) -> Kernel:
        def run(params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], _: list[Tensor]) -> None:
            buffers = memories[0] if memories else []
            shrink_(params, self.shrink)
            # Without momentum the kernel leaves buffers as they are.
            writes_buffers = not self.has_buffers or self.momentum
            if fused_sgd is not None and not isinstance(lr, Tensor) and writes_buffers and _fused_serves(params):
                fused_sgd(
                    params,
                    grads,
                    buffers,
                    weight_decay=self.weight_decay,
                    momentum=self.momentum,
                    lr=lr,
                    dampening=self.dampening,
                    nesterov=self.nesterov,
                    maximize=self.maximize,
                    is_first_step=first,
                    found_inf=found_inf,
                )
            else:
                self.foreach(lr, params, grads, buffers, first)

        return run

    def foreach(self, lr: Any, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], first: bool) -> None:
        """The same arithmetic for devices without the fused kernel."""
        directions: Any = torch._foreach_neg(grads) if self.maximize else grads
        if isinstance(self.weight_decay, Tensor) or self.weight_decay:
            directions = _add_multiple(directions, params, self.weight_decay)
        if self.has_buffers:
            momentum = self.momentum
            torch._foreach_mul_(buffers, momentum.to(params[0]) if isinstance(momentum, Tensor) else momentum)
            torch._foreach_add_(buffers, directions, alpha=1.0 if first else 1 - self.dampening)
            directions = _add_multiple(directions, buffers, momentum) if self.nesterov else buffers
        if isinstance(lr, Tensor):  # of a step that is being compiled
            torch._foreach_sub_(params, torch._foreach_mul(directions, lr.to(params[0])))
        else:
            torch._foreach_add_(params, directions, alpha=-lr)


def _add_multiple(tensors: Any, added: list[Tensor], factor: Any) -> Any:
    """``tensors + factor * added``; the factor is a float, or of a compiled step a float64 tensor of shape ()."""
    if isinstance(factor, Tensor):
        return torch._foreach_add(tensors, torch._foreach_mul(added, factor.to(added[0])))
    return torch._foreach_add(tensors, added, alpha=factor)


def _fused_serves(params: list[Tensor]) -> bool:
    """Whether the fused kernel can be trusted with these.

    On a CPU that of torch 2.13 leaves whole blocks of 16 elements of half-precision parameters as they are.
    """
    first = params[0]
    if first.is_cpu and any(param.dtype in (torch.bfloat16, torch.float16) for param in params):
        return False
    return first.device.type in FUSED_DEVICES
