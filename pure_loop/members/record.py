"""What a State says of its members, and values that belong to one member each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import attrs
from torch import Tensor

from pure_loop._internal.registry import register
from pure_loop.time import Timestamp

S = TypeVar("S")
T = TypeVar("T")

__all__ = ["Fallback", "MemberCount", "MemberValues", "Members", "PerMember"]

Fallback: TypeAlias = Literal["loop"] | None
# Where a member has stopped: its timestamp, and the one before.
Stop: TypeAlias = tuple[Timestamp, Timestamp]


@register(name="Members")
@attrs.frozen
class Members:
    """What a State of several models says of them.

    Attributes:
        seeds: of each member: of its random numbers, as ``seed`` is those of a State of one model.
        stopped: of each member that an algorithm has stopped, its timestamp and the one before; None: it trains.
        fallback: ``"loop"``: its steps are computed one member after the other; None: as one mapped graph.
    """

    seeds: tuple[int, ...]
    stopped: tuple[Stop | None, ...]
    fallback: Fallback = None

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def is_valid(self) -> bool:
        """Whether it is what a State has, and not what a stranger's file says."""
        seeds, stopped = self.seeds, self.stopped
        if type(seeds) is not tuple or type(stopped) is not tuple or not 0 < len(seeds) == len(stopped):
            return False
        stops = [stop for stop in stopped if stop is not None]
        timed = all(
            type(stop) is tuple and len(stop) == 2 and all(isinstance(item, Timestamp) for item in stop)
            for stop in stops
        )
        return timed and all(type(seed) is int for seed in seeds) and self.fallback in (None, "loop")

    @property
    def running(self) -> list[bool]:
        """Of each member, whether it trains."""
        return [stop is None for stop in self.stopped]


class MemberCount(int, Generic[S]):
    """``state.members``: how many members a State has; called with their numbers, it gives a State of those alone."""

    _select: Callable[[Sequence[int] | Tensor], S]

    def __new__(cls, count: int, select: Callable[[Sequence[int] | Tensor], S]) -> MemberCount[S]:
        result = super().__new__(cls, count)
        result._select = select
        return result

    def __call__(self, indices: Sequence[int] | Tensor) -> S:
        return self._select(indices)


@attrs.frozen
class PerMember(Generic[T]):
    """A batch of each member, in the place of one that all share.

    Attributes:
        stacked: the batch, whose tensors have a leading dimension of members.
    """

    stacked: T


@register(name="MemberValues")
@attrs.frozen
class MemberValues:
    """In the place of a value that is no tensor: that of each member, where they differ.

    Attributes:
        values: of the members, in order: numbers, texts, or whole trees of another structure each.
    """

    values: tuple[object, ...]
