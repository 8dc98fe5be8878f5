"""Try every law on every library, and write docs/peers.json: ``python -m bench.peers [MODULE ...]``.

Each library has a process of its own, and so has each run of its script.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.peers.adapters import MODULES
from bench.peers.laws import LAWS, measured
from bench.peers.legs import Adapter, Alone

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "peers.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="of bench/peers/adapters; default: all")
    parser.add_argument("--one", metavar="MODULE", help="measure one here, and print the results as JSON")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(of(options.one)))
        return
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"peers": {}}
    results |= {"date": datetime.date.today().isoformat(), "command": "make laws-of-peers", "torch": torch.__version__}
    results |= {"python": sys.version.split()[0], "laws": list(LAWS)}
    for module in options.modules:
        command = [sys.executable, "-m", "bench.peers", "--one", module]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(printed.splitlines()[-1])
        results["peers"][found.pop("name")] = found
        print(module, {law: result["result"] for law, result in found["laws"].items()}, flush=True)
        in_order = sorted(results["peers"].items(), key=lambda item: MODULES.index(item[1]["module"]))
        # After each, so that an interruption loses one.
        RESULTS.write_text(json.dumps(results | {"peers": dict(in_order)}, indent=1) + "\n")


def of(module: str) -> dict[str, Any]:
    """The results of one library."""
    path = f"bench.peers.adapters.{module}"
    adapter: Adapter = importlib.import_module(path).ADAPTER
    laws = {law: attrs.asdict(result) for law, result in measured(adapter, Alone(path)).items()}
    return {
        "name": adapter.name,
        "module": module,
        "versions": {package: version(package) for package in adapter.packages},
        "laws": laws,
    }


if __name__ == "__main__":
    main()
