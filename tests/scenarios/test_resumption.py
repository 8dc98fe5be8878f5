"""Going on exactly, with everything at once: what peers lose in the middle of an epoch."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.order import BOUNDARIES
from tests.support import problem
from tests.support.problem import images, mlp
from tests.support.streams import assert_same, assert_same_stream

BEFORE = [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images with a random shift and noise, from torch's and Python's global generators, as users write it."""

    def __init__(self, samples: int) -> None:
        ((self.images, self.labels),) = images(1, size=samples)
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.loaded += 1
        shifted = torch.roll(self.images[index], random.randrange(3), dims=-1)
        return shifted + 0.1 * torch.randn_like(shifted), self.labels[index]


def stream(start: Any = "convnet", workers: int = 0, data: Any = None, **changes: Any) -> pl.Stream:
    loader = DataLoader(data or Augmented(14), batch_size=6, shuffle=True, num_workers=workers)
    rates = pl.schedules.cosine("1dur", peak=0.1, warmup="3ba")
    settings: dict[str, Any] = {
        "optimizer": pl.optim.sgd(lr=rates, momentum=0.9, nesterov=True),
        "microbatch_size": 4,
        "seed": 3,
        "precision": "amp_fp16",
        "strict": False,
        "evaluators": {
            "val": pl.Evaluator(DataLoader(Augmented(10), batch_size=4, shuffle=True), interval="2ba"),
            "epoch": images(1, size=2),
        },
        "algorithms": [
            pl.algorithms.label_smoothing(0.1),
            pl.algorithms.gradient_clipping("norm", 1.0),
            pl.algorithms.sam(rho=0.05, interval=2),
            pl.algorithms.ema(half_life="4ba"),
        ],
    }
    return problem.fit(start, loader, **settings | changes)


def test_from_boundaries_with_everything_at_once(tmp_path: Path) -> None:
    """Each second one from a file, and one with workers that draw random numbers."""
    whole = list(stream())
    boundaries = [index for index, (event, _) in enumerate(whole) if event in BOUNDARIES]
    for number, index in enumerate(boundaries[2::5]):
        torch.manual_seed(index)
        random.seed(index)
        event, kept = whole[index]
        path = tmp_path / f"{index}.safetensors"
        if number % 2:
            pl.save(kept, path)
        again = list(stream(load_path=path) if number % 2 else stream(kept, workers=2 * (number == 2)))
        events = [event for event, _ in again]
        first = events.index(Event.FIT_START) + 1
        assert events[:first] == (BEFORE if number % 2 else [Event.FIT_START])
        rest = again[first:]
        assert_same_stream(rest, whole[-len(rest) :], f"from {event.name} at {index}")
    data = Augmented(14)
    kept = next(state for event, state in whole if event is Event.BATCH_END and state.timestamp.batch == 5)
    pl.run(stream(kept, data=data, evaluators=None))
    assert data.loaded == 2, "what was seen is not loaded again"
    # A duration that is over begins and ends, and a longer one resumes where a shorter one ended.
    assert [event for event, _ in stream(whole[-1][1], max_duration="1ep")] == [Event.FIT_START, Event.FIT_END]
    assert_same(pl.run(small(pl.run(small(max_duration="4ba")))), pl.run(small()), "after 4 batches and 2 more")


def small(start: Any = None, **changes: Any) -> pl.Stream:
    return problem.fit(start, **{"donate": False, **changes})


def test_autoresume_goes_on_from_the_newest_that_it_can_go_on_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, folder = tmp_path / "first.safetensors", tmp_path / "folder"
    pl.save(small_run := pl.run(small(max_duration="1ep")), first)
    for epoch in (1, 3):  # the newest goes before the path, or the State, of the first start
        pairs = list(small(load_path=first, autoresume=folder, max_duration="3ep"))
        assert next(state for event, state in pairs if event is Event.FIT_START).timestamp.epoch == epoch
    assert next(iter(small(small_run, autoresume=folder, max_duration="3ep")))[1].timestamp.epoch == 3
    middle = next(state for event, state in small() if event is Event.BEFORE_FORWARD)
    pl.save(middle, folder / "debug.safetensors")
    loaded = next(s for e, s in small(autoresume=folder, max_duration="3ep") if e is Event.AFTER_LOAD)
    assert loaded.timestamp.epoch == 3
    assert "debug.safetensors is passed over: it is from before_forward" in caplog.text
    other, further = small_run.replace(seed=9), pl.run(small(seed=0, max_duration="4ep"))
    for start, says in (
        (other, r"seed 0, batch 9\) is not of a run that began with the State passed \(seed 9"),
        (further, "Give each run a folder of its own"),
    ):
        with pytest.raises(pl.errors.ArgumentError, match=says):
            small(start, autoresume=folder)


def test_what_may_be_another_on_going_on() -> None:
    start = pl.run(small(algorithms=[pl.algorithms.ema(half_life="4ba")], max_duration="1ep"))
    plain = pl.run(small(start)).params["0.weight"]
    for change in (
        {"optimizer": pl.optim.sgd(lr=0.001)},
        {"algorithms": [pl.algorithms.sam()], "evaluators": problem.points(1), "microbatch_size": 2, "clip_grad": 0.1},
    ):
        last = pl.run(small(start, **change))
        assert (last.timestamp.epoch, torch.equal(last.params["0.weight"], plain)) == (2, False), change


def test_an_epoch_that_the_order_of_2021_cuts_short_is_counted() -> None:
    older = {"max_duration": "5ba", "order": "2021", "watch": {Event.BATCH_END, Event.EPOCH_END}}
    *_, (_, last), (_, end) = small(**older)
    assert [(s.timestamp.epoch, s.timestamp.batch_in_epoch) for s in (last, end)] == [(1, 2), (2, 0)]
    assert [[at for at, _ in small(start, **older)] for start in (last, end)] == [[Event.EPOCH_END], []]


def test_what_may_not_be_another_on_going_on(tmp_path: Path) -> None:
    path, middle = tmp_path / "x.safetensors", tmp_path / "middle.safetensors"
    pl.save(pl.run(small(seed=3)), path)
    pl.save(next(state for event, state in small() if event is Event.BEFORE_FORWARD), middle)
    for call, says in (
        (partial(small, load_path=path, seed=4), r"seed=4, and .* has seed 3, with which it resumes"),
        (partial(small, pl.load(path, model=mlp()), load_path=path), "each is a place to start from"),
        (partial(small, load_path=middle), "BEFORE_FORWARD, in the middle of a computation"),
        (
            partial(small, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), load_path=path),
            r"params\['0.weight'\] is \(8, 4\) float32 in the file and \(5, 4\)",
        ),
    ):
        with pytest.raises(pl.PureLoopError, match=says):
            call()


def test_surgery_at_init_comes_before_the_numbers_and_a_fresh_state_starts_as_a_module_does(tmp_path: Path) -> None:
    def widen(state: pl.State) -> pl.State:
        return state.with_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))

    surgery = pl.Algorithm("widen", {Event.INIT: widen})
    with pl.random.seeded(0):
        whole = list(small(nn.Linear(4, 3), algorithms=[surgery]))
    pl.save(next(state for event, state in whole if event is Event.BATCH_END), tmp_path / "x.safetensors")
    again = pl.run(small(nn.Linear(4, 3), algorithms=[surgery], load_path=tmp_path / "x.safetensors"))
    assert_same(again, whole[-1][1], "after surgery")
    for epochs in (1, 2):
        start = pl.State.create(nn.Linear(4, 3))
        last = pl.run(small(start, algorithms=[surgery], autoresume=tmp_path / "run", max_duration=f"{epochs}ep"))
        assert last.timestamp.epoch == epochs


def test_a_step_whose_sam_loss_is_exactly_zero_is_taken() -> None:
    """In Composer a second loss of 0.0 counts as no loss, and the step is left out."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    loss = lambda outputs, targets: (outputs - 1.0).sum()  # noqa: E731  # 0 at 0.5 + rho, with gradient 1
    data, sam = [(torch.ones(1, 1), torch.zeros(1, 1))], pl.algorithms.sam(rho=0.5)
    optimizer = pl.optim.sgd(lr=0.25)
    assert problem.run(model, data, [sam], loss=loss, optimizer=optimizer, max_duration="1ba").params["weight"] == 0.25
