"""A trace under way: what Python asks for besides operations on tensors, and how that becomes inputs of the graph.

Numbers of the step, random numbers, tensors from elsewhere and gradients by outputs are inputs, after the tensors that
the graph is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer

from pure_loop.compile import _torch
from pure_loop.compile._torch import get_proxy_mode, schema_of
from pure_loop.compile.draws import DROPOUT, Draw, DrawnFromDataError, Group, RecordedDraw, is_draw
from pure_loop.compile.guards import Evaluate, TraceContext
from pure_loop.compile.replay import Recorders
from pure_loop.errors import CompileError

_aten = torch.ops.aten
# What Python makes of numbers while it is traced, torch.tensor(2.0), is copied before it is used. It may be folded.
_MADE = frozenset({_aten.lift_fresh.default, _aten.lift_fresh_copy.default})


class StrayDrawError(CompileError):
    """Random numbers drawn outside the stages that have seeds."""


class Tracing:
    """One trace under way: what Python asked of it besides operations on tensors.

    Args:
        device: of the State.
        recorders: what records machine code on a device.

    Attributes:
        lifted: the numbers of the step that the graph takes.
        begins_with_leaves: whether nothing that it is given has a graph that leads out of it.
        sharing: which of the tensors that it is given share memory with another one.
        reports: whether the first output is the number that the program reports.
    """

    def __init__(self, device: torch.device, recorders: Recorders) -> None:
        self.device = device
        self.default_dtype = torch.get_default_dtype()
        self.recorders = recorders
        self.mode = _torch.fake_mode()
        self.context = TraceContext(self.lift)
        self.numbers: list[tuple[torch.dtype, Evaluate, torch.device]] = []
        self.lifted: list[Tensor] = []
        # By their operations, in order.
        self.draws: dict[Node, RecordedDraw] = {}
        self.tangents = 0
        # Operations of the trace that are inputs of the graph, by their names.
        self.inputs: dict[str, Node] = {}
        self.begins_with_leaves = True
        self.sharing: frozenset[int] = frozenset()
        self.reports = False

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor without numbers; each is one of its own, whatever memory is shared."""
        if tensor.is_neg() or tensor.is_conj():
            shows, what = ("conjugate", "conj") if tensor.is_conj() else ("negative", "neg")
            raise CompileError(
                f"a tensor of shape {tuple(tensor.shape)} shows the {shows} of its memory, and machine code reads "
                f"memory: hand over tensor.resolve_{what}()."
            )
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def lift(self, dtype: torch.dtype, evaluate: Evaluate, device: torch.device | None = None) -> Tensor:
        """A number of the step as an input of the graph."""
        device = self.device if device is None else device
        fake = self._input(f"number_{len(self.numbers)}", lambda: torch.empty((), dtype=dtype, device=device))
        self.numbers.append((dtype, evaluate, device))
        self.lifted.append(fake)
        return fake

    def tangent(self, output: Tensor) -> Tensor:
        """The gradient by an output as an input of the graph."""
        # Its elements lie apart, as those of an output need not.
        fake = self._input(f"tangent_{self.tangents}", lambda: torch.empty_like(output.detach()))
        self.tangents += 1
        return fake

    def _input(self, name: str, like: Callable[[], Tensor]) -> Tensor:
        """A tensor that the trace has as one of its own operations, and the graph as an input.

        It is made in another thread, where there is no mode but those of the trace, and no transform of torch.func,
        which would wrap it as a tensor of its own.
        """
        proxies = get_proxy_mode()
        assert proxies is not None

        def make() -> Tensor:
            with self.mode:
                fake = like()
                with proxies:
                    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

        with ThreadPoolExecutor(1) as thread:
            fake = thread.submit(make).result()
        (*_, self.inputs[name]) = proxies.tracer.graph.nodes
        return fake

    @contextmanager
    def drawing(self, group: Group) -> Iterator[None]:
        """What is drawn inside is drawn under the seed of this group, if not under that of one inside it."""
        last = self.mark()
        try:
            yield
        except BaseException:
            self._note_draws(last, group)  # the code that drew may catch it
            raise
        stray = self._note_draws(last, group)
        if stray is not None:
            raise DrawnFromDataError(str(stray.target))

    def _note_draws(self, last: Node | None, group: Group) -> Node | None:
        """Note what was drawn after a place as of this group; gives a draw that depends on the graph's arguments."""
        stray = None
        proxies = get_proxy_mode()
        assert proxies is not None
        assert isinstance(proxies.tracer, Tracer)
        for node in self.stray_draws(last):
            if not group.seeds(node):
                continue
            draw = RecordedDraw.of(group, node, proxies.tracer.root, self.inputs.values())
            if draw is None:
                stray = node
            elif group.stage == "backward":
                raise CompileError(
                    "the backward draws random numbers: activation checkpointing goes through a dropout layer "
                    "again, whose mask is drawn outside the compiled step. Compiled steps choose by themselves "
                    "what is kept for the backward: leave torch.utils.checkpoint out, or compile out."
                )
            else:
                self.draws[node] = draw
        return stray

    def stray_draws(self, last: Node | None) -> list[Node]:
        """What was drawn after a place and is of no group."""
        return [node for node in self.since(last) if is_draw(node) and node not in self.draws]

    def mark(self) -> Node | None:
        """A place in the list of operations."""
        mode = get_proxy_mode()
        return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)

    def in_shared_memory(self) -> set[Node]:
        """The inputs that share memory with another one, and don't here."""
        mode = get_proxy_mode()
        if mode is None or not self.sharing:
            return set()
        inputs = [node for node in mode.tracer.graph.nodes if node.op == "placeholder"]
        return {inputs[position] for position in self.sharing}

    def since(self, last: Node | None) -> list[Node]:
        """The operations after a place."""
        mode = get_proxy_mode()
        if mode is None:
            return []
        result = []
        for node in reversed(mode.tracer.graph.nodes):
            if node is last:
                break
            result.append(node)
        return result[::-1]


def lift_inputs(raw: GraphModule, tracing: Tracing) -> None:
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


def lift_draws(raw: GraphModule, tracing: Tracing) -> list[Draw]:
    """Make inputs of what is drawn."""
    graph = raw.graph
    result: list[Draw] = []
    recorded_names = {node.name for node in tracing.draws}
    stray = next((node for node in graph.nodes if is_draw(node) and node.name not in recorded_names), None)
    if stray is not None:
        raise StrayDrawError(f"random numbers are drawn ({stray.target}) where a compiled step has no seed for them")
    nodes = {node.name: node for node in graph.nodes}
    for recorded, draw in tracing.draws.items():
        like = recorded.meta["val"]
        if recorded.target is DROPOUT:
            like, p = like[0], cast("float", recorded.args[1])
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
        schema = schema_of(node.target)
        if schema is not None and schema.writes:
            with graph.inserting_before(node):
                copied = graph.call_function(_aten.copy_.default, (node.args[0], value))
            copied.meta["val"] = like
        else:
            copied = value
        node.replace_all_uses_with(copied)
        graph.erase_node(node)
    return result


def lift_captured(raw: GraphModule, tracing: Tracing) -> list[Tensor]:
    """Make inputs of the tensors that Python had from elsewhere (a loss's weights, a teacher's parameters).

    As constants of the graph they would be what they were while it was made.
    """
    graph = raw.graph
    result: dict[int, Node] = {}
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


def in_order(raw: GraphModule) -> None:
    """Bring all inputs to the front, by their kinds."""
    placeholders = [node for node in raw.graph.nodes if node.op == "placeholder"]
    ordered = sorted(placeholders, key=lambda node: _rank(node.name))
    for node in reversed(ordered):
        next(iter(raw.graph.nodes)).prepend(node)
    raw.recompile()


def _drop(graph: Graph, node: Node, mask: Node, p: float) -> None:
    """Dropout with a mask that is there already, in the operations of eager."""
    value = mask.meta["val"]
    with graph.inserting_before(node):
        noise = graph.call_function(_aten.div.Scalar, (mask, 1 - p))
        scaled = graph.call_function(_aten.mul.Tensor, (node.args[0], noise))
        mask_of_kept = graph.call_function(_aten.ne.Scalar, (mask, 0))
    for item in (noise, scaled, mask_of_kept):
        item.meta["val"] = value
    for user in list(node.users):
        user.replace_all_uses_with(mask_of_kept if user.args[1] else scaled)
        graph.erase_node(user)
    graph.erase_node(node)


def _rank(name: str) -> tuple[int, int]:
    for kind, prefix in enumerate(("number_", "draw_", "captured_", "tangent_"), start=1):
        if name.startswith(prefix):
            return kind, int(name.removeprefix(prefix))
    return 0, 0  # sorting is stable
