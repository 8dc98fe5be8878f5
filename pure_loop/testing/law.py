"""Laws: what holds for every case, each with its name, its words, and the function that tries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

import pure_loop as pl
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.testing._surroundings import unchanged
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.problems import PROBLEMS, Problem, as_problems
from pure_loop.testing.subject import AlgorithmSubject, Problems, Subject
from pure_loop.testing.violation import LawViolation, broken_off

__all__ = ["EXAMPLES", "Law", "law", "try_examples"]

EXAMPLES = 20
"""How many cases a law is tried on, where nothing else is said."""

Check = Callable[[Any, Any, Fit], None]
"""Tries a law on a subject of its kind, and on one of what such are tried on."""


def _any(problem: Problem) -> bool:
    return True


@attrs.frozen(eq=False, repr=False)
class Law:
    """One law. It is called like a function, and raises where it doesn't hold.

    Attributes:
        name: its name in reports, and in ``expected_failures``.
        statement: the law in words.
        check: tries it on one case.
        rests_on: laws without which this one says nothing: it isn't tried where one of them fails.
        serves: whether a problem is one on which it can hold.
        serves_what: what problems these are.
        of: the kind of subject of which it is a law.

    >>> import pure_loop as pl
    >>> from pure_loop.testing import laws
    >>> laws.purity(lambda: pl.algorithms.sam(), max_examples=2)
    """

    name: str
    statement: str
    check: Check
    rests_on: tuple[str, ...] = ()
    serves: Callable[[Problem], bool] = _any
    serves_what: str = "any"
    of: type[Subject] = AlgorithmSubject

    def __call__(
        self,
        subject: Any = None,
        case: Any = None,
        *,
        fit: Fit = pl.fit,
        problems: Problems = None,
        cases: SearchStrategy[Any] | None = None,
        max_examples: int = EXAMPLES,
    ) -> None:
        """Try the law.

        Args:
            subject: what makes the algorithm or the callback that is on trial, or a :class:`pure_loop.testing.Scripted`
                where it is a law of scripts; None: the loop alone.
            case: the one case, or :class:`pure_loop.testing.Seed` of a script, to try it on; None: what Hypothesis
                draws.
            fit: the loop.
            problems: models and data of the cases, by name or as :class:`Problem`; None: all on which it can hold.
            cases: where to draw from, instead of ``problems``.
            max_examples: how many to draw.

        Raises:
            LawViolation: it doesn't hold; says for which case, at which event, in which leaf.
            ArgumentError: the law can't hold on the case's problem.
            ArgumentTypeError: another kind of subject, or of case.
        """
        made = self.of.made_of(subject)
        if problems is not None and self.of.tried_on is not Case:
            raise ArgumentError(f"{self.name}: a {self.of.kind} has a model and data of its own; leave out problems=.")
        if case is not None:
            if not isinstance(case, self.of.tried_on):
                raise ArgumentTypeError(
                    f"{self.name}(..., {case!r}): a law of {self.of.kind}s is tried on a "
                    f"testing.{self.of.tried_on.__name__}; without one it draws some."
                )
            if not self._serves(case):
                raise ArgumentError(
                    f"{self.name} is a law for problems that are {self.serves_what}, and {case.problem.name!r} is not."
                )
            self.on(made, case, fit)
            return
        drawn = self.cases(problems) if problems is not None else made.drawn(self)
        if cases is not None:
            drawn = cases.filter(self._serves)
        if isinstance(drawn, str):
            raise ArgumentError(f"{self.name}: {drawn}.")
        try_examples(self, made, drawn, fit=fit, max_examples=max_examples)

    def _serves(self, case: Any) -> bool:
        return not isinstance(case, Case) or self.serves(case.problem)

    def cases(
        self,
        problems: Problems = None,
        plans: SearchStrategy[Any] | None = None,
    ) -> SearchStrategy[Case] | str:
        """Cases on which it can hold, or why there are none: of these problems and plans, by default all, and short."""
        from pure_loop.testing.strategies import cases
        from pure_loop.testing.strategies import plans as all_plans

        listed = as_problems(tuple(PROBLEMS.values()) if problems is None else problems)
        served = [problem for problem in listed if self.serves(problem)]
        if not served:
            return f"no problem given is {self.serves_what}"
        # Shorter than those that the strategy gives: what a law needs happens within few batches.
        short = all_plans(max_batches=6, max_batches_per_epoch=3, max_samples=5) if plans is None else plans
        return cases(problems=served, plans=short)

    def on(self, subject: Subject, case: Any, fit: Fit = pl.fit) -> None:
        """Try it on one case; a violation then says all that there is to say."""
        try:
            with unchanged():
                self.check(subject, case, fit)
        except LawViolation as violation:
            raise self._told(violation, subject, case, fit) from violation.__cause__
        except Exception as error:
            # Only what an algorithm raised says something of it; the driver leaves a note.
            if not any(note.startswith("raised by algorithm") for note in getattr(error, "__notes__", ())):
                raise
            raise self._told(broken_off([], error), subject, case, fit) from error

    def _told(self, violation: LawViolation, subject: Subject, case: Any, fit: Fit) -> LawViolation:
        """The violation, with all that there is to say."""
        violation.law, violation.statement, violation.case = self.name, self.statement, case
        violation.code = subject.reproduction(self._called(), case, standard=fit is pl.fit)
        return violation

    def _called(self) -> str:
        """How to write it in code: those of one's own are not in this package."""
        ours = self.check.__module__.startswith("pure_loop.testing.laws.")
        return f"{self.of.laws}.{self.name}" if ours else self.name

    def __repr__(self) -> str:
        return f"<law {self.name}: {self.statement}>"


def law(
    statement: str,
    *,
    rests_on: Sequence[str] = (),
    serves: Callable[[Problem], bool] = _any,
    serves_what: str = "any",
    of: type[Subject] = AlgorithmSubject,
) -> Callable[[Check], Law]:
    """Make a law of a function that tries one case: of ``(subject, case, fit)``, which raises a LawViolation.

    Args:
        statement: the law in words.
        rests_on: the names of laws without which it says nothing.
        serves: whether it can hold on a problem.
        serves_what: what problems these are, in words.
        of: the kind of subject of which it is a law.

    >>> @law("the loss is never negative")
    ... def positive_loss(subject, case, fit):
    ...     for event, state in case.stream(subject.make(), fit=fit):
    ...         if event is pl.Event.BATCH_END and state.loss < 0:
    ...             raise LawViolation(f"the loss is {state.loss}", event=event)
    >>> positive_loss(lambda: pl.algorithms.sam(), max_examples=2)
    """

    def decorate(check: Check) -> Law:
        return Law(check.__name__, statement, check, tuple(rests_on), serves, serves_what, of)

    return decorate


def try_examples(
    law: Law,
    subject: Subject,
    cases: SearchStrategy[Any],
    *,
    fit: Fit = pl.fit,
    max_examples: int = EXAMPLES,
    tolerant: bool = False,
) -> int:
    """Try a law on cases that Hypothesis draws; gives their number.

    ``tolerant``: cases on which an algorithm raises are passed over, because that is expected and said elsewhere; 0 if
    they were all.

    Raises:
        LawViolation: that of the smallest case that was found.
    """
    tried = 0
    found_after = 0
    last: LawViolation | None = None

    # Drawn in the same way every time: a report that changes from one run to the next would be of no use, and the
    # failure's own code reproduces it. So there is no database either. Not by derandomize=True, which draws something
    # else after every change in what stands below.
    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=max_examples,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases)
    def holds(case: Any) -> None:
        nonlocal tried, found_after, last
        tried += 1
        try:
            law.on(subject, case, fit)
        except LawViolation as violation:
            if tolerant and violation.broke_off:
                tried -= 1
                hypothesis.reject()
            last, found_after = violation, found_after or tried
            raise

    try:
        holds()
    except LawViolation as violation:
        violation.examples = found_after
        violation.__notes__ = []  # Hypothesis's account of the case, which is in the message already
        raise
    except hypothesis.errors.Unsatisfiable:
        if not tolerant:
            raise
    except hypothesis.errors.Flaky as flaky:
        if last is None:
            raise
        last.finding += (
            " Tried once more on the same case, it was not found again: what is on trial depends on something that no "
            "State holds, such as a global variable."
        )
        last.examples = found_after
        raise last from flaky
    return tried
