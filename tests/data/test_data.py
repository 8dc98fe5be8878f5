"""Batches: counted, split into views, moved once."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
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
from pure_loop.data.samples import num_samples, num_tokens, split
from pure_loop.errors import ArgumentError, DataError
from pure_loop.frozendict import FrozenDict

# A busy machine is slow now and then; how many examples are tried is the profile's to say.
LAW = settings(deadline=None)

Point = namedtuple("Point", "x y")


@attrs.frozen(eq=False)
class Record:
    image: Any
    label: Any


@attrs.frozen(eq=False)
class Known:
    inputs: Any


class Unknown:
    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


_pytree.register(
    Record,
    lambda r: ((r.image, r.label), None, ("image", "label")),
    lambda _, children: Record(*children),
    attributes=True,
)
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
    if isinstance(a, (Record, Known)):
        return same(attrs.astuple(a, recurse=False), attrs.astuple(b, recurse=False))
    return bool(a == b)


def join(pieces: list[Any]) -> Any:
    """The inverse of split, written for these tests' batches."""
    first = pieces[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(pieces) if first.ndim else first
    if isinstance(first, np.ndarray):
        return np.concatenate(pieces) if first.ndim else first
    if isinstance(first, list) and first and isinstance(first[0], str) and first[0] != "constant":
        return [text for piece in pieces for text in piece]
    if isinstance(first, (dict, UserDict)):
        return type(first)({key: join([piece[key] for piece in pieces]) for key in first})
    if isinstance(first, (list, tuple)):
        columns = [join(list(column)) for column in zip(*pieces, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, (Record, Known)):
        return type(first)(
            *(join(list(c)) for c in zip(*(attrs.astuple(p, recurse=False) for p in pieces), strict=True))
        )
    return first


def leaf(n: int) -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [
            torch.arange(n),
            torch.arange(n * 3.0).reshape(n, 3),
            torch.zeros(n, 0),
            torch.tensor(7.0),
            np.arange(n * 2).reshape(n, 2),
            np.array(1.5),
            [f"s{i}" for i in range(n)],
            ["constant"] * (n + 1),
            0.5,
            3,
            None,
            torch.float16,
        ]
    )


@lru_cache
def batches(n: int) -> st.SearchStrategy[Any]:
    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.dictionaries(st.sampled_from("zyxab"), inner, max_size=3)
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Point, inner, inner),
            keys,
            keys.map(OrderedDict),
            keys.map(UserDict),
            keys.map(FrozenDict),
            st.builds(Record, inner, inner),
            st.builds(Known, inner),
        )

    # One tensor of a dimension in front, so that there is something to count.
    return st.recursive(leaf(n), nest, max_leaves=5).map(lambda rest: (torch.arange(n), rest))


sized_batches = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), batches(n)))


@LAW
@given(sized_batches, st.integers(1, 9))
def test_split_is_undone_by_joining(sized: tuple[int, Any], size: int) -> None:
    n, batch = sized
    assert num_samples(batch) == n
    pieces = split(batch, size)
    assert [num_samples(piece) for piece in pieces] == [size] * (n // size) + [n % size] * (n % size > 0)
    assert same(join(pieces), batch)
    if n <= size:
        assert pieces[0] is batch


@pytest.mark.parametrize(
    "make", [tuple, list, lambda leaves: dict(zip("yx", leaves, strict=True)), FrozenDict.fromkeys]
)
def test_pieces_are_views(make: Any) -> None:
    x = torch.arange(10.0).reshape(5, 2)
    batch = FrozenDict(x=x, y=x[:, 0]) if make == FrozenDict.fromkeys else make([x, x[:, 0]])
    pieces = split(batch, 2)
    assert [type(piece) for piece in pieces] == [type(batch)] * 3
    for i, piece in enumerate(pieces):
        for part in optree.tree_leaves(piece, namespace=_pytree.NAMESPACE):
            assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert part.storage_offset() == 4 * i


def test_a_bare_tensor_is_a_batch() -> None:
    assert num_samples(torch.zeros(3, 2)) == 3
    assert [len(piece) for piece in split(torch.zeros(3, 2), 2)] == [2, 1]
    assert num_samples(np.zeros((4, 2))) == 4


def test_what_belongs_to_the_whole_batch_goes_into_every_piece() -> None:
    whole = {"name": "abc", "size": (4, 4), "classes": ["cat", "dog"], "none": None, "scale": torch.tensor(2.0)}
    whole |= {"shape": torch.Size((4, 4, 4)), "weights": [1.0, 2.0], "nested": {"height": 3, "width": 3}}
    for piece in split({"x": torch.zeros(3), **whole}, 1):
        assert {key: piece[key] for key in whole} == whole


def test_texts_alone_are_counted() -> None:
    assert num_samples((["a", "b", "c"], "whole")) == 3
    assert split({"text": ("a", "b", "c")}, 2) == [{"text": ("a", "b")}, {"text": ("c",)}]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"batch\[0\]: 3, batch\[1\]: 4"),
        ({"x": [torch.zeros(3)], "y": np.zeros(2)}, r"batch\['x'\]\[0\]: 3, batch\['y'\]: 2"),
        (Record(torch.zeros(3), Point(1, torch.zeros(1))), r"batch\.image: 3, batch\.label\.y: 1"),
        (torch.tensor(1.0), r"holds no tensor.*give batches such as"),
        ((), "tuple: it holds no tensor"),
        (Unknown(torch.zeros(3)), r"Unknown.*register_pytree_node"),
        ((["a", "b"], ["c"]), r"batch\[0\]: 2, batch\[1\]: 1"),
    ],
)
def test_what_cannot_be_counted_is_named(batch: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        num_samples(batch)
    with pytest.raises(DataError, match=message):
        split(batch, 1)


def test_what_cannot_be_split_is_named() -> None:
    batch = (torch.zeros(3), {"meta": [Unknown(torch.zeros(3))]})
    assert split(batch, 3)[0] is batch
    with pytest.raises(DataError, match=r"batch\[1\]\['meta'\]\[0\], a Unknown, into microbatches of 2 of 3 samples"):
        split(batch, 2)
    with pytest.raises(DataError, match="no samples"):
        split((torch.zeros(0, 2),), 2)
    with pytest.raises(ArgumentError, match="not 0; None means"):
        split((torch.zeros(2),), 0)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": torch.zeros(2, 5, dtype=torch.int64), "labels": torch.zeros(2, 5)}, 10),
        (UserDict(input_ids=torch.zeros(2, 5, dtype=torch.int32)), 10),
        ({"input_ids": np.zeros((2, 3), dtype=np.int64)}, 6),
        ({"image": torch.zeros(2, 5, dtype=torch.int64)}, 0),
        ((torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2)), 10),
        ([torch.zeros(2, 5, 3, dtype=torch.int32)], 30),
        (torch.zeros(2, 5, dtype=torch.int64), 10),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)), 0),
        ((torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64)), 0),
        ((torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2)), 0),
        ((torch.zeros(2, 3, dtype=torch.bool),), 0),
        ((), 0),
        (None, 0),
    ],
)
def test_tokens(batch: Any, tokens: int) -> None:
    assert num_tokens(batch) == tokens


@LAW
@given(sized_batches)
def test_nothing_moves_without_need(sized: tuple[int, Any]) -> None:
    assert to_device(sized[1], "cpu") is sized[1]


@LAW
@given(sized_batches)
def test_moving_keeps_the_tree(sized: tuple[int, Any]) -> None:
    moved = to_device(sized[1], "meta")
    before = optree.tree_leaves(sized[1], none_is_leaf=True, namespace=_pytree.NAMESPACE)
    after = optree.tree_leaves(moved, none_is_leaf=True, namespace=_pytree.NAMESPACE)
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (b.device.type, b.shape, b.dtype) == ("meta", a.shape, a.dtype)
        elif not isinstance(a, (UserDict, Known)):
            assert a is b


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


@pytest.mark.parametrize("items", [[], [torch.zeros(2, device="meta")]])
def test_a_list_that_moves_itself_is_asked_to_wherever_its_items_are(items: list[torch.Tensor]) -> None:
    batch = Listed(items)
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
