"""The laws of the loop, by Hypothesis, on the library's own loop."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pure_loop.compile import interpreted
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.testing import Case, cases, laws, plans
from pure_loop.testing.problems import PROBLEMS
from pure_loop.testing.subject import AlgorithmSubject
from tests.support.streams import Pairs, assert_same_stream
from tests.support.tiers import examples

LOOP = AlgorithmSubject(None)
ORDERS = ("current", "current", "current", "2021")


def of_several(plan: Plan, per_step: int) -> Plan:
    """A step accumulates over several batches."""
    cut, steps = plan.batches_per_epoch, math.ceil(len(plan.batches) / per_step)
    return attrs.evolve(
        plan, batches_per_step=per_step, batches_per_epoch=min(cut, steps) if cut and plan.sized else cut
    )


def in_fractions(plan: Plan, epochs: int, interval: str) -> Plan:
    """Seldom in others: a duration in epochs, of which evaluation takes fractions."""
    evaluators = {"val": EvaluatorPlan((2,))}
    return attrs.evolve(plan, max_duration=f"{epochs}ep", eval_interval=interval, evaluators=evaluators)


FRACTIONS = st.builds(
    in_fractions,
    plans(orders=ORDERS, units=["ep"], iterations=False),
    st.integers(1, 3),
    st.sampled_from(["0.1dur", "0.25dur", "0.3dur", "0.5dur", "0.7dur", "1dur"]),
)
STOPPED = plans(orders=ORDERS, min_batches=0, stops=True)
ALL = st.builds(of_several, STOPPED, st.sampled_from([1, 1, 2, 3, 4])) | FRACTIONS
# The older order, in which an epoch counts before it is evaluated, and its event comes after.
OLDER = Case(plan=Plan(batches=(1,), max_duration="1ba", evaluators={"val": EvaluatorPlan(batches=(1,))}, order="2021"))
EXACT = cases(problems="exact", plans=plans(max_samples=9, max_batches=3, max_evaluators=0))

PLAIN, SEPARABLE = plans(orders=ORDERS, min_batches=0), [each for each in PROBLEMS.values() if each.separable]
OTHERS = [law for law in laws.OF_LOOPS if law not in (laws.order, laws.microbatch_invariance)]
# The law, its cases, and how many examples in the fast and the thorough tier; graphs take a second to trace.
TRIED: dict[str, tuple[laws.Law, Any, tuple[int, int]]] = {
    **{law.name: (law, cases(plans=PLAIN), (15, 400)) for law in OTHERS},
    "visibility": (laws.visibility, cases(plans=STOPPED), (15, 400)),
    "compile_equality": (laws.compile_equality, cases(plans=PLAIN), (2, 400)),
    "world_size": (laws.world_size, cases(plans=ALL, problems=SEPARABLE), (3, 400)),
    "microbatch_invariance": (laws.microbatch_invariance, cases(problems=["linear", "tied"]), (15, 500)),
    "microbatch_invariance, exactly": (laws.microbatch_invariance, EXACT, (15, 500)),
    "resumption": (laws.resumption, cases(plans=ALL), (20, 600)),
    "order": (laws.order, cases(plans=ALL), (150, 5000)),
    "order of fractions": (laws.order, cases(problems="linear", plans=FRACTIONS), (50, 1000)),
}


@pytest.mark.parametrize("name", TRIED)
def test_the_loop_keeps(name: str) -> None:
    law, drawn, count = TRIED[name]

    @examples(*count)
    @example(case=OLDER)
    @given(drawn)
    def holds(case: Case) -> None:
        law.on(LOOP, case)

    holds()


@examples(10, 200)
@given(cases(), cases())
def test_two_streams_in_turn_give_what_they_give_alone(one: Case, two: Case) -> None:
    first, second = one.stream(), two.stream()
    turns: tuple[Pairs, Pairs] = ([], [])
    streams = [(first, turns[0]), (second, turns[1])]
    while streams:
        for stream, found in list(streams):
            pair = next(stream, None)
            if pair is None:
                streams.remove((stream, found))
            else:
                found.append(pair)
    assert_same_stream(turns[0], alone := one.run(), "in turn with another")
    assert_same_stream(one.run(strict=True), alone, "strict, which finds nothing")
    assert_same_stream(turns[1], two.run(), "in turn with another")


@pytest.mark.slow  # each example is a graph
@examples(6, 100)
@given(plans(stops=True, iterations=False, max_batches=5))
def test_the_events_of_compiled_steps(plan: Plan) -> None:
    with interpreted():
        assert [event for event, _ in Case(plan=plan).run(compile=True)] == expected(plan)


def test_a_wrong_loop_is_caught() -> None:
    """One that goes on where it is to stop, and one that takes each batch for a step."""
    plan = Plan(batches=(2, 2, 2), max_duration="1ep", evaluators={"val": EvaluatorPlan((2,))})
    for changed in ({"stop_at": "2ba"}, {"batches_per_step": 2}):
        assert [event for event, _ in Case(plan=plan).run()] != expected(attrs.evolve(plan, **changed))
