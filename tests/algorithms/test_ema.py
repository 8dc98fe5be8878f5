"""Moving averages of the weights, in real training loops, against the closed formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import averaged, ema, moving_average
from pure_loop.errors import ArgumentError
from pure_loop.testing import check_algorithm
from tests.support.runs import close, convnet, cross_entropy, equal, images, mlp, points, stream, train


def weights_after_each_batch(**options: Any) -> list[Any]:
    first = State.create(mlp()).params
    return [first] + [s.params for e, s in stream(mlp(), points(), **options) if e is Event.BATCH_END]


@pytest.mark.parametrize(
    ("average", "decay", "batches"),
    [
        (ema(smoothing=0.9), 0.9, 1),
        (ema(half_life="2ba"), 0.5**0.5, 1),
        (ema("10sp"), 0.5**0.5, 1),
        (ema(half_life="0.5dur"), 0.5 ** (1 / 3), 1),
        (ema(half_life="3ba", interval="2ba"), 0.5 ** (2 / 3), 2),
        (ema(smoothing=0.9, interval="10sp"), 0.9, 2),
        (ema(smoothing=0.9, interval="0.5dur"), 0.9, 3),
        (ema(half_life="4ba", interval="1ep"), 0.5 ** (3 / 4), 3),
        (ema(half_life="2ep"), 0.5**0.5, 3),
        (ema(half_life=2), 0.5**0.5, 3),
        (ema(smoothing=0.0), 0.0, 1),
    ],
    ids=str,
)
def test_the_average_is_the_closed_formula(average, decay, batches):
    options: dict[str, Any] = {"max_duration": "6ba"}
    weights = weights_after_each_batch(**options)[::batches]
    last = len(weights) - 1
    wanted = {
        name: decay**last * weights[0][name]
        + sum((1 - decay) * decay ** (last - t) * weights[t][name] for t in range(1, last + 1))
        for name in weights[0]
    }
    close(averaged(train(mlp(), points(), [average], **options)).params, wanted)


def test_a_half_life_in_a_fraction_of_epochs_is_updated_at_their_ends():
    average = ema(half_life="0.25dur", interval="0.25dur")
    ends = [s.params for e, s in stream(mlp(), points(), max_duration="4ep") if e is Event.EPOCH_END]
    wanted = State.create(mlp()).params
    for weights in ends:
        wanted = {name: (wanted[name] + weights[name]) / 2 for name in wanted}
    close(averaged(train(mlp(), points(), [average], max_duration="4ep")).params, wanted)
    close(averaged(train(mlp(), iter(points() * 4), [average], max_duration="4ep", batches_per_epoch=3)).params, wanted)


def test_a_half_life_in_a_fraction_of_epochs_goes_by_batches_where_their_length_is_known():
    by_batches = averaged(train(mlp(), points(), [ema(half_life="2ba")], max_duration="4ep")).params
    for half_life, interval in (("2ba", None), (f"{1 / 6!r}dur", None), (f"{1 / 6!r}dur", f"{1 / 12!r}dur")):
        close(
            averaged(train(mlp(), points(), [ema(half_life, interval=interval)], max_duration="4ep")).params, by_batches
        )


def test_half_life_halves_whatever_the_interval():
    """Of the first weights, half is left after a half life of updates of any length."""
    still, moved = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    for updates in (1, 2, 5):
        average: Any = still
        for _ in range(updates):
            average = moving_average(average, moved, 0.5 ** (1 / updates))
        torch.testing.assert_close(average["w"], torch.tensor([0.5]))


@pytest.mark.parametrize("average", [ema(half_life="2ba"), ema(smoothing=0.5, interval="1ep")], ids=str)
def test_the_weights_are_those_of_a_run_without_it(average):
    options = {"evaluators": images(1), "eval_interval": "1ba", "microbatch_size": 3}
    plain, with_average = (
        list(stream(convnet(), images(), **options)),
        list(stream(convnet(), images(), [average], **options)),
    )
    assert [event for event, _ in plain] == [event for event, _ in with_average]
    for (event, a), (_, b) in zip(plain, with_average, strict=True):
        if not event.is_eval:
            for field in ("params", "buffers", "opt_state", "grads", "loss"):
                equal(getattr(a, field), getattr(b, field))


def test_evaluation_and_prediction_use_the_average_and_training_does_not():
    average, data = ema(smoothing=0.6), images()
    evaluated, raw = [], State.create(convnet()).params
    for event, state in stream(convnet(), data, [average], evaluators={"val": images(2, seed=1)}, eval_interval="1ba"):
        if event is Event.EVAL_BATCH_START:
            equal(state.params, state.algorithm_state["ema"]["params"])
            assert any(not torch.equal(state.params[n], raw[n]) for n in raw)
            evaluated.append(event)
        if event is Event.BATCH_END:
            raw = state.params
        if event is Event.EVAL_AFTER_ALL:
            equal(state.params, raw)
    assert len(evaluated) == 12

    module = averaged(state).module().eval()
    with torch.no_grad():
        outputs = [module(x) for x, _ in images(2, seed=1)]
    loss = torch.stack([cross_entropy(o, y) for o, (_, y) in zip(outputs, images(2, seed=1), strict=True)]).mean()
    torch.testing.assert_close(state.metrics["val"]["loss"], loss)

    again = pl.run(
        pl.evaluate(state, {"val": images(2, seed=1)}, loss=cross_entropy, algorithms=[average], strict=True)
    )
    equal(again.metrics, state.metrics)
    equal(again.params, state.params)
    plain = pl.run(pl.evaluate(state, {"val": images(2, seed=1)}, loss=cross_entropy))
    assert plain.metrics["val"]["loss"] != state.metrics["val"]["loss"]

    predicted = pl.predict(state, images(2, seed=1), algorithms=[average], strict=True)
    found = [s.outputs for e, s in predicted if e is Event.PREDICT_BATCH_END]
    for output, wanted in zip(found, outputs, strict=True):
        torch.testing.assert_close(output, wanted)


def test_buffers_are_averaged_and_counts_are_not():
    buffers = [s.buffers for e, s in stream(convnet(), images()) if e is Event.BATCH_END]
    wanted = State.create(convnet()).buffers["1.running_mean"]
    for each in buffers:
        wanted = 0.9 * wanted + 0.1 * each["1.running_mean"]
    state = train(convnet(), images(), [ema(smoothing=0.9)])
    torch.testing.assert_close(averaged(state).buffers["1.running_mean"], wanted)
    assert averaged(state).buffers["1.num_batches_tracked"] == 6
    assert "1.num_batches_tracked" not in state.algorithm_state["ema"]["buffers"]


def test_half_precision_is_averaged_in_float32():
    model = mlp().to(torch.bfloat16)
    data = [(x.to(torch.bfloat16), y) for x, y in points()]
    state = train(model, data, [ema(smoothing=0.999)], optimizer=pl.optim.adamw(lr=0.1))
    assert {t.dtype for t in state.algorithm_state["ema"]["params"].values()} == {torch.float32}
    assert {t.dtype for t in averaged(state).params.values()} == {torch.bfloat16}
    before = State.create(model).params["0.weight"]
    assert not torch.equal(state.algorithm_state["ema"]["params"]["0.weight"], before.float())


def test_frozen_parameters_cost_no_memory():
    model = mlp()
    model[0].weight.requires_grad_(False)
    state = train(model, points(), [ema(half_life="2ba")])
    assert state.algorithm_state["ema"]["params"]["0.weight"] is state.params["0.weight"]


def test_two_averages():
    state = train(
        mlp(), points(), [ema(smoothing=0.5, name="fast"), ema(smoothing=0.99, name="slow")], evaluators=points(1)
    )
    slow = pl.run(pl.evaluate(averaged(state, "slow"), points(1), loss=cross_entropy))
    assert slow.metrics["eval"]["loss"] == state.metrics["eval"]["loss"]
    assert not torch.equal(averaged(state, "fast").params["0.weight"], averaged(state, "slow").params["0.weight"])


def test_training_resumes_from_the_average():
    average = ema(half_life="2ba")
    state = averaged(train(mlp(), points(), [average]))
    further = train(state, points(), [average], max_duration="3ep")
    assert further.timestamp.epoch == 3


def test_an_average_may_start_late_and_change_its_unit():
    late = train(train(mlp(), points()), points(), [ema(half_life="1ba")], max_duration="3ep")
    changed = train(late, points(), [ema(half_life="5sp")], max_duration="4ep")
    wanted, first = train(mlp(), points()).params, None
    for event, state in stream(mlp(), points(), max_duration="4ep"):
        if event is Event.BATCH_END and state.timestamp.batch > 6:
            wanted = {name: (wanted[name] + state.params[name]) / 2 for name in wanted}
            first = state.timestamp.batch if first is None else first
    assert first == 7
    close(averaged(changed).params, wanted)


def test_a_state_without_an_average_is_refused():
    state = train(mlp(), points())
    for broken in (mlp(), state, train(mlp(), points(), [ema(smoothing=0.9, name="other")])):
        with pytest.raises(ArgumentError, match="no average named 'ema'"):
            pl.run(pl.evaluate(broken, points(), loss=cross_entropy, algorithms=[ema(smoothing=0.9)]))
        with pytest.raises(ArgumentError, match="no average named 'ema'"):
            pl.run(pl.predict(broken, points(), algorithms=[ema(smoothing=0.9)]))


@pytest.mark.parametrize(
    ("average", "duration", "words"),
    [
        (ema(half_life="0.1dur"), "2ep", "go"),
        (ema(half_life="0.1dur"), "1h", "clock"),
        (ema(smoothing=0.9, interval="0.1dur"), "1h", "clock"),
    ],
)
def test_fractions_of_a_duration_that_cannot_be_counted_are_refused_before_training(average, duration, words):
    with pytest.raises(ArgumentError, match=words):
        train(mlp(), iter(points()), [average], max_duration=duration)


@pytest.mark.parametrize(("start", "first"), [("4ba", 4), ("0.5dur", 3), ("1ep", 3), (0, 0)])
def test_weights_before_the_start_are_left_out(start: Any, first: int) -> None:
    average: Any = None
    pairs = stream(mlp(), points(), [ema(smoothing=0.75, start=start)])
    for event, state in pairs:
        if event is Event.FIT_START:
            average = state.params
        if event is Event.BATCH_END:
            decay = 0.75 if state.timestamp.batch >= max(first, 1) else 0.0
            average = moving_average(average, state.params, decay)
    equal(state.algorithm_state["ema"]["params"], average)


def test_a_start_by_the_clock_is_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="goes by the clock"):
        ema(smoothing=0.9, start="10s")


@pytest.mark.parametrize("start", [None, "2ba"])
def test_the_average_follows_the_weights_at_first(start: Any) -> None:
    """``(1 + n) / (10 + n)`` is the most that stays, and less than the smoothing for 9 / (1 - smoothing) updates."""
    algorithm = ema(smoothing=0.3, start=start, warmup=True)
    average: Any = None
    for event, state in stream(mlp(), points(), [algorithm], max_duration="3ep"):
        if event is Event.FIT_START:
            average = state.params["0.weight"]
        if event is Event.BATCH_END:
            n = state.timestamp.batch - (2 if start else 1)
            decay = 0.0 if n < 0 else min(0.3, (1 + n) / (10 + n))
            average = decay * average + (1 - decay) * state.params["0.weight"]
            torch.testing.assert_close(state.algorithm_state["ema"]["params"]["0.weight"], average)
    assert state.algorithm_state["ema"]["updates"] == (8 if start else 9)


@pytest.mark.slow
def test_its_warmup_keeps_every_law() -> None:
    check_algorithm(lambda: ema(half_life="4ba", warmup=True), max_examples=4)


def test_an_average_in_memory_is_the_same() -> None:
    one, two = (train(convnet(), images(), [ema(half_life="2ba", offload=offload)]) for offload in (False, True))
    equal(one.algorithm_state, two.algorithm_state)


@pytest.mark.gpu
def test_an_average_beside_a_device() -> None:
    options: dict[str, Any] = {"device": "cuda", "strict": False, "evaluators": {"val": images(1)}}
    one, two = (
        train(convnet(), images(), [ema(half_life="4ba", interval="2ba", offload=offload)], **options)
        for offload in (False, True)
    )
    average = two.algorithm_state["ema"]["params"]
    assert {tensor.device.type for tensor in average.values()} == {"cpu"}
    assert {tensor.device.type for tensor in averaged(two).params.values()} == {"cuda"}
    close({name: tensor.cpu() for name, tensor in one.algorithm_state["ema"]["params"].items()}, average)
    torch.testing.assert_close(one.metrics["val"]["loss"], two.metrics["val"]["loss"])
