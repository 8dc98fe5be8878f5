"""Uses in which a functional loop could silently train wrongly: right, or an error that says what to write."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from tests.support.problem import cross_entropy, fit, points, run
from tests.support.streams import assert_same, assert_same_stream

DATA = points(4)


class Checkpointed(nn.Module):
    """Goes through the module again in the backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        with seeded(0):
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
            self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x.detach().requires_grad_(), use_reentrant=self.reentrant))


class OwnLoss(nn.Module):
    """Its loss reads what its forward left behind, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        self.hidden = batch[0] * 2
        return self.linear(self.hidden)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, batch[1]) + self.linear(self.hidden).square().mean()


def test_forks_in_turn_and_in_threads_are_what_they_are_alone() -> None:
    """Each recomputes with its own weights."""
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "max_duration": "3ep", "strict": None}
    start = next(state for event, state in fit(Checkpointed(), DATA, **options) if event is Event.AFTER_LOAD)
    other = [(x + 1, y) for x, y in DATA]
    alone = [list(fit(start, data, **options)) for data in (DATA, other)]
    both = list(zip(fit(start, DATA, **options), fit(start, other, **options), strict=True))
    for index in (0, 1):
        assert_same_stream([pair[index] for pair in both], alone[index], "in turn")
    before, found = torch.get_rng_state(), list[pl.State]()
    threads = [threading.Thread(target=lambda: found.append(run(start, DATA, **options))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for state in found:
        assert_same(state.replace(model=start.model), alone[0][-1][1].replace(model=start.model), "in a thread")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [Checkpointed, OwnLoss])
def test_predicting_in_a_callback_and_autocast_around_the_loop_change_nothing(make: Any) -> None:
    def predicts(event: Event, state: pl.State) -> None:
        if event in (Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
            task = pl.Task(forward=lambda model, batch: model(batch if make is OwnLoss else batch[0]))
            pl.run(pl.predict(state, DATA[:1], task=task))

    options: dict[str, Any] = {"loss": None if make is OwnLoss else cross_entropy, "evaluators": DATA[:1]}
    wanted = list(fit(make(), DATA, **options))
    assert_same_stream(list(fit(make(), DATA, callbacks=[predicts], **options)), wanted, "predicting")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_stream(list(fit(make(), DATA, **options)), wanted, "inside autocast")
    if make is OwnLoss:
        assert float(wanted[-1][1].buffers["calls"]) == 8  # a loss of the module's own may write buffers


def test_what_differentiates_outside_of_the_loop_is_refused() -> None:
    with pytest.raises(pl.ModelError, match="use_reentrant=False"):
        run(Checkpointed(reentrant=True))
    with torch.inference_mode(), pytest.raises(pl.LossError, match=r"inside torch\.inference_mode"):
        run()


def test_an_evaluator_called_train_does_not_mix_with_training() -> None:
    logger = pl.loggers.InMemoryLogger()
    run(data=DATA, evaluators={"train": DATA}, loggers=[logger])
    assert [len(logger.series(name)[0]) for name in ("train/loss", "eval/train/loss")] == [8, 2]
