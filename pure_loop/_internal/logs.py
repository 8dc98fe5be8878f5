"""The loggers of the standard library to which the package writes, each message as one line without secrets."""

from __future__ import annotations

import logging

from pure_loop._text import one_line, without_secrets

__all__ = ["get_logger"]

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
