"""The results as tables: for a terminal, and for the documentation. Nothing is imported or measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

__all__ = ["TABLES", "Table", "as_markdown", "as_text", "of"]

Table: TypeAlias = list[list[str]]  # the first row is the header
Results: TypeAlias = Mapping[str, Any]


def of(name: str, results: Results) -> Table:
    """One table of a file of results."""
    return TABLES[name](results)


def as_text(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (zip(row, widths, strict=True) for row in table)
    )


def as_markdown(table: Table) -> str:
    rule = ["---", *("---:" for _ in table[0][1:])]
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (table[0], *table[1:])]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def _steps(results: Results) -> Table:
    """Ratios, and what the base is in microseconds."""
    found = results["steps"]
    rows = [["", *found]]
    for name in _rows(found):
        cells = [found[workload].get(name, {}) for workload in found]
        if any("ratio" in cell for cell in cells):
            rows.append([name, *(f"{cell['ratio']:.2f}" if "ratio" in cell else "" for cell in cells)])
    base = next(iter(_rows(found)))
    return [*rows, ["hand-written, microseconds", *(f"{found[each][base]['us']:.0f}" for each in found)]]


def _missing(results: Results) -> Table:
    """What the table of steps lacks, and why."""
    rows = [["not measured", "why"]]
    rows += [[name, why] for name, why in results.get("missing", {}).items()]
    found = results["steps"]
    for workload, loops in found.items():
        rows += [[f"{name}, {workload}", cell["missing"]] for name, cell in loops.items() if "missing" in cell]
    return rows


def _compilation(results: Results) -> Table:
    """CPU seconds of the first step, where a loop compiles."""
    found = results["steps"]
    rows = [["CPU seconds of the first step", *found]]
    for name in _rows(found):
        if "compile" in name or "JAX" in name:
            cells = [found[workload].get(name, {}).get("first_cpu_seconds") for workload in found]
            if any(cells):
                rows.append([name, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return rows


def _parts(results: Results) -> Table:
    """What a step is made of, as parts of the hand-written one."""
    found = results["parts"]
    rows = [["of the hand-written step", *found]]
    names = list(next(iter(found.values())))
    rows += [[name, *(f"{found[workload][name]:.3f}" for workload in found)] for name in names]
    return [*rows, ["together", *(f"{sum(parts.values()):.3f}" for parts in found.values())]]


def _memory(results: Results) -> Table:
    rows = [["", "first two steps, MB", "later steps, MB", "ratio", "in 4 microbatches"]]
    for name, cell in results["memory"].items():
        megabytes = [f"{cell[key]:.0f}" for key in ("first_mb", "mb")]
        rows.append([name, *megabytes, f"{cell['ratio']:.2f}", f"{cell['microbatches_ratio']:.2f}"])
    return rows


def _attached(results: Results) -> Table:
    rows = [["", "", "first four steps, MB", "later steps, MB", "ratio"]]
    for workload, found in results["attached"].items():
        for place, (name, cell) in enumerate(found.items()):
            megabytes = [f"{cell[key]:.1f}" for key in ("first_mb", "mb")]
            rows.append(["" if place else workload, name, *megabytes, f"{cell['ratio']:.2f}"])
    return rows


def _imports(results: Results) -> Table:
    rows = [["", "CPU seconds", "MB"]]
    for name, cell in results["imports"].items():
        label = name if name == "torch" else f"{name}, over torch"
        rows.append([label, f"{cell['cpu_seconds']:.2f}", f"{cell['mb']:.0f}"])
    return rows


def _processes(results: Results) -> Table:
    rows = [["", "CPU seconds to the first step", "peak resident memory, MB"]]
    for name, cell in results["processes"].items():
        rows.append([name, f"{cell['first_step_cpu_seconds']:.2f}", f"{cell['peak_mb']:.0f}"])
    return rows


def _events(results: Results) -> Table:
    rows = [["", "microseconds a step", "of the hand-written step"]]
    for name, cell in results["events"].items():
        rows.append([name, f"{cell['us']:.1f}", f"{cell['of_a_step']:.2%}"])
    return rows


def _growth(results: Results) -> Table:
    rows = [["", "how many", "by hand, us", "pl.fit, us", "one more, by hand", "one more, pl.fit"]]
    for name, cells in results["growth"].items():
        before: Mapping[str, float] | None = None
        for cell in cells:
            more = ["", ""]
            if before is not None:
                size = cell["size"] - before["size"]
                more = [f"{(cell[key] - before[key]) / size:.3g}" for key in ("hand_us", "us")]
            first = name if before is None else ""
            rows.append([first, f"{cell['size']}", f"{cell['hand_us']:.0f}", f"{cell['us']:.0f}", *more])
            before = cell
    return rows


def _length(results: Results) -> Table:
    rows = [
        ["steps", "microseconds a step", "beside the loop by hand", "Python's memory blocks", "resident memory, MB"]
    ]
    for cell in results["length"]:
        blocks, resident = f"{cell['python_blocks']}", f"{cell['resident_mb']:.1f}"
        rows.append([f"{cell['steps']}", f"{cell['us']:.0f}", f"{cell['ratio']:.2f}", blocks, resident])
    return rows


def _saving(results: Results) -> Table:
    rows = [["", "step after a save, ms", "ordinary step, ms", "ratio", "ratio of the thread's CPU time"]]
    for name, cell in results["saving"].items():
        rows.append([name, f"{cell['after_ms']:.0f}", f"{cell['ordinary_ms']:.0f}"])
        rows[-1] += [f"{cell['ratio']:.2f}", f"{cell['thread_ratio']:.2f}"]
    return rows


def _malloc(results: Results) -> Table:
    found = results["malloc"]
    workloads = list(next(iter(found.values())))
    return [["", *workloads], *([name, *(f"{cell[each]:.2f}" for each in workloads)] for name, cell in found.items())]


def _costs(results: Results) -> Table:
    rows = [["", "by hand, us", "pl.fit, us", "ratio"]]
    for name, cell in results["costs"].items():
        rows.append([name, f"{cell['hand_us']:.0f}", f"{cell['us']:.0f}", f"{cell['ratio']:.2f}"])
    return rows


def _members(results: Results) -> Table:
    """A row a loop: in how many microseconds each member makes a step, and what that is of the ensemble's."""
    rows = [["", "", "us", "ratio", "MB", "first epoch, s"]]
    for describe, found in results["members"].items():
        for place, (name, cell) in enumerate(found.items()):
            megabytes = f"{cell['mb']:.1f}" if "mb" in cell else ""
            row = ["" if place else describe, name, f"{cell['us']:.0f}", f"{cell['ratio']:.2f}", megabytes]
            rows.append([*row, f"{cell['first_seconds']:.1f}"])
    return rows


def _versions(results: Results) -> Table:
    return [["package", "version"], *([name, version] for name, version in results["versions"].items())]


def _workloads(results: Results) -> Table:
    return [["", "model and batch"], *([name, text] for name, text in results["workloads"].items())]


def _readme(results: Results) -> Table:
    """A row a workload, and the columns that matter first."""
    columns = {
        "`pl.fit`": "pl.fit, every event",
        "`pl.fit`, compiled": "pl.fit, compile=True, watch={EPOCH_END}",
        "by hand, `torch.compile`": "hand-written, torch.compile(model)",
        "by hand, AdamW by default": "hand-written, default AdamW",
    }
    found = results["steps"]
    there = {head: name for head, name in columns.items() if any(name in loops for loops in found.values())}
    rows = [["", "model", *there]]
    for workload, loops in found.items():
        ratios = [loops.get(name, {}).get("ratio") for name in there.values()]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append([workload, results["workloads"][workload], *cells])
    return rows


def _rows(found: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    return list(dict.fromkeys(name for loops in found.values() for name in loops))


TABLES: dict[str, Callable[[Results], Table]] = {
    "workloads": _workloads,
    "steps": _steps,
    "readme": _readme,
    "missing": _missing,
    "compilation": _compilation,
    "parts": _parts,
    "memory": _memory,
    "attached": _attached,
    "imports": _imports,
    "processes": _processes,
    "events": _events,
    "growth": _growth,
    "length": _length,
    "saving": _saving,
    "malloc": _malloc,
    "costs": _costs,
    "members": _members,
    "versions": _versions,
}
