"""Attention that drops out, in a traced step: by torch's plain operations, whose masks are drawn before the call.

On a GPU torch takes a kernel that draws its mask itself, which would be another one in each replay of a graph, or the
same, and in no case that of the step.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

__all__ = ["DrawnApart"]

_SIGNATURE = signature(multi_head_attention_forward)


class DrawnApart(TorchFunctionMode):
    """Inside, attention with dropout is no kernel of its own; without, it is what it was."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:
            drops_out = bool(_dropout_p(*args, **kwargs))
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


def _dropout_p(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> float:
    return dropout_p
