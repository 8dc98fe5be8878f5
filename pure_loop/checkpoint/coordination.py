"""How ranks agree on a checkpoint: two rounds a save, and a vote at each boundary on whether to stop.

Both have process groups of their own, of gloo: a thread meets the others there while training has its own exchanges,
and neither ever waits for the other. What one rank can't do is an error on all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pure_loop.distributed.ranks import patience
from pure_loop.errors import DistributedError

__all__ = ["Coordinator", "StopConsensus"]

T = TypeVar("T")
R = TypeVar("R")

# Seconds for which the fastest rank waits for the slowest one to write its part; where training has a shorter timeout
# than the second number, it is as long as that.
_WRITING = 1800.0
_SOON = 300.0


class Coordinator:
    """Where ranks meet for a checkpoint. All of them have to make one.

    Raises:
        DistributedError: there are no others, or they don't come.
    """

    def __init__(self) -> None:
        seconds = patience()
        self._patience = timedelta(seconds=seconds if seconds < _SOON else max(seconds, _WRITING))
        self._group: Any = _new_group(self._patience)
        self.rank, self.ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._round = 0

    def round(self, path: str, make: Callable[[], T], decide: Callable[[Sequence[T]], Sequence[R]]) -> R:
        """Make something on every rank, and decide with all of it, on rank 0, what to tell each of them.

        Args:
            path: of the checkpoint.
            make: called on every rank.
            decide: called on rank 0, with what each rank made; gives what each of them gets.

        Raises:
            DistributedError: another rank raised, or is gone; names it and the path.
            Exception: what ``make`` or ``decide`` raised here.
        """
        self._round += 1
        mine: Any = None
        failed: Exception | None = None
        try:
            mine = make()
        except Exception as error:
            failed = error
        try:
            by_rank = self._gather((path, self._round, mine, None if failed is None else _line(failed)))
            replies: Any = None
            if by_rank is not None:
                problem = _problem(by_rank)
                if problem is None:
                    try:
                        replies = [(item, None) for item in decide([row[2] for row in by_rank])]
                    except Exception as error:
                        failed, problem = error, f"rank 0 raised {_line(error)}"
                if problem is not None:
                    replies = [(None, problem)] * self.ranks
            reply, problem = self._scatter(replies)
        except (RuntimeError, ValueError) as error:
            if failed is not None:
                raise failed from error
            raise DistributedError(
                f"checkpoint {path} was not written: rank {self.rank} of {self.ranks} lost another one, which died, "
                f"left, or did not come within {self._patience}: {_line(error)} The last complete checkpoint is as it "
                "was."
            ) from error
        if failed is not None:
            failed.add_note(f"raised on rank {self.rank} of {self.ranks}, for checkpoint {path}")
            raise failed
        if problem is not None:
            raise DistributedError(
                f"checkpoint {path} was not written: {problem} The last complete checkpoint is as it was."
            )
        return reply  # type: ignore[no-any-return]

    def _gather(self, value: Any) -> list[Any] | None:
        result: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(value, result, group=self._group, group_dst=0)
        return result

    def _scatter(self, values: list[Any] | None) -> Any:
        result = [None]
        dist.scatter_object_list(result, values, group=self._group, group_src=0)
        return result[0]

    def close(self) -> None:
        """Leave the other ranks; those that wait for this one wake up with an error."""
        group, self._group = self._group, None
        _end(group)


class StopConsensus:
    """Tells all ranks, a boundary later, that one of them was asked to stop. All of them have to make one.

    Raises:
        DistributedError: there are no others, or they don't come.
    """

    def __init__(self) -> None:
        self._group: Any = _new_group(timedelta(seconds=patience()))
        self._pending: tuple[Any, torch.Tensor] | None = None

    def cast(self, mine: int | None) -> int | None:
        """The largest of what all ranks gave the last time, on all of them; those of this time are not awaited."""
        before = self.settle()
        value = torch.tensor(mine or 0)
        self._pending = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True), value
        return before

    def settle(self) -> int | None:
        """What the last one came to."""
        if self._pending is None:
            return None
        (work, value), self._pending = self._pending, None
        work.wait()
        return int(value) or None

    def close(self) -> None:
        """Leave the others."""
        group, self._group, self._pending = self._group, None, None
        _end(group)


def _new_group(patience: timedelta) -> Any:
    if not (dist.is_available() and dist.is_initialized()):
        raise DistributedError(
            "a State in parts is saved by all the ranks that hold them, and there is no process group: save it before "
            "torch.distributed.destroy_process_group()."
        )
    try:
        return dist.new_group(backend="gloo", timeout=patience)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {dist.get_rank()} of {dist.get_world_size()} could not meet the others to save a State in parts: "
            f"{_line(error)} All ranks have to save it, at the same event, and have the same callbacks."
        ) from error


def _end(group: Any) -> None:
    if group is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group(group)
    del group
    # Its connections close when its last reference goes, and some are in cycles.
    gc.collect()


def _problem(by_rank: Sequence[tuple[str, int, Any, str | None]]) -> str | None:
    places = [row[:2] for row in by_rank]
    if any(place != places[0] for place in places):
        paths = "; ".join(f"rank {rank} saves {path}" for rank, (path, _) in enumerate(places))
        return f"the ranks save different ones: {paths}. Give all of them the same callbacks and arguments."
    failed = [f"rank {rank} raised {text}" for rank, (*_, text) in enumerate(by_rank) if text is not None]
    return "; ".join(failed) if failed else None


def _line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {line}" + ("" if line.endswith(".") else ".")
