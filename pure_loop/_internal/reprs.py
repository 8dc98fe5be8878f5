"""Reprs: what a value is, in one line. Of tensors only those of shape () are read."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor, nn

from pure_loop._text import HIDDEN, is_secret, without_secrets

T = TypeVar("T")

# Items of a container that are shown.
_MOST = 6
_CONTAINERS = (list, tuple, set, frozenset, dict)


class Shaped(Protocol):
    """What has a shape and a dtype: a tensor, or what a file says of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def shape_and_dtype(tensor: Shaped) -> str:
    """The shape and dtype of a tensor.

    >>> import torch
    >>> shape_and_dtype(torch.zeros(2, 3))
    '(2, 3) float32'
    """
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def kind(tensor: Tensor) -> str:
    """The shape, dtype and, where it isn't the CPU, device of a tensor.

    >>> import torch
    >>> kind(torch.zeros(2, 3))
    'tensor (2, 3) float32'
    """
    device = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"tensor {shape_and_dtype(tensor)}{device}"


def shown(value: object) -> str:
    """A value inside a repr: tensors by shape and dtype, functions by name, data by what it is.

    A class has a method ``in_a_call`` where its values are written otherwise in a call than by their repr.

    >>> import torch
    >>> shown([torch.zeros(2), 3])
    '[tensor (2,) float32, 3]'
    """
    if isinstance(value, Tensor):
        return kind(value)
    written = getattr(type(value), "in_a_call", None)
    if written is not None:
        return str(written(value))
    if isinstance(value, (list, tuple, set, frozenset, dict)) and type(value) in _CONTAINERS:
        return _items(value)
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, type) or (callable(value) and not attrs.has(type(value))):
        return str(getattr(value, "__name__", type(value).__name__))  # arguments.py needs this module
    text = without_secrets(repr(value))
    return text if len(text) <= 200 and " at 0x" not in text else data(value)


def brief(value: object) -> str:
    """A value in a message: its repr, if that is one short line; of long texts the beginning, of others what they are.

    >>> brief("3 epochs"), brief(dict.fromkeys("ab", torch.zeros(99))), brief(nn.Sequential(nn.Flatten()))
    ("'3 epochs'", 'dict of 2', 'Sequential')
    """
    text = without_secrets(repr(value))
    if len(text) <= 200 and (isinstance(value, str) or ("\n" not in text and " at 0x" not in text)):
        return text
    if isinstance(value, str | int):
        return f"{text[:100]}..."
    return data(value) if isinstance(value, Mapping) else shown(value)


def _items(value: Collection[object], written: Callable[[object], str] = shown) -> str:
    if isinstance(value, dict):
        texts = [_unless_secret(str(key), item, written) for key, item in _first(value.items())]
        items = [f"{key!r}: {text}" for key, text in zip(value, texts, strict=False)]
        opening, closing = "{", "}"
    else:
        items = [shown(item) for item in _first(value)]
        opening, closing = ("(", ")") if isinstance(value, tuple) else ("[", "]") if isinstance(value, list) else "{}"
    if len(value) > _MOST:
        items.append(f"... {len(value) - _MOST} more")
    elif isinstance(value, tuple) and len(items) == 1:
        items[0] += ","
    return f"{opening}{', '.join(items)}{closing}"


def _unless_secret(name: str, value: object, written: Callable[[object], str] = shown) -> str:
    return repr(HIDDEN) if isinstance(value, str) and is_secret(name) else written(value)


def _first(items: Iterable[T]) -> list[T]:
    return [item for item, _ in zip(items, range(_MOST), strict=False)]


def data(value: object) -> str:
    """The type of some data, and how many batches or items it has, where it says so."""
    try:
        size = f" of {len(value)}" if isinstance(value, Sized) else ""
    except Exception:  # a __len__ of user code may raise anything, and a repr may not
        size = ""
    return f"{type(value).__name__}{size}"


def call(name: str, arguments: Mapping[str, object]) -> str:
    """The call that makes a value; values of arguments that are secrets, and passwords in URLs, are hidden.

    >>> call("sam", {"rho": 0.05}), call("Logger", {"token": "abc", "url": "ftp://ann:abc@host"})
    ('sam(rho=0.05)', "Logger(token='...', url='ftp://ann:...@host')")
    """
    written = (f"{argument}={_unless_secret(argument, value)}" for argument, value in arguments.items())
    return f"{name}({', '.join(written)})"


def changed_fields(record: Any) -> dict[str, object]:
    """The fields of an attrs record that have another value than their default, by name."""
    result = {}
    for field in attrs.fields(type(record)):
        if field.init and field.repr:
            value, default = getattr(record, field.name), field.default
            if value is not default and not (type(value) is type(default) and value == default):
                result[field.alias or field.name] = value
    return result


def number(value: object) -> object:
    """The number of a tensor of shape (), which waits for its device; any other value as it is.

    >>> import torch
    >>> number(torch.tensor(0.25)), number(3)
    (0.25, 3)
    """
    # A subclass of Tensor may give its number otherwise, or wait for other ranks.
    if type(value) is not Tensor or value.shape != () or value.is_complex() or value.is_meta:
        return value
    try:
        return value.item()
    except RuntimeError:  # what torch.func maps has no number, nor has a device after an error in a kernel
        return value


def cell(value: object) -> str:
    """A value where it is printed: a number, of tensors of shape () too, else what :func:`shown` says.

    >>> import torch
    >>> cell(torch.tensor(0.25)), cell(torch.zeros(2))
    ('0.25', 'tensor (2,) float32')
    """
    value = number(value)
    if type(value) is dict:
        return _items(value, cell)
    return f"{value:.6g}" if isinstance(value, float) else shown(value)


def columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Rows as lines of text: the columns ``left`` begin at their left, the others end at their right.

    >>> columns([("name", "n"), ("a", "10")], left=[0])
    ['name   n', 'a     10']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if number in left else str.rjust for number in range(len(widths))]
    lines = ([side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


def count(value: int, singular: str, plural: str) -> str:
    return f"{value:,} {singular if value == 1 else plural}"


def paragraph(name: str, text: str, margin: int) -> str:
    """A text behind its name, wrapped to 100 characters; paths and hyphens stay whole."""
    return textwrap.fill(
        text,
        100,
        initial_indent=f"  {name:<{margin - 2}}",
        subsequent_indent=" " * margin,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = (), caption: str = "") -> str:
    """An HTML table; every text in it is escaped."""
    import html  # notebooks alone need it

    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    titles = f"<tr>{''.join(f'<th>{html.escape(text)}</th>' for text in head)}</tr>" if head else ""
    lines = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{title}{titles}{lines}</table>"


def in_bytes(size: float) -> str:
    """A number of bytes with its unit, in three digits.

    >>> in_bytes(512), in_bytes(5_400_000)
    ('512 B', '5.15 MiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.3g} {unit}"
    return f"{size / 1024:.3g} TiB"
