"""What ``make gpu`` found, as lines and as a page. Nothing here but the standard library, and nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["NOTHING_RAN", "line", "render", "sentence"]

NOTHING_RAN = "Nothing has run on a real GPU yet."
_LAWS = {
    "order": "the law of order, on drawn plans",
    "resumption": "resumption from a boundary, bit for bit",
    "evaluation": "evaluation changes nothing",
    "microbatches": "microbatches equal the batch",
}
Found = Mapping[str, Any]


def line(name: str, entry: Found) -> str:
    """What one part came to."""
    found, state = entry["found"], entry["state"]
    seconds = f"{entry['seconds']:.0f} of {entry['limit']:.0f} s"
    ended = "" if state == "done" else f" ({state})"
    return f"{name:<17} {seconds:>13}  {_SUMMARIES[name](found) if found else 'no results'}{ended}"


def sentence(found: Found | None) -> str:
    """What the README's "Install" says.

    Raises:
        ValueError: the results are not those of a GPU.
    """
    if found is None:
        return NOTHING_RAN
    _refuse_others(found)
    parts = found["parts"]
    versions = parts["versions"]["found"]
    tests = parts.get("tests", {}).get("found", {})
    ran = f", where {_tests(tests)}" if tests else ""
    return f"On {found['begun'][:10]} it ran on a GPU, {versions['device']} with torch {versions['torch']}{ran}."


def render(found: Found | None) -> str:
    """The generated part of docs/gpu.md.

    Raises:
        ValueError: the results are not those of a GPU.
    """
    if found is None:
        return NOTHING_RAN
    sections = [sentence(found)]
    for name, section in _SECTIONS.items():
        entry = found["parts"].get(name)
        if entry is None:
            continue
        sections += section(entry["found"]) if entry["found"] else [f"The part `{name}` has no results."]
        if entry["state"] != "done":
            sections.append(f"This part was {entry['state']}: what it had found by then is above.")
    return "\n\n".join(sections)


def _refuse_others(found: Found) -> None:
    if found["kind"] != "cuda" or not found["parts"].get("versions", {}).get("found", {}).get("available"):
        raise ValueError(
            f"gpu.json has the results of a run with DEVICE={found['kind']}, which are not those of a GPU: commit what "
            "`make gpu` wrote on a machine with one, or remove docs/gpu.json."
        )


def _versions(found: Found) -> str:
    known = ("device", "torch", "cuda", "driver", "python")
    return ", ".join(f"{name} {found[name]}" for name in known if found.get(name))


def _tests(found: Found) -> str:
    counts = [f"{number} {outcome}" for outcome, number in sorted(found.get("outcomes", {}).items())]
    for key, words in (("not reached", "not reached"), ("not collected", "files not collected")):
        if found.get(key):
            counts.append(f"{len(found[key])} {words}")
    return f"of {found.get('selected', 0)} tests {', '.join(counts) or 'none ran'}"


def _tried(law: Found) -> tuple[int, int, int]:
    """How many of how many examples were tried, and failed."""
    return sum(law.get("tried", {}).values()), sum(law.get("wanted", {}).values()), len(law.get("failures", {}))


def _laws(found: Found) -> str:
    return "; ".join("{}: {} of {} tried, {} failed".format(name, *_tried(law)) for name, law in found.items())


def _waits(found: Found) -> str:
    ways = [way for run in found.values() for way in run.values()]
    waits = [way["waits"] for way in ways if way.get("waits") is not None]
    errors = sum("error" in way for way in ways)
    return f"{sum(waits)} waits seen in {len(waits)} looks at {len(found)} runs, {errors} errors"


def _precisions(found: Found) -> str:
    words = {True: "resumed bit for bit", False: "NOT resumed bit for bit"}
    return "; ".join(
        f"{name}: {run['error'] if 'error' in run else words[run['resumed bit for bit']]}"
        for name, run in found.items()
    )


def _costs(found: Found) -> str:
    rows = [row for workload in found.values() for row in workload.values()]
    measured, errors = (sum(key in row for row in rows) for key in ("turns", "error"))
    return f"{measured} of {len(rows)} rows measured, {errors} errors"


_SUMMARIES = {
    "versions": _versions,
    "tests": _tests,
    "laws": _laws,
    "synchronisations": _waits,
    "precision": _precisions,
    "cost": _costs,
}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def _listed(failures: Mapping[str, str]) -> list[str]:
    return ["\n".join(f"* `{name}`: {why}" for name, why in failures.items())] if failures else []


def _section_of_versions(found: Found) -> list[str]:
    packages = ", ".join(f"{name} {version}" for name, version in found.get("packages", {}).items() if version)
    return [
        "## The machine",
        f"{_versions(found)}. Packages: {packages}.",
        f"```text\n{found.get('describes', '')}\n```",
    ]


def _section_of_tests(found: Found) -> list[str]:
    failures = {name: each["why"] for name, each in found.get("failures", {}).items()}
    failures |= found.get("not collected", {})
    skipped = [f"{number} skipped: {why}." for why, number in found.get("skipped", {}).items()]
    text = f"Of the tests marked `gpu`: {_tests(found)}, in {found.get('processes')} processes."
    return ["## Tests", " ".join([text, *skipped]), *_listed(failures)]


def _section_of_laws(found: Found) -> list[str]:
    rows = [[_LAWS.get(name, name), *map(str, _tried(law))] for name, law in found.items()]
    failures = {f"{name}: {case}": why for name, law in found.items() for case, why in law.get("failures", {}).items()}
    head = ("with deterministic kernels", "tried", "of", "failed")
    return ["## Laws", _table(head, rows), *_listed(failures)]


def _look(way: Found | None) -> str:
    if way is None:
        return ""
    if "error" in way:
        return f"error: {way['error']}"
    if way["waits"] is None:
        return "not seen"
    places = [way["place"]] if "place" in way else [*way.get("places", ()), *way.get("calls", ())]
    return f"{way['waits']} {', '.join(f'`{place}`' for place in places)}".strip()


def _section_of_waits(found: Found) -> list[str]:
    ways = ("by error", "by warning", "by profiler")
    rows = [[name, *(_look(run.get(way)) for way in ways)] for name, run in found.items()]
    head = ("the run", "first wait, as an error", "waits, as warnings", "calls that wait, in the profiler")
    text = "How often the host waited for the device between BATCH_START and BATCH_END, which is to be never."
    return ["## Waiting for the device", text, _table(head, rows)]


def _section_of_precisions(found: Found) -> list[str]:
    rows = []
    for name, run in found.items():
        if "error" in run:
            rows.append([f"`{name}`", "", "", run["error"]])
            continue
        losses = [f"{run[f'loss of the {which} epoch']:.3f}" for which in ("first", "last")]
        rows.append(
            [f"`{name}`", *losses, "bit for bit" if run["resumed bit for bit"] else "; ".join(run["differences"])]
        )
    head = ("precision", "loss of the first epoch", "of the last", "resumed from a file")
    return ["## Mixed precision", _table(head, rows)]


def _in(unit: str, factor: float, value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value * factor:.{digits}f}{unit}"


def _row_of_costs(name: str, row: Found) -> list[str]:
    if "turns" not in row:
        return [name, *[""] * 6, row.get("error", row["state"])]
    notes = [row["error"]] if "error" in row else []
    notes += [note for note in row.get("notes", ()) if "can't be a CUDA graph" in note]
    return [
        name,
        _in("", 1, row.get("wall ratio"), 2),
        _in("", 1e6, row["wall"]),
        _in("", 1e6, row.get("busy")),
        _in("", 1, row.get("kernels")),
        " / ".join(_in("", 1e-6, row[key]) for key in ("peak", "reserved") if key in row),
        _in("", 1, row.get("first"), 1),
        "; ".join(notes),
    ]


def _section_of_costs(found: Found) -> list[str]:
    text = (
        "Medians over turns that the loops of a workload took. *Ratio*: of wall time, to the loop by hand in the same "
        "turn. *Kernels*: how long they ran, and how many, by the profiler. *Peak*: the most memory that tensors had "
        "in a step, and what the allocator held, CUDA graphs included. *First*: the first step, which compiles. "
        "GPT is in bfloat16."
    )
    sections = ["## Cost of a step", text]
    head = ("", "ratio", "wall, µs", "kernels, µs", "kernels", "peak, MB", "first, s", "")
    for workload, loops in found.items():
        sections += [f"### {workload}", _table(head, (_row_of_costs(name, row) for name, row in loops.items()))]
    return sections


_SECTIONS = {
    "versions": _section_of_versions,
    "tests": _section_of_tests,
    "laws": _section_of_laws,
    "synchronisations": _section_of_waits,
    "precision": _section_of_precisions,
    "cost": _section_of_costs,
}
