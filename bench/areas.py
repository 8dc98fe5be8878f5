"""Which tests guard which files, the cheapest first: what :mod:`bench.mutants` runs for a mutant."""

from __future__ import annotations

from pathlib import Path

import attrs

__all__ = ["AREAS", "GOLDEN", "LEFT_OUT", "Area", "guards_of"]

GOLDEN = "::11"
"""The numbers of golden streams that are checked before all tests; those of one kind, ``eager``."""

_FOLDERS = ("tests/entry",)  # what is refused, and how, of any area
LEFT_OUT = ("compile", "graph", "ranks", "replicate", "shard", "any_door", "trains_as_if")
"""Tests with these words in their names are not run for a mutant: they take seconds each."""


@attrs.frozen
class Area:
    """Files, as a pattern, and their tests.

    Attributes:
        files: relative to the root of the repository.
        tests: files that are run first, relative to the root; of all, those of the fast tier are run.
        without: the files of another area, as a pattern.
    """

    files: str
    tests: tuple[str, ...]
    without: str = ""

    def paths(self, root: Path) -> list[Path]:
        """The files below a folder, in order."""
        left_out = set(root.glob(self.without)) if self.without else set[Path]()
        return sorted(set(root.glob(self.files)) - left_out)


def _in(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


_OWNERSHIP = "pure_loop/stages/[ow]*[pe].py"
AREAS = {
    "loop": Area(
        "pure_loop/loop/*.py",
        (
            *_in("loop", "driver", "first_error", "first_events", "stop", "batches_per_step", "current_metrics"),
            *_in("loop", "traps", "draws_of_handlers", "draws_of_users_code", "unseen"),
            *_in("verify", "verify"),
            *_in("metrics", "metrics_that_keep_state"),
            *_in("state", "frozen"),
        ),
    ),
    "verify": Area(
        "pure_loop/verify/*.py",
        _in("verify", "verify"),
    ),
    "stages": Area(
        "pure_loop/stages/*.py",
        (
            *_in("stages", "nonfinite", "weights", "precision", "grad_norm", "adding_up", "host_draws", "search"),
            *_in("loop", "draws_of_users_code"),
        ),
        without=_OWNERSHIP,
    ),
    "ownership": Area(
        _OWNERSHIP,
        (
            *_in("ownership", "references", "gradients", "errors", "foreign", "donated", "kept", "machine"),
            *_in("ownership", "consumers", "reads", "variables"),
            *_in("state", "frozen", "visibility"),
        ),
    ),
    "optim": Area(
        "pure_loop/optim/*.py",
        _in("optim", "rules", "optim", "errors", "lr_scale", "counts"),
    ),
    "state": Area(
        "pure_loop/state.py",
        _in("state", "state", "memory", "visibility", "frozen"),
    ),
    "data": Area(
        "pure_loop/data/*.py",
        _in("data", "data", "sources", "sources_sizes"),
    ),
    "checkpoint": Area(
        "pure_loop/checkpoint/*.py",
        _in("checkpoint", "save_load", "archive", "layout", "checkpointer"),
    ),
}
"""The areas by their names."""


def guards_of(area: str, file: str, root: Path) -> list[str]:
    """The examples in a file, the tests of its area, of what is refused, and of the folder with the area's name."""
    named = f"tests/{area}/test_{Path(file).stem}.py"
    tests = [named, *(test for test in AREAS[area].tests if test != named), *_FOLDERS, f"tests/{area}"]
    return [file, *(test for test in tests if (root / test).exists())]
