"""Numbers of algorithms as schedules: each step uses the value of its batch, compiled and resumed ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event, algorithms, schedules
from pure_loop.compile import record
from tests.support.models import batches, plain
from tests.support.streams import assert_same

DATA = batches((8,) * 6, 1)
FALLING = schedules.linear(0.5, 0.1, "1dur")

MADE: dict[str, Callable[[Any], pl.Algorithm]] = {
    "sam": lambda rho: algorithms.sam(rho=rho),
    "gradient_noise": lambda eta: algorithms.gradient_noise(eta=eta),
    "label_smoothing": lambda smoothing: algorithms.label_smoothing(smoothing),
    "clip_by_norm": lambda threshold: algorithms.gradient_clipping("norm", threshold),
    "clip_by_value": lambda threshold: algorithms.gradient_clipping("value", threshold),
    "clip_adaptively": lambda threshold: algorithms.gradient_clipping("adaptive", threshold),
}


MODEL = plain()  # of which each stream trains a copy


def trained(algorithm: Any, source: Any = None, **options: Any) -> pl.State:
    settings: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    settings |= {"algorithms": [algorithm], "watch": {Event.BATCH_END}} | options
    return pl.run(pl.fit(MODEL if source is None else source, DATA, **settings))


@pytest.mark.parametrize("name", MADE)
def test_each_batch_uses_its_own_value(name: str) -> None:
    # By hand: six runs of one batch, each with the number.
    state: Any = None
    for batch in range(len(DATA)):
        number = FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time(f"{len(DATA)}ba")))
        state = trained(MADE[name](number), state, max_duration=f"{batch + 1}ba")
    scheduled = trained(MADE[name](schedules.linear(0.5, 0.1, f"{len(DATA)}ba")))
    assert_same(scheduled.params, state.params, name)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("interpreted")
def test_one_graph_serves_all_values(name: str) -> None:
    with record() as compilations:
        compiled = trained(MADE[name](FALLING), compile=True)
    eager = trained(MADE[name](FALLING))
    torch.testing.assert_close(dict(compiled.params), dict(eager.params), rtol=1e-5, atol=1e-6)
    assert len(compilations) == 1


@pytest.mark.parametrize("name", MADE)
def test_a_value_out_of_range_is_refused_with_its_batch(name: str) -> None:
    algorithm = MADE[name](schedules.linear(0.5, -0.5, "1dur"))
    with pytest.raises(pl.errors.ArgumentError, match=r"must be .*got -?0\.\d*.* linear\(.*\) gave it for batch [34]"):
        trained(algorithm)


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"sam: rho must be .*got None.*<lambda> gave it"):
        trained(algorithms.sam(rho=lambda timestamp: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"sam: rho is the class linear; give a schedule"):
        algorithms.sam(rho=schedules.linear)  # type: ignore[arg-type]
    with pytest.raises(pl.errors.ArgumentTypeError, match="one argument"):
        algorithms.sam(rho=lambda: 0.5)  # type: ignore[arg-type, misc]


def test_numbers_of_other_kinds_are_taken() -> None:
    as_tensor = trained(algorithms.sam(rho=lambda timestamp: torch.tensor(0.5)))  # type: ignore[arg-type, return-value]
    assert_same(as_tensor.params, trained(algorithms.sam(rho=0.5)).params, "a tensor")


def test_resumed_in_the_middle() -> None:
    algorithm = algorithms.sam(rho=FALLING)
    whole = trained(algorithm)
    for event, state in pl.fit(
        MODEL,
        DATA,
        loss=cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        algorithms=[algorithm],
        watch={Event.BATCH_END},
    ):
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            break
    assert_same(trained(algorithm, state).params, whole.params, "resumed")


def test_its_repr_is_the_call() -> None:
    assert repr(algorithms.sam(rho=FALLING)) == (
        "sam(rho=linear(start=0.5, end=0.1, time='1dur'), epsilon=1e-12, interval=1, adaptive=False, gap=0.0)"
    )


def test_the_recorder_records_the_value_of_each_batch() -> None:
    logger = pl.loggers.InMemoryLogger()
    optimizer = pl.optim.adamw(lr=0.1, weight_decay=FALLING, betas=(schedules.linear(0.9, 0.5, "1dur"), 0.99))
    twice = [algorithms.sam(rho=FALLING), algorithms.gradient_clipping("norm", FALLING, name="clip")]
    trained(pl.compose(*twice), loggers=[logger], optimizer=optimizer)
    expected = [FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time("6ba"))) for batch in range(6)]
    assert logger.series("sam/rho") == ([1, 2, 3, 4, 5, 6], pytest.approx(expected))
    assert logger.series("clip/threshold")[1] == pytest.approx(expected)
    assert logger.series("train/weight_decay")[1] == pytest.approx(expected)
    assert logger.series("train/betas/0")[1][:2] == pytest.approx([0.9, 0.9 - 0.4 / 6])
    assert logger.hyperparameters["sam/rho"] == "linear(start=0.5, end=0.1, time='1dur')"
