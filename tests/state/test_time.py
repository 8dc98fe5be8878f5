"""Durations read, print and compare exactly; timestamps count; intervals come round when they should."""

from __future__ import annotations

import itertools
import math
import operator
import pickle
from fractions import Fraction
from typing import Any

import attrs
import optree
import pytest
import torch.utils._pytree as torch_pytree
from hypothesis import example, given
from hypothesis import strategies as st

from pure_loop.errors import ArgumentError, ArgumentTypeError, TimeFormatError
from pure_loop.event import Event
from pure_loop.time import Time, Timestamp, TimeUnit, due
from tests.support.tiers import examples

REAL = (TimeUnit.DURATION, TimeUnit.SECOND)
COUNTS = [unit for unit in TimeUnit if unit not in REAL]
END, EPOCH, ITERATION = Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END
COMPARE = (operator.lt, operator.le, operator.gt, operator.ge)
times = st.one_of(
    st.builds(Time, st.integers(0, 10**18), st.sampled_from(COUNTS)),
    st.builds(Time, st.floats(0, allow_nan=False, allow_infinity=False), st.sampled_from(REAL)),
)


def test_text_is_read() -> None:
    texts = "2ep 0ba 5_000sp 1e6tok 1.5e3tok 2.0ep 1e23tok 3iter .5dur 1dur 1e-3dur 1.5s 90m 1h30m 1d2h 1d2h3m4.5s"
    values = (2, 0, 5000, 10**6, 1500, 2, 10**23, 3, 0.5, 1.0, 0.001, 1.5, 5400.0, 5400.0, 93600.0, 93784.5)
    for text, value in zip(texts.split(), values, strict=True):
        time = Time(f" {text} ")
        assert (time.value, type(time.value)) == (value, type(value)), text
        assert text.endswith(time.unit.value) or time.unit is TimeUnit.SECOND, text


def test_what_is_no_time_is_refused_with_every_form() -> None:
    """Each form of a wrong text: no number, no unit, parts of what is counted, signs, limits, order, other digits."""
    wrong = """1.5ep 1ba2ep -1ba -0.5dur nan nanba infep infs 3 ba 1e999s 1e-999ba 1e-9999dur 2epp 2EP 1m1h 30m30m
        0x10ba 1__0ba _1ba ٣ba"""
    for text in ("", " ", "2 ep", "2ep\n3", *wrong.split()):
        with pytest.raises(TimeFormatError) as error:
            Time(text)
        forms = ("2ep", "10ba", "5000sp", "1e6tok", "3iter", "0.5dur", "90s", "1.5s", "30m", "1h30m", "1d2h")
        assert all(f'"{form}"' in str(error.value) for form in forms)
        assert repr(text) in str(error.value)
    for value in (True, 2.0, None, b"2ep", TimeUnit, Timestamp()):
        for call in (Time, Time.parse):
            with pytest.raises(ArgumentTypeError, match="a time can't be"):
                call(value)
    for number, unit in ((-1, "ep"), (1.5, "ep"), (math.nan, "s"), (math.inf, "dur")):
        with pytest.raises(TimeFormatError):
            Time(number, unit)
    for other in (True, "2"):
        with pytest.raises(ArgumentTypeError):
            Time(other, "ep")
    for call in (lambda: Time(2, "weeks"), lambda: Timestamp().get("weeks")):
        with pytest.raises(TimeFormatError, match="'weeks' is not a unit of time"):
            call()


@given(times)
def test_a_time_reads_back_equal(time: Time) -> None:
    assert Time(str(time)) == time == eval(repr(time)) == pickle.loads(pickle.dumps(time))
    assert type(Time(str(time)).value) is type(time.value)
    again = Time(time.value, time.unit.value)
    assert again == Time(time) == Time.parse(time) == time
    assert hash(again) == hash(time)
    assert bool(time) is (time.value > 0)
    assert Time(0) == Time.parse(0) == Time("0ep") != Time("0ba")


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 300), st.sampled_from(COUNTS))
def test_times_compute_as_the_decimal_numbers_that_are_written(a: int, b: int, hundredths: int, unit: TimeUnit) -> None:
    x, y = Time(a, unit), Time(b, unit)
    for compare in COMPARE:
        assert compare(x, y) == compare(x, str(y)) == compare(a, b)
    assert (x == y) == (a == b)
    assert (x + y).value == (x + str(y)).value == a + b
    assert (x * (hundredths / 100)).value == ((hundredths / 100) * x).value == math.floor(a * Fraction(hundredths, 100))
    assert Time(a / 10, "dur") + Time(b / 10, "dur") == Time((a + b) / 10, "dur")  # 0.1 and 0.2 are 0.3
    assert b == 0 or x / y == a / b
    if a >= b:
        assert (x - y).value == a - b
    else:
        with pytest.raises(ArgumentError, match="would be negative"):
            _ = x - y


def test_units_do_not_mix() -> None:
    for operation in (*COMPARE, operator.add, operator.sub, operator.truediv):
        says = r"2ep and 3ba: only a Timestamp has both epochs and batches.*get\('ep'\)"
        with pytest.raises(ArgumentError, match=says):
            operation(Time("2ep"), "3ba")
    with pytest.raises(ArgumentTypeError, match="can't compare 2ep and 3"):
        assert Time("2ep") < 3  # type: ignore[operator]
    with pytest.raises(TypeError):
        Time("2ep") * "3"  # type: ignore[operator]


STEPS = st.tuples(st.integers(0, 9), st.integers(0, 99), st.floats(0, 9), st.sampled_from(["", "", "ep", "iter"]))


@given(st.lists(STEPS, max_size=12))
def test_a_timestamp_counts(taken: list[tuple[int, int, float, str]]) -> None:
    """Since the beginning, since the last epoch and since the last iteration: sums over the steps since then."""
    now = start = Timestamp(max_duration=Time("2ep"), batches_per_epoch=4)
    since = {"": 0, "ep": 0, "iter": 0}
    for number, (samples, tokens, seconds, end) in enumerate(taken, 1):
        now = now.next_batch(samples=samples, tokens=tokens, seconds=seconds)
        now = {"": lambda t: t, "ep": Timestamp.next_epoch, "iter": Timestamp.next_iteration}[end](now)
        since[end] = number if end else 0
    ends = [end for *_, end in taken]
    of: dict[str, Any] = {"epoch": ends.count("ep"), "iteration": ends.count("iter")}
    for end, suffix, names in (
        ("", "", ("batch", "sample", "token")),
        ("ep", "_in_epoch", ("batch", "sample", "token")),
        ("iter", "_in_iteration", ("batch", "token")),
    ):
        steps = taken[since[end] :]
        counts = {"batch": len(steps), "sample": sum(s for s, *_ in steps), "token": sum(t for _, t, *_ in steps)}
        of |= {name + suffix: counts[name] for name in names}
    of["epoch_in_iteration"] = ends[since["iter"] :].count("ep")
    assert now.replace(total_seconds=0.0, epoch_seconds=0.0, batch_seconds=0.0) == start.replace(**of)
    assert hash(now) == hash(now.replace())
    assert now.total_seconds == pytest.approx(sum(seconds for _, _, seconds, _ in taken))
    assert now.epoch_seconds == pytest.approx(sum(seconds for _, _, seconds, _ in taken[since["ep"] :]))
    assert now.batch_seconds == (taken[-1][2] if taken else 0.0)


def test_a_timestamp_is_asked_in_any_unit_and_compares_from_both_sides() -> None:
    now = Timestamp(epoch=1, batch=2, sample=3, token=4, iteration=5, total_seconds=6.5, max_duration=Time("8ba"))
    assert [now.get(unit) for unit in ("ep", "ba", "sp", "tok", "iter", "s", "dur")] == [1, 2, 3, 4, 5, 6.5, 0.25]
    assert now.get(TimeUnit.SAMPLE) == 3
    for compare in COMPARE:
        for text, value, at in (("1ep", 1, 1), ("2ep", 2, 1), ("0.25dur", 0.25, 0.25), ("1ba", 1, 2)):
            assert compare(now, text) == compare(now, Time(text)) == compare(at, value)
            assert compare(Time(text), now) == compare(value, at)
        for other in (now.replace(), 3):
            with pytest.raises(TypeError):
                compare(now, other)
    assert Timestamp(sample=12).elapsed is None
    for end, elapsed in (("48sp", 0.25), ("10sp", 1.0), ("0sp", 1.0)):
        assert Timestamp(sample=12, max_duration=Time(end)).elapsed == elapsed
    with pytest.raises(ArgumentError, match=r"with max_duration; .*\"10ba\""):
        Timestamp().get("dur")
    with pytest.raises(ArgumentError, match=r'the interval "0\.1dur" needs a max_duration'):
        due("0.1dur", Timestamp(), Timestamp(batch=1), END)
    with pytest.raises(ArgumentTypeError, match='write Time\\("3ep"\\)'):
        Timestamp(max_duration="3ep")  # type: ignore[arg-type]
    for field, wrong in (("batch", -1), ("total_seconds", math.nan), ("batches_per_epoch", 1.5)):
        for make in (Timestamp, now.replace):
            with pytest.raises((ArgumentError, ArgumentTypeError), match=field):
                make(**{field: wrong})
    for value, field in ((now, "epoch"), (Time("2ep"), "value")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(value, field, 4)


def test_a_timestamp_is_a_pytree_under_both_engines() -> None:
    now: Any = Timestamp(epoch=3, total_seconds=1.5, max_duration=Time("2ep"), batches_per_epoch=7)
    doubled = Timestamp(epoch=6, total_seconds=3.0, max_duration=Time("4ep"), batches_per_epoch=14)
    assert optree.tree_map(lambda leaf: leaf * 2, now, namespace="pure_loop") == doubled
    assert torch_pytree.tree_map(lambda leaf: leaf * 2, now) == doubled
    paths = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(now)[0]]
    assert paths == [f".{name}" for (name,) in optree.tree_paths(now, namespace="pure_loop")]
    assert pickle.loads(pickle.dumps(now)) == now


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 8))
def test_a_duration_in_epochs_passes_batch_by_batch_where_their_length_is_known(
    epochs: int, length: int, short: int
) -> None:
    end = Time(epochs, "ep")
    now, stairs = Timestamp(max_duration=end, batches_per_epoch=length), Timestamp(max_duration=end)
    for epoch in range(epochs):
        for batch in range(length):
            assert now.elapsed == now.get("dur") == (epoch * length + batch) / (epochs * length)
            assert stairs.elapsed == epoch / epochs
            now, stairs = now.next_batch(1), stairs.next_batch(1)
        assert now.elapsed == now.next_batch(1).elapsed == (epoch + 1) / epochs  # one more than were said doesn't count
        assert now.replace(max_duration=Time(2 * now.batch, "ba")).elapsed == 0.5
        now, stairs = now.next_epoch(), stairs.next_epoch()
        assert now.elapsed == stairs.elapsed == (epoch + 1) / epochs
    inside = Timestamp(max_duration=end, batches_per_epoch=length, batch_in_epoch=min(short, length - 1))
    assert inside.next_epoch().elapsed == 1 / epochs
    assert inside.replace(max_duration=Time("0ep")).elapsed == 1.0


UNITS = {"ba": END, "sp": END, "tok": END, "s": END, "ep": EPOCH, "iter": ITERATION, "dur": END}


@examples(150, 2000)
@given(
    st.sampled_from(sorted(UNITS)),
    st.integers(0, 40),
    st.sampled_from(["ba", "sp", "s", "ep"]),
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([EPOCH, ITERATION, None])), max_size=12),
)
@example("dur", 2, "ba", [(1, None)] * 10)
def test_an_interval_comes_round_once_for_each_multiple_that_is_passed(
    unit: str, size: int, of: str, taken: list[tuple[int, Any]]
) -> None:
    """Exactly, where it is asked for: 0.1 of 10 batches is one batch, and not what floating point gives."""
    end = 8
    interval = Time(size / 20, unit) if unit in ("dur", "s") else Time(size, unit)
    counted, exact = (of, Fraction(size, 20) * end) if unit == "dur" else (unit, interval.exact)
    now = Timestamp(max_duration=Time(end, of))
    for samples, event in taken:
        before, now = now, now.next_batch(samples, tokens=10 * samples, seconds=samples / 4)
        changes = [(END, before, now)]
        if event is not None:
            before, now = now, now.next_epoch() if event is EPOCH else now.next_iteration()
            changes.append((event, before, now))
        for at, previous, current in changes:
            passed = exact and Fraction(previous.get(counted)) // exact != Fraction(current.get(counted)) // exact
            assert due(interval, previous, current, at) == bool(passed and at is UNITS[counted]), (at, previous)


def rounds(
    interval: str, max_duration: str, lengths: list[int], batches_per_epoch: int | None, last_batch: bool
) -> list[tuple[int, Event]]:
    """The batches, from 1, and the events at which an interval comes round, in epochs of these lengths.

    ``last_batch``: EPOCH_END is compared with the timestamp before the last batch, as the loop does, and not after it.
    """
    found = []
    now = before = Timestamp(max_duration=Time(max_duration), batches_per_epoch=batches_per_epoch)
    for length in lengths:
        for _ in range(length):
            before, now = now, now.next_batch(1)
            if due(interval, before, now, END):
                found.append((now.batch, END))
        before, now = before if last_batch else now, now.next_epoch()
        if due(interval, before, now, EPOCH):
            found.append((now.batch, EPOCH))
        if last_batch and batches_per_epoch is not None:
            # Asked as at the end of a batch, it says whether it came round at that batch or at the end of the epoch.
            assert due(interval, before, now, END) == (now.batch in dict(found))
    return found


@given(st.integers(1, 20), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 7), st.booleans())
def test_no_fraction_is_lost_whatever_the_epochs_lengths(
    twentieths: int, lengths: list[int], known: int, last: bool
) -> None:
    """At least the multiples that whole epochs pass, never twice at one batch, and no more than there are."""
    interval, epochs = f"{twentieths / 20!r}dur", len(lengths)
    batches = [batch for batch, _ in rounds(interval, f"{epochs}ep", lengths, known, last)]
    assert batches == sorted(set(batches))
    size, ends = Fraction(twentieths, 20) * epochs, list(itertools.accumulate(lengths))
    assert len(batches) <= math.floor(epochs / size)
    for epoch, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        if (epoch + 1) // size != epoch // size:
            assert any(begin < batch <= end for batch in batches)
    # Epochs of the known length are as good as batches.
    total = epochs * known
    exactly = rounds(interval, f"{total}ba", [total], None, False)
    assert rounds(interval, f"{epochs}ep", [known] * epochs, known, last) == exactly
