"""What was recorded, where in a run, and its values read from their device in groups."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.time import Timestamp

Kind: TypeAlias = Literal["metric", "table", "images", "text", "file", "hyperparameters"]

# Boundaries of one batch, one epoch and one iteration in their order.
_BOUNDARIES = (
    *(Event.AFTER_LOAD, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT),
    *(Event.ITERATION_END, Event.ITERATION_CHECKPOINT, Event.FIT_END, Event.ITERATION_START, Event.EPOCH_START),
)
_RANKS: dict[Event | None, int] = {None: -1} | {event: rank for rank, event in enumerate(_BOUNDARIES)}


@attrs.frozen
class Moment:
    """A place in a run: after which boundary, and at which event.

    Attributes:
        batch: how many batches had ended.
        epoch: how many epochs.
        iteration: how many iterations.
        position: the last boundary passed.
        event: the event.
        timestamp: with all counts.
    """

    batch: int = 0
    epoch: int = 0
    iteration: int = 0
    position: Event | None = None
    event: Event | None = None
    timestamp: Timestamp = attrs.field(factory=Timestamp, eq=False, repr=False)

    @classmethod
    def of(cls, state: State) -> Moment:
        t: Timestamp = state.timestamp
        return cls(t.batch, t.epoch, t.iteration, state.position, state.event, t)

    def is_before(self, start: Moment) -> bool:
        """Whether a run that resumes at ``start``, which is a FIT_START, won't come to this moment again."""
        mine, its = self._order, start._order
        return mine < its or (mine == its and self.event is self.position)

    @property
    def _order(self) -> tuple[int, int, int]:
        # Epochs and iterations end in either order, and their counts only grow.
        return self.batch, self.epoch + self.iteration, _RANKS[self.position]


@attrs.frozen
class Entry:
    """What was recorded.

    Attributes:
        kind: of what kind it is.
        name: under which name.
        value: a number; of a table columns and rows; of images ``(images, masks)``; a text; the path of a file; the
            mapping of hyperparameters.
        moment: where in the run.
        seconds: when, since 1970.
    """

    kind: Kind
    name: str
    value: Any
    moment: Moment
    seconds: float


def read_numbers(values: Sequence[Any]) -> list[int | float]:
    """The values as Python numbers, with one transfer for all tensors of a kind instead of one for each.

    Args:
        values: real numbers, and tensors of one element, on any device.

    >>> read_numbers([1, torch.tensor(0.5), torch.tensor([3]), True])
    [1, 0.5, 3, 1]
    """
    read = list(values)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), []).append(index)
    for indices in alike.values():
        group = torch.stack([values[index].detach().reshape(()) for index in indices]).tolist()
        for index, number in zip(indices, group, strict=True):
            read[index] = number
    return [int(value) if isinstance(value, numbers.Integral) else float(value) for value in read]


def read_tensors(entries: list[Entry]) -> None:
    """Put Python numbers in the places of tensors in metrics and cells of tables, all read together."""
    metrics = [index for index, entry in enumerate(entries) if entry.kind == "metric"]
    cells = [
        (row, column)
        for entry in entries
        if entry.kind == "table"
        for row in entry.value[1]
        for column, value in enumerate(row)
        if isinstance(value, Tensor) and value.numel() == 1
    ]
    numbers = read_numbers([*(entries[index].value for index in metrics), *(row[column] for row, column in cells)])
    for index, number in zip(metrics, numbers, strict=False):
        entries[index] = attrs.evolve(entries[index], value=number)
    for (row, column), number in zip(cells, numbers[len(metrics) :], strict=True):
        row[column] = number
