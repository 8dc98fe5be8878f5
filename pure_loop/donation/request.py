"""What a script of the library may yield in the place of an event."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Request"]


class Request(Enum):
    """A request of a script to its driver, yielded as ``state = yield Request.COUNT_REFERENCES, state``.

    The driver serves it and sends the State back; no algorithm, callback or consumer sees it. Scripts of users yield
    events only.

    Attributes:
        COUNT_REFERENCES: the next computation writes to the memory of this State where nothing else refers to it: the
            references are counted now, where only the driver and the script have some.
    """

    COUNT_REFERENCES = auto()
