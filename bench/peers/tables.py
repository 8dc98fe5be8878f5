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

Results = Mapping[str, Any]


def render(part: str, results: Results) -> str:
    """One part of a page, of the contents of ``docs/peers.json``."""
    return PARTS[part](results)


def _table(results: Results) -> str:
    """A row a library; ``*`` where another documented way doesn't keep the law."""
    lines = [f"| | {' | '.join(HEADINGS[law] for law in results['laws'])} |", f"|---|{'---|' * len(results['laws'])}"]
    for name, peer in results["peers"].items():
        package, version = next(iter(peer["versions"].items()))
        shown = name if package == "torch" else f"{name} {version}"
        lines.append(f"| {shown} | {' | '.join(_cell(peer['laws'][law]) for law in results['laws'])} |")
    lines += ["", "\\* In one documented way, and not in another."]
    lines += [f"Measured on {results['date']} with torch {results['torch']} by `{results['command']}`."]
    return "\n".join(lines)


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


PARTS: dict[str, Callable[[Results], str]] = {"table": _table, "reasons": _reasons, "versions": _versions}
