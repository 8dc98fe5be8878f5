"""The global state of Python's ``random``, set aside and put back in a microsecond.

``random.getstate`` and ``setstate`` make 625 integers of the state and read them again, which takes as long as a small
batch takes to load. CPython has had them as one array since 2.3; here it is copied as memory, where a trial at import
shows that this gives what ``getstate`` gives.
"""

from __future__ import annotations

import _random
import random
import sys
from typing import Any

__all__ = ["put_back", "set_aside"]

# 624 words and the place of the next one, 32 bits each, after what every object has.
_BYTES = 4 * 625


def _memory_of(generator: random.Random) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_char * _BYTES).from_address(id(generator) + object.__basicsize__)).cast("B")


def _is_an_array() -> bool:
    """Whether the state can be read and written as memory."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    if _random.Random.__basicsize__ < object.__basicsize__ + _BYTES:
        return False
    one, other = random.Random(1), random.Random(2)
    one.random()
    try:
        memory, wanted = _memory_of(one), _memory_of(other)
    except ImportError:  # a Python without ctypes
        return False
    words = memory.cast("I").tolist()
    if (*words[1:], words[0]) != one.getstate()[1]:
        return False
    memory[:] = wanted
    return one.getstate() == other.getstate()


_generator: Any = random.random.__self__  # type: ignore[attr-defined]
_memory = _memory_of(_generator) if _is_an_array() else None


def set_aside() -> tuple[Any, ...]:
    """The state, for :func:`put_back`."""
    if _memory is None:
        return random.getstate()
    return bytes(_memory), _generator.gauss_next


def put_back(state: tuple[Any, ...]) -> None:
    """Give ``random`` the state that :func:`set_aside` gave."""
    if _memory is None:
        random.setstate(state)
        return
    _memory[:], _generator.gauss_next = state
