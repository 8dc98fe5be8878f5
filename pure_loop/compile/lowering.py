"""From Python to one graph: run it once on tensors without numbers, write down what it does, and compile that.

The Python runs for real (script, stages, algorithms, autograd), once, on fake tensors, and every operation that reaches
the dispatcher is written down: forward, backward and update are then one list of operations without autograd. A
second pass makes that list functional. What lasts is written back into its own memory at the end.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop.compile import _torch
from pure_loop.compile._torch import Call, make_fx
from pure_loop.compile.compilations import interpret, is_on
from pure_loop.compile.connected import Connection, connect, drop_unused
from pure_loop.compile.draws import Draw, traced_generators
from pure_loop.compile.guards import Env, Evaluate, refusing_global_state
from pure_loop.compile.kernels import CutGraph, cut, has_kernels, memory_of, origin
from pure_loop.compile.members import MemberMapping, MemberScalar, mapped
from pure_loop.compile.operations import Constructors, DrawnApart, declared, decompositions, taken_apart
from pure_loop.compile.refusals import refusing_recurrent_layers
from pure_loop.compile.replay import Replaying, device_of_recording, note_not_recorded
from pure_loop.compile.tracing import Tracing, in_order, lift_captured, lift_draws, lift_inputs
from pure_loop.compile.trees import describe
from pure_loop.errors import CompileError
from pure_loop.random.seeds import rng_lock


class _Turn:
    """Compiling is one thread's at a time; a thread that waits for its turn lends the generators to the others.

    torch.fx writes what it traces into variables of the process, and so does torch's compiler with its settings. What
    is traced may seed the generators, for which the tracing thread would wait for ever if the one that has them, inside
    ``pl.random.seeded``, waited for its turn meanwhile. It goes on when it has both, and no other thread is in the
    middle of such a block: each puts the generators back as it found them.
    """

    def __init__(self) -> None:
        self._ended = threading.Condition(rng_lock)
        self._thread: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._ended:
            self._ended.wait_for(lambda: self._thread in (None, me))
            self._thread, self._depth = me, self._depth + 1

    def __exit__(self, *raised: object) -> None:
        with self._ended:
            self._depth -= 1
            if not self._depth:
                self._thread = None
                self._ended.notify_all()


_one_at_a_time = _Turn()


@attrs.define
class Compiled:
    """A function of tensors as machine code.

    Attributes:
        call: takes a list of tensors, and empties it; gives the outputs.
        taken: which of the tensors it was compiled for it takes.
        numbers: further inputs, after these: 0-d tensors, and what their values are.
        draws: further inputs, after these.
        drawn: which of them.
        captured: further inputs, after these: tensors that Python had from elsewhere, and what was taken for granted
            about them.
        written: positions of tensors that it writes to.
        seconds: how long compiling took, in CPU time of this process and in wall-clock time.
        operations: how many there are in the graph.
        kernels: which of them are calls of an optimizer's kernel.
    """

    call: Call
    taken: list[int]
    numbers: list[_Scalar] | list[_Scalar | MemberScalar]
    draws: list[Draw]
    drawn: list[int]
    captured: list[tuple[Tensor, tuple[object, ...]]]
    written: list[int]
    seconds: float
    operations: int
    kernels: tuple[str, ...] = ()


class _Scalar:
    """A number as a tensor that is written to; on a device a kernel does that, without a wait."""

    __slots__ = ("_most", "evaluate", "last", "tensor")

    def __init__(self, dtype: torch.dtype, evaluate: Evaluate, device: torch.device) -> None:
        self.evaluate = evaluate
        self.tensor = torch.zeros((), dtype=dtype, device=device)
        self._most = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
        self.last: object = None

    def set(self, env: Env) -> None:
        value = self.evaluate(env)
        # 0.0 and -0.0 are equal, and not the same.
        if value == self.last and (value or str(value) == str(self.last)):
            return
        # What a dtype of floats can't hold is infinite there, as where a number meets a tensor.
        self.tensor.fill_(value if not abs(value) > self._most else math.copysign(math.inf, value))
        self.last = value


def compile_function(
    function: Callable[[list[Tensor]], tuple[list[Tensor], dict[int, int], Connection | None]],
    tensors: Sequence[Tensor],
    tracing: Tracing,
    lasting: int,
    mapping: MemberMapping | None = None,
) -> Compiled:
    """Trace and compile.

    Args:
        function: of fake tensors like ``tensors``; gives a list of tensors, which of them are written to which
            input (what is written is no output), and how autograd continues through them, if it does.
        tensors: examples.
        tracing: collects what else the function asks for.
        lasting: how many of the first tensors last from step to step.
        mapping: over the members of an ensemble; None: it is of one model.
    """
    with _one_at_a_time:
        return _compile(function, tensors, tracing, lasting, mapping)


def _compile(
    function: Callable[[list[Tensor]], tuple[list[Tensor], dict[int, int], Connection | None]],
    tensors: Sequence[Tensor],
    tracing: Tracing,
    lasting: int,
    mapping: MemberMapping | None,
) -> Compiled:
    begin = time.perf_counter()
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise CompileError(
                f"a step can't be compiled with a {type(tensor).__name__} of shape {tuple(tensor.shape)} and layout "
                f"{tensor.layout} (in the batch, a buffer or opt_state): use dense tensors of torch's own class, or "
                "train with compile=False."
            )
    fakes = [tracing.fake(tensor) for tensor in tensors]
    tracing.sharing = _sharing(tensors)
    places: dict[int, int] = {}
    connection: Connection | None = None

    def body(*value: Tensor) -> list[Tensor]:
        nonlocal places, connection
        outputs, places, connection = function(list(value))
        return outputs

    with _torch.python_dispatcher(), _torch.errors_not_logged(), tracing.mode:
        generators = traced_generators(tracing.context, tracing.drawing)
        with refusing_recurrent_layers(), refusing_global_state(), Constructors(), DrawnApart(), generators:
            raw = make_fx(body, decomposition_table=declared())(*fakes)
        lift_inputs(raw, tracing)
        draws, captured = lift_draws(raw, tracing), lift_captured(raw, tracing)
        in_order(raw)
        cuttable = mapping is None and connection is None and has_kernels(raw)
        pieces = cut(_functional(raw, decompositions()), places) if cuttable else None
        if mapping is not None:
            count = len(tracing.numbers) + len(draws)
            kinds = [*mapping.dims, *[0] * count, *[None] * len(captured)]
            graph = mapped(raw, mapping, kinds, reports=tracing.reports)
        elif pieces is None:
            graph = _functional(raw, {**decompositions(), **taken_apart()})
    if connection is not None:
        numbers = range(len(tensors), len(tensors) + len(tracing.numbers))
        call, taken, operations = connect(graph, connection, numbers, _half)
        code = _Code(call, taken, [], operations)
    else:
        code = _code(graph, places) if pieces is None else _joined(pieces)
    first = len(tensors)
    second = first + len(tracing.numbers)
    third = second + len(draws)
    call, record = code.call, tracing.recorders.of(code.device)
    if record is not None:
        call = Replaying(
            call,
            # Numbers have memory of their own, and what Python has from elsewhere seldom moves.
            [place for place, i in enumerate(code.taken) if i < lasting or first <= i < second or i >= third],
            record,
        )
    return Compiled(
        call=call,
        taken=[i for i in code.taken if i < first],
        numbers=[_scalar(tracing, i - first, mapping) for i in code.taken if first <= i < second],
        draws=draws,
        # All draws are made, in order, whether the graph uses them or not: those that follow depend on it.
        drawn=[i - second for i in code.taken if second <= i < third],
        captured=[(captured[i - third], describe(captured[i - third])) for i in code.taken if i >= third],
        written=code.written,
        seconds=time.perf_counter() - begin,
        operations=code.operations,
        kernels=() if pieces is None else pieces.described(),
    )


def _scalar(tracing: Tracing, number: int, mapping: MemberMapping | None) -> _Scalar | MemberScalar:
    if mapping is None:
        return _Scalar(*tracing.numbers[number])
    return MemberScalar(*tracing.numbers[number], mapping.count)


def _sharing(tensors: Sequence[Tensor]) -> frozenset[int]:
    """The positions of those that lie in memory in which others lie, too."""
    spans = []
    for position, tensor in enumerate(tensors):
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            spans.append((begin, begin + (last + 1) * tensor.element_size(), position))
    result: set[int] = set()
    reach, farthest = 0, -1
    for begin, end, position in sorted(spans):
        if begin < reach:
            result |= {farthest, position}
        if end > reach:
            reach, farthest = end, position
    return frozenset(result)


def _functional(raw: GraphModule, instead: _torch.Decompositions) -> GraphModule:
    """The graph without operations that write, and with others instead of some."""
    inputs = [node.meta["val"] for node in raw.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        functional = torch.func.functionalize(raw)
        return make_fx(functional, decomposition_table={**_torch.decompositions(), **instead})(*inputs)


@attrs.frozen
class _Code:
    """Machine code: which inputs it takes, which of them it writes to, and of how many operations it is.

    ``device`` is the one on which all of it runs, so that its kernels may be launched as one; None: there are others.
    """

    call: Call
    taken: list[int]
    written: list[int]
    operations: int
    device: torch.device | None = None


def _code(graph: GraphModule, places: dict[int, int]) -> _Code:
    written = write_back(graph, places)
    graph.graph.eliminate_dead_code()
    taken = drop_unused(graph)
    graph.recompile()
    operations = sum(node.op == "call_function" for node in graph.graph.nodes)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    device = _device(graph)
    return _Code(lower(graph, examples), taken, written, operations, device)


def _joined(pieces: CutGraph) -> _Code:
    first, second = _code(pieces.first, {}), _code(pieces.second, pieces.places)
    count = len(pieces.inputs)
    taken = sorted({*first.taken, *pieces.taken, *[i for i in second.taken if i < count]})
    return _Code(
        call=pieces.joined(first.call, first.taken, second.call, second.taken, taken),
        taken=taken,
        written=sorted({*pieces.written, *second.written}),
        operations=first.operations + len(pieces.kernels) + second.operations,
    )


def _device(graph: GraphModule) -> torch.device | None:
    device, why_not = device_of_recording(graph)
    if why_not is not None:
        note_not_recorded(why_not)
    return device


def lower(graph: GraphModule, examples: list[Tensor]) -> Call:
    """Machine code of a graph, entered with the least Python: no guards, no wrappers of autograd."""
    return interpret(graph) if is_on() else _torch.lower(graph, examples)[0]


def _half(graph: GraphModule, backward: bool, results: int | None) -> tuple[Call, Sequence[Any] | None]:
    """Machine code of a forward or of its backward, which are compiled together, and the strides of what it gives."""
    if is_on():
        return interpret(graph), None
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return _torch.lower(graph, examples, backward, results)


_aten = torch.ops.aten
_COPYING = frozenset({_aten.copy.default, _aten.slice_scatter.default})


def write_back(graph: GraphModule, places: dict[int, int]) -> list[int]:
    """End the graph with writing outputs into the inputs that they replace; gives the positions of these."""
    nodes = graph.graph
    output = next(iter(reversed(nodes.nodes)))
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    results = [origin(item) if number in places else item for number, item in enumerate(output.args[0])]
    targets = {number: inputs[position] for number, position in places.items()}
    written = {memory_of(node) for node in targets.values()}
    in_place = _could_be_in(graph, written)
    with nodes.inserting_before(output):
        safe: dict[object, Node] = {}
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
    output.args = ([safe.get(item, item) for number, item in enumerate(results) if number not in targets],)
    return sorted(position for number, position in places.items() if results[number] is not inputs[position])


def _could_be_in(graph: GraphModule, written: set[object]) -> dict[object, set[object]]:
    """Memory that a compiler may lay into memory that is written to in the end; and which.

    It computes ``index_put(a, ...)`` in a's own memory if that is written to at all, with whatever (pytorch #198096).
    """
    result: dict[object, set[object]] = {}
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
    """The tensors that this one could be computed in: by PyTorch's custom the first, or what is copied."""
    if node.op != "call_function" or not node.args:
        return
    operands = node.args[: 2 if node.target in _COPYING else 1]
    yield from (item for item in operands if isinstance(item, Node))


def _as_large(base: Node, node: Node) -> bool:
    """Whether two tensors have the same shape; their dtypes may be made one by leaving out casts."""
    a, b = base.meta.get("val"), node.meta.get("val")
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.device) == (b.shape, b.device)
