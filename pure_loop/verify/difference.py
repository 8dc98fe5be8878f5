"""What ``verify=`` found, in words: which stage, leaf and rank, which runs agree, and what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pure_loop._internal.bits import count_of_differences
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.errors import VerificationError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.time import Timestamp
from pure_loop.verify.leaves import distance, leaves_of


@attrs.frozen
class Difference:
    """The first leaf in which two States differ.

    Attributes:
        leaf: its path, as ``grads/0.weight``.
        more: how many leaves differ besides.
        values: how many of its numbers differ, and the first of them in both runs.
        distance: the L2 norm of the difference; None where it has none.
    """

    leaf: str
    more: int
    values: str
    distance: float | None

    @classmethod
    def of(cls, names: Sequence[str], state_a: State, state_b: State) -> Difference:
        leaf = names[0]
        a, b = (local_tensor(leaves_of(state).get(leaf)) for state in (state_a, state_b))
        return cls(leaf, len(names) - 1, count_of_differences(a, b), distance(a, b))


@attrs.frozen
class Found:
    """The first place at which two runs of a batch differ.

    Attributes:
        index: how many places come before it.
        by: the algorithm, or what the loop computed, after which they do.
        event: at which, or before which.
        difference: in which leaf; None: one of the runs did not come to this place.
    """

    index: int
    by: str
    event: Event
    difference: Difference | None


# Of each rank: where its runs differ, and whether a third one agrees with the first and with the second.
Answer = tuple[Found | None, tuple[bool, bool]]


def verification_error(answers: Sequence[Answer], timestamp: Timestamp, rank: int) -> VerificationError:
    """The error of a batch with runs that differ, the same on all ranks.

    Args:
        answers: by rank; one of them at least has a difference.
        timestamp: that after the batch.
        rank: of this process.
    """
    first = min(place.index for place, _ in answers if place is not None)
    there = [number for number, (place, _) in enumerate(answers) if place is not None and place.index == first]
    place = answers[there[0]][0]
    assert place is not None
    agrees = [all(some[run] for _, some in answers) for run in (0, 1)]
    agreeing = (1, 3) if agrees[0] else (2, 3) if agrees[1] else None
    batch, difference = timestamp.batch - 1, place.difference
    where = f" on rank {there[0]}" if len(there) < len(answers) and len(there) == 1 else ""
    if len(answers) > 1 and len(there) > 1:
        where = f" on ranks {', '.join(map(str, there))}, which exchange what they compute"
    text = (
        f"verify=: batch {batch} was computed twice from the same State, and the States before its BATCH_END differ. "
        f"The first difference is after {_stage(place)}{where}: "
    )
    if difference is None:
        text += "one of the runs did not come to it. "
    else:
        besides = f", and in {difference.more} other leaves" if difference.more > 1 else ""
        besides = ", and in 1 other leaf" if difference.more == 1 else besides
        size = "" if difference.distance is None else f" (L2 norm of the difference: {difference.distance:.4g})"
        text += f"in {difference.leaf}{besides}: {difference.values}{size}. "
    text += _advice(agreeing)
    error = VerificationError(text)
    error.stage = place.by
    error.leaf = None if difference is None else difference.leaf
    error.difference = None if difference is None else difference.distance
    error.rank = there[0] if len(there) == 1 else None
    error.batch, error.timestamp = batch, timestamp
    error.transient, error.agreeing = agreeing is not None, agreeing
    return error


def _stage(place: Found) -> str:
    if place.by == "optimizer":
        return "the optimizer, before BATCH_END"
    return f"{place.by!r}, at {place.event.name}"


def _advice(agreeing: tuple[int, int] | None) -> str:
    stopped = "Training stopped before this batch was counted: resume from the last checkpoint."
    if agreeing is None:
        return (
            "A third run agrees with neither: something in the batch gives another result each time. An algorithm that "
            "isn't pure is found by pl.testing.check_algorithm, a kernel without a fixed order of operations by "
            f"fit(..., deterministic=True). {stopped}"
        )
    wrong = 2 if agreeing == (1, 3) else 1
    return (
        f"A third run agrees with run {agreeing[0]}, so that run {wrong} was wrong and the difference is transient: "
        "test the memory and the processors of this machine. If it comes again on another machine, a kernel has no "
        f"fixed order of operations, which fit(..., deterministic=True) finds. {stopped}"
    )


def other_parameters_error(by_rank: Sequence[Mapping[str, int]], timestamp: Timestamp) -> VerificationError:
    """The error where each rank computes the same twice, and the ranks have other parameters.

    Args:
        by_rank: the checksum of each parameter.
        timestamp: that after the batch.
    """
    names = [name for name in by_rank[0] if len({sums.get(name) for sums in by_rank}) > 1]
    sums: Counter[Any] = Counter(tuple(row.values()) for row in by_rank)
    usual, count = sums.most_common(1)[0]
    odd = [rank for rank, row in enumerate(by_rank) if tuple(row.values()) != usual]
    is_majority = 2 * count > len(by_rank)
    batch, leaf = timestamp.batch - 1, f"params/{names[0]}" if names else None
    who = f"rank {', '.join(map(str, odd))} has others than the rest" if is_majority else "no two of them need be right"
    error = VerificationError(
        f"verify=: after batch {batch} the {len(by_rank)} ranks have different parameters, {leaf} first: {who}. Each "
        "computed this batch twice alike, so the difference is older than the batch, or came from an exchange between "
        "ranks. Resume all ranks from one checkpoint; if it comes again, an algorithm treats ranks differently "
        "(pl.testing.check_algorithm), or the memory or the network of a machine is at fault."
    )
    error.leaf, error.batch, error.timestamp, error.transient = leaf, batch, timestamp, False
    error.rank = odd[0] if is_majority and len(odd) == 1 else None
    return error
