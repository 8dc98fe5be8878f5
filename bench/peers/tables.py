"""The results as Markdown: the table, and every reason. Nothing is imported or measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["HEADINGS", "PARTS", "render"]

# The columns, by the names of the laws.
HEADINGS = {
    "resumed in an epoch": "resumes inside an epoch",
    "resumed between epochs": "resumes between epochs",
    "observed": "evaluation changes nothing",
    "observed, own generators": "... with a generator for each loader",
    "smaller microbatch": "smaller last microbatch",
    "ignored targets": "ignored targets",
    "order after resuming": "order of events after resuming",
    "order is one": "order with microbatches and evaluation",
}
# Those of the README, which are short so that the table is no wider than a page there; each is of one law or of two.
BRIEF = {
    "resume in an epoch": ("resumed in an epoch",),
    "resume between epochs": ("resumed between epochs",),
    "evaluation changes nothing": ("observed", "observed, own generators"),
    "smaller last microbatch": ("smaller microbatch",),
    "ignored targets": ("ignored targets",),
    "events after resuming": ("order after resuming",),
    "one order of events": ("order is one",),
}

Results = Mapping[str, Any]


def render(part: str, results: Results) -> str:
    """One part of a page, of the contents of ``docs/peers.json``."""
    return PARTS[part](results)


def _table(results: Results) -> str:
    """A row a library; ``*`` where another documented way doesn't keep the law."""
    lines = [f"| | {' | '.join(HEADINGS[law] for law in results['laws'])} |", f"|---|{'---|' * len(results['laws'])}"]
    for name, peer in results["peers"].items():
        cells = [_cell(peer["laws"][law]) for law in results["laws"]]
        lines.append(f"| {_with_version(name, peer)} | {' | '.join(cells)} |")
    lines += ["", "\\* In one documented way, and not in another."]
    return "\n".join([*lines, _measured(results)])


def _brief(results: Results) -> str:
    """The same in marks."""
    lines = [f"| | {' | '.join(BRIEF)} |", f"|---|{':-:|' * len(BRIEF)}"]
    for name, peer in results["peers"].items():
        cells = [_mark({_cell(peer["laws"][law]) for law in laws}) for laws in BRIEF.values()]
        lines.append(f"| {_with_version(name, peer)} | {' | '.join(cells)} |")
    lines += ["", "✓ yes; ✗ in no documented way that was tried; ~ in one, not in another; - no events to ask about."]
    return "\n".join([*lines, _measured(results)])


def _mark(cells: set[str]) -> str:
    if len(cells) > 1:
        return "~"
    return {"yes": "✓", "no": "✗", "not offered": "-", "yes\\*": "~"}[cells.pop()]


def _with_version(name: str, peer: Mapping[str, Any]) -> str:
    package, version = next(iter(peer["versions"].items()))
    return name if package == "torch" else f"{name} {version}"


def _measured(results: Results) -> str:
    return f"Measured on {results['date']} with torch {results['torch']} by `{results['command']}`."


def _cell(law: Mapping[str, Any]) -> str:
    only = law["result"] == "yes" and any(reason != "yes" for reason in law["tried"].values())
    return law["result"] + "\\*" * only


def _reasons(results: Results) -> str:
    """A row for ways that were tried and don't keep a law, and for each law that needs a particular way."""
    lines = ["| | law | way | what differs |", "|---|---|---|---|"]
    for name, peer in results["peers"].items():
        adapter = f"[{name}](../bench/peers/adapters/{peer['module']}.py)"  # from docs/
        for law in results["laws"]:
            found = peer["laws"][law]
            heading = HEADINGS[law]
            if found["result"] == "not offered":
                lines.append(f"| {adapter} | {heading} | | not offered: {found['reason']} |")
                continue
            if all(reason == "yes" for reason in found["tried"].values()):
                continue
            ways: dict[str, list[str]] = {}  # those that differ in the same are one row
            for way, reason in found["tried"].items():
                ways.setdefault(reason, []).append(way)
            for way, reason in found["beyond"].items():
                ways.setdefault(reason, []).append(f"({way})")
            for reason, names in ways.items():
                shown = "nothing" if reason == "yes" else reason
                lines.append(f"| {adapter} | {heading} | {'; '.join(names)} | {shown} |")
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def _versions(results: Results) -> str:
    lines = ["| | packages |", "|---|---|"]
    for name, peer in results["peers"].items():
        packages = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
        lines.append(f"| {name} | {packages} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[Results], str]] = {
    "table": _table,
    "brief": _brief,
    "reasons": _reasons,
    "versions": _versions,
}
