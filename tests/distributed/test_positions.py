"""Positions in the streams of several ranks: one that all share, or one of each."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from tests.support.sources import BATCH, READ, SAMPLES, Stateful, collate
from tests.support.streams import assert_same
from tests.support.worlds import pool

STOP = 11
# The first batch of the part that is left, and a batch to compare with the one that was trained on.
NEEDED = SAMPLES - STOP * BATCH


class OfRank(Stateful):
    """Other numbers on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.offset = 1000.0 * rank

    def __iter__(self) -> Any:
        return (value + self.offset for value in super().__iter__())


def train(start: Any, data: Any, parallel: Parallel | None) -> tuple[list[Any], dict[int, pl.State], int]:
    """The samples of each batch, States, and how many samples were read."""
    seen, kept, READ[0] = [], {}, 0
    options = {"loss": torch.nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=1e-7), "max_duration": "1ep"}
    for event, state in pl.fit(start, data, parallel=parallel, **options):
        if event is Event.AFTER_DATALOADER:
            seen.append(state.batch[0].flatten().tolist())
        if event in (Event.BATCH_CHECKPOINT, Event.FIT_END):
            kept[state.timestamp.batch] = state
    return seen, kept, READ[0]


@pytest.mark.parametrize("data", ["own", "split"])
def test_each_rank_goes_on_in_its_stream(data: str, tmp_path: Any) -> None:
    parallel, path = Parallel(data=data), str(tmp_path / "state.safetensors")

    def program(rank: int) -> Any:
        with pl.random.seeded(0):
            model = torch.nn.Linear(1, 1)

        def stream() -> Any:
            return DataLoader(OfRank(rank if data == "own" else 0), BATCH, collate_fn=collate)

        seen, kept, _ = train(model, stream(), parallel)
        pl.save(kept[STOP], path)
        rest, resumed, read = train(pl.load(path, model=model), stream(), parallel)
        assert rest == seen[STOP:]
        assert_same(resumed[SAMPLES // BATCH], kept[SAMPLES // BATCH], f"rank {rank}")
        return read, len(kept[STOP].data) if type(kept[STOP].data) is tuple else 1

    assert pool().run(program) == [(NEEDED + BATCH, 2 if data == "own" else 1)] * 2


def test_another_number_of_ranks_reads_streams_of_their_own_again(caplog: pytest.LogCaptureFixture) -> None:
    with pl.random.seeded(0):
        model = torch.nn.Linear(1, 1)
    seen, kept, _ = train(model, DataLoader(Stateful(), BATCH, collate_fn=collate), None)
    of_two = kept[STOP].replace(data=(kept[STOP].data, kept[STOP].data))
    with caplog.at_level(logging.WARNING, "pure_loop.fit"):
        rest, _, read = train(of_two, DataLoader(Stateful(), BATCH, collate_fn=collate), None)
    assert rest == seen[STOP:]
    assert read == SAMPLES
    assert "state.data is of 2 ranks with data of their own, and 1 ranks share their data" in caplog.text
