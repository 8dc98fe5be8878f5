"""Batches as pytrees: how many samples, how many tokens, split into microbatches, moved to a device.

A batch is any nesting of tuples, named tuples, lists, mappings and registered classes. In it a tensor
or a NumPy array of at least one dimension holds the samples along its first, and so does a list of
as many strings; 0-d tensors, numbers, strings and None belong to the batch as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from numbers import Number
from typing import Any, TypeAlias

import optree
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor

from pure_loop._pytree import NAMESPACE
from pure_loop.errors import ArgumentError, DataError
from pure_loop.sources import Source, source

__all__ = ["Source", "num_samples", "num_tokens", "source", "split", "to_device"]

# The children of a node, their names in an error's path, and the way back.
Node: TypeAlias = tuple[Sequence[Any], Sequence[str], Callable[[Sequence[Any]], Any]]

_WHOLE = (str, bytes, Number, Enum, type(None), torch.dtype, torch.device)
_TOKEN_IDS = frozenset((torch.int64, torch.int32))


def num_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its tensors and arrays.

    Raises:
        DataError: they disagree, or there is none; the message lists every one of them.

    >>> num_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8), "temperature": 0.5})
    8
    """
    kind = type(batch)
    if (kind is tuple or kind is list) and len(batch) == 2:
        # By far the commonest batch, asked for several times in every step.
        one, other = batch
        if type(one) is Tensor is type(other) and one.ndim and other.ndim and one.shape[0] == other.shape[0]:
            return one.shape[0]
    size = _flat_size(batch)
    if size >= 0:
        return size
    sizes = [(path, _rows(leaf)) for path, leaf in _leaves(batch) if _rows(leaf) is not None]
    # A batch of texts alone has no tensor to count.
    sizes = sizes or [(path, len(leaf)) for path, leaf in _leaves(batch) if _is_strings(leaf)]
    if len({rows for _, rows in sizes}) == 1:
        return int(sizes[0][1])  # type: ignore[arg-type]
    if not sizes:
        raise DataError(
            f"can't count the samples of a batch of type {type(batch).__name__}: it holds no tensor or array of at "
            f"least one dimension in a tuple, list, mapping or registered class, but {describe(batch)}; give batches "
            "such as (inputs, targets) or {'input_ids': ..., 'labels': ...}, or register your class with "
            f"optree.register_pytree_node(..., namespace={NAMESPACE!r})"
        )
    raise DataError(
        "can't count the samples of a batch: its tensors have different first dimensions, "
        + ", ".join(f"{path}: {rows}" for path, rows in sizes)
        + f", in {describe(batch)}; the first dimension of each must be the samples (what belongs to the batch as a "
        "whole goes in as a number, a 0-d tensor, or with a first dimension of its own: x.expand(n, *x.shape))"
    )


def num_tokens(batch: Any) -> int:
    """The number of tokens in a batch, padding included; 0 where it isn't text.

    The ``input_ids`` of a mapping, or else the inputs (a batch that is a tensor, or the first of a tuple
    or list) where they are of a dtype that an embedding takes, int32 or int64, and of shape (samples, length, ...).

    >>> num_tokens((torch.zeros(4, 128, dtype=torch.int64), torch.zeros(4)))
    512
    >>> num_tokens((torch.zeros(4, 128), torch.zeros(4)))
    0
    """
    kind = type(batch)
    if kind is not tuple and kind is not list and isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return ids.numel() if isinstance(ids, Tensor) else int(getattr(ids, "size", 0))
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(inputs, Tensor) and inputs.dtype in _TOKEN_IDS and inputs.ndim >= 2:
        return inputs.numel()
    return 0


def split(batch: Any, size: int) -> list[Any]:
    """A batch of n samples as ``ceil(n / size)`` batches of ``size`` samples, the last one smaller.

    The pieces are views: nothing is copied. What belongs to the batch as a whole goes into every piece.

    Raises:
        ArgumentError: ``size`` is below 1.
        DataError: the samples can't be counted, there are none, or a leaf is of a kind that can't be split.

    >>> split((torch.arange(5), ["a", "b", "c", "d", "e"], 0.5), 3)
    [(tensor([0, 1, 2]), ['a', 'b', 'c'], 0.5), (tensor([3, 4]), ['d', 'e'], 0.5)]
    """
    if size < 1:
        raise ArgumentError(f"a microbatch holds at least one sample, not {size}; None means the whole batch")
    n = _flat_size(batch)
    flat = n >= 0
    if not flat:
        n = num_samples(batch)
    if n == 0:
        raise DataError("a batch of no samples: the mean of its loss would be NaN; skip it in the dataloader")
    if n <= size:
        return [batch]
    if not flat:
        return _split(batch, n, size, "batch")
    kind = type(batch)
    rows = zip(*[_views(leaf, size) for leaf in (batch.values() if kind is dict else batch)], strict=True)
    if kind is dict:
        return [dict(zip(batch, row, strict=True)) for row in rows]
    return list(rows) if kind is tuple else list(map(list, rows))


def to_device(batch: Any, device: torch.device | str, *, stays: bool = False) -> Any:
    """A batch with its tensors on ``device``, each moved once; the same object where nothing has to move.

    Args:
        batch: what to move.
        device: where to.
        stays: whether its pinned memory stays as it is until the device has read it: a copy from there isn't waited
            for then (``non_blocking``).

    >>> batch = (torch.zeros(2), "name")
    >>> to_device(batch, "cpu") is batch
    True
    """
    device = torch.device(device)
    if type(batch) in (tuple, list):
        for leaf in batch:
            if type(leaf) is not Tensor or leaf.device != device:
                break
        else:
            return batch
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            # A copy to the host must end before it is read, and nothing would wait for it. One from pinned memory is
            # still to come when this returns, while one from other memory has been read.
            apart = stays and device.type != "cpu" and tensor.device.type == "cpu" and tensor.is_pinned()
            moved[id(tensor)] = tensor.to(device, non_blocking=apart)
        return moved[id(tensor)]

    return map_tensors(move, batch)


def beside(batch: Any, tensor: Tensor, given_by: Source) -> Any:
    """A source's batch with its tensors on the device of this one; on the CPU without asking which one that is."""
    if tensor.is_cpu and (type(batch) is tuple or type(batch) is list):
        for leaf in batch:
            if type(leaf) is not Tensor or not leaf.is_cpu:
                break
        else:
            return batch
    return to_device(batch, tensor.device, stays=given_by.keeps_pinned)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A nesting with every tensor in it mapped; the same object where all stay the same."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _WHOLE) or _is_strings(value):
        return value
    node = _open(value)
    if node is None:
        return value
    children, _, build = node
    new = [map_tensors(function, child) for child in children]
    return value if all(a is b for a, b in zip(new, children, strict=True)) else build(new)


def describe(value: Any) -> str:
    """What a batch holds, for errors: shapes and types, no numbers.

    >>> describe((torch.zeros(8, 3), {"label": torch.arange(8), "name": ["a"] * 8}))
    "(tensor (8, 3) float32, {'label': tensor (8,) int64, 'name': 8 texts})"
    """
    if isinstance(value, Tensor) or _is_array(value):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if _is_strings(value):
        return f"{len(value)} texts"
    if isinstance(value, Mapping):
        return (
            f"{{{_some([f'{key!r}: {describe(child)}' for key, child in list(value.items())[:_SHOWN]], len(value))}}}"
        )
    if type(value) in (tuple, list):
        inside = _some([describe(child) for child in value[:_SHOWN]], len(value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None" if value is None else type(value).__name__


_SHOWN = 6


def _some(shown: list[str], count: int) -> str:
    return ", ".join(shown) + (f", ... {count - len(shown)} more" if count > len(shown) else "")


def _flat_size(batch: Any) -> int:
    """The samples of a tuple, list or dict of plain tensors, by far the commonest batches; -1 for any other."""
    kind = type(batch)
    if kind is dict:
        batch = batch.values()
    elif kind is not tuple and kind is not list:
        return -1
    size = -1
    for leaf in batch:
        if type(leaf) is not Tensor or not leaf.ndim:
            return -1
        rows = leaf.shape[0]
        if rows != size:
            if size >= 0:
                return -1
            size = rows
    return size


def _views(leaf: Tensor, size: int) -> Sequence[Tensor]:
    if leaf.layout is not torch.strided:
        raise DataError(
            f"can't split a tensor of layout {leaf.layout} and shape {tuple(leaf.shape)} into microbatches: give dense "
            "tensors, pl.Task(split=function), or train with microbatch_size=None"
        )
    whole, rest = divmod(leaf.shape[0], size)
    # What Tensor.split comes to, behind twice as much Python.
    return leaf.split_with_sizes([size] * whole + [rest] * (rest > 0))


def _split(value: Any, n: int, size: int, path: str) -> list[Any]:
    if isinstance(value, Tensor) and value.ndim:
        return list(_views(value, size))
    if _rows(value) is not None or (_is_strings(value) and len(value) == n):
        return [value[i : i + size] for i in range(0, n, size)]
    if isinstance(value, (Tensor, *_WHOLE)) or _is_array(value) or _is_strings(value):
        return [value] * -(-n // size)
    node = _open(value)
    if node is None:
        raise DataError(
            f"can't split {path}, a {type(value).__name__}, into microbatches of {size} of {n} samples: make it a "
            "tensor whose first dimension is the samples, a list of as many strings, or a class registered with "
            f"optree.register_pytree_node(..., namespace={NAMESPACE!r}); or train with microbatch_size=None"
        )
    children, names, build = node
    if not children:
        return [value] * -(-n // size)
    columns = [_split(child, n, size, path + name) for child, name in zip(children, names, strict=True)]
    return [build(row) for row in zip(*columns, strict=True)]


def _open(value: Any) -> Node | None:
    """One level of a pytree, whichever engine knows its class, or of a mapping; None for a leaf."""
    if not optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE):
        level = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=NAMESPACE)
        children, metadata, entries, unflatten = level
        attributes = not isinstance(value, (tuple, list, Mapping)) or hasattr(value, "_fields")
        if hasattr(value, "_fields"):
            entries = value._fields
        names = [f".{entry}" if attributes else f"[{entry!r}]" for entry in entries]
        return children, names, lambda new: unflatten(metadata, tuple(new))
    if isinstance(value, Mapping):
        keys = list(value)
        make: Callable[[dict[Any, Any]], Any] = type(value)
        names = [f"[{key!r}]" for key in keys]
        return list(value.values()), names, lambda new: make(dict(zip(keys, new, strict=True)))
    known = torch_pytree.SUPPORTED_NODES.get(type(value))
    if known is not None:
        flat, context = known.flatten_fn(value)
        return flat, [f"[{i}]" for i in range(len(flat))], lambda new: known.unflatten_fn(list(new), context)
    return None


def _leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    node = None if isinstance(value, Tensor) or _is_strings(value) else _open(value)
    if node is None:
        yield path, value
    else:
        for child, name in zip(node[0], node[1], strict=True):
            yield from _leaves(child, path + name)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, (str, bytes)) for each in value)


def _rows(leaf: Any) -> int | None:
    """The first dimension of a tensor or array; None for anything else."""
    return int(leaf.shape[0]) if (isinstance(leaf, Tensor) or _is_array(leaf)) and leaf.ndim else None
