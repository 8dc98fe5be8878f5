"""Registration of our types as pytrees, once, for both engines.

optree (namespace ``"pure_loop"``) and torch's own pytrees see the same children in the same
order under the same names, so ``optree.tree_map`` and ``torch.func`` agree about every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree

from pure_loop._internal.torch_private import register_pytree

__all__ = ["NAMESPACE", "register"]

NAMESPACE = "pure_loop"


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Any, Sequence[str]]],
    unflatten: Callable[[Any, Iterable[Any]], Any],
    *,
    attributes: bool,
) -> None:
    """Register ``cls`` under both engines.

    Args:
        cls: the class; exactly this one, subclasses register themselves.
        flatten: gives ``(children, metadata, names)``; metadata must be hashable and comparable.
        unflatten: builds the value from ``(metadata, children)`` without running validators, because
            a tree map may put anything (None, a spec, a traced value) where a tensor was.
        attributes: whether a child's name is an attribute (``.params``) or a key (``['weight']``).
    """

    optree.register_pytree_node(
        cls,
        lambda value: flatten(value),
        unflatten,
        path_entry_type=optree.GetAttrEntry if attributes else optree.MappingEntry,
        namespace=NAMESPACE,
    )
    register_pytree(cls, flatten, unflatten, attributes=attributes)
