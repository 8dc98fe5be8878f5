"""The table of epochs: its rows, the columns that fit into a width, and which value is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import attrs

from pure_loop.progress import words as _words
from pure_loop.progress.words import BEST

TRAIN = "train"
_LABEL = "/"
_GAP = 2
# Room for a number of four digits between 0.01 and 100,000, and for all others.
_NUMBER, _LONG_NUMBER = 7, 9
# Room for a learning rate of three digits.
_RATE = 8
_COUNTS = ("epoch", "batch", "time")
# How long a name may be, from the first that lets all columns fit.
_LONGEST_NAMES = (14, 10, 8)


@attrs.frozen(kw_only=True)
class Row:
    """One epoch, or the part of it up to an evaluation.

    Attributes:
        epoch: from 1.
        batch: batches of the run at its end; None: the row is a whole epoch.
        seconds: since the row before.
    """

    epoch: int
    batch: int | None = None
    seconds: float


@attrs.frozen
class Cell:
    """A value as text.

    Attributes:
        text: the text.
        best: whether it is the best value of its column so far.
    """

    text: str
    best: bool = False


@attrs.frozen
class Column:
    """A column that is shown.

    Attributes:
        name: what it shows: ``"epoch"``, ``"val/loss"``.
        title: the name of the metric, cut if it is long.
        width: of all its cells.
        marked: whether its best value is marked, for which its last place is kept.
    """

    name: str
    title: str
    width: int
    marked: bool = False

    @property
    def group(self) -> str:
        """The evaluator, or ``train``; empty for epoch, learning rate and time."""
        return "" if _is_rate(self.name) else self.name.rpartition(_LABEL)[0]


@attrs.define
class Table:
    """Rows as they come.

    Args:
        labels: the evaluators' in their order.

    >>> table = Table()
    >>> for loss in (0.5, 0.25):
    ...     table.add(Row(epoch=len(table.rows) + 1, seconds=61.0), {"train/loss": loss, "val/loss": loss})
    >>> columns, dropped = table.columns(width=80)
    >>> [column.name for column in columns], dropped
    (['epoch', 'train/loss', 'val/loss', 'time'], 0)
    >>> [cell.text for cell in table.cells(1, columns)]
    ['2', '0.2500', '0.2500*', '1:01']
    """

    labels: Sequence[str] = ()
    rows: list[tuple[Row, Mapping[str, float]]] = attrs.field(factory=list)
    _names: list[str] = attrs.field(factory=lambda: ["epoch"])
    # The widest text of each column so far.
    _widths: dict[str, int] = attrs.field(factory=dict)
    # Of each column: the best value so far, and the row it is in.
    _best: dict[str, tuple[float, int]] = attrs.field(factory=dict)

    def add(self, row: Row, values: Mapping[str, float]) -> None:
        """Add a row."""
        self.rows.append((row, values))
        for name in self._names_of(row, values):
            if name not in self._names:
                self._names.append(name)
            text = self._text(row, values, name)
            width = _room(name, len(text))
            self._widths[name] = max(self._widths.get(name, 0), width)
        labels = [*self.labels, *dict.fromkeys(name.rpartition(_LABEL)[0] for name in self._names)]
        self._names.sort(key=lambda name: _place(name, labels))
        for name, value in values.items():
            mode = _mode(name)
            if mode is None or not math.isfinite(value):
                continue
            best = self._best.get(name)
            if best is None or (value > best[0] if mode == "max" else value < best[0]):
                self._best[name] = (value, len(self.rows) - 1)

    def columns(self, width: int) -> tuple[list[Column], int]:
        """The columns that fit into a width, and how many don't.

        The learning rate is left out first, then the time, the metrics of training, and the metrics of evaluators from
        the last.
        """
        for longest in _LONGEST_NAMES:
            columns = self._named(longest)
            if _width(columns) <= width:
                return columns, 0
        fitting = list(columns)
        for name in self._least_first():
            if _width(fitting) <= width:
                break
            fitting = [column for column in fitting if column.name != name]
        return fitting, len(columns) - len(fitting)

    def cells(self, index: int, columns: Sequence[Column], *, final: bool = False) -> list[Cell]:
        """One row.

        Args:
            index: of the row, from 0.
            columns: those to show.
            final: mark the best of all rows; else the best of the rows up to this one, if it is this one's.
        """
        row, values = self.rows[index]
        cells = []
        for column in columns:
            text = self._text(row, values, column.name)
            best = column.marked and bool(text) and self._best.get(column.name, (0.0, -1))[1] == index
            if column.marked and not final:
                text += "*" if best else " "
            cells.append(Cell(text, best))
        return cells

    def head(self, columns: Sequence[Column], rule: str = "─") -> tuple[str, str]:
        """The line of groups, and that of names."""
        groups, names = [], []
        for group, members in groupby(columns, key=lambda column: column.group):
            members_of = list(members)
            room = _width(members_of)
            groups.append(f"{_words.cut(group, room - 2)} ".ljust(room, rule) if group else " " * room)
            names += [f"{column.title}{' ' * column.marked}".rjust(column.width) for column in members_of]
        return (" " * _GAP).join(groups).rstrip(), (" " * _GAP).join(names).rstrip()

    def lines(self, width: int) -> list[str]:
        """All rows as text."""
        columns, _ = self.columns(width)
        body = [[cell.text for cell in self.cells(index, columns)] for index in range(len(self.rows))]
        return [*self.head(columns), *(line(texts, columns) for texts in body)]

    def _names_of(self, row: Row, values: Mapping[str, float]) -> list[str]:
        return ["epoch", *(["batch"] if row.batch is not None else []), *values, "time"]

    def _text(self, row: Row, values: Mapping[str, float], name: str) -> str:
        if name == "epoch":
            return str(row.epoch)
        if name == "batch":
            return "" if row.batch is None else str(row.batch)
        if name == "time":
            return _words.clock(row.seconds)
        if name not in values:
            return ""
        return f"{values[name]:.3g}" if _is_rate(name) else _words.number(values[name])

    def _named(self, longest: int) -> list[Column]:
        """All columns, with names of at most so many letters."""
        columns = []
        for name in self._names:
            marked = _mode(name) is not None
            title = BEST.strip() if name.endswith(BEST) else name if _is_rate(name) else name.rpartition(_LABEL)[2]
            title = _words.cut(title, longest)
            columns.append(Column(name, title, max(len(title), self._widths[name]) + marked, marked))
        for group, members in groupby(list(columns), key=lambda column: column.group):
            members_of = list(members)
            missing = min(len(group), longest) + 2 - _width(members_of)
            if group and missing > 0:
                last = members_of[-1]
                columns[columns.index(last)] = attrs.evolve(last, width=last.width + missing)
        return columns

    def _least_first(self) -> list[str]:
        """The columns in the order in which they are left out; the epoch stays."""
        evaluated: dict[str, list[str]] = {}
        training = []
        for name in self._names:
            label = name.rpartition(_LABEL)[0]
            if label == TRAIN:
                training.append(name)
            elif label and not _is_rate(name):
                evaluated.setdefault(label, []).append(name)
        most = max(map(len, evaluated.values()), default=0)
        turns = [names[turn] for turn in range(most) for names in evaluated.values() if turn < len(names)]
        first = ["train/loss"] if "train/loss" in training else []
        rest = [name for name in training if name not in first]
        batch = ["batch"] if "batch" in self._names else []
        return [*_rates(self._names), "time", *reversed([*first, *batch, *turns, *rest])]


def _place(name: str, labels: Sequence[str]) -> tuple[int, int]:
    """Where a column stands: epoch, batch, training, the evaluators, the learning rate, the time."""
    fixed = {"epoch": 0, "batch": 1, "train/loss": 2, "time": 6}
    if name in fixed:
        return fixed[name], 0
    if _is_rate(name):
        return 5, 0
    label = name.rpartition(_LABEL)[0]
    return (3, 0) if label == TRAIN else (4, labels.index(label))


def line(texts: Sequence[str], columns: Sequence[Column]) -> str:
    """Cells beside each other, to the right of their columns."""
    padded = [text.rjust(column.width) for text, column in zip(texts, columns, strict=True)]
    return (" " * _GAP).join(padded).rstrip()


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + _GAP * (len(columns) - 1)


def _room(name: str, length: int) -> int:
    """The width of a column with a text of this length: wider at once where it would soon have to be."""
    rooms = (_RATE,) if _is_rate(name) else () if name in _COUNTS else (_NUMBER, _LONG_NUMBER)
    return next((room for room in rooms if length <= room), length)


def _is_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr:")


def _rates(names: Sequence[str]) -> list[str]:
    return [name for name in names if _is_rate(name)]


def _mode(name: str) -> str | None:
    """Whether the largest or the smallest value of an evaluator's metric is the best; None: nothing is marked."""
    from pure_loop.algorithms._monitored import known_mode  # only where there is a table

    label, _, metric = name.rpartition(_LABEL)
    return None if not label or label == TRAIN or _is_rate(name) else known_mode(metric)
