"""A segment: the code between two observed events, as one graph for each shape of its inputs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import is_
from typing import NamedTuple, cast

import attrs
import torch
from torch import Tensor

from pure_loop._internal.tree_ops import clone_all
from pure_loop.compile import compilations
from pure_loop.compile.draws import SeedContext, draw_all
from pure_loop.compile.graph import Graph, PerBatch, Program, make_graph
from pure_loop.compile.guards import MOST_DECISIONS, Env, all_hold, reasons, too_many_decisions
from pure_loop.compile.next_state import OUTPUT, after
from pure_loop.compile.refusals import WHERE_POSSIBLE, Untraceable
from pure_loop.compile.replay import Recorders
from pure_loop.compile.trees import (
    DurableFields,
    Memory,
    UnreadFieldError,
    describe,
    durable_fields,
    is_number,
    reader_of,
    rebuild,
    tensors_and_key,
    tensors_at,
    walk,
)
from pure_loop.data.batch import leaves
from pure_loop.errors import CompileError
from pure_loop.frozendict import FrozenDict, Overwritten, OverwrittenValue
from pure_loop.loop.batch import LoopStages
from pure_loop.membership import field_of
from pure_loop.stages.ownership import Ownership, overwritten_by
from pure_loop.state import State, raw_opt_state, with_fields
from pure_loop.time import Timestamp

# Results of evaluations come and go; memory of the optimizer may be large, and is no matter of forwards and losses.
_READ_BY_FEW = ("metrics", "opt_state")


class Run(NamedTuple):
    """What one call gave.

    Attributes:
        names: of the durable fields that may be others than before.
        durable: these.
        report: the number that the program reports, on its device; None where it reports none.
        per_batch: the per-batch values, after the call.
    """

    names: tuple[str, ...]
    durable: tuple[object, ...]
    report: Tensor | None
    per_batch: PerBatch

    def put_in(self, state: State, names: Sequence[str], **others: object) -> State:
        """The State with the durable fields, the first of the per-batch values, by these names, and other fields."""
        fields = dict(zip(self.names, self.durable, strict=True)) | dict(zip(names, self.per_batch, strict=False))
        return with_fields(state, **fields | others)


class Call(NamedTuple):
    """A call that :meth:`Segment.again` is to make, of the graph that was called last.

    Attributes:
        env: what it reads numbers from.
        per_batch: the per-batch values.
        tensors: those in them.
    """

    env: Env
    per_batch: PerBatch
    tensors: list[Tensor]


@attrs.define(eq=False, repr=False)
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
        interprets: whether its graphs are not compiled.
    """

    name: str
    program: Program
    stages: LoopStages
    recorders: Recorders
    ownership: Ownership | None = attrs.field(default=None, kw_only=True)
    left_out: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    brief: bool = attrs.field(default=False, kw_only=True)
    connected: bool = attrs.field(default=False, kw_only=True)
    interprets: bool = attrs.field(default=False, kw_only=True)
    names: tuple[str, ...] = attrs.field(default=(), init=False)
    _graphs: dict[object, list[Graph]] = attrs.field(factory=dict, init=False)
    # The key at which graphs were last looked for, and those that are there.
    _key: object = attrs.field(default=None, init=False)
    _candidates: list[Graph] = attrs.field(factory=list, init=False)
    # How many of them there are for batches that differ in no tensor, but in what else they hold.
    _alike: Counter[object] = attrs.field(factory=Counter, init=False)
    _fields: Callable[[State], tuple[object, ...]] | None = attrs.field(default=None, init=False)
    # Of the last call: what it gave, which has memory of ours, and what it was called with.
    _values: tuple[object, ...] = attrs.field(default=(), init=False)
    _durable: DurableFields | None = attrs.field(default=None, init=False)
    _per_batch_key: object = attrs.field(default=None, init=False)
    _made: Graph | None = attrs.field(default=None, init=False)
    _arguments: list[Tensor] | None = attrs.field(default=None, init=False)
    _memory: Memory | None = attrs.field(default=None, init=False)

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
        tensors, key = tensors_and_key(per_batch)
        if self.connected:
            key = key, tuple([tensor.requires_grad for tensor in tensors])
        if durable is None or not ours:
            self._durable = None
            durable = DurableFields.of(values)
            env = Env(timestamps, durable.leaves)
            if self.connected:
                key = key, tuple([isinstance(leaf, Tensor) and leaf.requires_grad for leaf in durable.leaves])
            result = self._find(state, durable, key, env, per_batch)
            self._arguments = None
        else:
            env = Env(timestamps, durable.leaves)
            if result is None or key != self._per_batch_key or not all_hold(result.moving, env):
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

    def next_call(self, timestamps: tuple[Timestamp, ...], per_batch: PerBatch, before: Call | None) -> Call | None:
        """The call with these after that one, if the graph that was called last serves it.

        ``before`` is None of the first one, which follows the last call that was made.
        """
        result = self._made
        assert result is not None
        assert self._durable is not None
        env = Env(timestamps, self._durable.leaves if before is None else result.counted_after(before.env))
        if before is not None and not result.same_types(before.env.leaves, env.leaves):
            return None
        tensors, key = tensors_and_key(per_batch)
        return Call(env, per_batch, tensors) if key == self._per_batch_key and all_hold(result.moving, env) else None

    def again(self, state: State, calls: Sequence[Call]) -> tuple[State, tuple[int, int] | None]:
        """The last call again and again, with other data that fits.

        Args:
            state: as :meth:`repeats` was asked about; its timestamp may be another one.
            calls: as :meth:`next_call` made them.

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
            arguments = self._arguments = tensors_at(durable.leaves, instance.start)
        with self.stages.running(state, "batch", code=None, gradients=False, casts=False):
            for number, (env, _, tensors) in enumerate(calls):
                drawn = self._drawn(instance, state, env, 0)
                report = instance.compiled.call(self._given(instance, arguments, env, tensors, drawn))[0]
                if report.is_cpu and (result := report.item()):
                    return state, (number, int(result))
        if instance.same or not calls:
            return state, None
        before = durable.leaves
        durable = after(instance.next.fields, durable, before, calls[-1].env, [report], False)
        self._values, self._durable = durable.values, durable
        if not instance.same_types(before, durable.leaves):
            self._made = self._durable = None
        return with_fields(state, **dict(zip(self.names, durable.values, strict=True))), None

    def _drawn(self, result: Graph, state: State, env: Env, index: int) -> list[Tensor]:
        """The random numbers that the graph takes."""
        compiled = result.compiled
        if not compiled.draws:
            return []
        if result.mapping is not None:
            drawn = result.mapping.drawn(compiled.draws, env, self.stages.engine.rank, index)
        else:
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
                    f"{tuple(cast('torch.Size', before[0]))} and dtype {before[2]} when the segment {self.name!r} was "
                    f"compiled, and has {tuple(tensor.shape)} and {tensor.dtype}, or other strides, at batch "
                    f"{env.timestamps[1].batch}: keep values that change in the State, state.remember(...)."
                )
            value.append(tensor.detach())
        return value

    def _take(self, state: State, without: tuple[str, ...] = ()) -> None:
        """Take the fields of a State without these."""
        left_out = {*without, *self.left_out}
        self.names = tuple(name for name in durable_fields(type(state)) if name not in left_out)
        self._fields = reader_of(type(state), self.names)
        self._graphs.clear()
        self._key = None
        self._forget()

    def _forget(self) -> None:
        """What the last call was about."""
        self._values, self._durable, self._made, self._arguments, self._memory = (), None, None, None, None

    def _run(
        self,
        instance: Graph,
        state: State,
        durable: DurableFields,
        values: tuple[object, ...],
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
            arguments = tensors_at(leaves, instance.start)
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
        elif not (instance.same_shape and instance.same_types(leaves, durable.leaves)):
            self._made = self._durable = None
        elif copied:
            self._memory = Memory(instance.written, durable)
        report = outputs[0] if following.reports else None
        names = self.names
        assert self._fields is not None
        if instance.same and all(map(is_, self._fields(state), values)):
            names = values = ()  # the State has them
        if not following.per_batch:
            return Run(names, values, report, ())
        inputs = [*tensors_at(leaves, instance.sources), *tensors]
        per_batch = []
        for template, places in following.per_batch:
            result = [outputs[index] if kind == OUTPUT else inputs[index] for kind, index in places]
            if instance.mapping is None:
                per_batch.append(rebuild(template, iter(result)))
            else:
                per_batch.append(instance.mapping.put_together(template, places, result))
        return Run(names, values, report, tuple(per_batch))

    def _writable(
        self, result: Graph, state: State, durable: DurableFields, values: tuple[object, ...]
    ) -> list[object]:
        """The durable leaves, with copies in the places of those that the graph may not write to."""
        leaves = durable.leaves
        if not result.written:
            return leaves
        before = tensors_at(leaves, result.written)
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

            def are_private(observed: State | None) -> bool:
                self._arguments = None
                if hasattr(state, "__dict__"):
                    return False  # a subclass without slots: vars(state) may be referred to, which no count shows
                holders = len({id(item) for item in (values, self._values, durable.values)})
                if len(memory.positions) != len(result.written) or not memory.alone(
                    self.names, values, holders, observed
                ):
                    return False
                for field in memory.fields():
                    if observed is not None and field_of(observed, self.names[field]) is values[field]:
                        _overwrite(observed, self.names[field])
                    _overwrite(state, self.names[field])
                return True

            owned = self.ownership.writable_or_copies(before, are_private)
        if owned is before:
            return leaves
        copied = list(leaves)
        for position, tensor in zip(result.written, owned, strict=True):
            copied[position] = tensor
        return copied

    def _find(
        self, state: State, durable: DurableFields, per_batch_key: object, env: Env, per_batch: PerBatch
    ) -> Graph:
        """The graph that serves this call; compiled if there is none."""
        key = durable.key(), per_batch_key
        if key != self._key:  # which takes less than to hash it
            self._candidates = self._graphs.setdefault(key, [])
            self._key = key
        graphs = self._candidates
        for result in graphs:
            if all_hold(result.guards, env):
                return result
        if len(graphs) >= MOST_DECISIONS:
            raise too_many_decisions(self.name, graphs[-1].guards, env)
        if not graphs:
            # Of the loop's own per-batch values, the weight of a microbatch takes few values.
            alike = durable.key(), tuple([walk(value, by_value=is_number(value)) for value in per_batch])
            self._alike[alike] += 1
            if self._alike[alike] > MOST_DECISIONS:
                raise _too_many_values(self.name, per_batch, env)
            reason = "the first" if len(self._graphs) == 1 else "other shapes or another structure"
        else:
            reason = reasons(graphs[-1].guards, env)
        with compilations.interpreted() if self.interprets else nullcontext():
            result = make_graph(
                *(self.name, self.program, self.stages, state, self.names, durable, env, per_batch),
                recorders=self.recorders,
                connected=self.connected,
            )
        graphs.append(result)
        count = sum(map(len, self._graphs.values()))
        code = result.compiled
        note = compilations.Compilation(self.name, count, reason, code.operations, code.seconds, code.kernels)
        logging.getLogger("pure_loop.compile").info("%s", note)
        compilations.note(note)
        return result


def _overwrite(state: State, field: str) -> None:
    """To touch this field of a State is an error from now on."""
    public, batch = field.lstrip("_"), state.timestamp.batch
    what = overwritten_by(public, batch)
    is_mapping = isinstance(field_of(state, field), FrozenDict)
    object.__setattr__(state, field, Overwritten.by(public, what) if is_mapping else OverwrittenValue(public, what))


def _too_many_values(name: str, per_batch: PerBatch, env: Env) -> Untraceable:
    values = [value for value in per_batch if value is not None and not is_number(value)]
    pairs = [pair for value in values for pair in leaves(value)]
    what = ", ".join(f"{path} is {leaf!r:.40}" for path, leaf in pairs if not isinstance(leaf, Tensor | None))
    return Untraceable(
        f"{MOST_DECISIONS} graphs of the segment {name!r} differ only in what a batch holds besides tensors, and batch "
        f"{env.timestamps[1].batch} would need one more: {what}. A graph holds it for ever. Make it a tensor "
        f"(torch.tensor(index)), or leave it out of the batch; {WHERE_POSSIBLE}",
    )
