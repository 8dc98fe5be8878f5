"""The loggers of the standard library to which the package writes, each message as one line without secrets."""

from __future__ import annotations

import logging
import time

from pure_loop._text import one_line, without_secrets

__all__ = ["Seldom", "get_logger"]

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
