"""Pytrees: names of them for annotations, and registration of the library's types, once, for both engines.

optree (namespace ``"pure_loop"``) and torch's own pytrees see the same children in the same
order under the same names, so ``optree.tree_map`` and ``torch.func`` agree about every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import optree

from pure_loop._internal.torch_private import register_pytree

NAMESPACE = "pure_loop"

# Values that the loop passes on without looking into them have no type of their own.
PyTree: TypeAlias = Any
"""Nested containers of leaves, such as an optimizer state, the memory of an algorithm or an accumulator."""
Batch: TypeAlias = Any
"""What a dataloader gives: a tensor, a tuple, a mapping, any object."""
Outputs: TypeAlias = Any
"""What a model's forward returns."""


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
