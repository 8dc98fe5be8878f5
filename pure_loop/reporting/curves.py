"""Curves as SVG, a chart for the names that end alike: of many numbers the mean and the range at each place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape

import attrs

from pure_loop._text import one_line
from pure_loop.progress.words import cut
from pure_loop.reporting.record import Record, Series

# Of the picture and of its plot, in units that are about pixels.
_WIDTH, _HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 410, 12, 194
# Lines that are told apart in a chart; of all charts together: lines, stretches, and points.
_COLOURS, _LINES, _STRETCHES, _POINTS = 5, 60, 3200, 600
# Letters of a name.
_LONGEST = 80


def number_text(value: float) -> str:
    """A number in five digits.

    >>> number_text(0.123456), number_text(3.0), number_text(float("nan")), number_text(float("-inf"))
    ('0.12346', '3', 'NaN', '-∞')
    """
    return f"{value:.5g}".replace("nan", "NaN").replace("inf", "∞")


def text(value: object, longest: int = 400) -> str:
    """A text as HTML, without control characters and, of a long one, without its middle."""
    return escape(one_line(cut(str(value), longest)))


def charts(record: Record) -> tuple[list[str], int]:
    """The charts of a record as HTML, and how many of its names they leave out."""
    groups: dict[str, list[str]] = {}
    for name in record.series:
        base, _, part = name.partition("/member/")
        if not (part and base in record.series):  # of an ensemble a band has all of them
            groups.setdefault(_subject(name, record), []).append(name)
    # Losses first, then what is measured of more than one set of data.
    ordered = sorted(groups, key=lambda subject: (subject != "loss", len(groups[subject]) == 1))
    drawn = [(subject, name) for subject in ordered for name in groups[subject]][:_LINES]
    first = min(record.series[name].batches[0] for _, name in drawn)
    last = max(record.series[name].batches[-1] for _, name in drawn)
    # All charts have one axis, from 0 on but for a record that begins late.
    x = Axis.of([first if first > last / 10 else 0, max(last, 1)], _LEFT, _RIGHT)
    scale = Scale(x, max(30, min(240, _STRETCHES // len(drawn))), min(40, _POINTS // len(drawn)))
    parts: list[str] = []
    for subject, pairs in itertools.groupby(drawn, key=lambda pair: pair[0]):
        names = [name for _, name in pairs]
        parts += (
            _chart(subject, names[begin : begin + _COLOURS], record, scale) for begin in range(0, len(names), _COLOURS)
        )
    return parts, len(record.series) - len(drawn)


def _subject(name: str, record: Record) -> str:
    """What a name is of, without the data: ``"loss"`` of ``"val/loss"`` and ``"train/loss"``."""
    base = name.removesuffix("/best")
    if base in record.series and record.series[base].spread is not None:
        name = base
    return name.removeprefix("eval/").partition("/")[2] or name


@attrs.frozen
class Axis:
    """From a number to its place.

    Attributes:
        low: the least number.
        high: the largest.
        begin: the place of the least.
        end: the place of the largest.
        is_log: whether powers of ten are at equal distances.
    """

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float], begin: float, end: float, *, may_be_log: bool = False) -> Axis:
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
        if may_be_log and low > 0 and high / 1000 > low:
            return cls(math.log10(low), math.log10(high), begin, end, is_log=True)
        if low == high:
            margin = abs(low) / 20 or 1.0
            low, high = low - margin, high + margin
        # No sum of two numbers that are finite may be infinite.
        return cls(max(low, -1e308), min(high, 1e308), begin, end)

    def place(self, number: float) -> float:
        number = math.log10(number) if self.is_log else number
        share = (number / 2 - self.low / 2) / (self.high / 2 - self.low / 2 or 1.0)
        return self.begin + min(max(share, 0.0), 1.0) * (self.end - self.begin)

    def ticks(self, *, whole: bool = False) -> list[float]:
        """Round numbers on the axis, at most six."""
        half = self.high / 2 - self.low / 2
        size = 10.0 ** math.floor(math.log10(half / 2)) if half > 1e-300 else 0.0
        step = next((size * factor for factor in (1, 2, 2.5, 5) if half <= 3 * size * factor), size * 10)
        step = max(round(step), 1) if whole or self.is_log else step
        if not step:
            return [self.low]
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        numbers = [count * step for count in range(first, min(last, first + 6) + 1)]
        return [10.0**number for number in numbers] if self.is_log else numbers


@attrs.frozen
class Scale:
    """What all charts have alike.

    Attributes:
        x: the axis of batches.
        stretches: of a line, at most.
        points: of a line whose every value is shown under the pointer, at most.
    """

    x: Axis
    stretches: int
    points: int


@attrs.frozen
class Stretch:
    """Numbers that are drawn at one place: of batches beside each other.

    Attributes:
        batch: the first.
        low, mean, high: of the finite ones.
        lost: those that are not finite.
        count: how many are finite.
    """

    batch: int
    low: float
    mean: float
    high: float
    lost: tuple[float, ...]
    count: int


def stretches(series: Series, most: int) -> list[Stretch]:
    """The numbers in at most so many stretches, each for itself where there are no more; a spread widens them.

    >>> [(part.batch, part.low, part.high) for part in stretches(Series([1, 2, 3, 4], [4.0, 1.0, 2.0, 3.0]), 2)]
    [(1, 1.0, 4.0), (3, 2.0, 3.0)]
    """
    count = len(series.batches)
    first, length = (series.batches[0], series.batches[-1] - series.batches[0] + 1) if count else (0, 1)
    groups: dict[int, tuple[int, list[float]]] = {}
    for place, (batch, value) in enumerate(zip(series.batches, series.values, strict=True)):
        key = place if count <= most else (batch - first) * most // length
        groups.setdefault(key, (batch, []))[1].append(value)
    spreads = {} if series.spread is None else dict(zip(series.spread.batches, series.spread.values, strict=True))
    parts = []
    for batch, values in groups.values():
        finite = [value for value in values if math.isfinite(value)]
        low, high = min(finite, default=math.nan), max(finite, default=math.nan)
        # Of numbers whose sum may be infinite.
        mean = min(max(sum(value / len(finite) for value in finite), low), high)
        lost = tuple(value for value in values if not math.isfinite(value))
        around = spreads.get(batch, 0.0)
        around = around if math.isfinite(around) else 0.0
        parts.append(Stretch(batch, low - around, mean, high + around, lost, len(finite)))
    return parts


def _chart(subject: str, names: Sequence[str], record: Record, scale: Scale) -> str:
    lines = {name: stretches(record.series[name], scale.stretches) for name in names}
    parts = [part for line in lines.values() for part in line]
    numbers = [number for part in parts if part.count for number in (part.low, part.high)]
    y = Axis.of(numbers, _BOTTOM, _TOP, may_be_log=True)
    inner = [
        *_grid(scale.x, y),
        *(shape for number, name in enumerate(names) for shape in _line(number, name, lines[name], scale, y, record)),
    ]
    head = f"{cut(subject, _LONGEST)}{' (logarithmic)' if y.is_log else ''}"
    return (
        f'<figure><figcaption><h3>{text(head)}</h3><ul class="legend">{"".join(_legend(names, record))}</ul>'
        f'</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{text(head)}</title>'
        f"<desc>{text(_in_words(names, record), 1000)}</desc>{''.join(inner)}</svg></figure>"
    )


def _in_words(names: Sequence[str], record: Record) -> str:
    """What a chart shows, for those that read it by ear."""
    sentences = []
    for name in names:
        series, pairs = record.series[name], record.series[name].finite
        lowest, highest = min(pairs, default=None), max(pairs, default=None)
        last = f"{number_text(series.values[-1])} at batch {series.batches[-1]}"
        between = f", between {number_text(lowest[0])} and {number_text(highest[0])}" if lowest and highest else ""
        sentences.append(f"{cut(name, _LONGEST)}: {len(series.values)} values, the last {last}{between}")
    return "; ".join(sentences)


def _legend(names: Sequence[str], record: Record) -> Iterator[str]:
    for number, name in enumerate(names):
        swatch = f'<svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path class="line c{number}" d="M1 4h22"/>'
        yield f"<li>{swatch}</svg>{text(name, _LONGEST)} <b>{number_text(record.series[name].values[-1])}</b></li>"


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    for number in y.ticks():
        place = f"{y.place(number):.1f}"
        yield f'<path class="grid" d="M{_LEFT} {place}H{_RIGHT}"/>'
        yield f'<text x="{_LEFT - 6}" y="{place}" dy=".32em" text-anchor="end">{number:.4g}</text>'
    for number in x.ticks(whole=True):
        middle, label = x.place(number), _counted(int(number))
        anchor = "end" if middle > _RIGHT - 12 else "middle"
        yield f'<text x="{middle:.1f}" y="{_BOTTOM + 17}" text-anchor="{anchor}">{label}</text>'


def _counted(number: int) -> str:
    """A round number of batches, in few letters."""
    for size, suffix in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * size:
            return f"{number / size:g}{suffix}"
    return f"{number:,}"


def _line(number: int, name: str, parts: Sequence[Stretch], scale: Scale, y: Axis, record: Record) -> Iterator[str]:
    band: list[str] = []
    path: list[str] = []
    x, name, best = scale.x, cut(name, _LONGEST), None if name.startswith("train/") else record.best(name)
    for run in _unbroken(parts):
        if any(part.low < part.high for part in run):
            edge = [(part.batch, part.high) for part in run] + [(part.batch, part.low) for part in reversed(run)]
            band.append("M" + "L".join(_at(x, y, *pair) for pair in edge) + "z")
        path.append("M" + "L".join(_at(x, y, part.batch, part.mean) for part in run) + ("h0" if len(run) == 1 else ""))
    if band:
        yield f'<path class="band c{number}" d="{"".join(band)}"/>'
    yield f'<path class="line c{number}" d="{"".join(path)}"/>'
    if sum(part.count for part in parts) <= scale.points:
        for part in parts:
            if part.count == 1:
                yield _point(f"point c{number}", x, y, part.batch, part.mean, f"{name}: {number_text(part.mean)}")
    for part in parts:
        if part.lost:
            place = _BOTTOM if part.lost[0] == -math.inf else _TOP
            about = f"{name}: {number_text(part.lost[0])} at batch {part.batch}"
            at = f"M{x.place(part.batch) - 3:.1f} {place - 3}l6 6m0-6l-6 6"
            yield f'<path class="lost" d="{at}"><title>{text(about)}</title></path>'
    if best is not None:
        yield _point(f"best c{number}", x, y, best[1], best[0], f"{name}: the best, {number_text(best[0])}")


def _unbroken(parts: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches between those without a number."""
    run: list[Stretch] = []
    for part in parts:
        if part.count:
            run.append(part)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _at(x: Axis, y: Axis, batch: float, number: float) -> str:
    return f"{x.place(batch):.1f} {y.place(number):.1f}"


def _point(kind: str, x: Axis, y: Axis, batch: int, number: float, about: str) -> str:
    centre = f'cx="{x.place(batch):.1f}" cy="{y.place(number):.1f}"'
    radius = 5 if kind.startswith("best") else 2.6
    return f'<circle class="{kind}" {centre} r="{radius}"><title>{text(f"{about} at batch {batch}")}</title></circle>'
