"""Violations of laws, and reports: the result of each law, its number of examples, and its violation."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Literal

import attrs

from pure_loop._internal.reprs import table
from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.comparison import Difference, apart, shown


def moment(state: State) -> str:
    """The event and batch of a State, for messages."""
    return f"{state.event.name if state.event else 'no event'}, batch {state.timestamp.batch}"


class LawViolation(PureLoopError, AssertionError):  # noqa: N818
    """A law does not hold for the algorithm, callback, script or loop that was checked.

    Attributes:
        finding: the violation, in a sentence.
        law: the name of the law.
        statement: the law in words.
        event: the event at which it was found; None if it is not about one.
        leaf: the wrong leaf, as code that reads it; None if it is not about a leaf.
        given, wanted: the value of the leaf, and the value that it should have.
        case: the smallest case that was found.
        code: code that reproduces the violation.
        broke_off: whether the run ended in an error.
        examples: the number of cases that were tried, those of the search for a smaller case included.
    """

    def __init__(
        self,
        finding: str,
        *,
        event: Event | None = None,
        difference: Difference | None = None,
        labels: tuple[str, str] = ("is", "should be"),
        advice: str = "",
    ) -> None:
        super().__init__(finding)
        self.finding = finding
        self.event = event
        self.leaf = None if difference is None else difference.leaf
        self.given = None if difference is None else difference.given
        self.wanted = None if difference is None else difference.wanted
        self.labels = labels
        self.advice = advice
        self.law = self.statement = self.code = ""
        self.case: object = None
        self.examples = 0
        self.broke_off = False

    def __str__(self) -> str:
        parts = [textwrap.fill(f"{self.law} does not hold: {self.statement}", 95)] if self.law else []
        parts.append(self._found())
        if self.advice:
            parts.append(_filled(self.advice))
        if self.case is not None:
            parts.append(f"  the smallest case found:\n    {self.case!r}")
        if self.code:
            parts.append(f"  code that reproduces it:\n{textwrap.indent(self.code, '    ')}")
        return "\n\n".join(parts)

    def _found(self) -> str:
        text = _filled(self.finding)
        if self.leaf is None:
            return text
        width = max(map(len, self.labels))
        values = zip(self.labels, (self.given, self.wanted), strict=True)
        lines = [f"    {label:<{width}}  {shown(value)}" for label, value in values]
        if shown(self.given) == shown(self.wanted):
            lines.append(f"    {'where':<{width}}  {apart(self.given, self.wanted)}")
        return "\n".join([text, f"    {self.leaf}", *lines])


def written_to(finding: str, event: Event | None, difference: Difference, advice: str = "") -> LawViolation:
    """A violation for a State that was written to in place; ``advice`` replaces the usual one."""
    return LawViolation(
        finding,
        event=event,
        difference=difference,
        labels=("it is", "it was"),
        advice=advice
        or "Compute a new tensor, x = x + 1 and not x += 1 or x.add_(1), and put it in with state.replace(...). "
        "Tensors of a State must never change.",
    )


def _filled(text: str) -> str:
    """The text, indented and wrapped; its own line breaks stay."""
    wrapped = (textwrap.fill(line, 108, break_on_hyphens=False) for line in text.splitlines())
    return textwrap.indent("\n".join(wrapped), "  ")


def broken_off(events: list[Event], error: Exception) -> LawViolation:
    """A violation for a run that ended in an error after ``events``."""
    violation = LawViolation(
        f"after {events[-1].name if events else 'the call'}, the run ended in {type(error).__name__}: {error}",
        event=events[-1] if events else None,
        advice=" ".join(getattr(error, "__notes__", ())),
    )
    violation.broke_off = True
    return violation


Result = Literal["passed", "FAILED", "expected failure", "UNEXPECTED PASS", "skipped", "not run", "not asked"]


@attrs.frozen
class Outcome:
    """The result of one law.

    Attributes:
        law: its name.
        statement: the law in words.
        result: ``"passed"``, ``"FAILED"``, ``"expected failure"``, ``"UNEXPECTED PASS"`` (it was expected to fail),
            ``"skipped"``, ``"not run"`` or ``"not asked"``, of a law that only a thorough check tries.
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

    def line(self, width: int, *, seconds: bool = True) -> str:
        """It as a line of a table, in which the names of laws are ``width`` characters wide."""
        taken = f" {self.seconds:>5.1f} s" if seconds else ""
        count = f"{self.examples:>3} examples{taken}" if self.examples else " " * (12 + len(taken))
        line = f"  {self.law:<{width}}  {self.result:<16}  {count}"
        if self.reason:
            indent = " " * (len(line) + 2)
            line = textwrap.fill(f"{line}  {self.reason}", 118, subsequent_indent=indent, break_long_words=False)
        return line.rstrip()


@attrs.frozen
class Report:
    """The results of a check; printed, it is a table.

    Attributes:
        subject: the name of the algorithm, callback or script that was checked.
        outcomes: one for each law, in the order in which they were tried.
        fired: number of calls of each handler, by algorithm and event.
        never: algorithms and events of handlers that never ran.
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
        lines += [each.line(width, seconds=seconds) for each in self.outcomes if each.result != "not asked"]
        unasked = [outcome.law for outcome in self.outcomes if outcome.result == "not asked"]
        if unasked:
            lines.append(f"  not asked by default: {', '.join(unasked)}; thorough=True asks them")
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
        counts = Counter(outcome.result for outcome in self.outcomes)
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
