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

from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import fused_sgd
from pure_loop.errors import ArgumentError
from pure_loop.optim._in_torch import SGDInTorch
from pure_loop.optim._rules import Rate, Rule, StepOptions, add_multiple, add_multiple_, shrink_
from pure_loop.optim.kernels import FUSED_DEVICES
from pure_loop.optim.optimizer import LearningRate, Optimizer
from pure_loop.ranges import AtLeast, Between, checked
from pure_loop.ranges.strengths import Strength

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
    rule = Rule(
        name="sgd",
        kernel=_step,
        arguments={**locals()},
        memories=("momentum_buffer",) if momentum != 0 else (),
        marks_first=momentum != 0 and dampening != 0,
        # What the fused kernel does alone; with dampening it is noted on the host which averages have begun.
        takes_found_inf=fused_sgd is not None and not (dampening or independent_decay or callable(momentum)),
        in_torch=SGDInTorch,
    )
    return rule.optimizer(spreads_nonfinite=True, elementwise=True)


def _is_fused(param: Tensor) -> bool:
    """Whether torch's fused kernel serves parameters of this device and real dtype.

    On a CPU that of torch 2.13 leaves whole blocks of 16 elements of half-precision parameters as they are.
    """
    half = param.is_cpu and param.dtype in (torch.bfloat16, torch.float16)
    return fused_sgd is not None and param.device.type in FUSED_DEVICES and not half


def _step(
    options: StepOptions, params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], _: list[Tensor]
) -> None:
    buffers = memories[0] if memories else []
    lr, momentum, decay = options["lr"], options["momentum"], options["weight_decay"]
    if options["independent_decay"]:
        shrink_(params, decay)
        decay = 0.0
    # Without momentum the fused kernel leaves buffers as they are.
    if _is_fused(params[0]) and not isinstance(lr, Tensor) and (momentum or not buffers):
        chosen = {key: options[key] for key in ("lr", "momentum", "dampening", "nesterov", "maximize", "found_inf")}
        fused_sgd(params, grads, buffers, weight_decay=decay, is_first_step=options["first"], **chosen)  # type: ignore[misc]
        return
    directions: Any = torch._foreach_neg(grads) if options["maximize"] else grads
    if isinstance(decay, Tensor) or decay:
        directions = add_multiple(directions, params, decay)
    if buffers:
        torch._foreach_mul_(buffers, momentum.to(params[0]) if isinstance(momentum, Tensor) else momentum)
        torch._foreach_add_(buffers, directions, alpha=1.0 if options["first"] else 1 - options["dampening"])
        directions = add_multiple(directions, buffers, momentum) if options["nesterov"] else buffers
    add_multiple_(params, directions, -lr)
