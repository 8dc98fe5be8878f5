"""Messages that could come with every file or batch, and come once a minute."""

from __future__ import annotations

import logging
import time

__all__ = ["Seldom"]

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
        now = time.monotonic()
        if self._said is not None and now - self._said < _SECONDS:
            self._left_out += 1
            return False
        more = f" ({self._left_out} more such messages since the last one)" if self._left_out else ""
        self._said, self._left_out = now, 0
        self._log.warning(message + more, *values)
        return True
