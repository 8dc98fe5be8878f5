"""What an in-place kernel is given: lists of tensors in the order of the parameters, which fit each other in memory.

Fused kernels read raw memory on a CPU: they assume that a gradient has as many elements as its parameter, in the same
order in memory, and silently give wrong numbers otherwise. ``torch.optim`` can rely on this because ``backward()``
brings every ``.grad`` into its parameter's layout; ``torch.autograd.grad`` guarantees no layout, so it is checked here,
before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.optim.optimizer import OptState

__all__ = ["FUSED_DEVICES", "are_alike", "check_state", "in_order", "is_dense", "laid_out", "match_layout"]

FUSED_DEVICES = frozenset({"cpu", "cuda", "hpu", "mps", "mtia", "xpu"})


def in_order(mappings: Mapping[str, Mapping[str, Any]], names: list[str]) -> dict[str, list[Any]]:
    """The values of each of these mappings in the order of ``names``.

    Args:
        mappings: the gradients, as "grads", and mappings of the optimizer state, by the keys that they have there.
        names: of the parameters.

    Raises:
        ArgumentError, ResumeError: one of them is not of just these names.
    """
    lists: dict[str, list[Any]] = {}
    for key, mapping in mappings.items():
        if list(mapping) == names:  # as most are
            lists[key] = list(mapping.values())
            continue
        missing, extra = [n for n in names if n not in mapping], [n for n in mapping if n not in names]
        odd = ("missing", missing), ("not a parameter", extra)
        differences = ", ".join(f"{word} {some[:3]}" for word, some in odd if some)
        if differences and key == "grads":
            raise ArgumentError(
                f"grads and params name different parameters: {differences}; "
                "grads needs every name of params, with None for a parameter that the batch didn't use"
            )
        if differences:
            raise ResumeError(
                f"opt_state[{key!r}] and params name different parameters: {differences}; "
                "opt_state belongs to another model: begin again with optimizer.init(params)"
            )
        lists[key] = [mapping[name] for name in names]
    return lists


def check_state(where: str, opt_state: OptState, keys: Iterable[str]) -> None:
    """``opt_state`` is of this optimizer with these options."""
    if not isinstance(opt_state, Mapping):
        raise ResumeError(
            f"{where}: opt_state is {opt_state!r:.80}, and an update needs what optimizer.init(params) gives: "
            "state.replace(opt_state=optimizer.init(state.params)) before the first one."
        )
    if opt_state.keys() != set(keys):
        raise ResumeError(
            f"{where}: opt_state must hold {sorted(keys)}, and it holds {sorted(opt_state)}; another optimizer, or "
            "this one with other options, wrote it: resume with that one, or start anew with optimizer.init(params)"
        )


def laid_out(
    names: list[str], params: list[Tensor], grads: list[Tensor | None], memories: list[list[Tensor]]
) -> list[list[Any]]:
    """Parameters, gradients and memories, where a tensor that doesn't lie in memory as kernels need it is a copy.

    Args:
        names: for the errors.
        params: of any layout.
        grads: None for a parameter without one.
        memories: what is kept for the parameters.

    Raises:
        ArgumentError: a gradient doesn't fit its parameter.
        ResumeError: what is kept for a parameter doesn't.
    """
    dense_params = [param if is_dense(param) else param.detach().clone() for param in params]
    gradients = [
        None if grad is None else match_layout(grad, param, f"the gradient of {name!r}")
        for name, param, grad in zip(names, dense_params, grads, strict=True)
    ]
    dense_memories = [
        [
            match_layout(tensor, param, f"the optimizer state of {name!r} (from another model?)", ResumeError)
            for name, param, tensor in zip(names, dense_params, memory, strict=True)
        ]
        for memory in memories
    ]
    return [dense_params, gradients, *dense_memories]


_dtype, _device, _is_cpu = attrgetter("dtype"), attrgetter("device"), attrgetter("is_cpu")


def are_alike(params: list[Tensor], *lists: list[Any]) -> bool:
    """Whether a kernel takes these as they are.

    They are contiguous and real, of the dtype and device of the first parameter and of the sizes of all.
    """
    tensors = list(chain(*lists))
    if not tensors or not all(map(is_not, tensors, repeat(None))):
        return False
    first = params[0]
    return (
        all(map(Tensor.is_contiguous, tensors))
        and list(map(Tensor.size, tensors)) == list(map(Tensor.size, params)) * len(lists)
        and set(map(_dtype, tensors)) == {first.dtype}
        and ((first.is_cpu and all(map(_is_cpu, tensors))) or set(map(_device, tensors)) == {first.device})
        and not any(map(Tensor.is_neg, tensors))
        and not first.is_complex()
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory with its own numbers, in the order of some permutation of its dimensions."""
    if tensor.is_neg() or tensor.is_conj():
        return False
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.is_contiguous() or tensor.permute(by_stride).is_contiguous()


def match_layout(tensor: Tensor, param: Tensor, what: str, error: type[ValueError] = ArgumentError) -> Tensor:
    """``tensor``, or a copy of it, in the memory layout of ``param``, a dense one, which it must fit otherwise."""
    if tensor.layout != torch.strided:
        raise error(
            f"{what} is sparse ({tensor.layout}) and this optimizer needs dense ones: "
            "use torch.nn.Embedding(..., sparse=False), or optim.from_torch(torch.optim.SparseAdam)"
        )
    value: Any
    for name in ("shape", "dtype", "device"):
        value, needed = getattr(tensor, name), getattr(param, name)
        if value != needed:
            value, needed = (tuple(x) if isinstance(x, torch.Size) else x for x in (value, needed))
            raise error(f"{what} has {name} {value}, its parameter has {name} {needed}")
    tensor = tensor.resolve_conj().resolve_neg()
    # Strides of dimensions of size 1 say nothing.
    if tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous()):
        return tensor
    return torch.empty_like(param, requires_grad=False).copy_(tensor)
