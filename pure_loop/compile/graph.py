"""A program as one graph, and what has to be known around it to call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import TypeAlias

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, Batch
from pure_loop.compile.connected import Connection, differentiate
from pure_loop.compile.draws import Seed
from pure_loop.compile.guards import Env, Evaluate, Guard, Leaf
from pure_loop.compile.lowering import Compiled, compile_function
from pure_loop.compile.members import MemberMapping, own_value, stand_in_values
from pure_loop.compile.next_state import KEPT, NUMBER, OUTPUT, Inputs, NextState, plan
from pure_loop.compile.numbers import Number, TracedTimestamp
from pure_loop.compile.refusals import WHERE_POSSIBLE, Untraceable, naming
from pure_loop.compile.replay import Recorders
from pure_loop.compile.stages import TracedStages, traced_handlers
from pure_loop.compile.tracing import StrayDrawError, Tracing
from pure_loop.compile.trees import (
    DurableFields,
    LazyField,
    UnreadFieldError,
    durable_fields,
    is_number,
    rebuild,
    tensors_at,
    tensors_of,
    values_of,
)
from pure_loop.data.batch import leaves
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.hooks import Handler
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import apply
from pure_loop.members import turns
from pure_loop.membership import PerMember
from pure_loop.random.guards import Place
from pure_loop.state import State, outside_batch, seal, with_fields

_ANY = torch.empty(0)
# The model is called in one place at a time; a loss that calls it again, or an algorithm, needs another instance.
SPARE_MODULES = 4


@attrs.frozen
class Traced:
    """What a program is traced with."""

    stages: TracedStages
    handlers: dict[Event, tuple[Handler, ...]]
    timestamps: tuple[TracedTimestamp, ...]


PerBatch: TypeAlias = tuple[Batch, ...]
# The State after a program, what it reports, and the per-batch values then.
Ended: TypeAlias = "tuple[State, Tensor | None, PerBatch]"
Program: TypeAlias = Callable[[State, PerBatch, Traced], Ended]


def at(event: Event, state: State, traced: Traced) -> State:
    """The State of an event that only algorithms handle."""
    state = seal(state, event)
    result = traced.handlers.get(event)
    return state if result is None else apply(event, state, result, traced.stages)


@attrs.define
class Graph:
    """A graph, and what is around it.

    Attributes:
        compiled: its machine code.
        guards: what Python decided by a number while it was traced.
        moving: those of them that may come out otherwise in the next call.
        next: how the State after it is built.
        start: which durable leaves it takes.
        tensors: which per-batch tensors it takes after these.
        same: whether the durable fields are what they were, but for what is in memory.
        same_shape: whether it can be called with what it gave.
        steady: whether a call changes nothing but memory and numbers, and reports.
        counted: where these numbers are among the durable leaves, and what they are after a call.
        written: the durable leaves that it writes to.
        sources: the durable leaves that are tensors.
        mapping: what the members of an ensemble have of their own; None: it is that of one model.
    """

    compiled: Compiled
    guards: list[Guard]
    moving: list[Guard]
    next: NextState
    start: list[int]
    tensors: list[int]
    same: bool
    same_shape: bool
    steady: bool
    counted: list[tuple[int, Evaluate]]
    written: list[int]
    sources: list[int]
    mapping: MemberMapping | None

    def counted_after(self, env: Env) -> list[object]:
        """The durable leaves after a call, where it changes nothing but memory and numbers."""
        leaves = list(env.leaves)
        for position, evaluate in self.counted:
            leaves[position] = evaluate(env)
        return leaves

    def same_types(self, before: Sequence[object], after: Sequence[object]) -> bool:
        """Whether each number is still an int, or a float: which one it is a graph takes for granted."""
        return all(type(before[position]) is type(after[position]) for position, _ in self.counted)


def make_graph(
    name: str,
    program: Program,
    stages: LoopStages,
    state: State,
    names: tuple[str, ...],
    durable: DurableFields,
    env: Env,
    per_batch: PerBatch,
    *,
    recorders: Recorders,
    connected: bool = False,
) -> Graph:
    """Trace a program on what it is called with, and compile it.

    Args:
        name: of the segment, for errors.
        program: what is traced.
        stages: the loop's.
        state: what it is called with, of which ``durable`` are the fields called ``names``.
        env: the numbers of this call.
        per_batch: the per-batch values: what the program takes besides the durable fields.
        recorders: what records the graph on a device.
        connected: whether autograd continues through it, from the parameters and the per-batch values.
    """
    if connected:
        _refuse_graphs(state, tuple(name for name in names if name != "params"))
    tracing = Tracing(state.device, recorders)
    per_batch_tensors = [tensor for item in per_batch for tensor in tensors_of(item)]
    tracing.begins_with_leaves = not connected or not any(tensor.requires_grad for tensor in per_batch_tensors)
    places = [i for i, leaf in enumerate(durable.leaves) if isinstance(leaf, Tensor)]
    tensors = [*tensors_at(durable.leaves, places), *per_batch_tensors]
    mapping = MemberMapping.of(state, len(places), per_batch, tensors)
    if mapping is not None:
        tensors = mapping.of_one(tensors)
        per_batch = tuple([value.stacked if isinstance(value, PerMember) else value for value in per_batch])
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise _sparse(name)
    timestamps = tuple(TracedTimestamp.stand_in(t, slot, tracing.context) for slot, t in enumerate(env.timestamps))
    place = Place()
    handlers = traced_handlers(stages.handlers, tracing, place)
    traced = Traced(TracedStages.of(stages, tracing, handlers, place), handlers, timestamps)
    function = _Function(program, tracing, traced, state, names, durable, places, per_batch, connected=connected)
    function.mapping = mapping

    # Made now: a module can't be copied on tensors without numbers.
    state.model.prepare_instances(SPARE_MODULES)
    try:
        with nullcontext() if mapping is None else turns.turn(mapping.first):
            compiled = compile_function(function, tensors, tracing, len(places), mapping)
    except StrayDrawError as error:
        raise Untraceable(
            f"the segment {name!r} can't be compiled: {error}. Forwards and losses of training may draw from the "
            "global generator; other code draws from pl.random.generator(...). "
            'compile="where possible" runs it eagerly.',
        ) from None
    except NotImplementedError as error:
        if "SparseTensorImpl" in str(error):  # of one between two operations
            raise _sparse(name) from error
        raise
    except Exception as error:
        error.add_note(f"while the segment {name!r} was compiled, at batch {env.timestamps[1].batch}")
        raise
    finally:
        # Instances of the module hold tensors of the trace.
        state.model.release()
    assert function.result is not None
    guards = tracing.context.guards
    if mapping is not None:
        guards = mapping.guards(guards, env)
        mapping.numbers(function.result)
    return _graph(compiled, function.result, guards, durable, places, mapping)


@attrs.define
class _Function:
    """A program as a function of tensors.

    Attributes:
        program, tracing, traced: what is traced, and with what.
        state: what the program is called with, of which ``durable`` are the fields called ``names``.
        places: which of their leaves are tensors: the first arguments. Those in ``per_batch`` follow.
        connected: whether autograd continues through it.
        mapping: over the members of an ensemble, of which one is traced.
        result: how the State after it is built, once it was traced.
    """

    program: Program
    tracing: Tracing
    traced: Traced
    state: State
    names: tuple[str, ...]
    durable: DurableFields
    places: list[int]
    per_batch: PerBatch
    connected: bool = attrs.field(kw_only=True)
    mapping: MemberMapping | None = attrs.field(default=None, init=False)
    result: NextState | None = attrs.field(default=None, init=False)

    def __call__(self, fakes: list[Tensor]) -> tuple[list[Tensor], dict[int, int], Connection | None]:
        tracing, count = self.tracing, len(self.places)
        tracing.context.guards.clear()
        stand_ins = self._stand_ins(fakes)
        rest = iter(fakes[count:])
        argument = tuple(rebuild(item, rest) for item in self.per_batch)
        unread = {name: LazyField() for name in durable_fields(type(self.state)) if name not in self.names}
        start = self._start(stand_ins, unread)
        leaves: FrozenDict[str, Tensor] = FrozenDict()
        if self.connected:
            per_batch_tensors = [tensor for item in self.per_batch for tensor in tensors_of(item)]
            for fake, real in zip(fakes[count:], per_batch_tensors, strict=False):
                fake.requires_grad_(real.requires_grad)
            leaves = self.traced.stages.engine.leaves(start, index=0, last=True)
            start = with_fields(start, params=leaves)
        state, report, per_batch = self.program(start, argument, self.traced)
        for field, stand_in in unread.items():
            if getattr(state, field) is not stand_in:
                raise UnreadFieldError(f"state.{field} was replaced while a step was compiled")
        _refuse_closed(per_batch, argument)
        if self.connected:
            state = state.replace(params=leaves.origin)
            _refuse_graphs(state, self.names)
        position_of = {place: position for position, place in enumerate(self.places)}
        inputs = Inputs(self.durable, self.names, stand_ins, position_of, fakes, tracing.lifted)
        self.result, results, written = plan(state, report, per_batch, inputs, in_place=not self.connected)
        tracing.reports = self.result.reports
        if not self.connected:
            return results, written, None
        place_of = {id(fake): place for place, fake in enumerate(fakes)}
        leaves_by_place = {
            place_of[id(leaves.origin[name])]: leaf for name, leaf in leaves.items() if leaf.requires_grad
        }
        leaves_by_place |= {place: fake for place, fake in enumerate(fakes) if fake.requires_grad}
        with naming(tracing, "the backward"):
            return results, written, differentiate(tracing, results, _with_graphs(self.result), leaves_by_place)

    def _stand_ins(self, fakes: list[Tensor]) -> list[object]:
        """What stands for each durable leaf."""
        leaves, names = self.durable.leaves, self.durable.names(self.names)
        result = [_stand_in(leaf, i, names[i], self.tracing) for i, leaf in enumerate(leaves)]
        for position, fake in zip(self.places, fakes, strict=False):
            result[position] = fake
        return result

    def _start(self, stand_ins: list[object], unread: dict[str, LazyField]) -> State:
        """The State that the program is called with."""
        begin, fields = 0, []
        for spec, end in zip(self.durable.specs, self.durable.ends, strict=True):
            fields.append(optree.tree_unflatten(spec, stand_ins[begin:end]))
            begin = end
        return with_fields(
            outside_batch(self.state),
            **dict(zip(self.names, fields, strict=True)),
            **unread,
            **self._of_one_member(),
            timestamp=self.traced.timestamps[1],
            previous_timestamp=self.traced.timestamps[0],
        )

    def _of_one_member(self) -> dict[str, object]:
        """What a State with members has of one of them while that is traced."""
        mapping, context = self.mapping, self.tracing.context
        if mapping is None:
            return {}
        return {
            "ensemble": None,
            "seed": Seed(context, mapping.seeds[mapping.first], mapping.seed, frozenset({"seed"})),
        }


def _graph(
    compiled: Compiled,
    following: NextState,
    guards: list[Guard],
    durable: DurableFields,
    places: list[int],
    mapping: MemberMapping | None,
) -> Graph:
    # What was traced has served: templates of plain tensors are rebuilt more quickly, and hold nothing.
    following.per_batch = [(rebuild(value, repeat(_ANY)), sources) for value, sources in following.per_batch]
    count = len(places)
    # Numbers that are for the next call what they were for this one.
    carried = {which for field in following.fields for kind, which in field.leaves if kind == KEPT}
    same, same_shape = all(field.same for field in following.fields), following.same_shape(durable)
    return Graph(
        compiled=compiled,
        guards=list(guards),
        moving=[
            guard
            for guard in guards
            if not all(isinstance(source, Leaf) and source.position in carried for source in guard.sources)
        ],
        next=following,
        start=[places[i] for i in compiled.taken if i < count],
        tensors=[i - count for i in compiled.taken if i >= count],
        same=same,
        same_shape=same_shape,
        steady=same_shape and following.reports and not following.per_batch,
        counted=[(position, which) for position, (kind, which) in enumerate(following.leaves()) if kind == NUMBER],
        written=[places[i] for i in compiled.written],
        sources=places,
        mapping=mapping,
    )


def _sparse(name: str) -> Untraceable:
    return Untraceable(
        f"the segment {name!r} has a sparse tensor (of the batch, a gradient or an algorithm), and a graph holds dense "
        f"ones: use torch.nn.Embedding(..., sparse=False), or .to_dense(); {WHERE_POSSIBLE}",
        ("update" if name == "update" else "forward", None),
    )


def _with_graphs(following: NextState) -> dict[int, Tensor]:
    """The per-batch outputs that a graph of autograd leads to, by their places."""
    return {
        place: tensor
        for value, sources in following.per_batch
        for tensor, (kind, place) in zip(tensors_of(value), sources, strict=True)
        if kind == OUTPUT and tensor.requires_grad
    }


def _refuse_closed(values: PerBatch, inputs: PerBatch) -> None:
    """Refuse what would be for ever what it was while the graph was made; what was given passes."""
    passed = {id(leaf) for _, leaf in leaves(inputs)}
    for _, leaf in leaves(values):
        if isinstance(leaf, Tensor) or id(leaf) in passed:
            continue
        if isinstance(leaf, Number):
            raise Untraceable(
                "a number of the step is put into the batch, the outputs or the loss: make a tensor of it, "
                f"torch.zeros(()) + state.timestamp.batch; {WHERE_POSSIBLE}",
            )
        if any(isinstance(item, Tensor) for item in getattr(leaf, "__dict__", {}).values()):
            raise Untraceable(
                f"a {type(leaf).__name__} holds tensors where no graph finds them: register the class with "
                f"optree.register_pytree_node(..., namespace={NAMESPACE!r}), or give a dict; {WHERE_POSSIBLE}",
            )


def _refuse_graphs(state: State, names: tuple[str, ...]) -> None:
    """Refuse memory that autograd would go through from one graph into the next."""
    durable = DurableFields.of(values_of(state, names))
    for leaf, name in zip(durable.leaves, durable.names(names), strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise Untraceable(
                f"{name} carries a graph of autograd from the forward to what follows an event that is observed "
                f"to: leave the event out of watch=, or keep the tensor's detach(); {WHERE_POSSIBLE}",
            )


def _stand_in(leaf: object, position: int, name: str, tracing: Tracing) -> object:
    values = stand_in_values(leaf)
    if values is not None:
        source = frozenset({Leaf(position, name)})
        return Number(tracing.context, own_value(leaf), lambda env: own_value(env.leaves[position]), source)
    if not is_number(leaf):
        return leaf
    return Number(tracing.context, leaf, lambda env: env.leaves[position], frozenset({Leaf(position, name)}))
