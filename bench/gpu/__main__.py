"""``make gpu``: run the parts, and write ``gpu.json`` after each and meanwhile.

    python -m bench.gpu --minutes 8                          # on an NVIDIA GPU
    python -m bench.gpu --device cpu --minutes 3             # try the command itself
    python -m bench.gpu --device simulated --minutes 5       # on a device that computes on the CPU, with g++

A GPU's results are committed as ``docs/gpu.json``, and ``make docs`` writes docs/gpu.md from them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.gpu.page import line
from bench.gpu.running import Part, Run

__all__ = ["PARTS", "main"]

# cuBLAS reads it once, before it computes.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

# What one doesn't use the others have. Importing torch for the first time may take most of the first one's.
PARTS = (
    Part("versions", "bench.gpu.versions", 12),
    Part("tests", "bench.gpu.marked", 27, _DETERMINISTIC),
    Part("laws", "bench.gpu.laws", 12, _DETERMINISTIC),
    Part("synchronisations", "bench.gpu.synchronisations", 7),
    Part("precision", "bench.gpu.precision", 7, _DETERMINISTIC),
    Part("cost", "bench.gpu.cost", 42),
)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts.

    Returns:
        0 if parts ran, whatever they found; 1 if none could.
    """
    parser = argparse.ArgumentParser("python -m bench.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu", "simulated"], default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: there has to be time, --minutes 8")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    run = Run(options.device, options.minutes * 60, options.output)
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    ran = 0
    for part, entry in run.each(parts):
        print(line(part.name, entry), flush=True)
        ran += bool(entry["found"])
        if part.name == "versions" and entry["found"].get("available") is False:
            print("torch finds no CUDA device here: DEVICE=cpu tries the command itself, on a CPU", file=sys.stderr)
            return 1
    print(f"{ran} of {len(parts)} parts have results, in {options.output}")
    return int(not ran)


if __name__ == "__main__":
    raise SystemExit(main())
