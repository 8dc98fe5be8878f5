"""Strengths: numbers of algorithms and optimizers that may change while training.

A setting that is declared as ``Annotated[Strength, Above(0)]`` takes a number, or a function of the timestamp such as a
schedule of :mod:`pure_loop.schedules`. A schedule arrives as a :class:`Scheduled`, which compares each value with the
declared range. The recorder records the values of each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import attrs

from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Timestamp

__all__ = ["Scheduled", "Strength", "strength_at"]

Strength: TypeAlias = float | Callable[[Timestamp], float]


@attrs.frozen
class Scheduled:
    """A schedule with values in the range of a setting.

    Attributes:
        schedule: a function of the timestamp.
        check: from a number to the same number; raises where it is out of range.
    """

    schedule: Callable[[Timestamp], float]
    check: Callable[[object], float] = attrs.field(eq=False, repr=False)

    def __call__(self, timestamp: Timestamp) -> float:
        """The value for the batch that starts at ``timestamp``.

        Raises:
            ArgumentError: it is out of range.
            ArgumentTypeError: the schedule gives no number.
        """
        # In a step that is traced a schedule is one number, computed anew in each step.
        number_of: Any = getattr(timestamp, "number_of", None)
        return self._checked(timestamp) if number_of is None else number_of(self._checked)

    def _checked(self, timestamp: Timestamp) -> float:
        value: Any = self.schedule(timestamp)
        if not isinstance(value, bool | str | bytes):
            with suppress(TypeError, ValueError, RuntimeError):  # as tensors of several numbers say it
                value = float(value)
        try:
            return self.check(value)
        except (ArgumentError, ArgumentTypeError) as error:
            raise type(error)(f"{error} {self.in_a_call()} gave it for batch {timestamp.batch}.") from None

    def in_a_call(self) -> str:
        """How the schedule is written in a call that takes it."""
        from pure_loop._internal.reprs import shown  # needed for errors and reprs alone

        return shown(self.schedule)


def strength_at(strength: Strength, timestamp: Timestamp) -> float:
    """A strength for the batch that starts at ``timestamp``.

    Args:
        strength: a number, or a schedule; what :func:`pure_loop.ranges.checked` passes on has been checked.
        timestamp: ``state.timestamp`` of a handler, up to AFTER_TRAIN_BATCH. In a compiled step the result of a
            schedule is a stand-in for the number, which computes with numbers and tensors.

    Raises:
        ArgumentError: a schedule's value is out of the range of the setting.
        ArgumentTypeError: a schedule gives no number.

    >>> from pure_loop.schedules import linear
    >>> strength_at(0.5, Timestamp(batch=1)), strength_at(linear(1.0, 0.0, "4ba"), Timestamp(batch=1))
    (0.5, 0.75)
    """
    return strength(timestamp) if callable(strength) else strength
