"""The laws of the loop, by Hypothesis, on the library's own loop."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import Case, cases, laws, plans
from pure_loop.testing.laws.runs import resumption_from
from pure_loop.testing.subject import AlgorithmSubject
from tests.conftest import THOROUGH
from tests.support.streams import Pairs, assert_same_stream
from tests.support.tiers import examples

LOOP = AlgorithmSubject(None)


BOTH_ORDERS = plans(orders=("current", "current", "current", "2021"), min_batches=0)


@examples(150, 5000)
@given(cases(plans=BOTH_ORDERS))
def test_events_are_those_of_the_specification(case: Case) -> None:
    laws.order(None, case)


def in_fractions(plan: Plan, epochs: int, interval: str) -> Plan:
    evaluators = {"val": EvaluatorPlan((2,))}
    return attrs.evolve(plan, max_duration=f"{epochs}ep", eval_interval=interval, evaluators=evaluators)


FRACTIONS = st.sampled_from(["0.1dur", "0.25dur", "0.3dur", "0.5dur", "0.7dur", "1dur"])
# Seldom in the others: a duration in epochs, of which evaluation takes fractions.
IN_FRACTIONS = st.builds(
    in_fractions,
    plans(orders=("current", "current", "2021"), units=["ep"], iterations=False),
    st.integers(1, 3),
    FRACTIONS,
)


@examples(60, 1000)
@given(cases(problems="linear", plans=IN_FRACTIONS))
def test_fractions_of_epochs_are_those_of_the_specification(case: Case) -> None:
    laws.order(None, case)


@examples(10, 150)
@given(cases(problems="linear", plans=IN_FRACTIONS))
def test_going_on_between_fractions_of_epochs_is_exact(case: Case) -> None:
    resumption_from(LOOP, case, pl.fit, None)


@examples(30, 600)
@given(cases(plans=plans(orders=("current", "current", "2021"), min_batches=0)))
def test_going_on_from_any_boundary_is_exact(case: Case) -> None:
    if THOROUGH:
        resumption_from(LOOP, case, pl.fit, None)
    else:
        laws.resumption(None, case)


# The older order, in which an epoch counts before it is evaluated, and its event comes after.
OLDER = Case(plan=Plan(batches=(1,), max_duration="1ba", evaluators={"val": EvaluatorPlan(batches=(1,))}, order="2021"))
OTHERS = [law for law in laws.OF_LOOPS if law not in (laws.order, laws.resumption, laws.microbatch_invariance)]


@pytest.mark.parametrize("law", OTHERS, ids=lambda law: law.name)
def test_the_loop_keeps(law: laws.Law) -> None:
    @examples(4 if law is laws.compile_equality else 20, 400)  # its graphs take a second to trace
    @example(case=OLDER)
    @given(cases(plans=plans(orders=("current", "current", "2021"), min_batches=0)))
    def holds(case: Case) -> None:
        law.on(LOOP, case)

    holds()


@examples(25, 500)
@given(cases(problems="exact", plans=plans(max_samples=9, max_batches=3, max_evaluators=0)))
def test_gradients_do_not_depend_on_the_split_exactly(case: Case) -> None:
    laws.microbatch_invariance(None, case)


@examples(25, 500)
@given(cases(problems=["linear", "tied"]))
def test_gradients_do_not_depend_on_the_split_to_rounding(case: Case) -> None:
    laws.microbatch_invariance(None, case)


@examples(10, 300)
@given(cases())
def test_strict_finds_nothing_to_complain_about(case: Case) -> None:
    assert_same_stream(case.run(strict=True), case.run(), "strict")


@examples(12, 200)
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
    assert_same_stream(turns[0], one.run(), "in turn with another")
    assert_same_stream(turns[1], two.run(), "in turn with another")


@examples(12, 200)
@given(cases(), st.sets(st.sampled_from(list(pl.Event))))
def test_watching_fewer_events_gives_the_same_states(case: Case, watch: set[pl.Event]) -> None:
    wanted = [pair for pair in case.run() if pair[0] in watch]
    assert_same_stream(case.run(watch=watch), wanted, "watched")
