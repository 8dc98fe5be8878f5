"""Random numbers, and tensors from elsewhere, as inputs of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor, nn

from pure_loop.compile._torch import schema_of
from pure_loop.compile.draws import DROPOUT, Draw, is_draw
from pure_loop.errors import CompileError

if TYPE_CHECKING:
    from pure_loop.compile.trace import Tracing

__all__ = ["StrayDrawError", "in_order", "lift_captured", "lift_draws", "lift_inputs"]

_aten: Any = torch.ops.aten
# What Python makes of numbers while it is traced, torch.tensor(2.0), is copied before it is used. It may be folded.
_MADE = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class StrayDrawError(CompileError):
    """Random numbers drawn outside the stages that have seeds."""


def lift_inputs(raw: torch.fx.GraphModule, tracing: Tracing) -> None:
    """Make inputs of what the trace has as operations in their place."""
    graph = raw.graph
    nodes = {node.name: node for node in graph.nodes}
    for name, traced in tracing.inputs.items():
        with graph.inserting_before(next(iter(graph.nodes))):
            value = graph.placeholder(name)
        value.meta["val"] = traced.meta["val"]
        node = nodes.get(traced.name)
        if node is not None:  # something reads it
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def lift_draws(raw: torch.fx.GraphModule, tracing: Tracing) -> list[Draw]:
    """Make inputs of what is drawn."""
    graph = raw.graph
    result: list[Draw] = []
    known = {node.name for node in tracing.draws}
    stray = next((node for node in graph.nodes if is_draw(node) and node.name not in known), None)
    if stray is not None:
        raise StrayDrawError(f"random numbers are drawn ({stray.target}) where a compiled step has no seed for them")
    nodes = {node.name: node for node in graph.nodes}
    for recorded, draw in tracing.draws.items():
        like = recorded.meta["val"]
        if recorded.target is DROPOUT:
            like, p = like[0], float(recorded.args[1])  # type: ignore[arg-type]
            if p == 1:
                continue  # which draws nothing
        result.append(Draw.of(draw, like))
        with graph.inserting_before(next(iter(graph.nodes))):
            value = graph.placeholder(f"draw_{len(result) - 1}")
        value.meta["val"] = tracing.fake(like)
        node = nodes.get(recorded.name)
        if node is None:
            continue  # nothing reads it
        if node.target is DROPOUT:
            _drop(graph, node, value, p)
            continue
        if schema_of(node.target).writes:  # type: ignore[union-attr]
            with graph.inserting_before(node):
                copied = graph.call_function(_aten.copy_.default, (node.args[0], value))
            copied.meta["val"] = like
        else:
            copied = value
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
    return result


def lift_captured(raw: torch.fx.GraphModule, tracing: Tracing) -> list[Tensor]:
    """Make inputs of the tensors that Python had from elsewhere (a loss's weights, a teacher's parameters).

    As constants of the graph they would be what they were while it was made.
    """
    graph = raw.graph
    result: dict[int, torch.fx.Node] = {}
    tensors: list[Tensor] = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        tensor = getattr(raw, str(node.target))
        # What isn't plain memory has no stand-in, and stays a constant.
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or all(user.target in _MADE for user in node.users):
            continue
        if id(tensor) not in result:
            with graph.inserting_before(next(iter(graph.nodes))):
                result[id(tensor)] = graph.placeholder(f"captured_{len(tensors)}")
            result[id(tensor)].meta["val"] = tracing.fake(tensor)
            tensors.append(tensor)
        node.replace_all_uses_with(result[id(tensor)])
        graph.erase_node(node)
    return tensors


def in_order(raw: torch.fx.GraphModule) -> None:
    """Bring all inputs to the front, by their kinds."""
    placeholders = [node for node in raw.graph.nodes if node.op == "placeholder"]
    ordered = sorted(placeholders, key=lambda node: _rank(node.name))
    for node in reversed(ordered):
        next(iter(raw.graph.nodes)).prepend(node)
    raw.recompile()


def _drop(graph: torch.fx.Graph, node: torch.fx.Node, mask: torch.fx.Node, p: float) -> None:
    """Dropout with a mask that is there already, in the operations of eager."""
    value = mask.meta["val"]
    with graph.inserting_before(node):
        noise = graph.call_function(_aten.div.Scalar, (mask, 1 - p))
        kept = graph.call_function(_aten.mul.Tensor, (node.args[0], noise))
        there = graph.call_function(_aten.ne.Scalar, (mask, 0))
    for item in (noise, kept, there):
        item.meta["val"] = value
    for user in list(node.users):
        user.replace_all_uses_with((kept, there)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _rank(name: str) -> tuple[int, int]:
    for kind, prefix in enumerate(("number_", "draw_", "captured_", "tangent_"), start=1):
        if name.startswith(prefix):
            return kind, int(name.removeprefix(prefix))
    return 0, 0  # sorting is stable
