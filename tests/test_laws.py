"""The laws of the loop, by Hypothesis, on the library's own loop."""

from __future__ import annotations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.order import EvaluatorPlan, Plan
from tests import laws
from tests.cases import Case, cases, plans
from tests.conftest import THOROUGH


def examples(fast: int, thorough: int) -> settings:
    return settings(max_examples=thorough if THOROUGH else fast)


@examples(400, 5000)
@given(cases(plan=plans(orders=("current", "current", "current", "2021"))))
def test_events_are_those_of_the_specification(case: Case) -> None:
    laws.law_order(case)


def in_fractions(plan: Plan, epochs: int, interval: str) -> Plan:
    evaluators = {"val": EvaluatorPlan((2,))}
    return attrs.evolve(plan, max_duration=f"{epochs}ep", eval_interval=interval, evaluators=evaluators)


FRACTIONS = st.sampled_from(["0.1dur", "0.25dur", "0.3dur", "0.5dur", "0.7dur", "1dur"])
# Seldom in the others: a duration in epochs, of which evaluation takes fractions.
IN_FRACTIONS = st.builds(
    in_fractions, plans(orders=("current", "current", "2021"), iterations=False), st.integers(1, 3), FRACTIONS
)


@examples(100, 1000)
@given(cases(models=("plain",), plan=IN_FRACTIONS))
def test_fractions_of_epochs_are_those_of_the_specification(case: Case) -> None:
    laws.law_order(case)


@examples(15, 150)
@given(cases(models=("plain",), plan=IN_FRACTIONS))
def test_going_on_between_fractions_of_epochs_is_exact(case: Case) -> None:
    laws.law_resumption(case)


@examples(40, 500)
@given(cases())
def test_a_yielded_state_never_changes(case: Case) -> None:
    laws.law_value(case)


@examples(30, 300)
@given(cases(models=("mlp", "tied")))
def test_streams_are_deterministic(case: Case) -> None:
    laws.law_determinism(case)


@examples(60, 600)
@given(cases(plan=plans(orders=("current", "current", "2021"))), st.data())
def test_going_on_from_any_boundary_is_exact(case: Case, data: st.DataObject) -> None:
    def choose(count: int) -> list[int]:
        if count <= 3 or THOROUGH:
            return list(range(count))
        return data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))

    # Wall-clock durations end by the clock, which starts again when training goes on.
    laws.law_resumption(case, choose=choose)


@examples(40, 500)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.integers(0, 9))
def test_gradients_do_not_depend_on_the_split_exactly(sizes: tuple[int, ...], seed: int) -> None:
    laws.law_microbatches_exact(sizes, seed)


@examples(40, 500)
@given(cases(models=("plain", "tied")).filter(lambda case: case.precision == "fp32"))
def test_gradients_do_not_depend_on_the_split_to_rounding(case: Case) -> None:
    laws.law_microbatches(case)


@examples(40, 400)
@given(cases())
def test_observers_change_nothing(case: Case) -> None:
    laws.law_observers(case)


@examples(25, 300)
@given(cases())
def test_the_identity_changes_nothing(case: Case) -> None:
    laws.law_identity(case)


@examples(40, 400)
@given(cases(plan=plans(orders=("current", "2021"))))
def test_algorithms_apply_in_order_and_close_in_reverse(case: Case) -> None:
    laws.law_algorithm_order(case)


@examples(20, 300)
@given(cases())
def test_compose_is_the_list(case: Case) -> None:
    laws.law_composition(case)


@examples(40, 500)
@given(cases(), st.integers(0, 60), st.sampled_from(["break", "raise"]))
def test_leaving_the_loop_leaves_nothing_behind(case: Case, position: int, how: str) -> None:
    laws.law_closing(case, position, how)


@examples(20, 300)
@given(cases())
def test_strict_finds_nothing_to_complain_about(case: Case) -> None:
    laws.assert_same_stream(case.run(strict=True), case.run(), "strict")


@examples(20, 200)
@given(cases(), cases())
def test_two_streams_in_turn_give_what_they_give_alone(one: Case, two: Case) -> None:
    first, second = one.stream(), two.stream()
    turns: tuple[laws.Pairs, laws.Pairs] = ([], [])
    streams = [(first, turns[0]), (second, turns[1])]
    while streams:
        for stream, found in list(streams):
            pair = next(stream, None)
            if pair is None:
                streams.remove((stream, found))
            else:
                found.append(pair)
    laws.assert_same_stream(turns[0], one.run(), "in turn with another")
    laws.assert_same_stream(turns[1], two.run(), "in turn with another")


@examples(20, 200)
@given(cases(), st.sets(st.sampled_from(list(pl.Event))))
def test_watching_fewer_events_gives_the_same_states(case: Case, watch: set[pl.Event]) -> None:
    wanted = [pair for pair in case.run() if pair[0] in watch]
    laws.assert_same_stream(case.run(watch=watch), wanted, "watched")
