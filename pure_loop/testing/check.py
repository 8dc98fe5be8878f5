"""Checks: all laws that apply to an algorithm, loop, callback or script, tried on cases that Hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hypothesis.strategies import SearchStrategy

import pure_loop as pl
from pure_loop.errors import ArgumentTypeError
from pure_loop.event import Event
from pure_loop.loop.driver import Script
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.testing.callbacks import CallbackSubject
from pure_loop.testing.case import Fit
from pure_loop.testing.law import EXAMPLES
from pure_loop.testing.laws import OF_ALGORITHMS, OF_CALLBACKS, OF_LOOPS, OF_SCRIPTS, UNAVAILABLE
from pure_loop.testing.report import Report
from pure_loop.testing.scripts import CUSTOMARY, Scripted
from pure_loop.testing.subject import AlgorithmSubject, Problems
from pure_loop.testing.trial import Trial

__all__ = ["check_algorithm", "check_callback", "check_loop", "check_script", "not_none"]


def check_algorithm(
    make_algorithm: Any,
    *,
    fit: Fit = pl.fit,
    problems: Problems = None,
    plans: SearchStrategy[Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = EXAMPLES,
) -> Report:
    """Try every law on an algorithm, and raise if one doesn't hold.

    Args:
        make_algorithm: a function without arguments that makes a fresh algorithm, a composition or a list of them;
            or an algorithm, which is copied for each run.
        fit: the loop: ``functools.partial(pl.fit, device="cuda")`` tries it on a GPU.
        problems: models and data to train on, by name or as :class:`Problem`; None: all built-in ones.
        plans: a strategy of :class:`pure_loop.order.Plan`; None: :func:`pure_loop.testing.plans`, short ones.
        expected_failures: names of laws that it doesn't keep, each with the reason. Strict: if such a law holds, the
            check fails.
        skip: names of laws that should not be tried, each with the reason.
        max_examples: the number of cases for each law; a quarter of it for ``compile_equality``, of which a case takes
            as long as four others.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold, a law holds that was expected to fail, or no handler ever
            ran.
        ArgumentError: an unknown name of a law, or an empty reason.
        ArgumentTypeError: ``make_algorithm`` does not make an algorithm.

    >>> import pure_loop as pl
    >>> report = check_algorithm(lambda: pl.algorithms.sam(rho=0.1), problems="linear", max_examples=2)
    >>> report.ok
    True
    """
    subject = AlgorithmSubject(not_none(make_algorithm), problems, plans)
    return Trial(subject, OF_ALGORITHMS, UNAVAILABLE, fit, expected_failures, skip, max_examples).report()


def check_loop(
    fit: Fit = pl.fit,
    *,
    problems: Problems = None,
    plans: SearchStrategy[Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = EXAMPLES,
) -> Report:
    """Try every law on a loop: a function with the arguments of ``pl.fit`` that yields the same pairs.

    Args:
        fit: the loop.
        problems, plans, expected_failures, skip, max_examples: as in :func:`check_algorithm`.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.

    >>> check_loop(problems="linear", max_examples=1).ok
    True
    """
    subject = AlgorithmSubject(None, problems, plans)
    return Trial(subject, OF_LOOPS, UNAVAILABLE, fit, expected_failures, skip, max_examples).report()


def not_none(make_algorithm: Any) -> Any:
    """The argument; None is refused.

    Raises:
        ArgumentTypeError: it is None, which a law takes as "no algorithm".
    """
    if make_algorithm is None:
        raise ArgumentTypeError(
            "check_algorithm(None): give a function that makes an algorithm, such as lambda: pl.algorithms.sam()."
        )
    return make_algorithm


def check_callback(
    make_callback: Any,
    *,
    problems: Problems = None,
    plans: SearchStrategy[Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = EXAMPLES,
) -> Report:
    """Try the laws of callbacks, and raise if one doesn't hold.

    Args:
        make_callback: a function without arguments that makes a fresh callback, logger or function of
            ``(event, state)``.
        problems, plans, expected_failures, skip, max_examples: as in :func:`check_algorithm`.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_callback`` does not make a callback.

    >>> import pure_loop as pl
    >>> check_callback(pl.callbacks.SpeedMonitor, problems="linear", max_examples=2).ok
    True
    """
    subject = CallbackSubject(make_callback, problems, plans)
    return Trial(subject, OF_CALLBACKS, {}, pl.fit, expected_failures, skip, max_examples).report()


def check_script(
    make_script: Callable[[State], Script],
    start: State | Callable[[int], State],
    *,
    boundaries: Iterable[Event | str] = CUSTOMARY,
    stages: Stages | None = None,
    expected_failures: Mapping[str, str] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int = 5,
) -> Report:
    """Try the laws of scripts, and raise if one doesn't hold.

    Args:
        make_script: makes the generator from the State at which it starts or resumes.
        start: the first State; or a function that makes it from a seed, and is tried with several seeds.
        boundaries: events from whose States the script can resume.
        stages: the stages for algorithms that take them.
        expected_failures: names of laws that it doesn't keep, each with the reason. Strict: if such a law holds, the
            check fails.
        skip: names of laws that should not be tried, each with the reason.
        max_examples: the number of seeds.

    Returns:
        The results of all laws: ``print(report)`` shows a table.

    Raises:
        CheckFailed: an AssertionError: a law doesn't hold.
        ArgumentTypeError: ``make_script`` is not a function, or ``start`` is or returns something other than a State.

    >>> import torch, pure_loop as pl
    >>> def decay(state):
    ...     while state.timestamp < "3ba":
    ...         params = {name: 0.9 * tensor for name, tensor in state.params.items()}
    ...         state = state.replace(params=params).count_batch(samples=1)
    ...         state = yield pl.Event.BATCH_END, state
    ...     return state
    >>> check_script(decay, pl.State.create(torch.nn.Linear(1, 1))).ok
    True
    """
    subject = Scripted(make_script, start, boundaries=boundaries, stages=stages)
    return Trial(subject, OF_SCRIPTS, {}, pl.fit, expected_failures, skip, max_examples).report()
