"""``fit(train_metrics=)``: of the outputs that the step has computed, over the epoch so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import record
from pure_loop.loggers import InMemoryLogger
from pure_loop.metrics import accuracy, confusion_matrix, loss, mean
from tests.support.runs import equal, mlp, points, stream, train
from tests.support.worlds import pool

METRICS = [accuracy(), confusion_matrix(), loss("mean_loss"), mean(lambda outputs, batch: outputs.sum(dim=1), "total")]


def ragged() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches of 5, 3 and 4 samples, of which some targets do not count."""
    data = [(x[:size], y[:size].clone()) for (x, y), size in zip(points(), (5, 3, 4), strict=True)]
    data[0][1][:2] = -100
    return data


def by_hand(states: list[pl.State], data: Any) -> dict[str, torch.Tensor]:
    """The metrics of the epoch of these States, at the start of its batches, from a forward of each whole batch."""
    outputs = torch.cat([state.module()(x).detach() for state, (x, _) in zip(states, data, strict=False)])
    targets = torch.cat([y for _, (_, y) in zip(states, data, strict=False)])
    counted = targets != -100
    right, kept = outputs[counted].argmax(dim=1), targets[counted]
    matrix = torch.zeros(3, 3, dtype=torch.int64).index_put((kept, right), torch.tensor(1), accumulate=True)
    return {
        "accuracy": (right == kept).float().mean(),
        "confusion_matrix": matrix,
        "mean_loss": functional.cross_entropy(outputs, targets),
        "total": outputs.sum(dim=1).mean(),
    }


@given(st.one_of(st.none(), st.integers(1, 6)))
def test_they_are_those_of_the_epoch_so_far_however_batches_are_split(size: int | None) -> None:
    data, started, checked = ragged(), [], 0
    for event, state in stream(mlp(), data, train_metrics=METRICS, microbatch_size=size):
        if event is Event.EPOCH_START:
            started = []
        if event is Event.BATCH_START:
            started.append(state)
        if event is Event.BATCH_END:
            torch.testing.assert_close(dict(state.metrics["train"]), by_hand(started, data))
            checked += 1
    assert checked == 6


def test_of_a_loss_with_parts_they_have_the_total() -> None:
    def parts(outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        entropy = functional.cross_entropy(outputs, targets)
        return {"total": 2 * entropy, "entropy": entropy}

    for event, state in stream(mlp(), points(), train_metrics=[loss("mean_loss")], loss=parts, batches_per_epoch=1):
        if event is Event.BATCH_END:
            torch.testing.assert_close(state.metrics["train"]["mean_loss"], state.loss["total"])


def test_training_is_bitwise_the_same_and_no_forward_runs_twice() -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Counted.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    model = Counted(4, 3)
    found = []
    for metrics in (None, METRICS):
        Counted.calls = 0
        found.append(train(model, ragged(), train_metrics=metrics, strict=False, microbatch_size=2))
        assert Counted.calls == 14
    equal(found[0].params, found[1].params)
    assert "train" not in found[0].metrics
    algorithms = [pl.algorithms.sam(), pl.algorithms.ema(half_life="2ba")]
    equal(*(train(model, ragged(), algorithms, train_metrics=m, strict=False).params for m in (None, METRICS)))


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_resumed_in_the_middle_of_an_epoch_they_are_bitwise_the_same(batches: int, tmp_path: Any) -> None:
    options: dict[str, Any] = {"train_metrics": METRICS, "microbatch_size": 2}
    whole = [dict(s.metrics["train"]) for event, s in stream(mlp(), ragged(), **options) if event is Event.BATCH_END]
    for event, state in stream(mlp(), ragged(), **options):
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == batches:
            pl.save(state, tmp_path / "state")
            break
    state = pl.load(tmp_path / "state", model=mlp())
    rest = [dict(s.metrics["train"]) for event, s in stream(state, ragged(), **options) if event is Event.BATCH_END]
    assert len(rest) == 6 - batches
    for resumed, value in zip(rest, whole[batches:], strict=True):
        equal(resumed, value)
    # Another metric, which the State knows nothing of, begins with the rest of the epoch.
    others = train(state, ragged(), train_metrics=[accuracy("other")])
    assert list(others.metrics["train"]) == ["other"]


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_compiled_steps_measure_the_same() -> None:
    options: dict[str, Any] = {"train_metrics": METRICS, "microbatch_size": 2, "strict": False}
    watch = {Event.EPOCH_END}
    plain, compiled = (
        [s.metrics["train"] for _, s in stream(mlp(), points(4), watch=watch, **options, **more)]
        for more in ({}, {"compile": True, "steps_per_call": 2})
    )
    assert len(plain) == 2
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(dict(one), dict(other))
    with record() as compilations:
        train(mlp(), points(3), train_metrics=[accuracy(), loss("mean_loss")], compile=True, watch=watch, strict=False)
    assert len(compilations) == 2  # that of the first batch, and that of all others


@pytest.mark.parametrize("size", [None, 1])
def test_ranks_have_the_metrics_of_all_of_the_data(size: int | None) -> None:
    data = ragged()
    data[1] = tuple(tensor[:1] for tensor in data[1])  # rank 1 has no sample of it
    settings = {"train_metrics": METRICS, "microbatch_size": size}

    def program(rank: int) -> Any:
        states = [s for event, s in stream(mlp(), data, parallel="replicate", **settings) if event is Event.BATCH_END]
        return [dict(s.metrics["train"]) for s in states], states[-1].algorithm_state["train_metrics"]

    alone = [dict(s.metrics["train"]) for event, s in stream(mlp(), data, **settings) if event is Event.BATCH_END]
    (first, memory), (second, others) = pool().run(program)
    for mine, theirs, expected in zip(first, second, alone, strict=True):
        equal(mine, theirs)
        torch.testing.assert_close(mine, expected)
    equal(memory, others)  # a checkpoint is that of rank 0


def test_loggers_are_given_them_at_each_batch() -> None:
    logger = InMemoryLogger()
    states = [
        state
        for event, state in stream(mlp(), ragged(), train_metrics=[*METRICS, loss()], loggers=[logger])
        if event is Event.BATCH_END
    ]
    for name in ("accuracy", "mean_loss", "epoch/loss"):
        key = name.removeprefix("epoch/")
        assert logger.series(f"train/{name}")[1] == [float(state.metrics["train"][key]) for state in states]
    assert logger.series("train/loss")[1] == [float(state.loss) for state in states]
    assert len(logger.tables["train/confusion_matrix"]) == 6


def test_what_can_not_be_measured_is_refused() -> None:
    for value, error, text in (
        ("accuracy", TypeError, "train_metrics: 'accuracy' in metrics is no metric"),
        ([accuracy], TypeError, "is no metric"),
        ([accuracy(), accuracy()], ValueError, "train_metrics has two metrics of one name"),
    ):
        with pytest.raises(error, match=text):
            train(mlp(), points(), train_metrics=value)
    with pytest.raises(pl.ArgumentError, match="the label 'train' of an evaluator is that of train_metrics="):
        train(mlp(), points(), train_metrics=accuracy(), evaluators={"train": points()})
    mine = pl.Algorithm("train_metrics", {Event.BATCH_END: lambda state: state})
    with pytest.raises(pl.ArgumentError, match="two algorithms"):
        train(mlp(), points(), [mine], train_metrics=accuracy())
    with pytest.raises(pl.DataError, match="confusion_matrix") as caught:
        train(mlp(), points(), train_metrics=confusion_matrix(7))
    assert any("train_metrics" in note for note in caught.value.__notes__)
