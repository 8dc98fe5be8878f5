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

from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop._internal.torch_private import fused_adam, fused_adamw
from pure_loop.optim._in_torch import AdamInTorch
from pure_loop.optim._rules import DecayRates, Rate, Rule, StepOptions, shrink_
from pure_loop.optim.kernels import FUSED_DEVICES
from pure_loop.optim.optimizer import LearningRate, Optimizer
from pure_loop.ranges import AtLeast, checked
from pure_loop.ranges.strengths import Strength

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
    return _optimizer("adamw", {**locals()})


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
    return _optimizer("adam", {**locals()})


def _optimizer(name: str, arguments: dict[str, Any]) -> Optimizer:
    """The optimizer of these arguments."""
    rule = Rule(
        name=name,
        kernel=partial(_step, name),
        arguments=arguments,
        memories=("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if arguments["amsgrad"] else ())),
        counts=True,
        takes_found_inf=None not in (fused_adam, fused_adamw) and not arguments.get("independent_decay"),
        in_torch=AdamInTorch,
    )
    return rule.optimizer(spreads_nonfinite=True, elementwise=True)


def _step(
    name: str,
    options: StepOptions,
    params: list[Tensor],
    grads: list[Tensor],
    memories: list[list[Tensor]],
    steps: list[Tensor],
) -> None:
    if options.get("independent_decay"):
        shrink_(params, options["weight_decay"])
        options = {**options, "weight_decay": 0.0}
    lists = [params, grads, *memories, *([] if options["amsgrad"] else [[]])]
    fused = fused_adamw if name == "adamw" else fused_adam
    if isinstance(options["lr"], Tensor):
        _step_traced(name, options, lists, steps)
    elif fused is not None and params[0].device.type in FUSED_DEVICES:
        beta1, beta2 = options["betas"]
        chosen = {key: options[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize", "found_inf")}
        fused(*lists, steps, beta1=beta1, beta2=beta2, **chosen)
    else:
        _step_foreach(name, options, lists, steps)


def _step_foreach(name: str, options: StepOptions, lists: list[list[Tensor]], steps: list[Tensor]) -> None:
    """Adam's arithmetic for devices without the fused kernel; the step count never leaves the device."""
    params, grads, averages, squares, largest = lists
    lr, (beta1, beta2), decay = options["lr"], options["betas"], options["weight_decay"]
    directions: Any = torch._foreach_neg(grads) if options["maximize"] else grads
    if decay and name == "adamw":
        torch._foreach_mul_(params, 1 - lr * decay)
    elif decay:
        directions = torch._foreach_add(directions, params, alpha=decay)
    torch._foreach_lerp_(averages, directions, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, directions, directions, 1 - beta2)
    if largest:
        torch._foreach_maximum_(largest, squares)
    denominators = torch._foreach_sqrt(largest or squares)
    # In float32 a power of 0.999 keeps too few digits of its distance to 1 in the first steps.
    counts = [step.double() for step in steps]
    torch._foreach_div_(denominators, [(1 - beta2**n).sqrt().to(params[0]) for n in counts])
    torch._foreach_add_(denominators, options["eps"])
    torch._foreach_mul_(denominators, [(1 - beta1**n).to(params[0]) for n in counts])
    torch._foreach_addcdiv_(params, averages, denominators, -lr)


def _step_traced(name: str, options: StepOptions, lists: list[list[Tensor]], steps: list[Tensor]) -> None:
    """A step for a compiler, as one operation (see pure_loop/compile/kernels.py); ``lr`` is a float64 scalar."""
    adam_op: Any = torch.ops.pure_loop.adam.default  # defined by pure_loop/compile/kernels.py, which calls this
    lr, live = options["lr"], None
    numbers = [*options["betas"], options["weight_decay"]]
    if any(isinstance(number, Tensor) for number in numbers):  # schedules: their values are inputs of the graph
        live = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=lr.device) for number in numbers])
        numbers = [0.0, 0.0, 0.0]
    counts = list(dict.fromkeys(steps))
    place_of = {step: place for place, step in enumerate(counts)}  # to compare tensors would ask for their numbers
    which = [place_of[step] for step in steps]
    results = adam_op(*lists, counts, lr, which, name, *numbers, options["eps"], options["maximize"], live)
    params, _, *memories = lists
    for tensor, value in zip([*params, *chain(*memories)], results, strict=True):
        tensor.copy_(value)
