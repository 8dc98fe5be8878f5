"""A metric that keeps something outside of its accumulator is refused before training.

Its numbers would go from one evaluation to the next, and be lost where training resumes. Good ones write accumulators
in place, are numbers of Python, draw from the global generators, are NaN or no numbers, or differ by rounding alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch

import pure_loop as pl
from tests.support import problem


def fit(metric: pl.Metric) -> pl.State:
    evaluators = {"val": pl.Evaluator(problem.points(2), metrics=[metric])}
    return problem.run(evaluators=evaluators, max_duration="1ba", strict=None)


def metric(update: Callable[..., Any], init: Callable[[], Any] = lambda: torch.zeros(())) -> pl.Metric:
    return pl.Metric("own", init=init, update=update, compute=lambda accumulator: accumulator)


def counting(step: Callable[[Any, Any, int], Any], init: Callable[[], Any] = lambda: torch.zeros(())) -> pl.Metric:
    """One whose update is told how often it was called before."""
    numbers = count()
    return metric(lambda accumulator, outputs, batch: step(accumulator, outputs, next(numbers)), init)


def with_a_mean() -> pl.Metric:
    numbers = count()
    return pl.metrics.mean(lambda outputs, batch: torch.full((len(outputs),), float(next(numbers))), "own")


def rounded(dtype: torch.dtype) -> pl.Metric:
    """Twice the same sum, but for the last bit that the dtype has."""
    return counting(lambda _, outputs, number: torch.tensor(1 + number % 2 * torch.finfo(dtype).eps, dtype=dtype))


TOTAL, RANDOM, SEEN = torch.zeros(()), random.Random(0), []
BAD: dict[str, Callable[[], pl.Metric]] = {
    "a closure": lambda: counting(lambda accumulator, outputs, number: accumulator + number),
    "one accumulator": lambda: metric(lambda accumulator, outputs, batch: accumulator.add_(1), lambda: TOTAL),
    "a list": lambda: metric(lambda accumulator, outputs, batch: SEEN.append(outputs) or torch.cat(SEEN), lambda: None),
    "a generator": lambda: metric(lambda accumulator, outputs, batch: accumulator + RANDOM.random()),
    "a mean": with_a_mean,
}
GOOD: dict[str, Callable[[], pl.Metric]] = {
    "in place": lambda: metric(lambda accumulator, outputs, batch: accumulator.add_(1)),
    "numbers": lambda: metric(lambda accumulator, outputs, batch: accumulator + 1, lambda: 10**300),
    "draws": lambda: metric(lambda accumulator, outputs, batch: accumulator + torch.rand(()) + random.random()),
    "NaN": lambda: metric(lambda accumulator, outputs, batch: accumulator * float("nan")),
    "texts": lambda: pl.Metric("own", str, lambda accumulator, outputs, batch: "a text", len),
    "lists": lambda: metric(lambda accumulator, outputs, batch: [*accumulator, outputs], list),
    "half precision": lambda: rounded(torch.bfloat16),
    "single precision": lambda: rounded(torch.float32),
    "complex": lambda: metric(lambda accumulator, outputs, batch: accumulator + 1j),
}
WRITES = {
    "state.outputs": lambda accumulator, outputs, batch: accumulator + outputs.add_(1).sum(),
    "state.batch": lambda accumulator, outputs, batch: accumulator + batch[0].add_(1).sum(),
}


def test_a_metric_that_keeps_state_is_refused_before_training() -> None:
    says = r"evaluator 'val': the metric 'own' .* measured one batch twice.*let init\(\) return a new accumulator"
    for kind, make in BAD.items():
        with pytest.raises(pl.errors.ArgumentError, match=says):
            pytest.fail(f"{kind}: {fit(make())}")
    for kind, make in GOOD.items():
        assert "own" in fit(make()).metrics["val"], kind


def test_a_metric_that_writes_to_what_it_measures_is_refused_for_that() -> None:
    """It measures another batch the second time, and keeps nothing."""
    for field, update in WRITES.items():
        with pytest.raises(pl.errors.ImpurityError, match=rf"a metric changed {field}.* in place"):
            fit(metric(update))
