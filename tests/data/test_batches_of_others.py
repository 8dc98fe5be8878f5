"""Batches of other libraries' classes train without a word of how to count, split and move them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import pure_loop as pl
from pure_loop import Event
from pure_loop.data.batch import to_device
from pure_loop.data.samples import num_samples, split
from tests.support.extras import needs

SAMPLES = 5
POINTS = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
TARGETS = POINTS.sum(dim=1, keepdim=True)


@dataclass
class Record:
    points: Tensor
    targets: Tensor
    name: str = "a"


def record() -> Any:
    return Record(POINTS, TARGETS)


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
    made = []
    for place, (point, target) in enumerate(zip(POINTS, TARGETS, strict=True)):
        nodes = 2 + place % 2
        edges = torch.tensor([[0, 1], [1, 0]])
        made.append(Data(x=point.expand(nodes, 3), edge_index=edges, y=target[None]))
    return Batch.from_data_list(made)


def of_sequences(model: nn.Module, batch: Any) -> Tensor:
    padded = [
        nn.functional.pad(sequence[:, 0], (0, 3 - len(sequence))) for sequence in unpack_sequence(batch["points"])
    ]
    return model(torch.stack(padded))  # type: ignore[no-any-return]


def of_graphs(model: nn.Module, batch: Any) -> Tensor:
    # The mean over the nodes of each graph.
    total = torch.zeros(batch.num_graphs, 3).index_add(0, batch.batch, batch.x)
    return model(total / batch.batch.bincount()[:, None])  # type: ignore[no-any-return]


# A batch, the forward, and its targets.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, Any], Tensor], Callable[[Any], Tensor]]] = {
    "dataclass": (record, lambda model, batch: model(batch.points), lambda batch: batch.targets),
    "PackedSequence": (packed, of_sequences, lambda batch: batch["targets"]),
    "TensorDict": (
        tensordict,
        lambda model, batch: model(batch["points"]),
        lambda batch: batch["nested", "targets"],
    ),
    "graphs": (graphs, of_graphs, lambda batch: batch.y),
}
NEEDED = {"TensorDict": [needs("tensordict")], "graphs": [needs("torch_geometric"), pytest.mark.slow]}
EACH = [pytest.param(kind, marks=NEEDED.get(kind, [])) for kind in KINDS]


@pytest.mark.parametrize("kind", EACH)
def test_it_trains_alike_with_any_microbatch_size(kind: str) -> None:
    make, forward, targets = KINDS[kind]
    batch, model = make(), nn.Linear(3, 1)
    task: Any = pl.Task(forward=forward, loss=lambda outputs, batch: nn.functional.mse_loss(outputs, targets(batch)))
    ends = {}
    for size in (None, 1, 2, 3):
        optimizer = pl.optim.sgd(lr=0.1)
        stream = pl.fit(model, [batch] * 2, task=task, optimizer=optimizer, max_duration="1ep", microbatch_size=size)
        sizes = []
        for event, state in stream:
            if event is Event.BEFORE_FORWARD:
                sizes.append(len(targets(state.microbatch)))
        assert state.timestamp.sample == 2 * SAMPLES
        assert sizes == 2 * {None: [5], 1: [1] * 5, 2: [2, 2, 1], 3: [3, 2]}[size]
        ends[size] = dict(state.params)
    for size in (1, 2, 3):
        torch.testing.assert_close(ends[size], ends[None])


@pytest.mark.parametrize("kind", EACH)
def test_it_is_moved_as_a_copy(kind: str) -> None:
    make, _, targets = KINDS[kind]
    batch = make()
    assert num_samples(batch) == SAMPLES
    moved = to_device(batch, "meta")
    assert targets(moved).device.type == "meta"
    assert targets(batch).device.type == "cpu"


@needs("torch_geometric")
@pytest.mark.slow
def test_graphs_keep_what_they_follow() -> None:
    whole = graphs()
    followed = type(whole).from_data_list(whole.to_data_list(), follow_batch=["y"])
    (first, second) = split(followed, 3)
    assert (first.num_graphs, second.num_graphs) == (3, 2)
    assert torch.equal(first.x, whole.x[: len(first.x)])
    assert first.y_batch.tolist() == [0, 1, 2]
    assert second.ptr.tolist() == [0, 3, 5]
