"""The strategies of problems and cases, which determine whole runs of ``fit``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from pure_loop._internal.arguments import check_flag, check_integer, check_number
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.precision import Precision
from pure_loop.testing._arguments import check_choices, check_strategy
from pure_loop.testing._plans import plans as all_plans
from pure_loop.testing.case import OPTIMIZERS, Case
from pure_loop.testing.problems import PROBLEMS, Problem, as_problem, as_problems

__all__ = ["cases", "problems"]


def problems(
    *,
    among: Problem | str | Iterable[Problem | str] | None = None,
    separable: bool | None = None,
    images: bool | None = None,
) -> st.SearchStrategy[Problem]:
    """Problems: tiny real models with their data and loss. They shrink to the first one, ``"linear"``.

    Args:
        among: problems, or names of built-in ones; None: all built-in problems.
        separable: True for problems whose loss is the mean over samples that don't influence each other, False for
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
        if wanted is not None:
            check_flag(name, wanted, where="problems")
            result = tuple(problem for problem in result if getattr(problem, name) is wanted)
    if not result:
        raise ArgumentError(
            f"problems: no problem has separable={separable!r} and images={images!r}; leave one of these out, or pass "
            "a testing.Problem(...) that has both."
        )
    return _drawn_from(result)


def _chosen(where: str, name: str, value: Any) -> tuple[Problem, ...]:
    if value is not None and not isinstance(value, Problem | Iterable):
        raise ArgumentTypeError(f"{where}: {name}={value!r}: pass names such as ['linear'], or a testing.Problem(...).")
    return as_problems(PROBLEMS if value is None else value)


def _drawn_from(result: Iterable[Problem]) -> st.SearchStrategy[Problem]:
    # By the call that makes it: the repr of a problem could show nothing but its functions.
    return st.builds(as_problem, st.sampled_from([_written(problem) for problem in result]))


def _written(problem: Problem) -> Problem | str:
    return problem.name if PROBLEMS.get(problem.name) is problem else problem


def cases(
    *,
    plans: st.SearchStrategy[Plan] | None = None,
    problems: st.SearchStrategy[Problem] | Problem | str | Iterable[Problem | str] | None = None,
    optimizers: Sequence[str] = tuple(OPTIMIZERS),
    precisions: Sequence[str] = ("fp32", "fp32", "amp_bf16"),
    clip_grads: Sequence[float | None] = (None, 0.5),
    max_seed: int = 3,
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
        "seed": st.integers(0, check_integer("max_seed", max_seed, where=where, least=0, example="cases(max_seed=3)")),
        "optimizer": st.sampled_from(chosen),
        "precision": st.sampled_from(tuple(precisions)),
        "clip_grad": st.sampled_from(tuple(clip_grads)),
    }
    return _cases(plans, problems, settings)


def _listed(name: str, value: Any, example: str) -> Sequence[Any]:
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
    settings: dict[str, st.SearchStrategy[Any]],
) -> Case:
    drawn = {name: draw(strategy) for name, strategy in settings.items()}
    return Case(plan=draw(plans), problem=draw(problems), **drawn)
