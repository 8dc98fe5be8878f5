"""Algorithms that compare the members of an ensemble: successive halving, and population-based training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms import population_based as module_of_population
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.support.problem import fit, mlp, noisy, points
from tests.support.refused import Refusal, check, rows
from tests.support.streams import equal
from tests.support.tiers import examples

ARG, TYPE = pl.errors.ArgumentError, pl.errors.ArgumentTypeError
VALUES = st.sampled_from([math.nan, math.inf, 0.25, 0.5, 0.75, 1.0])
SCALES = pl.each([1.0, 0.5, 2.0, 0.25])


def ensemble(members: int = 4, make: Callable[[int], Any] = noisy, fallback: Any = "loop") -> Any:
    """Nothing is traced by default, which takes most of the time of so small a run."""
    return pl.ensemble(lambda seed: make(seed), seeds=range(members), fallback=fallback)


def stream(algorithms: Any, start: Any = None, **changes: Any) -> pl.Stream:
    """Four members with dropout and BatchNorm, Adam, an average of their weights, and an evaluation a batch."""
    settings: dict[str, Any] = {"optimizer": pl.optim.adam(lr=0.05), "max_duration": "3ep", "eval_interval": "1ba"}
    settings |= {"evaluators": {"val": points(1, seed=9)}, "strict": False, **changes}
    return fit(ensemble() if start is None else start, None, [*algorithms, A.ema("2ba")], **settings)


def scores(table: list[list[float]]) -> dict[str, Any]:
    """Evaluators, of which the accuracy of each member has these values, one row an evaluation."""
    following = iter([*(value for values in table for value in values), *[0.0] * 99])
    made = pl.metrics.Metric("accuracy", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    evaluators = {"val": pl.Evaluator(points(1), metrics=[made])}
    return {"evaluators": evaluators, "eval_interval": "1ep", "max_duration": f"{len(table)}ep"}


def best_first(values: list[float], numbers: list[int], mode: str) -> list[int]:
    finite = [number for number in numbers if math.isfinite(values[number])]
    ranked = sorted(finite, key=lambda number: values[number] if mode == "min" else -values[number])
    return ranked + [number for number in numbers if number not in finite]


tables = st.integers(2, 5).flatmap(
    lambda members: st.lists(st.lists(VALUES, min_size=members, max_size=members), min_size=1, max_size=4)
)


# Successive halving


def halved(table: list[list[float]], interval: int, factor: int, least: int, mode: str) -> list[int]:
    """After which epoch each member stops; 0: it doesn't."""
    stops, rung = [0] * len(table[0]), 0
    for epoch, values in enumerate(table, 1):
        if epoch >= interval * factor**rung:
            while epoch >= interval * factor**rung:
                rung += 1
            alive = [number for number, stop in enumerate(stops) if not stop]
            for number in best_first(values, alive, mode)[max(least, len(alive) // factor) :]:
                stops[number] = epoch
    return stops


@examples(12, 200)
@given(
    table=tables,
    interval=st.integers(1, 2),
    factor=st.integers(2, 3),
    least=st.integers(1, 2),
    mode=st.sampled_from(["min", "max"]),
)
def test_the_worst_stop_at_each_rung_and_change_no_more(
    table: list[list[float]], interval: int, factor: int, least: int, mode: Any
) -> None:
    """The others train as if none had stopped."""
    halving = A.successive_halving("val/accuracy", mode=mode, interval=f"{interval}ep", factor=factor, least=least)
    models = ensemble(len(table[0]), mlp)
    watched = {Event.EPOCH_CHECKPOINT}
    states = [state for _, state in fit(models, points(2), [halving], strict=False, watch=watched, **scores(table))]
    whole = [state for _, state in fit(models, points(2), strict=False, watch=watched, **scores(table))]
    stops = halved(table, interval, factor, least, mode)
    memory = states[-1].algorithm_state["successive_halving"]
    assert memory["batch"].tolist() == [2 * stop or -1 for stop in stops]
    for number, stop in enumerate(stops):
        for epoch, (state, other) in enumerate(zip(states, whole, strict=True), 1):
            at_stop = whole[stop - 1] if stop and epoch > stop else other
            equal(state.member(number).params, at_stop.member(number).params)
            assert state.member(number).stop is (0 < stop <= epoch)
            assert state.member(number).timestamp.epoch == (min(epoch, stop) if stop else epoch)
        if stop:
            equal(memory["value"][number], torch.tensor(table[stop - 1][number], dtype=torch.float64))


def test_those_that_go_on_train_on_without_the_others() -> None:
    """A State of them alone ends where they end beside those that have stopped, and in less time."""
    halving = [A.successive_halving("val/loss", interval="1ba", least=2)]
    half = pl.run(stream(halving, max_duration="1ep"))
    numbers = [number for number, runs in enumerate(half.ensemble.running) if runs]
    assert len(numbers) == 2
    whole, fewer = pl.run(stream(halving, half)), pl.run(stream(halving, half.members(numbers)))
    equal(whole.members(numbers).params, fewer.params)


# Population-based training


def sources_of(found: A.Round, exploit: float, mode: str) -> list[set[int]]:
    """From which members each may go on."""
    ranked = best_first(list(found.values), list(range(len(found.values))), mode)
    count = min(max(1, math.floor(exploit * len(ranked) + 1e-9)), len(ranked) // 2) if exploit else 0

    def better(source: int, number: int) -> bool:
        a, b = found.values[source], found.values[number]
        return math.isfinite(a) and (not math.isfinite(b) or (a < b if mode == "min" else a > b))

    return [
        {source if better(source, number) else number for source in ranked[:count]}
        if number in ranked[len(ranked) - count :]
        else {number}
        for number in range(len(ranked))
    ]


@examples(12, 200)
@given(
    table=tables,
    interval=st.integers(1, 2),
    exploit=st.sampled_from([0.0, 0.2, 0.34, 0.5]),
    mode=st.sampled_from(["min", "max"]),
    seed=st.integers(0, 9),
)
def test_the_worst_go_on_from_what_the_best_have_learned(
    table: list[list[float]], interval: int, exploit: float, mode: Any, seed: int
) -> None:
    based = A.population_based("val/accuracy", mode=mode, interval=f"{interval}ep", exploit=exploit)
    ended: Any = None
    found = 0
    settings = {**scores(table), "optimizer": pl.optim.adam(lr=0.05), "seed": seed}
    for event, state in fit(ensemble(len(table[0])), points(2), [based, A.ema("2ba")], strict=False, **settings):
        if event is Event.EPOCH_END:
            ended = state
        elif event is Event.EPOCH_CHECKPOINT:
            exploits = A.rounds(state)
            assert len(exploits) == state.timestamp.epoch // interval
            if len(exploits) > found:
                found += 1
                equal(torch.tensor(exploits[-1].values), torch.tensor(table[state.timestamp.epoch - 1]))
                assert exploits[-1].batch == state.timestamp.batch
                allowed = sources_of(exploits[-1], exploit, mode)
                assert all(one in some for one, some in zip(exploits[-1].sources, allowed, strict=True))
                assert_taken(ended, state, exploits[-1].sources)
            else:
                equal(state.params, ended.params)


def assert_taken(before: pl.State, after: pl.State, sources: tuple[int, ...]) -> None:
    """Each member has what its source has learned, and of its own its seed."""
    for number, source in enumerate(sources):
        one, other = after.member(number), before.member(source)
        for field in ("params", "buffers", "opt_state"):
            equal(getattr(one, field), getattr(other, field))
        equal(one.algorithm_state["ema"], other.algorithm_state["ema"])
        assert one.seed == number
        scales = [1.0 if state.lr_scale is None else float(state.lr_scale) for state in (one, other)]
        assert scales[0] in [scales[1] * factor for factor in ([1.0] if number == source else [0.8, 1.25])]


FLAWS: dict[str, Callable[[pl.State, pl.State], pl.State]] = {
    "optimizer state of its own": lambda before, after: after.replace(opt_state=before.opt_state),
    "buffers of its own": lambda before, after: after.replace(buffers=before.buffers),
    "averages of its own": lambda before, after: after.replace(algorithm_state=before.algorithm_state),
    "a rate of its own": lambda before, after: after.replace(lr_scale=before.lr_scale),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_member_that_keeps_something_of_its_own_is_noticed(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("sys").modules[module_of_population.__module__]
    right = module._exploited

    def wrong(state: pl.State, *rest: Any) -> pl.State:
        return FLAWS[flaw](state, right(state, *rest))

    test = test_the_worst_go_on_from_what_the_best_have_learned.hypothesis.inner_test  # type: ignore[attr-defined]
    table = [[0.25, 0.5, 0.75], [0.75, 0.5, 0.25], [0.25, 0.75, 0.5]]
    test(table, 1, 0.34, "max", 0)
    monkeypatch.setattr(module, "_exploited", wrong)
    with pytest.raises(AssertionError):
        test(table, 1, 0.34, "max", 0)


def explored(state: pl.State, random: torch.Generator) -> pl.State:
    noise = torch.randn((), generator=random)
    return state.replace(params={name: tensor + 0.01 * noise for name, tensor in state.params.items()})


MADE: dict[str, Callable[[], pl.Algorithm]] = {
    "population_based": lambda: A.population_based("val/loss", interval="2ba", exploit=0.5, lr_scale=SCALES),
    "of training": lambda: A.population_based("train/loss", interval="2ba", exploit=0.5),
    "explored": lambda: A.population_based("val/loss", interval="1ba", explore=explored),
    "successive_halving": lambda: A.successive_halving("val/loss", interval="2ba", least=2),
    "halving of training": lambda: A.successive_halving("train/loss", interval="1ba", factor=3),
}


def boundaries(pairs: Iterator[tuple[Event, pl.State]]) -> list[pl.State]:
    return [state for event, state in pairs if event in POSITIONS and event.name.endswith("CHECKPOINT")]


def assert_resumes(make: Callable[[], pl.Algorithm], through: Callable[[pl.State], pl.State], **options: Any) -> None:
    """From each boundary, with a fresh instance, training resumes to the same end."""
    states = boundaries(iter(stream([make()], ensemble(**options))))
    assert len(states) > 9
    mapped = options.get("fallback", "loop") is None  # where each run is traced
    for state in states[4:-1:4] if mapped else states[:-1]:
        resumed = through(state)
        end = pl.run(stream([make()], resumed, watch=set(), donate=False))
        assert not differences(end, states[-1], without=frozenset({"event", "position", "metrics"}))


@pytest.mark.parametrize("name", MADE)
def test_training_resumes_from_every_boundary(name: str) -> None:
    assert_resumes(MADE[name], lambda state: state)


@pytest.mark.slow  # each run is traced
@pytest.mark.parametrize("name", MADE)
def test_mapped_training_resumes(name: str) -> None:
    assert_resumes(MADE[name], lambda state: state, fallback=None)


def kept_outside() -> pl.Algorithm:
    """Its last round is in no State."""
    based, last = MADE["population_based"](), {"since": 0}

    def wrong(function: Any) -> Any:
        def changed(state: pl.State) -> pl.State:
            memory = state.algorithm_state["population_based"]
            state = function(state.remember("population_based", {**memory, **last}))
            last["since"] = state.algorithm_state["population_based"]["since"]
            return state

        return changed

    handlers = {event: tuple(map(wrong, listed)) for event, listed in based.handlers.items()}
    return pl.Algorithm("population_based", handlers, init=based.init, across_members=True)


def test_what_is_kept_outside_of_the_state_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_resumes(kept_outside, lambda state: state)


@pytest.mark.parametrize("name", ["population_based", "explored", "successive_halving"])
def test_training_resumes_from_files(name: str, tmp_path: Path) -> None:

    def through(state: pl.State) -> pl.State:
        path = tmp_path / f"{state.timestamp.batch}.{state.position.name}.safetensors"  # type: ignore[union-attr]
        pl.save(state, path)
        return pl.load(path, model=noisy())

    assert_resumes(MADE[name], through)


def test_a_history_has_room_for_any_number_of_rounds() -> None:
    based = A.population_based("val/loss", interval="1ba", exploit=0.5)
    state = pl.run(stream([based], max_duration="70ba"))
    found = A.rounds(state)
    assert [each.batch for each in found] == list(range(1, 71))
    assert state.algorithm_state["population_based"]["source"].shape == (4, 128)
    assert found[-1].lr_scales == tuple(state.lr_scale.tolist())  # type: ignore[union-attr]
    (*_, last) = A.rounds(state.member(1))
    assert (last.sources, last.values) == (found[-1].sources[1:2], found[-1].values[1:2])


@pytest.mark.parametrize("way", ["mapped", "loop", "compiled", pytest.param("inductor", marks=pytest.mark.slow)])
def test_each_member_trains_at_its_rate_times_its_factor(way: str) -> None:
    """As it trains alone with that factor."""
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "strict": False}
    models = ensemble(4, mlp, fallback="loop" if way == "loop" else None)
    start = next(state for event, state in fit(models, None, **settings) if event is Event.EPOCH_CHECKPOINT)
    scale = torch.tensor([1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    with interpreted() if way == "compiled" else nullcontext():
        compiled = way in ("compiled", "inductor")
        end = pl.run(fit(start.replace(lr_scale=scale), None, compile=compiled, **settings))
    equal(end.lr_scale, scale)
    for number in range(4):
        alone = pl.run(fit(start.member(number).replace(lr_scale=scale[number]), None, **settings))
        for name, tensor in alone.params.items():
            torch.testing.assert_close(end.member(number).params[name], tensor, rtol=1e-5, atol=1e-6)
    equal(end.member(3).params, start.member(3).params)


# What they need of the loop


def test_one_member_may_have_a_factor_where_another_has_none() -> None:
    """Each reduces its rates where it would alone."""
    rates = [0.0, 0.05, 0.2]
    plateau = [A.reduce_on_plateau("val/loss", patience=0, factor=0.5)]
    options: dict[str, Any] = {"evaluators": {"val": points(1)}, "max_duration": "3ep", "strict": False}
    end = pl.run(fit(ensemble(3, mlp), None, plateau, optimizer=pl.optim.sgd(lr=pl.each(rates)), **options))
    for number, rate in enumerate(rates):
        alone = pl.run(fit(mlp(number), None, plateau, optimizer=pl.optim.sgd(lr=rate), seed=number, **options))
        assert float(end.lr_scale[number]) == float(1.0 if alone.lr_scale is None else alone.lr_scale)  # type: ignore[index]


@pytest.mark.parametrize("watch", [None, {Event.FIT_END}])
@pytest.mark.parametrize("fallback", [None, "loop"])
def test_a_handler_across_members_at_batch_end_is_called_once_a_batch(fallback: Any, watch: Any) -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []

    @pl.algorithm(Event.BATCH_END, across_members=True, when=lambda state: state.timestamp.batch % 2 == 0)
    def compare(state: pl.State) -> pl.State:
        seen.append((state.members, tuple(state.loss.shape)))
        return state

    pl.run(fit(ensemble(3, mlp, fallback=fallback), None, [compare], strict=False, watch=watch))
    assert seen == [(3, (3,))] * 3


def test_a_memory_of_other_members_is_refused() -> None:
    make = MADE["successive_halving"]
    state = pl.run(stream([make()], max_duration="1ep"))
    memory = {**state.algorithm_state["successive_halving"], "value": torch.ones(4, 2)}
    other = state.remember("successive_halving", memory)
    with pytest.raises(pl.errors.ResumeError, match=r"\['successive_halving'\]\['value'\] is \(4, 2\) float32"):
        stream([make()], other)


# Refused


def refused(call: Callable[[], Any], error: type[Exception], *says: str, at_once: bool = True) -> Refusal:
    return Refusal(says[0], call, error, says, at_once)


def no_state(state: pl.State, random: torch.Generator) -> Any:
    return state.params


OWN = pl.optim.Optimizer(name="own", init=lambda p: {}, update=lambda g, o, p, t: (p, o), lr=lambda timestamp: 0.1)
BASED, HALVING = A.population_based("val/loss", interval="1ba"), A.successive_halving("val/loss")
REFUSALS = [
    refused(lambda: fit(None, None, [HALVING]), ARG, "'successive_halving' compares members, and there is one model"),
    refused(lambda: fit(None, None, [BASED]), ARG, "'population_based' compares members, and there is one model"),
    refused(lambda: stream([HALVING], ensemble(1)), ARG, "'successive_halving' compares members, and the ensemble has"),
    refused(lambda: stream([BASED], ensemble(1)), ARG, "'population_based' compares members, and the ensemble has one"),
    refused(lambda: stream([A.successive_halving("vall/loss")]), ARG, "no metric 'vall/loss'; did you"),
    refused(lambda: stream([A.population_based("vall/loss")]), ARG, "no metric 'vall/loss'; did you mean 'val/loss'?"),
    refused(lambda: A.population_based("val/mine"), ARG, "whether less or more of it is better is not known"),
    refused(lambda: A.population_based(exploit=0.6), ARG, "exploit must be a number from 0 to 0.5, got 0.6"),
    refused(lambda: A.population_based(exploit=-0.1), ARG, "exploit must be a number from 0 to 0.5, got -0.1"),
    refused(lambda: A.population_based(interval="0.1dur"), ARG, "interval='0.1dur' is a part of the duration"),
    refused(lambda: A.successive_halving(factor=1), ARG, "factor"),
    refused(lambda: A.population_based(explore=lambda: None), TYPE, "is no function of (state, generator)"),  # type: ignore[arg-type, return-value]
    refused(lambda: A.population_based(lr_scale=0.5), TYPE, "lr_scale=pl.each([0.1, 1.0])"),  # type: ignore[arg-type]
    refused(lambda: A.population_based(lr_scale=pl.each([1.0, 0.0])), ARG, "lr_scale has 0.0: each factor is a number"),
    refused(
        lambda: stream([A.population_based(lr_scale=pl.each([1.0, 2.0]))]),
        *(ARG, "the lr_scale of algorithm 'population_based' has pl.each of length 2, and there are 4 members"),
    ),
    refused(lambda: stream([BASED], optimizer=OWN), ARG, "optimizer 'own' does not take state.lr_scale"),
    refused(
        lambda: stream([BASED], optimizer=pl.optim.sgd(lr=pl.each([0.1, 0.2, 0.3, 0.4]))),
        *(ARG, "the learning rate of the optimizer is a pl.each", "population_based(lr_scale=pl.each(factors))"),
    ),
    refused(
        lambda: stream([A.population_based("val/loss", interval="1ba", explore=no_state, exploit=0.5)]),
        *(pl.errors.AlgorithmReturnError, "explore=no_state returned a FrozenDict", "population_based"),
        at_once=False,
    ),
    refused(lambda: A.rounds(pl.State.create(mlp())), ARG, "this State has no rounds under 'population_based'"),
    refused(lambda: A.rounds(3), TYPE, "rounds(state, 'population_based')"),  # type: ignore[arg-type]
]


@rows(REFUSALS)
def test_mistakes_are_refused(refusal: Refusal) -> None:
    check(refusal)
