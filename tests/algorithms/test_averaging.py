"""Averages of weights and buffers (ema, swa, lookahead), against averages by hand of a run without any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import averaged, ema, lookahead, moving_average, step_towards, swa, update_batchnorm
from pure_loop.compile import interpreted
from pure_loop.random import seeded
from tests.support.problem import LR, by_hand, close, convnet, cross_entropy, fit, images, mlp, points, run
from tests.support.streams import equal
from tests.support.worlds import pool

INF = float("inf")
# How a buffer named so follows the activations of a batch, from what it is first.
FOLLOWS: dict[str, tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "largest": (torch.tensor([-INF] * 8), lambda old, x: torch.maximum(old, x.amax(0))),
    "direction": (torch.eye(8)[0], lambda old, x: nn.functional.normalize(x.sum(0), dim=0)),
    "mask": (torch.tensor([0.0, -INF] * 4), lambda old, x: old),
    "last": (torch.zeros(8), lambda old, x: x[0]),
    "batches": (torch.zeros(()), lambda old, x: old + 1),
    "running_mean": (torch.zeros(8), lambda old, x: torch.lerp(old, x.mean(0), 0.1)),
    "running_var": (torch.ones(8), lambda old, x: torch.lerp(old, x.var(0), 0.1)),
}


class Following(nn.Module):
    """Returns its inputs plus a little of each of its buffers where these are finite."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.register_buffer(name, FOLLOWS[name][0].clone())

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            if self.training:
                setattr(self, name, FOLLOWS[name][1](getattr(self, name), x.detach()))
            x = x + 0.01 * torch.nan_to_num(getattr(self, name), posinf=1.0, neginf=-1.0, nan=torch.nan)
        return x


def following(*names: str) -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(4, 8), Following(*names or FOLLOWS), nn.Linear(8, 3))


def states_of(model: nn.Module, *algorithms: Any, data: Any = None, **options: Any) -> list[State]:
    """Those at FIT_START and after each batch."""
    pairs = fit(model, data, algorithms, donate=False, **options)
    return [state for event, state in pairs if event in (Event.FIT_START, Event.BATCH_END)]


def average_by_hand(tensors: list[Mapping[str, Tensor]], kept: Callable[[int], float]) -> dict[str, Tensor]:
    """After each batch ``kept(batch)`` of the average stays."""
    average = {name: tensor.double() for name, tensor in tensors[0].items()}
    for batch, now in enumerate(tensors[1:], start=1):
        share = kept(batch)
        average = {name: share * average[name] + (1 - share) * now[name].double() for name in average}
    return average


def doubled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def every(batches: int, share: float) -> Callable[[int], float]:
    return lambda batch: 1.0 if batch % batches else share


# Of two epochs of three batches of four samples.
AVERAGES: dict[str, tuple[pl.Algorithm, Callable[[int], float]]] = {
    "smoothing": (ema(smoothing=0.75), every(1, 0.75)),
    "batches": (ema(half_life="2ba"), every(1, 0.5**0.5)),
    "samples": (ema("8sp"), every(1, 0.5**0.5)),
    "part of the run": (ema(half_life="0.5dur"), every(1, 0.5 ** (1 / 3))),
    "within epochs": (ema(f"{1 / 3!r}dur"), every(1, 0.5**0.5)),
    "an interval within epochs": (ema(f"{1 / 3!r}dur", interval=f"{1 / 6!r}dur"), every(1, 0.5**0.5)),
    "an interval": (ema(half_life="3ba", interval="2ba"), every(2, 0.5 ** (2 / 3))),
    "an interval of samples": (ema(smoothing=0.9, interval="8sp"), every(2, 0.9)),
    "an interval of the run": (ema(half_life="0.5dur", interval="0.5dur"), every(3, 0.5)),
    "an interval of epochs": (ema(half_life="4ba", interval="1ep"), every(3, 0.5 ** (3 / 4))),
    "epochs": (ema(half_life="2ep"), every(3, 0.5**0.5)),
    "a start": (ema(smoothing=0.9, start="4ba"), lambda batch: 0.9 if batch >= 4 else 0.0),
    "a start in the run": (ema(smoothing=0.9, start="0.5dur"), lambda batch: 0.9 if batch >= 3 else 0.0),
    "warmup": (ema(smoothing=0.3, warmup=True), lambda batch: min(0.3, batch / (9 + batch))),
    "warmup and start": (
        ema(smoothing=0.3, start="2ba", warmup=True),
        lambda batch: 0.0 if batch < 2 else min(0.3, (batch - 1) / (8 + batch)),
    ),
    "in memory": (ema(smoothing=0.6, offload=True), every(1, 0.6)),
    "a mean": (swa("0ba", interval="1ba"), lambda batch: (batch - 1) / batch),
    "a mean of some": (
        swa("3ba", "5ba", interval="1ba"),
        lambda batch: 0.0 if batch <= 3 else (batch - 3) / (batch - 2) if batch <= 5 else 1.0,
    ),
    "a mean of epochs": (swa("0.5dur"), lambda batch: {3: 0.0, 6: 0.5}.get(batch, 1.0)),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_is_by_hand_and_training_does_not_notice_it(name: str) -> None:
    """Evaluations take it, where it is listed; buffers that are no statistics of BatchNorm's kind are the latest."""
    average, kept = AVERAGES[name]
    plain = states_of(following())
    params, buffers = (average_by_hand([getattr(s, of) for s in plain], kept) for of in ("params", "buffers"))
    for event, state in fit(following(), None, [average], evaluators={"val": points(1)}, donate=False):
        if event is Event.BATCH_END:
            one, other = state, plain[state.timestamp.batch]
            equal(*((s.params, s.buffers, s.opt_state, s.loss) for s in (one, other)))
        if event is Event.EVAL_BATCH_START:
            shown = state
    again = pl.run(pl.evaluate(state, points(1), loss=cross_entropy, algorithms=[average]))
    without = pl.run(pl.evaluate(state, points(1), loss=cross_entropy))
    assert again.metrics["eval"]["loss"] == state.metrics["val"]["loss"] != without.metrics["eval"]["loss"]
    for found in (shown, averaged(state, average.name)):
        close(doubled(found.params), params, 1e-5)
        for key, tensor in found.buffers.items():
            if "running" in key:
                torch.testing.assert_close(tensor.double(), buffers[key], rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(tensor, plain[-1].buffers[key]), key


COMPILED = [AVERAGES[name][0] for name in ("batches", "warmup", "warmup and start", "a mean")]
COMPILED += [swa("2ba", "4ba", interval="1ba", replace=True, reset_optimizer=reset) for reset in (False, True)]
COMPILED += [swa("5ba", "5ba", interval="4ba", replace=True, reset_optimizer=True)]  # of no weights


@pytest.mark.parametrize("average", COMPILED, ids=str)
def test_a_compiled_step_averages_as_an_eager_one_does(average: pl.Algorithm) -> None:
    settings = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9)}
    eager = run(mlp(), None, [average], **settings)
    with interpreted():
        compiled = run(mlp(), None, [average], compile=True, **settings)
    memories = [state.algorithm_state[average.name] for state in (compiled, eager)]
    close(compiled.params, eager.params, 1e-5)
    close(*(memory["params"] for memory in memories), 1e-5)
    plain = [{key: value for key, value in memory.items() if key in ("updates", "count")} for memory in memories]
    assert plain[0] == plain[1]


def test_predictions_are_of_the_average() -> None:
    state = run(convnet(), images(), [ema(smoothing=0.6)])
    module = averaged(state).module().eval()
    predicted = pl.predict(state, images(2, seed=1), algorithms=[ema(smoothing=0.6)], strict=True)
    outputs = [after.outputs for event, after in predicted if event is Event.PREDICT_BATCH_END]
    torch.testing.assert_close(outputs, [module(x).detach() for x, _ in images(2, seed=1)])


def test_several_averages_begin_where_they_are_first_listed_and_may_change_their_unit() -> None:
    pair = [ema(smoothing=0.5, name="fast"), ema(smoothing=0.99, name="slow")]
    state = run(None, None, pair, evaluators=points(1))
    slow = pl.run(pl.evaluate(averaged(state, "slow"), points(1), loss=cross_entropy))
    assert slow.metrics["eval"]["loss"] == state.metrics["eval"]["loss"], "the last one in the list is evaluated"
    late = run(run(), None, [ema(half_life="1ba")], max_duration="3ep")
    changed = run(late, None, [ema(half_life="4sp")], max_duration="4ep")
    wanted = average_by_hand([each.params for each in states_of(mlp(), max_duration="4ep")[6:]], every(1, 0.5))
    close(doubled(averaged(changed).params), wanted)
    model: Any = mlp()
    model[0].weight.requires_grad_(False)
    frozen = run(model, None, [ema(half_life="2ba")])
    assert frozen.algorithm_state["ema"]["params"]["0.weight"] is frozen.params["0.weight"], "it costs no memory"


def test_half_precision_is_averaged_in_float32() -> None:
    """In bfloat16 a thousandth of a difference, and a mean of a thousand, would be rounded away."""
    model, data = mlp().to(torch.bfloat16), [(x.bfloat16(), y) for x, y in points()]
    for algorithm, kept in ((ema(smoothing=0.999), every(1, 0.999)), AVERAGES["a mean"]):
        state = run(model, data, [algorithm])
        wanted = average_by_hand([each.params for each in states_of(model, data=data)], kept)
        for name, tensor in state.algorithm_state[algorithm.name]["params"].items():
            assert tensor.dtype is torch.float32
            torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(averaged(state, algorithm.name).params[name], tensor.bfloat16())
    for kind in (torch.complex64, torch.float8_e5m2):
        one, none = ({"w": torch.tensor([value]).to(kind)} for value in (1.0, 0.0))
        assert moving_average(one, none, 0.75)["w"] == 0.75


@pytest.mark.parametrize("make", [lambda: ema("2ba"), lambda: swa("0ba", interval="1ba"), lambda: lookahead(1, 0.5)])
def test_infinite_parameters_stay_so(make: Callable[[], Any]) -> None:
    """Between two equal infinities there is no number; what is not trained may be another tensor at each batch."""
    model: Any = mlp()
    model.register_parameter("mask", nn.Parameter(torch.tensor([0.0, -INF]), requires_grad=False))
    copies = pl.algorithm(Event.BATCH_START, name="copies")(
        lambda state: state.replace(params={name: tensor.clone() for name, tensor in state.params.items()})
    )
    state = run(model, None, [copies, make()])
    shown = state if make().name == "lookahead" else averaged(state, make().name)
    assert state.params["mask"].tolist() == shown.params["mask"].tolist() == [0.0, -INF]


# Buffers


def test_other_buffers_are_averaged_where_they_are_named() -> None:
    """Of infinities there is no average: it begins where they end."""
    model = following("largest", "last", "running_mean", "running_var")
    plain = [state.buffers for state in states_of(model)]
    largest = average_by_hand([{"x": each["1.largest"]} for each in plain[1:]], every(1, 0.75))["x"]
    wanted = {**average_by_hand(plain, every(1, 0.75)), "1.largest": largest}
    for buffers in ("1.l*", ["1.last", "*.largest"], "*"):
        close(doubled(averaged(run(model, None, [ema(smoothing=0.75, buffers=buffers)])).buffers), wanted, 1e-5)
    state = run(model, None, [swa("0ba", interval="1ba", buffers="*.largest")])
    mean = torch.stack([each["1.largest"] for each in plain[1:]]).mean(0)
    torch.testing.assert_close(averaged(state, "swa").buffers["1.largest"], mean)
    groups: Any = convnet()
    groups[1] = nn.InstanceNorm2d(16, track_running_stats=True)
    groups[1].register_buffer("largest", torch.zeros(()))
    end = run(groups, images(1), [ema("1ba")], max_duration="1ba")
    assert [*end.algorithm_state["ema"]["buffers"]] == ["1.running_mean", "1.running_var"], "of the kin of BatchNorm"


@pytest.mark.parametrize("make", [lambda **s: ema(smoothing=0.75, **s), lambda **s: swa("0ba", interval="1ba", **s)])
def test_a_file_in_which_other_buffers_are_averaged_resumes(make: Callable[..., Any], tmp_path: Path) -> None:
    """Averages of BatchNorm go on; those of other buffers end, or begin, and evaluations at once use the latest."""
    model, path = following("running_mean", "running_var", "last", "largest"), tmp_path / "older.safetensors"
    older = [s for e, s in fit(model, None, [make(buffers="*")], donate=False) if e is Event.BATCH_CHECKPOINT][1]
    pl.save(older, path)
    evaluated = pl.evaluate(pl.load(path, model=model), points(1), loss=cross_entropy, algorithms=[make()])
    seen = next(state for event, state in evaluated if event is Event.EVAL_BATCH_START)
    plain = states_of(model)
    assert torch.equal(seen.buffers["1.last"], plain[2].buffers["1.last"])
    resumed, whole = run(model, None, [make()], load_path=path), run(model, None, [make()])
    equal(resumed.algorithm_state, whole.algorithm_state)
    third = states_of(model, make())[3]
    later = averaged(run(third, None, [make(buffers="*")]), make().name).buffers["1.last"]
    if make().name == "ema":
        wanted = average_by_hand([s.buffers for s in plain[3:]], every(1, 0.75))["1.last"]
        torch.testing.assert_close(later.double(), wanted, rtol=1e-5, atol=1e-6)


def test_on_two_ranks_statistics_are_averaged_and_all_else_is_agreed_on() -> None:
    def program(rank: int) -> Any:
        options: dict[str, Any] = {"parallel": "replicate", "evaluators": {"val": points(1, size=6)}}
        plain = states_of(following(), ema(smoothing=0.75), data=points(size=6), **options)
        mean = average_by_hand([state.buffers for state in plain], every(1, 0.75))
        return dict(averaged(plain[-1]).buffers), dict(plain[-1].buffers), mean

    (shown, latest, mean), (other, *_) = pool().run(program)
    equal(shown, other)
    for name, tensor in shown.items():
        torch.testing.assert_close(tensor.double(), (mean if "running" in name else doubled(latest))[name])


# What only swa has


def test_a_mean_that_replaces_the_weights_does_so_once_and_the_optimizer_may_begin_anew() -> None:
    options: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.01), "max_duration": "3ep"}
    for reset in (False, True):
        algorithm = swa("1ep", "2ep", replace=True, reset_optimizer=reset)
        ends = [s for event, s in fit(None, None, [algorithm], **options, donate=False) if event is Event.EPOCH_END]
        equal(ends[1].params, ends[1].algorithm_state["swa"]["params"])
        assert ends[2].algorithm_state["swa"]["count"] == 2
        assert not torch.equal(ends[2].params["0.weight"], ends[1].params["0.weight"])
        assert bool(ends[1].opt_state["exp_avg"]["0.weight"].any()) is not reset
        equal(run(ends[0], None, [algorithm], **options).params, ends[2].params)
    nothing = swa("1ba", "2ba", interval="1ep", replace=True, reset_optimizer=True)
    end = run(None, None, [nothing], **options | {"max_duration": "1ep"})
    assert end.opt_state["exp_avg"]["0.weight"].any(), "a mean of nothing resets nothing"


def test_evaluations_use_the_mean_as_soon_as_there_is_one_and_if_it_is_asked_for() -> None:
    for evaluate in (True, False):
        options: dict[str, Any] = {"max_duration": "3ep", "evaluators": {"val": points()}, "donate": False}
        for event, state in fit(None, None, [swa("2ep", evaluate=evaluate)], **options):
            if event is Event.EPOCH_CHECKPOINT and state.timestamp.epoch == 1:
                with pytest.raises(pl.errors.ArgumentError, match="is of no weights yet, at batch 3"):
                    averaged(state, "swa")
            if event is Event.EPOCH_END:
                own = state.params
            if event is Event.EVAL_BEFORE_FORWARD:
                begun = evaluate and state.timestamp.epoch >= 2
                equal(state.params, state.algorithm_state["swa"]["params"] if begun else own)


def test_statistics_of_the_mean_are_those_of_the_data() -> None:
    """BatchNorm's running mean is the mean over the data, as torch's update_bn has it."""
    model: Any = convnet()
    model[5] = nn.Identity()  # dropout draws
    state = averaged(run(model, images(), [swa("0.5dur", interval="1ba")]), "swa")
    updated, reference = update_batchnorm(state, images()), state.module()
    swa_utils.update_bn(images(), reference)
    close(dict(updated.buffers), dict(reference.named_buffers()))
    equal(updated.params, state.params)
    assert updated.module()[1].momentum == 0.1  # type: ignore[index]
    assert update_batchnorm(state, images(), batches=1).buffers["1.num_batches_tracked"] == 1
    before, drawing = torch.random.get_rng_state(), run(convnet(), images(1), max_duration="1ba")
    equal(update_batchnorm(drawing, images()).buffers, update_batchnorm(drawing, images()).buffers)
    assert torch.equal(before, torch.random.get_rng_state())
    still: Any = convnet()
    still[1].eval()
    still[7] = nn.Sequential(nn.Linear(72, 3), nn.BatchNorm1d(3))
    counts = update_batchnorm(pl.State.create(still), images()).buffers
    assert [counts[f"{layer}.num_batches_tracked"] for layer in ("1", "7.1")] == [0, 3], "a layer in eval mode"


def test_evaluations_take_statistics_of_the_mean_by_the_forwards_of_the_task() -> None:
    task = pl.Task(forward=lambda m, batch: m(batch[0] / 10), loss=lambda o, batch: cross_entropy(o, batch[1]))
    algorithm, data = swa("0ba", interval="1ba", batchnorm_data=images(2)), images(2)
    options: dict[str, Any] = {"loss": task, "max_duration": "1ep"}
    for event, state in fit(convnet(), data, [algorithm], evaluators={"val": data}, **options):
        if event is Event.EVAL_BEFORE_FORWARD:
            equal(state.buffers, update_batchnorm(averaged(state, "swa"), data, task=task).buffers)
    plain = run(convnet(), data, [swa("0ba", interval="1ba")], **options)
    equal((state.params, state.buffers), (plain.params, plain.buffers))
    evaluated = pl.run(pl.evaluate(state, data, loss=task, algorithms=[algorithm]))
    assert evaluated.metrics["eval"]["loss"] == state.metrics["val"]["loss"]


# Lookahead


@pytest.mark.parametrize(("interval", "rate"), [(1, 0.5), (2, 0.8), (4, 1.0)])
def test_lookahead_is_the_loop_written_by_hand(interval: int, rate: float) -> None:
    model, steps = mlp(), 0
    slow = [parameter.detach().clone() for parameter in model.parameters()]

    def step(module: nn.Module) -> None:
        nonlocal steps
        steps += 1
        if steps % interval == 0:
            with torch.no_grad():
                for old, parameter in zip(slow, module.parameters(), strict=True):
                    parameter.copy_(old.add_(rate * (parameter - old)))

    def gradient(module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        cross_entropy(module(inputs), targets).backward()

    wanted = by_hand(model, points(5), gradient, momentum=0.9, after=step)
    trained = run(None, points(5), [lookahead(interval, rate)], optimizer=pl.optim.sgd(lr=LR, momentum=0.9))
    close(trained.params, wanted)
    first, fast = torch.tensor([-INF, INF, 0.0, -INF]), torch.tensor([-INF, -INF, 1.0, 2.0])
    assert step_towards({"w": first}, {"w": fast}, 0.25)["w"].tolist() == [-INF, -INF, 0.25, 2.0], "no NaN"


@pytest.mark.gpu
def test_an_average_beside_a_device() -> None:
    options: dict[str, Any] = {"device": "cuda", "strict": False, "evaluators": {"val": images(1)}}
    one, two = (run(convnet(), images(), [ema("4ba", offload=offload)], **options) for offload in (False, True))
    average = two.algorithm_state["ema"]["params"]
    assert {tensor.device.type for tensor in average.values()} == {"cpu"}
    assert {tensor.device.type for tensor in averaged(two).params.values()} == {"cuda"}
    close({name: tensor.cpu() for name, tensor in one.algorithm_state["ema"]["params"].items()}, average)
    torch.testing.assert_close(one.metrics["val"]["loss"], two.metrics["val"]["loss"])
