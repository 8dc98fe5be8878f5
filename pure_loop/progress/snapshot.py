"""What there is to show at one moment, and its parts as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from pure_loop.progress import words as _words
from pure_loop.progress.estimate import Inside

__all__ = ["Part", "Snapshot", "side_by_side", "that_fit"]

_GAP = 2


@attrs.frozen
class Part:
    """A part of a line, which is shown whole or not at all.

    Attributes:
        text: the text.
        rank: its importance: of two parts that don't fit, the one with the larger number is left out.
        style: of rich.
    """

    text: str
    rank: int = 0
    style: str = ""


@attrs.frozen(kw_only=True)
class Snapshot:
    """What there is to show at one moment.

    Attributes:
        title: what runs.
        epoch: which epoch of how many, ``"epoch 1/2"``; empty outside training.
        batch: which batch of how many, ``"batch 3/20"``.
        inside: the evaluation under way.
        fraction: how much of it is done, in [0, 1]; None where that is not known.
        speed: samples a second; None before it is known.
        left: seconds until the end; None before it is known.
        spent: seconds since the start.
        ending: how it ended; empty while it runs.
    """

    title: str
    epoch: str = ""
    batch: str = ""
    inside: Inside | None = None
    fraction: float | None
    speed: float | None
    left: float | None
    spent: float
    ending: str = ""

    @property
    def place(self) -> str:
        """Epoch and batch; in an evaluation, its batch."""
        if self.inside is None or not self.epoch:
            return "  ".join(filter(None, (self.epoch, self.batch)))
        return f"evaluating {self.inside.label}, {batch_of(self.inside.batch, self.inside.batches)}"

    @property
    def percent(self) -> str:
        return percent(self.fraction)

    @property
    def rate(self) -> str:
        return "" if self.speed is None else f"{_words.rate(self.speed)} samples/s"

    @property
    def time(self) -> str:
        return self.times[0]

    @property
    def times(self) -> tuple[str, ...]:
        """The time, and how it ended, in words; then shorter."""
        if self.ending:
            spent = _words.clock(self.spent)
            word = self.ending.partition(":")[0]
            return f"{self.ending}, {spent}", f"{word}, {spent}", word, spent
        return (time_left(self.left, self.spent),)

    def measured(self, values: Mapping[str, float], longest: int | None = None) -> list[list[str]]:
        """The loss and the speed, then each evaluation: ``[["loss 0.25", "1.2k samples/s"], ["val: loss 0.3"]]``.

        Args:
            values: by name, ``"val/loss"``.
            longest: how long a name may be; None: as long as it is.
        """
        groups: dict[str, list[str]] = {}
        for name, value in values.items():
            label, _, metric = name.rpartition("/")
            metric = metric if longest is None else _words.cut(metric, longest)
            groups.setdefault(label, []).append(f"{metric} {_words.number(value)}")
        if self.speed is not None:
            groups = {"": [*groups.pop("", []), self.rate], **groups}
        for label, texts in groups.items():
            if label:
                texts[0] = f"{label if longest is None else _words.cut(label, longest)}: {texts[0]}"
        return list(groups.values())


def batch_of(batch: int, batches: int | None) -> str:
    """
    >>> batch_of(3, 20), batch_of(3, None)
    ('batch  3/20', 'batch 3')
    """
    return f"batch {batch}" if batches is None else f"batch {str(batch).rjust(len(str(batches)))}/{batches}"


def percent(fraction: float | None) -> str:
    # Rounded down: 100% is the end and nothing before it.
    return "" if fraction is None else f"{int(100 * fraction + 1e-9)}%"


def time_left(left: float | None, spent: float) -> str:
    return _words.clock(spent) if left is None else f"{_words.clock(left)} left"


def that_fit(parts: Iterable[Part], width: int) -> list[Part]:
    """The most important parts, as many as fit beside each other.

    >>> parts = Part("epoch 1/2", 1), Part("batch 30/60", 2), Part("50%", 0)
    >>> [part.text for part in that_fit(parts, width=16)]
    ['epoch 1/2', '50%']
    """
    kept = [part for part in parts if part.text]
    while kept and width_of(kept) > width:
        kept.remove(max(kept, key=lambda part: part.rank))
    return kept


def width_of(parts: Sequence[Part]) -> int:
    return sum(len(part.text) for part in parts) + _GAP * (len(parts) - 1)


def side_by_side(groups: Iterable[Sequence[str]], width: int) -> list[str]:
    """Groups of texts in lines of at most a width; a group that is wider is split, and a text that is wider left out.

    >>> side_by_side([["loss 1.0", "9 samples/s"], ["val: loss 2.0", "accuracy 0.5"]], width=24)
    ['loss 1.0  9 samples/s', 'val: loss 2.0', 'accuracy 0.5']
    """
    lines: list[str] = []
    for group in groups:
        whole = "  ".join(group)
        for gap, text in [("   ", whole)] if len(whole) <= width else [("  ", text) for text in group]:
            if len(text) > width:
                continue
            if lines and len(lines[-1]) + len(gap) + len(text) <= width:
                lines[-1] += gap + text
            else:
                lines.append(text)
    return lines
