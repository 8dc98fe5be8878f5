"""Signals that end a program, held back until there is a good moment to end it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from pure_loop.errors import ArgumentError

__all__ = ["HeldSignals"]


class HeldSignals:
    """Holds back the first signal; a second one acts at once, as it would have without this.

    Args:
        numbers: of the signals, such as ``signal.SIGTERM``.

    Attributes:
        caught: the signal that is held back; None: none.

    Raises:
        ArgumentError: one of them can't be caught.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = tuple(numbers)
        self._before: dict[int, Any] = {}
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
        while self._before:
            number, handler = self._before.popitem()
            if signal.getsignal(number) == self._hold:
                signal.signal(number, handler)

    def act(self) -> None:
        """Let the signal act that was held back, if one was.

        Raises:
            SystemExit: where it would have ended the program without cleaning up.
            KeyboardInterrupt: for SIGINT, unless the program has another handler.
        """
        self.restore()
        number, self.caught = self.caught, None
        if number is None:
            return
        if signal.getsignal(number) is signal.SIG_DFL:
            raise SystemExit(128 + number)
        signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        self.restore()


_NEVER = {getattr(signal, name) for name in ("SIGKILL", "SIGSTOP") if hasattr(signal, name)}
