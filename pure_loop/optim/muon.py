"""Muon: momentum with steps that are orthogonal matrices, for the weight matrices of hidden layers.

With the gradient ``g`` of a matrix of shape (rows, columns)::

    b = momentum b + (1 - momentum) g           momentum_buffer
    o = orthogonal(b)                           of (1 - momentum) g + momentum b with nesterov
    p = (1 - lr weight_decay) p - lr ratio o

``orthogonal`` is five steps of a Newton-Schulz iteration in bfloat16, which brings all singular values near 1.
``ratio`` is ``sqrt(max(1, rows / columns))``, or ``0.2 sqrt(max(rows, columns))`` for steps as large as AdamW's.

Jordan et al.: https://kellerjordan.github.io/posts/muon/. The second ratio: https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Literal

import attrs
import torch
from torch import Tensor

from pure_loop.errors import ArgumentError
from pure_loop.optim._in_torch import MuonInTorch
from pure_loop.optim._rules import Rate, Rule, StepOptions, add_multiple_, between, decay_
from pure_loop.optim.optimizer import LearningRate, Optimizer, OptState, Params
from pure_loop.ranges import AtLeast, Between, OneOf, checked
from pure_loop.ranges.strengths import Strength

__all__ = ["muon"]

# The iteration is a x + b (x x') x + c (x x')^2 x; of these numbers the slope at 0 is the largest.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


@checked
def muon(
    lr: Annotated[LearningRate, Rate()] = 1e-3,
    momentum: Annotated[Strength, Between(0, 1)] = 0.95,
    weight_decay: Annotated[Strength, AtLeast(0)] = 0.1,
    independent_decay: bool = False,
    nesterov: bool = True,
    eps: Annotated[float, AtLeast(0)] = 1e-7,
    adjust_lr: Annotated[Literal["original", "match_rms_adamw"], OneOf("original", "match_rms_adamw")] = "original",
) -> Optimizer:
    """Muon, equal in every step to ``torch.optim.Muon``; unlike that class it can be compiled.

    It takes matrices alone. Give it the weights of hidden layers, and all other parameters (embeddings, the last layer,
    biases) to another optimizer, with :func:`partition`. Directions are those of whole matrices, so that these can't be
    updated shard by shard: ``parallel="shard"`` refuses it.

    Args:
        lr: the learning rate, or a function of the timestamp (see :mod:`pure_loop.schedules`).
        momentum: how much of the average of gradients is kept, in [0, 1); a number, or a function of the timestamp.
        weight_decay: each step multiplies the parameters by ``1 - lr * weight_decay``; a number, or a function of the
            timestamp.
        independent_decay: multiply the parameters by ``1 - weight_decay`` instead, whatever the learning rate.
        nesterov: look ahead along the direction.
        eps: the least norm by which a direction is divided.
        adjust_lr: by what the learning rate is multiplied: "original", ``sqrt(max(1, rows / columns))``, or
            "match_rms_adamw", ``0.2 * sqrt(max(rows, columns))``, with which learning rates of AdamW serve.

    The state holds ``momentum_buffer`` (shaped like the parameters).

    Raises:
        ArgumentError: (a ValueError) for a hyperparameter out of range, here or by the schedule in ``update``, and by
            ``init`` for a parameter that is no matrix of real numbers.
        ResumeError: (a ValueError) by ``update``, for the state of another model or optimizer.

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.optim import adamw, partition
    >>> optimizer = partition(
    ...     {"hidden": muon(lr=0.02), "others": adamw(lr=1e-3)},
    ...     label=lambda name, tensor: "hidden" if tensor.ndim == 2 and not name.startswith("head.") else "others",
    ... )
    >>> params = FrozenDict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2), "head.weight": torch.ones(3, 2)})
    >>> list(optimizer.init(params)["hidden"]["momentum_buffer"])
    ['0.weight']
    """
    rule = Rule(name="muon", kernel=_step, arguments={**locals()}, memories=("momentum_buffer",), in_torch=MuonInTorch)
    return attrs.evolve(rule.optimizer(spreads_nonfinite=True), init=partial(_init, rule))


def _init(rule: Rule, params: Params) -> OptState:
    for name, param in params.items():
        if param.ndim != 2 or param.is_complex():
            raise ArgumentError(
                f"muon takes matrices of real numbers, and parameter {name!r} has shape {tuple(param.shape)} and dtype "
                f"{param.dtype}: write pl.optim.partition({{'hidden': pl.optim.muon(lr=0.02), 'others': "
                "pl.optim.adamw(lr=1e-3)}, label=lambda name, tensor: 'hidden' if tensor.ndim == 2 else 'others')"
            )
    return rule.init(params)


def _step(
    options: StepOptions, params: list[Tensor], grads: list[Tensor], memories: list[list[Tensor]], _: list[Tensor]
) -> None:
    (buffers,) = memories
    momentum, lr = options["momentum"], options["lr"]
    torch._foreach_copy_(buffers, between(buffers, grads, 1 - momentum))
    directions: list[Tensor] = between(grads, buffers, momentum) if options["nesterov"] else buffers
    decay_(params, options)
    for param, direction in zip(params, directions, strict=True):
        rows, columns = param.shape
        if not param.numel():
            continue
        original = options["adjust_lr"] == "original"
        ratio = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        step = _orthogonal(direction, options["eps"]).to(param)
        add_multiple_([param], [step], -(lr * ratio))


def _orthogonal(matrix: Tensor, eps: float) -> Tensor:
    """A matrix with the singular vectors of this one and singular values near 1, in bfloat16."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=eps)  # no singular value is above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if is_tall else x
