"""From Python to one graph: run it once on tensors without numbers, write down what it does, and compile that.

The Python runs for real (script, stages, algorithms, autograd), once, on fake tensors, and every operation that reaches
the dispatcher is written down: forward, backward and update are then one list of operations without autograd. A
second pass makes that list functional. What lasts is written back into its own memory at the end.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.fx
from torch import Tensor

from pure_loop.compile.draws import DRAWS, DROPOUT, Draw, Group, is_draw
from pure_loop.compile.numbers import Env, Evaluate, Host
from pure_loop.compile.operations import decompositions
from pure_loop.errors import CompileError

try:  # private to torch: in 2.11 to 2.13
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
        from torch._dispatch.python import enable_python_dispatcher
        from torch._inductor import config as inductor
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.utils import BoxedBool
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import (
            disable_proxy_modes_tracing,
            get_proxy_mode,
            make_fx,
            track_tensor_tree,
        )
except ImportError as error:
    raise CompileError(
        f"this version of torch ({torch.__version__}) has no compiler that pure_loop knows: {error}. Leave compile out."
    ) from error

__all__ = ["Compiled", "Tracing", "compile_function"]

_aten: Any = torch.ops.aten


class StrayDrawError(CompileError):
    """Random numbers drawn outside the stages that have seeds."""


class Tracing:
    """One trace under way: what Python asked of it besides operations on tensors."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.host = Host(self.lift)
        self.numbers: list[tuple[torch.dtype, Evaluate]] = []
        self.draws: list[tuple[Group, torch.fx.Node]] = []
        self._group: Group | None = None

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor without numbers; each is one of its own, whatever memory is shared."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def lift(self, dtype: torch.dtype, evaluate: Evaluate) -> Tensor:
        """A number of the step as an input of the graph."""
        mode = get_proxy_mode()
        assert mode is not None
        with disable_proxy_modes_tracing(), self.mode:
            fake = torch.empty((), dtype=dtype)
        proxy = mode.tracer.create_proxy("placeholder", f"number_{len(self.numbers)}", (), {})
        proxy.node.meta["val"] = fake
        track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
        self.numbers.append((dtype, evaluate))
        return fake

    @contextmanager
    def drawing(self, group: Group) -> Iterator[None]:
        """What is drawn inside is drawn under the seed of this group."""
        last, before = self.mark(), self._group
        self._group = group
        try:
            yield
        finally:
            self._group = before
        for node in self.since(last):
            if is_draw(node):
                if node.target not in DRAWS:
                    raise CompileError(
                        f"the {group.stage} draws random numbers from data ({node.target}), and what is drawn in a "
                        "compiled step can't depend on data: write it with a draw that doesn't, such as "
                        'torch.rand_like(p) < p for torch.bernoulli(p), or use compile="where possible".'
                    )
                if group.stage == "backward":
                    raise CompileError(
                        "the backward draws random numbers: activation checkpointing goes through a dropout layer "
                        "again, whose mask is drawn outside the compiled step. Compiled steps choose by themselves "
                        "what is kept for the backward: leave torch.utils.checkpoint out, or compile out."
                    )
                self.draws.append((group, node))

    def mark(self) -> Any:
        """A place in the list of operations."""
        mode = get_proxy_mode()
        return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)

    def since(self, last: Any) -> list[torch.fx.Node]:
        """The operations after a place."""
        mode = get_proxy_mode()
        if mode is None:
            return []
        found = []
        for node in reversed(mode.tracer.graph.nodes):
            if node is last:
                break
            found.append(node)
        return found[::-1]


@attrs.define
class Compiled:
    """A function of tensors as machine code.

    Attributes:
        call: takes a list of tensors, and empties it; gives the outputs.
        taken: which of the tensors it was compiled for it takes.
        numbers: further inputs, after these: 0-d tensors, and what their values are.
        draws: further inputs, after these.
        drawn: which of them.
        written: positions of tensors that it writes to.
        seconds: how long compiling took, in CPU time of this process and in wall-clock time.
        operations: how many there are in the graph.
    """

    call: Callable[[list[Tensor]], Sequence[Any]]
    taken: list[int]
    numbers: list[_Scalar]
    draws: list[Draw]
    drawn: list[int]
    written: list[int]
    seconds: float
    operations: int


class _Scalar:
    """A number as a tensor whose memory Python writes to."""

    __slots__ = ("_memory", "evaluate", "last", "tensor")

    def __init__(self, dtype: torch.dtype, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self.tensor = torch.zeros((), dtype=dtype)
        self._memory: Any = None
        if dtype in (torch.float64, torch.float32, torch.int64):
            import ctypes

            kind = {torch.float64: ctypes.c_double, torch.float32: ctypes.c_float, torch.int64: ctypes.c_int64}[dtype]
            self._memory = kind.from_address(self.tensor.data_ptr())
        self.last: Any = None

    def set(self, env: Env) -> None:
        value = self.evaluate(env)
        if value != self.last:
            if self._memory is not None:
                self._memory.value = value
            else:
                self.tensor.fill_(value)
            self.last = value


def compile_function(
    function: Callable[[list[Tensor]], tuple[list[Tensor], dict[int, int]]],
    tensors: Sequence[Tensor],
    tracing: Tracing,
) -> Compiled:
    """Trace and compile.

    Args:
        function: of fake tensors like ``tensors``; gives a list of tensors, and which of them are written to which
            input. What is written is no output.
        tensors: examples.
        tracing: collects what else the function asks for.
    """
    begin = time.perf_counter()
    fakes = [tracing.fake(tensor) for tensor in tensors]
    places: dict[int, int] = {}

    def body(*given: Tensor) -> list[Tensor]:
        nonlocal places
        outputs, places = function(list(given))
        return outputs

    with enable_python_dispatcher(), tracing.mode:
        raw = make_fx(body)(*fakes)
        draws = _lift_draws(raw, tracing)
        inputs = [node.meta["val"] for node in raw.graph.nodes if node.op == "placeholder"]
        table = {**select_decomp_table(), **decompositions()}
        with torch.no_grad():
            graph = make_fx(torch.func.functionalize(raw), decomposition_table=table)(*inputs)
    written = _write_back(graph, places)
    graph.graph.eliminate_dead_code()
    taken = _drop_unused(graph)
    graph.recompile()
    operations = sum(node.op == "call_function" for node in graph.graph.nodes)
    call = lower(graph, [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"])
    first = len(tensors)
    second = first + len(tracing.numbers)
    return Compiled(
        call=call,
        taken=[i for i in taken if i < first],
        numbers=[_Scalar(*tracing.numbers[i - first]) for i in taken if first <= i < second],
        draws=draws,
        # All draws are made, in order, whether the graph uses them or not: those that follow depend on it.
        drawn=[i - second for i in taken if i >= second],
        written=written,
        seconds=time.perf_counter() - begin,
        operations=operations,
    )


def lower(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[[list[Tensor]], Sequence[Any]]:
    """Machine code of a graph, entered with the least Python: no guards, no wrappers of autograd.

    On a GPU its launches are replayed as a CUDA graph, as far as torch finds that possible (which is not tested).
    """
    joint_graph_passes(graph)
    on_gpu = any(example.device.type == "cuda" for example in examples)
    # The C++ wrapper is entered at less cost than the Python one; of a large graph it is one file, on which a C++
    # compiler takes many minutes, and the cost of entering is nothing beside what the graph does.
    in_cpp = not on_gpu and len(graph.graph.nodes) <= CPP_WRAPPER_UP_TO
    try:
        with inductor.patch(_SETTINGS):
            made: Any = compile_fx_inner(
                graph, examples, cudagraphs=BoxedBool(on_gpu), is_inference=False, cpp_wrapper=in_cpp
            )
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and type(cause).__name__ != "InvalidCxxCompiler":
            cause = cause.__cause__
        if cause is None and "InvalidCxxCompiler" not in str(error):
            raise
        raise CompileError(
            "compile= needs a C++ compiler, and torch found none: install g++ (or say which one with the environment "
            "variable CXX), or leave compile out."
        ) from error
    return getattr(made, "current_callable", None) or made  # type: ignore[no-any-return]


# Nodes of a graph.
CPP_WRAPPER_UP_TO = 2000
# What the asserts look at is in the key by which a graph was chosen.
_SETTINGS: dict[str, Any] = {"size_asserts": False}


def _lift_draws(raw: torch.fx.GraphModule, tracing: Tracing) -> list[Draw]:
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
    for kind, prefix in enumerate(("number_", "draw_"), start=1):
        if name.startswith(prefix):
            return kind, int(name.removeprefix(prefix))
    return 0, 0  # sorting is stable


def _write_back(graph: torch.fx.GraphModule, places: dict[int, int]) -> list[int]:
    """End the graph with writing outputs into the inputs that they replace; gives the positions of these."""
    nodes = graph.graph
    output = next(iter(reversed(nodes.nodes)))
    inputs = [node for node in nodes.nodes if node.op == "placeholder"]
    results = [_origin(each) if number in places else each for number, each in enumerate(output.args[0])]
    targets = {number: inputs[position] for number, position in places.items()}
    memory = {_memory(node) for node in targets.values()}
    with nodes.inserting_before(output):
        safe: dict[Any, Any] = {}
        for node in dict.fromkeys(result for result in results if isinstance(result, torch.fx.Node)):
            # It is, or looks at, memory that is about to be written to.
            if _memory(node) in memory:
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


_SAME = frozenset({_aten.clone.default, _aten.alias.default, _aten.detach.default})


def _origin(value: Any) -> Any:
    """What a value is a mere copy of, if that is an input: nothing has to be written back."""
    node = value
    while isinstance(node, torch.fx.Node) and node.target in _SAME:
        node = node.args[0]
    return node if isinstance(node, torch.fx.Node) and node.op == "placeholder" else value


def _memory(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _drop_unused(graph: torch.fx.GraphModule) -> list[int]:
    """Take out the inputs that nothing reads; gives the positions of those that stay."""
    taken = []
    for position, node in enumerate([node for node in graph.graph.nodes if node.op == "placeholder"]):
        if node.users:
            taken.append(position)
        else:
            graph.graph.erase_node(node)
    return taken
