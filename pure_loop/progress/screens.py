"""Where progress is shown: a table and a bar in a terminal or a notebook, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from pure_loop.progress.snapshot import Snapshot
from pure_loop.progress.table import Row

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Lines", "Screen", "screen_for"]

_LINE_SECONDS = 10.0


class Screen(Protocol):
    """What shows snapshots.

    Attributes:
        live: whether it is redrawn in place, and shows rows.
        seconds: between two drawings, at least.
    """

    @property
    def live(self) -> bool: ...

    @property
    def seconds(self) -> float: ...

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        """Draw a snapshot, and the values that were measured, by name."""

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        """Add a row to the table."""

    def close(self) -> None:
        """Leave everything as it is."""


class Lines:
    """A plain line now and then: for logs, pipes and files."""

    live = False
    seconds = _LINE_SECONDS

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        measured = map("  ".join, snapshot.measured(values))
        inside = snapshot.inside if snapshot.epoch else None
        left = "" if inside is None or inside.fraction is None else f"{int(100 * inside.fraction)}%"
        parts = (snapshot.title, snapshot.place, snapshot.percent if inside is None else left, *measured, snapshot.time)
        print("  ".join(filter(None, parts)), file=self._file, flush=True)

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        pass  # the end of an epoch and each evaluation have lines

    def close(self) -> None:
        pass


def screen_for(file: TextIO | None, labels: Sequence[str] = ()) -> Screen:
    """The screen for a file.

    Args:
        file: None: standard error, or the notebook.
        labels: those of the evaluators, in the order of their columns.
    """
    target = sys.stderr if file is None else file
    if _is_terminal(target):
        if not _installed("rich"):
            _hint(target)
            return Lines(target)
        console = _console(target)
        # Inside another bar this one prints its lines above that.
        if console.is_interactive and not hasattr(target, "rich_proxied_file"):
            from pure_loop.progress.terminal import Bar

            return Bar(console, labels)
    elif file is None and _in_notebook():
        from pure_loop.progress.notebook import Notebook

        return Notebook(labels)
    return Lines(target)


def _is_terminal(file: Any) -> bool:
    isatty = getattr(file, "isatty", None)
    return isatty is not None and bool(isatty()) and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(file: TextIO) -> Console:
    from rich.console import Console

    return Console(file=file, highlight=False)


_hinted: list[bool] = []


def _hint(file: TextIO) -> None:
    """Once in a process: what a bar needs."""
    if not _hinted:
        _hinted.append(True)
        print('pl.progress: for a table and a live bar: pip install "pure_loop[progress]"', file=file, flush=True)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
