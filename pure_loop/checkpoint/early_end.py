"""A run that ends before the time limit of its job, ``stop_before="19h50m"``, with an exit code that requeues it.

A line on the terminal says which file holds the State of a run that has ended early.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import optree
from torch import Tensor

from pure_loop._internal.logs import get_logger
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.errors import ArgumentError
from pure_loop.state import State
from pure_loop.time import TimeUnit, read_time

__all__ = ["REQUEUE", "TimeLimit", "read_limit", "warn_on_terminal"]

REQUEUE = 75
"""The exit code of a run that ``stop_before`` has ended: EX_TEMPFAIL of ``sysexits.h``, which asks to be run again."""

_BYTES_A_SECOND = 100e6


def read_limit(value: Any) -> TimeLimit | None:
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
        tree: Any = state
        leaves = [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]
        shares = ranks if are_sharded(leaves) else 1
        self._saving = sum(leaf.numel() * leaf.element_size() for leaf in leaves) / shares / _BYTES_A_SECOND

    def is_near(self, state: State) -> bool:
        """Whether to stop at this boundary; called once for each batch."""
        now, before = state.timestamp.total_seconds, state.previous_timestamp.total_seconds
        self._longest = now - before if self._batches < 2 else max(self._longest, now - before)
        self._batches += 1
        return now - self._began + self._ahead * self._longest + self._saving >= self.seconds


_log = get_logger("pure_loop.checkpoint")


def warn_on_terminal(text: str) -> None:
    """Log a line as a warning, and print it on stderr where logging does not show it there."""
    _log.warning(text)
    handlers = list(_handlers(_log))
    # Without any handler logging itself prints warnings.
    shown = any(map(_is_shown, handlers)) if handlers else logging.lastResort is not None
    if not shown or not _log.isEnabledFor(logging.WARNING):
        print(text, file=sys.stderr)


def _handlers(log: logging.Logger) -> Iterator[logging.Handler]:
    while True:
        yield from log.handlers
        if not log.propagate or log.parent is None:
            return
        log = log.parent


def _is_shown(handler: logging.Handler) -> bool:
    """Whether a handler shows warnings on the terminal; one of an unknown class is taken to show them."""
    if handler.level > logging.WARNING or isinstance(handler, logging.FileHandler | logging.NullHandler):
        return False
    if isinstance(handler, logging.StreamHandler):
        return handler.stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return True
