"""What a step costs: loops on workloads, in turns, as ratios to the loop by hand; and the peak of memory of each.

Each loop on each workload is a process of its own, so that one that fails costs its row alone, and has an allocator
of its own. They begin side by side, because what they compile takes long, and are measured one at a time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from bench.gpu.competitors import AGAIN, BASE, COMPILED, EAGER
from bench.gpu.results import Asked, asked, first_line
from bench.gpu.running import ROOT, command, ended

# Of a workload and a loop.
Key: TypeAlias = tuple[str, str]
# What is most worth knowing comes first.
GROUPS = (("W1", "25M", "GPT"), ("W4", "W3", "W5", "W2"))
# Where what is found says nothing of a GPU, and the command is only tried.
TRIED = (("W1", "GPT"),)
# Whose processes take gigabytes of a GPU while they begin, and compile dozens of kernels.
LARGE = frozenset({"GPT"})
MOST_LARGE = 3
# Of the time of a stage, for beginning.
BEGINNING = 0.7
SECONDS_A_TURN = 0.1
TURNS, FEWEST_TURNS = 10, 2
PROFILED = 5
# Seconds for any answer: what has been made eight times before is made soon.
PATIENCE = 15.0
# A share of the time, beside that of loops that don't compile.
COMPILING = 1.5


class LoopError(Exception):
    """A loop's process that answers by an error, too late, or no more."""


class Loop:
    """A loop in its process."""

    def __init__(self, kind: str, workload: str, name: str, folder: Path) -> None:
        self.workload, self.name = workload, name
        device, size = ("cpu" if kind == "cpu" else "cuda"), ("whole" if kind == "cuda" else "small")
        self._log = folder / f"{workload} {name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command(kind, "bench.gpu.loop", device, size, workload, name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                text=True,
                env=os.environ | ({"TORCHINDUCTOR_COMPILE_THREADS": "4"} if workload in LARGE else {}),
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # it may be killed in the middle of one
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def answer(self, seconds: float) -> dict[str, Any]:
        """
        Raises:
            LoopError: there is none.
        """
        try:
            found = self._answers.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise LoopError(f"no answer after {seconds:.0f} s") from None
        if found is None:
            code = self._process.wait()
            lines = self._log.read_text(errors="replace").splitlines()
            raise LoopError(f"the process {ended(code) or 'ended early'}: {first_line(lines[-1] if lines else '')}")
        if "error" in found:
            raise LoopError(found["error"])
        return found

    def ask(self, what: str, count: int, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({what: count}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, which the answer says
        return self.answer(seconds)

    @property
    def has_answered(self) -> bool:
        return not self._answers.empty()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was asked last was not read
                    pipe.close()


def begin(part: Asked, wanted: Sequence[Key], end: float, folder: Path) -> dict[Key, Loop]:
    """Start these loops, as many at a time as there are processors, and give those that are ready in time."""
    waiting = list(wanted)
    starting: dict[Key, Loop] = {}
    ready: dict[Key, Loop] = {}
    while (waiting or starting) and time.monotonic() < end:
        for key in list(waiting):
            large = sum(workload in LARGE for workload, _ in starting)
            if len(starting) < (os.cpu_count() or 1) and (key[0] not in LARGE or large < MOST_LARGE):
                waiting.remove(key)
                starting[key] = Loop(part.kind, *key, folder)
                part.results.write(*key, "state", value="begun, and not ready in time")
        for key in [key for key, loop in starting.items() if loop.has_answered]:
            loop = starting.pop(key)
            if _noted(part, key, functools.partial(loop.answer, 1.0)):
                ready[key] = loop
                part.results.write(*key, "state", value="ready, and not measured in time")
            else:
                loop.close()
        time.sleep(0.05)
    for loop in starting.values():
        loop.close()
    return ready


def _noted(part: Asked, key: Key, answer: Callable[[], dict[str, Any]]) -> bool:
    """Write each value of an answer, or the error; whether there was an answer."""
    try:
        found = answer()
    except LoopError as error:
        part.results.write(*key, "error", value=str(error))
        return False
    for name, value in found.items():
        part.results.write(*key, name, value=value)
    return True


def measure(part: Asked, loops: Mapping[Key, Loop], base: Key, end: float) -> None:
    """Loops of one workload, in turns, then their memory, and then what the profiler sees."""
    mine = {key: loop for key, loop in loops.items() if key[0] == base[0]}

    def left() -> float:
        return end - time.monotonic()

    # A turn of any of them is as many steps as the first one makes in it.
    first = base if base in mine else next(iter(mine), base)
    steps = 0
    times: dict[Key, list[dict[str, float]]] = {key: [] for key in mine}
    for turn in range(TURNS):
        if left() < 0 and turn >= FEWEST_TURNS:
            break
        # In another order each time: the first one finds a colder device.
        for key in [*mine][turn % max(len(mine), 1) :] + [*mine][: turn % max(len(mine), 1)]:
            try:
                if not steps:
                    steps = max(2, round(SECONDS_A_TURN / (mine[first].ask("steps", 3, PATIENCE)["wall"] / 3)))
                found = mine[key].ask("steps", steps, PATIENCE)
            except LoopError as error:
                part.results.write(*key, "error", value=str(error))
                mine.pop(key).close()
                first = base if base in mine else next(iter(mine), base)
                continue
            times[key].append({name: value / steps for name, value in found.items()})
        _write_times(part, times, base, steps)
    for what, count in (("memory", 3), ("profile", PROFILED)):
        for key, loop in mine.items():
            if left() < 0:
                return
            _noted(part, key, functools.partial(loop.ask, what, count, PATIENCE))


def _write_times(part: Asked, times: Mapping[Key, list[dict[str, float]]], base: Key, steps: int) -> None:
    """Medians over the turns, and of the ratios to the base in the same turn."""
    for key, turns in times.items():
        if not turns:
            continue
        for name in turns[0]:
            part.results.write(*key, name, value=statistics.median(turn[name] for turn in turns))
        part.results.write(*key, "state", value="measured")
        part.results.write(*key, "turns", value=len(turns))
        part.results.write(*key, "steps a turn", value=steps)
        pairs = list(zip(turns, times.get(base, ()), strict=False))
        for name in ("wall", "events"):
            ratios = [mine[name] / other[name] for mine, other in pairs if other.get(name)]
            if ratios:
                part.results.write(*key, f"{name} ratio", value=statistics.median(ratios))


def stage(part: Asked, workloads: Sequence[str], loops: Sequence[str], base: str, seconds: float) -> None:
    """Begin these loops on these workloads, and measure them."""
    started = time.monotonic()
    for workload in workloads:
        for name in loops:
            part.results.write(workload, name, "state", value="not begun in time")
    # What is large takes longest. Where time is short, each workload has the loop by hand, and then the library's.
    ordered = sorted(workloads, key=lambda workload: workload not in LARGE)
    wanted = [(workload, name) for name in loops for workload in ordered]
    with TemporaryDirectory() as folder:
        ready = begin(part, wanted, started + BEGINNING * seconds, Path(folder))
        try:
            for number, workload in enumerate(workloads):
                left = started + seconds - time.monotonic()
                measure(part, ready, (workload, base), time.monotonic() + left / (len(workloads) - number))
                for key in [key for key in ready if key[0] == workload]:
                    ready.pop(key).close()
        finally:
            for loop in ready.values():
                loop.close()


def main(part: Asked) -> None:
    groups = GROUPS if part.kind == "cuda" else TRIED
    everything = tuple(workload for group in groups for workload in group)
    # Each stage has the loop by hand, to which its others are compared. What compiles takes long, and begins together.
    stages = [
        *((BASE, [*EAGER], group, float(len(group))) for group in groups),
        (AGAIN, [*COMPILED], everything, COMPILING * len(everything)),
    ]
    for number, (base, loops, workloads, share) in enumerate(stages):
        if part.left <= 0:
            return
        stage(part, workloads, loops, base, part.left * share / sum(other for *_, other in stages[number:]))


if __name__ == "__main__":
    main(asked())
