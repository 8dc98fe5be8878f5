"""Violations: the error of a law that does not hold, with the event, the leaf, the smallest case and code."""

from __future__ import annotations

import textwrap
from typing import Any

from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.comparison import Difference, apart, shown

__all__ = ["LawViolation", "broken_off", "moment", "written_to"]


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
        self.case: Any = None
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
    indents = {"initial_indent": "  ", "subsequent_indent": "  "}
    return "\n".join(textwrap.fill(line, 110, break_on_hyphens=False, **indents) for line in text.splitlines())  # type: ignore[arg-type]


def broken_off(events: list[Event], error: Exception) -> LawViolation:
    """A violation for a run that ended in an error after ``events``."""
    violation = LawViolation(
        f"after {events[-1].name if events else 'the call'}, the run ended in {type(error).__name__}: {error}",
        event=events[-1] if events else None,
        advice=" ".join(getattr(error, "__notes__", ())),
    )
    violation.broke_off = True
    return violation
