"""Which signals are held back: by their names, as schedulers call them, or their numbers."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Any, TypeAlias

from pure_loop._internal.suggestions import nearest
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["SignalLike", "read_signals", "signal_name"]

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
    items: list[Any] = list(value)
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
