"""The samples of a batch: how many, how many tokens, and batches of fewer of them, the microbatches.

A tensor or a NumPy array of at least one dimension holds the samples along its first; a ``PackedSequence`` holds as
many as it has sequences, and an object with a ``batch_size`` that is a ``torch.Size`` (a ``TensorDict``) the first of
these, and a batch of graphs (torch_geometric's ``Batch``) as many as it has graphs. 0-d tensors, numbers, strings and
None belong to the batch as a whole.

A list inside a batch of n samples is either a container of parts of the batch, or data, one item a
sample:

* n strings are data, in a tuple, too.
* A list or tuple with tensors in it is a container where each holds n samples, or is in a list of n items. Otherwise it
  is data, where it has n items.
* A list without tensors in it is data where it has n items, whatever these are; otherwise it is a container. A list of
  n lists of n items could be either, and is refused; so is a tuple of n numbers.

The batch itself, such as ``(inputs, targets)``, is a container, unless it is a list of numbers or strings.

A list of images of shape (channels, height, width) beside a list of as many mappings is data, and so are these, if each
mapping has ``boxes`` of shape (n, 4), or the first dimensions in them differ. Otherwise such a batch is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from pure_loop._internal.pytree import NAMESPACE, Batch
from pure_loop.data.batch import (
    HOW_TO_COUNT,
    INDIVISIBLE,
    Graphs,
    describe,
    is_array,
    is_graphs,
    is_texts,
    leaves,
    open_node,
    size_of_unit,
)
from pure_loop.errors import ArgumentError, DataError

_TOKEN_IDS = frozenset((torch.int64, torch.int32))


def num_samples(batch: Batch) -> int:
    """The number of samples in a batch: the first dimension of its tensors and arrays.

    Where those in nested lists disagree, as many as the others say, if these lists have as many items.

    Raises:
        DataError: they disagree, there is none, or they may be images; the message lists every one of them.

    >>> num_samples({"image": torch.zeros(8, 3, 4, 4), "label": torch.zeros(8), "temperature": 0.5})
    8
    """
    size = _flat_size(batch)
    if size >= 0:
        return size
    images, have_boxes = _num_images(batch)
    if have_boxes:
        return images
    sizes = _sizes(batch)
    # A batch of texts alone has no tensor to count, nor has one of numbers.
    sizes = sizes or [(path, len(leaf)) for path, leaf in leaves(batch) if is_texts(leaf)] or _lengths(batch)
    if images and len({rows for _, rows in sizes}) == 1:
        raise DataError(
            f"can't count the samples of {describe(batch)}: they may be {images} images with a mapping each, or "
            f"{sizes[0][1]} rows of each tensor. For images write loss=pl.Task.detection(); else {HOW_TO_COUNT}"
        )
    if images or len({rows for _, rows in sizes}) == 1:
        return images or sizes[0][1]
    if not sizes:
        raise DataError(
            f"can't count the samples of a batch of type {type(batch).__name__}: it holds no tensor or array of at "
            f"least one dimension in a tuple, list, mapping, dataclass or registered class, but {describe(batch)}. Say "
            f"how to: {HOW_TO_COUNT}; or give batches such as (inputs, targets) or {{'input_ids': ..., 'labels': ...}}"
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
        f"how to count them: {HOW_TO_COUNT}"
    )


def num_tokens(batch: Batch) -> int:
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


def split(batch: Batch, size: int) -> list[Batch]:
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


def _flat_size(batch: Batch) -> int:
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
            "tensors, loss=pl.Task(loss=..., split=function), or train with microbatch_size=None"
        )
    count, rest = divmod(leaf.shape[0], size)
    # What Tensor.split comes to, behind twice as much Python.
    return leaf.split_with_sizes([size] * count + [rest] * (rest > 0))


def _num_images(batch: Batch) -> tuple[int, bool]:
    """How many images a batch may have, 0 if it can't; and whether boxes of each say that it is one of detection."""
    node = None if isinstance(batch, Tensor) or is_texts(batch) else open_node(batch)
    lists: list[Any] = [child for child in node.children if type(child) in (list, tuple) and child] if node else []
    targets = [child for child in lists if all(isinstance(item, Mapping) for item in child)]
    images = [child for child in lists if all(isinstance(item, Tensor) and item.ndim == 3 for item in child)]
    n = len(images[0]) if images and targets else 0
    if node is None or {len(child) for child in images + targets} != {n} or not all(_fits(c, n) for c in node.children):
        return 0, False
    boxes = [item.get("boxes") for child in targets for item in child]
    return n, all(isinstance(each, Tensor) and each.ndim == 2 and each.shape[1] == 4 for each in boxes)


def _split(value: Batch, n: int, size: int, path: str, *, top: bool = False, images: bool = False) -> list[Batch]:
    if isinstance(value, Tensor) and value.ndim:
        return list(_views(value, size))
    if isinstance(value, PackedSequence):
        sequences = unpack_sequence(value)
        return [pack_sequence(sequences[i : i + size], enforce_sorted=False) for i in range(0, n, size)]
    if is_graphs(value):
        return _split_graphs(value, size)
    if _rows(value) is not None or (is_texts(value) and len(value) == n):
        return [value[i : i + size] for i in range(0, n, size)]
    if isinstance(value, (Tensor, *INDIVISIBLE)) or is_array(value) or is_texts(value):
        return [value] * -(-n // size)
    if type(value) in (list, tuple) and ((images and len(value) == n) or _is_by_sample(value, n, path, top)):
        return [value[i : i + size] for i in range(0, n, size)]
    node = open_node(value)
    if node is None:
        raise DataError(
            f"can't split {path}, a {type(value).__name__}, into microbatches of {size} of {n} samples: make it a "
            "tensor whose first dimension is the samples, a list of as many items, or a class registered with "
            f"optree.register_pytree_node(..., namespace={NAMESPACE!r}); say how to: {HOW_TO_COUNT}; or train with "
            "microbatch_size=None"
        )
    if not node.children:
        return [value] * -(-n // size)
    images = top and _num_images(value)[0] == n
    children = zip(node.children, node.names, strict=True)
    columns = [_split(child, n, size, path + name, images=images) for child, name in children]
    return [node.build(row) for row in zip(*columns, strict=True)]


def _is_by_sample(value: Sequence[object], n: int, path: str, top: bool) -> bool:
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
    if _sizes(value, into_lists=False) or any(is_texts(leaf) and len(leaf) == n for _, leaf in leaves(value)):
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
        f"what belongs to the whole batch a mapping or a torch.Size; or say how to split: {HOW_TO_COUNT}"
    )


def _fits(value: object, n: int) -> bool:
    """Whether a part of a batch can belong to n samples: what holds samples holds n, and lists have n items or fit."""
    rows = _rows(value)
    if rows is not None:
        return rows == n
    if isinstance(value, (Tensor, *INDIVISIBLE)) or is_array(value) or is_texts(value):
        return True
    if (type(value) is list or type(value) is tuple) and len(value) == n:
        return True
    node = open_node(value)
    return node is not None and all(_fits(child, n) for child in node.children)


def _lists(value: object, top: bool = True) -> Iterator[Sequence[object]]:
    """The lists and tuples in a batch, itself left out, that are in no other one."""
    if not top and (type(value) is list or type(value) is tuple):
        if not is_texts(value):
            yield value
        return
    node = None if _rows(value) is not None or isinstance(value, Tensor) or is_texts(value) else open_node(value)
    for child in () if node is None else node.children:
        yield from _lists(child, top=False)


def _sizes(value: object, *, into_lists: bool = True) -> list[tuple[str, int]]:
    """What holds samples in a batch, and how many; ``into_lists``: in nested lists and tuples, too."""
    lists = [] if into_lists else list(_lists(value))
    return [
        (path, rows)
        for path, leaf in leaves(value, opening=lambda node: not any(node is nested for nested in lists))
        if (rows := _rows(leaf)) is not None
    ]


def _lengths(value: object, path: str = "batch") -> list[tuple[str, int]]:
    """The lists of numbers in a batch without tensors and texts, and how long they are."""
    if type(value) is list and value and _is_flat(value):
        return [(path, len(value))]
    node = open_node(value)
    if node is None:
        return []
    children = zip(node.children, node.names, strict=True)
    return [length for child, name in children for length in _lengths(child, path + name)]


def _is_flat(values: Sequence[object]) -> bool:
    """Whether all items are numbers, texts, 0-d tensors or None."""
    return all(isinstance(value, INDIVISIBLE) or (isinstance(value, Tensor) and not value.ndim) for value in values)


def _split_graphs(batch: Graphs, size: int) -> list[Batch]:
    graphs = batch.to_data_list()
    # Names of which the batch says for each row to which graph it belongs, besides those of the nodes.
    followed = [name.removesuffix("_batch") for name in batch.keys() if name.endswith("_batch")]  # noqa: SIM118
    collate = partial(type(batch).from_data_list, follow_batch=followed)
    return [collate(graphs[start : start + size]) for start in range(0, len(graphs), size)]


def _rows(leaf: object) -> int | None:
    """How many samples a tensor, an array or another unit holds; None for anything else."""
    if isinstance(leaf, PackedSequence):
        # By a shape, where there is one: a number in a tensor can't be read while a step is traced.
        return int(leaf.batch_sizes[0]) if leaf.sorted_indices is None else leaf.sorted_indices.shape[0]
    if is_graphs(leaf):
        return int(leaf.num_graphs)
    size = size_of_unit(leaf)
    if size is not None:
        return size
    return int(leaf.shape[0]) if (isinstance(leaf, Tensor) or is_array(leaf)) and leaf.ndim else None
