"""Registration of our types as pytrees, once, for both engines.

optree (namespace ``"pure_loop"``) and ``torch.utils._pytree`` see the same children in the same
order under the same names, so ``optree.tree_map`` and ``torch.func`` agree about every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch.utils._pytree as torch_pytree

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
    make_key: Callable[[str], Any] = torch_pytree.GetAttrKey if attributes else torch_pytree.MappingKey

    def torch_flatten(value: Any) -> tuple[list[Any], Any]:
        children, metadata, _ = flatten(value)
        return list(children), metadata

    def torch_flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, metadata, names = flatten(value)
        return [(make_key(name), child) for name, child in zip(names, children, strict=True)], metadata

    torch_pytree.register_pytree_node(
        cls,
        torch_flatten,
        lambda children, metadata: unflatten(metadata, children),
        flatten_with_keys_fn=torch_flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
