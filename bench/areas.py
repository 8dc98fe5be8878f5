"""Which tests guard which files, the cheapest first: what :mod:`bench.mutants` runs for a mutant."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ["AREAS", "GOLDEN", "LEFT_OUT", "Area", "guards_of"]

GOLDEN = "::11"
"""The numbers of golden streams that are checked before all tests; those of one kind, ``eager``."""

LEFT_OUT = ("compile", "graph", "ranks", "replicate", "shard", "any_door", "trains_as_if")
"""Tests with these words in their names are not run for a mutant: they take seconds each."""


@attrs.frozen
class Area:
    """Files, as a pattern, and the folders of tests that guard them.

    Attributes:
        files: relative to the root of the repository.
        folders: in tests/, the nearest first; of all, the tests of the fast tier are run.
        without: the files of another area, as a pattern.
    """

    files: str
    folders: tuple[str, ...]
    without: str = ""

    def paths(self, root: Path) -> list[Path]:
        """The files below a folder, in order."""
        left_out = set(root.glob(self.without)) if self.without else set[Path]()
        return sorted(set(root.glob(self.files)) - left_out)


_OWNERSHIP = "pure_loop/stages/[ow]*[pe].py"
AREAS = {
    "loop": Area("pure_loop/loop/*.py", ("loop", "verify", "state", "metrics", "laws", "entry")),
    "verify": Area("pure_loop/verify/*.py", ("verify", "entry")),
    "stages": Area("pure_loop/stages/*.py", ("stages", "loop", "laws", "entry"), without=_OWNERSHIP),
    "ownership": Area(_OWNERSHIP, ("ownership", "state", "entry")),
    "optim": Area("pure_loop/optim/*.py", ("optim", "entry")),
    "state": Area("pure_loop/state.py", ("state", "entry")),
    "data": Area("pure_loop/data/*.py", ("data", "entry")),
    "checkpoint": Area("pure_loop/checkpoint/*.py", ("checkpoint", "entry")),
}
"""The areas by their names; last what is refused, of any area."""


def guards_of(area: str, file: str, root: Path) -> list[str]:
    """The examples in a file, the tests that are named like it, and the folders of its area."""
    folders = [f"tests/{folder}" for folder in AREAS[area].folders]
    named = f"{folders[0]}/test_{Path(file).stem}.py"
    return [file, *(path for path in (named, *folders) if (root / path).exists())]
