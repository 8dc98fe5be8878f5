"""Batches: counted, split into views by what belongs to the samples, moved once."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from pure_loop._internal import pytree as _pytree
from pure_loop.data.batch import to_device
from pure_loop.data.group import Share
from pure_loop.data.samples import num_samples, num_tokens, split
from pure_loop.errors import ArgumentError, DataError
from pure_loop.frozendict import FrozenDict
from tests.support.tiers import examples

Point = namedtuple("Point", "x y")


@attrs.frozen(eq=False)
class Record:
    image: Any
    label: Any


@attrs.frozen(eq=False)
class Known:
    inputs: Any


@dataclass(eq=False)
class Data:
    one: Any
    other: Any


class Unknown:
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


def flat(record: Record) -> Any:
    return (record.image, record.label), None, ("image", "label")


_pytree.register(Record, flat, lambda _, children: Record(*children), attributes=True)
torch_pytree.register_pytree_node(Known, lambda k: ([k.inputs], None), lambda children, _: Known(*children))


def same(a: Any, b: Any) -> bool:
    """Equal types, equal tensors, equal everything else."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (dict, UserDict)):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Record, Known, Data)):
        return same([getattr(a, name) for name in a.__annotations__], [getattr(b, name) for name in b.__annotations__])
    return bool(a == b)


@attrs.frozen(eq=False)
class Cut:
    """A part of a batch of n samples, and how its part of some of them is written by hand."""

    value: Any
    of: Callable[[slice], Any]


def rows(value: Any) -> Cut:
    return Cut(value, lambda some: value[some])


def whole(value: Any) -> Cut:
    return Cut(value, lambda some: value)


def _ragged(n: int) -> list[torch.Tensor]:
    # One has another number of rows than there are samples.
    return [torch.arange(4.0 * k).reshape(k, 4) for k in range(n + 1, 2 * n + 1)]


def leaves(n: int) -> st.SearchStrategy[Cut]:
    return st.sampled_from(
        [
            rows(torch.arange(3.0 * n).reshape(n, 3)),
            rows(list(range(n))),
            rows([0.5] * n),
            rows([None, "a", 2, True, torch.tensor(1.0)][: n - 1] + [1] * (n - min(n - 1, 5))),
            rows([f"s{i}" for i in range(n)]),
            rows([torch.tensor(float(i)) for i in range(n)]),
            rows(_ragged(n)),
            rows([{"boxes": boxes, "id": i} for i, boxes in enumerate(_ragged(n))]),
            whole(list(range(n + 1))),
            whole(torch.Size((1,) * n)),
            whole({"height": n, "width": n}),
            whole(None),
            rows(torch.zeros(n, 0)),
            rows(np.arange(n * 2).reshape(n, 2)),
            whole(torch.tensor(7.0)),
            whole(np.array(1.5)),
            whole(["constant"] * (n + 1)),
            whole(torch.float16),
            whole([]),
        ]
    )


@lru_cache
def batches(n: int) -> st.SearchStrategy[Cut]:
    def joined(make: Callable[..., Any], *parts: Cut) -> Cut:
        return Cut(make(*(part.value for part in parts)), lambda some: make(*(part.of(some) for part in parts)))

    def mapping(kind: Any) -> Callable[[dict[str, Cut]], Cut]:
        return lambda parts: joined(lambda *values: kind(zip(parts, values, strict=True)), *parts.values())

    def nest(inner: st.SearchStrategy[Cut]) -> st.SearchStrategy[Cut]:
        keys = st.dictionaries(st.sampled_from("zyxab"), inner, max_size=3)
        first = rows(torch.arange(n))
        return st.one_of(
            *[keys.map(mapping(kind)) for kind in (dict, OrderedDict, lambda items: UserDict(dict(items)), FrozenDict)],
            *[st.builds(lambda a, b, kind=kind: joined(kind, a, b), inner, inner) for kind in (Record, Point, Data)],
            st.builds(lambda a: joined(Known, a), inner),
            # Between two tensors, so that these are parts, and not items of the samples.
            *[st.builds(lambda a, t=t: joined(lambda *x: t(x), first, a, first), inner) for t in (tuple, list)],
        )

    # One tensor of a dimension in front, so that there is something to count.
    parts = st.lists(st.recursive(leaves(n), nest, max_leaves=4), min_size=1, max_size=3)
    return parts.map(lambda parts: joined(lambda *values: values, rows(torch.arange(n)), *parts))


drawn_batches = st.integers(2, 6).flatmap(lambda n: st.tuples(st.just(n), batches(n)))


@examples(150, 1500)
@given(drawn_batches, st.integers(1, 7))
def test_split_cuts_what_belongs_to_samples(drawn: tuple[int, Cut], size: int) -> None:
    """Tensors and arrays; numbers, texts, None, 0-d and ragged tensors, mappings and other objects, one a sample, in
    lists; nested in containers of all kinds; beside what belongs to the whole batch."""
    n, batch = drawn
    assert num_samples(batch.value) == n
    pieces = split(batch.value, size)
    assert same(pieces, [batch.of(slice(i, i + size)) for i in range(0, n, size)] if n > size else [batch.value])
    if n <= size:
        assert pieces[0] is batch.value


@settings(max_examples=60)
@given(drawn_batches)
def test_moving_keeps_the_tree_and_nothing_moves_without_need(drawn: tuple[int, Cut]) -> None:
    batch = drawn[1].value
    assert to_device(batch, "cpu") is batch
    leaves_of = lambda tree: optree.tree_leaves(tree, none_is_leaf=True, namespace=_pytree.NAMESPACE)  # noqa: E731
    before, after = leaves_of(batch), leaves_of(to_device(batch, "meta"))
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (b.device.type, b.shape, b.dtype) == ("meta", a.shape, a.dtype)
        elif not isinstance(a, (UserDict, Known, Data)):
            assert a is b


def test_pieces_are_views() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    for batch in ((x, x[:, 0]), [x, x[:, 0]], {"y": x, "x": x[:, 0]}, FrozenDict(x=x, y=x[:, 0])):
        for i, piece in enumerate(split(batch, 2)):
            assert type(piece) is type(batch)
            for part in optree.tree_leaves(piece, namespace=_pytree.NAMESPACE):  # type: ignore[arg-type]
                assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
                assert part.storage_offset() == 4 * i


def test_what_is_counted_where_there_is_little_to_count() -> None:
    for batch, n in (
        (torch.zeros(3, 2), 3),
        (np.zeros((4, 2)), 4),
        ((["a", "b", "c"], "whole"), 3),
        ([3, 4, 5], 3),
        ({"id": [3, 4, 5], "size": (7, 7)}, 3),
        ({"id": [3, 4, 5], "text": ["a", "b"]}, 2),
    ):
        assert num_samples(batch) == n
    assert [len(piece) for piece in split(torch.zeros(3, 2), 2)] == [2, 1]
    assert split({"text": ("a", "b", "c")}, 2) == [{"text": ("a", "b")}, {"text": ("c",)}]
    assert split([3, 4, 5], 2) == [[3, 4], [5]]


X = torch.zeros(2, 3)


def test_parts_of_a_batch_are_not_its_samples() -> None:
    """A batch of two parts, or with two parts in a list, may have two samples."""
    for batch in ((X, X), [X, X], ((X, X), X), {"pair": [X, X], "y": X}, ((X, [1, 2]), X), ((X, _ragged(2)), X)):
        (first, _) = split(batch, 1)
        assert num_samples(first) == 1
        assert type(first) is type(batch)
        assert len(first) == 2
    assert same(split(((X, [1, 2]), X), 1)[0], ((X[:1], [1]), X[:1]))
    assert same(split(((X, _ragged(2)), X), 1)[1], ((X[1:], _ragged(2)[1:]), X[1:]))


UNCOUNTED: list[tuple[Any, str]] = [
    ((torch.zeros(3), torch.zeros(4)), r"batch\[0\]: 3, batch\[1\]: 4"),
    ({"x": [torch.zeros(3)], "y": np.zeros(2)}, r"batch\['x'\]\[0\]: 3, batch\['y'\]: 2"),
    (Record(torch.zeros(3), Point(1, torch.zeros(1))), r"batch\.image: 3, batch\.label\.y: 1"),
    (torch.tensor(1.0), r"holds no tensor.*give batches such as"),
    ((), "tuple: it holds no tensor"),
    (Unknown(torch.zeros(3)), r"Unknown.*register_pytree_node"),
    ((["a", "b"], ["c"]), r"batch\[0\]: 2, batch\[1\]: 1"),
    ({"x": X, "y": [torch.zeros(3)]}, r"different first dimensions.*pl.Task\(loss=\.\.\., samples=.*split="),
    (([torch.zeros(3, 4)] * 2, [{"boxes": torch.zeros(k, 4)} for k in (1, 2)]), r"different first dimensions"),
]
# What may belong to the samples or to the batch.
AMBIGUOUS: list[tuple[Any, str]] = [
    ({"x": X, "size": (7, 8)}, r"can't split batch\['size'\], a tuple of 2 items.*torch.Size"),
    ({"x": X, "size": (torch.tensor(7), 8)}, r"batch\['size'\], a tuple of 2 items"),
    (
        {"x": X, "ids": [[1, 2], [3, 4]]},
        r"batch\['ids'\], a list of 2 lists of 2 items.*pl.Task\(loss=\.\.\., samples=",
    ),
    ({"x": X, "boxes": [[X, X[:1]], [X[:1], X]]}, r"batch\['boxes'\], a list of 2 lists of 2 items"),
]


def test_what_cannot_be_counted_or_split_is_named() -> None:
    for batch, message in UNCOUNTED:
        for call in (num_samples, lambda batch: split(batch, 1)):
            with pytest.raises(DataError, match=message):
                call(batch)
    for batch, message in AMBIGUOUS:
        assert num_samples(batch) == 2
        assert split(batch, 2) == [batch]
        with pytest.raises(DataError, match=message):
            split(batch, 1)
    batch = (torch.zeros(3), {"meta": [Unknown(torch.zeros(3))]})
    assert split(batch, 3)[0] is batch
    with pytest.raises(DataError, match=r"batch\[1\]\['meta'\]\[0\], a Unknown, into microbatches of 2 of 3 samples"):
        split(batch, 2)
    with pytest.raises(DataError, match="no samples"):
        split((torch.zeros(0, 2),), 2)
    with pytest.raises(ArgumentError, match="not 0; None means"):
        split((torch.zeros(2),), 0)


IDS = torch.zeros(2, 5, dtype=torch.int64)
TOKENS: list[tuple[Any, int]] = [
    *(({"input_ids": IDS, "labels": IDS.float()}, 10), (UserDict(input_ids=IDS.int()), 10), (IDS, 10)),
    *(({"input_ids": IDS.numpy()}, 10), ({"image": IDS}, 0), ((IDS, torch.zeros(2)), 10), ([IDS[..., None].int()], 10)),
    *(((IDS[:, 0], IDS), 0), ((IDS.float(), IDS), 0), ((IDS.byte(), 0), 0), ((IDS.bool(),), 0), ((), 0), (None, 0)),
]


def test_tokens() -> None:
    for batch, tokens in TOKENS:
        assert num_tokens(batch) == tokens, batch


def test_each_process_takes_its_own_numbers() -> None:
    batch = {"x": torch.arange(5), "lengths": [1, 2, 3, 4, 5]}
    shares = [Share(rank, 3, num_samples, split).of(batch) for rank in range(3)]
    assert [(share.batch["lengths"], share.counts) for share in shares] == [([1, 2], True), ([3, 4], True), ([5], True)]
    assert not Share(2, 3, num_samples, split).of({"x": torch.arange(2), "n": [1, 2]}).counts


def test_a_shared_tensor_moves_once() -> None:
    x = torch.zeros(2)
    a, b, c = to_device((x, {"again": x}, torch.zeros(2)), "meta")
    assert a is b["again"]
    assert a is not c


class Listed(list[torch.Tensor]):
    """Has a tensor besides its items."""

    lengths: torch.Tensor

    def to(self, device: torch.device) -> Listed:
        result = Listed(tensor.to(device) for tensor in self)
        result.lengths = self.lengths.to(device)
        return result


def test_a_list_that_moves_itself_is_asked_to_wherever_its_items_are() -> None:
    for batch in (Listed(), Listed([torch.zeros(2, device="meta")])):
        batch.lengths = torch.ones(2)
        assert to_device(batch, "meta").lengths.is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moving_to_an_accelerator_and_back() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    there = to_device((x, {"y": x.pin_memory()}, "name"), "cuda")
    assert there[0].is_cuda
    assert there[1]["y"].is_cuda
    assert to_device(there, "cuda") is there
    back = to_device(there, "cpu")
    assert torch.equal(back[0], x)
    assert torch.equal(back[1]["y"], x)
