"""The pages of algorithms and their gallery, from the docstrings of modules and the records in docs/cards.json."""

from __future__ import annotations

import importlib
import inspect
import re
import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["card", "gallery"]


def card(name: str, record: Mapping[str, Any], reference: str) -> str:
    """docs/cards/NAME.md.

    Args:
        name: of the algorithm.
        record: what was measured.
        reference: the directives by which the page has the signature and the arguments.
    """
    title, sentence, formula = _head(name)
    parts = [f"# {title}", sentence, f"```python\npl.algorithms.{record['code']}\n```"]
    if record["picture"]:
        parts.append(f"![{title}: what it does]({name}.png)")
    parts += ["## The method", _prose(formula)]
    parts.append(reference)
    parts += ["## Effect and cost", _effect(record)]
    parts += ["## In a run", "\n".join(_in_a_run(record))]
    parts += ["## Laws", _laws(record["laws"])] if record["laws"] else []
    parts.append("Generated from the module and from measurements by `make cards`; [all algorithms](index.md).")
    return "\n\n".join(parts) + "\n"


_GALLERY = """\
# Gallery of algorithms

Each algorithm with what it does to training, and what it was measured to do; its page has the method and its formulas,
its arguments, and what it commutes with.

Effect and cost are those of small models, on digits or on text, whether a method helps them or not: the mean of five
seeds without it and with it, the difference seed by seed with its standard deviation, and how long a run takes beside
one without it. [Laws](../reference/laws.md) are properties that were tried on drawn cases; one that is not kept has its
reason on the page."""

# What an algorithm works on is where it is bound: the first of these that has one of its events.
_KINDS = {
    "Batches and targets": {"AFTER_DATALOADER", "BEFORE_TRAIN_BATCH", "BEFORE_LOSS"},
    "Gradients": {"AFTER_TRAIN_BATCH"},
    "Metrics": {"BATCH_CHECKPOINT"},
    "Parameters, while training": {"BATCH_END", "EPOCH_END"},
    "Models": {"INIT"},
}


def gallery(records: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/cards/index.md: what changes the model before the first batch comes last, as there is most of it."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, record in records.items():
        events = set(record["events"])
        kind = "Models" if "INIT" in events else next(kind for kind, bound in _KINDS.items() if bound & events)
        by_kind[kind].append(_shown(name, record))
    parts = [_GALLERY]
    for kind, shown in by_kind.items():
        parts += [f"## {kind}", '<div class="grid cards" markdown>', "\n\n".join(shown), "</div>"]
    return "\n\n".join(parts) + "\n"


def _shown(name: str, record: Mapping[str, Any]) -> str:
    """One algorithm in the gallery, as an item of a list."""
    title, sentence, _ = _head(name)
    lines = [f"[![{title}: what it does]({name}.png)]({name}.md)"] if record["picture"] else []
    lines += [f"[**{title}**]({name}.md)", sentence, _effect_in_brief(record), _laws_in_brief(record["laws"])]
    return "-   " + "\n\n    ".join(lines)


def _effect_in_brief(record: Mapping[str, Any]) -> str:
    plain, with_it = record["scores"]["plain"], record["scores"]["with"]
    differences = [b - a for a, b in zip(plain, with_it, strict=True)]
    shown, points = _forms(record)
    means = " → ".join(shown.format(statistics.mean(values)) for values in (plain, with_it))
    return f"Test {record['metric']} {means} ({_mean(differences, points)}); takes {record['time']:.2f} times as long."


def _laws_in_brief(laws: Mapping[str, Any]) -> str:
    by_result: dict[str, list[str]] = {}
    for law, (result, _) in laws.items():
        by_result.setdefault(result, []).append(f"`{law}`")
    if not by_result:
        return "Of an ensemble alone."
    kept = len(by_result["passed"])
    text = f"All {kept} laws hold" if kept == len(laws) else f"{kept} of {len(laws)} laws hold"
    words = {"expected failure": "not kept", "skipped": "not tried"}
    return (
        text + "".join(f"; {said}: {', '.join(by_result[of])}" for of, said in words.items() if of in by_result) + "."
    )


def _head(name: str) -> tuple[str, str, str]:
    """What the docstring of a module says: a title, a sentence, and the method."""
    head, _, formula = (inspect.getdoc(importlib.import_module(f"pure_loop.algorithms.{name}")) or "").partition("\n\n")
    title, _, sentence = " ".join(head.split()).partition(":")
    sentence = _markdown(sentence.strip())
    return title, sentence[:1].upper() + sentence[1:], formula


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


def _forms(record: Mapping[str, Any]) -> tuple[str, str]:
    """How a score is written, and how a difference is."""
    return ("{:.1%}", "{:+.2%}") if record["metric"] == "accuracy" else ("{:.4f}", "{:+.4f}")


def _effect(record: Mapping[str, Any]) -> str:
    plain, with_it = record["scores"]["plain"], record["scores"]["with"]
    differences = [b - a for a, b in zip(plain, with_it, strict=True)]
    shown, points = _forms(record)
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
    if not laws:
        return [*lines, "* Of an ensemble alone: `pl.fit(pl.ensemble(make_model, seeds=...), ...)`."]
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
