"""Reports: the result of each law, its number of examples, and the violations."""

from __future__ import annotations

import textwrap
from typing import Literal

import attrs

from pure_loop._internal.reprs import table
from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.testing.violation import LawViolation

__all__ = ["CheckFailed", "Outcome", "Report"]

Result = Literal["passed", "FAILED", "expected failure", "UNEXPECTED PASS", "skipped", "not run"]


@attrs.frozen
class Outcome:
    """The result of one law.

    Attributes:
        law: its name.
        statement: the law in words.
        result: ``"passed"``, ``"FAILED"``, ``"expected failure"``, ``"UNEXPECTED PASS"`` (it was expected to fail),
            ``"skipped"`` or ``"not run"``.
        examples: the number of cases it was tried on.
        reason: why it was skipped, not run, or expected to fail.
        violation: the violation, if it failed.
        seconds: processor time, in seconds.
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
        """Whether it makes the check fail."""
        return self.result in ("FAILED", "UNEXPECTED PASS")


@attrs.frozen
class Report:
    """The results of a check; printed, it is a table.

    Attributes:
        subject: the name of the algorithm, callback or script that was checked.
        outcomes: one for each law, in the order in which they were tried.
        fired: number of calls of each handler, by algorithm and event.
        never: algorithms and events whose handlers never ran.
        problem: a failure apart from the laws, such as an algorithm that never ran; empty if there is none.
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
        """Whether the check passed: no law failed, and there is no other problem."""
        return not self.problem and not any(outcome.failed for outcome in self.outcomes)

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The outcomes that make the check fail."""
        return tuple(outcome for outcome in self.outcomes if outcome.failed)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, seconds: bool = True) -> str:
        """The report as text; with ``seconds=False`` the text is the same in every run."""
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

    def _repr_html_(self) -> str:
        """The outcomes as a table, for notebooks."""
        head = ("law", "statement", "result", "examples", "reason")
        rows = [
            (outcome.law, outcome.statement, outcome.result, outcome.examples or "", outcome.reason)
            for outcome in self.outcomes
        ]
        problem = f". {self.problem}" if self.problem else ""
        return table(rows, head, caption=f"{self.subject}: {self._summary()}{problem}")

    def _summary(self) -> str:
        counts: dict[str, int] = {}
        for outcome in self.outcomes:
            counts[outcome.result] = counts.get(outcome.result, 0) + 1
        return ", ".join(f"{count} {result}" for result, count in counts.items()) or "no law was tried"


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
                text = (
                    f"{outcome.law} was expected to fail ({outcome.reason!r}), but holds on all {outcome.examples} "
                    "examples: remove it from expected_failures."
                )
                parts.append(textwrap.fill(text, 95))
        super().__init__("\n\n".join(parts))
