"""Where each value of the State after a graph comes from: kept from before, an output, a number, or plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import attrs
import optree
from torch import Tensor

from pure_loop.compile.numbers import Env, Number, named
from pure_loop.compile.trees import DurableFields, tensors_of
from pure_loop.state import State

__all__ = ["KEPT", "NUMBER", "OUTPUT", "PLAIN", "Field", "NextState", "after", "plan"]

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

    spec: Any
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
    per_batch: list[tuple[Any, list[tuple[int, int]]]]
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


def plan(
    state: State,
    report: Tensor | None,
    per_batch: tuple[Any, ...],
    before: DurableFields,
    names: tuple[str, ...],
    stand_ins: list[Any],
    places: list[int],
    fakes: list[Tensor],
    lifted: list[Tensor],
    *,
    in_place: bool,
) -> tuple[NextState, list[Tensor], dict[int, int]]:
    """How the next State is made, what the graph gives for it, and which of that is written to which input.

    Args:
        state, report, per_batch: what the program returned.
        before: what the graph was traced for, and the ``names`` of its fields.
        stand_ins: what stood for each of its leaves.
        places: which of them are tensors.
        fakes: the inputs: these tensors, and the per-batch ones.
        lifted: numbers of the step as inputs.
        in_place: whether what lasts is written where it was.
    """
    inputs = {id(fake): index for index, fake in enumerate(fakes)}
    slots = {name: position for position, name in enumerate(before.names(names))}
    index_of = {position: index for index, position in enumerate(places)}
    results: list[Tensor] = []
    written: dict[int, int] = {}

    def put_out(tensor: Tensor) -> int:
        results.append(tensor)
        return len(results) - 1 - len(written)

    # Outputs are numbered in the order in which they come, those that are written in place left out.
    if report is not None:
        put_out(report)
    end_state = DurableFields.of(state, names)
    fields: list[Field] = []
    begin = 0
    all_paths = end_state.names(names)
    for position, (spec, end) in enumerate(zip(end_state.specs, end_state.ends, strict=True)):
        field = Field(spec, [], False, True)
        for leaf, name in zip(end_state.leaves[begin:end], all_paths[begin:end], strict=True):
            slot = slots.get(name)
            old = None if slot is None else stand_ins[slot]
            result: Source
            if isinstance(leaf, Tensor):
                if leaf is old:
                    result = KEPT, slot
                elif in_place and isinstance(old, Tensor) and _like(leaf, old):
                    assert slot is not None
                    results.append(leaf.detach())
                    written[len(results) - 1] = index_of[slot]
                    field.written = True
                    result = KEPT, slot
                else:
                    # Never an input itself: what lasts has memory of its own.
                    result = OUTPUT, put_out(leaf.detach().clone())
            elif leaf is old or (
                slot is not None
                and type(leaf) is type(before.leaves[slot])
                and leaf == before.leaves[slot]
                and not isinstance(old, Number)
            ):
                result = KEPT, slot
            elif isinstance(leaf, Number):
                result = NUMBER, named(leaf.where, leaf.evaluate)
            else:
                result = PLAIN, leaf
            field.leaves.append(result)
        unmoved = [(KEPT, index) for index in range(begin, end)]
        field.same = field.leaves == unmoved and spec == before.specs[position]
        fields.append(field)
        begin = end
    parts = []
    overwritten = set(written.values())
    seen: dict[int, int] = {}
    # Numbers are written anew for the next step. And autograd is told of each result by itself, so that none may be
    # another one's, or an input's, memory.
    memory = set(map(_memory, lifted if in_place else [*lifted, *fakes]))
    for value in per_batch:
        sources = []
        for tensor in tensors_of(value):
            index = inputs.get(id(tensor))
            if index is not None and index not in overwritten:
                sources.append((KEPT, index))
                continue
            if id(tensor) not in seen:
                found_before = _memory(tensor) in memory
                if not in_place:
                    memory.add(_memory(tensor))
                seen[id(tensor)] = put_out(tensor.detach().clone() if found_before else tensor.detach())
            sources.append((OUTPUT, seen[id(tensor)]))
        parts.append((value, sources))
    return NextState(fields, parts, report is not None), results, written


def _memory(tensor: Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _like(one: Tensor, other: Tensor) -> bool:
    """Whether the one can be written where the other is.

    Complex numbers can't: the compiler may read them after it has written there.
    """
    same = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return same and not one.is_complex()


def after(
    fields: list[Field], durable: DurableFields, leaves: list[Any], env: Env, outputs: Sequence[Any], copied: bool
) -> DurableFields:
    """The durable fields after a call.

    Args:
        durable: those before it.
        leaves: theirs, with the copies that the graph wrote to.
        env: by which numbers are evaluated.
        outputs: of the graph.
        copied: whether there are copies.
    """
    new_values: list[Any] = []
    new_leaves: list[Any] = []
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
