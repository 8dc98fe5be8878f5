"""The checker refuses every stream that the specification does not allow, and says what it allows."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loop import order
from pure_loop.errors import ArgumentError, OrderError
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from tests.support.ordering import events, plans
from tests.support.tiers import examples

FULL = Plan(
    batches=(4, 2), max_duration="2ep", microbatch_size=2, evaluators={"val": EvaluatorPlan((4,), microbatch_size=2)}
)
WHOLE = [
    FULL,
    attrs.evolve(FULL, order="2021"),
    attrs.evolve(FULL, max_duration="3ba"),
    attrs.evolve(FULL, iteration_length="1ep"),
    attrs.evolve(FULL, iteration_length="6tok", tokens_per_sample=1),
    attrs.evolve(FULL, iteration_length="4tok", tokens_per_sample=1, max_duration="4ba", eval_interval="1ba"),
]
FOREIGN = (Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_BATCH_START)


def legal(stream: list[Event], which: Any) -> bool:
    try:
        check(stream, complete=True, order=which)
    except OrderError:
        return False
    return True


@pytest.mark.parametrize("plan", WHOLE)
def test_a_stream_is_refused_with_any_event_dropped_doubled_swapped_or_foreign(plan: Plan) -> None:
    stream = expected(plan)
    for at, event in enumerate(stream):
        before, after = stream[:at], stream[at + 1 :]
        # Without its INIT the older stream is one that resumes; on the last batch, asking the loader again is optional.
        allowed = (plan.order == "2021" and event is Event.INIT) or (
            event is Event.BEFORE_DATALOADER
            and after[0] is Event.EPOCH_END
            and Event.EPOCH_START not in after
            and before[-1] is Event.BATCH_CHECKPOINT
        )
        assert legal(before + after, plan.order) == allowed, (at, event)
        assert not legal([*before, event, event, *after], plan.order), (at, event)
        if after:
            assert not legal([*before, after[0], event, *after[1:]], plan.order), (at, event)
        for foreign in FOREIGN:
            assert not legal([*before, event, foreign, *after], plan.order), (at, event, foreign)


@given(plans(), st.data())
@examples(25, 3000)
def test_a_stream_that_stops_early_is_legal_so_far_and_incomplete(plan: Plan, data: st.DataObject) -> None:
    stream = expected(plan)
    stop = data.draw(st.integers(0, len(stream) - 1))
    check(stream[:stop], order=plan.order)
    with pytest.raises(
        OrderError, match=r"the stream (is empty|ends after event \d+, Event\.\w+), which does not complete it"
    ):
        check(stream[:stop], complete=True, order=plan.order)


FORBIDDEN = {
    "an epoch of no batch": "load FIT_START epoch ask close FIT_END",
    "evaluation without training": "load FIT_START evals FIT_END",
    "a round of no evaluator": "FIT_START EVAL_BEFORE_ALL EVAL_AFTER_ALL FIT_END",
    "a batch of no microbatch": "load FIT_START epoch take BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH",
    "an epoch cut short before another one": "FIT_START epoch step epoch",
    "... and closed": "FIT_START epoch step close epoch",
    "a part of the load events": "INIT FIT_START",
    "iterations that begin late": "load FIT_START epoch step ask close ITERATION_START",
    "iterations that end unbegun": "load FIT_START epoch step ask close ITERATION_END",
    "iterations in epochs and in tokens": (
        "load FIT_START ITERATION_START epoch step iteration ITERATION_START ask close iteration"
    ),
    "an evaluator of fit in a stream of its own": "EVAL_STANDALONE_START EVAL_BEFORE_ALL",
    "a stream after its end": "FIT_START FIT_END FIT_START",
    "two streams": "PREDICT_START PREDICT_END PREDICT_START",
}


def test_what_the_rules_forbid_is_refused() -> None:
    for why, text in FORBIDDEN.items():
        stream = events(text)
        with pytest.raises(OrderError):
            pytest.fail(f"{why} is accepted: {check(stream)}")


def test_the_error_names_position_event_and_what_was_legal() -> None:
    for text, says in {
        "FIT_START EPOCH_START BATCH_START": (
            r"event 2 of the stream is Event\.BATCH_START, which can't follow Event\.EPOCH_START; "
            r"legal there: Event\.BEFORE_DATALOADER\. .*table\('current'\)"
        ),
        "BATCH_END": r"event 0 .* can't begin a stream; legal there: Event\.INIT, Event\.FIT_START, ",
        "FIT_START FIT_END FIT_END": "legal there: nothing, the stream is over",
    }.items():
        with pytest.raises(OrderError, match=says):
            check(events(text))
    with pytest.raises(ValueError, match="'batch_stop' is not an event"):
        check(["batch_stop"])
    asks: list[Any] = [order.Checker, order.table, order.outline, order.mermaid]
    for ask in asks:
        with pytest.raises(ArgumentError, match="order='2020' is not known; write 'current' or '2021'"):
            ask("2020")


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


def test_successors() -> None:
    assert order.successors("after_loss") == {Event.BEFORE_BACKWARD}
    assert order.successors(Event.AFTER_BACKWARD) == {Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH}
    assert order.successors(Event.EPOCH_END) == {Event.EVAL_BEFORE_ALL, Event.EPOCH_CHECKPOINT}
    assert order.successors(Event.FIT_END) == frozenset()
    of_2021 = order.successors(Event.BATCH_END, order="2021")
    assert of_2021 == {Event.AFTER_DATALOADER, Event.EVAL_START, Event.EPOCH_END}
    assert order.successors(Event.BATCH_CHECKPOINT, order="2021") == frozenset()
    reachable = frozenset().union(*(order.successors(event) for event in Event))
    assert frozenset(Event) - reachable == {Event.INIT, Event.EVAL_STANDALONE_START, Event.PREDICT_START}


NEAREST = {
    Event.INIT: Event.AFTER_LOAD,
    Event.BEFORE_DATALOADER: Event.BATCH_END,
    Event.AFTER_BACKWARD: Event.BATCH_END,
    Event.AFTER_TRAIN_BATCH: Event.BATCH_END,
    Event.EVAL_END: Event.BATCH_CHECKPOINT,
    Event.ITERATION_START: Event.EPOCH_START,
    Event.ITERATION_END: Event.EPOCH_START,
    Event.FIT_END: Event.EPOCH_CHECKPOINT,
    Event.PREDICT_START: Event.EPOCH_CHECKPOINT,
}


def test_the_nearest_boundary() -> None:
    for event in Event:
        assert order.nearest_boundary(event) in order.BOUNDARIES
    for event, boundary in {**NEAREST, **{each: each for each in order.BOUNDARIES}}.items():
        assert order.nearest_boundary(event) is boundary
