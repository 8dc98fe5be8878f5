"""Where progress is shown: a live bar in a terminal or a notebook, plain lines everywhere else."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import attrs

from pure_loop.errors import MissingExtraError
from pure_loop.progress import words as _words

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Bar", "Lines", "Screen", "Snapshot", "screen_for"]

_LINE_SECONDS = 10.0
_NARROWEST_BAR = 8


@attrs.frozen(kw_only=True)
class Snapshot:
    """What there is to show at one moment.

    Attributes:
        title: what runs.
        place: epoch and batch.
        fraction: how much of it is done, in [0, 1]; None where that is not known.
        speed: samples a second; None before it is known.
        left: seconds until the end; None before it is known.
        spent: seconds since the start.
        ending: how it ended; empty while it runs.
    """

    title: str
    place: str
    fraction: float | None
    speed: float | None
    left: float | None
    spent: float
    ending: str = ""

    @property
    def percent(self) -> str:
        # Rounded down: 100% is the end and nothing before it.
        return "" if self.fraction is None else f"{int(100 * self.fraction + 1e-9)}%"

    @property
    def time(self) -> str:
        if self.ending:
            return f"{self.ending}, {_words.clock(self.spent)}"
        return _words.clock(self.spent) if self.left is None else f"{_words.clock(self.left)} left"

    def measured(self, values: Mapping[str, float]) -> list[str]:
        """The loss and the speed, then each evaluation: ``["loss 0.25  1.2k samples/s", "val: loss 0.3"]``."""
        groups: dict[str, list[str]] = {}
        for name, value in values.items():
            label, _, metric = name.rpartition("/")
            groups.setdefault(label, []).append(f"{metric} {_words.number(value)}")
        if self.speed is not None:
            groups = {"": [*groups.pop("", []), f"{_words.rate(self.speed)} samples/s"], **groups}
        return [f"{label and f'{label}: '}{'  '.join(words)}" for label, words in groups.items()]


class Screen(Protocol):
    """What shows snapshots: redrawn in place where ``live``, and wanted every so many ``seconds``."""

    live: bool
    seconds: float

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Lines:
    """A plain line now and then: for logs, pipes and files."""

    live = False
    seconds = _LINE_SECONDS

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        parts = (snapshot.title, snapshot.place, snapshot.percent, *snapshot.measured(values), snapshot.time)
        print("  ".join(filter(None, parts)), file=self._file, flush=True)

    def close(self) -> None:
        pass


class Bar:
    """A bar that is redrawn in place, by rich, without a thread of its own."""

    live = True
    seconds = 0.0

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        # What is printed while the bar is there goes above it; what goes to a pipe must not come here.
        self._live = Live(
            console=console, auto_refresh=False, redirect_stdout=_is_terminal(sys.stdout) or console.is_jupyter
        )
        self._started = False

    def show(self, snapshot: Snapshot, values: Mapping[str, float]) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        self._live.update(self._draw(snapshot, values), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _draw(self, snapshot: Snapshot, values: Mapping[str, float]) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        failed = bool(snapshot.ending) and snapshot.ending != "done"
        head = Text.assemble((snapshot.title, "bold"), "  ", snapshot.place)
        tail = Text.assemble(snapshot.percent.rjust(4), "  ", (snapshot.time, "red" if failed else "cyan"))
        space = self._console.width - head.cell_len - tail.cell_len - 4
        row: list[RenderableType] = [head]
        if space >= _NARROWEST_BAR:
            done = float(snapshot.ending == "done") if snapshot.fraction is None else snapshot.fraction
            pulse = snapshot.fraction is None and not snapshot.ending
            row.append(ProgressBar(total=1.0, completed=done, width=space, pulse=pulse))
        row.append(tail)
        table = Table.grid(padding=(0, 2))
        for _ in row:
            table.add_column(no_wrap=True)
        table.add_row(*row)
        margin = len(snapshot.title) + 2
        rows = _rows(snapshot.measured(values), self._console.width - margin)
        return Group(table, Padding(Text("\n".join(rows)), (0, 0, 0, margin))) if rows else table


def _rows(texts: list[str], width: int) -> list[str]:
    """Texts side by side, as many as fit into a row."""
    rows: list[str] = []
    for text in texts:
        if rows and len(rows[-1]) + 3 + len(text) <= width:
            rows[-1] += f"   {text}"
        else:
            rows.append(text)
    return rows


def screen_for(file: TextIO | None) -> Screen:
    """The screen for a file; None: standard error, or the notebook.

    Raises:
        MissingExtraError: there is a terminal, and rich, which draws in it, is not installed.
    """
    target = sys.stderr if file is None else file
    if _is_terminal(target):
        console = _console(target)
        # Inside another bar this one prints its lines above that.
        if console.is_interactive and not hasattr(target, "rich_proxied_file"):
            return Bar(console)
    elif file is None and _in_notebook():
        if _installed("rich") and _installed("ipywidgets"):
            return Bar(_console(None))
        return Lines(sys.stdout)
    return Lines(target)


def _is_terminal(file: Any) -> bool:
    isatty = getattr(file, "isatty", None)
    return isatty is not None and bool(isatty()) and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(file: TextIO | None) -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise MissingExtraError(
            "pl.progress draws its bar in a terminal with rich, which is not installed: pip install "
            "\"pure_loop[progress]\". Without it, pl.progress(stream, file=open('progress.log', 'w')) writes lines."
        ) from None
    return Console(file=file, highlight=False)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
