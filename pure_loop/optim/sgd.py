"""Stochastic gradient descent with momentum.

With the gradient ``g`` (and ``weight_decay * p`` added to it)::

    b = momentum b + (1 - dampening) g          momentum_buffer; b = g at the first step
    p = p - lr b                                p = p - lr (g + momentum b) with nesterov

A buffer that starts as zeros makes ``b = g`` at the first step by itself, unless ``dampening`` scales
the gradient; only then does the state remember which parameters have made their first step.

Nesterov's momentum in this form: http://www.cs.toronto.edu/~hinton/absps/momentum.pdf.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from pure_loop._autograd import GradMode
from pure_loop._calls import teaching
from pure_loop._internal.torch_private import fused_sgd
from pure_loop.errors import ArgumentError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import (
    FUSED_DEVICES,
    Grads,
    Kernel,
    LearningRate,
    Optimizer,
    OptState,
    Params,
    RateFunction,
    as_schedule,
    check_flag,
    check_number,
    check_state,
    gradients_of,
    keeps_nothing,
    laid_out,
    layout_of,
    memory_of,
    note_layout,
    rate_at,
    run_kernel,
    zeros_like,
)

if TYPE_CHECKING:
    from pure_loop.time import Timestamp

__all__ = ["sgd"]


@teaching
def sgd(
    lr: LearningRate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, equal in every step to ``torch.optim.SGD(fused=True)``.

    Half-precision parameters on a CPU are those of ``SGD(foreach=True)``: there torch's fused kernel is wrong.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        momentum: how much of the last step's direction stays in this one, in [0, 1).
        dampening: how much of the gradient is kept out of the direction, from a parameter's second step on, in [0, 1).
        weight_decay: an L2 penalty, ``weight_decay * param`` added to the gradient.
        nesterov: look ahead along the direction; needs ``momentum`` and no ``dampening``.
        maximize: climb instead of descend.

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
    >>> optimizer.update(grads, optimizer.init(params), params, Timestamp(batch=3))
    (FrozenDict({'w': tensor([-0.2500])}), FrozenDict({}))
    """
    momentum = check_number("sgd", "momentum", momentum, below=1.0)
    dampening = check_number("sgd", "dampening", dampening, below=1.0)
    if check_flag("sgd", "nesterov", nesterov) and (momentum == 0 or dampening != 0):
        raise ArgumentError(
            f"sgd: nesterov needs a momentum and no dampening, got momentum={momentum}, dampening={dampening}; "
            "write sgd(lr, momentum=0.9, nesterov=True)"
        )
    rule = _SGD(
        lr=as_schedule("sgd", lr),
        momentum=momentum,
        dampening=dampening,
        weight_decay=check_number("sgd", "weight_decay", weight_decay),
        nesterov=nesterov,
        maximize=check_flag("sgd", "maximize", maximize),
    )
    options = FrozenDict(attrs.asdict(rule, filter=attrs.filters.exclude("lr")))
    return Optimizer(
        name="sgd",
        init=rule.init,
        update=rule.update,
        overwrite=keeps_nothing(partial(rule.update, overwrite=True)),
        overwrites_mappings_only=True,
        takes_found_inf=not rule.dampening,  # else it notes on the host which averages have begun
        lr=rule.lr,
        options=options,
        spreads_nonfinite=True,
        elementwise=True,
    )


@attrs.frozen
class _SGD:
    lr: RateFunction
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool

    @property
    def memories(self) -> tuple[str, ...]:
        if not self.momentum:
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
        with GradMode(False):
            return self._update(grads, opt_state, params, rate_at("sgd", self.lr, timestamp), overwrite, found_inf)

    def _update(
        self, grads: Grads, opt_state: OptState, params: Params, lr: Any, overwrite: bool, found_inf: Tensor | None
    ) -> tuple[Params, OptState]:
        check_state("sgd", opt_state, self.memories)
        names, values = list(params), list(params.values())
        gradients = gradients_of(grads, names)
        buffers = [memory_of(opt_state, "momentum_buffer", names)] if self.momentum else []
        layout = layout_of(params, [opt_state["momentum_buffer"]] if self.momentum else [])
        new_state = dict(opt_state)
        if self.dampening and self.momentum:
            started = memory_of(opt_state, "started", names)
            if not all(started):
                first = [None if old else g for old, g in zip(started, gradients, strict=True)]
                gradients = [g if old else None for old, g in zip(started, gradients, strict=True)]
                layout = None
                values, buffers, _ = run_kernel(self.kernel(lr, first=True), names, values, first, buffers, [])
                now = [old or g is not None for old, g in zip(started, first, strict=True)]
                new_state["started"] = FrozenDict(zip(names, now, strict=True))
        given = values
        kernel = self.kernel(lr, found_inf=found_inf)
        values, buffers, layout = run_kernel(kernel, names, values, gradients, buffers, [], layout, overwrite)
        if overwrite and values is given and layout is not None:
            note_layout(layout, params, *([opt_state["momentum_buffer"]] if self.momentum else []))
            return params, FrozenDict(new_state)
        if self.momentum:
            new_state["momentum_buffer"] = laid_out(names, buffers[0], layout)
        return laid_out(names, values, layout), FrozenDict(new_state)

    def kernel(self, lr: Any, first: bool = False, found_inf: Tensor | None = None) -> Kernel:
        def run(params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], _: list[Tensor]) -> None:
            buffers = memories[0] if memories else []
            if fused_sgd is not None and not isinstance(lr, Tensor) and _fused_serves(params):
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
        directions: list[Tensor] | tuple[Tensor, ...] = torch._foreach_neg(grads) if self.maximize else grads
        if self.weight_decay:
            directions = torch._foreach_add(directions, params, alpha=self.weight_decay)
        if self.momentum:
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, directions, alpha=1.0 if first else 1 - self.dampening)
            directions = torch._foreach_add(directions, buffers, alpha=self.momentum) if self.nesterov else buffers
        if isinstance(lr, Tensor):  # of a step that is being compiled
            torch._foreach_sub_(params, torch._foreach_mul(directions, lr.to(params[0])))
        else:
            torch._foreach_add_(params, directions, alpha=-lr)


def _fused_serves(params: list[Tensor]) -> bool:
    """Whether the fused kernel can be trusted with these.

    On a CPU that of torch 2.13 leaves whole blocks of 16 elements of half-precision parameters as they are.
    """
    first = params[0]
    if first.is_cpu and any(param.dtype in (torch.bfloat16, torch.float16) for param in params):
        return False
    return first.device.type in FUSED_DEVICES
