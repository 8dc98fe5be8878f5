"""Ctrl-C waits until a drawing is finished: in the middle of one it would spoil the terminal, or be lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from pure_loop._internal.closing import call_all

__all__ = ["deferred_signals"]


@contextmanager
def deferred_signals() -> Iterator[None]:
    """The handlers of SIGINT and SIGTERM run when this block is left; a second signal of a kind acts at once.

    An exception from a handler leaves rich's console in the middle of a buffer, and what is printed from there on is
    never written; where it comes in a generator of rich that is being closed, Python ignores it. In a terminal that was
    stopped by Ctrl-S no drawing ends: the second Ctrl-C acts.

    In another thread than the main one, where Python runs no handlers, the block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # What is no function, such as SIG_DFL, raises nothing.
    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    pending: set[int] = set()
    over = False

    def defer(number: int, frame: FrameType | None) -> None:
        if over or number in pending:
            pending.discard(number)
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        else:
            pending.add(number)

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        over = True  # a signal that comes from here on acts, between the lines below too
        for number, handler in handlers.items():
            if signal.getsignal(number) is defer:
                signal.signal(number, handler)
        call_all([partial(signal.raise_signal, number) for number in pending], sys.exception())
