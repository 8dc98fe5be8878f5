"""NumPy's global random state, set aside and put back in microseconds.

``numpy.random.get_state`` and ``set_state`` copy 624 words one by one, as long as a small batch takes to
load. Here the global generator gets another bit generator for a while (``numpy.random.set_bit_generator``),
so nothing is copied. The exchange forgets one thing, the second half of the last pair of normal numbers,
which only ``get_state`` shows: it is read and written with nothing in the place of the 624 words.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

__all__ = ["numpy_random", "put_back", "set_aside"]

# Bit generators to lend; guards may stand inside one another, so there may be several.
_spare: list[object] = []


def numpy_random() -> ModuleType | None:
    """The module ``numpy.random``; None where no code has imported NumPy, which is optional.

    Reading it loads it if nothing has yet: code that runs soon may, and would find it seeded by the operating system.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    module: ModuleType = numpy.random
    return module


class _Nothing:
    """Stands for a bit generator where its words are not needed."""

    def __init__(self) -> None:
        self.state: object = {"bit_generator": "MT19937", "state": None}


def set_aside(numpy: ModuleType) -> tuple[Any, ...]:
    """Put another bit generator in the global one's place, and return what :func:`put_back` needs."""
    if not _can_exchange(numpy):
        return (None, numpy.get_state())
    own = numpy.get_bit_generator()
    pair = _pair(numpy.mtrand._rand)
    lent = _spare.pop() if _spare else numpy.MT19937()
    numpy.set_bit_generator(lent)
    return (own, pair, lent)


def put_back(numpy: ModuleType, state: tuple[Any, ...]) -> None:
    if state[0] is None:
        numpy.set_state(state[1])
        return
    own, pair, lent = state
    numpy.set_bit_generator(own)
    if pair["has_gauss"]:
        _pair(numpy.mtrand._rand, pair)
    _spare.append(lent)


def _can_exchange(numpy: ModuleType) -> bool:
    return hasattr(numpy, "set_bit_generator") and hasattr(numpy.mtrand._rand, "_bit_generator")


def _pair(singleton: Any, pair: dict[str, object] | None = None) -> Any:
    """Read what ``get_state`` shows, or write it, with nothing in the place of the words.

    No other code runs in this thread meanwhile. The garbage collector may close a stream. Its guard would set aside the
    nothing and could not put it back.
    """
    collecting = gc.isenabled()
    gc.disable()
    own, singleton._bit_generator = singleton._bit_generator, _Nothing()
    try:
        return singleton.get_state(legacy=False) if pair is None else singleton.set_state(pair)
    finally:
        singleton._bit_generator = own
        if collecting:
            gc.enable()
