"""Members: the traced step of one model, mapped over those of an ensemble by ``torch.vmap``.

A step is traced for one member, like that of one model. The list of operations is mapped before operations are
decomposed, because torch knows how to map whole ones (a convolution, its backward). What each member has of its own
gets a leading dimension of members: parameters, buffers, memory, draws, numbers of the step. A batch that all share
has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pure_loop._internal.pytree import Batch
from pure_loop.compile import _torch
from pure_loop.compile.compilations import is_on
from pure_loop.compile.draws import Draw, SeedContext, draw_all
from pure_loop.compile.guards import Env, Evaluate, Guard
from pure_loop.compile.next_state import KEPT, NUMBER, NextState
from pure_loop.compile.operations import decompositions, taken_apart
from pure_loop.compile.refusals import OR_WRONG, Untraceable
from pure_loop.compile.trees import is_number, rebuild, tensors_of
from pure_loop.members import turns
from pure_loop.membership import MemberValues, PerMember
from pure_loop.state import State

_aten = torch.ops.aten

LOOP_INSTEAD = 'pl.ensemble(..., fallback="loop") computes the members one after the other, with the same results.'


@attrs.frozen
class MemberMapping:
    """What the members of an ensemble have of their own, of what a graph is called with.

    Attributes:
        seeds: those of the members.
        first: the number of the one for which steps are traced: the first that trains.
        dims: of each tensor that the graph is called with: 0: it has a leading dimension of members; None: all
            share it.
        strides: of these tensors.
    """

    seeds: tuple[int, ...]
    first: int
    dims: tuple[int | None, ...]
    strides: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, state: State, durable: int, per_batch: Iterable[Batch], tensors: Sequence[Tensor]
    ) -> MemberMapping | None:
        """
        Args:
            state: the one that is called with.
            durable: how many durable tensors there are.
            per_batch: the values with the others.
            tensors: all of them.

        Returns:
            None: the State has no members.
        """
        if state.ensemble is None:
            return None
        dims: list[int | None] = [0] * durable
        for value in per_batch:
            dims += [0 if isinstance(value, PerMember) else None] * len(tensors_of(value))
        running = state.ensemble.running
        first = running.index(True) if True in running else 0
        return cls(state.ensemble.seeds, first, tuple(dims), tuple(tensor.stride() for tensor in tensors))

    @property
    def count(self) -> int:
        return len(self.seeds)

    def of_one(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of one member, for a trace."""
        return [tensor if dim is None else tensor[self.first] for tensor, dim in zip(tensors, self.dims, strict=True)]

    def seed(self, env: Env) -> int:
        """The seed of the member whose turn it is."""
        number = turns.member()
        assert number is not None
        return self.seeds[number]

    def drawn(self, draws: Sequence[Draw], env: Env, rank: int, index: int) -> list[Tensor]:
        """The draws of one call, those of each member by its seed."""
        rows = []
        for number, seed in enumerate(self.seeds):
            with turns.turn(number):
                rows.append(draw_all(draws, SeedContext(seed, env, rank, index)))
        return [_stacked(column) for column in zip(*rows, strict=True)]

    def guards(self, guards: list[Guard], env: Env) -> list[Guard]:
        """Guards that ask all members.

        Raises:
            Untraceable: the members decide otherwise, one than another.
        """
        result = [attrs.evolve(guard, evaluate=_of_all(guard, self.count)) for guard in guards]
        for guard in result:
            guard.evaluate(env)
        return result

    def numbers(self, following: NextState) -> None:
        """Let numbers of the next State be computed for each member."""
        for field in following.fields:
            field.leaves = [
                (kind, of_each(which, self.count) if kind == NUMBER else which) for kind, which in field.leaves
            ]

    def put_together(self, template: Batch, places: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> Batch:
        """A per-batch value of all members.

        Args:
            template: that of the trace; a :class:`PerMember` where all members may share it.
            places: where its tensors come from.
            tensors: these.
        """
        shared = [kind == KEPT and self.dims[index] is None for kind, index in places]
        if isinstance(template, PerMember) and all(shared):
            return rebuild(template.stacked, iter(tensors))
        wide = [
            tensor.expand(self.count, *tensor.shape) if is_shared else tensor
            for tensor, is_shared in zip(tensors, shared, strict=True)
        ]
        return rebuild(template, iter(wide))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One after the other in memory, as the graph was traced."""
    first = tensors[0]
    result = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)
    return torch.stack(list(tensors), out=result)


def _of_all(guard: Guard, count: int) -> Evaluate:
    def evaluate(env: Env) -> Any:
        try:
            return turns.for_all(lambda: guard.evaluate(env), count)
        except turns.MembersDifferError as error:
            raise Untraceable(
                f"{guard.where} decides by a number that is not equal for all members: it is {error}. One graph serves "
                f"all members: compute with tensors instead, torch.where(condition, a, b). {LOOP_INSTEAD}",
                guard.part,
            ) from None

    return evaluate


def of_each(evaluate: Evaluate, count: int) -> Evaluate:
    def value(env: Env) -> Any:
        values = turns.of_each(lambda: evaluate(env), count)
        alike = all(type(item) is type(values[0]) and item == values[0] for item in values)
        return values[0] if alike else MemberValues(tuple(values))

    return value


class MemberScalar:
    """A number of the step for each member, as a tensor of shape (members,) that is written to."""

    __slots__ = ("_count", "_most", "evaluate", "last", "tensor")

    def __init__(self, dtype: torch.dtype, evaluate: Evaluate, device: torch.device, count: int) -> None:
        self.evaluate = evaluate
        self.tensor = torch.zeros(count, dtype=dtype, device=device)
        self._count = count
        self._most = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
        self.last: object = None

    def set(self, env: Env) -> None:
        values = turns.of_each(lambda: self.evaluate(env), self._count)
        # As texts, because 0.0 and -0.0 are equal, and not the same.
        key = values if values[0] and len(values) == 1 else [str(value) for value in values]
        if key == self.last:
            return
        fitting = [value if not abs(value) > self._most else math.copysign(math.inf, value) for value in values]
        if len(fitting) == 1:
            self.tensor.fill_(fitting[0])
        else:
            self.tensor.copy_(torch.tensor(fitting, dtype=self.tensor.dtype))
        self.last = key


def stand_in_values(leaf: object) -> list[Any] | None:
    """The numbers of members in the place of one; None: it is something else."""
    if isinstance(leaf, MemberValues) and all(map(is_number, leaf.values)):
        return list(leaf.values)
    return None


def own_value(leaf: object) -> object:
    """That of the member whose turn it is."""
    number = turns.member()
    assert isinstance(leaf, MemberValues)
    assert number is not None
    return leaf.values[number]


# The transform.


def mapped(raw: GraphModule, mapping: MemberMapping, kinds: Sequence[int | None], *, reports: bool) -> GraphModule:
    """The functional graph of all members.

    Args:
        raw: that of one, as it was traced.
        mapping: what they have of their own.
        kinds: of each input the dimension of members; None: all share it.
        reports: whether the first output is a number that the loop looks at; of all members it is one, of which
            :func:`reported` knows the member.

    Raises:
        Untraceable: torch can't map an operation; names it.
    """
    count = mapping.count
    fakes = [node.meta["val"] for node in raw.graph.nodes if node.op == "placeholder"]
    # As they lie in memory; what is drawn, and numbers, one member after the other.
    strides = [*mapping.strides, *[None] * (len(fakes) - len(mapping.strides))]
    wide = [
        fake if dim is None else _wide(fake, count, stride)
        for fake, dim, stride in zip(fakes, kinds, strides, strict=True)
    ]
    # What torch maps by a loop over members is right, and written down as such.
    with torch.no_grad(), _torch.mapping_in_silence():
        one = _reshaping(_torch.make_fx(torch.func.functionalize(raw), decomposition_table=_mappable())(*fakes))
        nodes = [node for node in one.graph.nodes if node.op == "call_function"]
        instead = _torch.unmapped({node.target for node in nodes}, {node.target for node in nodes if _mixes(node)})
        if instead:
            one = _reshaping(_torch.make_fx(one, decomposition_table=instead)(*fakes))

        def of_members(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(one(*tensors))

        vectorised = torch.vmap(of_members, in_dims=tuple(kinds), out_dims=0)

        def of_all(*tensors: Tensor) -> list[Tensor]:
            results = [_own_memory(tensor, count) for tensor in vectorised(*tensors)]
            if reports:
                report = results[0]
                results[0] = report.max() + REPORTS * report.argmax()
            return results

        # Without a compiler, operations stay as large as they are.
        table = {} if is_on() else _torch.decompositions()
        try:
            result = _torch.make_fx(of_all, decomposition_table={**table, **decompositions(), **taken_apart()})(*wide)
        except (RuntimeError, ValueError, TypeError) as error:  # a NotImplementedError is a RuntimeError
            # Or the user's: a matrix product of two dtypes is traced for one member, and refused here.
            raise Untraceable(f"torch can't map a step over members: {error}. {OR_WRONG} {LOOP_INSTEAD}") from error
    result.meta[_torch.OF_MEMBERS] = True
    return result


# The numbers that a report of one member can have.
REPORTS = 4


def reported(report: int) -> tuple[int, int]:
    """What a member has reported, and its number: that of the first one with the largest report."""
    return report % REPORTS, report // REPORTS


def _wide(fake: Tensor, count: int, stride: tuple[int, ...] | None) -> Tensor:
    shape = (count, *fake.shape)
    return fake.new_empty(shape) if stride is None else fake.new_empty_strided(shape, stride)


def _own_memory(tensor: Tensor, count: int) -> Tensor:
    """What no member has of its own is the same memory for all, and outputs are written to later."""
    return tensor.contiguous() if count > 1 and tensor.ndim and tensor.stride(0) == 0 else tensor


def _mixes(node: Node) -> bool:
    """Whether it is batch norm's backward in mixed precision: torch maps it with a weight of another dtype."""
    if node.target is not _aten.native_batch_norm_backward.default:
        return False
    values = [item.meta["val"] for item in node.all_input_nodes]
    return len({value.dtype for value in values}) > 1


def _reshaping(graph: GraphModule) -> GraphModule:
    """With ``reshape`` for ``view``: what was dense of one member lies otherwise in memory mapped, or decomposed."""
    for node in graph.graph.nodes:
        if node.target in (_aten.view.default, _aten._unsafe_view.default):
            node.target = torch.reshape
    graph.recompile()
    return graph


def _mappable() -> _torch.Decompositions:
    """What to do instead of operations that torch can't map."""
    return {
        _aten.copy.default: _copy,
        **{op: function for op, function in decompositions().items() if "_foreach_" in str(op)},
        # As functionalization writes it.
        _aten._foreach_copy.default: lambda targets, sources, *_: list(map(_copy, targets, sources)),
        _aten.slice_scatter.default: _slice_scatter,
        **taken_apart(),
    }


def _slice_scatter(
    target: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    """Without a negative place, which torch maps wrongly."""
    size = target.shape[dim]
    places = slice(start, end, step).indices(size)
    if (start or 0) >= 0 and 0 <= (size if end is None else end) <= size:
        return NotImplemented
    return _aten.slice_scatter.default(target, source, dim, *places)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(target.dtype).expand(target.shape).clone()
