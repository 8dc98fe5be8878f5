"""Whether a function that a user gave can be called as the loop will call it: asked at the door, before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["accepts", "name_of"]


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes ``count`` positional arguments; True where Python can't tell (some builtins).

    >>> accepts(lambda state: True, 1), accepts(lambda event, state: True, 1), accepts(print, 3)
    (True, False, True)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def name_of(function: object) -> str:
    """What to call a function in a message.

    >>> name_of(len), name_of(lambda x: x)
    ('len', '<lambda>')
    """
    return getattr(function, "__name__", type(function).__name__)
