"""Operations that are taken to pieces before a compiler sees them.

List operations become single ones, which are fused; ``add`` and ``sub`` with a factor get a multiplication of their
own, because torch's compiler (2.13) forgets the factor where it merges an addition with a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pure_loop.compile.kernels import ADAM, NONFINITE

__all__ = ["decompositions", "taken_apart"]

_aten: Any = torch.ops.aten
_PREFIX = "aten::_foreach_"


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What to do instead of each of these operations."""
    table: dict[Any, Callable[..., Any]] = {
        _aten.add.Tensor: _with_factor(_aten.add.Tensor),
        _aten.sub.Tensor: _with_factor(_aten.sub.Tensor),
        _aten.addmm.default: _product_and_bias,
    }
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith(_PREFIX):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            if not name.endswith("out") and overload != "out" and not overload.endswith("_out"):
                target = getattr(getattr(_aten, name), overload or "default")
                table[target] = _looped(name.removeprefix("_foreach_"))
    return table


def _with_factor(target: Any) -> Callable[..., Any]:
    def apply(one: Any, other: Any, *, alpha: Any = 1) -> Any:
        return NotImplemented if alpha == 1 else target(one, other * alpha)

    return apply


def _product_and_bias(bias: Tensor, one: Tensor, other: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """On a CPU, apart: torch's kernel writes the bias to each row first, and apart it is added by what comes next."""
    if not (bias.is_cpu and bias.dtype is torch.float32 and beta == 1 and alpha == 1):
        return NotImplemented
    # Subtracted, because torch's compiler puts a product and an addition together again.
    return torch.mm(one, other) - (-bias)


def _looped(name: str) -> Callable[..., Any]:
    single: Any = _SINGLE.get(name) or getattr(torch.Tensor, name, None) or getattr(torch, name, None)

    def loop(*args: Any, **kwargs: Any) -> Any:
        if single is None:
            return NotImplemented
        count = max(len(each) for each in args if isinstance(each, list | tuple))

        def at(each: Any, index: int) -> Any:
            return each[index] if isinstance(each, list | tuple) else each

        results = [
            single(*[at(each, i) for each in args], **{key: at(each, i) for key, each in kwargs.items()})
            for i in range(count)
        ]
        return None if name.endswith("_") else results

    return loop


def _norm(tensor: Any, order: Any = 2, dtype: Any = None) -> Any:
    return torch.linalg.vector_norm(tensor, order, dtype=dtype)


_SINGLE: dict[str, Callable[..., Any]] = {"norm": _norm, "pow": torch.pow}


def taken_apart() -> dict[Any, Callable[..., Any]]:
    """What to do instead of an optimizer's kernel, tensor by tensor."""
    return {ADAM: adam, NONFINITE: nonfinite}


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    largest: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    which: list[int],
    name: str,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> list[Tensor]:
    """One step of Adam; ``lr`` is a float64 scalar tensor."""
    corrections = [_corrections(step, beta1, beta2, lr) for step in steps]
    shrink = 1 - lr * weight_decay
    new: list[list[Tensor]] = [[], [], [], []]
    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        size, root = corrections[which[i]]
        g = -grad if maximize else grad
        p = param
        if weight_decay and name == "adamw":
            p = p * shrink.to(p.dtype)
        elif weight_decay:
            g = g + weight_decay * p
        m = exp_avg + (g - exp_avg) * (1 - beta1)
        v = exp_avg_sq * beta2 + g * g * (1 - beta2)
        most = torch.maximum(largest[i], v) if largest else v
        denominator = most.sqrt() / root.to(v.dtype) + eps
        for found, value in zip(new, (p - size.to(p.dtype) * (m / denominator), m, v, most), strict=True):
            found.append(value)
    return [*new[0], *new[1], *new[2], *(new[3] if largest else ())]


def nonfinite(tensors: list[Tensor], zero: Tensor) -> Tensor:
    """Whether any element is NaN or infinite: 0 times it is NaN then, and sums of that stay so.

    The 0 is an input of the graph: a compiler believes that 0 times anything is 0.
    """
    total = zero
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        total = total + (real * zero.to(real.dtype)).sum().to(torch.float32)
    return torch.isnan(total)


def _corrections(step: Tensor, beta1: float, beta2: float, lr: Tensor) -> tuple[Tensor, Tensor]:
    """The size of a step, and what the root of squares is divided by.

    By exp, because a compiler computes that once and keeps it, and puts a power into each element's loop.
    """
    n = step.double()
    one = 1 - torch.exp(n * math.log(beta1)) if beta1 else torch.ones_like(n)
    two = 1 - torch.exp(n * math.log(beta2)) if beta2 else torch.ones_like(n)
    return lr / one, two.sqrt()
