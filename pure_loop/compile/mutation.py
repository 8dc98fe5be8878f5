"""What the operations of a graph write to."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from torch.fx import Node

from pure_loop.compile._torch import schema_of

__all__ = ["written"]


def written(nodes: Iterable[Node]) -> Iterator[Node]:
    """What these operations write to, or of what it is a view."""
    for node in nodes:
        schema = schema_of(node.target)
        if schema is None or not schema.writes:
            continue
        value = [*node.args, *map(node.kwargs.get, schema.names[len(node.args) :])]
        for place in schema.writes:
            yield from map(_base, _nodes(value[place]))


def _nodes(value: Any) -> list[Node]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while node.op == "call_function" and _nodes(node.args[:1]):
        schema = schema_of(node.target)
        if node.target is not operator.getitem and (schema is None or not schema.is_view):
            break
        (node,) = _nodes(node.args[:1])
    return node
