"""The loggers of the standard library to which the package writes, each message as one line without secrets."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator

from pure_loop._text import one_line, without_secrets

__all__ = ["Seldom", "get_logger", "warn_on_terminal"]

# Longer messages are cut: a name in a file may have any length.
_LONGEST = 4000


class _OneLine(logging.Filter):
    """Names of files and texts in them, which a stranger may have chosen, add no line and no control sequence."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = one_line(without_secrets(record.getMessage()))
        record.msg, record.args = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."), ()
        return True


def get_logger(name: str) -> logging.Logger:
    """The logger of this name, with that filter."""
    log = logging.getLogger(name)
    if not any(isinstance(item, _OneLine) for item in log.filters):
        log.addFilter(_OneLine())
    return log


_SECONDS = 60.0


class Seldom:
    """Warnings of one kind, of which one a minute reaches the log, with the number of those that were left out.

    >>> import logging
    >>> seldom = Seldom(logging.getLogger("an example"))
    >>> [seldom.warning("file %d is another's", number) for number in range(3)]
    [True, False, False]
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: float | None = None
        self._left_out = 0

    def warning(self, message: str, *values: object) -> bool:
        """Whether it was said."""
        seconds = time.monotonic()
        if self._said is not None and seconds - self._said < _SECONDS:
            self._left_out += 1
            return False
        more = f" ({self._left_out} more such messages since the last one)" if self._left_out else ""
        self._said, self._left_out = seconds, 0
        self._log.warning(message + more, *values)
        return True


def warn_on_terminal(log: logging.Logger, text: str) -> None:
    """Log a line as a warning, and print it on stderr where logging does not show it there."""
    log.warning(text)
    handlers = list(_handlers(log))
    # Without any handler logging itself prints warnings.
    is_seen = any(map(_is_shown, handlers)) if handlers else logging.lastResort is not None
    if not is_seen or not log.isEnabledFor(logging.WARNING):
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
