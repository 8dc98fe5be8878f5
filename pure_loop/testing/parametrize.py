"""``parametrize_with_checks``: one test for each algorithm and law, with or without pytest."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar, cast

import attrs
from hypothesis.strategies import SearchStrategy

from pure_loop.algorithm import Algorithm, Composition
from pure_loop.entry.fit import fit as library_fit
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.testing.check import Trial, not_none
from pure_loop.testing.laws import OF_ALGORITHMS, UNAVAILABLE
from pure_loop.testing.problems import as_problems
from pure_loop.testing.report import CheckFailed, Outcome, Report
from pure_loop.testing.subject import AlgorithmSubject, Problems

F = TypeVar("F", bound=Callable[..., object])


def _by_name(argument: object, names: list[str]) -> list[object]:
    """Expected failures of each algorithm; an empty list if they are not listed by algorithm."""
    if not isinstance(argument, Mapping) or not any(isinstance(value, Mapping) for value in argument.values()):
        return []
    for name in argument:
        if name not in names:
            raise ArgumentError(f"expected_failures: no algorithm in the list is named {name!r}; there are {names}.")
    return [argument.get(name) for name in names]


class _Check:
    """One law for one algorithm, as a function: the ``check`` that :func:`parametrize_with_checks` passes to a test."""

    def __init__(self, value: object, trial: Trial, name: str, together: tuple[Trial, ...]) -> None:
        self._algorithm = value
        self._trial = trial
        self._together = together
        self.subject = trial.subject.name
        self.name = self.__name__ = name

    def __call__(self, algorithm: object = None) -> Outcome:
        """Try the law.

        Raises:
            CheckFailed: the law doesn't hold, or holds and was expected to fail.
            unittest.SkipTest: it was not tried; the message has the reason.
        """
        if algorithm is not None and algorithm is not self._algorithm:
            raise ArgumentError(
                f"check({algorithm!r}): this check is that of {self._algorithm!r}; pass the `algorithm` of the test. "
                "To check another algorithm, put it into the list of parametrize_with_checks."
            )
        outcome = self._trial.outcome(self.name)
        if outcome.result in ("skipped", "not run", "not asked"):
            raise unittest.SkipTest(f"{self.name}: {outcome.reason}")
        problem = self._trial.never_ran()
        if outcome.result == "UNEXPECTED PASS" and any(
            trial.outcome(self.name).result == "expected failure" for trial in self._together
        ):
            outcome = attrs.evolve(outcome, result="passed", reason="")
        pytest = sys.modules.get("pytest")
        if outcome.result == "expected failure" and pytest is not None:
            # It raises: if the check returned, pytest would report it as passed, and without its reason.
            pytest.xfail(outcome.reason)
        if outcome.failed or problem:
            raise CheckFailed(Report(self._trial.subject.name, (outcome,), problem=problem))
        return outcome

    def __repr__(self) -> str:
        return self.name


def parametrize_with_checks(
    algorithms: Iterable[object],
    *,
    problems: Problems = None,
    plans: SearchStrategy[Plan] | None = None,
    expected_failures: Mapping[str, str] | Mapping[str, Mapping[str, str]] | None = None,
    skip: Mapping[str, str] | None = None,
    max_examples: int | None = None,
    thorough: bool = False,
) -> Callable[[F], F]:
    """Make one test for each algorithm and each law; decorates a function of ``(algorithm, check)``.

    Under pytest each pair is a test. Without pytest the decorated function runs all pairs.

    Args:
        algorithms: algorithms, or functions that make them.
        expected_failures: as in :func:`pure_loop.testing.check_algorithm`, by the name of the algorithm,
            ``{"mixup": {"microbatch_invariance": "mixes within a microbatch"}}``; or for all algorithms, of which then
            at least one must fail.
        problems, plans, skip, max_examples, thorough: as in :func:`pure_loop.testing.check_algorithm`.

    Raises:
        ArgumentError: an empty list, or an unknown name of a law.
        ArgumentTypeError: an item is neither an algorithm nor a function that makes one.

    >>> import pure_loop as pl
    >>> decorate = parametrize_with_checks([pl.algorithms.ema(half_life="10ba")], max_examples=5)
    """
    if isinstance(algorithms, Algorithm | Composition | str) or not isinstance(algorithms, Iterable):
        raise ArgumentTypeError(
            f"parametrize_with_checks({algorithms!r}): give a list of algorithms, or of functions that make them."
        )
    listed = list(algorithms)
    if not listed:
        raise ArgumentError("parametrize_with_checks([]): give at least one algorithm.")
    problems = None if problems is None else as_problems(problems)  # once: it may be an iterator
    subjects = [AlgorithmSubject(not_none(value), problems, plans) for value in listed]
    by_name = _by_name(expected_failures, [subject.name for subject in subjects])
    trials = [
        Trial(subject, OF_ALGORITHMS, UNAVAILABLE, library_fit, expected, skip, max_examples, thorough, quiet=True)
        for subject, expected in zip(subjects, by_name or [expected_failures] * len(subjects), strict=True)
    ]
    together = () if by_name else tuple(trials)
    pairs = [
        (value, _Check(value, trial, name, together))
        for value, trial in zip(listed, trials, strict=True)
        for name in trial.names
    ]
    names = [f"{check.subject}-{check.name}" for _, check in pairs]

    def decorate(function: F) -> F:
        # Where pytest is not running, there are no marks.
        pytest = sys.modules.get("pytest")
        if pytest is not None:
            parametrized: F = pytest.mark.parametrize(("algorithm", "check"), pairs, ids=names)(function)
            return parametrized

        def run_all() -> None:
            for algorithm, check in pairs:
                with suppress(unittest.SkipTest):
                    function(algorithm, check)

        return cast("F", run_all)

    return decorate
