"""What a part found, as lines of JSON: a process that is killed leaves all that it wrote.

Nothing here but the standard library: where torch can't be imported, that is a result.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Asked", "Results", "asked", "first_line", "read"]


class Results:
    """Appends to a file; several processes may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *keys: str, value: Any) -> None:
        """Add one value, which stands under these keys; the last one of the same keys counts."""
        line = json.dumps({"keys": keys, "value": value}) + "\n"
        with self.path.open("ab", buffering=0) as file:  # one write a line, so that those of others stay whole
            file.write(line.encode())


def read(path: Path) -> dict[str, Any]:
    """All values of a file in one dict of dicts; a line that was cut off is left out."""
    found: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        *above, last = entry["keys"]
        place = found
        for key in above:
            place = place.setdefault(key, {})
        place[last] = entry["value"]
    return found


@dataclass(frozen=True)
class Asked:
    """What a part is called with.

    Attributes:
        device: ``"cuda"``, which may be a simulated one, or ``"cpu"``.
        kind: ``"cuda"``, ``"simulated"`` or ``"cpu"``.
        results: where it writes.
        end: when it should be over, by ``time.monotonic()``, which all processes of a machine share.
        rest: arguments of its own.
    """

    device: str
    kind: str
    results: Results
    end: float
    rest: tuple[str, ...]

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


# A part has so many of its seconds to come to an end by itself.
ENDING = 5.0


def asked(arguments: list[str] | None = None) -> Asked:
    """Read the arguments of a part. What it does when its time is over is written to its log."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["cuda", "simulated", "cpu"], required=True)
    parser.add_argument("--end", type=float, required=True, help="when it is stopped, by time.monotonic()")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    left = options.end - time.monotonic()
    faulthandler.dump_traceback_later(max(left - 1, 1))
    return Asked(
        "cpu" if options.kind == "cpu" else "cuda",
        options.kind,
        Results(options.results),
        options.end - min(ENDING, left / 4),
        tuple(options.rest),
    )


def first_line(error: BaseException | str, longest: int = 300) -> str:
    """The class of an error and the first line of what it says."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:longest]
