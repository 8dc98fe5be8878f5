"""``fit(batches_per_step=)``: a step accumulates gradients over several batches of the dataloader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.errors import ArgumentError, DataError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import Plan, expected
from pure_loop.state import POSITIONS
from pure_loop.testing.case import Case
from pure_loop.testing.strategies import plans
from tests.support.models import batches, plain
from tests.support.runs import equal, stream
from tests.support.tiers import examples
from tests.support.worlds import pool

A = pl.algorithms


@st.composite
def grouped_plans(draw: st.DrawFn) -> Plan:
    plan = draw(plans(orders=["current", "current", "2021"], stops=True))
    size = draw(st.integers(2, 4))
    cut, steps = plan.batches_per_epoch, math.ceil(len(plan.batches) / size)
    cut = min(cut, steps) if cut and plan.sized else cut
    return attrs.evolve(plan, batches_per_step=size, batches_per_epoch=cut)


@examples(50, 600)
@given(grouped_plans())
def test_the_events_are_those_of_a_plan(plan: Plan) -> None:
    assert [event for event, _ in Case(plan=plan).run()] == expected(plan)


def test_the_plan_says_what_a_step_is() -> None:
    events = expected(Plan(batches=(4, 1, 3), max_duration="1ep", batches_per_step=2, microbatch_size=2))
    assert events.count(Event.AFTER_DATALOADER) == events.count(Event.BATCH_END) == 2
    first, second = (i for i, event in enumerate(events) if event is Event.BATCH_END)
    assert events[:first].count(Event.BEFORE_FORWARD) == 2 + 1
    assert events[first:second].count(Event.BEFORE_FORWARD) == 2
    with pytest.raises(ArgumentError, match="length of 2"):
        Plan(batches=(4, 1, 3), max_duration="1ep", batches_per_step=2, batches_per_epoch=3)


def whole_numbers(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randint(-4, 5, (n, 3), generator=g).double(), torch.randint(-4, 5, (n, 2), generator=g).double())
            for n in sizes]  # fmt: skip


def whole_model() -> nn.Module:
    layer = nn.Linear(3, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1, -2, 3], [0, 2, -1]]))
        layer.bias.copy_(torch.tensor([1, -1]))
    return layer


def gradients(data: Any, **options: Any) -> list[Any]:
    settings = {"loss": functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.0), "max_duration": "1ep", **options}
    return [
        (state.grads, state.loss, state.timestamp.sample)
        for event, state in stream(whole_model(), data, **settings)
        if event is Event.BATCH_END
    ]


def differ_by(data: Any, per_step: int, size: int | None, compare: Any) -> None:
    groups = [data[start : start + per_step] for start in range(0, len(data), per_step)]
    joined = [tuple(map(torch.cat, zip(*group, strict=True))) for group in groups]
    result, wanted = gradients(data, batches_per_step=per_step, microbatch_size=size), gradients(joined)
    assert len(result) == len(wanted)
    for (grads, loss, samples), (right, right_loss, counted) in zip(result, wanted, strict=True):
        compare({**grads, "loss": loss}, {**right, "loss": right_loss})
        assert samples == counted


# Batches of a step, by their number: their samples, and those of all of them, are powers of 2.
DYADIC = {
    1: [(1,), (4,), (8,)],
    2: [(1, 1), (2, 2), (4, 4)],
    3: [(1, 1, 2), (4, 2, 2), (2, 4, 2)],
    4: [(1, 2, 1, 4), (2, 2, 2, 2)],
}


@examples(30, 400)
@given(st.data(), st.integers(1, 4), st.sampled_from([None, 1, 2, 4]))
def test_gradients_are_bitwise_those_of_the_batches_as_one(
    data: st.DataObject, per_step: int, size: int | None
) -> None:
    steps = data.draw(st.lists(st.sampled_from(DYADIC[per_step]), max_size=2))
    steps.append(data.draw(st.sampled_from(DYADIC[data.draw(st.integers(1, per_step))])))
    differ_by(whole_numbers([number for step in steps for number in step]), per_step, size, equal)


@examples(20, 400)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 4)))
def test_gradients_of_ragged_batches_are_those_of_the_batches_as_one(
    sizes: list[int], per_step: int, size: int | None
) -> None:
    def close(one: Any, other: Any) -> None:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    differ_by(whole_numbers(sizes), per_step, size, close)


def test_targets_that_do_not_count_weigh_nothing_in_the_whole_step() -> None:
    data = batches((5, 3, 4), seed=0)
    for (_, targets), ignored in zip(data, (4, 0, 1), strict=True):
        targets[:ignored] = -100
    joined = [tuple(map(torch.cat, zip(*data, strict=True)))]
    options: dict[str, Any] = {"max_duration": "1ba", "watch": {Event.BATCH_END}, "strict": False}
    torch.manual_seed(0)
    model = plain().double()
    grads = [
        next(state.grads for _, state in stream(model, doubles(part), **options, **more))
        for part, more in ((data, {"batches_per_step": 3, "microbatch_size": 2}), (joined, {}))
    ]
    torch.testing.assert_close(*map(dict, grads), rtol=1e-12, atol=1e-14)


def doubles(data: Any) -> Any:
    return [(inputs.double(), targets) for inputs, targets in data]


def test_batches_of_other_shapes_are_accumulated() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x.mean(dim=1)

    data = [(torch.full((n, length), float(length)), torch.zeros(n)) for n, length in ((2, 3), (4, 1), (1, 5))]
    shapes = [
        tuple(state.microbatch[0].shape)
        for event, state in stream(Mean(), data, loss=functional.mse_loss, batches_per_step=3, microbatch_size=3,
                                   max_duration="1ep")
        if event is Event.BEFORE_FORWARD
    ]  # fmt: skip
    assert shapes == [(2, 3), (3, 1), (1, 1), (1, 5)]


class Endless:
    """Passes of five batches, without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches((4, 3, 2, 4, 3), seed=0))


def samples() -> TensorDataset:
    (inputs, targets), *_ = batches((20,), seed=0)
    return TensorDataset(inputs, targets)


LOADERS: dict[str, Any] = {
    "list": (lambda: batches((4, 3, 2, 4, 3), seed=0), {"max_duration": "2ep"}),
    "shuffled": (lambda: DataLoader(samples(), batch_size=4, shuffle=True), {"max_duration": "2ep"}),
    "cut": (lambda: DataLoader(samples(), batch_size=3, shuffle=True), {"max_duration": "2ep", "batches_per_epoch": 2}),
    "endless": (Endless, {"max_duration": "7ba", "batches_per_epoch": 2}),
    "iterator": (lambda: iter(batches((4, 3, 2, 4, 3, 1, 2), seed=0)), {"max_duration": "3ba", "batches_per_epoch": 2}),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_training_resumes_from_every_boundary(loader: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 3))
    made, options = LOADERS[loader]
    options = {"batches_per_step": 2, "microbatch_size": 3, "strict": False, **options}
    kept = [state for _, state in stream(model, made(), [A.ema(half_life="2ba")], **options)]
    boundaries = [state for state in kept if state.event in POSITIONS and state.event is not Event.FIT_END]
    for state in boundaries:
        rest = pl.run(stream(state, made(), [A.ema(half_life="2ba")], **options))
        equal(rest.params, kept[-1].params)
        equal(rest.algorithm_state, kept[-1].algorithm_state)
        assert rest.timestamp.sample == kept[-1].timestamp.sample
    if loader == "endless":
        # A pass of 5 batches is 3 steps, and an epoch 2 of them, or what is left of a pass.
        ends = [state.timestamp for state in kept if state.event is Event.BATCH_END]
        assert [t.sample - b for t, b in zip(ends, [0, *(t.sample for t in ends)], strict=False)] == [
            7,
            6,
            3,
            7,
            6,
            3,
            7,
        ]


def test_lengths_count_steps() -> None:
    data = batches((4, 3, 2, 4, 3), seed=0)
    pairs = list(stream(plain(), data, batches_per_step=2, max_duration="2ep"))
    assert {state.timestamp.batches_per_epoch for event, state in pairs if event is Event.BATCH_END} == {3}
    assert pairs[-1][1].timestamp.batch == 6
    assert [type(state.batch) for event, state in pairs if event is Event.BATCH_START] == [pl.Batches] * 6
    assert [len(state.batch) for event, state in pairs if event is Event.BATCH_START] == [2, 2, 1] * 2
    assert all(type(state.batch) is tuple for event, state in stream(plain(), data) if event is Event.BATCH_START)


def test_a_length_that_is_too_small_is_an_error() -> None:
    class Short:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            return iter(batches((2, 2, 2, 2), seed=0))

    ended: list[pl.State] = []
    with pytest.raises(DataError, match="length of 3, and gave batch 4"):
        ended.extend(s for event, s in stream(plain(), Short(), batches_per_step=2) if event is Event.BATCH_END)
    assert [state.timestamp.sample for state in ended] == [4, 6]


def test_algorithms_and_callbacks_take_the_batches_of_a_step() -> None:
    @pl.algorithm(Event.AFTER_DATALOADER)
    def doubled(state: pl.State) -> pl.State:
        return state.replace(batch=state.batch.map(lambda batch: (2 * batch[0], batch[1])))

    logger, data = InMemoryLogger(), batches((4, 3, 2), seed=0)
    torch.manual_seed(0)
    model = plain()
    algorithms = [A.label_smoothing(0.1), A.sam(), A.gradient_clipping("norm", 1.0)]
    callbacks = [
        pl.callbacks.ActivationMonitor(interval="1ba"),
        pl.callbacks.SpeedMonitor(window=1, flops=lambda batch: 10.0 * len(batch[0])),
    ]
    options: dict[str, Any] = {"batches_per_step": 2, "loggers": [logger], "train_metrics": [pl.metrics.accuracy()]}
    one = pl.run(stream(model, data, [doubled, *algorithms], callbacks=callbacks, **options))
    other = pl.run(stream(model, [(2 * x, y) for x, y in data], algorithms, batches_per_step=2))
    equal(one.params, other.params)
    assert any(name.startswith("activations/") for name in logger.metrics)


def test_the_microbatch_size_is_found_for_batches_of_the_dataloader() -> None:
    def refuse(module: nn.Module, inputs: Any) -> None:
        if len(inputs[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    layer = nn.Linear(4, 3)
    data, options = batches((2, 3, 8, 1), seed=0), {"batches_per_step": 2}
    by_hand = [pl.run(stream(layer, data, microbatch_size=None, max_duration="1ba", **options))]
    by_hand += [pl.run(stream(by_hand[0], data, microbatch_size=2, max_duration="1ep", **options))]
    layer.register_forward_pre_hook(refuse)
    auto = pl.run(stream(layer, data, microbatch_size="auto", max_duration="1ep", **options))
    assert auto.algorithm_state["microbatch_size"] == 2
    equal(auto.params, by_hand[1].params)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_compiled_steps_accumulate_the_same() -> None:
    torch.manual_seed(0)
    model = plain()
    options: dict[str, Any] = {"batches_per_step": 2, "watch": {Event.EPOCH_END}, "strict": False}
    plainly, compiled = (
        pl.run(stream(model, batches((4, 3, 4, 3, 2), seed=0), **options, **more))
        for more in ({}, {"compile": True, "steps_per_call": 2})
    )
    torch.testing.assert_close(dict(compiled.params), dict(plainly.params))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "data"), [("replicate", "split"), ("replicate", "own"), ("shard", "split")])
@pytest.mark.parametrize("size", [None, 2])
def test_ranks_accumulate_over_their_parts(kind: Any, data: Any, size: int | None) -> None:
    sizes = (5, 1, 4, 1, 1)  # of some rank 1 has no sample
    loaded = doubles(batches(sizes, seed=0))

    def program(rank: int) -> Any:
        parallel = pl.distributed.Parallel(kind=kind, data=data)
        torch.manual_seed(0)
        mine = [tuple(tensor[rank::2] for tensor in batch) for batch in loaded if len(batch[0]) > 1]
        pairs = list(stream(plain().double(), loaded if data == "split" else mine, batches_per_step=2,
                            microbatch_size=size, parallel=parallel, strict=False))  # fmt: skip
        last = pairs[-1][1]
        whole = {name: full_tensor(tensor) for name, tensor in last.params.items()}
        return [event for event, _ in pairs], whole, last.timestamp

    (events, params, t), (others, other, _) = pool(kind=kind).run(program)
    assert events == others
    equal(params, other)
    torch.manual_seed(0)
    alone_on = loaded if data == "split" else [batch for batch in loaded if len(batch[0]) > 1]
    alone = pl.run(stream(plain().double(), alone_on, batches_per_step=2, strict=False))
    assert t.sample == alone.timestamp.sample
    torch.testing.assert_close(params, dict(alone.params), rtol=1e-10, atol=1e-12)


def test_what_can_not_be_done_is_refused_at_the_call() -> None:
    with pytest.raises(
        ArgumentError, match=r"batches_per_epoch=3: train_dataloader has 2 batches, by batches_per_step=2"
    ):
        stream(plain(), batches((2, 2, 2), seed=0), batches_per_step=2, batches_per_epoch=3)
