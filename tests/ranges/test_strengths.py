"""Numbers of algorithms as schedules: each step uses the value of its batch, compiled and resumed ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, algorithms, schedules
from pure_loop.compile import record
from pure_loop.errors import ArgumentError, ArgumentTypeError
from tests.support import problem
from tests.support.streams import assert_same

DATA = problem.points(4)
FALLING = schedules.linear(0.5, 0.1, "1dur")
MADE: dict[str, Callable[[Any], pl.Algorithm]] = {
    "sam": lambda rho: algorithms.sam(rho=rho),
    "gradient_noise": lambda eta: algorithms.gradient_noise(eta=eta),
    "clip_adaptively": lambda threshold: algorithms.gradient_clipping("adaptive", threshold),
}


def trained(algorithm: Any, start: Any = None, **options: Any) -> pl.State:
    options = {"max_duration": "1ep", "watch": {Event.BATCH_END}, "strict": None} | options
    return problem.run(start, DATA, algorithm, **options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", MADE)
def test_each_batch_uses_its_own_value_in_one_graph(name: str) -> None:
    """By hand: runs of one batch, each with the number; resumed in the middle; compiled."""
    states: list[Any] = [None]
    for batch in range(len(DATA)):
        number = FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time("4ba")))
        states.append(trained(MADE[name](number), states[-1], max_duration=f"{batch + 1}ba"))
    scheduled = MADE[name](schedules.linear(0.5, 0.1, "4ba"))
    for start in (None, states[3]):
        assert_same(trained(scheduled, start).params, states[-1].params, name)
    with record() as compilations:
        compiled = trained(MADE[name](FALLING), compile=True)
    problem.close(dict(compiled.params), dict(states[-1].params), 1e-5)
    assert len(compilations) == 1


def test_what_is_no_number_in_the_range_is_refused_with_its_batch_and_a_tensor_is_one() -> None:
    sam: Any = algorithms.sam
    for wrong, error, says in (
        (schedules.linear(0.5, -0.5, "1dur"), ArgumentError, r"must be .*got -?0\.\d*.* linear\(.*\) gave it for b"),
        (lambda timestamp: None, ArgumentTypeError, r"sam: rho must be .*got None.*<lambda> gave it"),
        (schedules.linear, ArgumentTypeError, r"sam: rho is the class linear; give a schedule"),
        (lambda: 0.5, ArgumentTypeError, "one argument"),
    ):
        with pytest.raises(error, match=says):
            trained(sam(rho=wrong))
    as_tensor = trained(sam(rho=lambda timestamp: torch.tensor(0.5)))
    assert_same(as_tensor.params, trained(sam(rho=0.5)).params, "a tensor")


def test_its_repr_is_the_call_and_the_recorder_records_the_value_of_each_batch() -> None:
    logger = pl.loggers.InMemoryLogger()
    optimizer = pl.optim.adamw(lr=0.1, weight_decay=FALLING, betas=(schedules.linear(0.9, 0.5, "1dur"), 0.99))
    twice = [algorithms.sam(rho=FALLING), algorithms.gradient_clipping("norm", FALLING, name="clip")]
    text = "linear(start=0.5, end=0.1, time='1dur')"
    assert repr(twice[0]) == f"sam(rho={text}, epsilon=1e-12, interval=1, adaptive=False, gap=0.0)"
    trained(pl.compose(*twice), loggers=[logger], optimizer=optimizer)
    expected = [FALLING(pl.Timestamp(batch=batch, max_duration=pl.Time("4ba"))) for batch in range(4)]
    for name in ("sam/rho", "clip/threshold", "train/weight_decay"):
        assert logger.series(name) == ([1, 2, 3, 4], pytest.approx(expected))
    assert logger.series("train/betas/0")[1][:2] == pytest.approx([0.9, 0.9 - 0.4 / 4])
    assert logger.hyperparameters["sam/rho"] == text
