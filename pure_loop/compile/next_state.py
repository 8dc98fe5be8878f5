"""Where each value of the State after a graph comes from: kept from before, an output, a number, or plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import optree
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop.compile._torch import storage_key
from pure_loop.compile.guards import Env, named
from pure_loop.compile.numbers import Number
from pure_loop.compile.trees import DurableFields, tensors_of, values_of
from pure_loop.state import State

# KEPT: the leaf (or, per batch, the input) at this position. OUTPUT: the output at this position. NUMBER: what a
# function of the Env gives. PLAIN: the value itself.
KEPT, OUTPUT, NUMBER, PLAIN = range(4)
Source: TypeAlias = tuple[int, Any]


@attrs.define
class Field:
    """How one durable field is built.

    Attributes:
        spec: its structure.
        leaves: for each leaf, where it comes from, and which.
        written: whether the graph writes to one of its tensors.
        same: whether the field is what it was where no tensor was copied.
    """

    spec: optree.PyTreeSpec
    leaves: list[Source]
    written: bool
    same: bool


@attrs.define
class NextState:
    """How the State after a graph is built.

    Attributes:
        fields: the durable ones.
        per_batch: the per-batch values: each value, and where its tensors come from.
        reports: whether the first output is the number that the program reports.
    """

    fields: list[Field]
    per_batch: list[tuple[Batch, list[tuple[int, int]]]]
    reports: bool

    def leaves(self) -> list[Source]:
        """Where each durable leaf comes from."""
        return [leaf for field in self.fields for leaf in field.leaves]

    def same_shape(self, before: DurableFields) -> bool:
        """Whether each leaf is for the next call what it was for this one, but for the types of numbers."""
        return tuple(field.spec for field in self.fields) == before.specs and all(
            (kind == KEPT and which == position) or kind == NUMBER
            for position, (kind, which) in enumerate(self.leaves())
        )


@attrs.frozen
class Inputs:
    """What a graph is traced with.

    Attributes:
        before: the durable fields, of these ``names``.
        stand_ins: what stands for each of their leaves.
        position_of: by the place of a tensor among the durable leaves: its position in ``tensors``.
        tensors: stand-ins for these tensors, and the per-batch ones.
        lifted: numbers of the step as inputs.
    """

    before: DurableFields
    names: tuple[str, ...]
    stand_ins: list[object]
    position_of: dict[int, int]
    tensors: list[Tensor]
    lifted: list[Tensor]


def plan(
    state: State, report: Tensor | None, per_batch: tuple[Batch, ...], inputs: Inputs, *, in_place: bool
) -> tuple[NextState, list[Tensor], dict[int, int]]:
    """How the next State is made, what the graph gives for it, and which of that is written to which input.

    Args:
        state, report, per_batch: what the program returned.
        inputs: what it was traced with.
        in_place: whether what lasts is written where it was.
    """
    result = _Plan(inputs, in_place)
    # Outputs are numbered in the order in which they come, those that are written in place left out.
    if report is not None:
        result.put_out(report)
    fields = result.fields(DurableFields.of(values_of(state, inputs.names)))
    return NextState(fields, result.per_batch(per_batch), report is not None), result.results, result.written


@attrs.define
class _Plan:
    """What a graph gives, and which of that is written to which input, so far."""

    inputs: Inputs
    in_place: bool
    results: list[Tensor] = attrs.field(factory=list, init=False)
    written: dict[int, int] = attrs.field(factory=dict, init=False)

    def put_out(self, tensor: Tensor) -> int:
        self.results.append(tensor)
        return len(self.results) - 1 - len(self.written)

    def fields(self, after: DurableFields) -> list[Field]:
        """How each durable field is built."""
        before, names = self.inputs.before, self.inputs.names
        slots = {name: position for position, name in enumerate(before.names(names))}
        paths = after.names(names)
        result: list[Field] = []
        begin = 0
        for spec, spec_before, end in zip(after.specs, before.specs, after.ends, strict=True):
            places = [slots.get(path) for path in paths[begin:end]]
            written = len(self.written)
            leaves = [self._leaf(leaf, slot) for leaf, slot in zip(after.leaves[begin:end], places, strict=True)]
            same = spec == spec_before and leaves == [(KEPT, index) for index in range(begin, end)]
            result.append(Field(spec, leaves, len(self.written) > written, same))
            begin = end
        return result

    def _leaf(self, leaf: object, slot: int | None) -> Source:
        """Where a durable leaf comes from; ``slot``: that of before which is in its place."""
        old = None if slot is None else self.inputs.stand_ins[slot]
        if isinstance(leaf, Tensor):
            if leaf is old:
                return KEPT, slot
            if slot is not None and self.in_place and isinstance(old, Tensor) and _like(leaf, old):
                self.results.append(leaf.detach())
                self.written[len(self.results) - 1] = self.inputs.position_of[slot]
                return KEPT, slot
            # Never an input itself: what lasts has memory of its own.
            return OUTPUT, self.put_out(leaf.detach().clone())
        if leaf is old or (slot is not None and not isinstance(old, Number) and _equal(leaf, old)):
            return KEPT, slot
        return (NUMBER, named(leaf.where, leaf.evaluate)) if isinstance(leaf, Number) else (PLAIN, leaf)

    def per_batch(self, values: tuple[Batch, ...]) -> list[tuple[Batch, list[tuple[int, int]]]]:
        """The per-batch values, and where the tensors in them come from."""
        tensors = self.inputs.tensors
        overwritten = set(self.written.values())
        inputs = {id(tensor): index for index, tensor in enumerate(tensors) if index not in overwritten}
        # Numbers are written anew for the next step. And autograd is told of each result by itself, so that none may be
        # another one's, or an input's, memory.
        memory = set(map(storage_key, self.inputs.lifted if self.in_place else [*self.inputs.lifted, *tensors]))
        outputs: dict[int, int] = {}

        def source(tensor: Tensor) -> tuple[int, int]:
            index = inputs.get(id(tensor))
            if index is not None:
                return KEPT, index
            if id(tensor) not in outputs:
                key = storage_key(tensor)
                outputs[id(tensor)] = self.put_out(tensor.detach().clone() if key in memory else tensor.detach())
                if not self.in_place:
                    memory.add(key)
            return OUTPUT, outputs[id(tensor)]

        return [(value, [source(tensor) for tensor in tensors_of(value)]) for value in values]


def _equal(left: object, right: object) -> bool:
    """Whether two plain leaves are of one class, and equal."""
    return type(left) is type(right) and left == right


def _like(tensor: Tensor, place: Tensor) -> bool:
    """Whether the tensor can be written where ``place`` is.

    Complex numbers can't: the compiler may read them after it has written there.
    """
    same = (tensor.shape, tensor.dtype, tensor.device) == (place.shape, place.dtype, place.device)
    return same and not tensor.is_complex()


def after(
    fields: list[Field], durable: DurableFields, leaves: list[object], env: Env, outputs: Sequence[Tensor], copied: bool
) -> DurableFields:
    """The durable fields after a call.

    Args:
        durable: those before it.
        leaves: theirs, with the copies that the graph wrote to.
        env: by which numbers are evaluated.
        outputs: of the graph.
        copied: whether there are copies.
    """
    new_values: list[object] = []
    new_leaves: list[object] = []
    ends, specs = [], []
    begin = 0
    for field, value, end in zip(fields, durable.values, durable.ends, strict=True):
        if field.same and not (copied and field.written):
            new_values.append(value)
            new_leaves += leaves[begin:end]
        else:
            result = [
                leaves[which]
                if kind == KEPT
                else outputs[which]
                if kind == OUTPUT
                else which(env)
                if kind == NUMBER
                else which
                for kind, which in field.leaves
            ]
            new_values.append(optree.tree_unflatten(field.spec, result))
            new_leaves += result
        begin = end
        specs.append(field.spec)
        ends.append(len(new_leaves))
    return DurableFields(tuple(new_values), tuple(specs), tuple(ends), new_leaves)
