"""The report of a learning-rate range test: losses by rate, suggestions, and a picture."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

import attrs

from pure_loop._internal.arguments import path_text
from pure_loop._internal.lazy import require
from pure_loop.checkpoint.paths import PathLike
from pure_loop.errors import ArgumentError

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_DECAY = 0.7
# On both sides of a point, for the slope of a line through them.
_REACH = 4
_FEWEST = 2 * _REACH
# The smoothed mean of 100 losses that only fluctuate strays over two of their standard deviations.
_ABOVE_NOISE = 3.5


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


@attrs.frozen(eq=False, repr=False)
class RangeTest:
    """What :func:`pl.lr_find <pure_loop.tools.lr_find>` measured; a notebook or a terminal shows the curve.

    Attributes:
        learning_rates: those that were tried, ascending.
        losses: of each rate, the loss of the batch after the step at it.
        initial_loss: that of the first batch, before any step.
        diverged: whether the loss exploded before the last rate.

    >>> rates = [10 ** (power / 10) for power in range(-40, 1)]
    >>> test = RangeTest(rates, [1 / (1 + 100 * rate) for rate in rates], 1.0, False)
    >>> f"{test.suggestion:.3f}"
    '0.010'
    >>> test
    lr_find: 41 learning rates, from 0.0001 to 1
      █████████▇▇▇▇▇▆▆▆▆▅▅▅▄▄▃▃▃▃▂▂▂▂▂▁▁▁▁▁▁▁▁▁
      suggestion        0.01  where the loss falls fastest
      tenth_of_minimum  0.1   a tenth of the rate with the lowest loss
    """

    learning_rates: tuple[float, ...] = attrs.field(converter=_floats)
    losses: tuple[float, ...] = attrs.field(converter=_floats)
    initial_loss: float
    diverged: bool

    @property
    def smoothed(self) -> tuple[float, ...]:
        """The losses, smoothed from both sides, so that no feature moves to a higher rate.

        Losses above the first one by more than the best one is below it are cut there: a curve that explodes at its end
        would hide where it falls.
        """
        if not self.losses:
            return ()
        ceiling = 2 * self.initial_loss - min(*self.losses, self.initial_loss)
        cut = [min(loss, ceiling) for loss in self.losses]
        forwards, backwards = _running_mean(cut), _running_mean(cut[::-1])[::-1]
        return tuple((a + b) / 2 for a, b in zip(forwards, backwards, strict=True))

    @property
    def suggestion(self) -> float:
        """The rate at which the smoothed loss falls fastest, by the logarithm of the rate.

        Raises:
            ArgumentError: the loss does not fall by more than it fluctuates, or there are too few losses.
        """
        smoothed, lowest = self.smoothed, self._lowest()
        slopes = [_slope(self.learning_rates, smoothed, index) for index in range(lowest + 1)]
        steepest = min(range(len(slopes)), key=slopes.__getitem__)
        if slopes[steepest] >= 0:
            raise self._no_fall()
        return self.learning_rates[steepest]

    @property
    def tenth_of_minimum(self) -> float:
        """A tenth of the rate with the lowest smoothed loss: further from where training diverges.

        Raises:
            ArgumentError: the loss does not fall by more than it fluctuates, or there are too few losses.
        """
        return self.learning_rates[self._lowest()] / 10

    def _lowest(self) -> int:
        """The index of the lowest smoothed loss."""
        smoothed = self.smoothed
        lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
        if lowest == 0 or len(smoothed) < _FEWEST:
            raise self._no_fall()
        # Between neighbours, which no fall over many rates moves far apart; of normal noise half differ by more.
        noise = median(abs(a - b) for a, b in pairwise(self.losses[: lowest + 1])) / 0.954
        if max(self.initial_loss, *smoothed[:lowest]) - smoothed[lowest] <= _ABOVE_NOISE * noise:
            raise self._no_fall()
        return lowest

    def _no_fall(self) -> ArgumentError:
        tried = f"{len(self.losses)} learning rates"
        if len(self.losses) < _FEWEST and self.diverged:
            return ArgumentError(
                f"lr_find diverged after {tried}, so there is no suggestion: begin lower, lowest=1e-10."
            )
        return ArgumentError(
            f"the loss does not fall by more than it fluctuates, over {tried} up to {self.learning_rates[-1]:g}, so "
            "there is no suggestion: look at .plot(), and try a higher highest=, more steps=, or larger batches."
        )

    def plot(self, path: PathLike | None = None, *, axes: Any = None) -> Any:
        """Draw the losses over the learning rates, with the suggestions; needs the extra ``plot``.

        Args:
            path: of a picture to write, ``"lr.png"``; None: none is written.
            axes: of matplotlib, to draw on; None: new ones.

        Returns:
            The axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        if axes is None:
            figure = require("matplotlib.figure", "plot", "RangeTest.plot").Figure
            axes = figure(figsize=(6, 3.5), layout="constrained").subplots()
        axes.plot(self.learning_rates, self.losses, color="0.8", linewidth=1)
        axes.plot(self.learning_rates, self.smoothed, color="C0")
        for name, color, marker in (("suggestion", "C3", "o"), ("tenth_of_minimum", "C2", "s")):
            rate = self._or_none(name)
            if rate is not None:
                loss = _between(self.learning_rates, self.smoothed, rate)
                axes.plot([rate], [loss], marker, color=color, label=f"{name} {rate:.2g}")
        drawn = (*self.smoothed, self.initial_loss, min(self.losses))
        margin = 0.1 * (max(drawn) - min(drawn)) or 1.0
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(min(drawn) - margin, max(drawn) + margin))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        if path is not None:
            axes.figure.savefig(path_text(path))
        return axes

    def _or_none(self, name: str) -> float | None:
        try:
            return float(getattr(self, name))
        except ArgumentError:
            return None

    def _repr_png_(self) -> bytes | None:
        """The picture, for notebooks; None, so that they show the text, where there is no loss or no matplotlib."""
        if not self.losses or find_spec("matplotlib") is None:
            return None
        picture = io.BytesIO()
        self.plot().figure.savefig(picture, format="png", dpi=150)
        return picture.getvalue()

    def __repr__(self) -> str:
        if not self.losses:
            return "lr_find: the loss diverged at the first learning rate"
        rates = self.learning_rates
        head = f"lr_find: {len(rates)} learning rates, from {rates[0]:.2g} to {rates[-1]:.2g}"
        lines = [head + (", where the loss diverged" if self.diverged else ""), f"  {_bars(self.smoothed)}"]
        suggestions = [
            ("suggestion", "where the loss falls fastest"),
            ("tenth_of_minimum", "a tenth of the rate with the lowest loss"),
        ]
        suggested = {name: self._or_none(name) for name, _ in suggestions}
        if None in suggested.values():
            why_not = textwrap.wrap(str(self._no_fall()), 78, break_on_hyphens=False)
            return "\n".join([*lines, *(f"  {line}" for line in why_not)])
        written = {name: f"{rate:.2g}" for name, rate in suggested.items()}
        width = max(map(len, written.values()))
        return "\n".join([*lines, *(f"  {name:<16}  {written[name]:<{width}}  {text}" for name, text in suggestions)])


def _running_mean(values: Sequence[float]) -> list[float]:
    """An exponential mean of what came so far, unbiased.

    >>> _running_mean([2.0, 2.0])
    [2.0, 2.0]
    """
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = _DECAY * total + value, _DECAY * weight + 1
        result.append(total / weight)
    return result


def _slope(rates: Sequence[float], losses: Sequence[float], index: int) -> float:
    """That of a line through the points around one, over the logarithm of the rate."""
    near = range(max(0, index - _REACH), min(len(rates), index + _REACH + 1))
    xs, ys = [math.log(rates[i]) for i in near], [losses[i] for i in near]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    above = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / math.fsum((x - mean_x) ** 2 for x in xs)


def _between(rates: Sequence[float], losses: Sequence[float], rate: float) -> float:
    """The loss at a rate; that of the nearest one where it was not tried."""
    return losses[min(range(len(rates)), key=lambda index: abs(math.log(rates[index] / rate)))]


def _bars(losses: Sequence[float]) -> str:
    """A curve as one line of text, from its lowest to its highest value."""
    count = min(_WIDTH, len(losses))
    picked = [losses[round(index * (len(losses) - 1) / max(1, count - 1))] for index in range(count)]
    low, high = min(picked), max(picked)
    return "".join(_BARS[round(7 * (loss - low) / ((high - low) or 1.0))] for loss in picked)
