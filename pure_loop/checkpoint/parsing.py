"""JSON of files that anything may have written: read strictly, and only where the memory that it takes is bounded.

What :mod:`json` writes without NaN and infinities is read as it was. Refused are what Python's reader takes beyond that
(NaN, infinities, numbers that become infinite, a name that stands twice in one object), texts whose objects would take
more than :data:`MOST_MEMORY`, and keys that a hash table would need quadratic time for.
Base85 text becomes bytes in memory that is that of the bytes: Python's own reader takes thirty times as much.
"""

from __future__ import annotations

import gc
import json
import math
import reprlib
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any, NoReturn

import torch

__all__ = [
    "MOST_DIGITS",
    "MOST_MEMORY",
    "decoded",
    "memory_of",
    "parse",
    "refuse_collisions",
    "shortened",
    "first_names",
]

MOST_MEMORY = 256 << 20
"""The bytes that the objects of one text may take, by :func:`memory_of`."""

MOST_DIGITS = 4300
"""The longest integer, which is Python's default limit: reading one takes quadratic time."""

# Integers that differ by multiples of 2**61 - 1 have one hash, and tuples and floats can be made so. Honest keys share
# one only by chance (-1 and -2).
_MOST_OF_ONE_HASH = 32


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or JSON that is refused here; says why.
        RecursionError: it is nested too deep.

    >>> parse('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse('{"a": 1e999}')
    Traceback (most recent call last):
    ...
    ValueError: the number 1e999 in it is not finite
    """
    needed = memory_of(text)
    if needed > MOST_MEMORY:
        raise ValueError(
            f"its {len(text):,} characters would take {needed >> 20} MiB of memory, and at most {MOST_MEMORY >> 20} "
            "MiB are allowed"
        )
    # There are no cycles to be found, and looking for them takes most of the time where there are many lists.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_refuse_constant
        )
    finally:
        if collecting:
            gc.enable()


def memory_of(text: str) -> int:
    """An upper bound of the bytes that the objects of a JSON text take, from the number of its separators alone."""
    lists, dicts, items = text.count("["), text.count("{"), text.count(",")
    numbers = min(lists + dicts + items, len(text) // 4)  # shorter ones are cached by the interpreter
    return (
        100 * lists
        + 200 * dicts
        + 100 * text.count(":")
        + 28 * text.count('"')
        + 9 * items
        + 32 * numbers
        + len(text) * (1 if text.isascii() else 4)
    )


def refuse_collisions(keys: Collection[Hashable]) -> None:
    """Refuse keys of which many have one hash, before they are put into a set or a dict.

    Raises:
        ValueError: there are such.
        TypeError: one can't be hashed.
    """
    if len(keys) <= _MOST_OF_ONE_HASH:
        return
    # The hashes themselves are distinct integers below 2**61, so counting them takes linear time.
    most = max(Counter(map(hash, keys)).values())
    if most > _MOST_OF_ONE_HASH:
        raise ValueError(f"{most:,} of its {len(keys):,} keys have one hash")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice in it")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} in it is not finite")
    return number


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer in it has {len(text):,} digits")
    return int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} in it is no number of JSON")


_ALPHABET = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_NONE = 255
# Characters at a time.
_CHUNK = 5 << 15


def decoded(text: str) -> bytes:
    """What ``base64.b85decode`` gives.

    Raises:
        ValueError: a character that base85 has not, or five of them that are more than four bytes.

    >>> decoded("VQzUKVtI4")
    b'any byt'
    """
    codes = bytearray(b"\xff" * 256)
    for number, character in enumerate(_ALPHABET):
        codes[character] = number
    content = text.encode("ascii").translate(bytes(codes))
    at = content.find(_NONE)
    if at >= 0:
        raise ValueError(f"bad base85 character at position {at}")
    padding = -len(content) % 5
    weights = torch.tensor([85**4, 85**3, 85**2, 85, 1])
    shifts = torch.tensor([24, 16, 8, 0])
    result = bytearray()
    for start in range(0, len(content), _CHUNK):
        chunk = bytearray(content[start : start + _CHUNK])
        chunk += bytes([84]) * (-len(chunk) % 5)
        numbers = (torch.frombuffer(chunk, dtype=torch.uint8).view(-1, 5) * weights).sum(1)
        if int(numbers.max()) >= 1 << 32:
            raise ValueError(f"base85 overflow in the characters from position {start} on")
        result += bytes(((numbers.unsqueeze(1) >> shifts) & 255).flatten().tolist())
    return bytes(memoryview(result)[: len(result) - padding])


def shortened(value: object, longest: int = 80) -> str:
    """A text of at most so many characters for messages."""
    # Not the whole of repr first: a stranger's value may be long, and deep.
    brief = reprlib.Repr()
    brief.maxstring = longest
    text = brief.repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def first_names(names: list[str]) -> str:
    """The first names of a list, for messages."""
    return f"[{', '.join(map(shortened, names[:3]))}]{' ...' if len(names) > 3 else ''}"
