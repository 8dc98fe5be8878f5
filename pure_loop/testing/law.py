"""Laws: properties that hold for every case, each with its name, its statement, and the function that tries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import hypothesis
from hypothesis import Phase
from hypothesis.strategies import SearchStrategy

from pure_loop.entry.fit import fit as library_fit
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.testing._examples import DRAWN, repeatable
from pure_loop.testing._surroundings import unchanged
from pure_loop.testing.case import Case, Fit
from pure_loop.testing.problems import PROBLEMS, Problem, as_problems
from pure_loop.testing.report import LawViolation, broken_off
from pure_loop.testing.subject import AlgorithmSubject, Problems, Subject

EXAMPLES = 20
"""The default number of cases on which a law is tried by itself."""

Check = Callable[[Any, Any, Fit], None]
"""Tries a law on a subject and one case, with a loop; raises a LawViolation if it does not hold."""


def _any(problem: Problem) -> bool:
    return True


@attrs.frozen(eq=False, repr=False)
class Law:
    """One law. Called like a function, it raises if it does not hold.

    Attributes:
        name: its name in reports, and in ``expected_failures``.
        statement: the law in words.
        check: tries it on one case.
        rests_on: names of laws that it presupposes: it isn't tried if one of them fails.
        serves: whether the law can hold on a problem.
        serves_what: the problems on which it can hold, in words.
        of: the class of its subjects.
        share: the share of a check's examples on which it is tried, where one takes longer than those of other laws.
        costs: seconds that a compiler or processes take besides; a check tries such a law with ``thorough=True`` only.

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
    share: float = 1.0
    costs: float = 0.0

    def __call__(
        self,
        subject: object = None,
        case: object = None,
        *,
        fit: Fit = library_fit,
        problems: Problems = None,
        cases: SearchStrategy[object] | None = None,
        max_examples: int = EXAMPLES,
    ) -> None:
        """Try the law.

        Args:
            subject: a function that makes the algorithm or the callback on trial; for a law of scripts a
                :class:`pure_loop.testing.Scripted`; None: the loop alone.
            case: the case, or for a script the :class:`pure_loop.testing.Seed`, to try it on; None: Hypothesis draws
                cases.
            fit: the loop.
            problems: models and data of the cases, by name or as :class:`Problem`; None: all on which it can hold.
            cases: a strategy of cases, instead of ``problems``.
            max_examples: the number of cases to draw.

        Raises:
            LawViolation: it doesn't hold; the message has the case, the event and the leaf.
            ArgumentError: the law can't hold on the case's problem.
            ArgumentTypeError: a subject or a case of another kind.
        """
        result = self.of.made_of(subject)
        if problems is not None and self.of.tried_on is not Case:
            raise ArgumentError(f"{self.name}: a {self.of.kind} has its own model and data; leave out problems=.")
        if case is not None:
            if not isinstance(case, self.of.tried_on):
                raise ArgumentTypeError(
                    f"{self.name}(..., {case!r}): a law of {self.of.kind}s is tried on a "
                    f"testing.{self.of.tried_on.__name__}; pass one, or leave it out to draw cases."
                )
            self.on(result, case, fit)
            return
        drawn = self.cases(problems) if problems is not None else result.drawn(self)
        if cases is not None:
            drawn = cases.filter(self._serves)
        if isinstance(drawn, str):
            raise ArgumentError(f"{self.name}: {drawn}.")
        try_examples(self, result, drawn, fit=fit, max_examples=max_examples)

    def _serves(self, case: object) -> bool:
        return not isinstance(case, Case) or self.serves(case.problem)

    def cases(
        self,
        problems: Problems = None,
        plans: SearchStrategy[Plan] | None = None,
    ) -> SearchStrategy[Case] | str:
        """The cases of these problems and plans on which it can hold, or a text that says why there are none.

        Args:
            problems: None: all built-in problems.
            plans: None: short plans.
        """
        from pure_loop.testing.strategies import cases
        from pure_loop.testing.strategies import plans as all_plans

        listed = as_problems(tuple(PROBLEMS.values()) if problems is None else problems)
        served = [problem for problem in listed if self.serves(problem)]
        if not served:
            return f"none of the problems is {self.serves_what}"
        # Shorter than the strategy's default: a few batches are enough for every law.
        short = all_plans(max_batches=6, max_batches_per_epoch=3, max_samples=5) if plans is None else plans
        return cases(problems=served, plans=short)

    def on(self, subject: Subject, case: object, fit: Fit = library_fit) -> None:
        """Try it on one case; a violation gets the law, the case and code that reproduces it.

        Raises:
            LawViolation: it doesn't hold.
            ArgumentError: it can't hold on the case's problem.
        """
        if isinstance(case, Case) and not self.serves(case.problem):
            raise ArgumentError(
                f"{self.name} is a law for problems that are {self.serves_what}, and {case.problem.name!r} is not."
            )
        try:
            with unchanged():
                self.check(subject, case, fit)
        except LawViolation as violation:
            raise self._completed(violation, subject, case, fit) from violation.__cause__
        except Exception as error:
            # Only an error of an algorithm is a violation; the driver adds a note to it.
            if not any(note.startswith("raised by algorithm") for note in getattr(error, "__notes__", ())):
                raise
            raise self._completed(broken_off([], error), subject, case, fit) from error

    def _completed(self, violation: LawViolation, subject: Subject, case: object, fit: Fit) -> LawViolation:
        """The violation, with the law, the case and code that reproduces it."""
        violation.law, violation.statement, violation.case = self.name, self.statement, case
        violation.code = subject.reproduction(self._code(), case, standard=fit is library_fit)
        return violation

    def _code(self) -> str:
        """The law as code: custom laws are not in this package."""
        is_built_in = (self.check.__module__ or "").startswith("pure_loop.testing.laws.")
        return f"{self.of.laws}.{self.name}" if is_built_in else self.name

    def __repr__(self) -> str:
        return f"<law {self.name}: {self.statement}>"


def law(
    statement: str,
    *,
    rests_on: Sequence[str] = (),
    serves: Callable[[Problem], bool] = _any,
    serves_what: str = "any",
    of: type[Subject] = AlgorithmSubject,
    share: float = 1.0,
    costs: float = 0.0,
) -> Callable[[Check], Law]:
    """Make a law of a function ``(subject, case, fit)`` that raises a LawViolation if the law doesn't hold on the case.

    Args:
        statement: the law in words.
        rests_on: names of laws that it presupposes: it isn't tried if one of them fails.
        serves: whether the law can hold on a problem.
        serves_what: the problems on which it can hold, in words.
        of: the class of its subjects.
        share, costs: as in :class:`Law`.

    >>> import pure_loop as pl
    >>> @law("the loss is never negative")
    ... def positive_loss(subject, case, fit):
    ...     for event, state in case.stream(subject.make(), fit=fit):
    ...         if event is pl.Event.BATCH_END and state.loss < 0:
    ...             raise LawViolation(f"the loss is {state.loss}", event=event)
    >>> positive_loss(lambda: pl.algorithms.sam(), max_examples=2)
    """

    def decorate(check: Check) -> Law:
        return Law(check.__name__, statement, check, tuple(rests_on), serves, serves_what, of, share, costs)

    return decorate


def try_examples(
    law: Law,
    subject: Subject,
    cases: SearchStrategy[object],
    *,
    fit: Fit = library_fit,
    max_examples: int = EXAMPLES,
    tolerant: bool = False,
) -> int:
    """Try a law on cases that Hypothesis draws.

    Args:
        tolerant: skip cases on which the algorithm raises, because another law reports that.

    Returns:
        The number of cases that were tried; 0 if all were skipped.

    Raises:
        LawViolation: that of the smallest case that was found.
    """
    tried = 0
    found_after = 0
    last: LawViolation | None = None

    @hypothesis.seed(0)
    @repeatable(max_examples, Phase.generate, Phase.shrink)
    @hypothesis.given(cases)
    def holds(case: object) -> None:
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
        violation.__notes__ = []  # Hypothesis notes the case, which is in the message already
        raise
    except hypothesis.errors.Unsatisfiable:
        if not tolerant:
            raise
    except hypothesis.errors.Flaky as flaky:
        if last is None:
            raise
        last.finding += _FLAKY
        last.examples = found_after
        raise last from flaky
    return tried


_FLAKY = (
    " Tried again on the same case, the violation did not occur: the behaviour depends on something outside the State, "
    "such as a global variable."
)


def try_shared(
    law: Law,
    subject: Subject,
    shared: Sequence[object],
    cases: SearchStrategy[object],
    *,
    fit: Fit = library_fit,
    tolerant: bool = False,
) -> int:
    """Try a law on examples that several laws share; where it fails, on all that were drawn, for the smallest case.

    Args:
        shared: the examples.
        cases: the strategy from which they were drawn.
        tolerant: as in :func:`try_examples`.

    Returns:
        The number of cases that were tried; 0 if all were skipped.

    Raises:
        LawViolation: that of the smallest case that was found.
    """
    tried = 0
    for case in shared:
        tried += 1
        try:
            law.on(subject, case, fit)
        except LawViolation as violation:
            if tolerant and violation.broke_off:
                tried -= 1
                continue
            try:
                try_examples(law, subject, cases, fit=fit, max_examples=DRAWN * len(shared), tolerant=tolerant)
                law.on(subject, case, fit)
            except LawViolation as smaller:
                smaller.examples = tried
                raise
            violation.finding += _FLAKY
            violation.examples = tried
            raise
    return tried
