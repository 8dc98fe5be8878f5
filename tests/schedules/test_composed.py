"""Schedules of cycles, pieces and others: closed forms, torch's schedulers, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pure_loop import schedules as s
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.time import Time, Timestamp


def at(schedule: Any, count: int, **fields: Any) -> list[float]:
    return [schedule(Timestamp(batch=batch, **fields)) for batch in range(count)]


def test_one_cycle_is_its_closed_form() -> None:
    exact = [0.04, 0.28, 0.76, 1, 0.950485, 0.811746, 0.611262, 0.388742, 0.188258, 0.049519, 4e-6, 4e-6]
    assert at(s.one_cycle("10ba"), 12) == pytest.approx(exact, abs=1e-6)
    schedule = s.one_cycle("20ba", 2.0, rise=0.25, start=0.5, end=0.1)
    for batch, value in enumerate(at(schedule, 21)):
        if batch <= 5:
            wanted = 0.5 + 1.5 * (1 - math.cos(math.pi * batch / 5)) / 2
        else:
            wanted = 2.0 - 1.9 * (1 - math.cos(math.pi * (batch - 5) / 15)) / 2
        assert value == pytest.approx(wanted)
    assert at(s.one_cycle("4ba", rise=0.0), 1) == [1.0]


def torchs(make: Any, count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_one_cycle_is_torchs_over_one_step_less() -> None:
    """torch's phases end at a step, counted from 0, and ours at a part of the time."""
    count = 21
    theirs = torchs(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=count, pct_start=6 / 21, cycle_momentum=False
        ),
        count,
    )
    ours = at(s.one_cycle(Time(count - 1, "ba"), 1.0, rise=5 / 20), count)
    assert ours == pytest.approx(theirs)


def test_cyclic_is_torchs() -> None:
    theirs = torchs(
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
            optimizer, base_lr=0.1, max_lr=1.0, step_size_up=3, step_size_down=5, cycle_momentum=False
        ),
        20,
    )
    assert at(s.cyclic("8ba", 0.1, 1.0, rise=3 / 8), 20) == pytest.approx(theirs)
    halved = torchs(
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(
            optimizer, base_lr=0.1, max_lr=1.0, step_size_up=2, mode="triangular2", cycle_momentum=False
        ),
        20,
    )
    assert at(s.cyclic("4ba", 0.1, 1.0, gamma=0.5), 20) == pytest.approx(halved)


def test_warmup_stable_decay_is_its_closed_form() -> None:
    assert at(s.warmup_stable_decay("2ba", "10ba", "2ba"), 12) == [0.0, 0.5, *[1.0] * 7, 0.5, 0.0, 0.0]
    assert at(s.warmup_stable_decay("0.1dur", "1dur", "0.2dur", 2.0, 1.0), 11, max_duration=Time("10ba")) == (
        pytest.approx([0.0, *[2.0] * 8, 1.5, 1.0])
    )


def test_inverse_sqrt_is_its_closed_form() -> None:
    for batch, value in enumerate(at(s.inverse_sqrt("4ba", 3.0), 20)):
        assert value == pytest.approx(3.0 * (batch / 4 if batch < 4 else math.sqrt(4 / batch)))


def test_piecewise_is_the_last_value_that_came() -> None:
    schedule = s.piecewise({0: 1.0, "3ba": 0.5, "2ep": 0.1})
    values = [schedule(Timestamp(batch=b, epoch=b // 4, batch_in_epoch=b % 4, batches_per_epoch=4)) for b in range(10)]
    assert values == [1.0] * 3 + [0.5] * 5 + [0.1] * 2
    assert repr(s.piecewise({"0ba": 1.0, "3ba": 0.5})) == "piecewise({'0ba': 1.0, '3ba': 0.5})"


def test_restarts_grow_by_any_factor() -> None:
    """Lengths of 2, 3, 4.5 and 6.75 batches; torch takes whole factors alone."""
    values = at(s.cosine_restarts("2ba", growth=1.5), 17)
    begin, length, wanted = 0.0, 2.0, []
    for batch in range(17):
        while batch - begin >= length:
            begin, length = begin + length, length * 1.5
        wanted.append((1 + math.cos(math.pi * (batch - begin) / length)) / 2)
    assert values == pytest.approx(wanted)


def test_a_chain_counts_from_the_start_of_training_or_of_each() -> None:
    fall = s.linear(1.0, 0.0, "4ba")
    assert at(s.chain(0.5, ("2ba", fall)), 5) == [0.5, 0.5, 0.5, 0.25, 0.0]
    assert at(s.chain(0.5, ("2ba", fall), restart=True), 7) == [0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert at(s.chain(s.constant(1), ("1ba", 2.0), ("3ba", s.constant(3.0))), 5) == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert repr(s.chain(1.0, ("2ba", 0.5))) == "chain(constant(1.0), ('2ba', constant(0.5)))"


def test_a_chain_in_epochs() -> None:
    schedule = s.chain(1.0, ("1ep", s.linear(1.0, 0.0, "1ep")), restart=True)
    values = [schedule(Timestamp(batch=b, epoch=b // 4, batch_in_epoch=b % 4, batches_per_epoch=4)) for b in range(9)]
    assert values == [1.0] * 4 + [1.0, 0.75, 0.5, 0.25, 0.0]


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "other unit": (
        lambda: s.chain(1.0, ("2ba", s.cosine("1ep")), restart=True),
        ArgumentError,
        "write both in one unit",
    ),
    "function": (lambda: s.chain(1.0, ("2ba", lambda t: 1.0), restart=True), ArgumentError, "leave restart out"),
    "fraction": (lambda: s.chain(1.0, ("0.5dur", s.constant(1)), restart=True), ArgumentError, "in batches"),
    "no pair": (lambda: s.chain(1.0, s.constant(2.0)), ArgumentTypeError, "no pair"),  # type: ignore[arg-type]
    "no start": (lambda: s.piecewise({"2ba": 1.0}), ArgumentError, "starts at time 0"),
    "no mapping": (lambda: s.piecewise([1.0]), ArgumentTypeError, "mapping"),  # type: ignore[arg-type]
    "no number": (lambda: s.piecewise({0: "x"}), ArgumentTypeError, "values"),  # type: ignore[dict-item]
    "decay": (lambda: s.warmup_stable_decay("1ba", "4ba", "5ba"), ArgumentError, "decay='5ba' is no part of"),
    "too long": (lambda: s.warmup_stable_decay("3ba", "4ba", "2ba"), ArgumentError, "are longer than"),
    "own function": (lambda: s.scaled(lambda t: 1.0, 0.5), ArgumentTypeError, "scaled: .* of your own"),  # type: ignore[type-var]
    "plot": (lambda: s.sparkline(s.constant(1), "1000tok"), ArgumentError, "in batches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def test_all_times_are_scaled_but_warmups_and_fractions() -> None:
    assert s.scaled(s.cosine("100ba", warmup="10ba"), 0.5) == s.cosine("50ba", warmup="10ba")
    assert s.scaled(s.cosine("100ba", warmup="10ba"), 0.5, warmup=True) == s.cosine("50ba", warmup="5ba")
    assert s.scaled(s.warmup("10ba", s.step("5ep")), 2.0) == s.warmup("10ba", s.step("10ep"))
    assert s.scaled(s.multistep(["2ba", "0.5dur"]) * 2.0, 3.0) == s.multistep(["6ba", "0.5dur"]) * 2.0
    assert s.scaled(s.chain(1.0, ("10ba", 0.5)), 0.5) == s.chain(1.0, ("5ba", 0.5))


def test_a_picture_and_a_line_of_text() -> None:
    axes = s.plot({"a": s.cosine("1ep"), "b": s.constant(0.5)}, "2ep", batches_per_epoch=10)
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert list(axes.lines[0].get_ydata())[::10] == pytest.approx([1.0, 0.0, 0.0])
    again = s.plot(s.linear(1, 0, "4ba"), "4ba", axes=axes)
    assert again is axes
    assert s.sparkline(s.linear(1.0, 0.0, "7ba"), "7ba", width=8) == "█▇▆▅▄▃▂▁"
