"""Lion: the sign of a momentum, so that every element moves by the learning rate.

With the gradient ``g`` and the decay rates ``(b1, b2) = betas``::

    u = sign(b1 m + (1 - b1) g)
    m = b2 m + (1 - b2) g                       exp_avg
    p = (1 - lr weight_decay) p - lr u

Chen et al., Symbolic Discovery of Optimization Algorithms: https://arxiv.org/abs/2302.06675, Algorithm 2.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from pure_loop.optim._rules import DecayRates, Rate, Rule, StepOptions, add_multiple_, between, decay_
from pure_loop.optim.optimizer import LearningRate, Optimizer
from pure_loop.ranges import AtLeast, checked
from pure_loop.ranges.strengths import Strength

__all__ = ["lion"]


@checked
def lion(
    lr: Annotated[LearningRate, Rate()] = 1e-4,
    betas: Annotated[tuple[Strength, Strength], DecayRates()] = (0.9, 0.99),
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.0,
    independent_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Lion, which steps by the sign of a momentum and keeps half of what Adam keeps.

    The paper recommends a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        betas: how much of the momentum is in the direction of a step, and how much of it is kept, each in [0, 1);
            numbers, or functions of the timestamp.
        weight_decay: each step multiplies the parameters by ``1 - lr * weight_decay``; a number, or a function of the
            timestamp.
        independent_decay: multiply the parameters by ``1 - weight_decay`` instead, whatever the learning rate.
        maximize: climb instead of descend.

    The state holds ``exp_avg`` (shaped like the parameters).

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> optimizer = lion(lr=0.25)
    >>> params, grads = FrozenDict(w=torch.ones(2)), FrozenDict(w=torch.tensor([4.0, -0.5]))
    >>> new, opt_state = optimizer.update(grads, optimizer.init(params), params, Timestamp())
    >>> new["w"], opt_state["exp_avg"]["w"]
    (tensor([0.7500, 1.2500]), tensor([ 0.0400, -0.0050]))
    """
    return Rule(name="lion", kernel=_step, arguments={**locals()}, memories=("exp_avg",)).optimizer(elementwise=True)


def _step(
    options: StepOptions, params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], _: list[Tensor]
) -> None:
    (averages,) = memories
    beta1, beta2 = options["betas"]
    decay_(params, options)
    gradients: Any = torch._foreach_neg(grads) if options["maximize"] else grads
    directions = between(averages, gradients, 1 - beta1)
    torch._foreach_sign_(directions)
    torch._foreach_copy_(averages, between(averages, gradients, 1 - beta2))
    add_multiple_(params, directions, -options["lr"])
