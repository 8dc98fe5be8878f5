"""What the operations of a graph write to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Node

__all__ = ["written"]


def written(nodes: Iterable[Node]) -> Iterator[Node]:
    """What these operations write to, or of what it is a view."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        given = [*node.args, *map(node.kwargs.get, [each.name for each in schema.arguments[len(node.args) :]])]
        for argument, value in zip(schema.arguments, given, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from map(_base, _nodes(value))


def _nodes(value: Any) -> list[Node]:
    return [each for each in (value if isinstance(value, list | tuple) else [value]) if isinstance(each, Node)]


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while node.op == "call_function" and _nodes(node.args[:1]):
        schema = getattr(node.target, "_schema", None)
        if node.target is not operator.getitem and (schema is None or schema.arguments[0].alias_info is None):
            break
        (node,) = _nodes(node.args[:1])
    return node
