"""Progress: a bar around a stream, which passes on the same pairs and touches nothing.

``pl.progress(stream)`` is a generator between the stream and the loop's body. It looks at the end of
batches and at evaluations, redraws by the clock, has no thread, and never waits for the device while
training runs: values are copied behind the computation and shown when they have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TextIO

from pure_loop._internal.arguments import check_number, refusal
from pure_loop.distributed.parallel import rank
from pure_loop.event import Event
from pure_loop.loop.recorder import is_scalar
from pure_loop.loop.stream import Stream, pairs_of, refuse_no_stream
from pure_loop.progress.device_reads import Reading, on_cpu
from pure_loop.progress.screens import Screen, Snapshot, screen_for
from pure_loop.progress.words import epoch as epoch_number
from pure_loop.state import State
from pure_loop.time import Timestamp, TimeUnit

__all__ = ["progress"]

Pairs = Generator[tuple[Event, State], None, None]


def progress(
    stream: Iterable[tuple[Event, State]],
    *,
    description: str | None = None,
    refresh_seconds: float = 0.1,
    file: TextIO | None = None,
) -> Stream:
    """Pass on the pairs of a stream, and show how far it is.

    A bar in a terminal (with the extra ``pure_loop[progress]``) and in a notebook; elsewhere a plain line about every
    10 seconds, at every end of an epoch and for every evaluation. What the loop's body prints appears above the bar.
    When the loop is left or raises, the bar stays as it was, says so, and the stream is closed. Of several ranks the
    first one alone draws.

    Args:
        stream: what ``fit``, ``evaluate``, ``predict`` or ``drive`` gave.
        description: what stands before it; None: ``train``, ``evaluate`` or ``predict``.
        refresh_seconds: the shortest time between two drawings.
        file: where to; None: standard error, or the notebook.

    Raises:
        ArgumentTypeError, ArgumentError: an argument that can't be used.
        MissingExtraError: there is a terminal, and rich, which draws in it, is not installed.

    >>> import sys, torch, pure_loop as pl
    >>> data = [(torch.zeros(4, 2), torch.ones(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1, bias=False), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> for event, state in progress(stream, file=sys.stdout):
    ...     pass
    train  epoch 1/2  batch 3/6  50%  loss 1.000  ... samples/s  0:00 left
    train  epoch 2/2  batch 6/6  100%  loss 1.000  ... samples/s  0:00
    train  epoch 2/2  batch 6/6  100%  loss 1.000  ... samples/s  done, 0:00
    """
    refuse_no_stream(stream, "pl.progress")
    if description is not None and not isinstance(description, str):
        raise refusal("description", description, "a text", "progress")
    refresh_seconds = check_number(
        "refresh_seconds", refresh_seconds, least=0, wanted="a finite number of seconds, 0 or more"
    )
    if file is not None and not hasattr(file, "write"):
        raise refusal("file", file, "an open text file, such as sys.stdout, or None", "progress")
    if rank() > 0:
        return Stream(_unseen(stream))
    return Stream(_pass_on(stream, _Tracker(screen_for(file), description, refresh_seconds)))


def _unseen(stream: Iterable[tuple[Event, State]]) -> Pairs:
    """Of several ranks the first one draws."""
    try:
        yield from pairs_of(stream, "pl.progress")
    finally:
        if isinstance(stream, Generator):
            stream.close()


def _pass_on(stream: Iterable[tuple[Event, State]], tracker: _Tracker) -> Pairs:
    looks = tracker.looks()

    def look(pair: tuple[Event, State]) -> tuple[Event, State]:
        at = looks.get(pair[0])
        if at is not None:
            at(pair[1])
        return pair

    try:
        # No variable of this generator has the State while the loop's body does, which would cost the next step a copy.
        yield from map(look, pairs_of(stream, "pl.progress"))
        tracker.finish("done")
    except GeneratorExit:
        tracker.finish("stopped")
        raise
    except BaseException as error:
        tracker.finish("interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {type(error).__name__}")
        raise
    finally:
        try:
            tracker.screen.close()
        finally:
            if isinstance(stream, Generator):
                stream.close()


class _Tracker:
    """What is known of a stream, and when to show it."""

    def __init__(
        self,
        screen: Screen,
        description: str | None,
        refresh_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.screen = screen
        self._description = description
        self._refresh, self._period = refresh_seconds, max(refresh_seconds, screen.seconds)
        self._last_epoch: int | None = None
        self._clock = clock
        self._begun = clock()
        self._look_at, self._draw_at = self._begun, self._begun + (0.0 if screen.live else self._period)
        self._waiting: deque[tuple[Snapshot, Reading]] = deque()
        self._shown: dict[str, float] = {}
        self._title = "train"
        self._timestamp: Timestamp | None = None
        self._loss: Any = None
        self._metrics: dict[str, Mapping[str, Any]] = {}
        self._batches = 0
        self._inside: str | None = None
        self._evaluation_begun = self._evaluated = 0.0
        self._first: tuple[float, float] | None = None
        self._speed_from: tuple[float, int] | None = None
        self._speed: float | None = None

    def looks(self) -> dict[Event, Callable[[State], None]]:
        """What is called at which event; every other event costs nothing."""
        return {
            Event.FIT_START: lambda state: self._start("train", state),
            Event.BATCH_END: self._batch_end,
            Event.EPOCH_END: self._epoch_end,
            Event.FIT_END: self._fit_end,
            Event.EVAL_STANDALONE_START: lambda state: self._start("evaluate", state),
            Event.EVAL_START: self._eval_start,
            Event.EVAL_BATCH_END: self._other_batch_end,
            Event.EVAL_END: self._eval_end,
            Event.PREDICT_START: lambda state: self._start("predict", state),
            Event.PREDICT_BATCH_END: self._other_batch_end,
        }

    def finish(self, ending: str) -> None:
        """Show the end. Only a stream that ended well is waited for: after an error the device may not answer."""
        if ending == "done":
            while self._waiting:
                self._show(*self._waiting.popleft())
        values = self._values(*self._metrics)
        if ending == "done" or all(map(on_cpu, values.values())):
            self._shown = Reading(values).values()
        self._waiting.clear()
        self.screen.show(self._snapshot(self._clock(), ending=ending), self._shown)

    # What happens at the events.

    def _start(self, title: str, state: State) -> None:
        self._title = title
        self._metrics = dict(state.metrics) if title == "train" else {}
        self._timestamp = state.timestamp if title == "train" else None
        if self.screen.live:
            self._draw(self._clock())

    def _batch_end(self, state: State) -> None:
        self._timestamp, self._loss = state.timestamp, state.loss
        self._look()

    def _epoch_end(self, state: State) -> None:
        before = self._timestamp
        if before is not None and before.batch_in_epoch > 0:
            self._last_epoch = before.batch_in_epoch
        self._timestamp = state.timestamp
        self._tell()

    def _fit_end(self, state: State) -> None:
        self._timestamp = state.timestamp

    def _eval_start(self, state: State) -> None:
        self._inside, self._batches = state.evaluator, 0
        self._evaluation_begun = self._clock()
        self._look()

    def _other_batch_end(self, state: State) -> None:
        self._batches += 1
        self._look()

    def _eval_end(self, state: State) -> None:
        label = state.evaluator
        self._inside = None
        self._evaluated += self._clock() - self._evaluation_begun
        if label is not None:
            self._metrics = {**self._metrics, label: state.metrics.get(label, {})}
        self._tell(label)

    # When it is shown.

    def _look(self) -> None:
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + self._refresh
            self._show_what_arrived()
            if now >= self._draw_at and not self._waiting:
                self._draw(now)
            elif self._first is None:
                self._measure(now)

    def _tell(self, evaluated: str | None = None) -> None:
        """Something happened that has a line of its own; a bar shows it when it is redrawn anyway."""
        if self.screen.live:
            self._look()
        else:
            self._draw(self._clock(), evaluated)

    def _draw(self, now: float, evaluated: str | None = None) -> None:
        """Show what is known; where lines are written, the line of an evaluation holds its results and no others."""
        self._draw_at = now + self._period
        self._measure(now)
        if self.screen.live:
            if self._waiting:
                return  # a bar shows one state of affairs after the other, and needs no history
            values, about = self._values(*self._metrics), None
        else:
            values, about = self._values(*([evaluated] if evaluated else []), loss=evaluated is None), evaluated
        self._waiting.append((self._snapshot(now, about=about), Reading(values)))
        self._show_what_arrived()

    def _show_what_arrived(self) -> None:
        while self._waiting and self._waiting[0][1].ready:
            self._show(*self._waiting.popleft())

    def _show(self, snapshot: Snapshot, reading: Reading) -> None:
        self._shown = reading.values()
        self.screen.show(snapshot, self._shown)

    # What is shown.

    def _values(self, *labels: str, loss: bool = True) -> dict[str, Any]:
        """The loss and what these evaluators measured."""
        total = self._loss.get("total") if isinstance(self._loss, Mapping) else self._loss
        values = {"loss": total} if loss else {}
        for label in labels:
            values |= {f"{label}/{name}": value for name, value in self._metrics[label].items()}
        return {name: value for name, value in values.items() if is_scalar(value)}

    def _snapshot(self, now: float, *, about: str | None = None, ending: str = "") -> Snapshot:
        title = self._title if self._description is None else self._description
        return Snapshot(
            title=title,
            place=self._place(),
            fraction=self._fraction() if about is None else None,
            speed=self._speed if about is None else None,
            left=self._left(now) if about is None else None,
            spent=now - self._begun,
            ending=ending,
        )

    def _place(self) -> str:
        t = self._timestamp
        if t is None:
            return f"{f'{self._inside}  ' if self._inside is not None else ''}batch {self._batches}"
        if self._inside is not None:
            return f"evaluating {self._inside}, batch {self._batches}"
        end, length = t.max_duration, self._batches_per_epoch(t)
        epochs = batches = ""
        if end is not None and end.unit is TimeUnit.EPOCH:
            epochs = f"/{end.value}"
            batches = f"/{int(end.value) * length}" if length is not None else ""
        elif end is not None and end.unit is TimeUnit.BATCH:
            batches = f"/{end.value}"
        return f"epoch {epoch_number(t)}{epochs}  batch {str(t.batch).rjust(len(batches) - 1)}{batches}"

    def _fraction(self) -> float | None:
        t = self._timestamp
        if t is None or t.max_duration is None:
            return None
        if t.max_duration.unit is not TimeUnit.EPOCH or not t.batch_in_epoch or t.batches_per_epoch is not None:
            return t.elapsed
        return None if self._last_epoch is None else t.replace(batches_per_epoch=self._last_epoch).elapsed

    def _batches_per_epoch(self, t: Timestamp) -> int | None:
        """How many batches an epoch has; where the data can't tell, as many as the last one had."""
        return self._last_epoch if t.batches_per_epoch is None else t.batches_per_epoch

    def _measure(self, now: float) -> None:
        """Bring the speed up to date: samples a second outside evaluations, the recent ones weighing more."""
        t = self._timestamp
        if t is None or self._inside is not None:
            return
        fraction = self._fraction()
        if self._first is None and fraction is not None and t.batch > 0:
            self._first = (now, fraction)
        training = now - self._evaluated
        if self._speed_from is None:
            self._speed_from = (training, t.sample)
            return
        seconds, samples = training - self._speed_from[0], t.sample - self._speed_from[1]
        if seconds > 0 and samples > 0:
            speed = samples / seconds
            self._speed = speed if self._speed is None else 0.7 * self._speed + 0.3 * speed
            self._speed_from = (training, t.sample)

    def _left(self, now: float) -> float | None:
        fraction = self._fraction()
        if fraction is None or self._first is None:
            return None
        done = fraction - self._first[1]
        return (now - self._first[0]) * (1.0 - fraction) / done if done > 0 and fraction < 1 else None
