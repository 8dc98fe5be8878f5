"""One line on the terminal: which file holds the State of a run that has ended early."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

from pure_loop._internal.logs import get_logger

__all__ = ["warn_on_terminal"]

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
