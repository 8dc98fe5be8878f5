"""The strategy of States, as runs of ``fit`` yield them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from pure_loop._internal.arguments import check_integer
from pure_loop.algorithm import AlgorithmLike, compose, flatten
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.order import expected, expected_evaluate, expected_predict
from pure_loop.state import State
from pure_loop.testing._arguments import check_strategy
from pure_loop.testing._cases import cases as all_cases
from pure_loop.testing._compositions import algorithms as all_algorithms
from pure_loop.testing._plans import plans_with
from pure_loop.testing.case import Case

__all__ = ["state_at", "states"]

_NOT_IN_FIT = {*expected_evaluate({}), *expected_predict(1)}


def states(
    *,
    cases: st.SearchStrategy[Case] | None = None,
    at: Event | str | Iterable[Event | str] | None = None,
    algorithms: st.SearchStrategy[AlgorithmLike] | AlgorithmLike | Sequence[AlgorithmLike] | None = None,
) -> st.SearchStrategy[State]:
    """States as ``fit`` yields them: a case is run as far as to some event.

    They shrink to the State at INIT, or at the first event of ``at``, of the simplest case.

    Args:
        cases: what to run; None: :func:`cases`.
        at: an event, or several, at one of which the State is yielded; None: any. Of ``cases``, those whose run has no
            such event are discarded; if ``cases`` is None, every run drawn has one.
        algorithms: algorithms of the run: a strategy, or algorithms; ``()`` for none. None: :func:`algorithms` that
            work on the problem.

    Raises:
        ArgumentError: an unknown event, or one that no run of ``fit`` has.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=5)
    ... @given(state=states(at="eval_end"))
    ... def test_an_evaluator_measures_the_loss(state):
    ...     assert "loss" in state.metrics[state.evaluator]
    >>> test_an_evaluator_measures_the_loss()
    """
    wanted = frozenset(Event) if at is None else _events(at)
    if cases is None:
        cases = all_cases() if at is None else all_cases(plans=plans_with(wanted))
    check_strategy("states", "cases", cases, "states(cases=cases(problems=['linear']))")
    if algorithms is not None and not isinstance(algorithms, st.SearchStrategy):
        algorithms = st.just(compose(*flatten(algorithms)))
    return _states(cases, wanted, algorithms)


def _events(at: Event | str | Iterable[Event | str]) -> frozenset[Event]:
    if not isinstance(at, Iterable):
        raise ArgumentTypeError(f"states: at={at!r}: write an event such as Event.BATCH_END, or a list of events.")
    value = [at] if isinstance(at, str) else list(at)
    try:
        events = frozenset(Event(item) for item in value)
    except ValueError as error:
        raise ArgumentError(f"states: at={at!r}: {error}") from None
    if not events:
        raise ArgumentError(f"states: at={at!r} holds no event; write at=Event.BATCH_END, or leave it out.")
    for event in sorted(events & _NOT_IN_FIT):
        raise ArgumentError(
            f"states: at holds {event!r}, which no run of fit has, and States are drawn from runs of fit. Draw one at "
            "Event.BATCH_END, and pass it to pl.evaluate or pl.predict."
        )
    return events


@st.composite
def _states(
    draw: st.DrawFn,
    cases: st.SearchStrategy[Case],
    wanted: frozenset[Event],
    algorithms: st.SearchStrategy[AlgorithmLike] | None,
) -> State:
    case = draw(cases)
    positions = [position for position, event in enumerate(expected(case.plan)) if event in wanted]
    assume(positions)
    composition = draw(all_algorithms(problem=case.problem) if algorithms is None else algorithms)
    position = positions[draw(st.integers(0, len(positions) - 1))]
    running: list[Any] = [] if composition == compose() else [composition]
    # A State has no repr that makes it again; a failure shows this call, which does.
    state: State = draw(st.builds(state_at, *map(st.just, [case, position, *running])))
    return state


def state_at(case: Case, position: int, algorithms: AlgorithmLike | Sequence[AlgorithmLike] = ()) -> State:
    """The State that a case's run yields at a position: that of INIT is at 0. The run ends there.

    Raises:
        ArgumentError: the run is shorter.

    >>> from pure_loop.order import Plan
    >>> state_at(Case(plan=Plan(batches=(4,), max_duration="1ba")), 3)
    State(fit_start, epoch 0, batch 0, 2 parameters (8 numbers))
    """
    check_integer("position", position, where="state_at", least=0, example="state_at(case, 0)")
    stream = case.stream(algorithms)
    try:
        pair = next(itertools.islice(stream, position, None), None)
    finally:
        stream.close()
    if pair is None:
        last = len(expected(case.plan)) - 1
        raise ArgumentError(f"state_at: position={position!r}, and the last position of this run is {last}.")
    state: State = pair[1]
    return state
