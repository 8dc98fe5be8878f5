"""The name of a run, which all its loggers use."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pure_loop._internal.names import check_run_name
from pure_loop.callback import Callback, Logger
from pure_loop.errors import ArgumentError, ArgumentTypeError

__all__ = ["new_run_name", "noted_run_name", "read_run_name", "recorded_run_name"]

_QUALITIES = ("amber", "bold", "brisk", "calm", "clear", "crisp", "early", "gentle", "green", "keen", "lucid", "mellow")
_NOUNS = ("aspen", "birch", "brook", "cedar", "cliff", "dune", "fern", "harbor", "heron", "island", "maple", "river")


def read_run_name(name: Any) -> str | None:
    """
    Raises:
        ArgumentTypeError: it is no text.
        ArgumentError: a folder can't be named so.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ArgumentTypeError(f'run_name={name!r}: write a text, such as "baseline-1", or None for a new name.')
    return check_run_name(name)


def new_run_name() -> str:
    """A name that reads well, of the time and two words: ``20250131-142501-calm-river``.

    Its words are drawn from the system's own generator, so that no seed of the run plays a part and none is moved.
    """
    words = secrets.choice(_QUALITIES), secrets.choice(_NOUNS)
    return "-".join((time.strftime("%Y%m%d-%H%M%S"), *words))


def noted_run_name(notes: Mapping[str, Any]) -> str | None:
    """The name of the run that a ``CheckpointSaver`` noted in a checkpoint; None: none, or one that no run can have."""
    try:
        return read_run_name(notes.get("run_name"))
    except (ArgumentError, ArgumentTypeError):
        return None


def recorded_run_name(callbacks: Iterable[Callback]) -> str | None:
    """The name of the run that loggers have a record of; None: none has one."""
    names = (callback.recorded_run_name for callback in callbacks if isinstance(callback, Logger))
    return next((name for name in names if name is not None), None)
