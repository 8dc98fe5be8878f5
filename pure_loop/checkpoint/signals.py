"""Signals that end a program, held back until there is a good moment to end it."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["HeldSignals"]

_log = logging.getLogger("pure_loop.checkpoint")


class HeldSignals:
    """Holds back the first signal; a second one acts at once, as it would have without this.

    Args:
        numbers: of the signals, such as ``signal.SIGTERM``.

    Attributes:
        caught: the signal that is held back; None: none.

    Raises:
        ArgumentTypeError: these are no numbers of signals.
        ArgumentError: one of them can't be caught.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers) if isinstance(numbers, Iterable) else ()
        if not isinstance(numbers, Iterable) or not all(isinstance(each, int) for each in self._numbers):
            raise ArgumentTypeError(f"signals={numbers!r}: write a list, such as [signal.SIGTERM], or [] for none.")
        self._before: dict[int, Any] = {}
        self._over = False
        self.caught: int | None = None
        for number in self._numbers:
            if number not in signal.valid_signals() or number in _NEVER:
                raise ArgumentError(
                    f"signals={self._numbers}: signal {number} can't be caught; SIGTERM and SIGINT can."
                )

    def listen(self) -> None:
        """Begin to hold signals back: in the main thread, for Python has signals only there."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._over = False
        if self not in _LISTENING:
            _LISTENING.append(self)
        for number in self._numbers:
            handler = signal.getsignal(number)
            # None: not Python's, so it couldn't be put back. Who ignores a signal goes on to do so.
            if number not in self._before and handler not in (None, signal.SIG_IGN):
                self._before[number] = handler
                signal.signal(number, self._hold)

    def restore(self) -> None:
        """Let signals act again as they did before."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self in _LISTENING:
            _LISTENING.remove(self)
        while self._before:
            number, handler = self._before.popitem()
            current = signal.getsignal(number)
            if current == self._hold:
                signal.signal(number, handler)
                continue
            # Another one holds signals back since, and would put this one's handler there again.
            later = getattr(current, "__self__", None)
            while isinstance(later, HeldSignals):
                below = later._before.get(number)
                if below == self._hold:
                    later._before[number] = handler
                    break
                later = getattr(below, "__self__", None)

    def act(self) -> None:
        """End to hold signals back, and let the one act that was held back, if one was.

        Where a loop is left by ``break``, Python closes its generator, and loses what is raised there. There the signal
        comes again, as soon as the generator is closed.

        Raises:
            SystemExit: where it would have ended the program without cleaning up.
            KeyboardInterrupt: for SIGINT, unless the program has another handler.
        """
        self._over = True
        self.restore()
        number, self.caught = self.caught, None
        if number is None:
            return
        if isinstance(sys.exception(), GeneratorExit):
            closed = list(_generators(sys._getframe(1)))
            threading.Thread(target=_send_after, args=(closed, number), name="pure_loop-signal").start()
            return
        if signal.getsignal(number) is signal.SIG_DFL:
            raise SystemExit(128 + number)
        signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        # Over: closed by another thread, which can't change handlers.
        if self.caught is None and not self._over:
            self.caught = number
            name = signal.Signals(number).name
            _log.warning("%s: the State of the next boundary is saved first; a second one acts at once", name)
            return
        # A second one.
        held: Any = self
        while isinstance(held, HeldSignals):
            held.caught = None  # what acts now need not act again
            held.restore()
            held = getattr(signal.getsignal(number), "__self__", None)
        signal.raise_signal(number)


def _generators(frame: FrameType | None) -> Iterator[FrameType]:
    """The generator that calls, and those that iterate over it."""
    while frame is not None and not frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        yield frame
        frame = frame.f_back


def _send_after(frames: list[FrameType], number: int) -> None:
    """Send this process a signal when its main thread has left these frames."""
    while _run_in_main_thread(frames):
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def _run_in_main_thread(frames: list[FrameType]) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame not in frames:
        frame = frame.f_back
    return frame is not None


_NEVER = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}

# For processes that are forked meanwhile.
_LISTENING: list[HeldSignals] = []


class _Fork(threading.local):
    """A process forked from this one, such as a loader's worker, has nothing to save: signals act there at once.

    Until its handlers are put back signals wait, for Python forgets those that come to a process that is not ready.
    """

    mask: set[int] | None = None

    def begin(self) -> None:
        held = {number for each in _LISTENING for number in each._before}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, held) if held else None

    def in_parent(self) -> None:
        mask, self.mask = self.mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_child(self) -> None:
        for each in reversed(list(_LISTENING)):
            each.caught = None
            each.restore()
        self.in_parent()


if hasattr(os, "register_at_fork"):
    _fork = _Fork()
    os.register_at_fork(before=_fork.begin, after_in_parent=_fork.in_parent, after_in_child=_fork.in_child)
