"""What comes before training: importing, and a new process up to its first step. Each is measured in new processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from bench.performance.peers import Peer

__all__ = ["imports", "output", "processes"]

# What peers import may import torchvision, which is not theirs to count.
_OF_PEERS = "from bench.performance.operators import let_torchvision_be_imported as let; let()"
_IMPORT = """
import json, time
from bench.performance.alone import resident_megabytes
def now():
    return time.process_time(), resident_megabytes()
before = now()
import torch
{before}
between = now()
{statement}
after = now()
print(json.dumps([[b - a for a, b in zip(*pair)] for pair in ((before, between), (between, after))]))
"""


def imports(peers: Sequence[Peer], runs: int = 3) -> dict[str, dict[str, float]]:
    """CPU seconds and megabytes that an import adds where torch is imported already, and what torch itself takes.

    The processes take turns; the least of the seconds of each, and the median of the megabytes.
    """
    statements = {"torch": "", "pure_loop": "import pure_loop"}
    # What constructing a torch.optim optimizer imports, so that a loop by hand has it too.
    statements["torch._dynamo (the first torch.optim optimizer)"] = "import torch._dynamo"
    ours = list(statements)
    statements |= {peer.name: peer.uses or f"import {peer.imports}" for peer in peers if peer.function != "scanned"}
    found: dict[str, list[Any]] = {name: [] for name in statements}
    for _ in range(runs):
        for name, statement in statements.items():
            before = "" if name in ours else _OF_PEERS
            torch, more = json.loads(output("-c", _IMPORT.format(before=before, statement=statement)))
            found[name].append(torch if name == "torch" else more)
    return {
        name: {
            "cpu_seconds": min(seconds for seconds, _ in values),
            "mb": statistics.median(megabytes for _, megabytes in values),
        }
        for name, values in found.items()
    }


def processes(peers: Sequence[Peer], steps: int = 200, runs: int = 3) -> dict[str, dict[str, float]]:
    """For a process that trains W1: CPU seconds until its first step is done, and its peak of resident memory."""
    whats = {"hand-written, fused AdamW": "hand", "pl.fit, every event": "ours"}
    whats |= {peer.name: peer.module for peer in peers if peer.function != "scanned"}
    found: dict[str, list[Any]] = {name: [] for name in whats}
    for _ in range(runs):
        for name, what in whats.items():
            found[name].append(json.loads(output("-m", "bench.performance.alone", what, str(steps))))
    return {
        name: {
            "first_step_cpu_seconds": min(each["first_step_cpu_seconds"] for each in values),
            "peak_mb": statistics.median(each["peak_mb"] for each in values),
        }
        for name, values in found.items()
    }


def output(*arguments: str, **variables: str) -> str:
    """The last line that a new Python prints, with these variables in its environment."""
    command = [sys.executable, "-W", "ignore", *arguments]
    # What is installed has its bytecode beside it; our checkout is to have it, too.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= variables
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    return done.stdout.decode().strip().splitlines()[-1]
