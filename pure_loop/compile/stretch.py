"""A stretch: what runs between two events that somebody attends to, as one graph for each shape of its inputs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, TypeAlias

import attrs
import optree
from torch import Tensor

from pure_loop.algorithm import Handler
from pure_loop.compile import compilations
from pure_loop.compile.draws import draw_all
from pure_loop.compile.numbers import Env, Guard, Number, TracedTimestamp
from pure_loop.compile.stages import TracedStages, Untraceable, traced_handlers
from pure_loop.compile.trace import Compiled, StrayDrawError, Tracing, compile_function
from pure_loop.compile.trees import (
    Durable,
    MetricsReadError,
    Unread,
    durable_fields,
    is_number,
    rebuild,
    tensors_of,
    walk,
)
from pure_loop.errors import CompileError
from pure_loop.event import Event
from pure_loop.loop import LoopStages
from pure_loop.model import _Instance
from pure_loop.optim.optimizer import clone_all
from pure_loop.state import State, fresh_draft_of, outside_batch
from pure_loop.time import Timestamp

__all__ = ["Own", "Program", "Run", "Stretch"]

Own: TypeAlias = Callable[[list[Tensor]], list[Tensor]]

# Graphs of one stretch that differ only in what Python decided by a number.
MOST_DECISIONS = 8
# The model is called in one place at a time; a loss that calls it again, or an algorithm, needs another instance.
SPARE_MODULES = 4


@attrs.frozen
class Traced:
    """What a program is traced with."""

    stages: TracedStages
    handlers: dict[Event, tuple[Handler, ...]]
    timestamps: tuple[Any, ...]


# (state, what is in flight, what to trace with) -> (state, report, what is in flight then)
Program: TypeAlias = Callable[[State, tuple[Any, ...], Traced], tuple[State, "Tensor | None", tuple[Any, ...]]]


@attrs.frozen
class Run:
    """What one call gave.

    Attributes:
        durable: the durable fields, in the order of :func:`durable_fields`.
        report: the number that the program reports, on its device; None where it reports none.
        flight: what is in flight.
    """

    durable: tuple[Any, ...]
    report: Tensor | None
    flight: tuple[Any, ...]


# Where a value of the next State comes from.
KEPT, OUTPUT, NUMBER, PLAIN = range(4)


@attrs.define
class _Field:
    """How one durable field is built.

    Attributes:
        spec: its structure.
        leaves: for each leaf, where it comes from, and which.
        written: whether the graph writes to one of its tensors.
        same: whether the field is what it was where no tensor was copied.
    """

    spec: Any
    leaves: list[tuple[int, Any]]
    written: bool
    same: bool


@attrs.define
class _Made:
    """A graph, and what is around it."""

    compiled: Compiled
    guards: list[Guard]
    moving: list[Guard]
    fields: list[_Field]
    start: list[int]
    tensors: list[int]
    flight: list[tuple[Any, list[tuple[int, int]]]]
    reports: bool
    same_shape: bool
    steady: bool
    written: list[int]
    sources: list[int]


class Stretch:
    """One program, compiled for what it is called with."""

    def __init__(
        self,
        name: str,
        program: Program,
        stages: LoopStages,
        *,
        own: Own | None = None,
        shown: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.program = program
        self.stages = stages
        self.own = own
        self.shown = shown
        self._graphs: dict[Any, list[_Made]] = {}
        self.names: tuple[str, ...] = ()
        self._fields: Callable[[State], tuple[Any, ...]] | None = None
        # Of the last call: what it gave, whose memory is ours, and what it was called with.
        self._values: tuple[Any, ...] = ()
        self._durable: Durable | None = None
        self._flight_key: Any = None
        self._made: _Made | None = None
        self._arguments: list[Tensor] | None = None

    def __call__(self, state: State, timestamps: tuple[Timestamp, ...], flight: tuple[Any, ...], index: int = 0) -> Run:
        """
        Args:
            state: outside of what is in flight.
            timestamps: the previous one, that of the step, and those after it.
            flight: what the program takes besides the durable fields.
            index: which microbatch it is, for random numbers.
        """
        if self._fields is None:
            # Results of evaluations come and go, and few algorithms look at them.
            self._take([name for name in durable_fields(type(state)) if name != "metrics"])
            assert self._fields is not None
        try:
            return self._call(state, timestamps, flight, index)
        except MetricsReadError:
            self._take(list(durable_fields(type(state))))
            return self._call(state, timestamps, flight, index)

    def _call(self, state: State, timestamps: tuple[Timestamp, ...], flight: tuple[Any, ...], index: int) -> Run:
        assert self._fields is not None
        values = self._fields(state)
        durable, made = self._durable, self._made
        ours = durable is not None and all(map(is_, values, self._values))
        key = _flight_key(flight)
        if durable is None or not ours:
            durable = Durable.of(state, self.names)
            env = Env(timestamps, durable.leaves)
            made = self._find(state, durable, key, env, flight)
            self._arguments = None
        else:
            env = Env(timestamps, durable.leaves)
            if made is None or key != self._flight_key or not _hold(made.moving, env):
                made = self._find(state, durable, key, env, flight)
                self._arguments = None
        self._flight_key, self._made = key, made
        return self._run(made, state, durable, values, env, flight, ours, index)

    def again(self, state: State, timestamps: tuple[Timestamp, ...], flight: tuple[Any, ...]) -> Tensor | None:
        """The last call once more, with other data, where it changes nothing but the memory of what lasts.

        ``state`` is what the last call made, its timestamp excepted. Gives the report; None: call in full.
        """
        made, arguments, durable = self._made, self._arguments, self._durable
        if made is None or arguments is None or durable is None or self.own is None or not made.steady:
            return None
        env = Env(timestamps, durable.leaves)
        if _flight_key(flight) != self._flight_key or not _hold(made.moving, env):
            return None
        # `own` is asked only where it won't copy: what it gave would be lost here, and it would not copy again.
        before = [durable.leaves[i] for i in made.written]
        if (self.shown is not None and self.shown()) or self.own(before) is not before:
            return None
        outputs = made.compiled.call(self._given(made, state, arguments, env, flight, 0))
        return outputs[0]  # type: ignore[no-any-return]

    def _given(
        self,
        made: _Made,
        state: State,
        arguments: list[Tensor],
        env: Env,
        flight: tuple[Any, ...],
        index: int,
    ) -> list[Tensor]:
        """What the graph is called with."""
        compiled = made.compiled
        given = arguments.copy()
        if made.tensors:
            found: Any = flight[0] if len(flight) == 1 and type(flight[0]) is tuple else None
            if found is None or not _all_tensors(found):
                found = [tensor for each in flight for tensor in tensors_of(each)]
            given += [found[i] for i in made.tensors]
        for number in compiled.numbers:
            number.set(env)
            given.append(number.tensor)
        if compiled.draws:
            drawn = draw_all(compiled.draws, state.seed, env.timestamps, self.stages.engine.rank, state.device, index)
            given += [drawn[i] for i in compiled.drawn]
        return given

    def _take(self, names: list[str]) -> None:
        """Take these fields of a State."""
        self.names = tuple(names)
        self._fields = attrgetter(*names)
        self._graphs.clear()
        self._values, self._durable, self._made, self._arguments = (), None, None, None

    def _run(
        self,
        made: _Made,
        state: State,
        durable: Durable,
        values: tuple[Any, ...],
        env: Env,
        flight: tuple[Any, ...],
        ours: bool,
        index: int,
    ) -> Run:
        compiled = made.compiled
        leaves = durable.leaves
        copied = False
        if made.written:
            before = [leaves[i] for i in made.written]
            # Memory of somebody else's making may be shared with anything.
            owned = self.own(before) if ours and self.own is not None else clone_all(before)
            if owned is not before:
                copied = True
                leaves = list(leaves)
                for position, tensor in zip(made.written, owned, strict=True):
                    leaves[position] = tensor
        arguments = None if copied else self._arguments
        if arguments is None:
            arguments = [leaves[i] for i in made.start]
            self._arguments = None if copied else arguments
        outputs = compiled.call(self._given(made, state, arguments, env, flight, index))
        values, durable = self._after(made, durable, leaves, values, env, outputs, copied)
        self._values, self._durable = values, durable
        if not made.same_shape:
            self._made = self._durable = None
        report = outputs[0] if made.reports else None
        if not made.flight:
            return Run(values, report, ())
        inputs = None
        after = []
        for template, places in made.flight:
            if inputs is None:
                inputs = [*[leaves[i] for i in made.sources], *[t for each in flight for t in tensors_of(each)]]
            tensors = [outputs[index] if kind == OUTPUT else inputs[index] for kind, index in places]
            after.append(rebuild(template, iter(tensors)))
        return Run(values, report, tuple(after))

    def _after(
        self,
        made: _Made,
        durable: Durable,
        leaves: list[Any],
        values: tuple[Any, ...],
        env: Env,
        outputs: Sequence[Any],
        copied: bool,
    ) -> tuple[tuple[Any, ...], Durable]:
        """The durable fields after the call."""
        if not copied and all(field.same for field in made.fields):
            return values, durable
        new_values: list[Any] = []
        new_leaves: list[Any] = []
        ends, specs = [], []
        begin = 0
        for field, value, end in zip(made.fields, values, durable.ends, strict=True):
            if field.same and not (copied and field.written):
                new_values.append(value)
                new_leaves += leaves[begin:end]
            else:
                found = [
                    leaves[which]
                    if kind == KEPT
                    else outputs[which]
                    if kind == OUTPUT
                    else which(env)
                    if kind == NUMBER
                    else which
                    for kind, which in field.leaves
                ]
                new_values.append(optree.tree_unflatten(field.spec, found))
                new_leaves += found
            begin = end
            specs.append(field.spec)
            ends.append(len(new_leaves))
        made_values = tuple(new_values)
        return made_values, Durable(made_values, tuple(specs), tuple(ends), new_leaves)

    def _find(self, state: State, durable: Durable, flight_key: Any, env: Env, flight: tuple[Any, ...]) -> _Made:
        """The graph that serves this call; compiled if there is none."""
        key = durable.key(), flight_key
        known = self._graphs.setdefault(key, [])
        for made in known:
            if _hold(made.guards, env):
                return made
        if len(known) >= MOST_DECISIONS:
            raise _too_many(self.name, known[-1], env)
        if not known:
            reason = "the first" if len(self._graphs) == 1 else "other shapes or another structure"
        else:
            reason = "; ".join(sorted({_about(guard) for guard in known[-1].guards if not guard.holds(env)}))
        made = self._make(state, durable, env, flight)
        known.append(made)
        count = sum(map(len, self._graphs.values()))
        note = compilations.Compilation(self.name, count, reason, made.compiled.operations, made.compiled.seconds)
        logging.getLogger("pure_loop.compile").info("%s", note)
        compilations.note(note)
        return made

    def _make(self, state: State, durable: Durable, env: Env, flight: tuple[Any, ...]) -> _Made:
        tracing = Tracing()
        host = tracing.host
        timestamps = tuple(TracedTimestamp.stand_in(t, slot, host) for slot, t in enumerate(env.timestamps))
        handlers = traced_handlers(self.stages.handlers, tracing)
        traced = Traced(TracedStages.of(self.stages, tracing, handlers), handlers, timestamps)
        places = [i for i, leaf in enumerate(durable.leaves) if isinstance(leaf, Tensor)]
        in_flight = [tensor for each in flight for tensor in tensors_of(each)]
        tensors = [*[durable.leaves[i] for i in places], *in_flight]
        leaf_names = durable.names(self.names)
        plan: dict[str, Any] = {}

        def function(fakes: list[Tensor]) -> tuple[list[Tensor], dict[int, int]]:
            tracing.host.guards.clear()
            stand_ins: list[Any] = [_stand_in(leaf, i, leaf_names[i], tracing) for i, leaf in enumerate(durable.leaves)]
            for position, fake in zip(places, fakes, strict=False):
                stand_ins[position] = fake
            begin, fields = 0, []
            for spec, end in zip(durable.specs, durable.ends, strict=True):
                fields.append(optree.tree_unflatten(spec, stand_ins[begin:end]))
                begin = end
            rest = iter(fakes[len(places) :])
            given = tuple(rebuild(each, rest) for each in flight)
            start = fresh_draft_of(outside_batch(state))
            unread = start.metrics = Unread()
            for name, value in zip(self.names, fields, strict=True):
                setattr(start, name, value)
            start.timestamp, start.previous_timestamp = timestamps[1], timestamps[0]
            start.__class__ = state.__class__
            end_state, report, after = self.program(start, given, traced)
            if "metrics" not in self.names and end_state.metrics is not unread:
                raise MetricsReadError("state.metrics was replaced while a step was compiled")
            return _outputs(plan, end_state, report, after, durable, self.names, leaf_names, stand_ins, places, fakes)

        # Made now: a module can't be copied on tensors without numbers.
        state.model.release()
        state.model._idle += [_Instance(state.model) for _ in range(SPARE_MODULES)]
        try:
            compiled = compile_function(function, tensors, tracing)
        except StrayDrawError as error:
            raise Untraceable(
                f"the stretch {self.name!r} can't be compiled: {error}. Forwards and losses of training may draw, "
                'and nothing else. compile="where possible" runs it eagerly.',
                ("forward", None),
            ) from None
        except Exception as error:
            error.add_note(f"while the stretch {self.name!r} was compiled, at batch {env.timestamps[1].batch}")
            raise
        finally:
            # Instances of the module hold tensors of the trace.
            state.model.release()
        count = len(places)
        fields = plan["fields"]
        carried = {which for field in fields for kind, which in field.leaves if kind == KEPT}
        moving = [
            guard
            for guard in host.guards
            if any(not isinstance(source, _Leaf) or source.position not in carried for source in guard.sources)
        ]
        position_of = {i: places[i] for i in range(count)}
        same_shape = tuple(field.spec for field in fields) == durable.specs and all(
            _alike(leaf, before)
            for leaf, before in zip(
                [leaf for field in fields for leaf in field.leaves], range(len(durable.leaves)), strict=True
            )
        )
        return _Made(
            compiled=compiled,
            guards=list(host.guards),
            moving=moving,
            fields=fields,
            start=[position_of[i] for i in compiled.taken if i < count],
            tensors=[i - count for i in compiled.taken if i >= count],
            flight=plan["flight"],
            reports=plan["reports"],
            same_shape=same_shape,
            steady=same_shape and plan["reports"] and not plan["flight"] and all(field.same for field in fields),
            written=[position_of[i] for i in compiled.written],
            sources=places,
        )


def _alike(leaf: tuple[int, Any], position: int) -> bool:
    """Whether a leaf is for the next call what it was for this one, shape, dtype and all."""
    kind, which = leaf
    return (kind == KEPT and which == position) or kind == NUMBER


def _hold(guards: list[Guard], env: Env) -> bool:
    for guard in guards:  # noqa: SIM110 - in every step
        if not guard.holds(env):
            return False
    return True


def _all_tensors(batch: tuple[Any, ...]) -> bool:
    for each in batch:  # noqa: SIM110 - in every step
        if type(each) is not Tensor:
            return False
    return True


def _flight_key(flight: tuple[Any, ...]) -> Any:
    if len(flight) == 1 and type(flight[0]) is tuple and _all_tensors(flight[0]):
        return tuple([(each.shape, each.stride(), each.dtype, each.device) for each in flight[0]])
    return tuple(map(walk, flight))


@attrs.frozen
class _Leaf:
    """The source of a Number: a leaf of the State."""

    position: int
    name: str


def _stand_in(leaf: Any, position: int, name: str, tracing: Tracing) -> Any:
    if not is_number(leaf):
        return leaf
    return Number(tracing.host, leaf, lambda env: env.leaves[position], frozenset({_Leaf(position, name)}))


def _outputs(
    plan: dict[str, Any],
    state: State,
    report: Tensor | None,
    flight: tuple[Any, ...],
    before: Durable,
    names: tuple[str, ...],
    leaf_names: list[str],
    stand_ins: list[Any],
    places: list[int],
    fakes: list[Tensor],
) -> tuple[list[Tensor], dict[int, int]]:
    """What the graph gives, and into ``plan`` how the next State is made of it."""
    inputs = {id(fake): index for index, fake in enumerate(fakes)}
    slots = {name: position for position, name in enumerate(leaf_names)}
    index_of = {position: index for index, position in enumerate(places)}
    results: list[Tensor] = []
    written: dict[int, int] = {}

    def put_out(tensor: Tensor) -> int:
        results.append(tensor)
        return len(results) - 1 - len(written)

    # Outputs are numbered in the order in which they come, those that are written in place left out.
    if report is not None:
        put_out(report)
    after = Durable.of(state, names)
    fields: list[_Field] = []
    begin = 0
    for spec, end in zip(after.specs, after.ends, strict=True):
        fields.append(_Field(spec, [], False, True))
        paths = after.names(names)[begin:end]
        for leaf, name in zip(after.leaves[begin:end], paths, strict=True):
            slot = slots.get(name)
            old = None if slot is None else stand_ins[slot]
            found: tuple[int, Any]
            if isinstance(leaf, Tensor):
                if leaf is old:
                    found = KEPT, slot
                elif isinstance(old, Tensor) and (leaf.shape, leaf.dtype, leaf.device) == (
                    old.shape,
                    old.dtype,
                    old.device,
                ):
                    assert slot is not None
                    results.append(leaf.detach())
                    written[len(results) - 1] = index_of[slot]
                    fields[-1].written = True
                    found = KEPT, slot
                else:
                    # Never an input itself: what lasts has memory of its own.
                    found = OUTPUT, put_out(leaf.detach().clone())
            elif leaf is old or (
                slot is not None
                and type(leaf) is type(before.leaves[slot])
                and leaf == before.leaves[slot]
                and not isinstance(old, Number)
            ):
                found = KEPT, slot
            elif isinstance(leaf, Number):
                found = NUMBER, leaf.evaluate
            else:
                found = PLAIN, leaf
            fields[-1].leaves.append(found)
        positions = range(begin, end)
        fields[-1].same = len(fields[-1].leaves) == len(positions) and all(
            kind == KEPT and which == position
            for (kind, which), position in zip(fields[-1].leaves, positions, strict=True)
        )
        begin = end
    for position in range(len(fields)):
        fields[position].same = fields[position].same and fields[position].spec == before.specs[position]
    parts = []
    overwritten = set(written.values())
    seen: dict[int, int] = {}
    for each in flight:
        sources = []
        for tensor in tensors_of(each):
            index = inputs.get(id(tensor))
            if index is not None and index not in overwritten:
                sources.append((KEPT, index))
                continue
            if id(tensor) not in seen:
                seen[id(tensor)] = put_out(tensor.detach())
            sources.append((OUTPUT, seen[id(tensor)]))
        parts.append((each, sources))
    plan.update(fields=fields, flight=parts, reports=report is not None, keep=flight)
    return results, written


def _about(guard: Guard) -> str:
    names = sorted(source.name if isinstance(source, _Leaf) else source for source in guard.sources)
    return f"{guard.where} decides by {', '.join(names) or 'a constant'}"


def _too_many(name: str, made: _Made, env: Env) -> CompileError:
    failed = [guard for guard in made.guards if not guard.holds(env)]
    what = "; ".join(sorted({_about(guard) for guard in failed}))
    return CompileError(
        f"{MOST_DECISIONS} graphs of the stretch {name!r} differ only in a number that Python code read, and batch "
        f"{env.timestamps[1].batch} would need one more: {what}. A graph holds such a number for ever. Let it meet "
        "tensors before anything asks for its value (state.loss * state.timestamp.elapsed is fine, float(...) of it or "
        "an `if` is not), count in a tensor (state.remember(name, count + 1) with count=torch.zeros(())), say "
        'how often with when=pl.every("10ba"), or write compile="where possible".'
    )
