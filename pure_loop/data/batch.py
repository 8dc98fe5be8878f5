"""Batches as pytrees: how many samples, how many tokens, split into microbatches, moved to a device.

A batch is any nesting of tuples, named tuples, lists, mappings, dataclasses, attrs classes and registered classes. In
it a tensor or a NumPy array of at least one dimension holds the samples along its first; a ``PackedSequence`` holds as
many as it has sequences, and an object with a ``batch_size`` that is a ``torch.Size`` (a ``TensorDict``) the first of
these, and a batch of graphs (torch_geometric's ``Batch``) as many as it has graphs. 0-d tensors, numbers, strings and
None belong to the batch as a whole.

A list inside a batch of n samples is either a container, whose items are parts of the batch, or data, one item a
sample:

* n strings are data, in a tuple, too.
* A list or tuple with tensors in it is a container where each holds n samples, or is in a list of n items. Otherwise it
  is data, where it has n items.
* A list without tensors in it is data where it has n items, whatever these are; otherwise it is a container. A list of
  n lists of n items could be either, and is refused; so is a tuple of n numbers.

The batch itself, such as ``(inputs, targets)``, is a container, unless it is a list of numbers or strings.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.torch_private import registered_pytrees
from pure_loop.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from pure_loop.data.source import Source

__all__ = ["num_samples", "num_tokens", "split", "to_device"]

# The children of a node, their names in an error's path, and the way back.
Node: TypeAlias = tuple[Sequence[Any], Sequence[str], Callable[[Sequence[Any]], Any]]

_WHOLE = (str, bytes, Number, Enum, type(None), torch.dtype, torch.device, torch.Size)
_TOKEN_IDS = frozenset((torch.int64, torch.int32))


def num_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its tensors and arrays.

    Where those in nested lists disagree, as many as the others say, if these lists have as many items.

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
    sizes = _sizes(batch)
    # A batch of texts alone has no tensor to count, nor has one of numbers.
    sizes = sizes or [(path, len(leaf)) for path, leaf in _leaves(batch) if _is_strings(leaf)] or _lengths(batch)
    if len({rows for _, rows in sizes}) == 1:
        return sizes[0][1]
    if not sizes:
        raise DataError(
            f"can't count the samples of a batch of type {type(batch).__name__}: it holds no tensor or array of at "
            f"least one dimension in a tuple, list, mapping, dataclass or registered class, but {describe(batch)}. Say "
            f"how to: {_HOW_TO_COUNT}; or give batches such as (inputs, targets) or {{'input_ids': ..., 'labels': ...}}"
            f"; or register your class with optree.register_pytree_node(..., namespace={NAMESPACE!r})"
        )
    outside = {rows for _, rows in _sizes(batch, into_lists=False)}
    if len(outside) == 1:
        (n,) = outside
        if all(_fits(nested, n) for nested in _lists(batch)):
            return n
    raise DataError(
        "can't count the samples of a batch: its tensors have different first dimensions, "
        + ", ".join(f"{path}: {rows}" for path, rows in sizes)
        + f", in {describe(batch)}; the first dimension of each must be the samples (what belongs to the batch as a "
        "whole goes in as a number, a 0-d tensor, or with a first dimension of its own: x.expand(n, *x.shape)). Or say "
        f"how to count them: {_HOW_TO_COUNT}"
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

    The pieces are views: nothing is copied, except of a ``PackedSequence``, which is packed anew, and of a batch of
    graphs, which is collated anew. What belongs to the batch as a whole goes into every piece. The module's page says
    what a list is.

    Raises:
        ArgumentError: ``size`` is below 1.
        DataError: the samples can't be counted, there are none, a leaf is of a kind that can't be split, or a list or
            tuple may belong to the whole batch as well as to its samples.

    >>> split((torch.arange(5), ["a", "b", "c", "d", "e"], 0.5), 3)
    [(tensor([0, 1, 2]), ['a', 'b', 'c'], 0.5), (tensor([3, 4]), ['d', 'e'], 0.5)]
    >>> split({"x": torch.arange(3), "lengths": [7, 8, 9], "scale": [2.0]}, 2)
    [{'x': tensor([0, 1]), 'lengths': [7, 8], 'scale': [2.0]}, {'x': tensor([2]), 'lengths': [9], 'scale': [2.0]}]
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
        return _split(batch, n, size, "batch", top=True)
    kind = type(batch)
    rows = zip(*[_views(leaf, size) for leaf in (batch.values() if kind is dict else batch)], strict=True)
    if kind is dict:
        return [dict(zip(batch, row, strict=True)) for row in rows]
    return list(rows) if kind is tuple else list(map(list, rows))


def to_device(batch: Any, device: torch.device | str, *, stays: bool = False) -> Any:
    """A batch with its tensors on ``device``, each moved once; the same object where nothing has to move.

    An object with a method ``to`` of its own (a ``TensorDict``, a ``PackedSequence``, a batch of graphs) is moved by
    it, as a copy, so that one that moves itself leaves the batch as it was.

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

    return map_tensors(move, batch, lambda value: _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    """An object on a device, by its own ``to``."""
    tensors = [leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor)]
    if tensors and all(tensor.device == device for tensor in tensors):
        return value
    new: Any = value if isinstance(value, tuple) else copy.copy(value)
    moved = new.to(device)
    return new if moved is None else moved


def beside(batch: Any, tensor: Tensor, given_by: Source) -> Any:
    """A source's batch with its tensors on the device of this one; on the CPU without asking which one that is."""
    if tensor.is_cpu and (type(batch) is tuple or type(batch) is list):
        for leaf in batch:
            if type(leaf) is not Tensor or not leaf.is_cpu:
                break
        else:
            return batch
    return to_device(batch, tensor.device, stays=given_by.keeps_pinned)


def map_tensors(
    function: Callable[[Tensor], Tensor], value: Any, of_movable: Callable[[Any], Any] | None = None
) -> Any:
    """A nesting with every tensor in it mapped; the same object where all stay the same.

    ``of_movable``, if it is given, maps objects with a method ``to``, instead of the tensors in them.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _WHOLE) or _is_strings(value):
        return value
    if of_movable is not None and _is_movable(value):
        return of_movable(value)
    node = _open(value)
    if node is None:
        return value
    children, _, build = node
    new = [map_tensors(function, child, of_movable) for child in children]
    return value if all(a is b for a, b in zip(new, children, strict=True)) else build(new)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nesting, in its order."""
    return [leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor)]


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
    names = _fields(value)
    if names is not None:
        inside = _some([f"{name}={describe(getattr(value, name))}" for name in names[:_SHOWN]], len(names))
        return f"{type(value).__name__}({inside})"
    if type(value) in (tuple, list):
        inside = _some([describe(child) for child in value[:_SHOWN]], len(value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return "None" if value is None else type(value).__name__


_SHOWN = 6

_HOW_TO_COUNT = "task=pl.Task(samples=lambda batch: ..., split=lambda batch, size: [...])"


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


def _split(value: Any, n: int, size: int, path: str, *, top: bool = False) -> list[Any]:
    if isinstance(value, Tensor) and value.ndim:
        return list(_views(value, size))
    if isinstance(value, PackedSequence):
        sequences = unpack_sequence(value)
        return [pack_sequence(sequences[i : i + size], enforce_sorted=False) for i in range(0, n, size)]
    if _is_graphs(value):
        return _split_graphs(value, size)
    if _rows(value) is not None or (_is_strings(value) and len(value) == n):
        return [value[i : i + size] for i in range(0, n, size)]
    if isinstance(value, (Tensor, *_WHOLE)) or _is_array(value) or _is_strings(value):
        return [value] * -(-n // size)
    if type(value) in (list, tuple) and _is_by_sample(value, n, path, top):
        return [value[i : i + size] for i in range(0, n, size)]
    node = _open(value)
    if node is None:
        raise DataError(
            f"can't split {path}, a {type(value).__name__}, into microbatches of {size} of {n} samples: make it a "
            "tensor whose first dimension is the samples, a list of as many items, or a class registered with "
            f"optree.register_pytree_node(..., namespace={NAMESPACE!r}); say how to: {_HOW_TO_COUNT}; or train with "
            "microbatch_size=None"
        )
    children, names, build = node
    if not children:
        return [value] * -(-n // size)
    columns = [_split(child, n, size, path + name) for child, name in zip(children, names, strict=True)]
    return [build(row) for row in zip(*columns, strict=True)]


def _is_by_sample(value: Any, n: int, path: str, top: bool) -> bool:
    """Whether a list or tuple in a batch of n samples holds something of each sample; or else parts of the batch.

    Raises:
        DataError: it may be either.
    """
    if top:
        return type(value) is list and _is_flat(value)
    if len(value) != n or {rows for _, rows in _sizes(value)} == {n}:
        return False
    if not all(_fits(item, n) for item in value):
        return True
    if _sizes(value, into_lists=False) or any(_is_strings(leaf) and len(leaf) == n for _, leaf in _leaves(value)):
        return False
    holds_lists = any(len(element) == n for item in value for element in _lists([item]))
    if type(value) is list and not holds_lists:
        return True
    if type(value) is tuple and holds_lists:
        return False
    kind = type(value).__name__
    items = f"lists of {n} items" if holds_lists else "items"
    raise DataError(
        f"can't split {path}, a {kind} of {n} {items} in a batch of {n} samples: each item may belong to a sample, or "
        f"all to the whole batch. Make what belongs to the samples a tensor{'' if holds_lists else ' or a list'}, and "
        f"what belongs to the whole batch a mapping or a torch.Size; or say how to split: {_HOW_TO_COUNT}"
    )


def _open(value: Any) -> Node | None:
    """One level of a pytree, whichever engine knows its class, of a mapping or a record; None for a leaf."""
    if not optree.tree_is_leaf(value, none_is_leaf=True, namespace=NAMESPACE):
        level = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=NAMESPACE)
        children, metadata, entries, unflatten = level
        attributes = not isinstance(value, (tuple, list, Mapping)) or hasattr(value, "_fields")
        if hasattr(value, "_fields"):
            entries = value._fields
        names = [f".{entry}" if attributes else f"[{entry!r}]" for entry in entries]
        return children, names, lambda new: unflatten(metadata, tuple(new))
    known = registered_pytrees.get(type(value))
    if known is not None:
        flat, context = known.flatten_fn(value)
        return flat, [f"[{i}]" for i in range(len(flat))], lambda new: known.unflatten_fn(list(new), context)
    if isinstance(value, Mapping):
        keys = list(value)
        names = [f"[{key!r}]" for key in keys]
        return list(value.values()), names, lambda new: _mapping_like(value, dict(zip(keys, new, strict=True)))
    fields = _fields(value)
    if fields is not None:
        return [getattr(value, name) for name in fields], [f".{name}" for name in fields], _Rebuilding(value, fields)
    return None


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if isinstance(value, UserDict):  # whose subclasses may be made in other ways, and have attributes besides
        new = copy.copy(value)
        new.data = items
        return new
    make: Callable[[dict[Any, Any]], Any] = type(value)
    try:
        return make(items)
    except TypeError as error:
        raise DataError(
            f"a {type(value).__name__} with other values can't be made from a dict of them: {error}. Register the "
            f"class with optree.register_pytree_node(..., namespace={NAMESPACE!r}), or say how to split: "
            f"{_HOW_TO_COUNT}"
        ) from error


@attrs.frozen(eq=False)
class _Rebuilding:
    """Makes a record like another one, with other values in its fields, without calling its ``__init__``."""

    record: Any
    fields: Sequence[str]

    def __call__(self, new: Sequence[Any]) -> Any:
        record = copy.copy(self.record)
        for name, value in zip(self.fields, new, strict=True):
            object.__setattr__(record, name, value)
        return record


def _fields(value: Any) -> Sequence[str] | None:
    """The names of the fields of a dataclass or an attrs class; None for anything else."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif attrs.has(kind):
        names = [field.name for field in attrs.fields(kind)]
    else:
        return None
    return [name for name in names if hasattr(value, name)]


def _fits(value: Any, n: int) -> bool:
    """Whether a part of a batch can belong to n samples: what holds samples holds n, and lists have n items or fit."""
    rows = _rows(value)
    if rows is not None:
        return rows == n
    if isinstance(value, (Tensor, *_WHOLE)) or _is_array(value) or _is_strings(value):
        return True
    if type(value) in (list, tuple) and len(value) == n:
        return True
    node = _open(value)
    return node is not None and all(_fits(child, n) for child in node[0])


def _is_movable(value: Any) -> bool:
    return callable(getattr(type(value), "to", None)) and not isinstance(value, nn.Module)


def _lists(value: Any, top: bool = True) -> Iterator[Any]:
    """The lists and tuples in a batch, itself left out, that are in no other one."""
    if not top and type(value) in (list, tuple):
        if not _is_strings(value):
            yield value
        return
    node = None if _rows(value) is not None or isinstance(value, Tensor) or _is_strings(value) else _open(value)
    for child in () if node is None else node[0]:
        yield from _lists(child, top=False)


def _sizes(value: Any, *, into_lists: bool = True) -> list[tuple[str, int]]:
    """What holds samples in a batch, and how many; ``into_lists``: in nested lists and tuples, too."""
    lists = [] if into_lists else list(_lists(value))
    return [
        (path, rows)
        for path, leaf in _leaves(value, opening=lambda node: not any(node is nested for nested in lists))
        if (rows := _rows(leaf)) is not None
    ]


def _lengths(value: Any, path: str = "batch") -> list[tuple[str, int]]:
    """The lists of numbers in a batch without tensors and texts, and how long they are."""
    if type(value) is list and value and _is_flat(value):
        return [(path, len(value))]
    node = _open(value)
    if node is None:
        return []
    return [result for child, name in zip(node[0], node[1], strict=True) for result in _lengths(child, path + name)]


def _is_flat(values: Sequence[Any]) -> bool:
    """Whether all items are numbers, texts, 0-d tensors or None."""
    return all(isinstance(value, _WHOLE) or (isinstance(value, Tensor) and not value.ndim) for value in values)


def _leaves(value: Any, path: str = "batch", opening: Callable[[Any], bool] | None = None) -> Iterator[tuple[str, Any]]:
    """What is in a batch; ``opening`` says of each node whether to go into it."""
    node = None if isinstance(value, Tensor) or _is_strings(value) or _is_unit(value) else _open(value)
    if node is None or (opening is not None and not opening(value)):
        yield path, value
    else:
        for child, name in zip(node[0], node[1], strict=True):
            yield from _leaves(child, path + name, opening)


def _is_array(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_strings(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def _is_graphs(value: Any) -> bool:
    """Whether it is a batch of graphs as torch_geometric collates it: one large graph, which knows its parts."""
    made_of_graphs = callable(getattr(type(value), "from_data_list", None))
    return made_of_graphs and callable(getattr(type(value), "to_data_list", None)) and hasattr(value, "num_graphs")


def _split_graphs(batch: Any, size: int) -> list[Any]:
    graphs = batch.to_data_list()
    # Names of which the batch says for each row to which graph it belongs, besides those of the nodes.
    followed = [name.removesuffix("_batch") for name in batch.keys() if name.endswith("_batch")]  # noqa: SIM118
    collate = partial(type(batch).from_data_list, follow_batch=followed)
    return [collate(graphs[start : start + size]) for start in range(0, len(graphs), size)]


def _is_unit(value: Any) -> bool:
    """Whether an object knows how many samples it holds, and can be cut as a whole."""
    if isinstance(value, PackedSequence) or _is_graphs(value):
        return True
    size = getattr(value, "batch_size", None) if hasattr(type(value), "__getitem__") else None
    return isinstance(size, torch.Size) and len(size) > 0


def _rows(leaf: Any) -> int | None:
    """How many samples a tensor, an array or a unit holds; None for anything else."""
    if isinstance(leaf, PackedSequence):
        # By a shape, where there is one: a number in a tensor can't be read while a step is traced.
        return int(leaf.batch_sizes[0]) if leaf.sorted_indices is None else leaf.sorted_indices.shape[0]
    if _is_graphs(leaf):
        return int(leaf.num_graphs)
    if _is_unit(leaf):
        return int(leaf.batch_size[0])
    return int(leaf.shape[0]) if (isinstance(leaf, Tensor) or _is_array(leaf)) and leaf.ndim else None
