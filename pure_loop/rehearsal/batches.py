"""The batches of a rehearsal: the first one of each dataloader, which stays as it was."""

from __future__ import annotations

from typing import Any

from pure_loop._internal.closing import closing
from pure_loop.data.source import END, Batches, Source
from pure_loop.errors import DataError

__all__ = ["Held", "first_batch"]


class Held(Source):
    """One batch, given several times as an epoch, in the place of a dataloader.

    Args:
        batch: what the dataloader gave.
        times: how many batches are left of an epoch, at most.
        length: what the dataloader says of the length of its epochs.
    """

    def __init__(self, batch: Any, times: int, length: int | None, stream: str) -> None:
        super().__init__(None, 0, stream, None, None)
        self._batch, self._times = batch, times
        self.length = self.loader_length = length

    def epoch(self, epoch: int, start: int = 0, seen: int = 0) -> Batches:
        times = self._times if self.length is None else min(self._times, max(self.length - start, 0))
        for _ in range(times):
            yield self._batch

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        return self.epoch(epoch, start, seen)


def first_batch(source: Source) -> Any:
    """The first batch of the first epoch; the source is closed.

    Raises:
        DataError: there is none.
    """
    try:
        with closing(source.epoch(0)) as batches:
            batch = next(batches, END)
    finally:
        source.close()
    if batch is END:
        raise DataError("the dataloader gave no batch")
    return batch
