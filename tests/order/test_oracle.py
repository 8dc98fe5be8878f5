"""The oracle: what it expects of a plan is legal, complete and counted right, and of no impossible plan."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure_loop import order
from pure_loop.errors import ArgumentError, ArgumentTypeError, OrderError
from pure_loop.event import Event
from pure_loop.order import Plan, check, expected, going_on
from pure_loop.testing import plans
from pure_loop.time import Timestamp, due
from tests.support.ordering import ONE, events
from tests.support.refused import Refusal
from tests.support.refused import check as check_refusal
from tests.support.tiers import examples


def samples_of_steps(plan: Plan, steps: int) -> list[int]:
    epoch = plan.batches[: plan.batches_per_epoch] if plan.sized else plan.batches
    return [epoch[step % len(epoch)] for step in range(steps)]


PLANS = st.builds(
    lambda plan, fresh: attrs.evolve(plan, fresh=fresh),
    plans(orders=("current", "current", "2021"), min_batches=0),
    st.booleans(),
)


@examples(60, 3000)
@given(PLANS, st.data())
def test_what_is_expected_is_legal_complete_and_counted_right(plan: Plan, data: st.DataObject) -> None:
    """The grammar, Composer's published table of counts, and what is left from a boundary on."""
    stream = expected(plan)
    check([event.value for event in stream], complete=True, order=plan.order)
    checker = order.Checker(plan.order)
    for event in stream:
        assert event in checker.legal
        checker.advance(event)
    assert checker.complete
    for before, after in pairwise(stream):
        assert after in order.successors(before, order=plan.order)

    counts = Counter(stream)
    steps, epochs = counts[Event.BATCH_END], counts[Event.EPOCH_START]
    microbatches = sum(math.ceil(n / (plan.microbatch_size or n)) for n in samples_of_steps(plan, steps))
    for event in (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.AFTER_DATALOADER):
        assert counts[event] == steps
    for event in events("micro"):
        assert counts[event] == microbatches
    assert counts[Event.FIT_START] == counts[Event.FIT_END] == 1
    assert counts[Event.INIT] == plan.fresh
    assert counts[Event.EVAL_START] == counts[Event.EVAL_END]
    if plan.order == "2021":
        assert counts[Event.EPOCH_END] == epochs
    else:
        assert counts[Event.BATCH_CHECKPOINT] == steps
        assert epochs - 1 <= counts[Event.EPOCH_END] == counts[Event.EPOCH_CHECKPOINT] <= epochs or epochs == 0
        assert counts[Event.BEFORE_LOAD] == counts[Event.AFTER_LOAD] == plan.fresh
        assert 0 <= counts[Event.ITERATION_START] - counts[Event.ITERATION_END] <= 1

    kept = data.draw(st.sampled_from([at for at, event in enumerate(stream) if event in order.BOUNDARIES]))
    rest = going_on(stream, kept)
    check(rest, complete=True, order=plan.order)
    assert rest[0] is Event.FIT_START
    assert rest.count(Event.FIT_START) == 1
    assert Event.INIT not in rest


@examples(40, 3000)
@given(plans(units=("ba", "sp", "tok", "s")))
def test_durations_overshoot_to_whole_batches_and_no_further(plan: Plan) -> None:
    steps = expected(plan).count(Event.BATCH_END)
    gains: list[float] = {
        "ba": [1.0] * steps,
        "sp": [float(n) for n in samples_of_steps(plan, steps)],
        "tok": [float(n * plan.tokens_per_sample) for n in samples_of_steps(plan, steps)],
        "s": [plan.seconds_per_batch] * steps,
    }[plan.max_duration.unit.value]
    assert sum(gains) >= plan.max_duration.value
    assert steps == 0 or sum(gains[:-1]) < plan.max_duration.value


@examples(60, 3000)
@given(plans(min_evaluators=1, max_evaluators=1))
def test_evaluation_comes_where_due_says(plan: Plan) -> None:
    """The oracle's own arithmetic against ``time.due``, which the loop uses, at the ends of batches and epochs."""
    (evaluator,) = plan.evaluators.values()
    interval = plan.interval_of(evaluator)
    stream = expected(attrs.evolve(plan, order="current"))
    lengths = [plan.batches_per_epoch, len(plan.batches) if plan.sized else None]
    length = min((each for each in lengths if each is not None), default=None)
    now, step, at_this_batch = Timestamp(max_duration=plan.max_duration, batches_per_epoch=length), 0, False
    for position, event in enumerate(stream):
        if event not in (Event.BATCH_END, Event.EPOCH_END, Event.ITERATION_END):
            continue
        before = now
        if event is Event.BATCH_END:
            (samples,) = samples_of_steps(plan, step + 1)[step:]
            now = now.next_batch(samples, samples * plan.tokens_per_sample, plan.seconds_per_batch)
            step, at_this_batch = step + 1, False
        elif event is Event.EPOCH_END:
            now = now.next_epoch()
        else:
            now = now.next_iteration()
            continue
        assert (stream[position + 1] is Event.EVAL_BEFORE_ALL) == due(interval, before, now, event)
        at_this_batch |= due(interval, before, now, event)
    last = stream[-2] is Event.EVAL_AFTER_ALL
    assert last == (step > 0 and interval.value > 0 and not at_this_batch)


def test_going_on_from_the_middle_of_a_step_is_refused() -> None:
    stream = expected(Plan(batches=(4,), max_duration="1ep"))
    with pytest.raises(OrderError, match=r"nothing resumes from Event\.AFTER_LOSS; keep a State at Event\.BATCH_END"):
        going_on(stream, stream.index(Event.AFTER_LOSS))


IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batches": ()}, ArgumentError, "yields no batch"),
    ({"batches": (4, 0)}, ArgumentError, "0 is less than 1"),
    ({"batches": 4}, ArgumentTypeError, "write the samples of each batch"),
    ({"batches": (4.0,)}, ArgumentTypeError, "4.0 is not an int"),
    ({"microbatch_size": 0}, ArgumentError, "microbatch_size=0"),
    ({"max_duration": "1tok"}, ArgumentError, "set tokens_per_sample"),
    ({"max_duration": "1s"}, ArgumentError, "set seconds_per_batch"),
    ({"max_duration": "1iter"}, ArgumentError, "needs an iteration_length"),
    ({"max_duration": "1dur"}, ArgumentError, "fraction of itself"),
    ({"max_duration": "soon"}, ArgumentError, "can't read 'soon'"),
    ({"iteration_length": "3ba"}, ArgumentError, "iteration_length"),
    ({"iteration_length": "0ep"}, ArgumentError, "more than 0"),
    ({"iteration_length": "5tok"}, ArgumentError, "set tokens_per_sample"),
    ({"iteration_length": "1ep", "order": "2021"}, ArgumentError, "no events for iterations"),
    ({"evaluators": {"val": (4,)}}, ArgumentTypeError, "write EvaluatorPlan(batches=...)"),
    ({"evaluators": {"val": ONE}, "eval_interval": "1iter"}, ArgumentError, "counts iterations"),
    ({"seconds_per_batch": -1.0}, ArgumentError, "seconds_per_batch"),
    ({"batches_per_epoch": 0}, ArgumentError, "batches_per_epoch"),
    ({"batches_per_epoch": 60}, ArgumentError, "batches_per_epoch=60: the loader has a length of 1"),
    ({"order": "2022"}, ArgumentError, "'2022' is not known"),
]


def test_a_plan_that_no_run_can_follow_is_refused() -> None:
    for change, error, says in IMPOSSIBLE:
        settings: dict[str, Any] = {"batches": (4,), "max_duration": "1ep", **change}
        check_refusal(Refusal(str(change), lambda settings=settings: Plan(**settings), error, (says,)))
