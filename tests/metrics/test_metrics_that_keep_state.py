"""A metric that keeps something outside of its accumulator is refused before training.

Its numbers would go from one evaluation to the next, and be lost where training resumes. Tried: a variable of a
closure, an attribute of an object, one accumulator for all calls of ``init``, a list, a generator of its own; functions
that are passed to ``pl.metrics.mean``; as good ones accumulators that are written in place, numbers of Python, draws
from the global generators, NaN, accumulators without numbers, and sums that differ by their rounding alone, as those
of a device that adds in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

import pure_loop as pl
from tests.support.runs import cross_entropy, mlp, points


def fit(metric: pl.Metric) -> pl.State:
    evaluators = {"val": pl.Evaluator(points(2), metrics=[metric])}
    options: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ba"}
    return pl.run(pl.fit(mlp(), points(2), evaluators=evaluators, **options))


def metric(update: Callable[..., Any], init: Callable[[], Any] = lambda: torch.zeros(())) -> pl.Metric:
    return pl.Metric("own", init=init, update=update, compute=lambda accumulator: accumulator)


class Largest:
    """The largest output, to which it adds how many batches it was ever given."""

    def __init__(self) -> None:
        self.batches = 0

    def update(self, accumulator: Tensor, outputs: Tensor, batch: Any) -> Tensor:
        self.batches += 1
        return torch.maximum(accumulator, outputs.max() + self.batches)


def with_a_closure() -> pl.Metric:
    numbers = count()
    return metric(lambda accumulator, outputs, batch: accumulator + next(numbers))


def with_one_accumulator() -> pl.Metric:
    total = torch.zeros(())
    return metric(lambda accumulator, outputs, batch: accumulator.add_(1), lambda: total)


def with_a_list() -> pl.Metric:
    seen: list[Tensor] = []

    def update(accumulator: Any, outputs: Tensor, batch: Any) -> Any:
        seen.append(outputs)
        return torch.cat(seen)

    return metric(update, lambda: None)


def with_a_generator() -> pl.Metric:
    generator = random.Random(0)
    return metric(lambda accumulator, outputs, batch: accumulator + generator.random())


def with_a_mean() -> pl.Metric:
    numbers = count()
    return pl.metrics.mean(lambda outputs, batch: torch.full((len(outputs),), float(next(numbers))), "own")


def with_rounding(dtype: torch.dtype) -> pl.Metric:
    """Twice the same sum, but for the last bit that the dtype has."""
    last_bits = count()

    def update(accumulator: Tensor, outputs: Tensor, batch: Any) -> Tensor:
        return torch.tensor(1 + next(last_bits) % 2 * torch.finfo(dtype).eps, dtype=dtype)

    return metric(update)


BAD = {
    "closure": with_a_closure,
    "object": lambda: metric(Largest().update),
    "one accumulator": with_one_accumulator,
    "list": with_a_list,
    "generator": with_a_generator,
    "mean": with_a_mean,
}
GOOD = {
    "in place": lambda: metric(lambda accumulator, outputs, batch: accumulator.add_(1)),
    "numbers": lambda: metric(lambda accumulator, outputs, batch: accumulator + 1, lambda: 10**300),
    "draws": lambda: metric(lambda accumulator, outputs, batch: accumulator + torch.rand(()) + random.random()),
    "NaN": lambda: metric(lambda accumulator, outputs, batch: accumulator * float("nan")),
    "texts": lambda: metric(lambda accumulator, outputs, batch: "a text", lambda: ""),
    "lists": lambda: metric(lambda accumulator, outputs, batch: [*accumulator, outputs], list),
    "half precision": lambda: with_rounding(torch.bfloat16),
    "single precision": lambda: with_rounding(torch.float32),
    "complex": lambda: metric(lambda accumulator, outputs, batch: accumulator + 1j),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_metric_that_keeps_state_is_refused_before_training(kind: str) -> None:
    with pytest.raises(
        pl.ArgumentError, match=r"evaluator 'val': the metric 'own' .* measured one batch twice"
    ) as caught:
        fit(BAD[kind]())
    assert "let init() return a new accumulator" in str(caught.value)


@pytest.mark.parametrize("kind", GOOD)
def test_a_metric_that_keeps_nothing_is_not(kind: str) -> None:
    assert "own" in fit(GOOD[kind]()).metrics["val"]


WRITES: dict[str, Callable[..., Any]] = {
    "state.outputs": lambda accumulator, outputs, batch: accumulator + outputs.add_(1).sum(),
    "state.batch": lambda accumulator, outputs, batch: accumulator + batch[0].add_(1).sum(),
}


@pytest.mark.parametrize("field", WRITES)
def test_a_metric_that_writes_to_what_it_measures_is_refused_for_that(field: str) -> None:
    """It measures another batch the second time, and keeps nothing."""
    with pytest.raises(pl.ImpurityError, match=rf"a metric changed {field}.* in place"):
        fit(metric(WRITES[field]))
