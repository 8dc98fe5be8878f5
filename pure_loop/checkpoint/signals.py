"""Signals that end a program, held back until there is a good moment to end it."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile, takewhile
from types import FrameType
from typing import TypeAlias

from pure_loop._internal.frames import callers, frame_at
from pure_loop._internal.logs import get_logger
from pure_loop._internal.suggestions import nearest
from pure_loop.callback import LastBoundary, Run
from pure_loop.data.passes import ITERATOR_MADE
from pure_loop.data.source import is_loading
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["HeldSignals", "SignalLike", "any_came", "read_signals", "signal_name"]

_log = get_logger("pure_loop.checkpoint")


Handler: TypeAlias = "Callable[[int, FrameType | None], object] | int | signal.Handlers | None"
"""What ``signal.getsignal`` gives."""

_REPEATED_SECONDS = 0.5
"""For how long a further signal counts as the same one: ``timeout`` and ``torchrun`` pass on a signal that the process
group got already."""


class HeldSignals:
    """Holds back the first signal; a second one, at least half a second later, acts at once.

    While a batch is loaded, in a process without other ranks, a signal that would raise an exception ends the loading.

    Args:
        numbers: of the signals, such as ``signal.SIGTERM``, or their names.

    Attributes:
        caught: the signal that is held back; None: none.
        came: the first signal that came while it listened, also after it acted; None: none.
        run: the call of ``fit`` that it listens for; None: a script of the user's own.

    Raises:
        ArgumentTypeError, ArgumentError: see :func:`pure_loop.checkpoint.signals.read_signals`.
    """

    def __init__(self, numbers: Iterable[SignalLike]) -> None:
        self._numbers = read_signals(numbers)
        self._before: dict[int, Handler] = {}
        self._over = False
        self._since = 0.0
        self.caught: int | None = None
        self.came: int | None = None
        self.run: Run | None = None

    @property
    def boundary(self) -> LastBoundary | None:
        """The last boundary of that call."""
        return None if self.run is None else self.run.boundary

    def listen(self) -> None:
        """Begin to hold signals back: in the main thread, for Python has signals only there."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._over = False
        self.caught = self.came = None
        if self not in _LISTENING:
            _LISTENING.append(self)
        _DEFERRING.add(self)
        _defer_child_errors()
        for number in self._numbers:
            handler = signal.getsignal(number)
            # None: not Python's, so it couldn't be put back. An ignored signal stays ignored.
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
        _DEFERRING.discard(self)
        if not _DEFERRING:
            _raise_child_errors_again()
        number, self.caught = self.caught, None
        if number is None:
            return
        if isinstance(sys.exception(), GeneratorExit):
            closed = list(_generators(frame_at(1)))
            threading.Thread(target=_send_after, args=(closed, number), name="pure_loop-signal").start()
            return
        raised = sys.exception()
        if isinstance(raised, SystemExit | KeyboardInterrupt):
            # The one of stop(). What a loader raises as it ends its dead workers may have taken its place. Without its
            # traceback, which would show the loop a second time.
            raise type(raised)(*raised.args) from None
        if signal.getsignal(number) is signal.SIG_DFL:
            raise SystemExit(128 + number)
        signal.raise_signal(number)
        self.came = None  # the program's own handler has it, and training resumes

    def stop(self) -> None:
        """Where the State is saved: end the stream, or let the program's own handler act.

        Raises:
            SystemExit, KeyboardInterrupt: what the signal stands for. :meth:`act`, called when all else is closed,
                raises it again.
        """
        assert self.caught is not None
        ending = self._ending(self.caught)
        if ending is not None:
            raise ending
        self.act()

    def _hold(self, number: int, frame: FrameType | None) -> None:
        # Over: closed by another thread, which can't change handlers.
        if self.caught is None and not self._over:
            self.caught, self._since = number, time.monotonic()
            self.came = self.came or number
            name = signal_name(number)
            ending = self._ending(number) if self._is_loading(frame) else None
            if ending is not None:
                raise ending
            _tell(f"{name}: the State of the next boundary is saved first; a second one, from 0.5 s on, acts at once")
            return
        if not self._over and time.monotonic() - self._since < _REPEATED_SECONDS:
            return
        # A second one.
        held: object = self
        while isinstance(held, HeldSignals):
            held.caught = None  # what acts now need not act again
            held.came = held.came or number
            held.restore()
            held = getattr(signal.getsignal(number), "__self__", None)
        signal.raise_signal(number)

    def _is_loading(self, frame: FrameType | None) -> bool:
        """Whether this stream loads a batch, which can be ended there: the State is at hand, and no rank waits."""
        run, boundary = self.run, self.boundary
        if run is None or boundary is None or boundary.state is None or run.ranks > 1:
            return False
        return is_loading(frame, run.sources)

    def _ending(self, number: int) -> BaseException | None:
        """What the signal raises, if it ends this stream; None: the program or a stream around this one handles it."""
        if self.run is None:
            return None
        handler = self._before.get(number)
        below = getattr(handler, "__self__", None)
        while isinstance(below, HeldSignals) and below.run is self.run:  # another saver of the same stream
            handler = below._before.get(number)
            below = getattr(handler, "__self__", None)
        if handler is signal.SIG_DFL:
            return SystemExit(128 + number)
        return KeyboardInterrupt() if handler is signal.default_int_handler else None


def any_came(run: Run | None) -> int | None:
    """The signal that came while a saver of this stream listened; None: none did."""
    return next((held.came for held in _LISTENING if held.run is run and held.came is not None), None)


def _tell(text: str) -> None:
    """Log from a signal handler, which may interrupt a write to the same file."""
    try:
        _log.warning(text)
    except RuntimeError:  # reentrant call
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())


_child_handler: Callable[[int, FrameType | None], object] | None = None


def _defer_child_errors() -> None:
    """From now on torch's error about a dead worker is raised where batches are loaded, and nowhere else.

    Torch raises it in its handler of SIGCHLD, so in any line of Python: in an update, too, which has written to half of
    the parameters then. Its loader finds the dead worker by itself when it is asked for the next batch.
    """
    global _child_handler
    if not _DEFERRING or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if callable(handler) and handler is not _on_child:
        _child_handler = handler
        signal.signal(signal.SIGCHLD, _on_child)


def _raise_child_errors_again() -> None:
    global _child_handler
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can't be changed here; :func:`_on_child` passes all on, and the next stream puts it back
    handler, _child_handler = _child_handler, None
    if handler is not None and signal.getsignal(signal.SIGCHLD) is _on_child:
        signal.signal(signal.SIGCHLD, handler)


def _on_child(number: int, frame: FrameType | None) -> None:
    handler = _child_handler
    if handler is None:
        return
    try:
        handler(number, frame)
    except RuntimeError as error:
        if not _DEFERRING or "DataLoader worker" not in str(error) or is_loading(frame) or _is_in_loader(frame):
            raise


def _is_in_loader(frame: FrameType | None) -> bool:
    """Whether a loader of torch's runs in this frame, also one of the user's own."""
    return any(caller.f_globals.get("__name__") == "torch.utils.data.dataloader" for caller in callers(frame))


ITERATOR_MADE.append(_defer_child_errors)


def _generators(frame: FrameType | None) -> Iterator[FrameType]:
    """The generator that calls, and those that iterate over it."""
    outside = dropwhile(lambda caller: not _is_generator(caller), callers(frame))
    return takewhile(_is_generator, outside)


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _send_after(frames: list[FrameType], number: int) -> None:
    """Send this process a signal when its main thread has left these frames."""
    while _run_in_main_thread(frames):
        time.sleep(0.001)
    os.kill(os.getpid(), number)


def _run_in_main_thread(frames: list[FrameType]) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(caller in frames for caller in callers(frame))


# For processes that are forked meanwhile.
_LISTENING: list[HeldSignals] = []

# Whose streams are not closed: workers may still die.
_DEFERRING: set[HeldSignals] = set()


class _Fork(threading.local):
    """A process forked from this one, such as a loader's worker, has nothing to save: signals act there at once.

    Until its handlers are put back signals wait, for Python forgets those that come to a process that is not ready.

    A worker of the stream's own loader gets a process group to itself: Ctrl-C and a signal to the whole group then come
    to this process alone, which continues to the next boundary with its workers alive. It ends them as always.
    """

    mask: set[int] | None = None
    loads: bool = False

    def begin(self) -> None:
        held = {number for listening in _LISTENING for number in listening._before}
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, held) if held else None
        self.loads = bool(held) and is_loading(frame_at(1))

    def in_parent(self) -> None:
        mask, self.mask = self.mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_child(self) -> None:
        if self.loads:
            os.setpgid(0, 0)
        for listening in reversed(list(_LISTENING)):
            listening.caught = None
            listening.restore()
        self.in_parent()


if hasattr(os, "register_at_fork"):
    _fork = _Fork()
    os.register_at_fork(before=_fork.begin, after_in_parent=_fork.in_parent, after_in_child=_fork.in_child)


SignalLike: TypeAlias = "str | int"
"""``"USR1"``, ``"SIGUSR1"``, ``signal.SIGUSR1`` or its number."""


def read_signals(value: Iterable[SignalLike]) -> tuple[int, ...]:
    """The numbers of signals.

    Raises:
        ArgumentTypeError: these are no signals.
        ArgumentError: a name that there is not on this system; a signal that can't be caught, or that torch's loaders
            or the program's own faults raise.

    >>> read_signals(["TERM", "SIGINT", 15])
    (15, 2)
    """
    wanted = 'write a list, such as ["TERM", "USR1"], or [] for none'
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"signals={value!r}: {wanted}.")
    items = list(value)
    if not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
        raise ArgumentTypeError(f"signals={items!r}: {wanted}.")
    return tuple(dict.fromkeys(map(_number, items)))


def signal_name(number: int) -> str:
    """The name of a signal; the number of one that has none, as most real-time signals.

    >>> signal_name(15)
    'SIGTERM'
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _number(item: str | int) -> int:
    names = {entry.name.removeprefix("SIG"): entry.value for entry in signal.Signals}
    number: int | None
    if isinstance(item, str):
        name = item.upper().removeprefix("SIG")
        number = names.get(name)
        if number is None:
            near = nearest(name, names)
            raise ArgumentError(
                f"signals: {item!r} is no signal of this system"
                + (f"; did you mean {near!r}?" if near else f"; there are {', '.join(sorted(names))}.")
            )
    else:
        number = int(item)
    if number not in signal.valid_signals():
        raise ArgumentError(f"signals: {item!r} is no signal of this system, whose numbers begin with 1.")
    for refused, reason in _REFUSED.items():
        if number in refused:
            raise ArgumentError(f"signals: {item!r} {reason}; TERM, INT, USR1 and USR2 can be held back.")
    return number


def _numbers(*names: str) -> frozenset[int]:
    return frozenset(int(getattr(signal, name)) for name in names if hasattr(signal, name))


_REFUSED = {
    _numbers("SIGKILL", "SIGSTOP"): "can't be caught by any program",
    _numbers("SIGCHLD"): "is sent where a worker of a DataLoader ends, which asks for nothing to be saved",
    _numbers("SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL", "SIGABRT"): "is raised by a fault of the program itself",
}
