"""How much of each unit passes in a run, batch by batch: from which follows how long a duration may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pure_loop.time import Time, TimeUnit

__all__ = ["count", "count_iterations", "ends_between", "shortened"]


def count(epoch: Sequence[int], tokens: int, batches: int) -> dict[TimeUnit, list[int]]:
    """What is finished after 0, 1, ... batches.

    >>> count((4, 2), tokens=3, batches=3)[TimeUnit.SAMPLE]
    [0, 4, 6, 10]
    """
    samples = list(itertools.accumulate(itertools.islice(itertools.cycle(epoch), batches), initial=0))
    return {
        TimeUnit.BATCH: list(range(batches + 1)),
        TimeUnit.EPOCH: [number // len(epoch) for number in range(batches + 1)],
        TimeUnit.SAMPLE: samples,
        TimeUnit.TOKEN: [tokens * number for number in samples],
    }


def count_iterations(length: Time, counts: Mapping[TimeUnit, Sequence[int]]) -> list[int]:
    """How many iterations of this length are finished after 0, 1, ... batches.

    >>> count_iterations(Time("5tok"), count((4, 2), tokens=1, batches=4))
    [0, 0, 1, 1, 2]
    """
    began = done = 0
    numbers = []
    for number in counts[length.unit]:
        if number - began >= length.value:
            began, done = number, done + 1
        numbers.append(done)
    return numbers


def ends_between(counts: Sequence[int], batches: tuple[int, int]) -> tuple[int, int] | None:
    """The least and the greatest duration that ends after so many batches, at least and at most; None: there is none.

    >>> samples = count((4, 2), tokens=0, batches=5)[TimeUnit.SAMPLE]
    >>> ends_between(samples, (2, 3))
    (5, 10)
    """
    least, most = batches
    low = counts[least - 1] + 1 if least else 0
    return (low, counts[most]) if low <= counts[most] else None


def shortened(epoch: tuple[int, ...], batches: tuple[int, int]) -> tuple[int, ...]:
    """The batches of an epoch, fewer where no number of whole epochs has so many, at least and at most.

    >>> shortened((4, 2, 3), (4, 5))
    (4, 2)
    """
    least, most = batches
    length = len(epoch)
    while math.ceil(least / length) * length > most:
        length -= 1
    return epoch[:length]
