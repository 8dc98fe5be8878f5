"""The tests marked ``gpu``, in parallel processes: how many passed, and the first line of each failure.

A test that takes too long, or that ends its process, costs that test alone: another process continues after it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench.gpu.results import Asked, Results, asked, first_line, read
from bench.gpu.running import LOST_DEVICE, ROOT, command, ended

# Seconds a test: some compile several steps.
LIMIT = 60.0
MOST_PROCESSES = 12
# Of one process: where each test ends it, there is something else.
MOST_RESTARTS = 10
SLOWEST = 10


def files() -> list[str]:
    """Those with a test that is marked."""
    marked = re.compile(r"\bmark\.gpu\b")
    found = (path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    return sorted(str(path.relative_to(ROOT)) for path in found)


class Process:
    """One of several that share the tests."""

    def __init__(self, kind: str, number: int, count: int, tests: list[str], folder: Path, limit: float) -> None:
        self._results = Results(folder / f"{number}.jsonl")
        self._log = folder / f"{number}.log"
        self._environment = os.environ | {
            "PURE_LOOP_SHARD": f"{number},{count},{limit},{self._results.path}",
            # What else is installed there changes nothing.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        off = ("-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:faulthandler")
        chosen = ("-m", "gpu and not thorough", "--continue-on-collection-errors", "-q", "--no-header", "--tb=short")
        self._command = command(kind, "pytest", "-p", "bench.gpu.shard", *off, *chosen, *tests)
        self._limit, self._restarts = limit, 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=self._environment
            )

    def over(self) -> bool:
        """Whether it has come to its end; if it ended in a test, it is started again, after that test."""
        code = self._process.poll()
        if code is None:
            return False
        found = self.found()
        broken = [name for name in found.get("started", {}) if name not in found.get("tests", {})]
        for name in broken:
            # Faulthandler ends a process by status 1, as a failure ends pytest.
            why = f"not over after {self._limit:.0f} s" if code == 1 else f"its process {ended(code) or 'ended early'}"
            self._results.write("tests", name, value={"outcome": "broken off", "why": why})
        if (broken or code == LOST_DEVICE) and self._restarts < MOST_RESTARTS:
            self._restarts += 1
            self._process = self._start()
            return False
        if "selected" not in found:
            lines = self._log.read_text(errors="replace").splitlines()
            wrong = [line for line in lines if "Error" in line] or lines or [""]
            self._results.write("not collected", f"process {code}", value=first_line(wrong[-1]))
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def found(self) -> dict[str, Any]:
        return read(self._results.path)


def summary(processes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the processes found, together."""
    selected = [name for found in processes for name in found.get("selected", ())]
    tests = {name: outcome for found in processes for name, outcome in found.get("tests", {}).items()}
    not_collected = {name: why for found in processes for name, why in found.get("not collected", {}).items()}
    skipped = Counter(each["why"] for each in tests.values() if each["outcome"] == "skipped")
    timed = sorted(tests, key=lambda name: -tests[name].get("seconds", 0.0))
    return {
        "selected": len(selected),
        "outcomes": dict(Counter(each["outcome"] for each in tests.values())),
        "failures": {name: each for name, each in tests.items() if each["outcome"] in ("failed", "broken off")},
        "not collected": not_collected,
        "skipped": dict(skipped),
        "not reached": [name for name in selected if name not in tests],
        "slowest": {name: tests[name].get("seconds", 0.0) for name in timed[:SLOWEST]},
    }


def main(part: Asked, tests: list[str] | None = None, limit: float = LIMIT) -> None:
    processors = os.cpu_count() or 1
    count = min(processors, MOST_PROCESSES)
    part.results.write("processes", value=count)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            Process(part.kind, number, count, files() if tests is None else tests, Path(folder), limit)
            for number in range(count)
        ]

        def write() -> None:
            for key, value in summary([process.found() for process in processes]).items():
                part.results.write(key, value=value)

        running = list(processes)
        while running and part.left > 0:
            running = [process for process in running if not process.over()]
            write()
            time.sleep(min(2.0, max(part.left, 0.0)))
        for process in running:
            process.kill()
        write()


if __name__ == "__main__":
    main(asked())
