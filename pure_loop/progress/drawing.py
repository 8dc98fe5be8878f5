"""A drawing is finished before a signal acts: Ctrl-C in the middle of one would spoil the terminal, or be lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from pure_loop._internal.closing import call_all

__all__ = ["drawing"]


@contextmanager
def drawing() -> Iterator[None]:
    """Python's handlers of signals run when this block is left. A second signal of a kind acts at once.

    An exception out of a handler leaves rich's console in the middle of a buffer, and what is printed from there on is
    never written; where it falls into a generator of rich that is being closed, Python ignores it. A terminal that was
    stopped (Ctrl-S) lets no drawing end: there the second Ctrl-C acts.

    In another thread than the main one, where Python has no handlers, this block does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    found = ((int(number), signal.getsignal(number)) for number in signal.valid_signals())
    handlers = {number: handler for number, handler in found if callable(handler)}
    came: list[int] = []
    over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if over or number in came:
            came[:] = [other for other in came if other != number]
            signal.signal(number, handlers[number])
            signal.raise_signal(number)
        else:
            came.append(number)

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        over = True  # whatever comes from here on acts, also between the lines below
        for number, handler in handlers.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
        call_all([partial(signal.raise_signal, number) for number in came], sys.exception())
