"""``verify=`` keeps States of the batches that are due, and of no other: these are written in place as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages.references import can_count
from tests.state.test_memory import live_tensors, without_collector
from tests.support.donating import (
    Count,
    a_for_loop,
    a_while_loop,
    assert_same,
    fit,
    plain,
    through_a_generator,
    with_progress,
)

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


WATCHES = pytest.mark.parametrize(
    "watch",
    [None, {Event.BATCH_END}, {Event.BATCH_END, Event.EPOCH_END}, ()],
    ids=["all", "one", "two", "none"],
)


@WATCHES
@pytest.mark.parametrize("consumer", [a_for_loop, a_while_loop, through_a_generator, with_progress, pl.run])
def test_batches_that_are_not_due_are_written_in_place(
    count: Count, consumer: Callable[[Any], Any], watch: Any
) -> None:
    consumer(fit(watch=watch))
    without = count.reused, count.copied
    count.reused = count.copied = 0
    consumer(fit(watch=watch, verify="1000ba"))
    assert (count.reused, count.copied) == without
    count.reused = count.copied = 0
    consumer(fit(watch=watch, verify="5ba"))  # of 15 batches 3, of which the last has none after it
    # A due batch copies by itself. The one after it copies once, because the memory before it was not the loop's own.
    assert (count.reused, count.copied) == (without[0] - 3 - 2, without[1] + 2)


@WATCHES
@pytest.mark.parametrize("donate", ["auto", True])
def test_the_numbers_are_those_of_a_run_that_copies(watch: Any, donate: Any) -> None:
    options: dict[str, Any] = {"watch": watch, "microbatch_size": 2, "clip_grad": 0.1}
    for every in ("1ba", "2ba", "4ba"):
        ends = [pl.run(fit(donate=way, verify=verify, **options)) for way, verify in ((donate, every), (False, None))]
        assert_same(ends[0].params, ends[1].params)
        assert_same(ends[0].opt_state, ends[1].opt_state)


@pytest.mark.parametrize("event", [Event.BATCH_START, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END])
def test_a_state_that_was_kept_stays_as_it_is(event: Event) -> None:
    kept = [state for here, state in fit(verify="2ba", microbatch_size=2) if here is event]
    wanted = [state for here, state in fit(donate=False, microbatch_size=2) if here is event]
    for ours, others in zip(kept, wanted, strict=True):
        assert_same(ours.params, others.params)
        assert_same(ours.opt_state, others.opt_state)


@pytest.mark.parametrize(
    ("kept_at", "batch"), [(Event.BATCH_START, 4), (Event.AFTER_TRAIN_BATCH, 4), (Event.BATCH_END, 5)]
)
def test_a_kept_state_of_a_due_batch_does_not_keep_later_ones_from_writing_in_place(
    count: Count, kept_at: Event, batch: int
) -> None:
    kept = None
    for event, state in fit(verify="5ba"):
        if event is kept_at and state.timestamp.batch == batch:
            kept = state
    assert kept is not None
    assert count.reused == 15 - 3 - 2


def test_nothing_is_kept_after_a_due_batch() -> None:
    def at_the_end_of(batch: int, verify: str | None) -> int:
        with without_collector():
            for event, state in fit(plain(), verify=verify, microbatch_size=2):
                if event is Event.BATCH_END and state.timestamp.batch == batch:
                    return live_tensors()[1]
        raise AssertionError("training is shorter than that")

    state = pl.State.create(plain())
    parameters = sum(tensor.nbytes for tensor in state.params.values())
    # Parameters and two moments of the State before are still in the loop variable, as they are wherever a step copies.
    assert at_the_end_of(5, "5ba") <= at_the_end_of(5, None) + 3 * parameters + 100
    for later in (7, 8):
        assert at_the_end_of(later, "5ba") == at_the_end_of(later, None)
