"""What a graph writes to, and its ends: results are written to the memory that they replace, unread inputs go."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop.compile._torch import schema_of
from pure_loop.compile.kernels import memory_of, origin

__all__ = ["drop_unused", "write_back", "written"]


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


_aten: Any = torch.ops.aten
_COPYING = frozenset({_aten.copy.default, _aten.slice_scatter.default})


def write_back(graph: GraphModule, places: dict[int, int]) -> list[int]:
    """End the graph with writing outputs into the inputs that they replace; gives the positions of these."""
    nodes = graph.graph
    output = next(iter(reversed(nodes.nodes)))
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    results = [origin(each) if number in places else each for number, each in enumerate(output.args[0])]
    targets = {number: inputs[position] for number, position in places.items()}
    written = {memory_of(node) for node in targets.values()}
    in_place = _could_be_in(graph, written)
    with nodes.inserting_before(output):
        safe: dict[Any, Any] = {}
        for number, node in enumerate(results):
            if not isinstance(node, Node) or node in safe:
                continue
            result = memory_of(node)
            own = number in targets and in_place.get(result) == {memory_of(targets[number])}
            # It is, looks at, or may come to be in memory that is about to be written to.
            if result in written or (result in in_place and not own):
                # A `clone` the compiler takes out again, whatever is written to what was cloned (pytorch #198131).
                safe[node] = nodes.call_function(_aten.lift_fresh_copy.default, (node,))
                safe[node].meta["val"] = node.meta["val"]
        for number, target in targets.items():
            value = results[number]
            if value is not target:
                nodes.call_function(_aten.copy_.default, (target, safe.get(value, value))).meta["val"] = target.meta[
                    "val"
                ]
    output.args = ([safe.get(each, each) for number, each in enumerate(results) if number not in targets],)
    return sorted(position for number, position in places.items() if results[number] is not inputs[position])


def _could_be_in(graph: GraphModule, written: set[Any]) -> dict[Any, set[Any]]:
    """Memory that a compiler may lay into memory that is written to in the end; and which.

    It computes ``index_put(a, ...)`` in a's own memory if that is written to at all, with whatever (pytorch #198096).
    """
    result: dict[Any, set[Any]] = {}
    for node in graph.graph.nodes:
        own = memory_of(node)
        if own in written:
            continue
        for base in _bases(node):
            if _as_large(base, node):
                memory = memory_of(base)
                inside = result.get(memory, {memory} & written)
                if inside:
                    result[own] = result.get(own, set()) | inside
    return result


def _bases(node: Node) -> Iterator[Node]:
    """The tensors in whose place this one could be computed: by PyTorch's custom the first, or what is copied."""
    if node.op != "call_function" or not node.args:
        return
    first: Any = node.args[0]
    value = [first, node.args[1]] if node.target in _COPYING else [first]
    yield from (item for item in value if isinstance(item, Node))


def _as_large(one: Node, other: Node) -> bool:
    """Whether two tensors have the same shape; their dtypes may be made one by leaving out casts."""
    a, b = one.meta.get("val"), other.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.device) == (b.shape, b.device)


def drop_unused(graph: GraphModule) -> list[int]:
    """Take out the inputs that nothing reads; gives the positions of those that stay."""
    taken = []
    for position, node in enumerate([node for node in graph.graph.nodes if node.op == "placeholder"]):
        if node.users:
            taken.append(position)
        else:
            graph.graph.erase_node(node)
    return taken
