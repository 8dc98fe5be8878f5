"""The parameters of a State between a forward and its backward, made at the first access.

The forward runs on tensors of an engine's own, whose memory will be another State's in the next step. So that what a
State shows never changes, it shows others, through which a penalty on weights has its gradient. In most runs no code
looks, and to make them for all parameters costs as much as a small layer for each.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any

from torch import Tensor

from pure_loop._internal import pytree as _pytree
from pure_loop._internal.pytree import PyTree
from pure_loop.frozendict import FrozenDict

__all__ = ["LazyLeaves"]


class LazyLeaves(FrozenDict[str, Tensor]):
    """Parameters by name.

    Args:
        origin: the parameters of the State.
        make: from a name to the tensor that is shown, until :meth:`close`.
        after: the same from then on, for those that were not accessed.
        frozen: the names of those that need no gradient.
        index: the microbatch's number in its batch.
        last: whether no other one follows in it.

    Attributes:
        buffers: those that the forward went through, for a backward that goes through it again.
        seen: those that were accessed, by name.
    """

    __slots__ = ("_after", "_make", "buffers", "index", "last", "seen")

    def __init__(
        self,
        origin: FrozenDict[str, Tensor],
        make: Callable[[str], Tensor],
        after: Callable[[str], Tensor],
        *,
        frozen: frozenset[str],
        index: int,
        last: bool,
    ) -> None:
        super().__init__(origin)
        self.index, self.last = index, last
        self.origin, self.frozen, self.holder = origin, frozen, None
        self.buffers: Mapping[str, Tensor] = {}
        self._make, self._after = make, after
        self.seen: dict[str, Tensor] = {}

    def close(self) -> None:
        """The backward is over."""
        self._make = self._after

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.seen:
            if name not in self.origin:
                raise KeyError(name)
            self.seen[name] = self._make(name)
        return self.seen[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - that would be this function itself

    # dict(leaves) looks up each key only if iteration is a method of the class.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)


def _flatten(leaves: LazyLeaves) -> tuple[Sequence[object], object, Sequence[str]]:
    names = tuple(leaves)
    return [leaves[name] for name in names], names, names


def _unflatten(names: tuple[str, ...], children: Iterable[PyTree]) -> Mapping[str, Any]:
    return FrozenDict(zip(names, children, strict=True))


_pytree.register(LazyLeaves, _flatten, _unflatten, attributes=False)
