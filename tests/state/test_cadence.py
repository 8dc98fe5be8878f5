"""Cadences as conditions of algorithms: an interval is due at the same batches for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import pure_loop as pl
from pure_loop import Event

DATA = [(torch.ones(2, 2), torch.zeros(2, 1))] * 4


def batches_at(event: Event, interval: str, data: Any = DATA, **options: Any) -> list[int]:
    """After how many batches an algorithm at this event is called."""
    called: list[int] = []

    @pl.algorithm(event, when=pl.every(interval))
    def note(state: pl.State) -> pl.State:
        called.append(state.timestamp.batch)
        return state

    options = {"max_duration": "2ep", "loss": mse_loss, "optimizer": pl.optim.sgd(lr=0.1), **options}
    pl.run(pl.fit(torch.nn.Linear(2, 1), data, algorithms=[note], **options))
    return called


@pytest.mark.parametrize(
    ("interval", "options", "batches"),
    [
        ("3ba", {}, [3, 6]),
        ("0.25dur", {"max_duration": "8ba"}, [2, 4, 6, 8]),
        ("0.25dur", {"max_duration": "2ep"}, [2, 4, 6, 8]),
        ("0.25dur", {"max_duration": "2ep", "batches_per_epoch": 2}, [1, 2, 3, 4]),
        ("0.25dur", {"max_duration": "2ep", "data": iter(DATA * 2), "batches_per_epoch": 4}, [2, 4, 6, 8]),
    ],
)
def test_at_the_end_of_a_batch(interval: str, options: dict[str, Any], batches: list[int]) -> None:
    assert batches_at(Event.BATCH_END, interval, **options) == batches


@pytest.mark.parametrize(
    ("interval", "batches"), [("1ep", [4, 8]), ("2ep", [8]), ("0.5dur", [4, 8]), ("1dur", [8]), ("4ba", [4, 8])]
)
def test_at_the_end_of_an_epoch(interval: str, batches: list[int]) -> None:
    assert batches_at(Event.EPOCH_END, interval) == batches


def test_a_loader_that_cannot_tell_its_length_has_its_fractions_at_the_ends_of_epochs() -> None:
    class Unsized:
        def __iter__(self) -> Any:
            return iter(DATA)

    assert batches_at(Event.EPOCH_END, "0.25dur", Unsized()) == [4, 8]
    assert batches_at(Event.BATCH_END, "0.25dur", Unsized()) == []


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.BATCH_CHECKPOINT])
def test_a_cadence_that_never_comes_round_at_its_event_is_refused(event: Event) -> None:
    """Epochs are counted after the batch: this handler would silently never run."""
    with pytest.raises(pl.ArgumentError, match=r"algorithm 'yearly' would never run: every 1ep.*EPOCH_END"):
        pl.algorithm(event, when="1ep", name="yearly")(lambda state: state)
