"""Operations that are traced as others: a compiler sees those.

List operations become single ones, which are fused; ``add`` and ``sub`` with a factor get a multiplication of their
own, because torch's compiler (2.13) forgets the factor where it merges an addition with a matrix product.

Attention that drops out goes by torch's plain operations: a kernel of a GPU draws its mask itself, which would be
another one in each replay of a graph, or the same, and in no case that of the step.

A tensor that is made of a number of the step, ``torch.tensor(state.timestamp.batch)``, is an input of the graph.
Functions of Python's ``math`` read the number instead (``__float__``), which leaves a guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from pure_loop.compile._torch import Decompositions, Function, Options
from pure_loop.compile.kernels import ADAM, NONFINITE
from pure_loop.compile.numbers import Number, decided, stands_for_elements

__all__ = ["Constructors", "DrawnApart", "declared", "decompositions", "taken_apart"]

_aten = torch.ops.aten


@cache
def decompositions() -> Decompositions:
    """What to do instead of each of these operations."""
    table: Decompositions = {
        _aten.add.Tensor: _with_factor(_aten.add.Tensor),
        _aten.sub.Tensor: _with_factor(_aten.sub.Tensor),
        _aten.addmm.default: _product_and_bias,
    }
    in_torch = [name for name in dir(torch) if name.startswith("_foreach_")]
    # What writes has a form that doesn't, which may have no place in torch itself.
    for name in sorted({*in_torch, *[name.removesuffix("_") for name in in_torch]}):
        packet = getattr(_aten, name, None)
        for overload in () if packet is None else packet.overloads():
            if overload != "out" and not overload.endswith("_out"):
                table[getattr(packet, overload)] = _looped(name.removeprefix("_foreach_"))
    return table


def declared() -> Decompositions:
    """What to trace instead of operations that write without saying so in their schema.

    torch's own dispatcher in Python does that before they are traced; this is for a torch that has it elsewhere.
    """
    return {
        _aten.native_batch_norm.default: _batch_norm,
        _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
        _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    }


def _batch_norm(
    images: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    *options: object,
) -> tuple[Tensor, ...]:
    if mean is None:
        result: tuple[Tensor, ...] = _aten._native_batch_norm_legit.no_stats(images, weight, bias, *options)
    else:
        result = _aten._native_batch_norm_legit.default(images, weight, bias, mean, var, *options)
    return result


def _cudnn_batch_norm(
    images: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *options: object
) -> tuple[Tensor, ...]:
    return *_batch_norm(images, weight, bias, mean, var, *options), images.new_empty((0,), dtype=torch.uint8)


def _cudnn_batch_norm_backward(
    images: Tensor, grad: Tensor, weight: Tensor, *rest: Tensor | float | None
) -> tuple[Tensor | None, ...]:
    mean, var, save_mean, save_var, eps, _ = rest
    saved = (save_mean, save_var, True, eps, [True, True, True])
    result: tuple[Tensor | None, ...] = _aten.native_batch_norm_backward.default(
        grad, images, weight, mean, var, *saved
    )
    return result


def _with_factor(target: Function) -> Function:
    def apply(left: Tensor, right: Tensor, *, alpha: float = 1) -> object:
        return NotImplemented if alpha == 1 else target(left, right * alpha)

    return apply


def _product_and_bias(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> object:
    """On a CPU, apart: torch's kernel writes the bias to each row first, and apart it is added by what comes next."""
    if not (bias.is_cpu and bias.dtype is torch.float32 and beta == 1 and alpha == 1):
        return NotImplemented
    # Subtracted, because torch's compiler puts a product and an addition together again.
    return torch.mm(left, right) - (-bias)


def _looped(name: str) -> Function:
    single: Function | None = _SINGLE.get(name) or getattr(torch.Tensor, name, None) or getattr(torch, name, None)

    def loop(*args: object, **kwargs: object) -> object:
        if single is None:
            return NotImplemented
        count = max(len(item) for item in args if isinstance(item, list | tuple))

        def at(argument: object, index: int) -> object:
            return argument[index] if isinstance(argument, list | tuple) else argument

        results = [
            single(*[at(item, i) for item in args], **{key: at(item, i) for key, item in kwargs.items()})
            for i in range(count)
        ]
        return None if name.endswith("_") else results

    return loop


def _norm(tensor: Tensor, order: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(tensor, order, dtype=dtype)
    return result


_SINGLE: dict[str, Function] = {"norm": _norm, "pow": torch.pow}


def taken_apart() -> Decompositions:
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
    beta1: float | Tensor,
    beta2: float | Tensor,
    weight_decay: float | Tensor,
    eps: float,
    maximize: bool,
    live: Tensor | None = None,
) -> list[Tensor]:
    """One step of Adam; ``lr`` is a float64 scalar tensor, and ``live`` as in :mod:`pure_loop.compile.kernels`."""
    if live is not None:
        beta1, beta2, weight_decay = live.unbind()
    corrections = [_corrections(step, beta1, beta2, lr) for step in steps]
    shrink = 1 - lr * weight_decay
    results: list[list[Tensor]] = [[], [], [], []]
    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        size, root = corrections[which[i]]
        g = -grad if maximize else grad
        p = param
        decays = live is not None or weight_decay
        if decays and name == "adamw":
            p = p * shrink.to(p.dtype)
        elif decays:
            g = g + weight_decay * p
        m = exp_avg + (g - exp_avg) * (1 - beta1)
        v = exp_avg_sq * beta2 + g * g * (1 - beta2)
        most = torch.maximum(largest[i], v) if largest else v
        denominator = most.sqrt() / root.to(v.dtype) + eps
        for result, value in zip(results, (p - size.to(p.dtype) * (m / denominator), m, v, most), strict=True):
            result.append(value)
    return [*results[0], *results[1], *results[2], *(results[3] if largest else ())]


def nonfinite(tensors: list[Tensor], zero: Tensor) -> Tensor:
    """Whether any element is NaN or infinite: 0 times it is NaN then, and sums of that stay so.

    The 0 is an input of the graph: a compiler believes that 0 times anything is 0.
    """
    total = zero
    for tensor in tensors:
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        total = total + (real * zero.to(real.dtype)).sum().to(torch.float32)
    return torch.isnan(total)


def _corrections(step: Tensor, beta1: float | Tensor, beta2: float | Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
    """The size of a step, and what the root of squares is divided by.

    By exp, because a compiler computes that once and keeps it, and puts a power into each element's loop.
    """
    n = step.double()
    first, second = (1 - _power(beta, n) for beta in (beta1, beta2))
    return lr / first, second.sqrt()


def _power(beta: float | Tensor, n: Tensor) -> Tensor:
    if isinstance(beta, Tensor):
        return torch.exp(n * beta.log())
    return torch.exp(n * math.log(beta)) if beta else torch.zeros_like(n)


_SIGNATURE = signature(multi_head_attention_forward)


class DrawnApart(TorchFunctionMode):
    """Inside, attention with dropout is no kernel of its own; without, it is what it was."""

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:
            # The fifth argument.
            drops_out = bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        elif function is multi_head_attention_forward:  # and what that calls is not asked for again
            value = _SIGNATURE.bind(*args, **kwargs)
            value.apply_defaults()
            drops_out = bool(value.arguments["dropout_p"]) and value.arguments["training"]
        else:
            drops_out = False
        if not drops_out:
            return function(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)


class Constructors(TorchFunctionMode):
    """New tensors of numbers of the step."""

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        kwargs, result = kwargs or {}, None
        if function in _FILLED:
            result = _filled(function, list(args), dict(kwargs))
        elif function in _OF_DATA:
            result = _of_data(function, list(args), dict(kwargs))
        elif not isinstance(function, FunctionType) and not stands_for_elements(function):
            # A size, or a dimension; what torch has in C++ takes nothing that stands for a number there.
            args, kwargs = decided(tuple(args)), decided(dict(kwargs))
        return function(*args, **kwargs) if result is None else result


# At which place each of them takes the number, and under which name.
_FILLED: dict[Function, tuple[int, str]] = {
    torch.full: (1, "fill_value"),
    torch.full_like: (1, "fill_value"),
    Tensor.new_full: (2, "fill_value"),
    torch.scalar_tensor: (0, "s"),
}
_OF_DATA: dict[Function, tuple[int, str]] = {
    torch.tensor: (0, "data"),
    torch.as_tensor: (0, "data"),
    torch.asarray: (0, "obj"),
    Tensor.new_tensor: (1, "data"),
}


def _filled(function: Function, args: list[object], kwargs: Options) -> Tensor | None:
    position, name = _FILLED[function]
    by_place = len(args) > position
    number = args[position] if by_place else kwargs.get(name)
    if not isinstance(number, Number) or "out" in kwargs:
        return None
    number.kind()
    if by_place:
        args[position] = number.value
    else:
        kwargs[name] = number.value
    requires_grad = bool(kwargs.pop("requires_grad", False))
    result: Tensor = function(*decided(args), **decided(kwargs))
    return _leaf(result.fill_(_converted(number, result.dtype, result.device)), requires_grad)


def _of_data(function: Function, args: list[Any], kwargs: Options) -> Tensor | None:
    position, name = _OF_DATA[function]
    result = _leaves(args[position] if len(args) > position else kwargs.get(name))
    if result is None or not any(isinstance(item, Number) for item in result[0]):
        return None
    leaves, shape = result
    like = args[0] if function is Tensor.new_tensor else None
    dtype: torch.dtype | None = kwargs.get("dtype")
    device: torch.device | None = kwargs.get("device")
    if dtype is None:
        dtype = _inferred(leaves) if like is None else like.dtype
    if dtype is None:
        result_by_torch: Tensor = function(*decided(args), **decided(kwargs))
        return result_by_torch
    if device is None:
        device = torch.get_default_device() if like is None else like.device
    instance = torch.empty(len(leaves), dtype=dtype, device=device)
    for i, leaf in enumerate(leaves):
        instance[i] = _converted(leaf, dtype, instance.device) if isinstance(leaf, Number) else leaf
    return _leaf(instance.reshape(shape), kwargs.get("requires_grad", False))


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.requires_grad_() if requires_grad else tensor  # inside torch.func's transforms nothing may ask


def _leaves(data: object) -> tuple[list[Any], tuple[int, ...]] | None:
    """The numbers in lists of lists, and the shape of a tensor of them; None where they make none."""
    if type(data) is not list and type(data) is not tuple:
        return [data], ()
    parts = list(map(_leaves, data))
    shapes = {None if part is None else part[1] for part in parts}
    if len(shapes) != 1 or None in shapes:
        return None
    return [leaf for part in parts if part is not None for leaf in part[0]], (len(parts), *(shapes.pop() or ()))


def _inferred(leaves: list[object]) -> torch.dtype | None:
    """The dtype that torch takes for these numbers; None where it is neither Python's nor one number of NumPy's."""
    kinds = {leaf.kind() if isinstance(leaf, Number) else type(leaf) for leaf in leaves}
    if kinds <= {bool, int, float}:
        return torch.get_default_dtype() if float in kinds else torch.int64 if int in kinds else torch.bool
    (name,) = {str(getattr(kind, "__name__", "")).rstrip("_") for kind in kinds} if len(leaves) == 1 else ("",)
    result = getattr(torch, name, None)
    return result if isinstance(result, torch.dtype) else None


def _converted(number: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number as torch takes one from Python into a tensor of this dtype."""
    if dtype is torch.bool:
        number = Number.of(number.context, bool, number)
    elif not (dtype.is_floating_point or dtype.is_complex):
        number = Number.of(number.context, int, number)
    return number.tensor(dtype, device, held=True)
