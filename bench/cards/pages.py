"""The text of a card, from the docstrings of a module and its record in docs/cards.json."""

from __future__ import annotations

import importlib
import inspect
import re
import statistics
from collections.abc import Mapping
from typing import Any

from pure_loop.ranges import settings_of

__all__ = ["render"]


def render(name: str, record: Mapping[str, Any]) -> str:
    """docs/cards/NAME.md."""
    module = importlib.import_module(f"pure_loop.algorithms.{name}")
    factory = getattr(module, name)
    head, _, formula = (inspect.getdoc(module) or "").partition("\n\n")
    title = head.partition(":")[0]
    parts = [f"# {title.strip().rstrip('.')}", f"```python\npl.algorithms.{record['code']}\n```", _words(factory)]
    if record["picture"]:
        parts.append(f"![{title}: what it does]({name}.png)")
    parts += ["## The method", _prose(formula)]
    ranges = settings_of(factory)
    rows = [
        f"| `{key}` | {ranges[key].in_words if key in ranges else ''} | {_default(parameter.default)} |"
        for key, parameter in inspect.signature(factory).parameters.items()
        if key != "name"
    ]
    if rows:
        rows = [row.replace("|  |", "| |") for row in rows]
        parts += ["## Settings", "\n".join(["| | range | default |", "|---|---|---|", *rows])]
    parts += ["## Effect and cost", _effect(record)]
    parts += ["## In a run", "\n".join(_in_a_run(record))]
    parts += ["## Laws", _laws(record["laws"])]
    parts.append("Generated from the module and from measurements by `make cards`; [all algorithms](../algorithms.md).")
    return "\n\n".join(parts) + "\n"


def _words(factory: Any) -> str:
    """The first paragraphs of the docstring, as far as its arguments."""
    text = (inspect.getdoc(factory) or "").partition("\nArgs:")[0].partition("\nRaises:")[0].partition("\n>>>")[0]
    return _markdown(text.strip())


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _prose(text: str) -> str:
    """A docstring with its formulas as blocks."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        indented = line.startswith("    ")
        if indented and not inside:
            lines += ["```text"]
            inside = True
        elif not indented and line.strip() and inside:
            while not lines[-1].strip():
                lines.pop()
            lines += ["```", ""]
            inside = False
        lines.append(
            line[4:] if inside else _markdown(line).replace("::", ":") if line.endswith("::") else _markdown(line)
        )
    if inside:
        while not lines[-1].strip():
            lines.pop()
        lines.append("```")
    return "\n".join(lines).strip()


def _default(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else f"`{value!r}`"


def _effect(record: Mapping[str, Any]) -> str:
    plain, with_it = record["scores"]["plain"], record["scores"]["with"]
    differences = [b - a for a, b in zip(plain, with_it, strict=True)]
    shown = "{:.1%}" if record["metric"] == "accuracy" else "{:.4f}"
    points = "{:+.2%}" if record["metric"] == "accuracy" else "{:+.4f}"
    rows = [
        f"| | test {record['metric']} ({record['better']} is better) | time |",
        "|---|---|---|",
        f"| without | {_mean(plain, shown)} | 1 |",
        f"| with it | {_mean(with_it, shown)} | {record['time']:.2f} |",
        f"| difference, seed by seed | {_mean(differences, points)} | |",
    ]
    batches = sorted(set(record["batches"]))
    ended = f" Training ended after {batches[0]} to {batches[-1]} batches." if len(batches) > 1 else ""
    options = "".join(f", `{key}={value!r}`" for key, value in record["options"].items())
    under = (
        f"Five seeds, mean and standard deviation; both runs of a seed begin with the same model and batches. "
        f"On {record['problem']}{options}; one thread of a CPU.{ended} {record['note']}"
    )
    return "\n".join(rows) + "\n\n" + under.strip()


def _mean(values: list[float], form: str) -> str:
    return f"{form.format(statistics.mean(values))} ± {form.format(statistics.stdev(values)).lstrip('+')}"


def _in_a_run(record: Mapping[str, Any]) -> list[str]:
    lines = [f"* Bound to {', '.join(f'`{event}`' for event in record['events'])}."]
    but = "another algorithm that does is refused, but for an alternative of `pl.one_of`"
    lines += [f"* Claims `{claim}`: {but}." for claim in record["claims"]]
    company = record["commutes"]
    kinds = {"Commutes, bit for bit, with": True, "In the other order other bits with": False}
    by_words = {words: [name for name, value in company.items() if value is kind] for words, kind in kinds.items()}
    by_words["Refused in one run with"] = [name for name, value in company.items() if isinstance(value, str)]
    lines += [f"* {words} {', '.join(f'`{name}`' for name in names)}." for words, names in by_words.items() if names]
    laws = record["laws"]
    compiled = _outcome(laws.get("compile_equality"), "trains what it trains eagerly, up to rounding")
    ranks = _outcome(laws.get("world_size"), "several ranks train what one trains")
    lines += [f"* Compiled: {compiled}.", f"* Ranks: {ranks}."]
    return lines


def _outcome(outcome: Any, words: str) -> str:
    if outcome is None:
        return "not tried"
    result, reason = outcome
    return words if result == "passed" else f"{reason}" if reason else result


def _laws(laws: Mapping[str, Any]) -> str:
    kept = [f"`{law}`" for law, (result, _) in laws.items() if result == "passed"]
    lines = [f"It keeps {', '.join(kept)}."]
    others = [(law, result, reason) for law, (result, reason) in laws.items() if result != "passed"]
    if others:
        lines += ["", "| law | | because |", "|---|---|---|"]
        lines += [f"| `{law}` | {result} | {reason} |" for law, result, reason in others]
    return "\n".join(lines)
