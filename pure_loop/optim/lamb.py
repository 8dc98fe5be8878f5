"""LAMB: Adam with a step that is, for each parameter tensor, as long as the learning rate times the tensor itself.

With the gradient ``g`` at step ``t`` and the decay rates ``(b1, b2) = betas``::

    m = b1 m + (1 - b1) g                       exp_avg
    v = b2 v + (1 - b2) g g                     exp_avg_sq
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p
    p = p - lr (norm(p) / norm(u)) u            the ratio is 1 where one of the norms is 0

You et al., Large Batch Optimization for Deep Learning: https://arxiv.org/abs/1904.00962, Algorithm 2.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop.optim._rules import DecayRates, Rate, Rule, StepOptions, add_multiple_, between, shrink_
from pure_loop.optim.optimizer import LearningRate, Optimizer
from pure_loop.ranges import AtLeast, checked
from pure_loop.ranges.strengths import Strength

__all__ = ["lamb"]


@checked
def lamb(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    betas: Annotated[tuple[Strength, Strength], DecayRates()] = (0.9, 0.999),
    eps: Annotated[float, AtLeast(0)] = 1e-6,
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.0,
    independent_decay: bool = False,
    bias_correction: bool = True,
    maximize: bool = False,
) -> Optimizer:
    """LAMB, for large batches: each parameter tensor moves by ``lr`` times its own norm.

    A norm is that of a whole tensor, so that tensors can't be updated shard by shard: ``parallel="shard"`` refuses it.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`): the length of a step
            relative to the parameter's norm.
        betas: decay rates of the averages of the gradient and of its square, each in [0, 1); numbers, or functions of
            the timestamp. Bias correction takes the decay rates of the step.
        eps: added to the denominator.
        weight_decay: ``weight_decay * param`` is added to the direction, before its norm is taken; a number, or a
            function of the timestamp.
        independent_decay: multiply the parameters by ``1 - weight_decay`` instead, before the step, whatever the
            learning rate.
        bias_correction: divide the averages by the weight of the gradients in them, as Adam does.
        maximize: climb instead of descend.

    The state holds ``step`` (how many updates, a float32 scalar on the parameters' device), ``skipped`` (of how many
    of them a parameter had no gradient, an int for each), ``exp_avg`` and ``exp_avg_sq`` (shaped like the parameters).

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> optimizer = lamb(lr=0.25, eps=0.0)
    >>> params, grads = FrozenDict(w=torch.full((2,), 4.0)), FrozenDict(w=torch.tensor([5.0, -0.1]))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp())
    >>> new["w"], opt_state["step"]
    (tensor([3., 5.]), tensor(1.))
    """
    rule = Rule(name="lamb", kernel=_step, arguments={**locals()}, memories=("exp_avg", "exp_avg_sq"), counts=True)
    return rule.optimizer(spreads_nonfinite=True)


def _step(
    options: StepOptions, params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], steps: list[Tensor]
) -> None:
    averages, squares = memories
    (beta1, beta2), decay = options["betas"], options["weight_decay"]
    gradients: Any = torch._foreach_neg(grads) if options["maximize"] else grads
    torch._foreach_copy_(averages, between(averages, gradients, 1 - beta1))
    torch._foreach_copy_(squares, between(squares, torch._foreach_mul(gradients, gradients), 1 - beta2))
    denominators: Any = torch._foreach_sqrt(squares)
    directions: Any = averages
    if options["bias_correction"]:
        # In float32 a power of 0.999 keeps too few digits of its distance to 1 in the first steps.
        counts = [step.double() for step in steps]
        denominators = torch._foreach_div(denominators, [(1 - beta2**n).sqrt().to(params[0]) for n in counts])
        directions = torch._foreach_div(averages, [(1 - beta1**n).to(params[0]) for n in counts])
    torch._foreach_add_(denominators, options["eps"])
    directions = torch._foreach_div(directions, denominators)
    if options["independent_decay"]:
        shrink_(params, decay)
    elif isinstance(decay, Tensor) or decay:
        add_multiple_(directions, params, decay)
    # Norms of half-precision tensors are numbers that half precision rounds, and may overflow.
    wide = None if params[0].dtype is torch.float64 else torch.float32
    lengths = torch._foreach_norm(params, 2, wide)
    ratios = [
        torch.where((length > 0) & (own > 0), length / own, 1.0).to(params[0])
        for length, own in zip(lengths, torch._foreach_norm(directions, 2, wide), strict=True)
    ]
    add_multiple_(params, torch._foreach_mul(directions, ratios), -options["lr"])
