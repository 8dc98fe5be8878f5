"""Where the reference implementation (MosaicML Composer) is wrong, measured on it: a test each that ours is right.

What concerns checkpoints on disk comes with them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support import streams as sameness
from tests.support.problem import fit, noisy, points

DATA = points(size=(6, 6, 5), seed=2)


def test_the_learning_rate_does_not_lag() -> None:
    """A linear decay from 1 to 0 over 4 batches uses 1, 0.75, 0.5, 0.25; there it is 1, 1, 0.75, 0.5."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    stream = pl.fit(
        model,
        [(torch.ones(1, 1), torch.zeros(1, 1))] * 4,
        loss=lambda outputs, targets: outputs.mean(),  # its gradient is 1, so a step is the learning rate
        optimizer=pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "4ba")),
        max_duration="4ba",
    )
    weights = [0.0, *(state.params["weight"].item() for event, state in stream if event is Event.BATCH_END)]
    assert [before - after for before, after in itertools.pairwise(weights)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_a_dict_of_losses_is_not_rescaled_in_place(microbatch_size: int | None) -> None:
    """There, what AFTER_LOSS showed is multiplied in place before AFTER_BACKWARD."""

    def loss(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        part = functional.cross_entropy(outputs, targets)
        penalty = outputs.square().mean()
        return {"total": part + penalty, "part": part, "penalty": penalty}

    given: dict[str, Tensor] = {}
    shown: dict[str, Tensor] = {}
    batch_losses = []
    for event, state in fit(data=DATA, loss=loss, microbatch_size=microbatch_size):
        if event is Event.AFTER_LOSS:
            given, shown = state.loss, {name: value.detach().clone() for name, value in state.loss.items()}
        elif event is Event.AFTER_BACKWARD:
            for name, value in shown.items():
                assert torch.equal(given[name].detach(), value), f"{name} changed in the State of AFTER_LOSS"
                assert torch.equal(state.loss[name], value), f"{name} is another one at AFTER_BACKWARD"
        elif event is Event.BATCH_END:
            batch_losses.append(state.loss)
    whole = [state.loss for event, state in fit(data=DATA, loss=loss) if event is Event.BATCH_END]
    for name in ("total", "part", "penalty"):
        torch.testing.assert_close(batch_losses[0][name], whole[0][name])


def test_a_batch_changed_before_it_is_split_is_the_batch_that_is_split() -> None:
    """There, changing the batch at BEFORE_TRAIN_BATCH is ignored: it was split before."""

    @pl.algorithm(Event.BEFORE_TRAIN_BATCH)
    def first_three(state: pl.State) -> pl.State:
        return state.replace(batch=tuple(part[:3] for part in state.batch))

    pairs = list(fit(data=DATA, algorithms=[first_three], microbatch_size=2))
    microbatches = [state.microbatch for event, state in pairs if event is Event.BEFORE_FORWARD]
    assert [len(inputs) for inputs, _ in microbatches] == [2, 1] * 6
    assert torch.equal(torch.cat([inputs for inputs, _ in microbatches[:2]]), DATA[0][0][:3])
    cut = [tuple(part[:3] for part in batch) for batch in DATA]
    wanted = pl.run(fit(data=cut, microbatch_size=2)).params
    sameness.assert_same(dict(pairs[-1][1].params), dict(wanted), "trained on the changed batches")


def test_two_callbacks_of_one_class_are_two() -> None:
    """There, they overwrite each other in a checkpoint."""

    class Counter(pl.Callback):
        def __init__(self, step: int) -> None:
            self.step, self.count = step, 0

        def batch_end(self, state: pl.State, logger: Any) -> None:
            self.count += self.step

    one, two = Counter(1), Counter(10)
    memory = pl.loggers.InMemoryLogger(), pl.loggers.InMemoryLogger()
    rates = [pl.callbacks.LRMonitor(name="one"), pl.callbacks.LRMonitor(name="two")]
    pl.run(fit(data=DATA, callbacks=[one, two, *rates], loggers=memory))
    assert (one.count, two.count) == (6, 60)
    assert memory[0].series("one") == memory[1].series("two")


def test_a_step_whose_sam_loss_is_exactly_zero_is_taken() -> None:
    """There, a second loss of 0.0 counts as no loss, and the step is left out."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - 1.0).sum()  # 0 at the perturbed weight 0.5 + rho, with gradient 1

    stream = pl.fit(
        model,
        [(torch.ones(1, 1), torch.zeros(1, 1))],
        loss=loss,
        optimizer=pl.optim.sgd(lr=0.25),
        max_duration="1ba",
        algorithms=[pl.algorithms.sam(rho=0.5)],
    )
    assert pl.run(stream).params["weight"].item() == 0.25


def test_evaluation_leaves_training_weights_alone_with_ema() -> None:
    """There, EMA leaves other weights behind when a checkpoint is saved."""
    average = pl.algorithms.ema(half_life="2ba")
    with_evaluation = fit(noisy(), DATA, algorithms=[average], evaluators=DATA, eval_interval="1ba")
    trained = [s.params for e, s in with_evaluation if e in (Event.BATCH_END, Event.BATCH_CHECKPOINT)]
    alone = fit(noisy(), DATA)
    wanted = [s.params for e, s in alone if e in (Event.BATCH_END, Event.BATCH_CHECKPOINT)]
    for given, params in zip(trained, wanted, strict=True):
        sameness.assert_same(dict(given), dict(params), "weights")
