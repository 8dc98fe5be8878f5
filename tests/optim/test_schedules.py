"""Weight decay, momentum and betas as schedules: each step is the step with the numbers of its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.optim import adam, adamw, lamb, lion, sgd
from pure_loop.schedules import linear
from tests.support.models import CLASSES, FEATURES, batches, plain
from tests.support.streams import assert_same

DATA = batches((8,) * 5, 1)
UP, DOWN = linear(0.0, 0.5, "5ba"), linear(0.9, 0.4, "5ba")
Numbers = Callable[[Any], Any]

# An optimizer, from what a schedule becomes: itself, or its number.
MADE: dict[str, Callable[[Numbers], pl.optim.Optimizer]] = {
    "sgd, decay": lambda at: sgd(0.1, weight_decay=at(UP)),
    "sgd, momentum from 0": lambda at: sgd(0.1, momentum=at(UP)),
    "sgd, both": lambda at: sgd(linear(0.1, 0.0, "5ba"), momentum=at(DOWN), weight_decay=at(UP), nesterov=True),
    "sgd, dampened": lambda at: sgd(0.1, momentum=at(DOWN), dampening=0.1),
    "adam": lambda at: adam(0.01, betas=(at(DOWN), 0.99), weight_decay=at(UP)),
    "adamw": lambda at: adamw(0.01, betas=(at(DOWN), at(DOWN)), weight_decay=at(UP), amsgrad=True),
    "lion": lambda at: lion(linear(0.01, 0.0, "5ba"), betas=(at(DOWN), at(DOWN)), weight_decay=at(UP)),
    "sgd, independent": lambda at: sgd(0.1, momentum=at(DOWN), weight_decay=at(UP), independent_decay=True),
    "adamw, independent": lambda at: adamw(0.01, weight_decay=at(UP), independent_decay=True),
    "lamb": lambda at: lamb(0.1, betas=(at(DOWN), at(DOWN)), weight_decay=at(UP)),
    "partition": lambda at: pl.optim.partition(
        {"weights": adamw(0.01, weight_decay=at(UP)), "biases": sgd(0.1, momentum=at(DOWN))},
        label=lambda name, tensor: "biases" if "bias" in name else "weights",
    ),
}
MODEL = plain()


class Deep(nn.Sequential):
    """So many tensors that the compiled step calls the optimizer's kernel on lists."""

    def __init__(self) -> None:
        layers = [module for _ in range(16) for module in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
        super().__init__(*layers, nn.Linear(FEATURES, CLASSES))


def trained(optimizer: pl.optim.Optimizer, model: Any = MODEL, **options: Any) -> pl.State:
    settings: dict[str, Any] = {"loss": cross_entropy, "max_duration": "5ba", "watch": {Event.BATCH_END}} | options
    return pl.run(pl.fit(model, DATA, optimizer=optimizer, **settings))


def by_hand(make: Callable[[Numbers], pl.optim.Optimizer]) -> pl.State:
    """Each batch with an optimizer of the numbers; its structure is that of the schedules."""
    scheduled = make(lambda schedule: schedule)
    state = pl.State.create(MODEL, seed=0)
    state = state.replace(opt_state=scheduled.init(state.params))
    for batch in range(len(DATA)):
        now = pl.Timestamp(batch=batch)
        # Where the momentum is 0, the optimizer of the number keeps no buffers: the smallest number does nothing else.
        numbers = make(lambda schedule, now=now: schedule(now) or 1e-30)  # type: ignore[misc]
        state = trained(numbers, state, max_duration=f"{batch + 1}ba")
    return state


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("donate", [True, False])
def test_each_step_has_the_numbers_of_its_batch(name: str, donate: bool) -> None:
    state = trained(MADE[name](lambda schedule: schedule), donate=donate)
    expected = by_hand(MADE[name])
    if name == "sgd, momentum from 0":  # by torch's kernel, or as operations of lists
        torch.testing.assert_close(dict(state.params), dict(expected.params), rtol=1e-6, atol=1e-7)
    else:
        assert_same(state.params, expected.params, name)
        assert_same(state.opt_state, expected.opt_state, name)


# A dampened optimizer changes the structure of its state in the first step.
@pytest.mark.parametrize("name", sorted({*MADE} - {"sgd, dampened"}))
@pytest.mark.usefixtures("interpreted")
def test_one_graph_serves_all_numbers(name: str) -> None:
    optimizer = MADE[name](lambda schedule: schedule)
    with record() as compilations:
        compiled = trained(optimizer, compile=True)
    eager = trained(optimizer)
    torch.testing.assert_close(dict(compiled.params), dict(eager.params), rtol=2e-5, atol=1e-6)
    assert len(compilations) == 1


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_kernels_on_lists(name: str) -> None:
    model, optimizer = Deep(), MADE[name](lambda schedule: schedule)
    with record() as compilations:
        compiled = trained(optimizer, model, compile=True)
    torch.testing.assert_close(dict(compiled.params), dict(trained(optimizer, model).params), rtol=2e-5, atol=1e-6)
    (compilation,) = compilations
    assert compilation.kernels == (f"{name} of 34 tensors",)


def test_the_scale_of_learning_rates_scales_no_other_number() -> None:
    state = pl.State.create(MODEL).replace(lr_scale=torch.tensor(0.5))
    scaled = trained(MADE["adamw"](lambda schedule: schedule), state)
    half = pl.optim.adamw(0.005, betas=(DOWN, DOWN), weight_decay=UP, amsgrad=True)
    assert_same(scaled.params, trained(half).params, "half the rate")


def test_a_schedule_of_ones_own_is_called_with_a_timestamp() -> None:
    def own(timestamp: pl.Timestamp) -> float:
        assert type(timestamp) is pl.Timestamp
        return 0.1

    state = pl.State.create(MODEL).replace(lr_scale=torch.tensor(0.5))
    assert trained(sgd(0.1, momentum=own, weight_decay=own), state).timestamp.batch == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda falling: sgd(0.1, momentum=falling),
            r"sgd: momentum must be .* and less than 1",
        ),
        (
            lambda falling: sgd(0.1, weight_decay=falling),
            r"sgd: weight_decay must be .* of at least 0",
        ),
        (
            lambda falling: adamw(betas=(falling, 0.9)),
            r"adamw: betas\[0\] must be .* and less than 1",
        ),
    ],
)
def test_a_number_out_of_range(make: Callable[[Any], pl.optim.Optimizer], message: str) -> None:
    with pytest.raises(pl.errors.ArgumentError, match=message + r", got -0\.125.* gave it for batch 2"):
        trained(make(linear(0.125, -0.125, "2ba")))


def test_bad_input_at_the_call() -> None:
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"adamw: betas must be two numbers"):
        adamw(betas=DOWN)  # type: ignore[arg-type]
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"sgd: momentum is the class linear"):
        sgd(0.1, momentum=linear)  # type: ignore[arg-type]
    with pytest.raises(pl.errors.ArgumentError, match=r"nesterov needs a momentum"):
        sgd(0.1, weight_decay=UP, nesterov=True)


def test_reprs_are_calls() -> None:
    assert repr(adamw(betas=(DOWN, 0.9))) == (
        "adamw(lr=0.001, betas=(linear(start=0.9, end=0.4, time='5ba'), 0.9), eps=1e-08, weight_decay=0.01, "
        "amsgrad=False, maximize=False, independent_decay=False)"
    )


def test_the_recorder_names_parts() -> None:
    logger = pl.loggers.InMemoryLogger()
    trained(MADE["partition"](lambda schedule: schedule), loggers=[logger])
    recorded: Mapping[str, Any] = {name: logger.series(name)[1] for name in logger.metrics}
    assert recorded["train/weight_decay/weights"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert recorded["train/momentum/biases"] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5])
