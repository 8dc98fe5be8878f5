"""Each schedule is its formula, a pure function of the timestamp; a run uses its value at each batch."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import schedules as s
from pure_loop.errors import ArgumentError, ArgumentTypeError, TimeFormatError
from pure_loop.optim.optimizer import fixed_rate
from pure_loop.time import Time, Timestamp
from tests.support import problem
from tests.support.refused import Refusal, check, rows
from tests.support.tiers import examples


@st.composite
def numbers(draw: Any) -> Any:
    """Settings of a schedule: three lengths, of which the last is a part of the second, two values, and factors."""
    w, rest, d = draw(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 9)))
    a, b, gamma = draw(st.tuples(st.floats(0.1, 5), st.floats(0, 5), st.floats(0.1, 1.5)))
    rise, power = draw(st.tuples(st.sampled_from([0.25, 0.5, 0.625]), st.sampled_from([0.5, 1.0, 3.0])))
    return SimpleNamespace(w=w, t=w + rest + d, d=d, a=a, b=b, gamma=gamma, rise=rise, power=power)


def line(start: float, end: float, tau: float) -> float:
    return start + (end - start) * min(1.0, max(0.0, tau))


def half_cosine(start: float, end: float, tau: float) -> float:
    return line(start, end, (1 - math.cos(math.pi * min(1.0, tau))) / 2)


def after(n: Any, now: float) -> float:
    return (now - n.w) / (n.t - n.w)


def restarted(n: Any, now: float) -> float:
    begin, length = 0.0, float(n.t)
    while now - begin >= length:
        begin, length = begin + length, length * 1.5
    return half_cosine(n.a, n.b, (now - begin) / length)


def triangle(n: Any, now: float) -> float:
    cycle, tau = now // n.t, now % n.t / n.t
    high = n.b + n.a * n.gamma**cycle
    return line(n.b, high, tau / n.rise) if tau < n.rise else line(high, n.b, (tau - n.rise) / (1 - n.rise))


def one_cycle(n: Any, now: float) -> float:
    rise = n.rise * n.t
    return half_cosine(n.b, n.a, now / rise) if now < rise else half_cosine(n.a, 0.1, (now - rise) / (n.t - rise))


def warmed(n: Any, now: float, then: float) -> float:
    return n.a * now / n.w if now < n.w else then  # type: ignore[no-any-return]


# How each is written, where ``T`` writes a length as a time.
WRITTEN: dict[str, Callable[[Any, Callable[[int], Any]], Any]] = {
    "constant": lambda n, T: s.constant(n.a),
    "linear": lambda n, T: s.linear(n.a, n.b, T(n.t)),
    "cosine": lambda n, T: s.cosine(T(n.t), peak=n.a, warmup=T(n.w), final=n.b),
    "polynomial": lambda n, T: s.polynomial(T(n.t), power=n.power, peak=n.a, warmup=T(n.w), final=n.b),
    "warmup_stable_decay": lambda n, T: s.warmup_stable_decay(T(n.w), T(n.t), T(n.d), n.a, n.b),
    "one_cycle": lambda n, T: s.one_cycle(T(n.t), n.a, rise=n.rise, start=n.b, end=0.1),
    "cyclic": lambda n, T: s.cyclic(T(n.t), n.b, n.b + n.a, rise=n.rise, gamma=n.gamma),
    "cosine_restarts": lambda n, T: s.cosine_restarts(T(n.t), peak=n.a, final=n.b, growth=1.5),
    "inverse_sqrt": lambda n, T: s.inverse_sqrt(T(n.w), n.a),
    "step": lambda n, T: s.step(T(n.t), gamma=n.gamma, start=n.a),
    "multistep": lambda n, T: s.multistep([T(n.w), T(n.t)], gamma=n.gamma, start=n.a),
    "exponential": lambda n, T: s.exponential(T(n.t), gamma=n.gamma, start=n.a),
    "piecewise": lambda n, T: s.piecewise({0: n.a, T(n.w): n.b, T(n.t): n.gamma}),
    "warmup": lambda n, T: s.warmup(T(n.w), s.linear(n.a, n.b, T(n.t))),
    "chain": lambda n, T: s.chain(n.a, (T(n.w), s.linear(n.a, n.b, T(n.t))), (T(n.t), 0.3)),
    "product": lambda n, T: 2.0 * s.linear(n.a, n.b, T(n.t)) * (lambda timestamp: n.gamma),
}
# Its value when ``now`` of the unit is finished.
FORMULAS: dict[str, Callable[[Any, float], float]] = {
    "constant": lambda n, now: n.a,
    "linear": lambda n, now: line(n.a, n.b, now / n.t),
    "cosine": lambda n, now: warmed(n, now, half_cosine(n.a, n.b, after(n, now))),
    "polynomial": lambda n, now: warmed(n, now, line(n.b, n.a, max(0, 1 - after(n, now)) ** n.power)),
    "warmup_stable_decay": lambda n, now: line(0, n.a, now / n.w) - n.a + line(n.a, n.b, (now - n.t + n.d) / n.d),
    "one_cycle": one_cycle,
    "cyclic": triangle,
    "cosine_restarts": restarted,
    "inverse_sqrt": lambda n, now: warmed(n, now, n.a * math.sqrt(n.w / max(now, 1))),
    "step": lambda n, now: n.a * n.gamma ** (now // n.t),
    "multistep": lambda n, now: n.a * n.gamma ** ((now >= n.w) + (now >= n.t)),
    "exponential": lambda n, now: n.a * n.gamma ** (now / n.t),
    "piecewise": lambda n, now: n.a if now < n.w else n.b if now < n.t else n.gamma,
    "warmup": lambda n, now: min(1, now / n.w) * line(n.a, n.b, now / n.t),
    "chain": lambda n, now: n.a if now < n.w else line(n.a, n.b, now / n.t) if now < n.t else 0.3,
    "product": lambda n, now: 2 * line(n.a, n.b, now / n.t) * n.gamma,
}
UNITS = {"ba": "batch", "sp": "sample", "tok": "token", "iter": "iteration", "s": "total_seconds", "ep": "epoch"}


def test_each_schedule_of_the_library_has_a_formula() -> None:
    found = {name for name in s.__all__ if isinstance(getattr(s, name), type)}
    assert found - {"Schedule"} == FORMULAS.keys() == WRITTEN.keys()


@pytest.mark.parametrize("name", FORMULAS)
@examples(30, 300)
@given(numbers(), st.integers(0, 60), st.sampled_from([*UNITS, "dur", "part of an epoch"]))
def test_the_value_is_its_formula_in_every_unit(name: str, n: Any, now: int, unit: str) -> None:
    """A fraction of the duration is exact; epochs pass batch by batch where their length is known."""
    write, formula = WRITTEN[name], FORMULAS[name]
    if unit == "dur":
        schedule = write(n, lambda length: f"{length / 100}dur")
        value = schedule(Timestamp(batch=now, max_duration=Time("100ba")))
    elif unit == "part of an epoch":
        schedule = write(n, lambda length: f"{length}ep")
        where = {"batch": now, "epoch": now // 4, "batch_in_epoch": now % 4, "batches_per_epoch": 4}
        value = schedule(Timestamp(**where))
        n = SimpleNamespace(**vars(n) | {"w": 4 * n.w, "t": 4 * n.t, "d": 4 * n.d})
    else:
        schedule = write(n, lambda length: f"{length}{unit}")
        value = schedule(Timestamp(**{UNITS[unit]: now}))
    assert type(value) is float
    assert value == pytest.approx(formula(n, now), abs=1e-9)


@examples(30, 300)
@given(numbers(), st.integers(0, 60))
def test_a_chain_that_restarts_counts_from_each_start(n: Any, now: int) -> None:
    schedule = s.chain(0.5, (f"{n.w}ba", s.linear(n.a, n.b, f"{n.t}ba")), restart=True)
    assert schedule(Timestamp(batch=now)) == pytest.approx(0.5 if now < n.w else line(n.a, n.b, (now - n.w) / n.t))
    epochs = s.chain(0.5, (f"{n.w}ep", s.linear(n.a, n.b, f"{n.t}ep")), restart=True)
    at = Timestamp(batch=now, epoch=now // 3, batch_in_epoch=now % 3, batches_per_epoch=3)
    assert epochs(at) == pytest.approx(0.5 if now < 3 * n.w else line(n.a, n.b, (now / 3 - n.w) / n.t))


def test_a_warmup_in_a_unit_that_can_not_be_converted_is_a_factor() -> None:
    schedule = s.cosine("4ep", peak=2.0, warmup="10ba")
    assert [schedule(Timestamp(batch=b, epoch=e)) for b, e in ((5, 0), (5, 2), (10, 2))] == pytest.approx([1, 0.5, 1])
    known = Timestamp(batch=5, epoch=1, batches_per_epoch=5)
    assert s.cosine("20ba", warmup="1ep")(known) == s.cosine("20ba", warmup="5ba")(known)


def test_schedules_print_what_was_written_and_are_values() -> None:
    for text, schedule in {
        "cosine(time='3ep', peak=0.1)": s.cosine("3ep", peak=0.1),
        "constant(2.0) * constant(1.0)": 2 * s.constant(1),
        "chain(constant(1.0), ('2ba', constant(0.5)))": s.chain(1.0, ("2ba", 0.5)),
        "piecewise({'0ba': 1.0, '3ba': 0.5})": s.piecewise({"0ba": 1.0, "3ba": 0.5}),
    }.items():
        assert repr(schedule) == text
        assert hash(pickle.loads(pickle.dumps(schedule))) == hash(schedule)


def test_a_duration_of_nothing_is_over() -> None:
    done = Timestamp(max_duration=Time("0ba"))
    assert [each("0.5dur")(done) for each in (lambda t: s.linear(1, 0, t), s.cosine, s.cosine_restarts)] == [0.0] * 3
    assert s.step("0.1dur")(done) == s.exponential("0.1dur", gamma=0.5)(done) == 1.0


class Growing(s.constant):
    def __call__(self, timestamp: Timestamp) -> float:
        return self.value * (timestamp.batch + 1)


class OfClass(s.Schedule):
    @classmethod
    def __call__(cls, timestamp: Timestamp) -> float:
        return 0.5


def test_a_schedule_of_ones_own_is_called_however_it_is_written_and_is_not_fixed() -> None:
    """A fixed value is what an optimizer takes for the rate of the whole run."""
    assert [each(Timestamp(batch=1)) for each in (Growing(0.5), OfClass())] == [1.0, 0.5]
    assert fixed_rate(s.constant(0.5)) == 0.5
    for schedule in (Growing(0.5), s.linear(1.0, 1.0, "4ba"), 2 * s.constant(0.5), s.constant(-1.0), lambda t: 0.5):
        assert fixed_rate(schedule) is None


def test_all_times_are_scaled_but_warmups_and_fractions() -> None:
    for schedule, ratio, wanted in (
        (s.cosine("100ba", warmup="10ba"), 0.5, s.cosine("50ba", warmup="10ba")),
        (s.warmup("10ba", s.step("5ep")), 2.0, s.warmup("10ba", s.step("10ep"))),
        (s.multistep(["2ba", "0.5dur"]) * 2.0, 3.0, s.multistep(["6ba", "0.5dur"]) * 2.0),
        (s.chain(1.0, ("10ba", 0.5)), 0.5, s.chain(1.0, ("5ba", 0.5))),
    ):
        assert s.scaled(schedule, ratio) == wanted
    assert s.scaled(s.cosine("100ba", warmup="10ba"), 0.5, warmup=True) == s.cosine("50ba", warmup="5ba")


def test_a_picture_and_a_line_of_text() -> None:
    axes = s.plot({"a": s.cosine("1ep"), "b": s.constant(0.5)}, "2ep", batches_per_epoch=10)
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert list(axes.lines[0].get_ydata())[::10] == pytest.approx([1.0, 0.0, 0.0])
    assert s.plot(s.linear(1, 0, "4ba"), "4ba", axes=axes) is axes
    assert s.sparkline(s.linear(1.0, 0.0, "7ba"), "7ba", width=8) == "█▇▆▅▄▃▂▁"


S: Any = s  # of which anything may be asked
NONE: Any = lambda timestamp: None  # noqa: E731
ARG, TYPE = ArgumentError, ArgumentTypeError
REFUSED = [
    Refusal(says, call, error, (says,))
    for says, error, call in (
        ("can't change over a time of '0ba'", ARG, lambda: s.linear(1, 0, "0ba")),
        ("soon", TimeFormatError, lambda: s.linear(1, 0, "soon")),
        ("linear: start must be a finite number, got '1' of type", TYPE, lambda: S.linear("1", 0, "2ba")),
        ("must be a finite number, got nan", ARG, lambda: s.constant(math.nan)),
        ("warmup of '5ba' leaves nothing of '5ba'", ARG, lambda: s.cosine("5ba", warmup="5ba")),
        ("several times, such as ['5ba', ...]", TYPE, lambda: s.multistep("5ba")),
        ("the class linear; give a schedule: linear(...)", TYPE, lambda: S.warmup("1ba", S.linear)),
        ("called as <lambda>(timestamp)", TYPE, lambda: 0.5 * S.constant(1) * (lambda: 1.0)),
        ("not of a tensor of (2,)", TYPE, lambda: torch.ones(2) * s.constant(1.0)),
        ("write schedule(state.timestamp) * tensor", TYPE, lambda: S.constant(1.0) * torch.ones(2)),
        ("<lambda> gave None of type NoneType", TYPE, lambda: (s.constant(1.0) * NONE)(Timestamp())),
        ("schedule <lambda> gave None", TYPE, lambda: s.warmup("1ba", NONE)(Timestamp())),
        ("'0.5dur' needs timestamp.max_duration", ARG, lambda: s.linear(1, 0, "0.5dur")(Timestamp())),
        ("write both in one unit", ARG, lambda: s.chain(1.0, ("2ba", s.cosine("1ep")), restart=True)),
        ("leave restart out", ARG, lambda: s.chain(1.0, ("2ba", NONE), restart=True)),
        ("write the time in batches", ARG, lambda: s.chain(1.0, ("0.5dur", s.constant(1)), restart=True)),
        ("no pair", TYPE, lambda: S.chain(1.0, S.constant(2.0))),
        ("starts at time 0", ARG, lambda: s.piecewise({"2ba": 1.0})),
        ("give a mapping of times", TYPE, lambda: S.piecewise([1.0])),
        ("decay='5ba' is no part of", ARG, lambda: s.warmup_stable_decay("1ba", "4ba", "5ba")),
        ("are longer than", ARG, lambda: s.warmup_stable_decay("3ba", "4ba", "2ba")),
        ("of a function of your own", TYPE, lambda: S.scaled(NONE, 0.5)),
        ("write it in batches", ARG, lambda: s.sparkline(s.constant(1), "1000tok")),
    )
]


@rows(REFUSED)
def test_what_no_schedule_can_use_is_refused(refusal: Refusal) -> None:
    check(refusal)


class Unsized:
    """Batches without a length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


FOUR = problem.points(4, 2)


def rates_of_a_fit(schedule: Any, data: Any = FOUR, start: Any = None, **options: Any) -> list[float]:
    """The learning rates that a run recorded, batch by batch."""
    logger = pl.loggers.InMemoryLogger()
    options = {"max_duration": "3ep", "loggers": [logger], "optimizer": pl.optim.sgd(lr=schedule)} | options
    problem.run(start, data, **options)
    return [rate for _, rate in logger.metrics["train/learning_rate"]]


def test_a_run_uses_the_value_of_each_batch() -> None:
    """Epochs of a length that isn't known are stairs, and a limit makes them smooth."""
    smooth = [1 - batch / 12 for batch in range(12)]
    for time in ("3ep", "1dur", "12ba"):
        assert rates_of_a_fit(s.linear(1, 0, time)) == pytest.approx(smooth)
    assert rates_of_a_fit(s.linear(1, 0, "3ep"), Unsized(FOUR)) == pytest.approx([1 - b // 4 / 3 for b in range(12)])
    cycle = itertools.cycle(FOUR)
    assert rates_of_a_fit(s.linear(1, 0, "3ep"), cycle, batches_per_epoch=4) == pytest.approx(smooth)


def test_a_run_that_resumes_with_other_data_goes_by_its_length() -> None:
    pairs = list(problem.fit(None, FOUR, max_duration="1ep"))
    checkpoint = next(state for event, state in pairs if event is pl.Event.BATCH_CHECKPOINT)
    rates = rates_of_a_fit(s.linear(1, 0, "3ep"), FOUR[:2], start=pairs[-1][1])
    assert rates == pytest.approx([1 - half / 6 for half in (2, 3, 4, 5)])
    for event, state in problem.fit(checkpoint, Unsized(FOUR), max_duration="1ep"):
        assert state.timestamp.batches_per_epoch is None, event
        assert state.previous_timestamp.batches_per_epoch is None, event
