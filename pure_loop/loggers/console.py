"""Prints a line in each interval, with the loss and the learning rate, and one for each evaluation."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from pure_loop._internal.recordable import Table, losses, recordable
from pure_loop.cadence import CadenceLike
from pure_loop.callback import LoggerGroup, Run
from pure_loop.errors import ArgumentTypeError
from pure_loop.loggers._destination import AtIntervals, Names, read_globs
from pure_loop.progress import words as _words
from pure_loop.ranges import checked
from pure_loop.state import MetricValue, State
from pure_loop.time import TimeUnit

__all__ = ["ConsoleLogger"]

# What a line of training shows, by the beginning of its name, and what stands there instead of the beginning.
_SHOWN = {
    "train/loss/": "",
    "train/learning_rate": "lr",
    "train/": "",
    "speed/samples_per_second": "samples/s",
}


# Numbers of one metric that a line shows, and rows and columns of a table.
_MOST_ON_A_LINE, _MOST_CELLS = 8, 20


@checked
class ConsoleLogger(AtIntervals):
    """Prints one line in every interval, at the end of training, and for each evaluation, followed by its tables.

    Of an ensemble a line has the mean of each number over members, its spread, and the best where it is known:
    ``loss 0.5000 ±0.1250 (best 0.2500)``.

    At the end it says where training stopped early, where there was nothing to train, and from which file it resumed.
    Only where a line is due it reads from the device and checks that every loss so far was finite.

    Args:
        interval: how often, as everywhere: ``"1ep"``, ``"100ba"``, ``"0.1dur"``, a predicate of the State;
            0: at the end only.
        stream: a text file; None: standard output, whatever that is when a line is printed.
        include: globs of names, such as ``"gradients/norm"`` or ``["weights/*"]``: further numbers that callbacks
            record; a line of training has their newest values.

    Raises:
        ArgumentTypeError, ArgumentError: an interval or globs that can't be read.
        NonFiniteError: from the stream of training, when a line is due.

    >>> import torch, pure_loop as pl
    >>> from pure_loop.loggers import ConsoleLogger
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> for _ in pl.fit(model, data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                 max_duration="2ep", evaluators={"val": data}, loggers=[ConsoleLogger("1ep")]):
    ...     pass
    epoch 1/2  batch      3  train    loss 1.000...
    epoch 1/2  batch      3  val      loss 1.000
    epoch 2/2  batch      6  train    loss 1.000...
    epoch 2/2  batch      6  val      loss 1.000
    """

    def __init__(self, interval: CadenceLike = "1ep", stream: TextIO | None = None, *, include: Names = None) -> None:
        super().__init__(interval, "interval", '"1ep", "100ba", or 0 for the end only')
        if stream is not None and not hasattr(stream, "write"):
            raise ArgumentTypeError(f"ConsoleLogger(stream={stream!r}): give an open text file, or None.")
        self._stream = stream
        self._include = read_globs(include, "ConsoleLogger include") or ()
        self._latest: dict[str, Any] = {}
        self._reported: int | None = None
        self._begun_at: int | None = None
        self._resumed_from: str | None = None

    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        self._latest.update(metrics)

    def bind(self, run: Run) -> None:
        self._resumed_from = run.resumed_from

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        self._latest.clear()
        self._reported = self._begun_at = state.timestamp.batch

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        if not state.members:  # else the recorder has given what there is to show of their losses
            self._latest |= losses(state.loss)
        super().batch_end(state, logger)

    def fit_end(self, state: State, logger: LoggerGroup) -> None:
        if self._reported != state.timestamp.batch:
            self._act(state)
        nothing = state.timestamp.batch == self._begun_at
        if nothing or state.stop:
            self._write(state, "end", f"{'nothing to train: ' if nothing else 'stopped early: '}{state.why_ended()}")
        if self._resumed_from is not None:
            self._write(state, "end", f"resumed from {self._resumed_from}")

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        label = state.evaluator or "eval"
        if state.members:
            place = "eval/train/" if label == "train" else f"{label}/"
            recorded = {name.removeprefix(place): x for name, x in self._latest.items() if name.startswith(place)}
            self._print(state, label, recorded)
            return
        measured: Mapping[str, MetricValue] = state.metrics.get(label, {})
        numbers: dict[str, MetricValue] = {}
        tables: dict[str, Table] = {}
        for name, value in measured.items():
            elements, matrices = recordable(name, value)
            # A vector of many elements is a table here, too: a line has room for some.
            if len(elements) > _MOST_ON_A_LINE:
                tables[name] = ["name", "value"], [[key, float(number)] for key, number in elements.items()]
            else:
                numbers |= elements
            tables |= matrices
        self._print(state, label, numbers)
        for name, (columns, rows) in tables.items():
            self._print_table(f"{label}/{name}", columns, rows)

    def _print_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        cells = [list(columns), *([_cell(value) for value in row[:_MOST_CELLS]] for row in rows[:_MOST_CELLS])]
        cells[0] = cells[0][:_MOST_CELLS]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["    " + "  ".join(map(str.rjust, row, widths)) for row in cells]
        cut = len(rows) > _MOST_CELLS or len(columns) > _MOST_CELLS
        size = f" ({len(rows)} x {len(columns)}, the first of each)" if cut else ""
        out = sys.stdout if self._stream is None else self._stream
        print("\n".join([f"  {name}{size}", *lines]), file=out, flush=True)

    def _act(self, state: State) -> None:
        self._reported = state.timestamp.batch
        numbers = {}
        for name, value in self._latest.items():
            for prefix, short in _SHOWN.items():
                # Of an ensemble the loss itself has parts: its mean, its spread.
                if name.startswith(prefix) and not (state.members and prefix == "train/loss/"):
                    numbers[short + name.removeprefix(prefix)] = value
                    break
            else:
                if any(fnmatch.fnmatchcase(name, glob) for glob in self._include):
                    numbers[name] = value
        self._print(state, "train", numbers)

    def _print(self, state: State, label: str, values: Mapping[str, MetricValue]) -> None:
        state.check_finite()
        texts = _of_members(values) if state.members else [f"{name} {_value(name, x)}" for name, x in values.items()]
        self._write(state, label, "  ".join(texts))

    def _write(self, state: State, label: str, text: str) -> None:
        t = state.timestamp
        length = t.max_duration
        of = f"/{length.value}" if length is not None and length.unit is TimeUnit.EPOCH else ""
        line = f"epoch {_words.epoch(t)}{of}  batch {t.batch:>6}  {label:<7}  {text}"
        print(line.rstrip(), file=sys.stdout if self._stream is None else self._stream, flush=True)


def _of_members(values: Mapping[str, MetricValue]) -> list[str]:
    """Of each number of an ensemble mean, spread and best in one text.

    >>> _of_members({"loss/mean": 0.5, "loss/spread": 0.125, "loss/best": 0.25, "loss/member/0": 0.25, "lr/mean": 0.1})
    ['loss 0.5000 ±0.1250 (best 0.2500)', 'lr 0.1000']
    """
    texts: dict[str, str] = {}
    for name, value in values.items():
        base, _, kind = name.rpartition("/")
        if kind == "mean":
            texts[base] = f"{base} {_value(base, value)}"
        elif kind == "spread" and base in texts:
            texts[base] += f" ±{_value(base, value)}"
        elif kind == "best" and base in texts:
            texts[base] += f" (best {_value(base, value)})"
        elif "/member/" not in name:
            texts[name] = f"{name} {_value(name, value)}"
    return list(texts.values())


def _cell(value: object) -> str:
    return _words.number(value) if isinstance(value, float) else str(value)


def _value(name: str, value: MetricValue) -> str:
    return _words.rate(float(value)) if name == "samples/s" else _words.number(float(value))
