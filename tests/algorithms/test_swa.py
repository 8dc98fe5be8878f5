"""Stochastic weight averaging, in real training loops, against torch.optim.swa_utils."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import averaged, running_mean, swa, update_batchnorm
from tests.support.runs import close, convnet, cross_entropy, equal, images, mlp, points, stream, train


def test_the_mean_of_three() -> None:
    mean: Any = {"w": torch.tensor(9.0)}
    for count, wanted in enumerate([1.0, 1.5, 2.0]):
        mean = running_mean(mean, {"w": torch.tensor(count + 1.0)}, torch.tensor(count))
        assert mean["w"] == wanted


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16])
def test_half_precision_is_averaged_in_float32(half: torch.dtype) -> None:
    mean: Any = {"w": torch.zeros(1, dtype=half)}
    for count in range(1000):
        mean = running_mean(mean, {"w": torch.tensor([1.0 + count % 2], dtype=half)}, torch.tensor(count))
    assert mean["w"].dtype is torch.float32
    torch.testing.assert_close(mean["w"], torch.tensor([1.5]))


@pytest.mark.parametrize(
    ("settings", "joined"),
    [
        ({"start": "0.5dur"}, [6, 9, 12]),
        ({"start": "2ep"}, [6, 9, 12]),
        ({"start": "5ba", "end": "8ba", "interval": "1ba"}, [5, 6, 7, 8]),
        ({"start": "0dur", "end": "2ep"}, [3, 6]),
        ({"start": "0.25dur", "interval": "0.25dur"}, [3, 6, 9, 12]),
    ],
)
def test_it_is_that_of_torch(settings: Any, joined: list[int]) -> None:
    model = mlp()
    reference = swa_utils.AveragedModel(model)
    pairs = stream(mlp(), points(), [swa(**settings)], max_duration="4ep", donate=False)
    for event, state in pairs:
        if event is Event.BATCH_END and state.timestamp.batch in joined:
            reference.update_parameters(state.module())
    equal(dict(averaged(state, "swa").params), dict(reference.module.state_dict()))
    assert state.algorithm_state["swa"]["count"] == len(joined)
    equal(train(mlp(), points(), max_duration="4ep").params, state.params)


@pytest.mark.parametrize("evaluate", [True, False])
def test_evaluations_use_the_mean_as_soon_as_there_is_one(evaluate: bool) -> None:
    pairs = stream(mlp(), points(), [swa("2ep", evaluate=evaluate)], max_duration="4ep", evaluators={"val": points()})
    for event, state in pairs:
        if event is Event.EPOCH_END:
            own = state.params
        if event is Event.EVAL_BEFORE_FORWARD:
            mean = state.algorithm_state["swa"]["params"]
            equal(state.params, mean if evaluate and state.timestamp.epoch >= 2 else own)


def test_weights_are_replaced_once() -> None:
    pairs = stream(mlp(), points(), [swa("1ep", "2ep", replace=True)], max_duration="3ep")
    seen = {state.timestamp.epoch: state for event, state in pairs if event is Event.EPOCH_END}
    equal(seen[2].params, seen[2].algorithm_state["swa"]["params"])
    assert seen[3].algorithm_state["swa"]["count"] == 2
    assert not torch.equal(seen[3].params["0.weight"], seen[2].params["0.weight"])


def test_it_resumes(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        algorithm = swa("1ep", "3ep", interval="2ba", replace=True)
        return stream(convnet(), images(), [algorithm], max_duration="4ep", **options)

    whole = pl.run(run())
    for event, state in run():
        if event is Event.BATCH_CHECKPOINT and state.timestamp.batch in (2, 5, 10):
            pl.save(state, tmp_path / f"{state.timestamp.batch}.safetensors")
    for batch in (2, 5, 10):
        resumed = pl.run(run(load_path=tmp_path / f"{batch}.safetensors"))
        equal(resumed.params, whole.params)
        equal(resumed.algorithm_state, whole.algorithm_state)


def test_statistics_of_the_mean() -> None:
    """BatchNorm's running mean is the mean over the data, as torch's update_bn has it."""
    model = convnet()
    model[5] = nn.Identity()  # dropout draws
    state = averaged(train(model, images(), [swa("0.5dur", interval="1ba")]), "swa")
    updated = update_batchnorm(state, images())
    reference = state.module()
    swa_utils.update_bn(images(), reference)
    close(dict(updated.buffers), dict(reference.named_buffers()))
    equal(updated.params, state.params)
    assert updated.module()[1].momentum == 0.1
    assert not torch.equal(updated.buffers["1.running_mean"], state.buffers["1.running_mean"])
    one = update_batchnorm(state, images(), batches=1)
    assert one.buffers["1.num_batches_tracked"] == 1
    before = torch.random.get_rng_state()
    drawing = train(convnet(), images())
    equal(update_batchnorm(drawing, images()).buffers, update_batchnorm(drawing, images()).buffers)
    assert torch.equal(before, torch.random.get_rng_state())


def test_statistics_of_layers_in_eval_mode_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()
    model[1].running_mean.fill_(7.0)
    updated = update_batchnorm(train(model, points()), points())
    assert torch.equal(updated.buffers["1.running_mean"], torch.full((3,), 7.0))
    assert updated.buffers["3.num_batches_tracked"] == 3


def test_statistics_that_are_refused() -> None:
    state = train(mlp(), points())
    with pytest.raises(pl.ModelError, match="has no BatchNorm that keeps running statistics"):
        update_batchnorm(state, points())
    with pytest.raises(pl.ArgumentError, match="the dataloader gave no batch"):
        update_batchnorm(train(convnet(), images()), [])
    with pytest.raises(pl.ArgumentTypeError, match="Sequential is not a State"):
        update_batchnorm(convnet(), images())  # type: ignore[arg-type]
    with pytest.raises(pl.ArgumentError, match="has no average named 'swa'"):
        averaged(state, "swa")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"start": "10s"}, "goes by the clock"),
        ({"start": "3ep", "end": "2ep"}, "comes before start='3ep'"),
        ({"replace": True}, "needs an end"),
        ({"start": "soon"}, "start='soon'"),
        ({"interval": 0}, "interval"),
        ({"reset_optimizer": True}, "without replace=True"),
        ({"batchnorm_data": iter([])}, "an iterator"),
        ({"batchnorm_data": [], "evaluate": False}, "evaluate is False"),
    ],
)
def test_settings_that_are_refused(settings: Any, text: str) -> None:
    with pytest.raises(pl.ArgumentError, match=text):
        swa(**settings)


def test_a_rate_of_its_own_is_a_schedule() -> None:
    lr = pl.schedules.chain(pl.schedules.constant(0.1), ("0.5dur", pl.schedules.constant(0.05)))
    pairs = stream(mlp(), points(), [swa("0.5dur")], optimizer=pl.optim.sgd(lr=lr), loss=cross_entropy)
    assert pl.run(pairs).algorithm_state["swa"]["count"] == 2


@pytest.mark.parametrize("reset", [False, True])
def test_the_optimizer_may_begin_anew(reset: bool) -> None:
    algorithm = swa("1ep", "2ep", replace=True, reset_optimizer=reset)
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "3ep"}
    pairs = stream(mlp(), points(), [algorithm], **options)
    ends = [state for event, state in pairs if event is Event.EPOCH_END]
    moments = ends[1].opt_state["exp_avg"]["0.weight"]
    assert torch.equal(moments, torch.zeros_like(moments)) == reset
    assert not torch.equal(ends[2].opt_state["exp_avg"]["0.weight"], moments)


def test_evaluations_take_statistics_of_the_mean() -> None:
    data = images(3)
    algorithm = swa("1ep", batchnorm_data=data)
    pairs = stream(convnet(), data, [algorithm], max_duration="2ep", evaluators={"val": data}, eval_interval="1ep")
    for event, state in pairs:
        if event is Event.EVAL_BEFORE_FORWARD and state.timestamp.epoch == 2:
            wanted = update_batchnorm(averaged(state, "swa"), data)
            equal(state.buffers, wanted.buffers)
    plain = pl.run(stream(convnet(), data, [swa("1ep")], max_duration="2ep"))
    equal(state.params, plain.params)
    equal(state.buffers, plain.buffers)


def test_statistics_are_of_the_forwards_of_the_task() -> None:
    data = images(2)
    task = pl.Task(
        forward=lambda module, batch: module(batch[0] / 10),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
    )
    algorithm = swa("0ba", interval="1ba", batchnorm_data=data)
    pairs = stream(convnet(), data, [algorithm], task=task, loss=None, max_duration="1ep", evaluators={"val": data})
    seen = []
    for event, state in pairs:
        if event is Event.EVAL_BEFORE_FORWARD:
            equal(state.buffers, update_batchnorm(averaged(state, "swa"), data, task=task).buffers)
            seen.append(event)
    assert seen
    evaluated = pl.run(pl.evaluate(state, data, task=task, algorithms=[algorithm]))
    assert torch.isfinite(torch.as_tensor(evaluated.metrics["eval"]["loss"]))


def test_an_optimizer_is_not_reset_for_a_mean_of_nothing() -> None:
    algorithm = swa("1ba", "2ba", interval="1ep", replace=True, reset_optimizer=True)
    end = train(mlp(), points(), [algorithm], optimizer=pl.optim.adamw(lr=0.01), max_duration="1ep")
    assert end.opt_state["exp_avg"]["0.weight"].any()
