"""Batches of other classes train without a word of how to count, split and move them, or with the words of a task."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import pure_loop as pl
from pure_loop.data.batch import to_device
from pure_loop.data.samples import num_samples, split
from pure_loop.errors import DataError
from tests.support.extras import needs
from tests.support.problem import LR, by_hand, close, noise

SAMPLES = 5
POINTS = torch.randn(SAMPLES, 3, generator=noise())
TARGETS = POINTS.sum(dim=1, keepdim=True)
WEIGHTS = [1.0, 2.0, 4.0, 8.0, 16.0]
mse = nn.functional.mse_loss


@dataclass
class Record:
    points: Tensor
    targets: Tensor
    name: str = "a"
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


class MovesItself:
    """As a batch of graphs: its tensors are moved in place, and it can't be counted."""

    def __init__(self, points: Tensor, targets: Tensor) -> None:
        self.points, self.targets = points, targets

    def to(self, device: Any) -> Any:
        self.points, self.targets = self.points.to(device), self.targets.to(device)
        return self


class MovesOnly(MovesItself):
    def to(self, device: Any) -> None:
        super().to(device)


class Sized(MovesItself):
    """As a TensorDict: it has the size of its batch, and is cut by slices."""

    @property
    def batch_size(self) -> torch.Size:
        return self.points.shape[:1]

    def __getitem__(self, some: slice) -> Sized:
        return Sized(self.points[some], self.targets[some])

    def __iter__(self) -> Any:
        raise AssertionError("not iterated over")


def packed() -> Any:
    # Each sample is a sequence of its point's numbers, of a length of its own.
    sequences = [point[: 1 + place % 3, None] for place, point in enumerate(POINTS)]
    return {"points": pack_sequence(sequences, enforce_sorted=False), "targets": TARGETS}


def tensordict() -> Any:
    from tensordict import TensorDict

    return TensorDict({"points": POINTS, "nested": {"targets": TARGETS}}, batch_size=[SAMPLES])


def graphs() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it calls when it is imported
        from torch_geometric.data import Batch, Data
    edges = torch.tensor([[0, 1], [1, 0]])
    made = [
        Data(x=point.expand(2 + place % 2, 3), edge_index=edges, y=target[None])
        for place, (point, target) in enumerate(zip(POINTS, TARGETS, strict=True))
    ]
    return Batch.from_data_list(made)


def of_points(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.points)  # type: ignore[no-any-return]


Kind = tuple[Callable[[], Any], Callable[[Any], list[Any]], Callable[[Any], Tensor]]
# A batch, what each of its samples has, and its targets.
KINDS: dict[str, Kind] = {
    "dataclass": (lambda: Record(POINTS, TARGETS), lambda batch: list(batch.points), lambda batch: batch.targets),
    "sized": (lambda: Sized(POINTS, TARGETS), lambda batch: list(batch.points), lambda batch: batch.targets),
    "numbers": (lambda: {"y": TARGETS, "weights": WEIGHTS}, lambda batch: batch["weights"], lambda batch: batch["y"]),
    "PackedSequence": (packed, lambda batch: unpack_sequence(batch["points"]), lambda batch: batch["targets"]),
    "TensorDict": (tensordict, lambda batch: list(batch["points"]), lambda batch: batch["nested", "targets"]),
    "graphs": (graphs, lambda batch: [graph.x for graph in batch.to_data_list()], lambda batch: batch.y),
}
# The package of graphs takes seconds to be imported.
NEEDED = {"TensorDict": [needs("tensordict")], "graphs": [needs("torch_geometric"), pytest.mark.slow]}


def train(batch: Any, task: Any, **options: Any) -> pl.State:
    """Two batches, as by hand; the last State."""
    model = nn.Linear(3, 1)
    state = pl.run(pl.fit(model, [batch] * 2, loss=task, optimizer=pl.optim.sgd(lr=LR), max_duration="1ep", **options))
    by_task = lambda module, batch, _: task.loss(task.forward(module, batch), batch).backward()  # noqa: E731
    close(state.params, by_hand(model, [(batch, batch)] * 2, by_task, epochs=1), 1e-4)
    return state


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=NEEDED.get(kind, [])) for kind in KINDS])
def test_it_is_counted_cut_moved_as_a_copy_and_trained_as_by_hand(kind: str) -> None:
    make, samples, targets = KINDS[kind]
    batch = make()
    assert num_samples(batch) == SAMPLES
    for size, sizes in ((5, [5]), (1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2])):
        pieces = split(batch, size)
        assert [len(targets(piece)) for piece in pieces] == [num_samples(piece) for piece in pieces] == sizes
        assert torch.equal(torch.cat([targets(piece) for piece in pieces]), TARGETS)
        found = [sample for piece in pieces for sample in samples(piece)]
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, samples(batch), strict=True)
        )

    def means(model: nn.Module, some: Any) -> Any:
        return model(torch.stack([torch.as_tensor(each).float().mean().expand(3) for each in samples(some)]))

    task: Any = pl.Task(forward=means, loss=lambda outputs, some: mse(outputs, targets(some)))
    for size in (None, 2):
        assert train(make(), task, microbatch_size=size, strict=True).timestamp.sample == 2 * SAMPLES
    moved = to_device(batch, "meta")
    assert targets(moved).device.type == "meta"
    assert targets(batch).device.type == "cpu"
    if kind == "dataclass":
        assert moved.made == 1  # not made anew
        assert [(piece.name, piece.made) for piece in split(batch, 3)] == [("a", 1)] * 2
    if kind == "PackedSequence":
        assert moved["points"].batch_sizes.is_cpu
        assert to_device(batch, "cpu")["points"].data is batch["points"].data
    if kind == "graphs":  # they keep what they follow
        (first, second) = split(type(batch).from_data_list(batch.to_data_list(), follow_batch=["y"]), 3)
        assert (first.num_graphs, second.num_graphs) == (3, 2)
        assert first.y_batch.tolist() == [0, 1, 2]
        assert second.ptr.tolist() == [0, 3, 5]


def test_packed_sequences_are_cut_in_their_order() -> None:
    for lengths, enforce_sorted in (((4, 3, 3, 1), True), ((1, 3, 4, 3), False)):
        sequences = [torch.full((length, 2), float(i)) for i, length in enumerate(lengths)]
        pieces = split((pack_sequence(sequences, enforce_sorted=enforce_sorted), torch.arange(4)), 3)
        assert [piece[1].tolist() for piece in pieces] == [[0, 1, 2], [3]]
        assert all(map(torch.equal, [each for piece in pieces for each in unpack_sequence(piece[0])], sequences))


def test_objects_are_moved_by_their_own_to_and_counted_as_the_task_says() -> None:
    for kind in (MovesItself, MovesOnly):
        mine = kind(POINTS, TARGETS)
        moved, beside = to_device((mine, torch.zeros(3)), "meta")
        assert type(moved) is kind
        assert moved.points.is_meta
        assert beside.is_meta
        assert mine.points.is_cpu
    plain = pl.Task(forward=of_points, loss=lambda outputs, batch: mse(outputs, batch.targets))
    says = r"MovesItself.*loss=pl.Task\(loss=\.\.\., samples=.*split="
    batch = MovesItself(POINTS, TARGETS)
    with pytest.raises(DataError, match=rf"can't count.*{says}"):
        train(batch, plain)
    counted = attrs.evolve(plain, samples=lambda batch: len(batch.points))
    assert train(batch, counted).timestamp.sample == 2 * SAMPLES
    with pytest.raises(DataError, match=rf"can't (count|split).*{says}"):
        train(batch, counted, microbatch_size=1)

    def cut(batch: Any, size: int) -> list[Any]:
        places = range(0, len(batch.points), size)
        return [MovesItself(batch.points[i : i + size], batch.targets[i : i + size]) for i in places]

    train(batch, attrs.evolve(counted, split=cut), microbatch_size=2)
    for size in (None, 1, 2, 3):
        record = Record(POINTS, TARGETS)
        assert train(record, plain, microbatch_size=size, strict=size != 1).timestamp.sample == 2 * SAMPLES
