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
from tests.support.ordering import ONE, events
from tests.support.refused import Refusal
from tests.support.refused import check as check_refusal
from tests.support.tiers import examples

PLANS = st.builds(
    lambda plan, fresh: attrs.evolve(plan, fresh=fresh),
    plans(orders=("current", "current", "2021"), min_batches=0),
    st.booleans(),
)


@examples(50, 3000)
@given(PLANS, st.data())
def test_what_is_expected_is_legal_complete_and_counted_right(plan: Plan, data: st.DataObject) -> None:
    """The grammar, Composer's published table of counts, and what is left from a boundary on."""
    stream, counts = expected(plan), Counter(expected(plan))
    check([event.value for event in stream], complete=True, order=plan.order)
    for before, after in pairwise(stream):
        assert after in order.successors(before, order=plan.order)
    steps, epochs = counts[Event.BATCH_END], counts[Event.EPOCH_START]
    epoch = plan.batches[: plan.batches_per_epoch] if plan.sized else plan.batches
    samples = [epoch[step % len(epoch)] for step in range(steps)]
    for event in (Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.AFTER_TRAIN_BATCH, Event.AFTER_DATALOADER):
        assert counts[event] == steps
    for event in events("micro"):
        assert counts[event] == sum(math.ceil(n / (plan.microbatch_size or n)) for n in samples)
    assert (counts[Event.FIT_START], counts[Event.FIT_END], counts[Event.INIT]) == (1, 1, plan.fresh)
    assert counts[Event.EVAL_START] == counts[Event.EVAL_END]
    if plan.order == "2021":
        assert counts[Event.EPOCH_END] == epochs
    else:
        assert counts[Event.BATCH_CHECKPOINT] == steps
        assert epochs - 1 <= counts[Event.EPOCH_END] == counts[Event.EPOCH_CHECKPOINT] <= epochs or epochs == 0
        assert counts[Event.BEFORE_LOAD] == counts[Event.AFTER_LOAD] == plan.fresh
        assert 0 <= counts[Event.ITERATION_START] - counts[Event.ITERATION_END] <= 1
    if plan.max_duration.unit.value == "sp":  # it overshoots to whole batches, and no further
        assert sum(samples) >= plan.max_duration.value
        assert steps == 0 or sum(samples[:-1]) < plan.max_duration.value
    boundaries = [place for place, event in enumerate(stream) if event in order.BOUNDARIES]
    rest = going_on(stream, data.draw(st.sampled_from(boundaries)))
    check(rest, complete=True, order=plan.order)
    assert (rest[0], rest.count(Event.FIT_START), rest.count(Event.INIT)) == (Event.FIT_START, 1, 0)


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
