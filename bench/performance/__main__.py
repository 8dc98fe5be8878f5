"""``make bench``: what a step costs beside other loops, and what else is paid; tables, and benchmark.json.

    python -m bench.performance                                    # all tables, without what compiles
    python -m bench.performance --tables steps --only W1 W4 --compile --plot chart.png

Results are added to those that the file holds already, so a table can be made anew by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.performance import (
    attached,
    costs,
    events,
    growth,
    length,
    limits,
    malloc,
    members,
    memory,
    parts,
    saving,
    startup,
    tables,
)
from bench.performance.loops import HAND, OURS, Loop
from bench.performance.peers import PEERS, Peer
from bench.performance.steps import measure
from bench.performance.workloads import WORKLOADS

MEASURED = (
    *("steps", "parts", "memory", "imports", "processes", "events", "growth", "length", "saving", "malloc"),
    *("costs", "attached", "members"),
)


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    # What an earlier run has compiled costs the first step nothing.
    compiled = tempfile.TemporaryDirectory(prefix="compiled")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    loops, peers, missing = _available(compiled=options.compile)
    results: dict[str, Any] = before | {
        "threads": 1,
        "versions": {"torch": torch.__version__} | {k: v for peer in peers for k, v in peer.versions.items()},
        "workloads": {workload.name: workload.describe for workload in WORKLOADS},
        "missing": missing,
    }
    for name in options.tables:
        if name == "steps":
            results["steps"] = _steps([*loops, *peers], options, before.get("steps", {}))
        else:
            results[name] = _measured(name, options, loops, peers)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        for shown in (name, "compilation", "missing") if name == "steps" else (name,):
            table = tables.of(shown, results)
            if len(table) > 1:
                print(f"\n{tables.as_text(table)}", flush=True)
    if options.plot:
        from bench.performance.chart import draw

        draw(results, options.plot)
    failed = list(limits.exceeded({name: results[name] for name in options.tables}))
    print()
    for line in failed:
        print("above the limit:", line)
    compiled.cleanup()
    return int(bool(failed) and options.check)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="*", choices=MEASURED, default=MEASURED, help="only these; all by default")
    parser.add_argument("--only", nargs="+", help="names of workloads, for the table of steps")
    parser.add_argument("--compile", action="store_true", help="loops that compile, too, which takes minutes")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU time of one turn of one loop")
    parser.add_argument("--longest", type=int, default=100_000, help="steps of the longest run; a million takes long")
    parser.add_argument("--output", type=Path, default=Path("benchmark.json"))
    parser.add_argument("--jax", metavar="PYTHON", help="another Python, which has JAX, for the table of members")
    parser.add_argument("--plot", type=Path, help="write a chart of the table of steps, a PNG")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure is above its limit")
    return parser.parse_args()


def _available(*, compiled: bool) -> tuple[list[Loop], list[Peer], dict[str, str]]:
    """The loops and peers that can be measured here, and for the others why not."""
    loops, peers, missing = [], [], {}
    for loop in [*HAND, *OURS]:
        if loop.compiled and not compiled:
            missing[loop.name] = "compiles; measured with --compile"
        else:
            loops.append(loop)
    for peer in PEERS:
        why = peer.missing
        if why is None:
            peers.append(peer)
        else:
            missing[peer.name] = why
    return loops, peers, missing


def _steps(competitors: list[Any], options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    found = dict(before)
    for workload in WORKLOADS:
        if not options.only or workload.name in options.only:
            print(f"measuring {workload.name} ...", flush=True)
            found[workload.name] = measure(workload, competitors, options.turns, options.seconds)
    return {workload.name: found[workload.name] for workload in WORKLOADS if workload.name in found}


def _measured(name: str, options: argparse.Namespace, loops: list[Loop], peers: list[Peer]) -> Any:
    print(f"measuring {name} ...", flush=True)
    match name:
        case "parts":
            return parts.measure(options.turns, options.seconds)
        case "memory":
            return memory.measure([loop for loop in loops if not loop.compiled and "default AdamW" not in loop.name])
        case "attached":
            return attached.measure()
        case "imports":
            return startup.imports(peers)
        case "processes":
            return startup.processes(peers)
        case "events":
            return events.measure(2 * options.turns, options.seconds)
        case "growth":
            return growth.measure(options.turns, options.seconds)
        case "length":
            return length.measure(options.longest)
        case "saving":
            return saving.measure(max(options.turns // 5, 3))
        case "malloc":
            return malloc.measure(max(options.turns // 5, 3))
        case "members":
            python = members.python_with_jax(options.jax)
            if python is None:
                print("skipping JAX: it is not installed here; --jax PYTHON names a Python that has it", flush=True)
            return members.measure(python, options.turns, options.seconds)
        case "costs":
            return costs.measure(options.turns, options.seconds)
    raise AssertionError(name)


if __name__ == "__main__":
    raise SystemExit(main())
