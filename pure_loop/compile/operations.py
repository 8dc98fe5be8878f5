"""Operations that are taken to pieces before a compiler sees them.

List operations become single ones, which are fused; ``add`` and ``sub`` with a factor get a multiplication of their
own, because torch's compiler (2.13) forgets the factor where it merges an addition with a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["decompositions"]

_aten: Any = torch.ops.aten
_PREFIX = "aten::_foreach_"


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What to do instead of each of these operations."""
    table: dict[Any, Callable[..., Any]] = {
        _aten.add.Tensor: _with_factor(_aten.add.Tensor),
        _aten.sub.Tensor: _with_factor(_aten.sub.Tensor),
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
