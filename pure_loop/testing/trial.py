"""Trials: tries each law on a subject once, and not if a law that it rests on has failed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from unittest import SkipTest

import attrs

from pure_loop._internal.arguments import check_integer
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.testing.case import Fit
from pure_loop.testing.law import Law, try_examples
from pure_loop.testing.ranks.processes import close_shared_pools
from pure_loop.testing.report import CheckFailed, Outcome, Report
from pure_loop.testing.subject import Subject
from pure_loop.testing.violation import LawViolation

__all__ = ["Trial"]


# Laws whose violation means that the process was changed, not only a State.
_ABOUT_PROCESS = ("purity", "memory", "value", "determinism", "closing")
_NONE = Outcome("", "", "not run")


@attrs.define
class Trial:
    """The laws for one subject, and their outcomes so far.

    Attributes:
        subject: the subject on trial.
        laws: the laws, each after those that it rests on.
        unavailable: names of laws that can't be tried, each with the reason.
        fit: the loop.
        expected_failures, skip, max_examples: as in :func:`pure_loop.testing.check_algorithm`.

    Raises:
        ArgumentError, ArgumentTypeError: ``expected_failures``, ``skip`` or ``max_examples`` can't be used.
    """

    subject: Subject
    laws: Sequence[Law]
    unavailable: Mapping[str, str]
    fit: Fit
    expected_failures: Mapping[str, str] | None
    skip: Mapping[str, str] | None
    max_examples: int
    _outcomes: dict[str, Outcome] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        known = set(self.names)
        self.expected_failures = _reasons("expected_failures", self.expected_failures, known)
        self.skip = _reasons("skip", self.skip, known)
        both = self.expected_failures.keys() & self.skip.keys()
        if both:
            raise ArgumentError(
                f"{sorted(both)} are in expected_failures and in skip; write them in one of the two only."
            )
        check_integer("max_examples", self.max_examples, least=1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all laws, including those that can't be tried."""
        return (*(law.name for law in self.laws), *self.unavailable)

    def outcome(self, name: str) -> Outcome:
        """Try a law, once."""
        if name not in self._outcomes:
            self._outcomes[name] = self._try(name)
        return self._outcomes[name]

    def report(self) -> Report:
        """Try all laws.

        Raises:
            CheckFailed: a law fails, or there is another problem; holds the report.
        """
        # Runs are shared only while laws are tried: they hold many States.
        self.subject.runs = {}
        try:
            outcomes = tuple(self.outcome(name) for name in self.names)
        finally:
            self.subject.runs = None
            self._renew_processes()
        never = tuple(key for key in self.subject.bound if not self.subject.fired[key])
        report = Report(self.subject.name, outcomes, dict(self.subject.fired), never, self.never_ran())
        if not report.ok:
            raise CheckFailed(report)
        return report

    def _renew_processes(self) -> None:
        """End the shared processes if the subject may have changed them in a way that can't be undone."""
        ran = self.subject.on_processes or self.subject.on_worlds
        if ran and any(self._outcomes.get(name, _NONE).violation is not None for name in _ABOUT_PROCESS):
            close_shared_pools()

    def never_ran(self) -> str:
        """The problem of an algorithm that ran in none of the cases; empty if every algorithm ran."""
        if not any(outcome.examples for outcome in self._outcomes.values()):
            return ""
        ran = {name for name, _ in self.subject.fired}
        silent = [name for name in dict.fromkeys(name for name, _ in self.subject.bound) if name not in ran]
        if not silent or not self.subject.watched:
            return ""
        events = ", ".join(event.name for name, event in self.subject.bound if name == silent[0])
        return (
            f"The {self.subject.kind} {silent[0]!r} never ran in the plans that were drawn, so it was not tested. "
            f"It is bound to {events}; perhaps its `when` is false in runs of a few batches. Give it a shorter "
            "interval, or longer plans: plans=testing.plans(...)."
        )

    def _try(self, name: str) -> Outcome:
        law = next((law for law in self.laws if law.name == name), None)
        assert self.skip is not None
        assert self.expected_failures is not None
        if law is None:
            return Outcome(name, "", "skipped", reason=self.skip.get(name, self.unavailable[name]))
        if name in self.skip:
            return Outcome(name, law.statement, "skipped", reason=self.skip[name])
        cases = self.subject.drawn(law)
        if isinstance(cases, str):
            return Outcome(name, law.statement, "skipped", reason=cases)
        for before in law.rests_on:
            if before in self.names and self.outcome(before).result in ("FAILED", "not run"):
                return Outcome(name, law.statement, "not run", reason=f"rests on {before}")
        expected = self.expected_failures.get(name, "")
        began = time.process_time()
        try:
            examples = max(1, round(self.max_examples * law.share))
            count = try_examples(
                law, self.subject, cases, fit=self.fit, max_examples=examples, tolerant=self._tolerant(name)
            )
        except SkipTest as skipped:
            return Outcome(name, law.statement, "skipped", reason=str(skipped))
        except LawViolation as violation:
            seconds = time.process_time() - began
            result = "expected failure" if expected else "FAILED"
            return Outcome(name, law.statement, result, violation.examples, expected, violation, seconds)  # type: ignore[arg-type]
        seconds = time.process_time() - began
        if not count:
            reason = "every case ended in an error, as expected_failures or skip says of the law `order`"
            return Outcome(name, law.statement, "not run", reason=reason)
        if expected:
            return Outcome(name, law.statement, "UNEXPECTED PASS", count, expected, None, seconds)
        return Outcome(name, law.statement, "passed", count, "", None, seconds)

    def _tolerant(self, name: str) -> bool:
        """Whether errors of a run are expected, because ``order`` is expected to fail or skipped."""
        known = {**(self.expected_failures or {}), **(self.skip or {})}
        return name != "order" and "order" in known


def _reasons(argument: str, value: Mapping[str, str] | None, known: set[str]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ArgumentTypeError(
            f"{argument}={value!r}: write a dict from the name of each law to the reason: "
            f'{argument}={{"microbatch_invariance": "uses batch statistics"}}.'
        )
    for name, reason in value.items():
        if name not in known:
            raise ArgumentError(f"{argument}: there is no law {name!r}. There are {', '.join(sorted(known))}.")
        if not isinstance(reason, str) or not reason.strip():
            raise ArgumentError(f"{argument}[{name!r}]={reason!r}: write the reason, as a text.")
    return dict(value)
