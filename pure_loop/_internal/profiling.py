"""Calls of one thread, watched through ``sys.setprofile``: nothing is replaced, and other threads are not slowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["calls_watched"]

# Of a frame, the name of an event ("call", "return", "c_call", ...), and its argument.
Watcher = Callable[[FrameType, str, Any], object]


@contextmanager
def calls_watched(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is called at each call of this thread, after the profiler that was set before.

    What it raises is raised by the call. Python removes a profiler that raises: nothing is watched after that. A
    profiler written in C (cProfile, up to Python 3.11) sees nothing meanwhile, and is set again at the end.
    """
    before: Any = sys.getprofile()
    chained: Watcher | None = before if callable(before) else None

    def watch_both(frame: FrameType, event: str, argument: Any) -> None:
        assert chained is not None
        chained(frame, event, argument)
        watcher(frame, event, argument)

    # A call less for each of the hundreds of thousands of calls of a step that is traced.
    sys.setprofile(watcher if chained is None else watch_both)
    try:
        yield
    finally:
        if before is None or chained is not None:
            sys.setprofile(before)
        else:
            sys.setprofile(None)
            before.enable()
