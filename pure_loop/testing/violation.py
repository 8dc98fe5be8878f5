"""What is said when a law doesn't hold: the law in words, the smallest case, the event, the leaf, and code."""

from __future__ import annotations

import textwrap
from typing import Any

from pure_loop.errors import PureLoopError
from pure_loop.event import Event
from pure_loop.state import State
from pure_loop.testing.comparison import Difference, apart, shown

__all__ = ["LawViolation", "broken_off", "moment", "written_to"]


def moment(state: State) -> str:
    """What to call the moment of a State in a message."""
    return f"{state.event.name if state.event else 'no event'}, batch {state.timestamp.batch}"


class LawViolation(PureLoopError, AssertionError):  # noqa: N818
    """A law does not hold for what was checked.

    Attributes:
        finding: what was found, in a sentence.
        law: the name of the law.
        statement: the law in words.
        event: the event at which it was found, if it was at one.
        leaf: the leaf that is wrong, as code; None where it is not about a leaf.
        given, wanted: what the leaf is, and what it should be.
        case: the smallest case that was found.
        code: code that reproduces it.
        broke_off: it is about a run that ended in an error.
        examples: on how many cases the law was tried before, and while a smaller case was looked for.
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
    """A violation for a State that was written to in place; ``advice`` where another than the usual one fits."""
    return LawViolation(
        finding,
        event=event,
        difference=difference,
        labels=("it is", "it was"),
        advice=advice
        or "Compute a new tensor, x = x + 1 and not x += 1 or x.add_(1), and put it in with state.replace(...). What a "
        "State has is its own for good.",
    )


def _filled(text: str) -> str:
    """Indented, and broken where a line is too long; lines that the text has stay."""
    indents = {"initial_indent": "  ", "subsequent_indent": "  "}
    return "\n".join(textwrap.fill(line, 110, break_on_hyphens=False, **indents) for line in text.splitlines())  # type: ignore[arg-type]


def broken_off(events: list[Event], error: Exception) -> LawViolation:
    """A violation for a run that ended in an error after these events."""
    violation = LawViolation(
        f"the run ended in an error after {events[-1].name if events else 'the call'}: {type(error).__name__}: {error}",
        event=events[-1] if events else None,
        advice=" ".join(getattr(error, "__notes__", ())),
    )
    violation.broke_off = True
    return violation
