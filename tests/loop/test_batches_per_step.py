"""``fit(batches_per_step=)``: a step accumulates gradients over several batches (its events: ``tests/laws``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, DataError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import Plan, expected
from tests.support.problem import fit, mlp, noise, points, run
from tests.support.streams import assert_same
from tests.support.tiers import examples

A = pl.algorithms


def test_the_plan_says_what_a_step_is() -> None:
    events = expected(Plan(batches=(4, 1, 3), max_duration="1ep", batches_per_step=2, microbatch_size=2))
    forwards, ends = (events.count(event) for event in (Event.BEFORE_FORWARD, Event.BATCH_END))
    assert (forwards, ends, events.count(Event.AFTER_DATALOADER)) == (2 + 1 + 2, 2, 2)
    with pytest.raises(ArgumentError, match="length of 2"):
        Plan(batches=(4, 1, 3), max_duration="1ep", batches_per_step=2, batches_per_epoch=3)


def whole_numbers(sizes: list[int]) -> list[Any]:
    g = noise()
    return [tuple(torch.randint(-4, 5, (n, k), generator=g).double() for k in (3, 2)) for n in sizes]


def whole_model() -> nn.Module:
    layer = nn.Linear(3, 2).double()
    layer.weight.data.copy_(torch.tensor([[1, -2, 3], [0, 2, -1]]))
    layer.bias.data.copy_(torch.tensor([1, -1]))
    return layer


def gradients(model: Any, data: Any, **options: Any) -> list[dict[str, Any]]:
    """Of each step, with its loss and the samples so far."""
    settings = {"optimizer": pl.optim.sgd(lr=0.0), "max_duration": "1ep", **options}
    return [
        {**state.grads, "loss": state.loss, "sample": state.timestamp.sample}
        for event, state in fit(model, data, **settings)
        if event is Event.BATCH_END
    ]


def joined(batches: list[Any], per_step: int) -> list[Any]:
    groups = [batches[start : start + per_step] for start in range(0, len(batches), per_step)]
    return [tuple(map(torch.cat, zip(*group, strict=True))) for group in groups]


# Batches of a step, by their number: their samples, and those of all of them, are powers of 2.
DYADIC = {
    1: [(1,), (4,), (8,)],
    2: [(1, 1), (2, 2), (4, 4)],
    3: [(1, 1, 2), (4, 2, 2), (2, 4, 2)],
    4: [(1, 2, 1, 4), (2, 2, 2, 2)],
}


@examples(15, 400)
@given(st.data(), st.integers(1, 4), st.one_of(st.none(), st.sampled_from([1, 2, 3, 4])), st.booleans())
def test_gradients_are_those_of_one_batch(data: st.DataObject, per_step: int, size: int | None, dyadic: bool) -> None:
    """Bitwise where every share is a power of 2."""
    if dyadic:
        size = 2 if size == 3 else size
        steps = data.draw(st.lists(st.sampled_from(DYADIC[per_step]), max_size=2))
        steps.append(data.draw(st.sampled_from(DYADIC[data.draw(st.integers(1, per_step))])))
        sizes = [number for step in steps for number in step]
    else:
        sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=7))
    batches, accuracy, mse = whole_numbers(sizes), 0.0 if dyadic else 1e-12, functional.mse_loss
    found = gradients(whole_model(), batches, loss=mse, batches_per_step=per_step, microbatch_size=size)
    wanted = gradients(whole_model(), joined(batches, per_step), loss=mse)
    torch.testing.assert_close(found, wanted, rtol=accuracy, atol=accuracy)


def doubles(data: Any) -> Any:
    return [(inputs.double(), targets) for inputs, targets in data]


def test_targets_that_do_not_count_weigh_nothing_and_batches_of_other_shapes_are_accumulated() -> None:
    data = doubles(points(size=(5, 3, 4)))
    for (_, targets), ignored in zip(data, (4, 0, 1), strict=True):
        targets[:ignored] = -100
    model = mlp().double()
    found = gradients(model, data, batches_per_step=3, microbatch_size=2)
    torch.testing.assert_close(found, gradients(model, joined(data, 3)), rtol=1e-12, atol=1e-14)

    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mean(dim=1, keepdim=True))

    data = [(torch.ones(n, length), torch.zeros(n, 1)) for n, length in ((2, 3), (4, 1), (1, 5))]
    options = {"loss": functional.mse_loss, "batches_per_step": 3, "microbatch_size": 3, "max_duration": "1ep"}
    stream = fit(Mean(1, 1), data, **options)
    shapes = [tuple(state.microbatch[0].shape) for event, state in stream if event is Event.BEFORE_FORWARD]
    assert shapes == [(2, 3), (3, 1), (1, 1), (1, 5)]


SIZES = (4, 3, 2, 4, 3)


class Endless:
    """Passes of five batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(points(size=SIZES))


def test_lengths_count_steps_and_batches_come_together() -> None:
    pairs = list(fit(data=points(size=SIZES), batches_per_step=2))
    assert {state.timestamp.batches_per_epoch for event, state in pairs if event is Event.BATCH_END} == {3}
    begun = [state.batch for event, state in pairs if event is Event.BATCH_START]
    assert [(type(batch), len(batch)) for batch in begun] == [(pl.Batches, size) for size in (2, 2, 1) * 2]
    assert all(type(state.batch) is tuple for event, state in fit() if event is Event.BATCH_START)

    class Short(Endless):
        def __len__(self) -> int:
            return 3

    ended: list[pl.State] = []
    with pytest.raises(DataError, match="length of 3, and gave batch 4"):
        ended.extend(state for event, state in fit(data=Short(), batches_per_step=2) if event is Event.BATCH_END)
    assert [state.timestamp.sample for state in ended] == [7, 9]


def test_algorithms_and_callbacks_take_the_batches_of_a_step() -> None:
    @pl.algorithm(Event.AFTER_DATALOADER)
    def doubled(state: pl.State) -> pl.State:
        return state.replace(batch=state.batch.map(lambda batch: (2 * batch[0], batch[1])))

    logger, data = InMemoryLogger(), points(size=(4, 3, 2))
    algorithms = [A.label_smoothing(0.1), A.sam(), A.gradient_clipping("norm", 1.0)]
    speed = pl.callbacks.SpeedMonitor(window=1, flops=lambda batch: 10.0 * len(batch[0]))
    callbacks = [pl.callbacks.ActivationMonitor(interval="1ba"), speed]
    options: dict[str, Any] = {"loggers": [logger], "train_metrics": [pl.metrics.accuracy()], "callbacks": callbacks}
    one = run(data=data, algorithms=[doubled, *algorithms], batches_per_step=2, **options)
    other = run(data=[(2 * x, y) for x, y in data], algorithms=algorithms, batches_per_step=2)
    assert_same(dict(one.params), dict(other.params), "doubled by an algorithm or by hand")
    assert any(name.startswith("activations/") for name in logger.metrics)
