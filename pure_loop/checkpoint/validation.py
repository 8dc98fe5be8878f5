"""Texts of files that anything may have written: JSON read strictly, and checks of the values that a State has.

What :mod:`json` writes without NaN and infinities is read as it was. Refused are what Python's reader takes beyond that
(NaN, infinities, numbers that become infinite, a name that stands twice in one object), texts of objects that would
take more than :data:`MOST_MEMORY`, and keys that a hash table would need quadratic time for.
Base85 text becomes bytes in memory that is that of the bytes: Python's own reader takes thirty times as much.
"""

from __future__ import annotations

import gc
import json
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from types import UnionType
from typing import Any, NoReturn, TypeAlias

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop.data.position import Position
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.membership import Members
from pure_loop.model.names import Note
from pure_loop.precision import LossScale
from pure_loop.time import Time, Timestamp

Json: TypeAlias = Any
"""A value of JSON that may have been written by anything: what reads it is ready for every kind of value."""

MOST_MEMORY = 256 << 20
"""The bytes that the objects of one text may take, by :func:`memory_of`."""

MOST_DIGITS = 4300
"""The longest integer, which is Python's default limit: reading one takes quadratic time."""

# Integers that differ by multiples of 2**61 - 1 have one hash, and tuples and floats can be made so. Honest keys share
# one only by chance (-1 and -2).
_MOST_OF_ONE_HASH = 32


def parse(text: str) -> Json:
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


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
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


def refuse_invalid(values: Mapping[str, PyTree], path: object) -> None:
    """
    Raises:
        CheckpointError: a value that no State has; names the field.
    """
    refuse_other_kinds(values, _KINDS, path)
    for name in ("params", "buffers"):
        for key, tensor in values[name].items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise CheckpointError(f"{path} can't be read: {name}[{shortened(key)}] is a {type(tensor).__name__}.")
    for name in ("timestamp", "previous_timestamp"):
        refuse_no_time(name, values[name], path)
    _refuse_no_stop(values, path)
    scale = values["loss_scale"]
    scalars = {"skipped": (values["skipped"], torch.int64), "nonfinite": (values["nonfinite"], torch.int64)}
    if scale is not None:
        scalars["loss_scale.scale"] = scale.scale, torch.float32
        scalars["loss_scale.growth_tracker"] = scale.growth_tracker, torch.int32
    shape = _shape_of_scalars(values, path)
    if (lr_scale := values.get("lr_scale")) is not None:
        scalars["lr_scale"] = lr_scale, torch.float64
    for name, (scalar, dtype) in scalars.items():
        if scalar is None and "." not in name:
            continue
        fits = isinstance(scalar, Tensor) and scalar.shape == shape
        if not fits or not (scalar.dtype is dtype or (name == "lr_scale" and scalar.is_floating_point())):
            kind = shape_and_dtype(scalar) if isinstance(scalar, Tensor) else f"a {type(scalar).__name__}"
            raise CheckpointError(
                f"{path} can't be read: its {name} is {kind}, and a State has {tuple(shape)} "
                f"{str(dtype).removeprefix('torch.')} there."
            )


def _shape_of_scalars(values: Mapping[str, PyTree], path: object) -> tuple[int, ...]:
    """That of what is one number in a State of one model; a file that is older has no members.

    Raises:
        CheckpointError: what it says of members no State says.
    """
    members, data_seed = values.get("ensemble"), values.get("data_seed")
    if members is None:
        right = data_seed is None or type(data_seed) is int
        shape: tuple[int, ...] = ()
    else:
        right = isinstance(members, Members) and members.is_valid and (data_seed is None or type(data_seed) is int)
        shape = (len(members),) if right else ()
    if not right:
        raise CheckpointError(f"{path} can't be read: its ensemble is {shortened(members)}, of {shortened(data_seed)}.")
    for stop in () if members is None else members.stopped:
        for timestamp in stop or ():
            refuse_no_time("ensemble", timestamp, path)
    return shape


def _of_ranks(data: object) -> Iterable[object]:
    return data if type(data) is tuple else (data,)


def refuse_other_kinds(values: Mapping[str, PyTree], names: Iterable[str], path: object) -> None:
    """
    Raises:
        CheckpointError: one of these fields is missing, or of another class than a State has there.
    """
    for name in names:
        if name not in values:
            raise CheckpointError(f"{path} can't be read: it has no {name}.")
        if not isinstance(values[name], _KINDS[name]) or isinstance(values[name], bool):
            raise CheckpointError(f"{path} can't be read: its {name} is a {type(values[name]).__name__}.")


def _refuse_no_stop(values: Mapping[str, PyTree], path: object) -> None:
    """Refuse another kind of ``stop``, ``frozen`` or ``notes``; a file that is older has none."""
    notes = values.get("notes", ())
    if type(notes) is not tuple or not all(isinstance(note, Note) and note.is_valid for note in notes):
        raise CheckpointError(f"{path} can't be read: its notes are {shortened(notes)}.")
    frozen = values.get("frozen", frozenset())
    if not isinstance(frozen, frozenset) or not all(isinstance(name, str) for name in frozen):
        raise CheckpointError(f"{path} can't be read: its frozen is a {type(frozen).__name__}, and no set of names.")
    data = values.get("data")
    if not all(item is None or (isinstance(item, Position) and item.is_valid) for item in _of_ranks(data)):
        raise CheckpointError(f"{path} can't be read: its data is {shortened(data)}, and no position.")
    if type(values.get("stop", False)) is not bool:
        raise CheckpointError(f"{path} can't be read: its stop is a {type(values['stop']).__name__}.")


def refuse_no_time(name: str, timestamp: Timestamp, path: object) -> None:
    """
    Raises:
        CheckpointError: a field of the timestamp is no number that it can have.
    """
    for field in attrs.fields(Timestamp):
        value = getattr(timestamp, field.name)
        if field.name == "max_duration":
            right = value is None or (isinstance(value, Time) and _is_time(value))
        elif field.name.endswith("_seconds"):
            right = type(value) in (int, float) and abs(value) <= _LARGEST
        else:
            right = type(value) is int and 0 <= value <= LARGEST_COUNT
            right = right or (value is None and field.name == "batches_per_epoch")
        if not right:
            # Not its text: that of a Time is made for those that are one.
            content = attrs.astuple(value, recurse=False) if isinstance(value, Time) else value
            raise CheckpointError(f"{path} can't be read: its {name}.{field.name} is {shortened(content)}.")


_LARGEST = sys.float_info.max
LARGEST_COUNT = (1 << 63) - 1


def _is_time(argument: Time) -> bool:
    if type(argument.value) not in (int, float) or not abs(argument.value) <= _LARGEST:
        return False
    try:
        return Time(argument.value, argument.unit) == argument
    except (ArgumentError, ArgumentTypeError):
        return False


_KINDS: dict[str, type | UnionType] = {
    "params": FrozenDict,
    "buffers": FrozenDict,
    "algorithm_state": FrozenDict,
    "metrics": FrozenDict,
    "timestamp": Timestamp,
    "previous_timestamp": Timestamp,
    "seed": int,
    "loss_scale": LossScale | None,
    "event": Event | None,
    "position": Event | None,
    "skipped": Tensor | None,
    "nonfinite": Tensor | None,
}
PROGRESS_FIELDS = ("seed", "timestamp", "previous_timestamp", "event", "position")


def refuse_no_notes(notes: object) -> None:
    if notes is None:
        return
    try:
        same = isinstance(notes, Mapping) and json.loads(json.dumps(dict(notes), allow_nan=False)) == notes
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ArgumentTypeError(
            f"notes={str(notes)[:80]}: a dict of what JSON has: texts as keys; None, bools, finite numbers, texts, "
            "lists and such dicts as values."
        )
