"""Pictures of schedules: a curve, or a line of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pure_loop._internal.arguments import check_integer
from pure_loop.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from pure_loop.time import Time, Timestamp, TimeUnit, read_time

__all__ = ["plot", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def _values(
    schedule: Callable[[Timestamp], float], duration: str | Time, batches_per_epoch: int | None, most: int | None
) -> tuple[list[int], list[float]]:
    """Batches, and the values for those that start there; at most so many, evenly spread."""
    if not callable(schedule):
        raise ArgumentTypeError(f'{schedule!r} is no schedule: give one of pl.schedules, such as cosine("3ep").')
    length = read_time(duration, "duration")
    if batches_per_epoch is not None:
        check_integer("batches_per_epoch", batches_per_epoch, least=1)
    if length.unit is TimeUnit.EPOCH and batches_per_epoch is not None:
        batches = int(length.value * batches_per_epoch)
    elif length.unit is TimeUnit.BATCH:
        batches = int(length.value)
    else:
        raise ArgumentError(
            f'duration={str(length)!r}: write it in batches, "1000ba", or in epochs with batches_per_epoch=.'
        )
    per_epoch = batches_per_epoch or batches or 1
    count = batches + 1 if most is None else min(most, batches + 1)
    numbers = [round(index * batches / max(1, count - 1)) for index in range(count)]
    values = [
        float(
            schedule(
                Timestamp(
                    epoch=number // per_epoch,
                    batch=number,
                    batch_in_epoch=number % per_epoch,
                    max_duration=length,
                    batches_per_epoch=batches_per_epoch,
                )
            )
        )
        for number in numbers
    ]
    return numbers, values


def plot(
    schedules: Callable[[Timestamp], float] | Mapping[str, Callable[[Timestamp], float]],
    duration: str | Time,
    *,
    batches_per_epoch: int | None = None,
    axes: Any = None,
) -> Any:
    """Draw schedules over the batches of a run; needs the extra ``plot``.

    Args:
        schedules: one, or several by name.
        duration: of the run, in batches, or in epochs with ``batches_per_epoch``.
        batches_per_epoch: for times in epochs.
        axes: of matplotlib, to draw on; None: new ones.

    Returns:
        The axes: ``.figure.savefig("rate.png")``.

    Raises:
        ArgumentError: a duration, where it is not known how many batches it has.
        MissingExtraError: matplotlib is not installed.

    >>> from pure_loop.schedules import cosine
    >>> axes = plot(cosine("1dur", peak=0.1, warmup="10ba"), "100ba")
    >>> axes.get_xlabel()
    'batch'
    """
    named = schedules if isinstance(schedules, Mapping) else {"": schedules}
    curves = {name: _values(schedule, duration, batches_per_epoch, 2000) for name, schedule in named.items()}
    if axes is None:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError(
                "pl.schedules.plot needs matplotlib, which is not installed: pip install 'pure_loop[plot]'"
            ) from error
        axes = Figure(figsize=(6, 3), layout="constrained").subplots()
    for name, (batches, values) in curves.items():
        axes.plot(batches, values, label=name or None)
    axes.set(xlabel="batch", ylabel="value")
    axes.grid(alpha=0.3)
    if isinstance(schedules, Mapping):
        axes.legend()
    return axes


def sparkline(
    schedule: Callable[[Timestamp], float],
    duration: str | Time,
    *,
    batches_per_epoch: int | None = None,
    width: int = 40,
) -> str:
    """A schedule as one line of text, from 0 to its largest value.

    Args:
        schedule: one of ``pl.schedules``, or a function of the timestamp.
        duration: of the run, in batches, or in epochs with ``batches_per_epoch``.
        batches_per_epoch: for times in epochs.
        width: characters.

    >>> from pure_loop.schedules import warmup_stable_decay
    >>> sparkline(warmup_stable_decay("4ba", "16ba", "8ba"), "16ba", width=17)
    '▁▃▅▆█████▇▆▅▅▄▃▂▁'
    """
    check_integer("width", width, least=1)
    values = _values(schedule, duration, batches_per_epoch, width)[1]
    largest = max(map(abs, values)) or 1.0
    return "".join(_BARS[min(7, max(0, round(7 * value / largest)))] for value in values)
