"""The loggers of the standard library to which the package writes, each message as one line without secrets."""

from __future__ import annotations

import logging

from pure_loop._internal.secret import without_secrets

__all__ = ["get_logger", "one_line"]

# Longer messages are cut: a name in a file may have any length.
_LONGEST = 4000


def one_line(text: str) -> str:
    """A text without line ends and control characters, which are escaped.

    >>> one_line("a\\x1b[31m\\nb: 精度")
    'a\\\\x1b[31m\\\\nb: 精度'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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
