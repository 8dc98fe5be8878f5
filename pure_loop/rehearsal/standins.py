"""What stands in a rehearsal for callbacks and loggers, so that nothing is written; and the places they write to."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pure_loop._internal.arguments import name_of
from pure_loop.callback import Callback, Logger
from pure_loop.loggers.in_memory import InMemoryLogger
from pure_loop.rehearsal.places import Place

__all__ = ["callback_standins", "destinations", "logger_standin"]

# The arguments of callbacks and loggers of the library that are places.
_PLACES = ("folder", "path")


def _is_ours(item: Any) -> bool:
    return type(item).__module__.startswith("pure_loop.")


def _arguments(item: Callback) -> dict[str, Any]:
    """The arguments with which a callback of the library was made, defaults included."""
    bound = inspect.signature(type(item)).bind_partial(**(item.made_with or {}))
    bound.apply_defaults()
    return dict(bound.arguments)


def destinations(items: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Where callbacks and loggers of the library write to: the class, ``"folder"`` or ``"path"``, and the place."""
    found = []
    for item in items:
        if isinstance(item, Callback) and _is_ours(item) and item.made_with is not None:
            for name in _PLACES:
                place = _arguments(item).get(name)
                if place is not None:
                    found.append((type(item).__name__, name, os.fspath(place)))
    return found


def callback_standins(callbacks: Sequence[Any], folder: Path, place: Place) -> list[Any]:
    """Copies of the callbacks, to be called in their places.

    Those of the library that write to a folder or a file write to one in ``folder``; of those of the user's the copies
    are deep, and functions are themselves.
    """
    result = []
    for number, callback in enumerate(callbacks):
        where = folder / f"callback-{number}"
        if not isinstance(callback, Callback):
            result.append(callback)
        elif _is_ours(callback) and callback.made_with is not None:
            if type(callback).__name__ == "MemorySnapshot":
                place.skip(f"callback {type(callback).__name__}: it records the memory of the whole process.")
            else:
                result.append(_of_library(callback, where))
        else:
            try:
                result.append(copy.deepcopy(callback))
            except Exception as error:  # whatever user code raises that can't be copied
                reason = f"{type(error).__name__}: {error}"
                place.skip(f"callback {name_of(type(callback))}: it was not called, because a copy fails ({reason}).")
    return result


def _of_library(callback: Callback, where: Path) -> Callback:
    arguments = dict(callback.made_with or {})
    signature = inspect.signature(type(callback))
    for name in _PLACES:
        if arguments.get(name) is not None:
            where.mkdir(parents=True, exist_ok=True)
            arguments[name] = os.fspath(where if name == "folder" else where / Path(os.fspath(arguments[name])).name)
    if "signals" in signature.parameters:  # the handlers of the process stay as they are
        arguments["signals"] = ()
    if "overwrite" in signature.parameters:  # of the rehearsal's own files, which it writes where it begins and ends
        arguments["overwrite"] = True
    if "background" in signature.parameters:
        arguments["background"] = False
    bound = signature.bind_partial()
    bound.arguments.update(arguments)
    result: Callback = type(callback)(*bound.args, **bound.kwargs)
    result.rank = callback.rank
    return result


class _Recorded(InMemoryLogger):
    """Keeps what is recorded in memory, under the methods that the loggers of the call have."""

    def __init__(self, methods: Sequence[str]) -> None:
        super().__init__()
        for name in methods:
            if not hasattr(self, name):
                setattr(self, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A method ``log_*`` of a logger that is not called."""


def logger_standin(loggers: Sequence[Logger], place: Place) -> list[Logger]:
    """One logger that keeps everything in memory, in the place of the loggers of the call; none for none."""
    if not loggers:
        return []
    for logger in loggers:
        if not _is_ours(logger):
            place.skip(f"logger {type(logger).__name__}: what it is given was kept in memory, and it was not called.")
    methods = sorted({name for logger in loggers for name in dir(logger) if name.startswith("log_")})
    return [_Recorded(methods)]
