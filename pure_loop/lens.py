"""Lenses: where in a batch its inputs, or its targets, are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
from torch import Tensor

from pure_loop.errors import ArgumentTypeError, DataError
from pure_loop.frozendict import FrozenDict

__all__ = ["BatchKey", "Lens", "part_of", "with_part"]


def _function(lens: Lens, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not callable(value):
        example = "pl.Lens(lambda batch: batch.x, lambda batch, x: attrs.evolve(batch, x=x))"
        raise ArgumentTypeError(f"Lens: {attribute.name}={value!r} is not a function: {example}.")


@attrs.frozen
class Lens:
    """A part of a batch, as two pure functions: for a batch where an index or a key does not reach it.

    Args:
        get: ``batch -> part``.
        put: ``(batch, part) -> batch``, another batch with that part; the one that was passed stays as it was.

    Raises:
        ArgumentTypeError: not two functions.

    >>> first_image = Lens(lambda batch: batch[0][0], lambda batch, image: ((image, *batch[0][1:]), *batch[1:]))
    >>> first_image.put((("image", "mask"), 3), "other")
    (('other', 'mask'), 3)
    """

    get: Callable[[Any], Any] = attrs.field(validator=_function)
    put: Callable[[Any, Any], Any] = attrs.field(validator=_function)


BatchKey: TypeAlias = int | str | Lens
"""An index, a key or the name of an attribute of a batch, or a :class:`Lens`."""


def part_of(batch: Any, key: BatchKey, where: str, *arguments: str) -> Any:
    """The part of a batch at ``key``.

    Args:
        batch: a sequence, a mapping, an object with attributes, or anything that a lens reads. A batch that is a tensor
            is its own part 0.
        key: where the part is.
        where: the function that names the key, for the error.
        arguments: the function's argument of the key, and others that an error is to name, too.

    Raises:
        DataError: the batch has no such part.

    >>> part_of({"pixels": 1, "labels": 2}, "labels", "label_smoothing", "target_key")
    2
    """
    if isinstance(key, Lens):
        return key.get(batch)
    if isinstance(batch, Tensor) and key == 0:
        return batch
    try:
        if not isinstance(batch, Tensor):  # of which an index is a sample
            return batch[key]
        raise KeyError
    except (LookupError, TypeError):
        if isinstance(key, str) and _has_attribute(batch, key):
            return getattr(batch, key)
        kind = f"mapping with keys {sorted(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        written = ", ".join(f'{argument}="{_meant(batch, argument)}"' for argument in arguments)
        raise DataError(
            f"{where}: a batch is a {kind} and has no batch[{key!r}]. Say where the part is, as an index, a key or "
            f"the name of an attribute, {where}({written}), or as two functions, pl.Lens(get, put)."
        ) from None


# What inputs and targets are often called.
_CALLED = {
    "input_key": ("image", "images", "img", "x", "input", "inputs", "pixel_values", "data", "features"),
    "target_key": ("labels", "label", "y", "target", "targets", "class", "classes", "mask", "masks"),
}


def _meant(batch: Any, argument: str) -> str:
    """The key of a batch under which its inputs, or targets, probably are."""
    keys = [key for key in batch if isinstance(key, str)] if isinstance(batch, Mapping) else []
    names = _CALLED[argument]
    by_name = [key for key in keys if key.lower() in names]
    if by_name or len(keys) < 2:
        return next(iter(by_name), names[0])
    return keys[0] if argument == "input_key" else keys[-1]


def _has_attribute(batch: Any, name: str) -> bool:
    """Whether a batch has a part of this name: methods of mappings, sequences and tensors are none."""
    if isinstance(batch, tuple):
        return name in getattr(batch, "_fields", ())
    return not isinstance(batch, Mapping | list | Tensor) and hasattr(batch, name)


def with_part(batch: Any, key: BatchKey, value: Any) -> Any:
    """Another batch, of the same kind, with ``value`` at ``key``, where :func:`part_of` found a part.

    >>> with_part((1, 2), 1, 3)
    (1, 3)
    """
    if isinstance(key, Lens):
        return key.put(batch, value)
    if isinstance(batch, Tensor):
        return value
    if isinstance(batch, FrozenDict):
        return batch | {key: value}
    if isinstance(batch, tuple) and isinstance(key, int):
        items = list(batch)
        items[key] = value
        return batch._make(items) if hasattr(batch, "_make") else tuple(items)
    if isinstance(batch, tuple):
        return batch._replace(**{str(key): value})  # type: ignore[attr-defined]
    if isinstance(batch, list | Mapping) or hasattr(batch, "__setitem__"):
        result = copy.copy(batch)
        result[key] = value
        return result
    name = str(key)
    if attrs.has(type(batch)):
        return attrs.evolve(batch, **{name.lstrip("_"): value})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(batch, **{name: value})
    result = copy.copy(batch)
    setattr(result, name, value)
    return result
