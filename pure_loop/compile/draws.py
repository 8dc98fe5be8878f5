"""Random numbers of a compiled step: drawn outside the graph, by the seeds and kernels that eager steps use.

A draw that depends on no data (a dropout mask) needs nothing of the graph, so it becomes an input, drawn before each
call under the seed of the stage or the generator that it came from, in the order in which it was drawn from that: the
same numbers, bit for bit.

A graph would hold a generator, and its seed, for ever. So what is drawn from ``pl.random.generator(...)``, or inside of
``pl.random.seeded(...)``, is traced as a draw from torch's global generator, and noted together with how its seed is
derived from the numbers of the step.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import takewhile
from typing import NoReturn, cast

import attrs
import torch
import torch.fx
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from pure_loop.compile._torch import Function, Options, schema_of
from pure_loop.compile.guards import Env, TraceContext
from pure_loop.compile.numbers import Number
from pure_loop.event import Event
from pure_loop.random import derive, seeded
from pure_loop.random.guards import seed_at
from pure_loop.random.seeds import tracer

__all__ = [
    *("DROPOUT", "Draw", "DrawnFromDataError", "Group", "RecordedDraw", "SeedContext", "StrayGeneratorError"),
    *("TracedGenerator", "draw_all", "is_draw", "traced_generators", "written"),
]

_aten = torch.ops.aten
# In place, with parameters that are numbers: what was in the tensor doesn't matter.
_FILLING = frozenset(
    {
        *(_aten.bernoulli_.float, _aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default),
        *(_aten.random_.default, _aten.random_.to, _aten.cauchy_.default),
        *(_aten.log_normal_.default, _aten.geometric_.default),
    }
)
# New tensors of a size.
_MAKING = frozenset(
    {
        *(_aten.rand.default, _aten.randn.default, _aten.randint.default, _aten.randint.low, _aten.randperm.default),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default),
        *(_aten.randint_like.low_dtype, _aten.bernoulli.p),
    }
)
# By tensors of probabilities or parameters, which have to be constants.
_SAMPLING = frozenset(
    {
        *(_aten.bernoulli.default, _aten.bernoulli_.Tensor, _aten.multinomial.default, _aten.poisson.default),
        *(_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor, _aten.binomial.default),
        *(_aten.normal.float_float, _aten._standard_gamma.default, _aten._sample_dirichlet.default),
    }
)
# What a dropout layer is traced as; in eager it is this only on accelerators.
DROPOUT = _aten.native_dropout.default
_DRAWS = _FILLING | _MAKING | {DROPOUT}


def is_draw(node: Node) -> bool:
    """Whether this operation of a graph draws random numbers, liftable or not."""
    target = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    # Attention may drop out, and mostly doesn't.
    schema = schema_of(target)
    if schema is None or "dropout_p" not in schema.names:
        return True
    value = dict(zip(schema.names, node.args, strict=False)) | node.kwargs
    return bool(value.get("dropout_p", 0.0))


def written(nodes: Iterable[Node]) -> Iterator[Node]:
    """What these operations write to, or of what it is a view."""
    for node in nodes:
        schema = schema_of(node.target)
        if schema is None or not schema.writes:
            continue
        value = [*node.args, *map(node.kwargs.get, schema.names[len(node.args) :])]
        for place in schema.writes:
            yield from map(_base, _nodes(value[place]))


def _nodes(value: object) -> list[Node]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Node)]


def _base(node: Node) -> Node:
    """What a node is a view of."""
    while node.op == "call_function" and _nodes(node.args[:1]):
        schema = schema_of(node.target)
        if node.target is not operator.getitem and (schema is None or not schema.is_view):
            break
        (node,) = _nodes(node.args[:1])
    return node


@attrs.frozen
class SeedContext:
    """What the seeds of one call of a graph are derived from.

    Attributes:
        seed: of the run.
        env: the numbers of the step.
        rank: of this process.
        first: the number of the first microbatch.
    """

    seed: int
    env: Env
    rank: int
    first: int


@attrs.frozen(eq=False)
class Group:
    """Everything that is drawn from one seed, in order: in a stage of a microbatch, or from a generator.

    Attributes:
        stage: its name; None: it is a generator.
        device: its generator is seeded, besides that of the CPU.
        seed: what it is in a call.
    """

    stage: str | None
    device: torch.device
    seed: Callable[[SeedContext], int]

    @classmethod
    def of_stage(cls, stage: str, index: int, slot: int, device: torch.device) -> Group:
        """A stage of a microbatch; however often it is gone through, it draws the same."""

        def seed(call: SeedContext) -> int:
            t = call.env.timestamps[slot]
            return derive(call.seed, stage, t.epoch, t.batch, call.first + index, call.rank)

        return cls(stage, device, seed)

    @classmethod
    def of_code(cls, path: tuple[str | int, ...], event: Event, index: int, slot: int, device: torch.device) -> Group:
        """Code of the user's at an event of training, which draws from global generators.

        Args:
            path: what code it is.
            event: at which it is called.
            index: the number of the microbatch after the first one of the graph.
            slot: the number of the timestamp at which it is called.
            device: its generator is seeded.
        """

        def seed(call: SeedContext) -> int:
            return seed_at(call.seed, path, event, call.env.timestamps[slot], microbatch=call.first + index)

        return cls(None, device, seed)

    def seeds(self, node: Node) -> bool:
        """Whether what this operation draws comes from a generator that is seeded."""
        value = node.meta["val"]
        device: torch.device = (value[0] if isinstance(value, tuple | list) else value).device
        return device.type in ("cpu", self.device.type)


@attrs.frozen
class RecordedDraw:
    """One draw of a trace.

    Attributes:
        group: it is drawn by the seed of this group.
        node: the operation.
        sample: draws it by tensors that are constant; None: it reads none.
    """

    group: Group
    node: Node
    sample: Callable[[], Tensor] | None

    @classmethod
    def of(cls, group: Group, node: Node, root: torch.nn.Module, inputs: Collection[Node]) -> RecordedDraw | None:
        """
        Args:
            root: holds what is constant in the graph.
            inputs: operations in the place of inputs of the graph.

        Returns:
            None if it depends on what the graph is given.
        """
        if node.target in _DRAWS:
            return cls(group, node, None)
        sample = _sample(node, root, inputs) if node.target in _SAMPLING else None
        return None if sample is None else cls(group, node, sample)


def _sample(draw: Node, root: torch.nn.Module, inputs: Collection[Node]) -> torch.fx.GraphModule | None:
    """This draw as a function without inputs, with what computes the tensors that it is given, if they are constant."""
    before = list(takewhile(lambda node: node is not draw, draw.graph.nodes))
    writers = [(node, set(written([node]))) for node in before]
    result: set[Node] = set()
    ahead = list(draw.all_input_nodes)
    while ahead:
        node = ahead.pop()
        if node.op == "placeholder" or node in inputs or is_draw(node):
            return None
        if node not in result:
            result.add(node)
            ahead += node.all_input_nodes
            ahead += [writer for writer, targets in writers if node in targets]
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    for node in [*filter(result.__contains__, before), draw]:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[draw])
    return torch.fx.GraphModule(root, graph)


@attrs.frozen
class Draw:
    """One input of a graph that is drawn before each call.

    Attributes:
        group: it is drawn by the seed of this group.
        make: draws it.
    """

    group: Group
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, drawn: RecordedDraw, like: Tensor) -> Draw:
        """
        Args:
            like: a tensor (a fake one will do) of the shape, strides, dtype and device of what is drawn.
        """
        if drawn.sample is not None:
            return cls(drawn.group, torch.no_grad()(drawn.sample))
        node, empty = drawn.node, _empty(like)
        draw: Callable[..., Tensor] = cast("Callable[..., Tensor]", node.target)
        args, kwargs = node.args, dict(node.kwargs)
        if node.target is DROPOUT:
            return cls(drawn.group, partial(_mask, cast("float", args[1]), empty))
        if args and (node.target in _FILLING or isinstance(args[0], Node)):
            rest = args[1:]
            return cls(drawn.group, lambda: draw(empty(), *rest, **kwargs))
        return cls(drawn.group, lambda: draw(*args, **kwargs))


def _empty(like: Tensor) -> Callable[[], Tensor]:
    """Makes memory for a tensor like this one."""
    size, stride, dtype, device = tuple(like.shape), tuple(like.stride()), like.dtype, like.device
    return lambda: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _mask(p: float, empty: Callable[[], Tensor]) -> Tensor:
    """1 where dropout keeps an element, else 0, as the layer draws it in eager."""
    mask = empty()
    if mask.is_cpu:
        return mask.bernoulli_(1 - p)
    drawn: Tensor = _aten.native_dropout(mask.fill_(1), p, True)[1]
    return drawn.to(mask.dtype)


def draw_all(draws: Sequence[Draw], call: SeedContext) -> list[Tensor]:
    """The draws of one call, each group in its order under its seed."""
    groups: defaultdict[Group, list[int]] = defaultdict(list)
    for position, draw in enumerate(draws):
        groups[draw.group].append(position)
    result: dict[int, Tensor] = {}
    for group, positions in groups.items():
        with seeded(group.seed(call), group.device):
            for position in positions:
                result[position] = draws[position].make()
    return [result[position] for position in range(len(draws))]


# Writes down what is drawn inside as of a group.
Drawing = Callable[[Group], AbstractContextManager[None]]


class StrayGeneratorError(RuntimeError):
    """A draw from a generator, of which no graph knows the state."""


class DrawnFromDataError(RuntimeError):
    """A draw that depends on what a graph is given; of the operation of that name."""


class TracedGenerator(torch.Generator):
    """One of a trace: whatever it is asked for is another thing in each call."""

    group: Group
    trace: _Tracer

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise StrayGeneratorError

    manual_seed = seed = initial_seed = get_state = set_state = clone_state = _refuse
    graphsafe_get_state = graphsafe_set_state = _refuse


@contextmanager
def traced_generators(context: TraceContext, drawing: Drawing) -> Iterator[None]:
    """Inside, on this thread, generators are those of a trace, with the numbers of ``context``."""
    trace = _Tracer(context, drawing)
    token = tracer.set(trace)
    try:
        with _TakenFromCalls(trace):
            yield
    finally:
        tracer.reset(token)


class Seed(Number):
    """One that seeds are made of, which no other generator can take."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise TypeError("a seed of a traced step has no hash")


class _Tracer:
    """What :mod:`pure_loop.random` asks for generators."""

    def __init__(self, context: TraceContext, drawing: Drawing) -> None:
        self._context = context
        self.drawing = drawing

    def computed(self, function: Callable[..., int], *value: object) -> int:
        # To code that takes it for an int it is one.
        return cast("int", Seed.of(self._context, function, *value))

    def generator(self, seed: int, device: torch.device | str) -> torch.Generator:
        result = TracedGenerator(device)
        result.group, result.trace = _group(seed, torch.device(device)), self
        return result

    def seeded(self, seed: int, device: torch.device | str | int | None) -> AbstractContextManager[None]:
        return self.drawing(_group(seed, torch.device("cpu" if device is None else device)))


def _group(seed: int | Number, device: torch.device) -> Group:
    if isinstance(seed, Number):
        evaluate = seed.evaluate
        return Group(None, device, lambda context: evaluate(context.env))
    return Group(None, device, lambda context: seed)


class _TakenFromCalls(TorchFunctionMode):
    """Calls lose their generator: what they draw belongs to its group."""

    def __init__(self, trace: _Tracer) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, function: Function, types: object, args: Sequence[object] = (), kwargs: Options | None = None
    ) -> object:
        kwargs = dict(kwargs or {})
        generator = next((item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)), None)
        if kwargs.get("generator", self) in (None, generator):
            del kwargs["generator"]  # None would be one, too: another overload
        if generator is None:
            return function(*args, **kwargs)
        if not isinstance(generator, TracedGenerator) or generator.trace is not self._trace:
            raise StrayGeneratorError
        with self._trace.drawing(generator.group):
            return function(*(None if item is generator else item for item in args), **kwargs)
