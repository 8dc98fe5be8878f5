"""The ends of a graph: results are written to the memory that they replace, and inputs that nothing reads go."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pure_loop.compile.pieces import memory_of, origin

__all__ = ["drop_unused", "write_back"]

_aten: Any = torch.ops.aten


def write_back(graph: GraphModule, places: dict[int, int], unsafe: frozenset[Any]) -> list[int]:
    """End the graph with writing outputs into the inputs that they replace; gives the positions of these.

    ``unsafe`` is further memory that no output may share.
    """
    nodes = graph.graph
    output = next(iter(reversed(nodes.nodes)))
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    results = [origin(each) if number in places else each for number, each in enumerate(output.args[0])]
    targets = {number: inputs[position] for number, position in places.items()}
    memory = unsafe | {memory_of(node) for node in targets.values()}
    with nodes.inserting_before(output):
        safe: dict[Any, Any] = {}
        for node in dict.fromkeys(result for result in results if isinstance(result, Node)):
            # It is, or looks at, memory that is about to be written to.
            if memory_of(node) in memory:
                safe[node] = nodes.call_function(_aten.clone.default, (node,))
                safe[node].meta["val"] = node.meta["val"]
        for number, target in targets.items():
            value = results[number]
            if value is not target:
                nodes.call_function(_aten.copy_.default, (target, safe.get(value, value))).meta["val"] = target.meta[
                    "val"
                ]
    output.args = ([safe.get(each, each) for number, each in enumerate(results) if number not in targets],)
    return sorted(position for number, position in places.items() if results[number] is not inputs[position])


def drop_unused(graph: GraphModule) -> list[int]:
    """Take out the inputs that nothing reads; gives the positions of those that stay."""
    taken = []
    for position, node in enumerate([node for node in graph.graph.nodes if node.op == "placeholder"]):
        if node.users:
            taken.append(position)
        else:
            graph.graph.erase_node(node)
    return taken
