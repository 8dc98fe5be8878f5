"""Schedules are pure functions of the timestamp, with the right numbers at the right batches."""

from __future__ import annotations

import itertools
import math
import pickle
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

SCHEDULES: list[Any] = [
    s.constant(0.5),
    s.linear(1.0, 0.0, "7ba"),
    s.linear(1.0, 0.25, "0.5dur"),
    s.cosine("20ba", peak=0.3, warmup="5ba", final=0.1),
    s.cosine("3ep", peak=0.3, warmup="50ba"),
    s.cosine("1dur", warmup="0.1dur"),
    s.polynomial("9ba", power=2, warmup="3ba"),
    s.cosine_restarts("3ba", growth=2),
    s.step("4ba", gamma=0.5),
    s.step("0.1dur", gamma=0.5, start=2.0),
    s.multistep(["2ba", "1ep", "0.5dur"], gamma=0.1),
    s.exponential("10ba", gamma=0.5),
    s.warmup("5ba", s.linear(1, 0, "20ba")),
    2.0 * s.linear(1, 0, "7ba") * s.warmup("3ba"),
]


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (s.linear(1.0, 0.0, "4ba"), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (s.linear(0.0, 1.0, "1dur"), [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]),
        (s.cosine("4ba"), [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0]),
        (s.cosine("6ba", peak=2.0, warmup="2ba"), [0.0, 1.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]),
        (s.cosine("4ba", warmup="0ba"), [1.0]),
        (s.cosine("0.5dur", warmup="0.25dur"), [0.0, 0.5, 1.0, 0.5, 0.0]),
        (s.polynomial("4ba", power=3, warmup="2ba", final=1.0, peak=9.0), [0.0, 4.5, 9.0, 2.0, 1.0, 1.0]),
        (s.step("3ba", gamma=0.5), [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]),
        (s.multistep(["3ba", "0.5dur"], gamma=0.5), [1.0, 1.0, 1.0, 0.5, 0.25, 0.25]),
        (s.exponential("1ba", gamma=0.5), [1.0, 0.5, 0.25]),
        (s.cosine_restarts("2ba", peak=2.0, final=1.0), [2.0, 1.5, 2.0, 1.5, 2.0]),
        (s.warmup("2ba"), [0.0, 0.5, 1.0, 1.0]),
        (s.linear(1, 0, "4ba") * s.constant(8.0), [8.0, 6.0, 4.0, 2.0, 0.0]),
        (0.5 * s.linear(1, 0, "4ba") * (lambda t: 2.0), [1.0, 0.75]),
    ],
)
def test_the_batch_that_starts_at_a_timestamp_uses_its_value(schedule: Any, values: list[float]) -> None:
    given = [schedule(Timestamp(batch=i, max_duration=Time("8ba"))) for i in range(len(values))]
    assert given == pytest.approx(values, abs=1e-12)


@given(st.integers(1, 60), st.integers(0, 80), st.floats(-5, 5), st.floats(-5, 5))
def test_a_line_is_exact_at_its_ends_and_stays_between(t: int, batch: int, start: float, end: float) -> None:
    schedule = s.linear(start, end, Time(t, "ba"))
    assert schedule(Timestamp()) == start
    assert schedule(Timestamp(batch=t + batch)) == end
    assert schedule(Timestamp(batch=batch)) == pytest.approx(start + (end - start) * min(batch / t, 1.0), abs=1e-12)


@given(
    st.integers(2, 50).flatmap(lambda t: st.tuples(st.integers(0, t - 1), st.just(t))),
    st.integers(0, 60),
    st.floats(0.1, 5),
    st.floats(0, 0.1),
)
def test_cosine_is_its_formula(times: tuple[int, int], batch: int, peak: float, final: float) -> None:
    warmup, t_max = times
    value = s.cosine(Time(t_max, "ba"), peak=peak, warmup=Time(warmup, "ba"), final=final)(Timestamp(batch=batch))
    if batch < warmup:
        assert value == pytest.approx(peak * batch / warmup)
    else:
        tau = min(1.0, (batch - warmup) / (t_max - warmup))
        assert value == pytest.approx(final + (peak - final) * (1 + math.cos(math.pi * tau)) / 2)


@given(st.sampled_from(SCHEDULES), st.integers(0, 100), st.integers(0, 4), st.sampled_from(["30ba", "4ep"]))
def test_schedules_are_values(schedule: Any, batch: int, epoch: int, duration: str) -> None:
    timestamp = Timestamp(batch=batch, epoch=epoch, max_duration=Time(duration))
    value = schedule(timestamp)
    assert type(value) is float
    assert math.isfinite(value)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again(timestamp) == schedule(timestamp) == value


@pytest.mark.parametrize("unit", ["sp", "tok", "ep", "iter", "s"])
def test_every_unit_has_its_count(unit: str) -> None:
    field = {"sp": "sample", "tok": "token", "ep": "epoch", "iter": "iteration", "s": "total_seconds"}[unit]
    now: dict[str, Any] = {field: 1}
    assert s.linear(1.0, 0.0, f"4{unit}")(Timestamp(**now)) == 0.75
    assert s.linear(1.0, 0.0, "0.5dur")(Timestamp(**now, max_duration=Time(f"8{unit}"))) == 0.75


@given(st.integers(1, 40), st.sampled_from([0.1, 0.7, 0.3, 0.05]))
def test_a_fraction_of_the_duration_is_an_exact_number_of_its_units(batches: int, fraction: float) -> None:
    tenths = round(fraction * 100)
    for batch in range(batches + 1):
        timestamp = Timestamp(batch=batch, max_duration=Time(batches, "ba"))
        assert s.step(f"{fraction}dur", gamma=0.5)(timestamp) == 0.5 ** (batch * 100 // (tenths * batches))
        assert s.multistep([f"{fraction}dur"], gamma=0.5)(timestamp) == (0.5 if batch * 100 >= tenths * batches else 1)


def test_a_warmup_in_another_unit_is_a_factor() -> None:
    schedule = s.cosine("4ep", peak=2.0, warmup="10ba")
    assert schedule(Timestamp(batch=5, epoch=0)) == 1.0
    assert schedule(Timestamp(batch=5, epoch=2)) == pytest.approx(0.5)
    assert schedule(Timestamp(batch=10, epoch=2)) == pytest.approx(1.0)
    # A fraction of the duration is in the unit of the duration, so these are the same unit.
    same = s.cosine("4ep", peak=2.0, warmup="0.5dur")
    assert same(Timestamp(epoch=3, max_duration=Time("4ep"))) == pytest.approx(1.0)


def test_epochs_pass_batch_by_batch_where_their_length_is_known() -> None:
    def at(batch: int) -> Timestamp:
        return Timestamp(
            batch=batch, epoch=batch // 5, batch_in_epoch=batch % 5, batches_per_epoch=5, max_duration=Time("4ep")
        )

    pairs = [
        (s.linear(1, 0, "2ep"), s.linear(1, 0, "10ba")),
        (s.linear(1, 0, "0.5dur"), s.linear(1, 0, "10ba")),
        (s.cosine("4ep", peak=0.3, warmup="3ba"), s.cosine("20ba", peak=0.3, warmup="3ba")),
        (s.cosine("20ba", peak=0.3, warmup="1ep"), s.cosine("20ba", peak=0.3, warmup="5ba")),
        (s.step("1ep"), s.step("5ba")),
        (s.cosine_restarts("2ep"), s.cosine_restarts("10ba")),
        (s.multistep(["1ep", "0.5dur"]), s.multistep(["5ba", "10ba"])),
    ]
    for epochs, batches in pairs:
        for batch in range(25):
            assert epochs(at(batch)) == batches(at(batch))


class Unsized:
    def __init__(self, data: list[Any]) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return iter(self._data)


DATA = [(torch.ones(2, 1), torch.zeros(2, 1))] * 4


def rates_of_a_fit(schedule: Any, data: Any = DATA, start: Any = None, **options: Any) -> list[float]:
    """The learning rates that a real run recorded, batch by batch."""
    logger = pl.loggers.InMemoryLogger()
    stream = pl.fit(
        torch.nn.Linear(1, 1) if start is None else start,
        data,
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=schedule),
        **{"max_duration": "3ep", "loggers": [logger], **options},
    )
    pl.run(stream)
    return [rate for _, rate in logger.metrics["train/learning_rate"]]


def test_a_cosine_over_epochs_is_smooth_in_fit() -> None:
    wanted = [(1 + math.cos(math.pi * batch / 12)) / 2 for batch in range(12)]
    assert rates_of_a_fit(s.cosine("3ep")) == pytest.approx(wanted)
    assert rates_of_a_fit(s.cosine("1dur")) == pytest.approx(wanted)
    assert rates_of_a_fit(s.cosine("12ba")) == pytest.approx(wanted)
    warm = rates_of_a_fit(s.cosine("3ep", warmup="2ba"))
    assert warm == pytest.approx(rates_of_a_fit(s.cosine("12ba", warmup="2ba")))


def test_data_without_a_length_gives_stairs_and_a_limit_makes_them_smooth() -> None:
    stairs = [1 - batch // 4 / 3 for batch in range(12)]
    assert rates_of_a_fit(s.linear(1, 0, "3ep"), Unsized(DATA)) == pytest.approx(stairs)
    smooth = rates_of_a_fit(s.linear(1, 0, "3ep"), itertools.cycle(DATA), batches_per_epoch=4)
    assert smooth == pytest.approx([1 - batch / 12 for batch in range(12)])


def test_going_on_with_other_data_goes_by_its_length() -> None:
    pairs = list(
        pl.fit(
            torch.nn.Linear(1, 1),
            DATA,
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
        )
    )
    last = pairs[-1][1]
    assert last.timestamp.batches_per_epoch == last.previous_timestamp.batches_per_epoch == 4
    rates = rates_of_a_fit(s.linear(1, 0, "3ep"), DATA[:2], start=last)
    assert rates == pytest.approx([1 - half / 6 for half in (2, 3, 4, 5)])
    checkpoint = next(state for event, state in pairs if event is pl.Event.BATCH_CHECKPOINT)
    for event, state in pl.fit(
        checkpoint,
        Unsized(DATA),
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
    ):
        assert state.timestamp.batches_per_epoch is None, event
        assert state.previous_timestamp.batches_per_epoch is None, event


def test_a_fraction_without_a_duration_teaches() -> None:
    with pytest.raises(ArgumentError, match=r"'0.5dur' needs timestamp.max_duration.*write the time in another unit"):
        s.linear(1, 0, "0.5dur")(Timestamp())


def test_a_duration_of_nothing_is_over() -> None:
    done = Timestamp(max_duration=Time("0ba"))
    assert s.linear(1, 0, "0.5dur")(done) == 0.0
    assert s.cosine("1dur")(done) == 0.0
    assert s.step("0.1dur")(done) == s.exponential("0.1dur", gamma=0.5)(done) == 1.0
    assert s.cosine_restarts("0.1dur")(done) == 0.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: s.linear(1, 0, "0ba"), ArgumentError, "can't change over a time of '0ba'"),
        (lambda: s.linear(1, 0, "soon"), TimeFormatError, "soon"),
        (
            lambda: s.linear("1", 0, "2ba"),
            ArgumentTypeError,
            "linear: start must be a finite number, got '1' of type str",
        ),
        (lambda: s.constant(True), ArgumentTypeError, "number"),
        (lambda: s.constant(math.nan), ArgumentError, "finite"),
        (lambda: s.cosine("5ba", warmup="5ba"), ArgumentError, "a warmup of '5ba' leaves nothing of '5ba'"),
        (lambda: s.polynomial("5ba", power=0), ArgumentError, "power"),
        (lambda: s.exponential("5ba", gamma=0.0), ArgumentError, "gamma"),
        (lambda: s.cosine_restarts("5ba", growth=0), ArgumentError, "growth"),
        (lambda: s.cosine_restarts("5ba", growth="2"), ArgumentTypeError, "growth"),
        (lambda: s.multistep(5), ArgumentTypeError, r"several times, such as \[5, ...\]"),
        (lambda: s.warmup("1ba", s.linear), ArgumentTypeError, r"the class linear; give a schedule: linear\(...\)"),
        (lambda: 0.5 * s.constant(1) * (lambda: 1.0), ArgumentTypeError, r"called as <lambda>\(timestamp\)"),
        (
            lambda: (s.constant(1.0) * (lambda timestamp: None))(Timestamp()),
            ArgumentTypeError,
            "the schedule <lambda> gave None of type NoneType",
        ),
        (lambda: s.warmup("1ba", lambda t: None)(Timestamp()), ArgumentTypeError, "schedule <lambda> gave None"),
        (lambda: s.multistep("5ba"), ArgumentTypeError, r"several times, such as \['5ba', ...\]"),
    ],
)
def test_what_no_schedule_can_use_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_schedules_print_what_was_written() -> None:
    assert repr(s.cosine("3ep", peak=0.1)) == "cosine(time='3ep', peak=0.1)"
    assert repr(2 * s.constant(1)) == "constant(2.0) * constant(1.0)"


def test_only_a_constant_has_a_fixed_value() -> None:
    """What an optimizer takes for the rate of the whole run."""

    class Growing(s.constant):
        def __call__(self, timestamp: Timestamp) -> float:
            return self.value * (timestamp.batch + 1)

    assert fixed_rate(s.constant(0.5)) == 0.5
    for schedule in (Growing(0.5), s.linear(1.0, 1.0, "4ba"), 2 * s.constant(0.5), s.constant(-1.0), lambda t: 0.5):
        assert fixed_rate(schedule) is None


def test_a_schedule_may_be_called_by_a_static_method_or_one_of_the_class() -> None:
    class Static(pl.schedules.Schedule):
        @staticmethod
        def __call__(timestamp: pl.Timestamp) -> float:  # type: ignore[override]
            return 0.25

    class OfClass(pl.schedules.Schedule):
        @classmethod
        def __call__(cls, timestamp: pl.Timestamp) -> float:  # type: ignore[override]
            return 0.5

    assert Static()(pl.Timestamp()) == 0.25
    assert OfClass()(pl.Timestamp()) == 0.5
