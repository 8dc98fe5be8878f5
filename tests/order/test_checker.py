"""The checker refuses every stream that the specification does not allow, and says what it allows."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import attrs
import pytest

from pure_loop import order
from pure_loop.errors import ArgumentError, OrderError
from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan, Plan, check, expected
from tests.support.ordering import events

FULL = Plan(
    batches=(4, 2), max_duration="2ep", microbatch_size=2, evaluators={"val": EvaluatorPlan((4,), microbatch_size=2)}
)
WHOLE = [
    attrs.evolve(FULL, order="2021"),
    attrs.evolve(FULL, max_duration="3ba"),
    attrs.evolve(FULL, iteration_length="1ep"),
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
        check(before, order=plan.order)
        says = r"the stream (is empty|ends after event \d+, Event\.\w+), which does not complete it"
        with pytest.raises(OrderError, match=says):
            check(before, complete=True, order=plan.order)


# Nothing else: an epoch of no batch, evaluation without training, a round of no evaluator, a batch of no microbatch, an
# epoch cut short before another one, a part of the load events, iterations that begin late or end unbegun or count
# epochs and tokens, an evaluator of fit in a stream of its own, a stream after its end, two streams.
FORBIDDEN = """
    load FIT_START epoch ask close FIT_END
    load FIT_START evals FIT_END
    FIT_START EVAL_BEFORE_ALL EVAL_AFTER_ALL FIT_END
    load FIT_START epoch take BATCH_START BEFORE_TRAIN_BATCH AFTER_TRAIN_BATCH
    FIT_START epoch step epoch
    FIT_START epoch step close epoch
    INIT FIT_START
    load FIT_START epoch step ask close ITERATION_START
    load FIT_START epoch step ask close ITERATION_END
    load FIT_START ITERATION_START epoch step iteration ITERATION_START ask close iteration
    EVAL_STANDALONE_START EVAL_BEFORE_ALL
    FIT_START FIT_END FIT_START
    PREDICT_START PREDICT_END PREDICT_START
"""


def test_what_the_rules_forbid_is_refused_and_what_was_legal_is_named() -> None:
    for text in FORBIDDEN.strip().splitlines():
        with pytest.raises(OrderError):
            pytest.fail(f"{text} is accepted: {check(events(text))}")
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
    loaded = events("load FIT_START BEFORE_DATALOADER EPOCH_END")  # resumes at the boundary of a checkpoint
    assert check(loaded, loaded=True) is None
    with pytest.raises(OrderError, match=r"event 4 of the stream is Event\.BEFORE_DATALOADER"):
        check(loaded)
    asks: list[Any] = [order.Checker, order.table, order.outline, order.mermaid]
    for ask in asks:
        with pytest.raises(ArgumentError, match="order='2020' is not known; write 'current' or '2021'"):
            ask("2020")


def test_a_checker_stays_where_it_was_on_an_error() -> None:
    checker = order.Checker()
    assert checker.legal == {Event.INIT, Event.FIT_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START}
    checker.advance(Event.INIT)
    with pytest.raises(OrderError):
        checker.advance(Event.FIT_START)
    assert checker.legal == {Event.BEFORE_LOAD}
    for event in events("BEFORE_LOAD AFTER_LOAD FIT_START FIT_END"):
        assert not checker.complete
        checker.advance(event)
    assert (checker.complete, checker.legal) == (True, frozenset())
    checker.finish()


NEAREST = {
    Event.INIT: Event.AFTER_LOAD,
    Event.AFTER_BACKWARD: Event.BATCH_END,
    Event.EVAL_END: Event.BATCH_CHECKPOINT,
    Event.ITERATION_START: Event.EPOCH_START,
    Event.FIT_END: Event.EPOCH_CHECKPOINT,
}


def test_successors_and_the_nearest_boundary() -> None:
    assert order.successors("after_loss") == {Event.BEFORE_BACKWARD}
    assert order.successors(Event.AFTER_BACKWARD) == {Event.BEFORE_FORWARD, Event.AFTER_TRAIN_BATCH}
    of_2021 = order.successors(Event.BATCH_END, order="2021")
    assert of_2021 == {Event.AFTER_DATALOADER, Event.EVAL_START, Event.EPOCH_END}
    assert order.successors(Event.BATCH_CHECKPOINT, order="2021") == frozenset()
    reachable = frozenset().union(*(order.successors(event) for event in Event))
    assert frozenset(Event) - reachable == {Event.INIT, Event.EVAL_STANDALONE_START, Event.PREDICT_START}
    assert {order.nearest_boundary(event) for event in Event} == set(order.BOUNDARIES)
    for event, boundary in {**NEAREST, **{each: each for each in order.BOUNDARIES}}.items():
        assert order.nearest_boundary(event) is boundary


@pytest.mark.parametrize("which", ["current", "2021"])
def test_table_outline_and_diagram_show_the_grammar(which: Any) -> None:
    known = {word for rule in order.GRAMMARS[which] for word in re.findall(r"\w+", rule.body) if word.isupper()}
    table = order.table(which)
    assert known <= set(re.findall(r"\w+", table))
    assert {line.split()[0] for line in table.splitlines() if " = " in line} == {r.name for r in order.GRAMMARS[which]}
    assert max(map(len, table.splitlines())) <= 132
    # The outline reads from top to bottom.
    lines = order.outline(which)
    assert lines[0][:2] == (0, "fit")
    assert all(after <= before + 1 for (before, _, _), (after, _, _) in pairwise(lines))
    depths = {event: depth for depth, event, _ in reversed(lines) if isinstance(event, Event)}
    assert set(depths) == {Event[name] for name in known}
    inner = (Event.FIT_START, Event.EPOCH_START, Event.BATCH_START, Event.BATCH_END, Event.BEFORE_FORWARD)
    assert [depths[event] for event in inner] == [1, 2, 3, 3, 4]
    # The diagram has the arrows of the grammar; going on from FIT_START, iterations and other streams are not drawn.
    drawn = [line.strip() for line in order.mermaid(which).splitlines()]
    assert drawn.count("end") == sum(line.startswith("subgraph ") for line in drawn)
    nodes = {line for line in drawn if line in Event.__members__}
    halves = [line.split("-->") for line in drawn if "-->" in line]
    arrows = {(start.strip(), end.rpartition("|")[2].strip()) for start, end in halves}
    between = {(start, end) for start, end in arrows if start in nodes and end in nodes}
    for start, end in between:
        assert Event[end] in order.successors(Event[start], order=which)
    for start in nodes - {"FIT_START"}:
        for after in order.successors(Event[start], order=which):
            inside = after.name in nodes and not (start.startswith("EVAL") or after.is_eval)
            assert not inside or (start, after.name) in between, (start, after)
