"""Measure cards anew and write docs/cards.json and the pictures: ``python -m bench.cards [NAME ...]``.

``make tables`` writes the pages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bench.cards.entries import ENTRIES
from bench.cards.measure import measured
from bench.cards.pictures import PICTURES

DOCS = Path(__file__).resolve().parents[2] / "docs"


def main(names: list[str], draw: bool = False) -> None:
    path = DOCS / "cards.json"
    records = json.loads(path.read_text()) if path.exists() else {}
    (DOCS / "cards").mkdir(exist_ok=True)
    for name in names or sorted(ENTRIES):
        entry = ENTRIES[name]
        print(name, flush=True)
        if entry.picture:
            PICTURES[entry.picture](entry, DOCS / "cards" / f"{name}.png")
        records[name] = {**records[name], "picture": bool(entry.picture)} if draw else measured(name, entry)
        # After each, so that an interruption loses one.
        path.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.cards", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENTRIES)}; none: all")
    parser.add_argument("--draw", action="store_true", help="draw the pictures anew, and measure nothing")
    options = parser.parse_args()
    names = options.names
    if unknown := [name for name in names if name not in ENTRIES]:
        parser.error(f"there is no card {unknown[0]!r}; --help lists them.")
    main(names, options.draw)
