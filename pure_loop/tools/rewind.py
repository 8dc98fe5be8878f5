"""``pl.rewind``: the stream of a recorded run, from one event of one batch on."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable
from typing import Any, Unpack

from torch import nn

from pure_loop._internal.arguments import check_integer, path_text, refusal
from pure_loop._internal.closing import closing
from pure_loop._internal.lazy import require
from pure_loop._internal.pytree import Batch
from pure_loop._internal.suggestions import passing_on, teaching
from pure_loop.callback import Callback, LoggerGroup, Run
from pure_loop.checkpoint.digests import digest_of, digest_of_batch, has_digest
from pure_loop.checkpoint.flight import Flight, Line, facts_of, journal_loss, read_flight, settings_of
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.settings import listed_callbacks
from pure_loop.errors import ArgumentError, RewindError
from pure_loop.event import Event, as_event
from pure_loop.loop.stream import Stream
from pure_loop.members.ensemble import Ensemble
from pure_loop.state import State
from pure_loop.time import Time, Timestamp

# Those of a batch before it is counted, to which a State that is kept after the batch before leads.
_INSIDE = frozenset(
    {
        *(Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD),
        *(Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
        Event.AFTER_TRAIN_BATCH,
    }
)
_BEFORE = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD})


@teaching
@passing_on(fit)
def rewind(
    folder: str | os.PathLike[str],
    when: str | Time | Timestamp,
    event: Event | str,
    model: nn.Module | Ensemble,
    train_dataloader: Iterable[Batch],
    *,
    occurrence: int = 0,
    **settings: Unpack[FitOptions],
) -> Rewound:
    """The stream of a recorded run from exactly this event on, bit for bit.

    The batches since the nearest kept State are trained again; on the way losses and digests are compared with those of
    the journal. Callbacks and loggers may be others than the run's; they observe the events on the way, too.

    Args:
        folder: of the :class:`pure_loop.callbacks.FlightRecorder`.
        when: ``"3417ba"``: so many batches are finished at the event, as in ``state.timestamp.batch``; ``"2ep"``; a
            timestamp; ``"spike"``: the batch with the loss that rises most over the median of the up to 9 before it;
            ``"worst"``: the first with a loss that is not finite, or else the highest loss among outliers, which are
            above that median by a tenth of it and by ten times the median change of a loss in the up to 30 batches
            before; ``"nonfinite"``: the first with a loss that is not finite, or in which the run ended. Spikes and
            outliers are looked for after the first tenth of the run, because losses begin high.
        event: such as ``"after_loss"``.
        model, train_dataloader: as the run had them, an ensemble too; a State that is kept replaces the model's values.
        occurrence: which of several such events of a batch, from 0: one for each microbatch.
        **settings: the other arguments of :func:`pure_loop.fit`, as the run had them.

    Returns:
        A stream that begins with the event. Its method ``plot("spike.png")`` draws the recorded losses around it.

    Raises:
        ArgumentError: an event that the batch does not have, a batch beyond the end, nothing kept before it; from the
            stream, where only training again shows it.
        ArgumentTypeError: an argument that ``fit`` doesn't have, or one of another type.
        CheckpointNotFoundError: the folder has no record.
        RewindError: ``"spike"`` of losses that never rise, and ``"worst"`` of a run without an outlier; from the
            stream, a loss or a digest that is not that of the journal: other data, settings or versions.

    An example is at :class:`pure_loop.callbacks.FlightRecorder`.
    """
    module: Any = model
    if not isinstance(module, nn.Module | Ensemble):
        calls = (
            "pl.rewind(folder, when, event, model, train_dataloader, ...), or recipe.rewind(model, folder, when, event)"
        )
        raise refusal("model", model, "a torch.nn.Module", "rewind", calls)
    for name in ("load_path", "autoresume"):
        if settings.get(name) is not None:
            raise ArgumentError(f"rewind: {name}= is what the recorded folder stands for: leave it out.")
    occurrence = check_integer("occurrence", occurrence, least=0, where="rewind")
    target = as_event(event, "rewind")
    if target in _BEFORE:
        raise ArgumentError(f"rewind: {target.name} comes before anything is kept; the first event is FIT_START.")
    flight = read_flight(folder)
    batch = flight.batch_of(when, inside=target in _INSIDE)
    start = _nearest(flight, batch, target)
    watch = settings.get("watch")
    if watch is not None:
        settings["watch"] = {*watch, target}
    settings["callbacks"] = [*listed_callbacks(settings.get("callbacks", ())), _Checking(flight)]
    settings["load_path"] = flight.path(start)
    stream = fit(model, train_dataloader, **settings)
    watched = None if watch is None else frozenset(Event(item) for item in watch)
    return Rewound(_pairs_from(stream, target, batch, occurrence, watched), flight, batch - (target not in _INSIDE))


class Rewound(Stream):
    """The stream of :func:`rewind`; it knows the journal of the run."""

    __slots__ = ("_batch", "_flight")

    def __init__(self, pairs: Generator[tuple[Event, State], None, object], flight: Flight, batch: int) -> None:
        super().__init__(pairs)
        self._flight, self._batch = flight, max(batch, 0)

    def plot(self, path: str | os.PathLike[str] | None = None, *, around: int = 100, axes: Any = None) -> Any:
        """Draw the recorded losses around the batch, and the States that are kept; needs the extra ``plot``.

        Args:
            path: of a picture to write, ``"spike.png"``; None: none is written.
            around: how many batches before and after it.
            axes: of matplotlib, to draw on; None: new ones.

        Returns:
            The axes.

        Raises:
            ArgumentError: ``around`` is less than 1.
            MissingExtraError: matplotlib is not installed.
        """
        around = check_integer("around", around, least=1, where="plot")
        if axes is None:
            figure = require("matplotlib.figure", "plot", "rewind(...).plot").Figure
            axes = figure(figsize=(6, 3), layout="constrained").subplots()
        first, last = self._batch - around, self._batch + around
        losses = {line.batch - 1: line.loss for line in self._flight.lines.values() if first <= line.batch - 1 <= last}
        axes.plot(list(losses), list(losses.values()), color="C0", linewidth=1.2, label="loss")
        finite = [loss for loss in losses.values() if math.isfinite(loss)]
        broken = [batch for batch, loss in losses.items() if not math.isfinite(loss)]
        axes.plot(
            broken, [max(finite, default=0.0)] * len(broken), "x", color="C3", label="not finite" if broken else ""
        )
        saved = [batch for batch in self._flight.files if first <= batch <= last]
        axes.plot(saved, [min(finite, default=0.0)] * len(saved), "|", color="0.5", markersize=8, label="kept State")
        axes.axvline(self._batch, color="C3", alpha=0.4, linewidth=4, label=f"batch {self._batch}")
        axes.set(xlabel="batch", ylabel="loss")
        axes.grid(alpha=0.3)
        axes.legend()
        if path is not None:
            axes.figure.savefig(path_text(path))
        return axes


def _nearest(flight: Flight, batch: int, event: Event) -> int:
    """The number of the State from which to train again."""
    if flight.lines and flight.has_ended and event in _INSIDE and batch == max(flight.lines):
        raise ArgumentError(
            f"rewind: {event.name} with {batch} batches finished is in a batch after the end of the run; that of its "
            f'last batch is "{batch - 1}ba": inside a batch it is not counted.'
        )
    if flight.lines and batch > max(flight.lines):
        raise ArgumentError(
            f"rewind: batch {batch} is beyond the end: the journal of {flight.folder} has {max(flight.lines)} batches."
        )
    # A State of FIT_START is from before all events of the first batches, and another from after its own BATCH_END.
    begins = batch in flight.starts and batch == min(flight.files)
    last = batch if event in _INSIDE or event is Event.FIT_START or begins else batch - 1
    before = [number for number in flight.files if number <= last]
    if not before:
        raise ArgumentError(
            f"rewind: no State is kept before {event.name} of batch {batch}; there are those after "
            f"{', '.join(map(str, list(flight.files)[:8])) or 'no'} batches."
        )
    return before[-1]


def _pairs_from(
    stream: Stream, target: Event, batch: int, occurrence: int, watch: frozenset[Event] | None
) -> Generator[tuple[Event, State], None, object]:
    """The pairs of a stream from an event on, and after it those that are watched; None: all."""
    seen = 0
    with closing(iter(stream)) as pairs:
        while True:
            try:
                event, state = next(pairs)
            except StopIteration:
                raise ArgumentError(_missing(target, batch, occurrence, seen)) from None
            if event in _BEFORE or (event is Event.FIT_START and target is not Event.FIT_START):
                continue
            if state.timestamp.batch > batch:
                raise ArgumentError(_missing(target, batch, occurrence, seen))
            if event is target and state.timestamp.batch == batch:
                seen += 1
                if seen > occurrence:
                    break
        yield event, state
        del state
        if watch is None:
            return (yield from pairs)
        for event, state in pairs:
            if event in watch:
                yield event, state
    return None


def _missing(target: Event, batch: int, occurrence: int, seen: int) -> str:
    count = {0: "no", 1: "one"}.get(seen, str(seen))
    return (
        f"rewind: occurrence={occurrence} is counted from 0, and with {batch} batches finished there is {count} "
        f"{target.name}. From BATCH_END on the batch itself is counted, and an evaluation has events where one is due."
    )


class _Checking(Callback):
    """Compares losses and digests with those of a journal."""

    all_ranks = False

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        # Of the batch that was first in the record: its number, and a digest of its tensors.
        self._number, self._digest = flight.facts.get("first_batch", (None, None))
        self._settings: dict[str, object] = {}

    def bind(self, run: Run) -> None:
        self._settings = settings_of(run)

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        line = self._flight.lines.get(state.timestamp.batch)
        if line is None:
            return
        if line.batch == self._number and digest_of_batch(state.batch) != self._digest:
            raise RewindError(self._refusal(line, "its data are other numbers", state))
        value = float(journal_loss(state))
        if value != line.loss and not (value != value and line.loss != line.loss):
            raise RewindError(self._refusal(line, f"its loss is {value!r}, and was {line.loss!r}", state))
        if line.digest is not None and not has_digest(state.params, line.digest):
            digest = digest_of(state.params)
            raise RewindError(
                self._refusal(line, f"its parameters have the digest {digest}, and had {line.digest}", state)
            )

    def _refusal(self, line: Line, what: str, state: State) -> str:
        facts = self._flight.facts
        current = {**facts_of(state), **self._settings}
        changed = [
            f"{name} is {value!r}, and was {facts[name]!r}"
            for name, value in current.items()
            if name in facts and facts[name] != value
        ]
        reason = (
            "; ".join(changed)
            or "what the journal records (versions, model, seed, the length of the data, ...) is the same"
        )
        return (
            f"batch {line.batch - 1} is not that of the recorded run: {what}. {reason[0].upper()}{reason[1:]}. Look "
            "for other data, in another order, other settings, or code that has changed since."
        )
