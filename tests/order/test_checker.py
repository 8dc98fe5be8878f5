"""The checker refuses every stream that the specification does not allow, and says what it allows."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure_loop import order
from pure_loop.errors import ArgumentError, OrderError
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from tests.support.ordering import CLOSE, EVALS, ITERATION, LOAD, STEP, TAKE, events, plans

FULL = Plan(
    batches=(4, 2), max_duration="2ep", microbatch_size=2, evaluators={"val": EvaluatorPlan((4,), microbatch_size=2)}
)
ITERATED = [
    attrs.evolve(FULL, iteration_length="1ep"),
    attrs.evolve(FULL, iteration_length="6tok", tokens_per_sample=1),
    attrs.evolve(FULL, iteration_length="4tok", tokens_per_sample=1, max_duration="4ba", eval_interval="1ba"),
]
WHOLE = [FULL, attrs.evolve(FULL, order="2021"), attrs.evolve(FULL, max_duration="3ba"), *ITERATED]


def legal(stream: list[Event], which: Any) -> bool:
    try:
        check(stream, complete=True, order=which)
    except OrderError:
        return False
    return True


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_one_event_dropped_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream)):
        # Without its INIT the older stream is one that resumes; on the last batch, asking the loader again is optional.
        allowed = (plan.order == "2021" and stream[at] is Event.INIT) or (
            stream[at] is Event.BEFORE_DATALOADER
            and stream[at + 1] is Event.EPOCH_END
            and Event.EPOCH_START not in stream[at:]
            and stream[at - 1] is Event.BATCH_CHECKPOINT
        )
        assert legal(stream[:at] + stream[at + 1 :], plan.order) == allowed, (at, stream[at])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_one_event_twice_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream)):
        assert not legal(stream[: at + 1] + stream[at:], plan.order), (at, stream[at])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_with_two_events_swapped_is_refused(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(len(stream) - 1):
        swapped = [*stream[:at], stream[at + 1], stream[at], *stream[at + 2 :]]
        assert not legal(swapped, plan.order), (at, stream[at : at + 2])


@pytest.mark.parametrize("plan", WHOLE)
def test_a_foreign_event_is_refused_everywhere(plan: Plan) -> None:
    stream = expected(plan)
    for at in range(1, len(stream) + 1):
        for event in (Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_BATCH_START):
            assert not legal([*stream[:at], event, *stream[at:]], plan.order)


@given(plans(), st.data())
@settings(max_examples=60)
def test_a_stream_that_stops_early_is_legal_so_far_and_incomplete(plan: Plan, data: st.DataObject) -> None:
    stream = expected(plan)
    stop = data.draw(st.integers(0, len(stream) - 1))
    check(stream[:stop], order=plan.order)
    with pytest.raises(
        OrderError, match=r"the stream (is empty|ends after event \d+, Event\.\w+), which does not complete it"
    ):
        check(stream[:stop], complete=True, order=plan.order)


@pytest.mark.parametrize(
    ("why", "text"),
    [
        ("an epoch of no batch", f"{LOAD} FIT_START EPOCH_START BEFORE_DATALOADER {CLOSE} FIT_END"),
        ("evaluation without training", f"{LOAD} FIT_START {EVALS} FIT_END"),
        ("a round of no evaluator", "FIT_START EVAL_BEFORE_ALL EVAL_AFTER_ALL FIT_END"),
        (
            "a batch of no microbatch",
            f"{LOAD} FIT_START EPOCH_START {TAKE} BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH",
        ),
        ("an epoch cut short before another one", f"FIT_START EPOCH_START {STEP} EPOCH_START"),
        ("... and closed", f"FIT_START EPOCH_START {STEP} {CLOSE} EPOCH_START"),
        ("a part of the load events", "INIT FIT_START"),
        (
            "iterations that begin late",
            f"{LOAD} FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} ITERATION_START",
        ),
        ("iterations that end unbegun", f"{LOAD} FIT_START EPOCH_START {STEP} BEFORE_DATALOADER {CLOSE} ITERATION_END"),
        (
            "iterations in epochs and in tokens",
            (
                f"{LOAD} FIT_START ITERATION_START EPOCH_START {STEP} {ITERATION} ITERATION_START "
                f"BEFORE_DATALOADER {CLOSE} {ITERATION}"
            ),
        ),
        ("an evaluator of fit in a stream of its own", "EVAL_STANDALONE_START EVAL_BEFORE_ALL"),
        ("a stream after its end", "FIT_START FIT_END FIT_START"),
        ("two streams", "PREDICT_START PREDICT_END PREDICT_START"),
    ],
)
def test_what_the_rules_forbid_is_refused(why: str, text: str) -> None:
    stream = events(text)
    with pytest.raises(OrderError):
        check(stream)


def test_the_error_names_position_event_and_what_was_legal() -> None:
    stream = events("FIT_START EPOCH_START BATCH_START")
    with pytest.raises(
        OrderError,
        match=r"event 2 of the stream is Event\.BATCH_START, which can't follow Event\.EPOCH_START; "
        r"legal there: Event\.BEFORE_DATALOADER\. .*table\('current'\)",
    ):
        check(stream)
    with pytest.raises(
        OrderError, match=r"event 0 .* can't begin a stream; legal there: Event\.INIT, Event\.FIT_START, "
    ):
        check([Event.BATCH_END])
    with pytest.raises(OrderError, match=r"legal there: nothing, the stream is over"):
        check(events("FIT_START FIT_END FIT_END"))
    with pytest.raises(ValueError, match="'batch_stop' is not an event"):
        check(["batch_stop"])


def test_a_checker_goes_step_by_step_and_stays_where_it_was_on_an_error() -> None:
    checker = order.Checker()
    assert checker.legal == {Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START}
    checker.advance(Event.INIT)
    with pytest.raises(OrderError):
        checker.advance(Event.FIT_START)
    assert checker.legal == {Event.BEFORE_LOAD}
    for event in events("BEFORE_LOAD AFTER_LOAD FIT_START"):
        assert not checker.complete
        checker.advance(event)
    assert checker.legal == {Event.EPOCH_START, Event.ITERATION_START, Event.FIT_END}
    checker.advance(Event.FIT_END)
    assert checker.complete
    assert checker.legal == frozenset()
    checker.finish()


@given(plans())
@settings(max_examples=60)
def test_a_checker_says_what_is_legal_before_it_comes(plan: Plan) -> None:
    checker = order.Checker(plan.order)
    for event in expected(plan):
        assert event in checker.legal
        checker.advance(event)
    assert checker.complete


def test_successors() -> None:
    assert order.successors("after_loss") == {Event.BEFORE_BACKWARD}
    assert order.successors(Event.AFTER_BACKWARD) == {Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH}
    assert order.successors(Event.EPOCH_END) == {Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT}
    assert order.successors(Event.FIT_END) == frozenset()
    assert order.successors(Event.BATCH_END, order="2021") == {
        Event.AFTER_DATALOADER,
        Event.EVAL_START,
        Event.EPOCH_END,
    }
    assert order.successors(Event.BATCH_CHECKPOINT, order="2021") == frozenset()
    reachable = frozenset().union(*(order.successors(event) for event in Event))
    assert reachable == frozenset(Event) - {
        Event.INIT,
        Event.FIT_START,
        Event.EVAL_STANDALONE_START,
        Event.PREDICT_START,
    } | {Event.FIT_START}


@pytest.mark.parametrize(
    ("event", "boundary"),
    [
        (Event.INIT, Event.AFTER_LOAD),
        (Event.BEFORE_DATALOADER, Event.BATCH_END),
        (Event.AFTER_BACKWARD, Event.BATCH_END),
        (Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
        (Event.EVAL_END, Event.BATCH_CHECKPOINT),
        (Event.ITERATION_START, Event.EPOCH_START),
        (Event.ITERATION_END, Event.EPOCH_START),
        (Event.FIT_END, Event.EPOCH_CHECKPOINT),
        (Event.PREDICT_START, Event.EPOCH_CHECKPOINT),
    ],
)
def test_nearest_boundary(event: Event, boundary: Event) -> None:
    assert order.nearest_boundary(event) is boundary


def test_a_boundary_is_its_own_nearest() -> None:
    assert all(order.nearest_boundary(event) is event for event in order.BOUNDARIES)
    assert all(order.nearest_boundary(event) in order.BOUNDARIES for event in Event)


def test_an_unknown_order_is_refused() -> None:
    asks: list[Any] = [order.Checker, order.table, order.outline, order.mermaid]
    for ask in asks:
        with pytest.raises(ArgumentError, match="order='2020' is not known; write 'current' or '2021'"):
            ask("2020")
