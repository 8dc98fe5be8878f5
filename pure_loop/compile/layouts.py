"""How images lie in memory: with their channels next to each other, as convolutions on a CPU like it.

torch's compiler lays them so by itself in a graph of a forward, and leaves those of a backward as they were traced.
Where both are in one graph, it goes to and fro between the two at each convolution. So such a graph is traced with
images that lie so from the first convolution on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from pure_loop.compile.convolutions import Products

__all__ = ["channels_last", "laid_out_like"]

_aten: Any = torch.ops.aten
_CONVOLUTIONS = frozenset({_aten.convolution.default, _aten.convolution_backward.default})
# What reads memory by its layout, and so would read something else from another one.
_BY_LAYOUT = frozenset(
    {"_reshape_alias", "as_strided", "as_strided_scatter", "resize_", "set_", "view_as_complex", "view_as_real"}
)
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def channels_last(graph: GraphModule) -> dict[Any, Callable[..., Any]]:
    """What to do instead of some operations of this graph; nothing where it has no images, or minds how they lie.

    An operation that isn't torch's own may take a layout for granted.
    """
    found = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    called = [target for target in found if isinstance(target, torch._ops.OpOverload)]
    if _CONVOLUTIONS.isdisjoint(called) or any(map(_minds, called)):
        return {}
    products = Products()
    return {
        _aten.convolution.default: _product_or(products.convolution, _convolution),
        _aten.convolution_backward.default: _product_or(products.backward, _convolution_backward),
        _aten.view.default: _viewing(_aten.view.default),
        _aten._unsafe_view.default: _viewing(_aten._unsafe_view.default),
    }


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, contiguous where the other one is."""
    if tensor.stride() == other.stride() or not other.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _minds(target: torch._ops.OpOverload) -> bool:
    name: str = target._schema.name
    namespace, _, short = name.partition("::")
    return namespace not in ("aten", "prims", "pure_loop") or short in _BY_LAYOUT or target is _aten.view.dtype


def _product_or(product: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    def instead(*args: Any) -> Any:
        found = product(*args)
        return otherwise(*args) if found is None else found

    return instead


def _convolution(images: Tensor, weight: Tensor, *rest: Any) -> Any:
    found = _laid_out(images, weight)
    return NotImplemented if found is None else _aten.convolution.default(*found, *rest)


def _convolution_backward(gradient: Tensor, images: Tensor, weight: Tensor, *rest: Any) -> Any:
    found = _laid_out(gradient, images, weight)
    return NotImplemented if found is None else _aten.convolution_backward.default(*found, *rest)


def _laid_out(*tensors: Tensor) -> list[Tensor] | None:
    """Images and weights with their channels last; None where they lie so, or are not what a CPU likes so."""
    if not all(tensor.is_cpu and tensor.ndim == 4 and tensor.dtype in _DTYPES for tensor in tensors):
        return None
    if all(map(_lies_so, tensors)):
        return None
    return [tensor if _lies_so(tensor) else _with_channels_last(tensor) for tensor in tensors]


def _lies_so(tensor: Tensor) -> bool:
    """Whether its channels lie last, and it says so: of a single channel strides may say either."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and (tensor.shape[1] != 1 or tensor.stride(1) == 1)


def _with_channels_last(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)  # the same, with strides that say so
    return tensor.contiguous(memory_format=torch.channels_last)


def _viewing(target: Any) -> Callable[..., Any]:
    """A view where there can be one, and else one of a copy in the order of the indices, where it was one before."""

    def view(tensor: Tensor, size: Any) -> Any:
        if tensor.is_contiguous():
            return NotImplemented
        try:
            with disable_proxy_modes_tracing():
                target(tensor, size)
        except (RuntimeError, ValueError):  # that it can't be viewed has no class of its own
            return target(tensor.contiguous(), size)
        return NotImplemented

    return view
