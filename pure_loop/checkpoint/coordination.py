"""What ranks agree on: a checkpoint, in two rounds a save, and when to stop, by a vote or by a limit that all compute.

Rounds and votes have process groups of their own, of gloo: a thread meets the others there while training has its own
exchanges, and neither ever waits for the other. What one rank can't do is an error on all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pure_loop._internal.tree_ops import are_sharded, bytes_of
from pure_loop.errors import ArgumentError, DistributedError
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit, read_time

T = TypeVar("T")
R = TypeVar("R")

# Seconds for which the fastest rank waits for the slowest one to write its part; where training has a shorter timeout
# than the second number, it is as long as that.
_WRITING = 1800.0
_SOON = 300.0


def _seconds() -> float:
    """For how long ranks wait for each other."""
    from pure_loop.distributed.ranks import patience  # there are builds of torch that can't import it

    return patience()


class _Meeting:
    """A process group of all ranks, of gloo. All of them have to make one.

    Raises:
        DistributedError: there are no others, or they don't come.
    """

    def __init__(self, patience: timedelta) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise DistributedError(
                "a State in parts is saved by all the ranks that hold them, and there is no process group: save it "
                "before torch.distributed.destroy_process_group()."
            )
        try:
            self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=patience)
        except (RuntimeError, ValueError) as error:
            raise DistributedError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} could not meet the others to save a State in "
                f"parts: {_line(error)} All ranks have to save it, at the same event, and have the same callbacks."
            ) from error

    def close(self) -> None:
        """Leave the other ranks; those that wait for this one wake up with an error."""
        group, self._group = self._group, None
        if group is None:
            return
        if dist.is_initialized():
            dist.destroy_process_group(group)
        del group
        # Its connections close when its last reference goes, and some are in cycles.
        gc.collect()


class Coordinator(_Meeting):
    """Where ranks meet for a checkpoint."""

    def __init__(self) -> None:
        seconds = _seconds()
        self._patience = timedelta(seconds=seconds if seconds < _SOON else max(seconds, _WRITING))
        super().__init__(self._patience)
        self.rank, self.ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._round = 0

    def together(self, path: str, make: Callable[[], object]) -> None:
        """Call a function on every rank, and wait for all of them: see :meth:`round`."""

        def done() -> None:
            make()

        self.round(path, done, lambda by_rank: by_rank)

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
        mine: T | None = None
        failed: Exception | None = None
        try:
            mine = make()
        except Exception as error:
            failed = error
        try:
            by_rank = self._gather((path, self._round, mine, None if failed is None else _line(failed)))
            replies: list[tuple[R | None, str | None]] = []
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
        return reply

    def _gather(self, row: tuple[str, int, T | None, str | None]) -> list[tuple[str, int, T, str | None]] | None:
        """What all ranks gave, on rank 0."""
        rows: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(row, rows, group=self._group, group_dst=0)
        return rows

    def _scatter(self, replies: list[tuple[R | None, str | None]]) -> tuple[R, str | None]:
        """What rank 0 has for this one."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, replies, group=self._group, group_src=0)
        reply: tuple[R, str | None] = received[0]
        return reply


class StopConsensus(_Meeting):
    """Tells all ranks, a boundary later, that one of them was asked to stop."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=_seconds()))
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

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
        self._pending = None
        super().close()


def of_first_rank(value: T, path: str) -> T:
    """The value that rank 0 has, on all ranks, which call this together for the checkpoint at a path."""
    with closing(Coordinator()) as meeting:
        return meeting.round(path, lambda: value, lambda by_rank: [by_rank[0]] * len(by_rank))


def _problem(by_rank: Sequence[tuple[str, int, object, str | None]]) -> str | None:
    places = [row[:2] for row in by_rank]
    if any(place != places[0] for place in places):
        paths = "; ".join(f"rank {rank} saves {path}" for rank, (path, _) in enumerate(places))
        return f"the ranks save different ones: {paths}. Give all of them the same callbacks and arguments."
    failed = [f"rank {rank} raised {text}" for rank, (*_, text) in enumerate(by_rank) if text is not None]
    return "; ".join(failed) if failed else None


def _line(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0][:500]
    return f"{type(error).__name__}: {line}" + ("" if line.endswith(".") else ".")


REQUEUE = 75
"""The exit code of a run that ``stop_before`` has ended: EX_TEMPFAIL of ``sysexits.h``, which asks to be run again."""

_BYTES_A_SECOND = 100e6


def read_limit(value: str | Time | None) -> TimeLimit | None:
    """
    Raises:
        ArgumentTypeError, ArgumentError: it is no time above 0 in seconds, minutes or hours.

    >>> read_limit("19h50m").seconds
    71400.0
    """
    if value is None:
        return None
    time = read_time(value, "stop_before", (TimeUnit.SECOND,))
    if time.unit is not TimeUnit.SECOND:
        raise ArgumentError(
            f"stop_before={value!r}: a time limit goes by the clock, so it is in seconds, minutes or hours, such as "
            '"19h50m"; training as a whole ends at fit(max_duration=...).'
        )
    if not time:
        raise ArgumentError(f"stop_before={value!r}: that is no time at all; leave it out, or write None.")
    return TimeLimit(float(time.value), str(value))


class TimeLimit:
    """Tells at which boundary a run has to stop, so that its State is saved before a time has passed since FIT_START.

    It counts with the seconds of timestamps, which all ranks have in common, so they stop at the same boundary without
    a word. There has to be time for one batch more, with the evaluation that may follow it, as long as the longest one
    so far, and for the save, at 100 MB a second. The first batch of a call, in which much happens once, counts only
    while there is no other.

    Args:
        seconds: the limit.
        text: what was written.
    """

    def __init__(self, seconds: float, text: str) -> None:
        self.seconds = seconds
        self.text = text
        self._began = self._longest = self._saving = 0.0
        self._batches = 0
        self._ahead = 1

    def refuse_endless(self, *, counts: bool, resumes: bool) -> None:
        """
        Args:
            counts: whether the run counts the seconds of training.
            resumes: whether the run saves whole States.

        Raises:
            ArgumentError: it doesn't, so it would never stop, or would be run again and again from its beginning.
        """
        if not counts:
            raise ArgumentError(
                f"CheckpointSaver(stop_before={self.text!r}): a script of one's own counts no seconds; stop in the "
                "loop's body, or train with fit."
            )
        if not resumes:
            raise ArgumentError(
                f"CheckpointSaver(weights_only=True, stop_before={self.text!r}): the run would ask to be run again, "
                "and can't resume from weights alone. Write stop_before in a CheckpointSaver of whole States, "
                "autoresume=CheckpointSaver(folder, stop_before=...)."
            )

    def begin(self, state: State, ranks: int) -> None:
        """At FIT_START.

        Args:
            state: what training starts from.
            ranks: how many train together.
        """
        self._began = state.timestamp.total_seconds
        self._longest, self._batches = 0.0, 0
        # Several ranks count a batch's seconds when the next one is loaded.
        self._ahead = 1 if ranks == 1 else 2
        shares = ranks if are_sharded(state.params) else 1
        self._saving = bytes_of(state) / shares / _BYTES_A_SECOND

    def is_near(self, state: State) -> bool:
        """Whether to stop at this boundary; called once for each batch."""
        seconds, before = state.timestamp.total_seconds, state.previous_timestamp.total_seconds
        self._longest = seconds - before if self._batches < 2 else max(self._longest, seconds - before)
        self._batches += 1
        return seconds - self._began + self._ahead * self._longest + self._saving >= self.seconds
