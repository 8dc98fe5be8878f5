"""Reports: which laws ran on how many examples, which did not and why, and what was found."""

from __future__ import annotations

import textwrap
from typing import Literal

import attrs

from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.testing.violation import LawViolation

__all__ = ["CheckFailed", "Outcome", "Report"]

Result = Literal["passed", "FAILED", "expected failure", "UNEXPECTED PASS", "skipped", "not run"]


@attrs.frozen
class Outcome:
    """What became of one law.

    Attributes:
        law: its name.
        statement: the law in words.
        result: ``"passed"``, ``"FAILED"``, ``"expected failure"``, ``"UNEXPECTED PASS"`` (it was expected to fail),
            ``"skipped"`` or ``"not run"``.
        examples: on how many cases it was tried.
        reason: why it was skipped, not run, or expected to fail.
        violation: what was found, if it failed.
        seconds: how much processor time it took.
    """

    law: str
    statement: str
    result: Result
    examples: int = 0
    reason: str = ""
    violation: LawViolation | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the check fails because of it."""
        return self.result in ("FAILED", "UNEXPECTED PASS")


@attrs.frozen
class Report:
    """What a check found; printed, it is a table.

    Attributes:
        subject: what was checked.
        outcomes: one a law, in the order in which they were tried.
        fired: how often each handler ran, by algorithm and event.
        never: events that are bound, and at which nothing ran.
        problem: what is wrong apart from the laws, such as an algorithm that never ran; empty if nothing is.
    """

    subject: str
    outcomes: tuple[Outcome, ...]
    fired: dict[tuple[str, Event], int] = attrs.field(factory=dict)
    never: tuple[tuple[str, Event], ...] = ()
    problem: str = ""

    def __getitem__(self, law: str) -> Outcome:
        for outcome in self.outcomes:
            if outcome.law == law:
                return outcome
        raise KeyError(law)

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return not self.problem and not any(outcome.failed for outcome in self.outcomes)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The laws because of which the check fails."""
        return tuple(outcome for outcome in self.outcomes if outcome.failed)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, seconds: bool = True) -> str:
        """The report as text; without ``seconds`` it is the same every time."""
        lines = [f"{self.subject}: {self._summary()}", ""]
        width = max((len(outcome.law) for outcome in self.outcomes), default=0)
        for outcome in self.outcomes:
            taken = f" {outcome.seconds:>5.1f} s" if seconds else ""
            count = f"{outcome.examples:>3} examples{taken}" if outcome.examples else " " * (12 + len(taken))
            line = f"  {outcome.law:<{width}}  {outcome.result:<16}  {count}"
            if outcome.reason:
                line = textwrap.fill(
                    f"{line}  {outcome.reason}", 118, subsequent_indent=" " * (len(line) + 2), break_long_words=False
                )
            lines.append(line.rstrip())
        if self.fired:
            lines += ["", "  handlers ran:"]
            lines += [f"    {name} at {event.name}, {count} times" for (name, event), count in self.fired.items()]
        if self.never:
            lines += ["", "  handlers that never ran:"]
            lines += [f"    {name} at {event.name}" for name, event in self.never]
        if self.problem:
            lines += ["", textwrap.fill(self.problem, 110, initial_indent="  ", subsequent_indent="  ")]
        return "\n".join(lines)

    def _summary(self) -> str:
        counted: dict[str, int] = {}
        for outcome in self.outcomes:
            counted[outcome.result] = counted.get(outcome.result, 0) + 1
        return ", ".join(f"{count} {result}" for result, count in counted.items()) or "no law was tried"


class CheckFailed(PureLoopError, AssertionError):  # noqa: N818
    """A check failed: the report, and each violation in full.

    Attributes:
        report: the :class:`Report`.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        parts = [str(report)]
        for outcome in report.failures:
            if outcome.violation is not None:
                parts.append(str(outcome.violation))
            else:
                passed = (
                    f"{outcome.law} was expected to fail ({outcome.reason!r}), and holds on all of {outcome.examples} "
                    "examples: take it out of expected_failures."
                )
                parts.append(textwrap.fill(passed, 95))
        super().__init__("\n\n".join(parts))
