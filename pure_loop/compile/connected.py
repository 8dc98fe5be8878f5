"""A graph that autograd continues through: its backward is compiled too, and runs when autograd reaches it.

A value that is observed between a forward and its backward has a graph of autograd. So the forward is traced together
with its backward, cut in two by torch's partitioner, which says what the first half keeps for the second, and handed to
autograd as one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pure_loop._internal.autograd import graph_of, refuse_strangers
from pure_loop.compile._torch import Call, mode_of, partition
from pure_loop.compile.tracing import Tracing
from pure_loop.errors import CompileError

__all__ = ["Connection", "choosing", "connect", "differentiate", "drop_unused", "halved"]


@attrs.frozen
class Connection:
    """Where autograd goes into a graph and out of it.

    Attributes:
        outputs: which of the results are differentiated.
        inputs: which of the inputs have a gradient; these gradients follow the results, in this order.
        results: how many there are.
        reached: for each of the outputs, the inputs that its graph leads to.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    results: int
    reached: tuple[frozenset[int], ...]


def differentiate(
    tracing: Tracing, results: list[Tensor], outputs: dict[int, Tensor], inputs: dict[int, Tensor]
) -> Connection | None:
    """Trace the backward, too: appends to ``results`` the gradients by the inputs. None: there are none.

    Args:
        tracing: makes inputs of the gradients by the outputs.
        results: what the graph gives.
        outputs: those of them that are differentiated, by their place, with their graphs.
        inputs: what is differentiated by, by its place.
    """
    count = len(results)
    if not outputs:
        return None
    for output in outputs.values():
        refuse_strangers(output)
    tangents = list(map(tracing.tangent, outputs.values()))
    # In this thread, also on a GPU: autograd's own knows nothing of the tracing.
    with torch.autograd.set_multithreading_enabled(False):
        result = torch.autograd.grad(list(outputs.values()), list(inputs.values()), tangents, allow_unused=True)
    reached = [(place, gradient) for place, gradient in zip(inputs, result, strict=True) if gradient is not None]
    results += [gradient for _, gradient in reached]
    place_of = {id(tensor): place for place, tensor in inputs.items()}
    leads = [
        frozenset(place_of[id(leaf)] for leaf in _leaves_of(output) if id(leaf) in place_of)
        for output in outputs.values()
    ]
    return Connection(tuple(outputs), tuple(place for place, _ in reached), count, tuple(leads))


def _leaves_of(output: Tensor) -> Iterable[object]:
    """The leaves that a graph leads to; a parameter that is given as it is has none."""
    nodes = (node for node in graph_of(output) if type(node).__name__ == "AccumulateGrad")
    return [output] if output.is_leaf else [getattr(node, "variable", None) for node in nodes]


# (graph, whether it is a backward's, how many of its outputs keep their strides; None: all) -> what calls it, and the
# strides of what it gives where they are known.
Lower = Callable[[GraphModule, bool, "int | None"], tuple[Call, "Sequence[Any] | None"]]


@attrs.frozen
class _Layout:
    """How a gradient lies that a backward takes, and where."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of_node(cls, node: Node) -> _Layout:
        value = node.meta["val"]
        return cls(tuple(value.shape), value.stride(), value.dtype, value.device)

    def of(self, tensor: Tensor | None) -> Tensor:
        """The tensor with these strides; zeros where there is none."""
        if tensor is not None and tensor.stride() == self.stride:
            return tensor
        empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return empty.zero_() if tensor is None else empty.copy_(tensor)


@attrs.frozen(eq=False)
class _Halves:
    """A forward and its backward as machine code.

    Attributes:
        forward, backward: take a list of tensors, and empty it.
        results: how many of the first outputs of the forward are for others; the rest is kept for the backward.
        plain: those that aren't differentiated.
        saved: which inputs are kept.
        numbers: which inputs are numbers of the step.
        tangents: which gradients by outputs the backward takes, with the layout that it takes for granted.
        relaid: which gradients by inputs the backward gives in another layout than that of eager steps, and that one.
        inputs: for each input, which gradient of the backward's is its own; None where there is none.
        reached: for each result that is differentiated, the inputs that its graph leads to.
    """

    forward: Call
    backward: Call
    results: int
    plain: tuple[int, ...]
    saved: tuple[int, ...]
    numbers: frozenset[int]
    tangents: tuple[tuple[int, _Layout], ...]
    relaid: tuple[tuple[int, _Layout], ...]
    inputs: tuple[int | None, ...]
    reached: dict[int, frozenset[int]]

    def __call__(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        value = tuple(tensors)
        tensors.clear()
        with torch.set_grad_enabled(True):
            return _apply(self, *value)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: _Halves, *value: Tensor) -> tuple[Tensor, ...]:
        result = halves.forward(list(value))
        results = _apart(result[: halves.results], value)
        ctx.halves = halves
        # What has no gradient must not seem to have one that is 0: an optimizer leaves it as it is.
        ctx.set_materialize_grads(False)
        # Numbers of the step are written anew for the next one.
        inputs = [value[i].clone() if i in halves.numbers else value[i] for i in halves.saved]
        ctx.save_for_backward(*inputs, *result[halves.results :])
        ctx.mark_non_differentiable(*[results[i] for i in halves.plain])
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise CompileError(
                "the gradient of a compiled forward was taken with create_graph=True, and machine code has no second "
                "derivative. An algorithm at an event that is not observed is part of the graph, and may: leave its "
                "event out of watch=, or leave compile out."
            )
        halves = ctx.halves
        value = [*ctx.saved_tensors, *[like.of(tangents[place]) for place, like in halves.tangents]]
        result = list(halves.backward(value))
        for place, layout in halves.relaid:
            result[place] = layout.of(result[place])
        inputs = halves.inputs
        absent = {place for place in halves.reached if tangents[place] is None}
        if absent:
            there = frozenset[int]().union(*[halves.reached[place] for place in halves.reached.keys() - absent])
            inputs = tuple(place if number in there else None for number, place in enumerate(inputs))
        return None, *[None if place is None else result[place] for place in inputs]


_apply: Callable[..., tuple[Tensor, ...]] = _Function.apply


def _apart(result: Sequence[Tensor], value: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, each an object of its own, also where a compiler makes one of two, or gives an input.

    Autograd notes by the object which of them are differentiated.
    """
    taken, results = set(map(id, value)), []
    for tensor in result:
        results.append(tensor.clone() if id(tensor) in taken else tensor)
        taken.add(id(tensor))
    return tuple(results)


def connect(joint: GraphModule, connection: Connection, numbers: range, lower: Lower) -> tuple[Call, list[int], int]:
    """Cut a graph of forward and backward in two, and compile both.

    Args:
        joint: takes the inputs, and after them the gradients by the differentiated outputs; gives the results, and
            after them the gradients.
        connection: which of these are which.
        numbers: which inputs are numbers of the step.
        lower: compiles a graph.

    Returns:
        What calls the forward and keeps the backward, the inputs that it takes, and the number of operations.
    """
    count = len(_inputs(joint)) - len(connection.outputs)
    first, second, saved, order = halved(joint, count, connection.results)
    names = [f"primals_{position}" for position in range(count)]
    taken = sorted({*drop_unused(first), *saved, *connection.inputs})
    first.recompile()
    before = {position: place for place, position in enumerate(taken)}
    forward_takes = [before[names.index(node.name)] for node in _inputs(first)]
    forward, strides = lower(first, False, connection.results)

    # The order of what the second half takes is its partitioner's; ours is that of `save_for_backward`.
    wanted = _inputs(second)
    if strides is not None:
        with_layout = dict(zip(order[len(saved) :], strides[connection.results :], strict=True))
        for node in wanted:
            strides_of_node, value = with_layout.get(node.name), node.meta["val"]
            stride = value.stride() if strides_of_node is None else tuple(map(int, strides_of_node))
            if stride != value.stride():
                with mode_of(value):
                    node.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    takes: list[int] = []
    tangents: list[tuple[int, _Layout]] = []
    for node in wanted:
        if node.name.startswith("tangents_"):
            takes.append(len(order) + len(tangents))
            tangents.append((connection.outputs[int(node.name.removeprefix("tangents_"))], _Layout.of_node(node)))
        else:
            takes.append(order.index(node.name))
    layouts = [_Layout.of_node(node) if isinstance(node, Node) else None for node in _outputs(second)]
    backward, strides = lower(second, True, None)
    # What is kept with its channels last gives gradients that lie so, too.
    strides = [None] * len(layouts) if strides is None else strides
    relaid = tuple(
        (place, layout)
        for place, (layout, stride) in enumerate(zip(layouts, strides, strict=True))
        if layout is not None and stride is not None and tuple(map(int, stride)) != layout.stride
    )
    gradients = {place: number for number, place in enumerate(connection.inputs)}
    halves = _Halves(
        forward=choosing(forward, forward_takes),
        backward=choosing(backward, takes),
        results=connection.results,
        plain=tuple(place for place in range(connection.results) if place not in connection.outputs),
        saved=tuple(before[place] for place in saved),
        numbers=frozenset(before[place] for place in taken if place in numbers),
        tangents=tuple(tangents),
        relaid=relaid,
        inputs=tuple(gradients.get(place) for place in taken),
        reached={
            output: frozenset(before[place] for place in result if place in before)
            for output, result in zip(connection.outputs, connection.reached, strict=True)
        },
    )
    operations = sum(node.op == "call_function" for half in (first, second) for node in half.graph.nodes)
    return halves, taken, operations


def halved(joint: GraphModule, count: int, results: int) -> tuple[GraphModule, GraphModule, list[int], list[str]]:
    """Cut a graph of forward and backward in two.

    Args:
        joint: takes inputs, and after them gradients by results; gives results, and after them gradients.
        count: how many inputs there are; in the halves they are called ``primals_0`` and so on, the gradients by
            results ``tangents_0`` and so on.
        results: how many there are.

    Returns:
        The forward, which gives the results, and what it computes for the backward; the backward; which inputs that
        takes; and the names of these, and of what is computed for it, in this order.
    """
    named = Graph()
    copies: dict[Node, Node] = {}
    for position, node in enumerate(_inputs(joint)):
        # By their names the partitioner knows them.
        name = f"primals_{position}" if position < count else f"tangents_{position - count}"
        copies[node] = named.placeholder(name)
        copies[node].meta = dict(node.meta)
    named.output(named.graph_copy(joint.graph, copies))
    graph = GraphModule(joint, named)
    first, second = partition(graph, results) or _partitioned(graph, results)
    outputs = _outputs(first)
    from_inputs = [node for node in outputs[results:] if node.op == "placeholder"]
    computed = [node for node in outputs[results:] if node.op != "placeholder"]
    first.graph.output_node().args = ([*outputs[:results], *computed],)
    positions = [int(node.name.removeprefix("primals_")) for node in from_inputs]
    return first, second, positions, [node.name for node in (*from_inputs, *computed)]


def _partitioned(joint: GraphModule, results: int) -> tuple[GraphModule, GraphModule]:
    """A cut by which everything is kept that the backward reads."""
    joint.graph.eliminate_dead_code()
    *nodes, output = joint.graph.nodes
    outputs = _outputs(joint)
    later: set[Node] = set()
    for node in nodes:
        if node.name.startswith("tangents_") or not later.isdisjoint(node.all_input_nodes):
            later.add(node)
    saved: dict[Node, None] = {}
    for node in (*later, output):
        read = node.all_input_nodes if node is not output else [e for e in outputs[results:] if isinstance(e, Node)]
        saved |= dict.fromkeys(item for item in read if item not in later and item.op != "get_attr")
    first, second = Graph(), Graph()
    in_first: dict[Node, Node] = {}
    in_second: dict[Node, Node] = {}
    for node in saved:
        in_second[node] = second.placeholder(node.name)
        in_second[node].meta = dict(node.meta)
    for node in nodes:
        if node in later:
            in_second[node] = second.node_copy(node, in_second.__getitem__)
        else:
            in_first[node] = first.node_copy(node, in_first.__getitem__)
            if node.op == "get_attr":
                in_second[node] = second.node_copy(node)
    first.output([*[in_first.get(item, item) for item in outputs[:results]], *[in_first[node] for node in saved]])
    second.output([in_second.get(item, item) for item in outputs[results:]])
    halves = GraphModule(joint, first), GraphModule(joint, second)
    for half in halves:
        half.graph.eliminate_dead_code()
        half.recompile()
    return halves


def _outputs(graph: GraphModule) -> list[Any]:
    outputs: Any = graph.graph.output_node().args[0]
    return list(outputs)


def _inputs(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def choosing(call: Call, places: list[int]) -> Call:
    """The call with these of the tensors that it is given."""
    if places == list(range(len(places))):

        def first(tensors: list[Tensor]) -> Sequence[Tensor]:
            del tensors[len(places) :]
            return call(tensors)

        return first

    def chosen(tensors: list[Tensor]) -> Sequence[Tensor]:
        value = [tensors[i] for i in places]
        tensors.clear()
        return call(value)

    return chosen


def drop_unused(graph: GraphModule) -> list[int]:
    """Take out the inputs that nothing reads; gives the positions of those that stay."""
    taken = []
    for position, node in enumerate(_inputs(graph)):
        if node.users:
            taken.append(position)
        else:
            graph.graph.erase_node(node)
    return taken
