"""Uses in which a functional loop could silently train wrongly: right, or an error that says what to write."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from tests.support import streams as sameness

DATA = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)), torch.tensor([0, 1, 2, 0])) for i in range(4)]


class Checkpointed(nn.Module):
    """Goes through the module again in the backward."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.body, x.detach().requires_grad_(), use_reentrant=self.reentrant))
        return out


class OwnLoss(nn.Module):
    """Its loss reads what its forward left behind, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        self.hidden = batch[0] * 2
        out: Tensor = self.linear(self.hidden)
        return out

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, batch[1]) + self.linear(self.hidden).square().mean()


def made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = make()
    return module


def fit(start: Any, data: Any = DATA, **changes: Any) -> pl.Stream:
    arguments = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "max_duration": "2ep"}
    if isinstance(start, OwnLoss):
        del arguments["loss"]
    return pl.fit(start, data, **(arguments | changes))


def test_forks_in_turn_recompute_with_their_own_weights() -> None:
    start = next(s for e, s in fit(made(Checkpointed)) if e is Event.AFTER_LOAD)
    other = [(x + 1, y) for x, y in DATA]
    alone = [list(fit(start)), list(fit(start, other))]
    both = list(zip(fit(start), fit(start, other), strict=True))
    for index in (0, 1):
        sameness.assert_same_stream([pair[index] for pair in both], alone[index], "in turn")


@pytest.mark.parametrize("make", [Checkpointed, OwnLoss])
def test_predicting_in_a_callback_changes_nothing(make: Any) -> None:
    def predicts(event: Event, state: pl.State) -> None:
        if event in (Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD):
            forward = pl.Task(forward=lambda model, batch: model(batch if make is OwnLoss else batch[0]))
            pl.run(pl.predict(state, DATA[:1], task=pl.Task(forward=forward.forward, loss=lambda o, b: o.mean())))

    sameness.assert_same_stream(list(fit(made(make), callbacks=[predicts])), list(fit(made(make))), "predicting")


def test_checkpointing_with_batchnorm_keeps_law_2() -> None:
    pl.run(fit(made(Checkpointed), strict=True))


def test_a_loss_of_the_modules_own_may_write_buffers() -> None:
    assert float(pl.run(fit(made(OwnLoss))).buffers["calls"]) == 8


def test_forks_in_threads_are_what_they_are_alone() -> None:
    start = next(s for e, s in fit(made(Checkpointed)) if e is Event.AFTER_LOAD)
    wanted = pl.run(fit(start, max_duration="10ep"))
    before = torch.get_rng_state()
    found: list[pl.State] = []
    threads = [threading.Thread(target=lambda: found.append(pl.run(fit(start, max_duration="10ep")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for state in found:
        sameness.assert_same(state.replace(model=wanted.model), wanted, "in a thread")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_reentrant_checkpoint_is_refused() -> None:
    with pytest.raises(pl.ModelError, match="use_reentrant=False"):
        pl.run(fit(made(lambda: Checkpointed(reentrant=True))))


def test_a_loss_that_holds_on_to_the_module_is_refused() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(pl.ModelError, match=r"shape \(3, 6\).*state\.params"):
        pl.run(fit(model, loss=lambda outputs, targets: cross_entropy(outputs, targets) + model.weight.square().sum()))
    teacher = nn.Linear(6, 3).requires_grad_(False)
    task = pl.Task(
        forward=lambda module, batch: (module(batch[0]), teacher(batch[0])),
        loss=lambda outputs, batch: (outputs[0] - outputs[1]).square().mean(),
    )
    pl.run(fit(model, loss=None, task=task))


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(pl.ModelError, match="parameter 'weight' has a hook"):
        fit(model)


def test_autocast_around_the_loop_changes_nothing() -> None:
    wanted = list(fit(made(Checkpointed), evaluators=DATA))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sameness.assert_same_stream(list(fit(made(Checkpointed), evaluators=DATA)), wanted, "inside autocast")


def test_another_model_outside_init_is_refused() -> None:
    swap = pl.algorithm(Event.BATCH_START, name="swap")(lambda state: state.with_module(state.module()))
    with pytest.raises(pl.AlgorithmStructureError, match="algorithm 'swap' at BATCH_START changed model"):
        pl.run(fit(nn.Linear(6, 3), algorithms=[swap]))


def test_the_gradient_inside_the_gradient_is_refused() -> None:
    def again(state: pl.State, stages: Any) -> pl.State:
        gradient: pl.State = stages.gradients(state)
        return gradient

    with pytest.raises(pl.ArgumentError, match=r"stages\.gradients was called at AFTER_BACKWARD"):
        pl.run(fit(nn.Linear(6, 3), algorithms=[pl.algorithm(Event.AFTER_BACKWARD)(again)]))


def test_an_evaluator_called_train_does_not_mix_with_training() -> None:
    logger = pl.loggers.InMemoryLogger()
    pl.run(fit(nn.Linear(6, 3), evaluators={"train": DATA}, loggers=[logger]))
    assert len(logger.series("train/loss")[0]) == 8
    assert len(logger.series("eval/train/loss")[0]) == 2
