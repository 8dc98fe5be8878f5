"""Random numbers as inputs of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from pure_loop.compile.draws import DROPOUT, Draw, is_draw
from pure_loop.errors import CompileError

if TYPE_CHECKING:
    from pure_loop.compile.trace import Tracing

__all__ = ["StrayDrawError", "lift_draws"]

_aten: Any = torch.ops.aten


class StrayDrawError(CompileError):
    """Random numbers drawn outside the stages that have seeds."""


def lift_draws(raw: torch.fx.GraphModule, tracing: Tracing) -> list[Draw]:
    """Make inputs of what is drawn, and bring all inputs to the front."""
    graph = raw.graph
    found: list[Draw] = []
    known = {node.name for _, node in tracing.draws}
    stray = next((node for node in graph.nodes if is_draw(node) and node.name not in known), None)
    if stray is not None:
        raise StrayDrawError(f"random numbers are drawn ({stray.target}) where a compiled step has no seed for them")
    nodes = {node.name: node for node in graph.nodes}
    for group, recorded in tracing.draws:
        like = recorded.meta["val"]
        if recorded.target is DROPOUT:
            like, p = like[0], float(recorded.args[1])  # type: ignore[arg-type]
            if p == 1:
                continue  # which draws nothing
        found.append(Draw.of(group, recorded.target, recorded.args, dict(recorded.kwargs), like))
        with graph.inserting_before(next(iter(graph.nodes))):
            drawn = graph.placeholder(f"draw_{len(found) - 1}")
        drawn.meta["val"] = tracing.fake(like)
        node = nodes.get(recorded.name)
        if node is None:
            continue  # nothing reads it
        if node.target is DROPOUT:
            _drop(graph, node, drawn, p)
            continue
        if node.target._schema.is_mutable:
            with graph.inserting_before(node):
                copied = graph.call_function(_aten.copy_.default, (node.args[0], drawn))
            copied.meta["val"] = like
        else:
            copied = drawn
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    ordered = sorted(placeholders, key=lambda node: _rank(node.name))
    for node in reversed(ordered):
        next(iter(graph.nodes)).prepend(node)
    raw.recompile()
    return found


def _drop(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node, p: float) -> None:
    """Dropout with a mask that is there already, in the operations of eager."""
    value = mask.meta["val"]
    with graph.inserting_before(node):
        noise = graph.call_function(_aten.div.Scalar, (mask, 1 - p))
        kept = graph.call_function(_aten.mul.Tensor, (node.args[0], noise))
        there = graph.call_function(_aten.ne.Scalar, (mask, 0))
    for each in (noise, kept, there):
        each.meta["val"] = value
    for user in list(node.users):
        user.replace_all_uses_with((kept, there)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _rank(name: str) -> tuple[int, int]:
    for kind, prefix in enumerate(("number_", "draw_", "tangent_"), start=1):
        if name.startswith(prefix):
            return kind, int(name.removeprefix(prefix))
    return 0, 0  # sorting is stable
