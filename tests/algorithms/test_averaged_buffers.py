"""What is averaged of a model, and what is the latest value: against averages by hand of a run without any.

Tried as neighbours: buffers that begin at an infinity (observers, running maxima, masks), vectors of length 1 (spectral
norm), counters and last batches; parameters with infinities; BatchNorm's kin (InstanceNorm, lazy layers, subclasses,
classes with the same buffers, half precision); ema with warmup, offload and other settings after resuming, swa that
replaces, lookahead; `averaged`, evaluate, predict; compiled; replicated and sharded; from a file in the middle,
and from files in which all floating point buffers were averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.nn.utils.parametrizations import spectral_norm

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.algorithms import averaged, ema, lookahead, moving_average, step_towards, swa
from pure_loop.errors import ArgumentError, ArgumentTypeError
from tests.support.runs import close, cross_entropy, equal, points, stream, train
from tests.support.tiers import examples
from tests.support.worlds import pool

INF = float("inf")

# How a buffer named so follows the activations of a batch, from what it is first.
FIRST: dict[str, Tensor] = {
    "largest": torch.tensor([-INF] * 8),
    "smallest": torch.tensor([INF] * 8),
    "direction": torch.eye(8)[0],
    "mask": torch.tensor([0.0, -INF] * 4),
    "last": torch.zeros(8),
    "batches": torch.zeros(()),
    "running_mean": torch.zeros(8),
    "running_var": torch.ones(8),
}
FOLLOWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "largest": lambda old, x: torch.maximum(old, x.amax(0)),
    "smallest": lambda old, x: torch.minimum(old, x.amin(0)),
    "direction": lambda old, x: nn.functional.normalize(x.sum(0), dim=0),
    "mask": lambda old, x: old,
    "last": lambda old, x: x[0],
    "batches": lambda old, x: old + 1,
    "running_mean": lambda old, x: torch.lerp(old, x.mean(0), 0.1),
    "running_var": lambda old, x: torch.lerp(old, x.var(0), 0.1),
}


class Following(nn.Module):
    """Returns its inputs plus a little of each of its buffers where these are finite."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.register_buffer(name, FIRST[name].clone())

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            if self.training:
                setattr(self, name, FOLLOWS[name](getattr(self, name), x.detach()))
            x = x + 0.01 * torch.nan_to_num(getattr(self, name), posinf=1.0, neginf=-1.0, nan=torch.nan)
        return x


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3))


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


def states_of(model: nn.Module, **options: Any) -> list[State]:
    """Those at FIT_START and after each batch, without averages."""
    pairs = stream(model, points(), donate=False, **options)
    return [state for event, state in pairs if event in (Event.FIT_START, Event.BATCH_END)]


def average_by_hand(tensors: list[Mapping[str, Tensor]], decay: float) -> dict[str, Tensor]:
    average = {name: tensor.double() for name, tensor in tensors[0].items()}
    for now in tensors[1:]:
        average = {name: decay * average[name] + (1 - decay) * now[name].double() for name in average}
    return average


def assert_is(found: State, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], latest: State) -> None:
    """Parameters and statistics are these averages, all other buffers bitwise the latest ones, and nothing is NaN."""
    close({name: tensor.double() for name, tensor in found.params.items()}, params, 1e-5)
    for name, tensor in found.buffers.items():
        if is_statistic(name):
            torch.testing.assert_close(tensor.double(), statistics[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(tensor, latest.buffers[name]), name
        assert not tensor.isnan().any(), name


names_of_buffers = st.lists(st.sampled_from(sorted(FIRST)), min_size=1, max_size=4, unique=True).filter(
    lambda names: ("running_mean" in names) == ("running_var" in names)
)
SETTINGS = st.sampled_from(
    [
        (lambda: ema(smoothing=0.75), lambda batch: 0.75),
        (lambda: ema(half_life="2ba"), lambda batch: 0.5**0.5),
        (lambda: ema(smoothing=0.9, start="4ba"), lambda batch: 0.9 if batch >= 4 else 0.0),
        (lambda: ema(smoothing=0.9, warmup=True), lambda batch: min(0.9, batch / (9 + batch))),
        (lambda: ema(smoothing=0.6, offload=True), lambda batch: 0.6),
        (lambda: swa("0ba", interval="1ba"), lambda batch: (batch - 1) / batch),
        (lambda: swa("4ba", interval="1ba"), lambda batch: (batch - 4) / (batch - 3) if batch > 4 else 0.0),
        (lambda: lookahead(interval=7), None),
    ]
)


@pytest.mark.slow
@examples(15, 150)
@given(names=names_of_buffers, settings=SETTINGS, donate=st.sampled_from(["auto", True, False]))
def test_buffers_are_the_latest_but_statistics(names: list[str], settings: Any, donate: Any) -> None:
    make, decay = settings
    plain = states_of(network(Following(names)))
    first, last = plain[0], plain[-1]
    params = {name: tensor.double() for name, tensor in first.params.items()}
    statistics = {name: tensor.double() for name, tensor in first.buffers.items() if is_statistic(name)}
    for batch, state in enumerate(plain[1:], start=1):
        kept = 0.0 if decay is None else decay(batch)
        params = {n: kept * old + (1 - kept) * state.params[n].double() for n, old in params.items()}
        statistics = {n: kept * old + (1 - kept) * state.buffers[n].double() for n, old in statistics.items()}
    options = {"evaluators": {"val": points(1)}, "donate": donate, "max_duration": "2ep"}
    shown = [
        (state.params, state.buffers, state)
        for event, state in stream(network(Following(names)), points(), [make()], **options)
        if event is Event.EVAL_BATCH_START
    ]
    assert_is(shown[-1][2], params, statistics, last)


def test_buffers_are_the_latest_but_statistics_of_each_kind() -> None:
    """One example of the property above, of all buffers at once."""
    plain = states_of(network(Following(sorted(FIRST))))
    wanted = average_by_hand([state.params for state in plain], 0.75)
    statistics = average_by_hand([state.buffers for state in plain], 0.75)
    state = train(network(Following(sorted(FIRST))), points(), [ema(smoothing=0.75)], evaluators={"val": points(1)})
    assert_is(averaged(state), wanted, statistics, plain[-1])
    assert (
        not any(is_statistic(name) for name in plain[-1].buffers) or len(state.algorithm_state["ema"]["buffers"]) == 2
    )
    assert torch.isfinite(state.metrics["val"]["loss"])


@pytest.mark.parametrize("make", [lambda: ema(smoothing=0.75), lambda: swa("0ba", interval="1ba")], ids=["ema", "swa"])
def test_vectors_of_spectral_norm_have_length_1(make: Callable[[], Any]) -> None:
    """The loss is that of the mean of the weights, divided by its norm along the latest vectors."""
    model = nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 3))
    plain = states_of(model)
    params = average_by_hand([state.params for state in plain], 0.75)
    if make().name == "swa":
        params = {name: torch.stack([s.params[name].double() for s in plain[1:]]).mean(0) for name in params}
    u, v = (plain[-1].buffers[f"0.parametrizations.weight.0._{each}"].double() for each in "uv")
    weight = params["0.parametrizations.weight.original"]
    inputs, targets = points(1, seed=7)[0]
    hidden = torch.tanh(inputs.double() @ (weight / (u @ weight @ v)).T + params["0.bias"])
    loss = cross_entropy(hidden @ params["2.weight"].T + params["2.bias"], targets)
    state = train(model, points(), [make()], evaluators={"val": [(inputs, targets)]})
    assert float(state.metrics["val"]["loss"]) == pytest.approx(float(loss), rel=1e-5)
    shown = averaged(state, make().name).buffers
    assert [float(tensor.norm()) for tensor in shown.values()] == pytest.approx([1.0, 1.0], abs=1e-6)


class Observed(nn.Module):
    """Inputs as integers of 8 bits have them, between the bounds that an observer has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.observer = MovingAverageMinMaxObserver(averaging_constant=0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.observer(x)
        low, high = self.observer.min_val, self.observer.max_val
        return x.clamp(low, high)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ema(smoothing=0.75),
        lambda: ema(smoothing=0.75, warmup=True),
        lambda: swa("0ba", interval="1ba"),
        lambda: swa("0ba", "1dur", interval="1ba", replace=True),
    ],
    ids=["ema", "warmup", "swa", "replace"],
)
def test_bounds_of_observers_are_the_latest(make: Callable[[], Any]) -> None:
    """They begin at infinities, of which no average ever gets away."""
    data = points()
    low, high = INF, -INF
    for inputs, _ in data * 2:
        least, most = float(inputs.min()), float(inputs.max())
        low = least if low == INF else low + 0.5 * (least - low)
        high = most if high == -INF else high + 0.5 * (most - high)
    torch.manual_seed(0)
    model = nn.Sequential(Observed(), nn.Linear(4, 3))
    state = train(model, data, [make()], evaluators={"val": points(1)})
    shown = averaged(state, make().name)
    for buffers in (shown.buffers, state.buffers):
        bounds = [float(buffers[f"0.observer.{each}_val"]) for each in ("min", "max")]
        assert bounds == pytest.approx([low, high], rel=1e-6)
    assert torch.isfinite(state.metrics["val"]["loss"])


class OwnBatchNorm(nn.BatchNorm1d):
    """With what an average isn't of."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("largest", torch.full((features,), -INF))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().amax(0))
        return super().forward(x)


class InGroups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 2, 4)).reshape(-1, 8)  # type: ignore[no-any-return]


KIN: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "InstanceNorm1d": InGroups,
    "a subclass": lambda: OwnBatchNorm(8),
    "another class": lambda: Following(["running_mean", "running_var", "last"]),
}


@pytest.mark.parametrize("kind", KIN)
def test_statistics_are_averaged(kind: str) -> None:
    plain = states_of(network(KIN[kind]()))
    state = train(network(KIN[kind]()), points(), [ema(smoothing=0.75)])
    wanted = average_by_hand([state.buffers for state in plain], 0.75)
    assert_is(averaged(state), average_by_hand([state.params for state in plain], 0.75), wanted, plain[-1])
    assert any(is_statistic(name) for name in wanted)
    assert {name.rpartition(".")[2] for name in state.algorithm_state["ema"]["buffers"]} == {
        "running_mean", "running_var"
    }  # fmt: skip


def test_lazy_layers_are_averaged_as_others() -> None:
    lazy = network(nn.LazyBatchNorm1d())
    lazy(torch.zeros(2, 4))
    assert list(train(lazy, points(), [ema(smoothing=0.75)]).algorithm_state["ema"]["buffers"]) == [
        "1.running_mean", "1.running_var"
    ]  # fmt: skip


def test_statistics_of_half_precision_are_averaged_in_float32() -> None:
    model = network(nn.BatchNorm1d(8)).to(torch.bfloat16)
    data = [(inputs.bfloat16(), targets) for inputs, targets in points()]
    pairs = stream(model, data, donate=False)
    plain = [state for event, state in pairs if event in (Event.FIT_START, Event.BATCH_END)]
    state = train(model, data, [ema(smoothing=0.75)])
    wanted = average_by_hand([state.buffers for state in plain], 0.75)
    average = state.algorithm_state["ema"]["buffers"]
    for name in ("1.running_mean", "1.running_var"):
        assert average[name].dtype is torch.float32
        torch.testing.assert_close(average[name].double(), wanted[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(averaged(state).buffers[name], average[name].bfloat16())


# Buffers that are named.


def test_other_buffers_are_averaged_where_they_are_named() -> None:
    """Of infinities there is no average: it begins where they end."""
    for buffers in ("1.l*", ["1.last", "*.largest"], "*"):
        plain = states_of(network(Following(["largest", "last", "running_mean", "running_var"])))
        largest = plain[1].buffers["1.largest"].double()
        for state in plain[2:]:
            largest = 0.75 * largest + 0.25 * state.buffers["1.largest"].double()
        wanted = average_by_hand([state.buffers for state in plain], 0.75)
        model = network(Following(["largest", "last", "running_mean", "running_var"]))
        found = averaged(train(model, points(), [ema(smoothing=0.75, buffers=buffers)])).buffers
        for name, expected in {**wanted, "1.largest": largest}.items():
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
    state = train(model, points(), [swa("0ba", interval="1ba", buffers="*.largest")])
    mean = torch.stack([each.buffers["1.largest"] for each in plain[1:]]).mean(0)
    torch.testing.assert_close(averaged(state, "swa").buffers["1.largest"], mean)


@pytest.mark.parametrize("make", [ema, swa])
def test_names_that_are_refused(make: Any) -> None:
    options = {"smoothing": 0.9} if make is ema else {}
    for value in (3, [3], [""], None):
        with pytest.raises(ArgumentTypeError, match=rf"{make.__name__}: buffers must be a glob of names of buffers"):
            make(**options, buffers=value)
    model = network(Following(["last"]), nn.BatchNorm1d(8))
    says = r"buffers='1.lost' matches no floating point buffer.*did you mean '1.last'\?; there are 1.last, 2.running"
    with pytest.raises(ArgumentError, match=says):
        train(model, points(), [make(**options, buffers="1.lost")])
    state = train(model, points(), [make(**options)])
    for glob in ("1.lost", "*.num_batches_tracked"):
        with pytest.raises(ArgumentError, match="matches no floating point buffer"):
            train(state, points(), [make(**options, buffers=glob)], max_duration="3ep")


# Infinite parameters.


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.tensor([0.0, -INF, 0.0]), requires_grad=False)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.layer(x) + self.mask, dim=1)


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square().mean()


@pytest.mark.parametrize(
    "make",
    [lambda: ema(smoothing=0.75), lambda: swa("0ba", interval="1ba"), lambda: lookahead(1, 0.5)],
    ids=["ema", "swa", "lookahead"],
)
def test_infinite_parameters_stay_so(make: Callable[[], Any], tmp_path: Path) -> None:
    """Between two equal infinities there is no number; from a file they are other tensors than before."""
    options: dict[str, Any] = {"loss": spread, "evaluators": {"val": points(1)}}
    state = train(Masked(), points(), [make()], **options, max_duration="1ep")
    pl.save(state, tmp_path / "a.safetensors")
    loaded = pl.load(tmp_path / "a.safetensors", model=Masked())
    state = train(loaded, points(), [make()], **options)
    assert torch.isfinite(state.metrics["val"]["loss"])
    assert state.params["mask"][1] == -INF
    assert torch.isfinite(state.params["layer.weight"]).all()
    name = make().name
    if name != "lookahead":
        assert averaged(state, name).params["mask"][1] == -INF


def test_steps_and_averages_of_infinities_by_themselves() -> None:
    slow, fast = torch.tensor([-INF, INF, 0.0, -INF]), torch.tensor([-INF, -INF, 1.0, 2.0])
    assert step_towards({"w": slow}, {"w": fast}, 0.25)["w"].tolist() == [-INF, -INF, 0.25, 2.0]


# Resumed, and from older files.


@pytest.mark.parametrize(
    "make", [lambda **s: ema(smoothing=0.75, **s), lambda **s: swa("0ba", interval="1ba", **s)], ids=["ema", "swa"]
)
def test_a_file_in_which_all_buffers_are_averaged_resumes(make: Callable[..., Any], tmp_path: Path) -> None:
    """Averages of BatchNorm go on; those of other buffers end, and evaluations at once use the latest values."""
    names = ["running_mean", "running_var", "last", "largest"]
    model, data = network(Following(names)), points()
    plain = states_of(model)
    older = [s for e, s in stream(model, data, [make(buffers="*")], donate=False) if e is Event.BATCH_CHECKPOINT][1]
    pl.save(older, tmp_path / "older.safetensors")
    assert "1.last" in older.algorithm_state[make().name]["buffers"]
    evaluated = pl.evaluate(
        pl.load(tmp_path / "older.safetensors", model=model), points(1), loss=cross_entropy, algorithms=[make()]
    )
    seen = next(state for event, state in evaluated if event is Event.EVAL_BATCH_START)
    assert torch.equal(seen.buffers["1.last"], plain[2].buffers["1.last"])
    resumed = train(model, data, [make()], load_path=tmp_path / "older.safetensors")
    whole = train(model, data, [make()])
    equal(resumed.algorithm_state, whole.algorithm_state)
    back = train(model, data, [make(buffers="1.last")], load_path=tmp_path / "older.safetensors")
    assert "1.last" in back.algorithm_state[make().name]["buffers"]


def test_averages_begin_where_a_run_resumes_with_their_names() -> None:
    model, data = network(Following(["last"])), points()
    plain = states_of(model)
    half = [s for e, s in stream(model, data, [ema(smoothing=0.75)], donate=False) if e is Event.BATCH_CHECKPOINT][2]
    wanted = average_by_hand([state.buffers for state in plain[3:]], 0.75)["1.last"]
    state = train(half, data, [ema(smoothing=0.75, buffers="*")])
    torch.testing.assert_close(averaged(state).buffers["1.last"].double(), wanted, rtol=1e-5, atol=1e-6)


# Compiled, and on ranks.


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "make", [lambda: ema(smoothing=0.75, warmup=True), lambda: swa("0ba", interval="1ba")], ids=["ema", "swa"]
)
def test_compiled_it_is_the_same(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(4, 8)), Following(["largest", "mask"]), nn.BatchNorm1d(8))
    eager, compiled = (
        train(model, points(), [make()], evaluators={"val": points(1)}, strict=False, compile=traced)
        for traced in (False, True)
    )
    close(dict(averaged(compiled, make().name).buffers), dict(averaged(eager, make().name).buffers), 1e-5)
    torch.testing.assert_close(compiled.metrics["val"]["loss"], eager.metrics["val"]["loss"])


@pytest.mark.parametrize("kind", ["replicate", pytest.param("shard", marks=pytest.mark.slow)])
def test_on_two_ranks(kind: str) -> None:
    """BatchNorm's statistics are averaged, and what is not averaged is what the ranks have agreed on."""

    def program(rank: int) -> Any:
        model = network(Following(["mask", "batches"]), nn.BatchNorm1d(8))
        options: dict[str, Any] = {"parallel": kind, "evaluators": {"val": points(1, size=6)}}
        pairs = list(stream(model, points(size=6), [ema(smoothing=0.75)], donate=False, **options))
        trained = [state for event, state in pairs if event in (Event.FIT_START, Event.BATCH_END)]
        shown = [state for event, state in pairs if event is Event.EVAL_BATCH_START][-1]
        mean = average_by_hand([state.buffers for state in trained], 0.75)["2.running_mean"]
        return dict(shown.buffers), dict(trained[-1].buffers), mean, float(pairs[-1][1].metrics["val"]["loss"])

    for shown, latest, mean, loss in pool(kind=kind).run(program):
        assert torch.equal(shown["1.mask"], FIRST["mask"])
        assert torch.equal(shown["1.batches"], latest["1.batches"])
        torch.testing.assert_close(shown["2.running_mean"].double(), mean, rtol=1e-5, atol=1e-6)
        assert loss == loss


def test_moving_averages_leave_out_what_they_lack() -> None:
    assert list(moving_average({"a": torch.ones(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}, 0.5)) == ["a"]


def test_an_average_of_no_weights_is_an_error() -> None:
    """Before ``start=`` it gave the weights that training began with."""
    data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    settings = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "4ep"}
    pairs = pl.fit(nn.Linear(2, 1), data, algorithms=[pl.algorithms.swa("0.5dur")], **settings)
    states = [state for event, state in pairs if event == "epoch_checkpoint"]
    with pytest.raises(pl.ArgumentError, match="is of no weights yet, at batch 3"):
        pl.algorithms.averaged(states[0], "swa")
    last = states[-1]
    assert not torch.equal(pl.algorithms.averaged(last, "swa").params["weight"], last.params["weight"])
