"""Numbers of algorithms as schedules: each step uses the value of its batch, compiled and resumed ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, algorithms, schedules
from pure_loop.compile import record
from tests.support import problem
from tests.support.streams import assert_same

DATA = problem.points(6)
FALLING = schedules.linear(0.5, 0.1, "1dur")
MADE: dict[str, Callable[[Any], pl.Algorithm]] = {
    "sam": lambda rho: algorithms.sam(rho=rho),
    "gradient_noise": lambda eta: algorithms.gradient_noise(eta=eta),
    "label_smoothing": lambda smoothing: algorithms.label_smoothing(smoothing),
    "clip_by_norm": lambda threshold: algorithms.gradient_clipping("norm", threshold),
    "clip_by_value": lambda threshold: algorithms.gradient_clipping("value", threshold),
    "clip_adaptively": lambda threshold: algorithms.gradient_clipping("adaptive", threshold),
}


def trained(algorithm: Any, start: Any = None, **options: Any) -> pl.State:
    return problem.run(start, DATA, algorithm, **{"max_duration": "1ep", "watch": {Event.BATCH_END}} | options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", MADE)
def test_each_batch_uses_its_own_value_in_one_graph(name: str) -> None:
    """By hand: six runs of one batch, each with the number; resumed in the middle; compiled."""
    states: list[Any] = [None]
    for batch in range(len(DATA)):
        number = FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time("6ba")))
        states.append(trained(MADE[name](number), states[-1], max_duration=f"{batch + 1}ba"))
    scheduled = MADE[name](schedules.linear(0.5, 0.1, "6ba"))
    for start in (None, states[3]):
        assert_same(trained(scheduled, start).params, states[-1].params, name)
    with record() as compilations:
        compiled = trained(MADE[name](FALLING), compile=True, strict=None)
    problem.close(dict(compiled.params), dict(states[-1].params), 1e-5)
    assert len(compilations) == 1


@pytest.mark.parametrize("name", MADE)
def test_a_value_out_of_range_is_refused_with_its_batch(name: str) -> None:
    algorithm = MADE[name](schedules.linear(0.5, -0.5, "1dur"))
    with pytest.raises(pl.errors.ArgumentError, match=r"must be .*got -?0\.\d*.* linear\(.*\) gave it for batch [34]"):
        trained(algorithm)


def test_what_is_no_number_is_refused_and_a_tensor_is_one() -> None:
    sam: Any = algorithms.sam
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"sam: rho must be .*got None.*<lambda> gave it"):
        trained(sam(rho=lambda timestamp: None))
    with pytest.raises(pl.errors.ArgumentTypeError, match=r"sam: rho is the class linear; give a schedule"):
        sam(rho=schedules.linear)
    with pytest.raises(pl.errors.ArgumentTypeError, match="one argument"):
        sam(rho=lambda: 0.5)
    as_tensor = trained(sam(rho=lambda timestamp: torch.tensor(0.5)))
    assert_same(as_tensor.params, trained(sam(rho=0.5)).params, "a tensor")


def test_its_repr_is_the_call_and_the_recorder_records_the_value_of_each_batch() -> None:
    logger = pl.loggers.InMemoryLogger()
    optimizer = pl.optim.adamw(lr=0.1, weight_decay=FALLING, betas=(schedules.linear(0.9, 0.5, "1dur"), 0.99))
    twice = [algorithms.sam(rho=FALLING), algorithms.gradient_clipping("norm", FALLING, name="clip")]
    text = "linear(start=0.5, end=0.1, time='1dur')"
    assert repr(twice[0]) == f"sam(rho={text}, epsilon=1e-12, interval=1, adaptive=False, gap=0.0)"
    trained(pl.compose(*twice), loggers=[logger], optimizer=optimizer)
    expected = [FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time("6ba"))) for batch in range(6)]
    for name in ("sam/rho", "clip/threshold", "train/weight_decay"):
        assert logger.series(name) == ([1, 2, 3, 4, 5, 6], pytest.approx(expected))
    assert logger.series("train/betas/0")[1][:2] == pytest.approx([0.9, 0.9 - 0.4 / 6])
    assert logger.hyperparameters["sam/rho"] == text
