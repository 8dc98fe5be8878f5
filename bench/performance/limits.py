"""What the figures have to reach, and what is above it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.performance import members
from bench.performance.loops import BASE

__all__ = ["COSTS", "MEMBERS", "RATIOS", "exceeded"]

# CPU time of a step relative to the loop by hand with a fused AdamW: by loop, then by workload.
RATIOS: dict[str, dict[str, float]] = {
    "pl.fit, every event": {"W1": 0.95, "W1a4": 1.00, "W2": 1.00, "W3": 1.01, "W4": 0.90, "W5": 1.01},
    "pl.fit, compile=True, watch={EPOCH_END}": {"W1": 0.32, "W1a4": 0.30, "W2": 0.85, "W3": 0.97, "W4": 0.42},
    "pl.fit, compile=True, 8 steps a call": {"W1": 0.20},
}

# Of a loop that is given one event a step, relative to the one that is given all, on every workload.
WATCHED = 1.03

# Over importing torch.
IMPORT_SECONDS = 0.1
IMPORT_MB = 15.0

# Peak of parameters, gradients and optimizer's memory, relative to the loop by hand; and where something is attached,
# relative to one that does the same.
MEMORY = 1.02

# Who is attached and not due may cost a microsecond where the hand-written step of W1 takes 147.
ATTACHED = 1 / 147

# Of the cost of a step, and of what is in use, from the beginning of a run to its end.
DRIFT = 1.1

# Of what users meet, relative to a loop by hand that does the same; by the beginning of the name.
COSTS = {
    "W1": 1.02,
    "W1, state.params is read at each batch": 1.10,
    "MLP": 1.03,
    "MLP of 6 million parameters, from_torch": 1.15,
}

# Of the members alone, and of JAX's vmap, relative to an ensemble: at least so much. By problem, then by loop.
MEMBERS = {
    members.MLPS: {members.ALONE: 7.0, members.COMPILED: 1.8, members.JAX: 1.0},
    members.SMALL: {members.ALONE: 1.5, members.COMPILED: 1.2},
}
# Peak of an ensemble's memory relative to the sum of its members' own, and seconds of its first epoch.
MEMORY_OF_MEMBERS = 1.1
FIRST_SECONDS = 20.0

# The step after a save, relative to an ordinary one.
SAVING = 1.05


def exceeded(results: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure of these results that is above its limit."""
    for loop, limits in RATIOS.items():
        for workload, limit in limits.items():
            ratio = results.get("steps", {}).get(workload, {}).get(loop, {}).get("ratio")
            if ratio is not None and ratio > limit:
                yield f"{loop}, {workload}: {ratio:.2f}, the limit is {limit:.2f}"
    ours = "pl.fit, every event"
    for workload, loops in results.get("steps", {}).items():
        every, watched = (loops.get(loop, {}).get("ratio") for loop in (ours, "pl.fit, watch={BATCH_END}"))
        if every is not None and watched is not None and watched > WATCHED * every:
            yield f"watch={{BATCH_END}}, {workload}: {watched / every:.2f} of every event's, the limit is {WATCHED:.2f}"
    if "imports" in results:
        seconds, megabytes = (results["imports"]["pure_loop"][key] for key in ("cpu_seconds", "mb"))
        if seconds > IMPORT_SECONDS:
            yield f"import: {seconds:.3f} s, the limit is {IMPORT_SECONDS}"
        if megabytes > IMPORT_MB:
            yield f"import: {megabytes:.1f} MB, the limit is {IMPORT_MB}"
    if "memory" in results:
        for key, when in (("ratio", ""), ("microbatches_ratio", ", in 4 microbatches")):
            ratio = results["memory"][ours][key]
            if ratio > MEMORY:
                yield f"memory of parameters, gradients and optimizer{when}: {ratio:.2f}, the limit is {MEMORY}"
    for workload, found in results.get("attached", {}).items():
        for name, cell in found.items():
            if name.startswith("pl.fit") and cell["ratio"] > MEMORY:
                yield f"peak of memory, {workload}, {name}: {cell['ratio']:.2f}, the limit is {MEMORY}"
    if "processes" in results:
        peak, hand = (results["processes"][name]["peak_mb"] for name in (ours, BASE))
        if peak > hand:
            yield f"peak of a process: {peak:.0f} MB, the limit is {hand:.0f}, the loop by hand's"
    for name, cell in results.get("events", {}).items():
        if "not due" in name and cell["of_a_step"] > ATTACHED:
            yield f"{name}: {cell['of_a_step']:.2%} of a step, the limit is {ATTACHED:.2%}"
    for name, cell in results.get("saving", {}).items():
        if name.startswith("pl.fit") and cell["ratio"] > SAVING:
            yield f"the step after a save, {name}: {cell['ratio']:.2f}, the limit is {SAVING}"
    for name, cell in results.get("costs", {}).items():
        limit = COSTS[max((start for start in COSTS if name.startswith(start)), key=len)]
        if cell["ratio"] > limit:
            yield f"{name}: {cell['ratio']:.2f}, the limit is {limit}"
    yield from _of_members(results.get("members", {}))
    if "length" in results:
        first, *_, last = results["length"]
        for key in ("ratio", "python_blocks", "resident_mb"):
            if last[key] > DRIFT * first[key]:
                yield f"{key} after {last['steps']} steps: {last[key]:.5g}, from {first[key]:.5g}"


def _of_members(results: Mapping[str, Any]) -> Iterator[str]:
    for describe, found in results.items():
        for loop, least in MEMBERS.get(describe, {}).items():
            if loop in found and found[loop]["ratio"] < least:
                yield f"{describe}, {loop}: {found[loop]['ratio']:.2f} of the ensemble's, at least is {least:.1f}"
        ensemble, compiled = found[members.ENSEMBLE], found[members.COMPILED]
        if ensemble["mb"] > MEMORY_OF_MEMBERS * compiled["mb"]:
            ratio = ensemble["mb"] / compiled["mb"]
            yield f"{describe}, memory: {ratio:.2f} of its members', the limit is {MEMORY_OF_MEMBERS}"
        if ensemble["first_seconds"] > FIRST_SECONDS:
            yield f"{describe}, first epoch: {ensemble['first_seconds']:.1f} s, the limit is {FIRST_SECONDS:.0f}"
