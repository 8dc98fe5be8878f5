"""Lists in batches: items that belong to the samples are cut like rows, parts of the batch are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.batch import to_device
from pure_loop.data.group import Share
from pure_loop.data.samples import num_samples, split
from pure_loop.errors import DataError
from tests.data.test_data import same
from tests.support.tiers import examples


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


@attrs.frozen(eq=False)
class Attrs:
    one: Any
    other: Any


@dataclass(eq=False)
class Data:
    one: Any
    other: Any


def leaves(n: int) -> st.SearchStrategy[Cut]:
    return st.sampled_from(
        [
            rows(torch.arange(3.0 * n).reshape(n, 3)),
            rows(list(range(n))),
            rows([0.5] * n),
            rows([None, "a", 2, True, torch.tensor(1.0)][: n - 1] + [1] * (n - min(n - 1, 5))),
            rows([f"s{i}" for i in range(n)]),
            rows(tuple(f"s{i}" for i in range(n))),
            rows([torch.tensor(float(i)) for i in range(n)]),
            rows(_ragged(n)),
            rows(tuple(_ragged(n))),
            rows([{"boxes": boxes, "id": i} for i, boxes in enumerate(_ragged(n))]),
            rows([{"id": i, "name": "a"} for i in range(n)]),
            rows([[i] * (n + 1) for i in range(n)]),
            rows([object() for _ in range(n)]),
            whole(list(range(n + 1))),
            whole(tuple(range(n + 1))),
            whole(torch.Size((1,) * n)),
            whole({"height": n, "width": n}),
            whole(0.5),
            whole(None),
            whole([]),
        ]
    )


def batches(n: int) -> st.SearchStrategy[Cut]:
    def mapping(parts: dict[str, Cut]) -> Cut:
        return Cut(
            {key: part.value for key, part in parts.items()},
            lambda some: {key: part.of(some) for key, part in parts.items()},
        )

    def record(kind: Any) -> Callable[[Cut, Cut], Cut]:
        return lambda a, b: Cut(kind(a.value, b.value), lambda some: kind(a.of(some), b.of(some)))

    def nest(inner: st.SearchStrategy[Cut]) -> st.SearchStrategy[Cut]:
        return st.one_of(
            st.dictionaries(st.sampled_from("zyxab"), inner, max_size=3).map(mapping),
            st.builds(record(Attrs), inner, inner),
            st.builds(record(Data), inner, inner),
            st.builds(
                lambda a: Cut(
                    [torch.arange(n), a.value, torch.arange(n)],
                    lambda some: [torch.arange(n)[some], a.of(some), torch.arange(n)[some]],
                ),
                inner,
            ),
        )

    parts = st.recursive(leaves(n), nest, max_leaves=4)
    return st.lists(parts, min_size=1, max_size=3).map(
        lambda parts: Cut(
            (torch.arange(n), *[part.value for part in parts]),
            lambda some: (torch.arange(n)[some], *[part.of(some) for part in parts]),
        )
    )


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, (Attrs, Data)):
        return type(a) is type(b) and alike([a.one, a.other], [b.one, b.other])
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    return same(a, b)


@examples(100, 1000)
@given(st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), batches(n))), st.integers(1, 5))
def test_split_cuts_what_belongs_to_samples(drawn: tuple[int, Cut], size: int) -> None:
    """Numbers, texts, None, 0-d and ragged tensors, mappings, lists and other objects, one a sample, in lists.

    Nested in mappings, attrs classes, dataclasses and lists of tensors; beside what belongs to the whole batch.
    """
    n, batch = drawn
    assert num_samples(batch.value) == n
    wanted = [batch.of(slice(i, i + size)) for i in range(0, n, size)] if n > size else [batch.value]
    assert alike(split(batch.value, size), wanted)


def test_lists_of_numbers_are_counted_where_there_is_nothing_else() -> None:
    assert num_samples([3, 4, 5]) == num_samples({"id": [3, 4, 5], "size": (7, 7)}) == 3
    assert split([3, 4, 5], 2) == [[3, 4], [5]]
    assert num_samples({"id": [3, 4, 5], "text": ["a", "b"]}) == 2


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            {"x": X, "size": (7, 8)},
            r"can't split batch\['size'\], a tuple of 2 items.*torch.Size",
        ),
        ({"x": X, "size": (torch.tensor(7), 8)}, r"batch\['size'\], a tuple of 2 items"),
        ({"x": X, "ids": [[1, 2], [3, 4]]}, r"batch\['ids'\], a list of 2 lists of 2 items.*pl.Task\(samples="),
        ({"x": X, "boxes": [[X, X[:1]], [X[:1], X]]}, r"batch\['boxes'\], a list of 2 lists of 2 items"),
    ],
)
def test_what_may_belong_to_the_samples_or_to_the_batch_is_refused(batch: Any, says: str) -> None:
    assert num_samples(batch) == 2
    assert split(batch, 2) == [batch]
    with pytest.raises(DataError, match=says):
        split(batch, 1)


def test_parts_of_a_batch_are_not_its_samples() -> None:
    """A batch of two parts, or with two parts in a list, may have two samples."""
    for batch in ((X, X), [X, X], ((X, X), X), {"pair": [X, X], "y": X}, ((X, [1, 2]), X), ((X, _ragged(2)), X)):
        (first, _) = split(batch, 1)
        assert num_samples(first) == 1
        assert type(first) is type(batch)
        assert len(first) == 2
    assert alike(split(((X, [1, 2]), X), 1)[0], ((X[:1], [1]), X[:1]))
    assert alike(split(((X, _ragged(2)), X), 1)[1], ((X[1:], _ragged(2)[1:]), X[1:]))


def test_tensors_that_disagree_outside_of_lists_are_an_error() -> None:
    for batch in (
        (X, torch.zeros(3)),
        {"x": X, "y": [torch.zeros(3)]},
        {"x": [X, torch.zeros(3)]},
        ([torch.zeros(3, 4)] * 2, [{"boxes": torch.zeros(k, 4)} for k in (1, 2)]),
    ):
        with pytest.raises(DataError, match=r"different first dimensions.*pl.Task\(samples=.*split="):
            num_samples(batch)


@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"donate": False}, {"strict": True}])
def test_microbatches_have_their_own_numbers(options: dict[str, Any]) -> None:
    """A loss that weighs rows by a list of numbers: the gradient of the whole batch is that of its microbatches."""
    weights = [1.0, 2.0, 4.0, 8.0, 16.0]
    x = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)
    data = [{"x": x, "weights": weights}]

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        assert len(batch["weights"]) == len(outputs)
        return (outputs[:, 0] * torch.tensor(batch["weights"], dtype=torch.float64)).mean()

    # The gradient of the mean, by hand.
    wanted = (x * torch.tensor(weights, dtype=torch.float64)[:, None]).mean(dim=0)
    task = pl.Task(forward=lambda model, batch: model(batch["x"]), loss=loss)
    for size in (None, 2, 1):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        before = model.weight.detach().clone()
        stream = pl.fit(
            model, data, task=task, optimizer=pl.optim.sgd(lr=1.0), max_duration="1ba", microbatch_size=size, **options
        )
        *_, state = [state for event, state in stream if event in (Event.BATCH_END, Event.FIT_END)]
        torch.testing.assert_close(before - state.params["weight"], wanted[None])


def test_ranks_take_their_own_numbers() -> None:
    batch = {"x": torch.arange(5), "lengths": [1, 2, 3, 4, 5]}
    shares = [Share(rank, 3, num_samples, split).of(batch) for rank in range(3)]
    assert [(share.batch["lengths"], share.counts) for share in shares] == [([1, 2], True), ([3, 4], True), ([5], True)]
    assert not Share(2, 3, num_samples, split).of({"x": torch.arange(2), "n": [1, 2]}).counts


# ---- objects that know how to be moved, counted or cut


class MovesItself:
    """As a batch of graphs: its tensors are moved in place, and it can't be counted."""

    def __init__(self, x: torch.Tensor, graphs: int) -> None:
        self.x, self.graphs = x, graphs

    def to(self, device: Any) -> MovesItself:
        self.x = self.x.to(device)
        return self


class MovesOnly(MovesItself):
    def to(self, device: Any) -> None:  # type: ignore[override]
        self.x = self.x.to(device)


class Sized:
    """As a TensorDict: it has the size of its batch, and is cut by slices."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.batch_size = x.shape[:1]

    def __getitem__(self, some: slice) -> Sized:
        return Sized(self.x[some])

    def __iter__(self) -> Any:
        raise AssertionError("not iterated over")

    def to(self, device: Any) -> Sized:
        return Sized(self.x.to(device))


@dataclass
class Fields:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


def test_objects_are_moved_by_their_own_to() -> None:
    for kind in (MovesItself, MovesOnly):
        mine = kind(torch.zeros(3), 2)
        moved, beside = to_device((mine, torch.zeros(3)), "meta")
        assert type(moved) is kind
        assert moved.x.is_meta
        assert beside.is_meta
        assert mine.x.is_cpu
    assert to_device({"a": Sized(torch.zeros(3))}, "meta")["a"].x.is_meta
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)])
    moved = to_device((packed, torch.zeros(2)), "meta")[0]
    assert moved.data.is_meta
    assert moved.batch_sizes.is_cpu
    assert to_device(packed, "cpu") is packed or to_device(packed, "cpu").data is packed.data
    fields = to_device(Fields(torch.zeros(2), torch.zeros(2)), "meta")
    assert fields.x.is_meta
    assert fields.made == 1  # not made anew


def test_objects_that_know_their_size_are_counted_and_cut() -> None:
    batch = {"a": Sized(torch.arange(5)), "y": torch.arange(5)}
    assert num_samples(batch) == num_samples(batch["a"]) == 5
    assert [piece["a"].x.tolist() for piece in split(batch, 3)] == [[0, 1, 2], [3, 4]]
    fields = Fields(torch.arange(5), torch.arange(5))
    assert num_samples(fields) == 5
    assert [(piece.x.tolist(), piece.name, piece.made) for piece in split(fields, 3)] == [
        ([0, 1, 2], "a", 1),
        ([3, 4], "a", 1),
    ]


@pytest.mark.parametrize("sort", [True, False])
def test_packed_sequences_are_counted_and_cut(sort: bool) -> None:
    lengths = (4, 3, 3, 1) if sort else (1, 3, 4, 3)
    sequences = [torch.full((length, 2), float(i)) for i, length in enumerate(lengths)]
    batch = (nn.utils.rnn.pack_sequence(sequences, enforce_sorted=sort), torch.arange(4))
    assert num_samples(batch) == 4
    pieces = split(batch, 3)
    assert [piece[1].tolist() for piece in pieces] == [[0, 1, 2], [3]]
    got = [sequence for piece in pieces for sequence in nn.utils.rnn.unpack_sequence(piece[0])]
    assert all(map(torch.equal, got, sequences))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(2, 3, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        return self.out(self.rnn(x)[1][-1])


def _records() -> dict[str, tuple[nn.Module, list[Any], pl.Task]]:
    torch.manual_seed(0)
    double = {"dtype": torch.float64}
    packed = [
        (
            nn.utils.rnn.pack_sequence([torch.randn(k, 2, **double) for k in (1, 3, 2)], enforce_sorted=False),
            torch.randn(3, 1, **double),
        )
        for _ in range(2)
    ]
    x, y = [torch.randn(3, 2, **double) for _ in range(2)], [torch.randn(3, 1, **double) for _ in range(2)]
    mse = nn.functional.mse_loss
    linear = nn.Linear(2, 1, **double)
    return {
        "packed": (Recurrent(), packed, pl.Task(loss=lambda outputs, batch: mse(outputs, batch[1]))),
        "dataclass": (
            linear,
            [Fields(*each) for each in zip(x, y, strict=True)],
            pl.Task(forward=lambda m, b: m(b.x), loss=lambda o, b: mse(o, b.y)),
        ),
        "sized": (
            linear,
            [Sized(torch.cat(each, dim=1)) for each in zip(x, y, strict=True)],
            pl.Task(forward=lambda m, b: m(b.x[:, :2]), loss=lambda o, b: mse(o, b.x[:, 2:])),
        ),
        "graphs": (
            linear,
            [MovesItself(torch.cat(each, dim=1), 3) for each in zip(x, y, strict=True)],
            pl.Task(
                forward=lambda m, b: m(b.x[:, :2]),
                loss=lambda o, b: mse(o, b.x[:, 2:]),
                samples=lambda b: b.graphs,
                split=lambda b, size: [
                    MovesItself(b.x[i : i + size], len(b.x[i : i + size])) for i in range(0, b.graphs, size)
                ],
            ),
        ),
    }


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("kind", ["packed", "dataclass", "sized", "graphs"])
def test_they_are_trained_on_as_by_hand(kind: str, size: int | None) -> None:
    model, data, task = _records()[kind]
    settings: Any = {"task": task, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "microbatch_size": size}
    state = pl.run(pl.fit(model, data, evaluators={"val": data}, strict=True, **settings))
    assert state.timestamp.sample == 6
    by_hand = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    for batch in data:
        outputs = torch.func.functional_call(model, by_hand, (batch[0] if kind == "packed" else _input(batch),))
        assert task.loss is not None
        grads = torch.autograd.grad(task.loss(outputs, batch), list(by_hand.values()))
        by_hand = {
            name: (value - 0.1 * grad).detach().requires_grad_()
            for (name, value), grad in zip(by_hand.items(), grads, strict=True)
        }
    for name, value in by_hand.items():
        torch.testing.assert_close(state.params[name], value.detach())


def _input(batch: Any) -> torch.Tensor:
    x: torch.Tensor = batch.x
    return x[:, :2]


def test_what_cannot_be_counted_or_split_says_how_to() -> None:
    model, data, task = _records()["graphs"]
    plain = pl.Task(forward=task.forward, loss=task.loss)
    settings: Any = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    with pytest.raises(DataError, match=r"can't count.*MovesItself.*task=pl.Task\(samples=.*split="):
        pl.run(pl.fit(model, data, task=plain, **settings))
    counted = attrs.evolve(plain, samples=task.samples)
    assert pl.run(pl.fit(model, data, task=counted, **settings)).timestamp.sample == 6
    with pytest.raises(DataError, match=r"can't (count|split).*MovesItself.*task=pl.Task\(samples=.*split="):
        pl.run(pl.fit(model, data, task=counted, microbatch_size=1, **settings))
