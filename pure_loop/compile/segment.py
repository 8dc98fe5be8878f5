"""A segment: the code between two observed events, as one graph for each shape of its inputs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import clone_all
from pure_loop.compile import compilations
from pure_loop.compile.draws import SeedContext, draw_all
from pure_loop.compile.graph import Ended, Graph, Leaf, PerBatch, Program, Traced, at, make_graph
from pure_loop.compile.memory import Memory
from pure_loop.compile.next_state import OUTPUT, after
from pure_loop.compile.numbers import Env, Guard
from pure_loop.compile.refusals import WHERE_POSSIBLE, Untraceable
from pure_loop.compile.replay import Recorders
from pure_loop.compile.trees import (
    DurableFields,
    UnreadFieldError,
    describe,
    durable_fields,
    field_of,
    is_number,
    reader_of,
    rebuild,
    tensors_of,
    walk,
)
from pure_loop.data.batch import leaves
from pure_loop.errors import CompileError
from pure_loop.frozendict import FrozenDict, Overwritten, OverwrittenValue
from pure_loop.loop.batch import LoopStages
from pure_loop.stages.ownership import Ownership, overwritten_by
from pure_loop.state import State, raw_opt_state, with_fields
from pure_loop.time import Timestamp

__all__ = ["Ended", "PerBatch", "Program", "Run", "Segment", "Traced", "at"]

# Results of evaluations come and go; memory of the optimizer may be large, and is no matter of forwards and losses.
_READ_BY_FEW = ("metrics", "opt_state")
# Graphs of one segment that differ only in what Python decided by a number.
MOST_DECISIONS = 8


@attrs.frozen
class Run:
    """What one call gave.

    Attributes:
        names: of the durable fields that may be others than before.
        durable: these.
        report: the number that the program reports, on its device; None where it reports none.
        per_batch: the per-batch values, after the call.
    """

    names: tuple[str, ...]
    durable: tuple[Any, ...]
    report: Tensor | None
    per_batch: PerBatch

    def put_in(self, state: State, names: Sequence[str]) -> State:
        """The State with the durable fields, and the first of the per-batch values, by these names."""
        fields = dict(zip(self.names, self.durable, strict=True))
        return with_fields(state, **fields, **dict(zip(names, self.per_batch, strict=False)))


class Segment:
    """One program, compiled for what it is called with.

    Args:
        name: for errors and records.
        program: what is compiled.
        stages: the loop's.
        recorders: what records its graphs on a device.
        ownership: as the Compiler's.
        left_out: fields of a State that no graph takes.
        brief: whether it is called again with other parameters: it keeps nothing of a call, which a count of references
            them would find, and is given no memory of the optimizer unless it asks.
        connected: whether autograd continues through what it gives. It is called with leaves as parameters then, and
            writes to no memory.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        stages: LoopStages,
        recorders: Recorders,
        *,
        ownership: Ownership | None = None,
        left_out: tuple[str, ...] = (),
        brief: bool = False,
        connected: bool = False,
    ) -> None:
        self.name = name
        self.program = program
        self.stages = stages
        self.recorders = recorders
        self.ownership = ownership
        self.left_out = left_out
        self.brief = brief
        self.connected = connected
        self._graphs: dict[Any, list[Graph]] = {}
        # How many of them there are for batches that differ in no tensor, but in what else they hold.
        self._alike: Counter[Any] = Counter()
        self.names: tuple[str, ...] = ()
        self._fields: Callable[[State], tuple[Any, ...]] | None = None
        # Of the last call: what it gave, whose memory is ours, and what it was called with.
        self._values: tuple[Any, ...] = ()
        self._durable: DurableFields | None = None
        self._per_batch_key: Any = None
        self._made: Graph | None = None
        self._arguments: list[Tensor] | None = None
        self._memory: Memory | None = None

    def __call__(self, state: State, timestamps: tuple[Timestamp, ...], per_batch: PerBatch, index: int = 0) -> Run:
        """
        Args:
            state: without the per-batch values.
            timestamps: the previous one, that of the step, and those after it.
            per_batch: what the program takes besides the durable fields.
            index: which microbatch it is, for random numbers.
        """
        if self._fields is None:
            # What stands in for them is a mapping.
            few = _READ_BY_FEW if self.brief and type(raw_opt_state(state)) is FrozenDict else _READ_BY_FEW[:1]
            self._take(state, few)
            assert self._fields is not None
        with self.stages.running(state, "batch", code=None, gradients=torch.is_grad_enabled(), casts=False):
            try:
                return self._call(state, timestamps, per_batch, index)
            except UnreadFieldError:
                self._take(state)
                return self._call(state, timestamps, per_batch, index)

    def _call(self, state: State, timestamps: tuple[Timestamp, ...], per_batch: PerBatch, index: int) -> Run:
        assert self._fields is not None
        values = self._fields(state)
        durable, result = self._durable, self._made
        ours = durable is not None and all(map(is_, values, self._values))
        tensors = _tensors(per_batch)
        key = _per_batch_key(per_batch, tensors)
        if self.connected:
            key = key, tuple([tensor.requires_grad for tensor in tensors])
        if durable is None or not ours:
            self._durable = None
            durable = DurableFields.of(state, self.names)
            env = Env(timestamps, durable.leaves)
            if self.connected:
                key = key, tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in durable.leaves])
            result = self._find(state, durable, key, env, per_batch)
            self._arguments = None
        else:
            env = Env(timestamps, durable.leaves)
            if result is None or key != self._per_batch_key or not _hold(result.moving, env):
                result = self._find(state, durable, key, env, per_batch)
                self._arguments = None
        self._per_batch_key, self._made = key, result
        return self._run(result, state, durable, values, env, tensors, index)

    def repeats(self, state: State) -> bool:
        """Whether :meth:`again` can follow: a call changes memory and numbers alone; nothing observed the State."""
        result, durable = self._made, self._durable
        if result is None or durable is None or self._fields is None or self.ownership is None or not result.steady:
            return False
        if not all(map(is_, self._fields(state), self._values)):
            return False
        return not self.ownership.observed  # else it would copy

    def fits(self, timestamps: tuple[Timestamp, ...], per_batch: PerBatch, before: Env | None) -> Env | None:
        """What the last call's graph reads numbers from in a call with these, if it serves that, too.

        Args:
            before: what it reads them from in the call before that; None: that was the last one.
        """
        result = self._made
        assert result is not None
        assert self._durable is not None
        env = Env(timestamps, self._durable.leaves if before is None else _counted(result, before))
        same = _per_batch_key(per_batch, _tensors(per_batch)) == self._per_batch_key
        if before is not None and not _same_types(result, before.leaves, env.leaves):
            return None
        return env if same and _hold(result.moving, env) else None

    def again(self, state: State, calls: Sequence[tuple[Env, tuple[Any, ...]]]) -> tuple[State, tuple[int, int] | None]:
        """The last call again and again, with other data that fits.

        Args:
            state: as :meth:`repeats` was asked about; its timestamp may be another one.
            calls: for each what :meth:`fits` returned, and the per-batch values.

        Returns:
            The State after the last call, but for its timestamps. And the number of the call after which nothing was
            called, because it reported something, and what it reported; None, if none did. A report on another device
            than the CPU is not waited for.
        """
        instance, durable = self._made, self._durable
        assert instance is not None
        assert durable is not None
        arguments = self._arguments
        if arguments is None:
            arguments = self._arguments = [durable.leaves[i] for i in instance.start]
        with self.stages.running(state, "batch", code=None, gradients=False, casts=False):
            for number, (env, per_batch) in enumerate(calls):
                drawn = self._drawn(instance, state, env, 0)
                report = instance.compiled.call(self._given(instance, arguments, env, _tensors(per_batch), drawn))[0]
                if report.is_cpu and (result := report.item()):
                    return state, (number, int(result))
        if instance.same or not calls:
            return state, None
        before = durable.leaves
        durable = after(instance.next.fields, durable, before, calls[-1][0], [report], False)
        self._values, self._durable = durable.values, durable
        if not _same_types(instance, before, durable.leaves):
            self._made = self._durable = None
        return with_fields(state, **dict(zip(self.names, durable.values, strict=True))), None

    def _drawn(self, result: Graph, state: State, env: Env, index: int) -> list[Tensor]:
        """The random numbers that the graph takes."""
        compiled = result.compiled
        if not compiled.draws:
            return []
        drawn = draw_all(compiled.draws, SeedContext(state.seed, env, self.stages.engine.rank, index))
        return [drawn[i] for i in compiled.drawn]

    def _given(
        self, result: Graph, arguments: list[Tensor], env: Env, tensors: Sequence[Tensor], drawn: list[Tensor]
    ) -> list[Tensor]:
        """What the graph is called with."""
        compiled = result.compiled
        value = arguments + [tensors[i] for i in result.tensors]
        for number in compiled.numbers:
            number.set(env)
            value.append(number.tensor)
        value += drawn
        for tensor, before in compiled.captured:
            if describe(tensor) != before:
                raise CompileError(
                    f"a tensor outside of the State, to which the model, the loss or an algorithm refers, had shape "
                    f"{tuple(before[0])} and dtype {before[2]} when the segment {self.name!r} was compiled, and has "
                    f"{tuple(tensor.shape)} and {tensor.dtype}, or other strides, at batch {env.timestamps[1].batch}: "
                    "keep values that change in the State, state.remember(...)."
                )
            value.append(tensor.detach())
        return value

    def _take(self, state: State, without: tuple[str, ...] = ()) -> None:
        """Take the fields of a State without these."""
        left_out = {*without, *self.left_out}
        self.names = tuple(name for name in durable_fields(type(state)) if name not in left_out)
        self._fields = reader_of(type(state), self.names)
        self._graphs.clear()
        self._forget()

    def _forget(self) -> None:
        """What the last call was about."""
        self._values, self._durable, self._made, self._arguments, self._memory = (), None, None, None, None

    def _run(
        self,
        instance: Graph,
        state: State,
        durable: DurableFields,
        values: tuple[Any, ...],
        env: Env,
        tensors: Sequence[Tensor],
        index: int,
    ) -> Run:
        compiled = instance.compiled
        drawn = self._drawn(instance, state, env, index)
        leaves = self._writable(instance, state, durable, values)
        copied = leaves is not durable.leaves
        arguments = None if copied else self._arguments
        if arguments is None:
            arguments = [leaves[i] for i in instance.start]
            self._arguments = None if copied else arguments
        # Else operations outside of the machine code would note down what they do, where autograd continues through it.
        with torch.set_grad_enabled(False):
            outputs = compiled.call(self._given(instance, arguments, env, tensors, drawn))
        following = instance.next
        if copied or not instance.same:
            durable = after(following.fields, durable, leaves, env, outputs, copied)
            values = durable.values
        self._values, self._durable = values, durable
        if self.brief:
            self._forget()
        elif not (instance.same_shape and _same_types(instance, leaves, durable.leaves)):
            self._made = self._durable = None
        elif copied:
            self._memory = Memory(instance.written, durable)
        report = outputs[0] if following.reports else None
        names = self.names
        if instance.same and not instance.written:
            names = values = ()
        if not following.per_batch:
            return Run(names, values, report, ())
        inputs = [*[leaves[i] for i in instance.sources], *tensors]
        per_batch = []
        for template, places in following.per_batch:
            result = [outputs[index] if kind == OUTPUT else inputs[index] for kind, index in places]
            per_batch.append(rebuild(template, iter(result)))
        return Run(names, values, report, tuple(per_batch))

    def _writable(self, result: Graph, state: State, durable: DurableFields, values: tuple[Any, ...]) -> list[Any]:
        """The durable leaves, with copies in the places of those that the graph may not write to."""
        leaves = durable.leaves
        if not result.written:
            return leaves
        before = [leaves[i] for i in result.written]
        memory = self._memory
        # Memory that user code made may be shared with anything. So may that which graphs of this segment have
        # only read so far.
        if (
            self.ownership is None
            or memory is None
            or not memory.positions.issuperset(result.written)
            or not memory.is_in(durable, values, self._values)
        ):
            # From here on the copies are known to be unaliased.
            owned = before if self.ownership is None else self.ownership.writable_or_copies(before, None)
            owned = clone_all(before) if owned is before else owned
        else:

            def are_private(shown: State | None) -> bool:
                self._arguments = None
                if hasattr(state, "__dict__"):
                    return False  # a subclass without slots: vars(state) may be referred to, which no count shows
                holders = len({id(item) for item in (values, self._values, durable.values)})
                if len(memory.positions) != len(result.written) or not memory.alone(self.names, values, holders, shown):
                    return False
                for field in memory.fields():
                    if shown is not None and field_of(shown, self.names[field]) is values[field]:
                        _overwrite(shown, self.names[field])
                    _overwrite(state, self.names[field])
                return True

            owned = self.ownership.writable_or_copies(before, are_private)
        if owned is before:
            return leaves
        copied = list(leaves)
        for position, tensor in zip(result.written, owned, strict=True):
            copied[position] = tensor
        return copied

    def _find(self, state: State, durable: DurableFields, per_batch_key: Any, env: Env, per_batch: PerBatch) -> Graph:
        """The graph that serves this call; compiled if there is none."""
        key = durable.key(), per_batch_key
        known = self._graphs.setdefault(key, [])
        for result in known:
            if _hold(result.guards, env):
                return result
        if len(known) >= MOST_DECISIONS:
            raise _too_many(self.name, known[-1], env)
        if not known:
            # Of the loop's own per-batch values, the weight of a microbatch takes few values.
            alike = durable.key(), tuple([walk(value, by_value=is_number(value)) for value in per_batch])
            self._alike[alike] += 1
            if self._alike[alike] > MOST_DECISIONS:
                raise _too_many_values(self.name, per_batch, env)
            reason = "the first" if len(self._graphs) == 1 else "other shapes or another structure"
        else:
            reason = "; ".join(sorted({_about(guard) for guard in known[-1].guards if not guard.holds(env)}))
        result = make_graph(
            *(self.name, self.program, self.stages, state, self.names, durable, env, per_batch),
            recorders=self.recorders,
            connected=self.connected,
        )
        known.append(result)
        count = sum(map(len, self._graphs.values()))
        code = result.compiled
        note = compilations.Compilation(self.name, count, reason, code.operations, code.seconds, code.kernels)
        logging.getLogger("pure_loop.compile").info("%s", note)
        compilations.note(note)
        return result


def _counted(result: Graph, env: Env) -> list[Any]:
    """The durable leaves after a call, where it changes nothing but memory and numbers."""
    leaves = list(env.leaves)
    for position, evaluate in result.counted:
        leaves[position] = evaluate(env)
    return leaves


def _same_types(result: Graph, before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Whether each number is still an int, or a float: which one it is a graph takes for granted."""
    return all(type(before[position]) is type(now[position]) for position, _ in result.counted)


def _overwrite(state: State, field: str) -> None:
    """To touch this field of a State is an error from now on."""
    public, batch = field.lstrip("_"), state.timestamp.batch
    what = overwritten_by(public, batch)
    is_mapping = isinstance(field_of(state, field), FrozenDict)
    object.__setattr__(state, field, Overwritten.by(public, what) if is_mapping else OverwrittenValue(public, what))


def _hold(guards: list[Guard], env: Env) -> bool:
    for guard in guards:  # noqa: SIM110 - in every step
        if not guard.holds(env):
            return False
    return True


def _tensors(per_batch: PerBatch) -> Sequence[Tensor]:
    """The per-batch tensors: where a batch is a tuple of tensors, that tuple itself."""
    if len(per_batch) == 1 and type(per_batch[0]) is tuple:
        for item in per_batch[0]:
            if type(item) is not Tensor:
                break
        else:
            return per_batch[0]
    return [tensor for value in per_batch for tensor in tensors_of(value)]


def _per_batch_key(per_batch: PerBatch, tensors: Sequence[Tensor]) -> Any:
    if tensors is per_batch[0]:
        return tuple(map(describe, tensors))
    return tuple(map(walk, per_batch))


def _about(guard: Guard) -> str:
    names = sorted(source.name if isinstance(source, Leaf) else source for source in guard.sources)
    return f"{guard.where} decides by {', '.join(names) or 'a constant'}"


def _too_many_values(name: str, per_batch: PerBatch, env: Env) -> Untraceable:
    values = [value for value in per_batch if value is not None and not is_number(value)]
    pairs = [pair for value in values for pair in leaves(value)]
    what = ", ".join(f"{path} is {leaf!r:.40}" for path, leaf in pairs if not isinstance(leaf, Tensor | None))
    return Untraceable(
        f"{MOST_DECISIONS} graphs of the segment {name!r} differ only in what a batch holds besides tensors, and batch "
        f"{env.timestamps[1].batch} would need one more: {what}. A graph holds it for ever. Make it a tensor "
        f"(torch.tensor(index)), or leave it out of the batch; {WHERE_POSSIBLE}",
        ("forward", None),
    )


def _too_many(name: str, result: Graph, env: Env) -> CompileError:
    failed = [guard for guard in result.guards if not guard.holds(env)]
    what = "; ".join(sorted({_about(guard) for guard in failed}))
    return CompileError(
        f"{MOST_DECISIONS} graphs of the segment {name!r} differ only in a number that Python code read, and batch "
        f"{env.timestamps[1].batch} would need one more: {what}. A graph holds such a number for ever. Let it meet "
        "tensors before anything asks for its value (state.loss * state.timestamp.elapsed is fine, float(...) of it or "
        "an `if` is not). A function of Python's math asks for it: numpy.cos(x) does not, nor does a schedule. Or "
        "count in a tensor (state.remember(name, count + 1) with count=torch.zeros(())), say "
        'how often with when=pl.every("10ba"), or write compile="where possible".'
    )
