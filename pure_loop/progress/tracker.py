"""What is known of a stream, and when to show it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from pure_loop.event import Event
from pure_loop.progress.estimate import Estimate, Facts, MeanLoss, Reading, on_cpu, rates
from pure_loop.progress.screens import Screen, Snapshot, batch_of
from pure_loop.progress.table import TRAIN, Row
from pure_loop.progress.words import epoch as epoch_number
from pure_loop.progress.words import in_numbers
from pure_loop.state import Loss, MetricValue, State
from pure_loop.time import Timestamp, TimeUnit


class Tracker:
    """Follows a stream, and shows it on a screen.

    Args:
        screen: where it is shown.
        description: its title; None: what runs.
        refresh_seconds: the shortest time between two drawings.
        clock: seconds.
        facts: what the stream says of the run.
    """

    def __init__(
        self,
        screen: Screen,
        description: str | None,
        refresh_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        facts: Facts | None = None,
    ) -> None:
        self.screen = screen
        self._description = description
        self._refresh = refresh_seconds
        self._facts = Facts() if facts is None else facts
        self._estimate = Estimate(self._facts)
        self._last_epoch: int | None = None
        self._clock = clock
        self._begun = clock()
        self._look_at, self._draw_at = self._begun, self._begun + (0.0 if screen.live else self._period)
        # What waits for its values: how it is shown, and the values.
        self._waiting: deque[tuple[Callable[[dict[str, float]], None], Reading]] = deque()
        self._shown: dict[str, float] = {}
        self._title, self._members = "train", 0
        self._timestamp: Timestamp | None = None
        # How a stream that ended well ended, and what else there is to say.
        self._ending, self._remarks = "done", list[str]()
        self._loss: Loss | None = None
        # What evaluators measured; on a live screen, since the last row.
        self._metrics: dict[str, Mapping[str, MetricValue]] = {}
        self._batches = 0
        # The batch after which training began; None: its start was not seen.
        self._begun_at: int | None = None
        self._speed_from: tuple[float, int] | None = None
        self._speed: float | None = None
        # Of the table. The losses since the last row; None where there is no table.
        self._losses = MeanLoss(skips=self._facts.skips) if screen.live else None
        # The metrics of the State, among them those of training.
        self._trained: Mapping[str, Mapping[str, MetricValue]] = {}
        self._row: tuple[Timestamp, dict[str, MetricValue]] | None = None
        self._row_begun = self._begun
        self._in_parts = False

    def looks(self) -> dict[Event, Callable[[State], None]]:
        """What is called at which event; every other event costs nothing."""
        looks: dict[Event, Callable[[State], None]] = {
            Event.FIT_START: partial(self._start, TRAIN),
            Event.BATCH_END: self._batch_end,
            Event.EPOCH_END: self._epoch_end,
            Event.EPOCH_CHECKPOINT: self._epoch_checkpoint,
            Event.FIT_END: self._fit_end,
            Event.EVAL_STANDALONE_START: partial(self._start, "evaluate"),
            Event.EVAL_START: self._eval_start,
            Event.EVAL_BATCH_END: self._other_batch_end,
            Event.EVAL_END: self._eval_end,
            Event.PREDICT_START: partial(self._start, "predict"),
            Event.PREDICT_BATCH_END: self._other_batch_end,
        }
        if self.screen.live:
            looks[Event.EVAL_AFTER_ALL] = self._eval_after_all
        return looks

    def finish(self, ending: str) -> None:
        """Show the end. Only a stream that ended well is waited for: after an error the device may not answer."""
        if ending == "done":
            self._close_row()
            while self._waiting:
                self._show_first()
        else:
            if self._row is not None and all(map(on_cpu, self._row_values(self._row[1]).values())):
                self._close_row()
            self._show_what_arrived()
        values = self._values(*self._metrics)
        if ending == "done" or all(map(on_cpu, values.values())):
            self._shown = Reading(values).values()
        self._waiting.clear()
        ending = self._ending if ending == "done" else ending
        self.screen.show(self._snapshot(self._clock(), ending=ending), self._shown)

    # What happens at the events.

    def _start(self, title: str, state: State) -> None:
        self._title, self._members = title, int(state.members)
        self._row_begun = self._clock()
        self._timestamp = None
        if title == TRAIN:
            self._timestamp = state.timestamp
            self._begun_at = state.timestamp.batch
            if not self.screen.live:
                self._metrics = dict(state.metrics)
            end = state.timestamp.max_duration
            self._in_parts = end is None or end.unit is not TimeUnit.EPOCH
            self._estimate.begin(self._fraction())
        if self.screen.live:
            self._draw(self._clock())

    def _batch_end(self, state: State) -> None:
        if self._row is not None:
            self._close_row()
        self._timestamp, self._loss = t, loss = state.timestamp, state.loss
        self._members = int(state.members)
        if self._losses is not None:
            self._trained = state.metrics
            total = loss if type(loss) is Tensor else _total(loss)
            self._losses.add(total, t.sample - state.previous_timestamp.sample, self._members)
        self._look()

    def _epoch_end(self, state: State) -> None:
        before = self._timestamp
        if before is not None and before.batch_in_epoch > 0:
            self._last_epoch = before.batch_in_epoch
        self._timestamp = state.timestamp
        self._open_row(state)
        self._tell()

    def _epoch_checkpoint(self, state: State) -> None:
        if self._timestamp is None or self._timestamp.epoch != state.timestamp.epoch:  # no event before is watched
            self._metrics = {label: state.metrics[label] for label in self._facts.evaluators if label in state.metrics}
            self._epoch_end(state)
        # After the last epoch those evaluate that had no turn at its end; their results belong to this row.
        if not state.has_ended() or self._facts.evaluators.keys() <= self._metrics.keys():
            self._close_row()

    def _fit_end(self, state: State) -> None:
        if self._facts.resumed_from is not None:
            self._remarks = [f"resumed from {self._facts.resumed_from}"]
        if state.timestamp.batch == self._begun_at:
            self._ending = "done: nothing to train"
        elif state.stop:
            self._ending = "done: stopped early"
            self._remarks.insert(0, state.why_ended())
        self._timestamp = state.timestamp
        trained = self._losses is not None and self._losses.count > 0
        if self._row is None and (self._metrics or trained):  # the end of an epoch that was cut short
            self._open_row(state)
        self._close_row()

    def _eval_start(self, state: State) -> None:
        seconds = self._clock()
        self._estimate.evaluation_begins(state.evaluator, seconds)
        self._look()

    def _other_batch_end(self, state: State) -> None:
        self._batches += 1
        self._estimate.evaluation_batch_done()
        self._look()

    def _eval_end(self, state: State) -> None:
        label, self._members = state.evaluator, int(state.members)
        self._estimate.evaluation_ends(self._clock(), self._fraction())
        if label is not None:
            self._metrics = {**self._metrics, label: state.metrics.get(label, {})}
        self._tell(label)

    def _eval_after_all(self, state: State) -> None:
        t = self._timestamp
        if self._in_parts and t is not None and self._metrics:
            self._open_row(state)
            # After the last batch of an epoch, and of the run, there may be more evaluations.
            if t.batch_in_epoch not in (0, t.batches_per_epoch) and not state.has_ended():
                self._close_row()

    # Rows.

    def _open_row(self, state: State) -> None:
        """A row for what was trained since the last one; it waits for evaluations."""
        if not self.screen.live:
            return
        t = state.timestamp
        if self._row is not None and self._row[0].batch != t.batch:  # where no event between is watched
            self._close_row()
        values: dict[str, MetricValue] = {} if self._row is None else self._row[1]
        loss = None if self._losses is None else self._losses.take()
        if loss is not None:
            values["train/loss"] = loss
        values |= self._train_metrics(state.metrics)
        values |= rates(self._facts.optimizer, state)
        self._row = t, values

    def _close_row(self) -> None:
        """Pass the row on to the screen, with what evaluators have measured."""
        if self._row is None:
            return
        t, trained = self._row
        values = self._row_values(trained)
        self._row = None
        if self._in_parts and not self._metrics and "train/loss" not in trained:
            return  # the row before was of this batch
        self._metrics = {}
        seconds = self._clock()
        batch = t.batch if self._in_parts else None
        row = Row(epoch=epoch_number(t), batch=batch, seconds=seconds - self._row_begun)
        self._row_begun = seconds
        self._waiting.append((partial(self.screen.add, row), Reading(values)))
        self._show_what_arrived()

    def _row_values(self, trained: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
        """Those of training, and what evaluators have measured."""
        values = dict(trained)
        for label, metrics in self._metrics.items():
            values |= {f"{_group(label)}/{name}": value for name, value in metrics.items()}
        return in_numbers(values, self._members)

    # When it is shown.

    @property
    def _period(self) -> float:
        return max(self._refresh, self.screen.seconds)

    def _look(self) -> None:
        seconds = self._clock()
        if seconds >= self._look_at:
            self._look_at = seconds + self._refresh
            self._show_what_arrived()
            if seconds >= self._draw_at and not self._waiting:
                self._draw(seconds)
            elif not self._estimate.begun or self._speed_from is None:
                self._measure(seconds)

    def _tell(self, evaluated: str | None = None) -> None:
        """Something happened that has a line of its own; a bar shows it when it is redrawn anyway."""
        if self.screen.live:
            self._look()
        else:
            self._draw(self._clock(), evaluated)

    def _draw(self, seconds: float, evaluated: str | None = None) -> None:
        """Show what is known; where lines are written, the line of an evaluation holds its results and no others."""
        self._draw_at = seconds + self._period
        self._measure(seconds)
        if self.screen.live:
            if self._waiting:
                return  # a bar shows one state of affairs after the other, and needs no history
            values, about = self._values(*self._metrics), None
        else:
            values, about = self._values(*([evaluated] if evaluated else []), loss=evaluated is None), evaluated
        self._waiting.append((partial(self._show, self._snapshot(seconds, about=about)), Reading(values)))
        self._show_what_arrived()

    def _show_what_arrived(self) -> None:
        while self._waiting and self._waiting[0][1].ready:
            self._show_first()

    def _show_first(self) -> None:
        show, reading = self._waiting.popleft()
        show(reading.values())

    def _show(self, snapshot: Snapshot, values: dict[str, float]) -> None:
        self._shown = values
        self.screen.show(snapshot, values)

    # What is shown.

    def _train_metrics(self, metrics: Mapping[str, Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
        """Those of the epoch so far, by name; none where an evaluator has their label."""
        if TRAIN in self._facts.evaluators or TRAIN in self._metrics:
            return {}
        return {f"{TRAIN}/{name}": value for name, value in metrics.get(TRAIN, {}).items()}

    def _values(self, *labels: str, loss: bool = True) -> dict[str, MetricValue]:
        """The loss and what these evaluators measured."""
        values: dict[str, MetricValue | None] = {"loss": _total(self._loss)} if loss else {}
        values |= self._train_metrics(self._trained)
        for label in labels:
            values |= {f"{label}/{name}": value for name, value in self._metrics[label].items()}
        return in_numbers(values, self._members)

    def _snapshot(self, seconds: float, *, about: str | None = None, ending: str = "") -> Snapshot:
        epoch, batch = self._place()
        fraction = self._fraction() if about is None else None
        return Snapshot(
            title=self._title if self._description is None else self._description,
            members=f"{self._members} members" if self._members else "",
            epoch=epoch,
            batch=batch,
            inside=self._estimate.inside(seconds),
            fraction=fraction,
            speed=self._speed if about is None else None,
            left=self._left(seconds, fraction) if about is None else None,
            spent=seconds - self._begun,
            ending=ending,
            remarks=self._remarks if ending else (),
        )

    def _place(self) -> tuple[str, str]:
        """The epoch and the batch."""
        t = self._timestamp
        if t is None:
            return "", batch_of(self._batches, self._total_batches())
        end, length = t.max_duration, self._batches_per_epoch(t)
        epochs, batches = "", None
        if end is not None and end.unit is TimeUnit.EPOCH:
            epochs = f"/{end.value}"
            batches = int(end.value) * length if length is not None else None
        elif end is not None and end.unit is TimeUnit.BATCH:
            batches = int(end.value)
        return f"epoch {epoch_number(t)}{epochs}", batch_of(t.batch, batches)

    def _total_batches(self) -> int | None:
        """Those of an evaluation or a prediction by itself."""
        return self._facts.batches if self._title == "predict" else self._facts.evaluation_batches

    def _fraction(self) -> float | None:
        t = self._timestamp
        if t is None:
            total = self._total_batches()
            return min(self._batches / total, 1.0) if total else None
        if t.max_duration is None:
            return None
        if t.max_duration.unit is not TimeUnit.EPOCH or not t.batch_in_epoch or t.batches_per_epoch is not None:
            return t.elapsed
        return None if self._last_epoch is None else t.replace(batches_per_epoch=self._last_epoch).elapsed

    def _batches_per_epoch(self, t: Timestamp) -> int | None:
        """How many batches an epoch has; where the data can't tell, as many as the last one had."""
        return self._last_epoch if t.batches_per_epoch is None else t.batches_per_epoch

    def _measure(self, clock: float) -> None:
        """Bring the speed up to date: samples a second outside evaluations, the recent ones weighing more."""
        t = self._timestamp
        if t is None:
            return
        if t.batch > 0 and self._loss is not None:
            self._estimate.batch_done(clock, self._fraction())
        training = self._estimate.trained(clock)
        if self._speed_from is None:
            self._speed_from = (training, t.sample)
            return
        seconds, samples = training - self._speed_from[0], t.sample - self._speed_from[1]
        if seconds > 0 and samples > 0:
            speed = samples / seconds
            self._speed = speed if self._speed is None else 0.7 * self._speed + 0.3 * speed
            self._speed_from = (training, t.sample)

    def _left(self, seconds: float, fraction: float | None) -> float | None:
        t = self._timestamp
        if t is not None:
            return self._estimate.left(seconds, t, fraction)
        return (seconds - self._begun) * (1.0 - fraction) / fraction if fraction else None


def _total(loss: Loss | None) -> Tensor | None:
    return loss.get("total") if isinstance(loss, Mapping) else loss


def _group(label: str) -> str:
    """The columns of an evaluator; ``train`` are those of training, as in what loggers are given."""
    return f"eval/{label}" if label == TRAIN else label
