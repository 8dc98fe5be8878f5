"""The list operations of torch, one tensor at a time: a compiler sees through single operations, and fuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["decompositions"]


def decompositions(targets: set[Any]) -> dict[Any, Callable[..., Any]]:
    """For each ``aten._foreach_*`` operation among these, the same as a loop."""
    return {target: _looped(target) for target in targets if _base(target) is not None}


def _base(target: Any) -> str | None:
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::_foreach_"):
        return None
    return str(schema.name.removeprefix("aten::_foreach_"))


def _looped(target: Any) -> Callable[..., Any]:
    name = _base(target)
    assert name is not None
    single = _SINGLE.get(name) or getattr(torch.Tensor, name, None) or getattr(torch, name)

    def loop(*args: Any, **kwargs: Any) -> Any:
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
