"""Runs parts one after the other, each in processes of its own, which are killed when its time is over.

Nothing here but the standard library: where torch can't be imported, that is a result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bench.gpu.results import first_line, read

__all__ = ["LOST_DEVICE", "ROOT", "Part", "Run", "command", "ended", "run_process"]

ROOT = Path(__file__).resolve().parents[2]
# A simulated device has to be there before anything imports torch.
_SIMULATED = (
    "import tests.simulated_gpu.plugin, runpy, sys; del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
# The exit status of a process of tests that has to begin anew.
LOST_DEVICE = 77
# What a log says last is kept of a part that did not come to its end.
_LINES = 40
# Seconds for a killed process to be gone; one that is stuck in its driver is not.
_GONE = 10.0


@dataclass(frozen=True)
class Part:
    """A module that tries or measures something.

    Attributes:
        name: under which its results stand.
        module: what runs, as ``python -m`` does.
        share: of the time: it gets so much of what is left, among the shares of those that are left.
        environment: what it needs besides.
    """

    name: str
    module: str
    share: float
    environment: Mapping[str, str] = field(default_factory=dict)


def command(kind: str, module: str, *arguments: str) -> list[str]:
    """What runs a module by this interpreter, on this kind of device."""
    how = ["-c", _SIMULATED] if kind == "simulated" else ["-m"]
    return [sys.executable, *how, module, *arguments]


def run_process(
    arguments: Sequence[str],
    seconds: float,
    log: BinaryIO,
    *,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
) -> str | None:
    """Run a process, and at its end or at its limit kill all that it has started.

    Returns:
        How it ended if that was not well, else None.
    """
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    end = time.monotonic() + seconds
    try:
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
            meanwhile()
        code = process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_GONE)
    except subprocess.TimeoutExpired:
        return f"stopped at its limit of {seconds:.0f} s, and is not gone {_GONE:.0f} s after it was killed"
    return f"stopped at its limit of {seconds:.0f} s" if code is None else ended(code)


def ended(code: int) -> str | None:
    """An exit status in words; None where all is well."""
    if code >= 0:
        return f"ended with exit status {code}" if code else None
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


class Run:
    """All parts, and ``gpu.json``, which is written while they run.

    Args:
        kind: of the device: ``"cuda"``, ``"simulated"`` or ``"cpu"``.
        seconds: for all parts together.
        output: the file.
    """

    def __init__(self, kind: str, seconds: float, output: Path) -> None:
        self.kind, self.seconds, self.output = kind, seconds, output
        self.found: dict[str, Any] = {
            "kind": kind,
            "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "seconds": seconds,
            "parts": {},
        }
        self._end = time.monotonic() + seconds

    def each(self, parts: Sequence[Part]) -> Iterator[tuple[Part, dict[str, Any]]]:
        """Run one part after the other, and give the entry of each in the file."""
        with tempfile.TemporaryDirectory(prefix="gpu", ignore_cleanup_errors=True) as folder:
            for number, part in enumerate(parts):
                left = self._end - time.monotonic()
                limit = left * part.share / sum(other.share for other in parts[number:])
                yield part, self._one(part, max(limit, 1.0), Path(folder))

    def _one(self, part: Part, limit: float, folder: Path) -> dict[str, Any]:
        results, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
        entry: dict[str, Any] = {"state": "running", "limit": round(limit, 1)}
        self.found["parts"][part.name] = entry
        begin = written = time.monotonic()

        def write() -> None:
            entry["seconds"] = round(time.monotonic() - begin, 1)
            entry["found"] = read(results)
            self._write()

        def meanwhile() -> None:
            nonlocal written
            if time.monotonic() - written > 2:
                write()
                written = time.monotonic()

        write()
        arguments = ("--kind", self.kind, "--end", str(begin + limit), "--results", str(results))
        with log.open("wb") as file:
            try:
                wrong = run_process(
                    command(self.kind, part.module, *arguments),
                    limit,
                    file,
                    environment=_environment(folder) | part.environment,
                    meanwhile=meanwhile,
                )
            except OSError as error:
                wrong = first_line(error)
        entry["state"] = wrong or "done"
        if wrong:
            entry["log"] = log.read_text(errors="replace").splitlines()[-_LINES:]
        write()
        return entry

    def _write(self) -> None:
        # Another file first: who stops the whole at any time finds a whole one.
        new = self.output.with_name(f".{self.output.name}.new")
        new.write_text(json.dumps(self.found, indent=1) + "\n")
        new.replace(self.output)


def _environment(folder: Path) -> dict[str, str]:
    """One thread a process; what is compiled is compiled here, in the process itself, and shared between parts."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": str(folder),
    }
