"""Durations read, print and compare exactly; timestamps count; intervals come round when they should."""

from __future__ import annotations

import itertools
import math
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

COUNTS = [unit for unit in TimeUnit if unit not in (TimeUnit.DURATION, TimeUnit.SECOND)]

times = st.one_of(
    st.builds(Time, st.integers(0, 10**18), st.sampled_from(COUNTS)),
    st.builds(
        Time,
        st.floats(0, allow_nan=False, allow_infinity=False),
        st.sampled_from([TimeUnit.DURATION, TimeUnit.SECOND]),
    ),
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2ep", 2, "ep"),
        ("0ba", 0, "ba"),
        ("10ba", 10, "ba"),
        ("5000sp", 5000, "sp"),
        ("5_000sp", 5000, "sp"),
        ("1e6tok", 1_000_000, "tok"),
        ("1.5e3tok", 1500, "tok"),
        ("2.0ep", 2, "ep"),
        ("1e23tok", 10**23, "tok"),
        ("3iter", 3, "iter"),
        ("0.5dur", 0.5, "dur"),
        (".5dur", 0.5, "dur"),
        ("1dur", 1.0, "dur"),
        ("1e-3dur", 0.001, "dur"),
        ("90s", 90.0, "s"),
        ("1.5s", 1.5, "s"),
        ("30m", 1800.0, "s"),
        ("90m", 5400.0, "s"),
        ("1h30m", 5400.0, "s"),
        ("1d2h", 93600.0, "s"),
        ("1d2h3m4.5s", 93784.5, "s"),
        (" 2ep ", 2, "ep"),
    ],
)
def test_text_is_read(text: str, value: float, unit: str) -> None:
    time = Time(text)
    assert (time.value, time.unit) == (value, unit)
    assert type(time.value) is (float if unit in ("dur", "s") else int)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1.5ep",
        "0.1ba",
        "1ba2ep",
        "-1ba",
        "-0.5dur",
        "nan",
        "inf",
        "nanba",
        "infep",
        "infs",
        "3",
        "ba",
        "2 ep",
        "1e999s",
        "1e999dur",
        "1e-999ba",
        "2epp",
        "2EP",
        "1m1h",
        "30m30m",
        "1e6",
        "0x10ba",
        "1__0ba",
        "_1ba",
        "٣ba",
        "2ep\n3",
        "1e-9999dur",
    ],
)
def test_what_is_no_time_is_refused_with_every_form(text: str) -> None:
    with pytest.raises(TimeFormatError) as error:
        Time(text)
    message = str(error.value)
    assert repr(text) in message
    for form in ("2ep", "10ba", "5000sp", "1e6tok", "3iter", "0.5dur", "90s", "1.5s", "30m", "1h30m", "1d2h"):
        assert f'"{form}"' in message


@pytest.mark.parametrize("value", [True, False, 2.0, None, [], b"2ep", TimeUnit, Timestamp()])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="a time can't be"):
        Time(value)
    with pytest.raises(ArgumentTypeError, match="a time can't be"):
        Time.parse(value)


@pytest.mark.parametrize(
    ("value", "unit", "error"),
    [
        (-1, "ep", TimeFormatError),
        (1.5, "ep", TimeFormatError),
        (math.nan, "s", TimeFormatError),
        (math.inf, "dur", TimeFormatError),
        (2, "weeks", TimeFormatError),
        (True, "ep", ArgumentTypeError),
        ("2", "ep", ArgumentTypeError),
    ],
)
def test_a_number_that_is_no_time_is_refused(value: Any, unit: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Time(value, unit)


def test_every_way_of_writing_a_time_is_equal() -> None:
    two = Time("2ep")
    same = [
        Time(2, "ep"),
        Time(2, TimeUnit.EPOCH),
        Time(two),
        Time(2),
        Time.parse(2),
        Time.parse("2ep"),
        Time(2.0, "ep"),
    ]
    assert all(time == two and hash(time) == hash(two) for time in same)
    assert Time.parse(two) is two
    assert Time("1m") == Time("60s") != Time("60ba")


@given(times)
def test_a_time_reads_back_equal(time: Time) -> None:
    assert Time(str(time)) == time == eval(repr(time)) == pickle.loads(pickle.dumps(time))
    assert type(Time(str(time)).value) is type(time.value)


def test_a_time_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Time("2ep").value = 3  # type: ignore[misc]


def test_arithmetic() -> None:
    assert Time("10ba") + "4ba" == Time("14ba")
    assert Time("10ba") - Time("4ba") == Time("6ba")
    assert Time("10ba") * 2 == 2 * Time("10ba") == Time("20ba")
    assert Time("15ba") * 0.1 == Time("1ba")
    assert Time("100ba") * 0.29 == Time("29ba")  # and not 28, which floating point gives
    assert Time("1h") + "30m" == Time("1h30m")
    assert Time("0.1dur") + "0.2dur" == Time("0.3dur")
    assert Time("3ep") / "12ep" == 0.25


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(COUNTS))
def test_comparisons_are_those_of_the_values(a: int, b: int, unit: TimeUnit) -> None:
    x, y = Time(a, unit), Time(b, unit)
    assert (x < y, x <= y, x > y, x >= y, x == y) == (a < b, a <= b, a > b, a >= b, a == b)
    assert (x < str(y), x >= str(y)) == (a < b, a >= b)
    assert (x + y).value == a + b


def test_nothing_is_false() -> None:
    assert [bool(Time(text)) for text in ("0ba", "0dur", "0s", "1ba", "0.1s")] == [False, False, False, True, True]


def test_units_do_not_mix() -> None:
    for operation in (
        lambda: Time("2ep") < "3ba",
        lambda: Time("2ep") + "3ba",
        lambda: Time("2ep") - "3ba",
        lambda: Time("2ep") / "3ba",
    ):
        with pytest.raises(
            ArgumentError, match=r"2ep and 3ba: only a Timestamp has both epochs and batches.*get\('ep'\)"
        ):
            operation()
    with pytest.raises(ArgumentTypeError, match="can't compare 2ep and 3"):
        assert Time("2ep") < 3  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="would be negative"):
        Time("2ep") - "3ep"
    with pytest.raises(TypeError):
        Time("2ep") * "3"  # type: ignore[operator]
    assert Time("0ep") != Time("0ba")


def test_a_timestamp_counts() -> None:
    start = Timestamp(max_duration=Time("2ep"))
    one = start.next_batch(samples=4, tokens=40, seconds=0.5)
    two = one.next_batch(samples=3, tokens=30, seconds=0.25)
    assert start == Timestamp(max_duration=Time("2ep"))
    assert two == Timestamp(
        batch=2,
        sample=7,
        token=70,
        batch_in_epoch=2,
        sample_in_epoch=7,
        token_in_epoch=70,
        batch_in_iteration=2,
        token_in_iteration=70,
        total_seconds=0.75,
        epoch_seconds=0.75,
        batch_seconds=0.25,
        max_duration=Time("2ep"),
    )
    epoch = two.next_epoch()
    assert epoch == two.replace(
        epoch=1, epoch_in_iteration=1, batch_in_epoch=0, sample_in_epoch=0, token_in_epoch=0, epoch_seconds=0.0
    )
    assert epoch.next_iteration() == epoch.replace(
        iteration=1, epoch_in_iteration=0, batch_in_iteration=0, token_in_iteration=0
    )


def test_a_timestamp_is_asked_in_any_unit() -> None:
    now = Timestamp(epoch=1, batch=2, sample=3, token=4, iteration=5, total_seconds=6.5, max_duration=Time("8ba"))
    assert [now.get(unit) for unit in ("ep", "ba", "sp", "tok", "iter", "s", "dur")] == [1, 2, 3, 4, 5, 6.5, 0.25]
    assert now.get(TimeUnit.SAMPLE) == 3
    with pytest.raises(TimeFormatError, match="'weeks' is not a unit of time"):
        now.get("weeks")


def test_elapsed_stays_between_0_and_1() -> None:
    now = Timestamp(sample=12)
    assert now.elapsed is None
    assert now.replace(max_duration=Time("48sp")).elapsed == 0.25
    assert now.replace(max_duration=Time("10sp")).elapsed == 1.0
    assert now.replace(max_duration=Time("0sp")).elapsed == 1.0
    with pytest.raises(ArgumentError, match=r"with max_duration; .*\"10ba\""):
        now.get("dur")


@given(st.integers(1, 5), st.integers(1, 9), st.data())
def test_a_duration_in_epochs_passes_batch_by_batch_where_their_length_is_known(
    epochs: int, length: int, data: st.DataObject
) -> None:
    end = Time(epochs, "ep")
    now = Timestamp(max_duration=end, batches_per_epoch=length)
    stairs = Timestamp(max_duration=end)
    for epoch in range(epochs):
        for batch in range(length):
            assert now.elapsed == now.get("dur") == (epoch * length + batch) / (epochs * length)
            assert stairs.elapsed == epoch / epochs
            now, stairs = now.next_batch(1), stairs.next_batch(1)
        assert now.elapsed == (epoch + 1) / epochs
        # One batch more than were said doesn't count.
        assert now.next_batch(1).elapsed == now.elapsed
        now, stairs = now.next_epoch(), stairs.next_epoch()
        assert now.elapsed == stairs.elapsed == (epoch + 1) / epochs
    short = data.draw(st.integers(0, length - 1))
    assert (
        Timestamp(max_duration=end, batches_per_epoch=length, batch_in_epoch=short).next_epoch().elapsed == 1 / epochs
    )


def test_the_length_of_an_epoch_matters_to_durations_in_epochs_only() -> None:
    known = Timestamp(epoch=1, batch=6, batch_in_epoch=2, batches_per_epoch=4, max_duration=Time("2ep"))
    assert (known.elapsed, known.get("ep"), known >= "2ep", known >= "0.75dur") == (0.75, 1, False, True)
    assert known.replace(max_duration=Time("12ba")).elapsed == 0.5
    assert known.replace(max_duration=Time("0ep")).elapsed == 1.0
    assert known.next_epoch().next_iteration().batches_per_epoch == known.next_batch(1).batches_per_epoch == 4


@pytest.mark.parametrize("write", [Time, str])
def test_a_timestamp_compares_with_times_from_both_sides(write: Any) -> None:
    now = Timestamp(epoch=2, batch=10, max_duration=Time("100ba"))
    two, three = write("2ep"), write("3ep")
    tenth = write("0.1dur")
    assert (now < two, now <= two, now > two, now >= two) == (False, True, False, True)
    assert (now < three, now <= three, now > three, now >= three) == (True, True, False, False)
    assert (three < now, three <= now, three > now, three >= now) == (False, False, True, True)
    assert (now < tenth, now <= tenth, now > tenth, now >= tenth) == (False, True, False, True)


def test_two_timestamps_are_equal_or_not_and_have_no_order() -> None:
    assert Timestamp(batch=1) == Timestamp(batch=1) != Timestamp(batch=2)
    assert hash(Timestamp(batch=1)) == hash(Timestamp(batch=1))
    with pytest.raises(TypeError):
        assert Timestamp() < Timestamp(batch=1)  # type: ignore[operator]
    with pytest.raises(TypeError):
        assert Timestamp() < 3  # type: ignore[operator]


def test_a_timestamp_is_a_pytree_under_both_engines() -> None:
    now: Any = Timestamp(epoch=3, total_seconds=1.5, max_duration=Time("2ep"), batches_per_epoch=7)
    names = [field.name for field in attrs.fields(Timestamp)]
    paths, leaves, _ = optree.tree_flatten_with_path(now, namespace="pure_loop")
    assert paths == [(name,) for name in names]
    torch_leaves, spec = torch_pytree.tree_flatten_with_path(now)
    assert [torch_pytree.keystr(path) for path, _ in torch_leaves] == [f".{name}" for name in names]
    assert leaves == [leaf for _, leaf in torch_leaves] == [getattr(now, name) for name in names]
    assert torch_pytree.tree_unflatten(leaves, spec) == now
    assert optree.tree_map(lambda leaf: leaf, now, namespace="pure_loop") == now
    doubled: Any = optree.tree_map(lambda leaf: leaf * 2, now, namespace="pure_loop")
    assert doubled == Timestamp(epoch=6, total_seconds=3.0, max_duration=Time("4ep"), batches_per_epoch=14)


def test_a_timestamp_travels() -> None:
    now = Timestamp(epoch=3, max_duration=Time("2ep"))
    assert pickle.loads(pickle.dumps(now)) == now
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        now.epoch = 4  # type: ignore[misc]


def batches_due(interval: str, count: int, max_duration: str, *, samples: int = 1, seconds: float = 1.0) -> list[int]:
    """The batches, from 1, at whose end an interval comes round."""
    now, numbers = Timestamp(max_duration=Time(max_duration)), []
    for number in range(1, count + 1):
        before, now = now, now.next_batch(samples=samples, tokens=10 * samples, seconds=seconds)
        if due(interval, before, now, Event.BATCH_END):
            numbers.append(number)
    return numbers


@pytest.mark.parametrize(
    ("interval", "max_duration", "samples", "expected"),
    [
        ("1ba", "10ba", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("3ba", "10ba", 1, [3, 6, 9]),
        ("10sp", "10ba", 4, [3, 5, 8, 10]),
        ("1sp", "10ba", 4, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("100tok", "10ba", 4, [3, 5, 8, 10]),
        ("4s", "10ba", 1, [4, 8]),
        ("0.1dur", "10ba", 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("0.25dur", "10ba", 1, [3, 5, 8, 10]),
        ("0.3dur", "10ba", 1, [3, 6, 9]),
        ("0.5dur", "40sp", 4, [5, 10]),
        ("0.5dur", "8s", 1, [4, 8]),
        ("1dur", "10ba", 1, [10]),
        ("1ep", "10ba", 1, []),
        ("1iter", "10ba", 1, []),
        ("0.5dur", "2ep", 1, []),
        ("0ba", "10ba", 1, []),
        ("0dur", "10ba", 1, []),
        ("0.5dur", "0ba", 1, []),
    ],
)
def test_intervals_come_round_at_the_end_of_batches(
    interval: str, max_duration: str, samples: int, expected: list[int]
) -> None:
    assert batches_due(interval, 10, max_duration, samples=samples) == expected


def test_intervals_come_round_at_the_end_of_epochs_and_iterations() -> None:
    before = Timestamp(epoch=3, iteration=3, max_duration=Time("8ep"))
    epoch, iteration = before.next_epoch(), before.next_iteration()
    assert due("1ep", before, epoch, Event.EPOCH_END)
    assert due(2, before, epoch, Event.EPOCH_END)
    assert not due("3ep", before, epoch, Event.EPOCH_END)
    assert due("0.5dur", before, epoch, Event.EPOCH_END)
    assert due("0.1dur", before, epoch, Event.EPOCH_END)
    assert not due("0.3dur", before, epoch, Event.EPOCH_END)
    assert not due("0ep", before, epoch, Event.EPOCH_END)
    assert not due("1ep", before, epoch, Event.BATCH_END)
    assert due("2iter", before, iteration, Event.ITERATION_END)
    assert not due("2iter", before, iteration, Event.EPOCH_END)


def rounds(
    interval: str, max_duration: str, lengths: list[int], batches_per_epoch: int | None, *, last_batch: bool
) -> list[tuple[int, Event]]:
    """The batches, from 1, and the events at which an interval comes round, in epochs of these lengths.

    ``last_batch``: EPOCH_END is compared with the timestamp before the last batch, as the loop does, and not after it.
    """
    found = []
    now = before = Timestamp(max_duration=Time(max_duration), batches_per_epoch=batches_per_epoch)
    for length in lengths:
        for _ in range(length):
            before, now = now, now.next_batch(1)
            if due(interval, before, now, Event.BATCH_END):
                found.append((now.batch, Event.BATCH_END))
        before, now = before if last_batch else now, now.next_epoch()
        if due(interval, before, now, Event.EPOCH_END):
            found.append((now.batch, Event.EPOCH_END))
        if last_batch and batches_per_epoch is not None:
            # Asked as at the end of a batch, it says whether it came round at that batch or at the end of the epoch.
            assert due(interval, before, now, Event.BATCH_END) == (now.batch in dict(found))
    return found


@pytest.mark.parametrize("last_batch", [False, True])
@pytest.mark.parametrize(
    ("interval", "max_duration", "lengths", "batches_per_epoch", "at_batches", "at_epochs"),
    [
        ("0.25dur", "1ep", [8], 8, [2, 4, 6, 8], []),
        ("0.25dur", "1ep", [8], None, [], [8]),
        ("0.25dur", "2ep", [3, 3], 3, [2, 3, 5, 6], []),
        ("0.1dur", "2ep", [5, 5], 5, list(range(1, 11)), []),
        ("0.3dur", "2ep", [5, 5], 5, [3, 6, 9], []),
        ("1dur", "2ep", [5, 5], 5, [10], []),
        ("0.5dur", "0ep", [5], 5, [], []),
        # Epochs that are shorter than was known end with a jump.
        ("0.5dur", "2ep", [3, 3], 5, [], [3, 6]),
        ("0.1dur", "2ep", [3, 3], 5, [1, 2, 3, 4, 5, 6], []),
        ("0.2dur", "2ep", [3, 3], 5, [2, 4, 6], [3]),
        ("0.5dur", "1ep", [1], 4, [], [1]),
        # What is longer stands still.
        ("0.5dur", "2ep", [4, 4], 3, [3, 7], []),
    ],
)
def test_fractions_of_a_duration_in_epochs_come_round_inside_them(
    interval: str,
    max_duration: str,
    lengths: list[int],
    batches_per_epoch: int | None,
    at_batches: list[int],
    at_epochs: list[int],
    last_batch: bool,
) -> None:
    found = rounds(interval, max_duration, lengths, batches_per_epoch, last_batch=last_batch)
    assert [batch for batch, event in found if event is Event.BATCH_END] == at_batches
    assert [batch for batch, event in found if event is Event.EPOCH_END] == at_epochs


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 7), st.booleans())
def test_epochs_of_known_length_are_as_good_as_batches(hundredths: int, epochs: int, length: int, last: bool) -> None:
    interval, total = f"{hundredths / 20!r}dur", epochs * length
    wanted = batches_due(interval, total, f"{total}ba")
    found = rounds(interval, f"{epochs}ep", [length] * epochs, length, last_batch=last)
    assert found == [(batch, Event.BATCH_END) for batch in wanted]


@given(st.integers(1, 20), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_no_fraction_is_lost_whatever_the_epochs_lengths(
    twentieths: int, lengths: list[int], known: int, last: bool
) -> None:
    """At least the multiples that whole epochs pass, never twice at one batch, and no more than there are."""
    found = rounds(f"{twentieths / 20!r}dur", f"{len(lengths)}ep", lengths, known, last_batch=last)
    batches = [batch for batch, _ in found]
    assert batches == sorted(set(batches))
    size, ends = Fraction(twentieths, 20) * len(lengths), list(itertools.accumulate(lengths))
    assert len(found) <= math.floor(len(lengths) / size)
    for epoch, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        if (epoch + 1) // size != epoch // size:
            assert any(begin < batch <= end for batch in batches)


def test_a_fraction_of_no_duration_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r'the interval "0\.1dur" needs a max_duration'):
        due("0.1dur", Timestamp(), Timestamp(batch=1), Event.BATCH_END)


@given(st.integers(1, 400), st.integers(0, 10**6), st.integers(0, 10**6))
@example(1, 10, 3)
def test_a_fraction_of_the_duration_is_exact(thousandths: int, total: int, batch: int) -> None:
    size = Fraction(thousandths, 1000) * (total + 1)
    before = Timestamp(batch=batch, max_duration=Time(total + 1, "ba"))
    expected = math.floor(batch / size) != math.floor((batch + 1) / size)
    assert due(f"{thousandths / 1000!r}dur", before, before.next_batch(1), Event.BATCH_END) is expected


@given(st.integers(1, 50), st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_an_interval_in_samples_comes_once_for_every_multiple_it_passes(size: int, batches: list[int]) -> None:
    now, multiples = Timestamp(), set[int]()
    for samples in batches:
        before, now = now, now.next_batch(samples)
        passed = set(range(size, now.sample + 1, size)) - multiples
        multiples |= passed
        assert due(Time(size, "sp"), before, now, Event.BATCH_END) == bool(passed)
