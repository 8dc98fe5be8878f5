"""The record of a run: its numbers by name, its settings, its checkpoints, and what they say of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pure_loop.algorithms._monitored import known_mode
from pure_loop.checkpoint.finding import Found
from pure_loop.checkpoint.flight import Flight
from pure_loop.errors import TimeFormatError
from pure_loop.time import Time, TimeUnit

TRAIN_LOSS = "train/loss"
# The seconds of a time that has a year of four digits; a file that was changed may have any.
_LATEST = 2e11


@attrs.define
class Series:
    """The numbers of one name, in the order of batches.

    Attributes:
        batches: how many had ended, for each number.
        values: the numbers; NaN and infinities stay.
        epochs: how many had ended; None: not recorded.
        spread: of the means of an ensemble, the standard deviation over its members at each batch.
    """

    batches: list[int] = attrs.field(factory=list)
    values: list[float] = attrs.field(factory=list)
    epochs: list[int | None] = attrs.field(factory=list)
    spread: Series | None = None

    def add(self, batch: int, value: float, epoch: int | None) -> None:
        """Add a number. One of an earlier batch is of a run that resumed there, and replaces what came after."""
        if self.batches and batch < self.batches[-1]:
            place = bisect_left(self.batches, batch)
            del self.batches[place:], self.values[place:], self.epochs[place:]
        self.batches.append(batch)
        self.values.append(value)
        self.epochs.append(epoch)

    @property
    def finite(self) -> list[tuple[float, int]]:
        """The finite numbers, each with its batch."""
        return [pair for pair in zip(self.values, self.batches, strict=True) if math.isfinite(pair[0])]

    def within(self, first: int, last: int) -> list[float]:
        """The numbers after one batch, until another one."""
        begin, end = (bisect_left(self.batches, batch + 1) for batch in (first, last))
        return self.values[begin:end]


@attrs.frozen
class CheckpointEntry:
    """A checkpoint of the folder.

    Attributes:
        name: relative to the folder.
        size: in bytes.
        header: what is compared of it; None: it can't be read.
        epoch: how many had ended.
        error: why it can't be read.
    """

    name: str
    size: int
    header: Found | None = None
    epoch: int = 0
    error: str = ""


@attrs.frozen
class Span:
    """An epoch.

    Attributes:
        number: from 1.
        first: how many batches had ended before it.
        last: how many had ended at its end, or at the last that is recorded of it.
    """

    number: int
    first: int
    last: int


@attrs.define
class Record:
    """What is known of a run.

    Attributes:
        series: numbers by name.
        settings: hyperparameters by name.
        environment: the versions by package, each that was seen.
        checkpoints: those of the folder, the furthest on first.
        flight: of a FlightRecorder; None: there is none.
        names: where each name of a run was found.
        sources: what was read, in words.
        problems: what could not be read, in words.
        times: the first and the last second since 1970 at which something was recorded.
    """

    series: dict[str, Series] = attrs.field(factory=dict)
    settings: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, list[str]] = attrs.field(factory=dict)
    checkpoints: list[CheckpointEntry] = attrs.field(factory=list)
    flight: Flight | None = None
    names: dict[str, str] = attrs.field(factory=dict)
    sources: list[str] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)
    times: tuple[float, float] | None = None

    @property
    def last_batch(self) -> int:
        ends = [series.batches[-1] for series in self.series.values() if series.batches]
        return max([*ends, *(entry.header.batch for entry in self.checkpoints if entry.header)], default=0)

    @property
    def seconds(self) -> float | None:
        """How long training took; None: not recorded."""
        spent = [entry.header.seconds for entry in self.checkpoints if entry.header]
        if self.flight is not None:
            spent.append(sum(line.seconds for line in self.flight.lines.values()))
        if not any(spent) and self.times is not None:
            spent.append(self.times[1] - self.times[0])
        return max((seconds for seconds in spent if 0 < seconds < _LATEST), default=None)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The batches of training, counted from 1, and their losses."""
        if self.flight is not None and self.flight.lines:
            return [(line.batch, line.loss) for line in self.flight.lines.values()]
        series = self.series.get(TRAIN_LOSS, Series())
        return list(zip(series.batches, series.values, strict=True))

    @property
    def epochs(self) -> list[Span]:
        """By the numbers of training; where there are none, by those of evaluations, which come after an epoch."""
        of_training = [series for name, series in self.series.items() if name.startswith("train/")]
        ends: dict[int, int] = {}
        for series in of_training or self.series.values():
            for batch, epoch in zip(series.batches, series.epochs, strict=True):
                if epoch is not None:
                    number = epoch + bool(of_training)
                    ends[number] = max(ends.get(number, 0), batch)
        spans: list[Span] = []
        for number in sorted(ends):
            first = spans[-1].last if spans else 0
            if ends[number] > first:
                spans.append(Span(number, first, ends[number]))
        return spans

    @property
    def max_duration(self) -> str | None:
        text = self.settings.get("max_duration")
        return text if isinstance(text, str) else None

    @property
    def fraction(self) -> float | None:
        """Of the duration, how much is done; None: that isn't known."""
        if self.flight is not None and self.flight.has_ended:
            return 1.0
        try:
            time = Time.parse(self.max_duration or "")
        except TimeFormatError:
            return None
        epochs = [epoch for series in self.series.values() for epoch in series.epochs[-1:] if epoch is not None]
        ended = max([*epochs, *(entry.epoch for entry in self.checkpoints)], default=0)
        if time.unit is TimeUnit.EPOCH and ended >= time.value:
            return 1.0
        spans, facts = self.epochs, {} if self.flight is None else self.flight.facts
        per_epoch = facts.get("batches_per_epoch")
        if per_epoch is None and len(spans) > 1 and (len(spans) > 2 or spans[0].number == 1):
            per_epoch = spans[-2].last - spans[-2].first  # the last one may go on, and a record may begin in another
        of_unit = {TimeUnit.BATCH: 1, TimeUnit.EPOCH: per_epoch}.get(time.unit)
        batches = time.value * of_unit if isinstance(of_unit, int) else 0
        return min(self.last_batch / batches, 1.0) if batches else None

    def mode(self, name: str) -> str | None:
        """Whether the best of a metric is the largest, as a checkpoint or its name says; None: neither does."""
        noted = (entry.header.mode for entry in self.checkpoints if entry.header and entry.header.metric == name)
        return next(noted, None) or known_mode(name.partition("/")[2])

    def best(self, name: str) -> tuple[float, int] | None:
        """The best number of a metric, and its first batch; None: there is none, or which is better isn't known."""
        mode, pairs = self.mode(name), self.series[name].finite
        if mode is None or not pairs:
            return None
        return min(pairs, key=lambda pair: pair[0] if mode == "min" else -pair[0])

    def marks(self, entry: CheckpointEntry) -> list[str]:
        """What a checkpoint is among those of the folder: the newest, the best of its metric."""
        if entry.header is None:
            return []
        newest = max(item.header.progress for item in self.checkpoints if item.header)
        marks = ["newest"] if entry.header.progress == newest else []
        metric, mode = entry.header.metric, entry.header.mode
        scores = [item.header.score for item in self.checkpoints if item.header and item.header.metric == metric]
        numbers = [score for score in scores if score is not None]
        if mode is not None and numbers and entry.header.score == (min(numbers) if mode == "min" else max(numbers)):
            marks.append("best")
        return marks

    def fold_members(self) -> None:
        """Of an ensemble let the mean stand for a name, ``train/loss`` for ``train/loss/mean``; members come last."""
        folded: dict[str, Series] = {}
        for name, series in self.series.items():
            base, _, last = name.rpartition("/")
            if not {f"{base}/mean", f"{base}/spread"} <= self.series.keys() or base in self.series:
                folded[name] = series
            elif last == "mean":
                folded[base] = attrs.evolve(series, spread=self.series[f"{base}/spread"])
            elif last != "spread":
                folded[name] = series
        self.series = dict(sorted(folded.items(), key=lambda pair: "/member/" in pair[0]))

    # What readers add.

    def is_empty(self) -> bool:
        return not (self.sources or self.problems)

    def saw(self, name: str, version: object) -> None:
        seen = self.environment.setdefault(name, [])
        if version is not None and str(version) not in seen:
            seen.append(str(version))

    def timed(self, seconds: object) -> None:
        if isinstance(seconds, int | float) and 0 <= seconds < _LATEST:
            first, last = self.times or (seconds, seconds)
            self.times = min(first, seconds), max(last, seconds)

    def add(self, series: Mapping[str, Series], sources: Sequence[str]) -> None:
        """Add the numbers of names that no source before has."""
        self.series = {**series, **self.series}
        self.sources += sources
