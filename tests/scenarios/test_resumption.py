"""Going on exactly, with everything at once: what peers lose in the middle of an epoch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from tests.support import streams as sameness


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images with a random shift and noise, from torch's and Python's global generators, as users write it."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(n, 1, 6, 6, generator=generator)
        self.labels = torch.randint(3, (n,), generator=generator)
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded += 1
        shifted = torch.roll(self.images[index], random.randrange(3), dims=-1)
        return shifted + 0.1 * torch.randn_like(shifted), self.labels[index]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2)),
        *(nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(3)),
    )


def model() -> nn.Module:
    module = network()
    module(torch.zeros(2, 1, 6, 6))
    return module


def everything(loader: Any, **overrides: Any) -> dict[str, Any]:
    images = Augmented(10)
    return {
        "train_dataloader": loader,
        "loss": nn.functional.cross_entropy,
        "optimizer": pl.optim.sgd(lr=pl.schedules.cosine("1dur", peak=0.1, warmup="3ba"), momentum=0.9, nesterov=True),
        "max_duration": "3ep",
        "microbatch_size": 4,
        "seed": 3,
        "evaluators": {
            "val": pl.Evaluator(DataLoader(images, batch_size=4, shuffle=True), interval="2ba", microbatch_size=3),
            "epoch": [(torch.ones(2, 1, 6, 6), torch.zeros(2, dtype=torch.long))],
        },
        "algorithms": [
            pl.algorithms.label_smoothing(0.1),
            pl.algorithms.gradient_clipping("norm", 1.0),
            pl.algorithms.sam(rho=0.05, interval=2),
            pl.algorithms.ema(half_life="4ba"),
        ],
        **overrides,
    }


def go(start: Any, *, workers: int = 0, **overrides: Any) -> sameness.Pairs:
    loader = DataLoader(Augmented(14), batch_size=6, shuffle=True, num_workers=workers)
    arguments = everything(loader, **overrides)
    return list(pl.fit(start, **arguments))


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_from_every_boundary_with_everything_at_once(precision: str) -> None:
    whole = go(model(), precision=precision)
    boundaries = [index for index, (event, _) in enumerate(whole) if event in BOUNDARIES]
    assert len(boundaries) == 2 + 3 * 3 + 9 * 2
    for index in boundaries:
        torch.manual_seed(index)
        random.seed(index)
        event, kept = whole[index]
        again = go(kept, precision=precision)
        sameness.assert_same_stream(again[1:], whole[len(whole) - len(again) + 1 :], f"from {event.name} at {index}")


def test_with_workers_that_draw_random_numbers() -> None:
    alone = go(model(), max_duration="2ep")
    whole = go(model(), workers=2, max_duration="2ep")
    sameness.assert_same_stream(whole, alone, "with workers")
    index = next(i for i, (event, s) in enumerate(whole) if event is Event.BATCH_END and s.timestamp.batch == 4)
    again = go(whole[index][1], workers=2, max_duration="2ep")
    sameness.assert_same_stream(again[1:], whole[len(whole) - len(again) + 1 :], "from the middle, with workers")


def test_what_was_seen_is_not_loaded_again() -> None:
    data = Augmented(14)
    loader = DataLoader(data, batch_size=6, shuffle=True)
    arguments = everything(loader, evaluators=None)
    kept = next(s for e, s in pl.fit(model(), **arguments) if e is Event.BATCH_END and s.timestamp.batch == 5)
    data.loaded = 0
    pl.run(pl.fit(kept, **arguments))
    assert data.loaded == 2 + 14


def test_a_longer_duration_resumes_where_a_shorter_one_ended() -> None:
    constant = {"optimizer": pl.optim.adamw(lr=1e-2), "evaluators": None}
    whole = go(model(), max_duration="7ba", **constant)
    short = go(model(), max_duration="4ba", **constant)
    assert short[-1][0] is Event.FIT_END
    longer = go(short[-1][1], max_duration="7ba", **constant)
    assert [event for event, _ in longer[:2]] == [Event.FIT_START, Event.BEFORE_DATALOADER]
    sameness.assert_same(longer[-1][1], whole[-1][1], "after 4 batches and 3 more")


def test_a_duration_that_is_over_yields_start_and_end() -> None:
    last = go(model(), max_duration="2ep")[-1][1]
    for duration in ("2ep", "1ep", "1ba", "0ba"):
        assert [event for event, _ in go(last, max_duration=duration)] == [Event.FIT_START, Event.FIT_END]


@pytest.mark.parametrize("donate", [False, "auto"])
def test_an_epoch_cut_short_in_the_order_of_2021_is_counted(donate: Any) -> None:
    """As any epoch is at EPOCH_END; resuming from there begins the next one, from BATCH_END the rest of this one."""
    data = [(torch.full((2, 1), float(i)), torch.ones(2, 1)) for i in range(3)]
    optimizer, loss = pl.optim.sgd(lr=0.01), nn.functional.mse_loss
    settings: Any = {"loss": loss, "optimizer": optimizer, "order": "2021", "donate": donate}

    def batches(start: Any, duration: str) -> list[tuple[Event, pl.State, int, int]]:
        stream = pl.fit(start, data, max_duration=duration, **settings)
        return [
            (event, state, state.timestamp.epoch, state.timestamp.batch_in_epoch)
            for event, state in stream
            if event in (Event.BATCH_END, Event.EPOCH_END)
        ]

    *_, last, end = short = batches(nn.Linear(1, 1), "5ba")
    assert [(event.name, epoch, batch) for event, _, epoch, batch in short] == [
        *(("BATCH_END", 0, 1), ("BATCH_END", 0, 2), ("BATCH_END", 0, 3), ("EPOCH_END", 1, 0)),
        *(("BATCH_END", 1, 1), ("BATCH_END", 1, 2), ("EPOCH_END", 2, 0)),
    ]
    assert batches(end[1], "5ba") == []
    (again,) = batches(last[1], "5ba")
    assert again[2:] == (2, 0)
    assert [event for event, *_ in batches(end[1], "6ba")] == [Event.BATCH_END, Event.EPOCH_END]
    assert [state.batch[0][0, 0].item() for event, state, *_ in batches(end[1], "6ba")[:1]] == [0.0]
    assert [state.batch[0][0, 0].item() for event, state, *_ in batches(last[1], "6ba")[:1]] == [2.0]
