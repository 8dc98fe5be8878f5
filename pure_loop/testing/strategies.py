"""Strategies for Hypothesis: all that runs are made of, and what comes out of them.

They are functions of keywords, which are looked at when they are called; what they draw is valid, and shrinks to the
simplest. Once this library and Hypothesis are imported, in whichever order, ``hypothesis.strategies.from_type`` finds
them by their types: ``from_type(pl.State)`` is ``states()``.

>>> import pure_loop as pl
>>> from hypothesis import given, strategies as st
>>> @given(now=timestamps())
... def test_rates_never_rise(now: pl.Timestamp) -> None:
...     rate = pl.schedules.linear(1.0, 0.0, "6ba")
...     assert rate(now.next_batch(samples=1)) <= rate(now)
>>> test_rates_never_rise()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pure_loop import metrics, optim, schedules
from pure_loop._internal.arguments import check_integer, check_number
from pure_loop.algorithm import Algorithm, AlgorithmLike, Composition, compose, flatten
from pure_loop.entry import hypothesis as entry_hypothesis
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.order import EvaluatorPlan, Plan, expected, expected_evaluate, expected_predict
from pure_loop.precision import Precision
from pure_loop.ranges import AtLeast, checked
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.testing._compositions import algorithms
from pure_loop.testing._compositions import algorithms as all_algorithms
from pure_loop.testing._plans import check_choices, check_strategy, plans, plans_with
from pure_loop.testing._plans import plans as all_plans
from pure_loop.testing._values import batches, event_streams, times, timestamps
from pure_loop.testing.case import OPTIMIZERS, Case
from pure_loop.testing.problems import PROBLEMS, Problem, as_problem, as_problems
from pure_loop.time import Time, Timestamp

__all__ = [
    "algorithms",
    "batches",
    "cases",
    "event_streams",
    "plans",
    "problems",
    "state_at",
    "states",
    "times",
    "timestamps",
]

T = TypeVar("T")


@checked
def problems(
    *,
    among: Problem | str | Iterable[Problem | str] | None = None,
    separable: bool | None = None,
    images: bool | None = None,
) -> st.SearchStrategy[Problem]:
    """Problems: tiny real models with their data and loss. They shrink to the first one, ``"linear"``.

    Args:
        among: problems, or names of built-in ones; None: all built-in problems.
        separable: True for problems with a loss that is the mean over samples independent of each other, False for
            the others.
        images: True for problems with images, False for the others.

    Raises:
        ArgumentError: an unknown name, or no problem that meets the options.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> find(problems(separable=False), lambda problem: True)
    Problem('mlp')
    """
    result = _chosen("problems", "among", among)
    for name, wanted in (("separable", separable), ("images", images)):
        result = tuple(problem for problem in result if wanted is None or getattr(problem, name) is wanted)
    if not result:
        raise ArgumentError(
            f"problems: no problem has separable={separable!r} and images={images!r}; leave one of these out, or pass "
            "a testing.Problem(...) that has both."
        )
    return _drawn_from(result)


def _chosen(where: str, name: str, value: object) -> tuple[Problem, ...]:
    if value is not None and not isinstance(value, Problem | Iterable):
        raise ArgumentTypeError(f"{where}: {name}={value!r}: pass names such as ['linear'], or a testing.Problem(...).")
    return as_problems(PROBLEMS if value is None else value)


def _drawn_from(result: Iterable[Problem]) -> st.SearchStrategy[Problem]:
    # By the call that makes it: the repr of a problem could show nothing but its functions.
    return st.builds(as_problem, st.sampled_from([_written(problem) for problem in result]))


def _written(problem: Problem) -> Problem | str:
    return problem.name if PROBLEMS.get(problem.name) is problem else problem


@checked
def cases(
    *,
    plans: st.SearchStrategy[Plan] | None = None,
    problems: st.SearchStrategy[Problem] | Problem | str | Iterable[Problem | str] | None = None,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    precisions: Sequence[str] = ("fp32", "fp32", "amp_bf16"),
    clip_grads: Sequence[float | None] = (None, 0.5),
    max_seed: Annotated[int, AtLeast(0)] = 3,
) -> st.SearchStrategy[Case]:
    """Cases: a plan, a problem and settings, which determine a run.

    They shrink to ``Case(plan=Plan(batches=(1,), max_duration="1ba"))``.

    Args:
        plans: a strategy of plans; None: :func:`plans`.
        problems: a strategy of problems, or problems and names of problems; None: :func:`problems`.
        optimizers: names of optimizers, as in :class:`pure_loop.testing.case.Case`.
        precisions: as ``fit`` takes them; a repeated item is drawn more often, here and in the other lists.
        clip_grads: norms to clip gradients to, and None.
        max_seed: seeds are from 0 to this number.

    Raises:
        ArgumentError: an unknown name, or nothing to draw from.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> find(cases(problems=["mlp", "tied"]), lambda case: case.plan.evaluators)
    Case(plan=Plan(batches=(1,), max_duration='1ba', evaluators={'val': EvaluatorPlan(batches=(1,))}), problem='mlp')
    """
    where = "cases"
    if plans is None:
        plans = all_plans()
    check_strategy(where, "plans", plans, "cases(plans=plans(max_batches=3))")
    if not isinstance(problems, st.SearchStrategy):
        problems = _drawn_from(_chosen(where, "problems", problems))
    chosen = check_choices(where, "optimizers", optimizers, OPTIMIZERS)
    for precision in _listed("precisions", precisions, "['fp32', 'amp_bf16']"):
        Precision.parse(precision)
    for norm in _listed("clip_grads", clip_grads, "[None, 1.0]"):
        if norm is not None:
            check_number("clip_grads", norm, where=where, above=0, example="cases(clip_grads=[None, 1.0])")
    settings = {
        "seed": st.integers(0, max_seed),
        "optimizer": st.sampled_from(chosen),
        "precision": st.sampled_from(tuple(precisions)),
        "clip_grad": st.sampled_from(tuple(clip_grads)),
    }
    return _cases(plans, problems, settings)


def _listed(name: str, value: Sequence[T], example: str) -> Sequence[T]:
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(f"cases: {name} is a list, got {value!r}; write cases({name}={example}).")
    if not value:
        raise ArgumentError(f"cases: {name}={value!r} leaves nothing to draw from; write cases({name}={example}).")
    return value


@st.composite
def _cases(
    draw: st.DrawFn,
    plans: st.SearchStrategy[Plan],
    problems: st.SearchStrategy[Problem],
    settings: Mapping[str, st.SearchStrategy[Any]],
) -> Case:
    drawn = {name: draw(strategy) for name, strategy in settings.items()}
    return Case(plan=draw(plans), problem=draw(problems), **drawn)


_NOT_IN_FIT = {*expected_evaluate({}), *expected_predict(1)}


all_cases = cases  # for functions with an argument of that name


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
        at: an event, or several, at one of which the State is yielded; None: any. Of ``cases``, those of a run without
            such an event are discarded; if ``cases`` is None, every run drawn has one.
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
    running: list[object] = [] if composition == compose() else [composition]
    # A State has no repr that makes it again; a failure shows this call, which does.
    state: State = draw(st.builds(state_at, *map(st.just, [case, position, *running])))
    return state


def state_at(case: Case, position: int, algorithms: AlgorithmLike | Sequence[AlgorithmLike] = ()) -> State:
    """The State that a case's run yields at a position: that of INIT is at 0. The run ends there.

    Raises:
        ArgumentError: the run is shorter.

    >>> from pure_loop.order import Plan
    >>> state_at(Case(plan=Plan(batches=(4,), max_duration="1ba")), 3)
    State(fit_start, epoch 0, batch 0, Linear, 8 parameters in 2 tensors, on cpu, float32)
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


# By their types, for hypothesis.strategies.from_type

Drawn: TypeAlias = "st.SearchStrategy[Any]"


def _evaluator_plans() -> Drawn:
    return plans(min_evaluators=1, max_evaluators=1).map(lambda plan: next(iter(plan.evaluators.values())))


def _frozen_dicts(requested: object) -> Drawn:
    """Names of parameters to tensors, as a State has them; or what ``FrozenDict[K, V]`` says."""
    keys, values = get_args(requested) or (str, Tensor)
    names = st.sampled_from(("weight", "bias", "head.weight", "head.bias"))
    tensors = batches(dtypes=[torch.float32], nested=False).map(lambda batch: batch[0])
    items = st.dictionaries(
        names if keys is str else st.from_type(keys),
        tensors if values is Tensor else st.from_type(values),
        max_size=4,
    )
    return st.builds(FrozenDict, items)


def _evaluators() -> Drawn:
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
    return st.builds(
        Evaluator,
        st.builds(lambda problem, sizes: problem.batches(sizes, seed=7), problems(), sizes),
        interval=st.none() | times(units=["ep", "ba", "sp"], max_value=9).filter(bool).map(str),
        batches=st.none() | st.integers(1, 3),
        microbatch_size=st.none() | st.integers(1, 6),
    )


def _optimizers() -> Drawn:
    rates = st.floats(0.001, 0.5) | st.just(schedules.linear(0.05, 0.01, "12ba"))
    return st.builds(optim.sgd, lr=rates, momentum=st.sampled_from((0.0, 0.9))) | st.builds(optim.adamw, lr=rates)


def _cross_entropy(outputs: Tensor, batch: Sequence[Tensor]) -> Tensor:
    return functional.cross_entropy(outputs, batch[1])


def _tokens(batch: Sequence[Tensor]) -> int:
    return batch[1].numel()


def _tasks() -> Drawn:
    loss, tokens = st.just(_cross_entropy), st.just(_tokens)
    return st.builds(Task, loss=loss) | st.builds(Task, loss=loss, tokens=tokens, weight=tokens)


def _absolute(outputs: Tensor, batch: object) -> Tensor:
    return outputs.abs()


def _metrics() -> Drawn:
    mean = st.builds(metrics.mean, st.just(_absolute), st.just("size"))
    return st.builds(metrics.loss) | mean | st.builds(metrics.accuracy)


BY_TYPE: dict[type, Callable[[object], Drawn]] = {
    State: lambda _: states(),
    Timestamp: lambda _: timestamps(),
    Time: lambda _: times(),
    Plan: lambda _: plans(),
    EvaluatorPlan: lambda _: _evaluator_plans(),
    Case: lambda _: cases(),
    Problem: lambda _: problems(),
    Algorithm: lambda _: algorithms(min_size=1, max_size=1).map(lambda composition: composition.members[0]),
    Composition: lambda _: algorithms(),
    FrozenDict: _frozen_dicts,
    Evaluator: lambda _: _evaluators(),
    Optimizer: lambda _: _optimizers(),
    Task: lambda _: _tasks(),
    Metric: lambda _: _metrics(),
}
"""A strategy for each type, made of what was requested: the type, or ``FrozenDict`` of something."""

# Here also where Hypothesis loads no entry points (HYPOTHESIS_NO_PLUGINS), or finds none.
entry_hypothesis.register()
entry_hypothesis.register_types(Case, Problem)
entry_hypothesis.show(Case)


def __dir__() -> list[str]:
    return list(__all__)
