"""The oracle: what a plan's stream of events is, written down rule by rule.

It follows the specification in plain words and shares no code with the grammar, with :func:`pure_loop.time.due` or with
the loop, so that each can be held against the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal, TypeVar

import attrs

from pure_loop._internal.arguments import is_integer
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.time import Time, TimeLike, TimeUnit, read_time

T = TypeVar("T")
_NO_STOPS = (TimeUnit.ITERATION, TimeUnit.DURATION)


def _sizes(value: object) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"batches={value!r}: write the samples of each batch, such as batches=(4, 4, 2)")
    return tuple(value)


def _time(value: TimeLike) -> Time:
    return read_time(value, "Plan: a time")


def _time_or_none(value: TimeLike | None) -> Time | None:
    return None if value is None else _time(value)


def _at_least(minimum: int) -> Callable[[object, attrs.Attribute[T], T], None]:
    def validate(instance: object, attribute: attrs.Attribute[T], value: T) -> None:
        for number in value if isinstance(value, tuple) else (value,):
            if not is_integer(number):
                raise ArgumentTypeError(f"{attribute.name}={value!r}: {number!r} is not an int")
            if number < minimum:
                raise ArgumentError(f"{attribute.name}={value!r}: {number} is less than {minimum}")

    return validate


@attrs.frozen
class EvaluatorPlan:
    """One evaluator of a plan.

    Attributes:
        batches: the samples in each of its batches.
        interval: how often it runs; None for the plan's ``eval_interval``.
        microbatch_size: samples in a forward; None for whole batches.
    """

    batches: tuple[int, ...] = attrs.field(converter=_sizes, validator=_at_least(1))
    interval: Time | None = attrs.field(default=None, converter=_time_or_none)
    microbatch_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))


def _evaluators(value: Mapping[str, EvaluatorPlan]) -> FrozenDict[str, EvaluatorPlan]:
    for label, evaluator in value.items():
        if not isinstance(evaluator, EvaluatorPlan):
            raise ArgumentTypeError(f"evaluators[{label!r}]={evaluator!r}: write EvaluatorPlan(batches=...)")
    return FrozenDict(value)


@attrs.frozen(kw_only=True)
class Plan:
    """Everything that decides which events a run of ``fit`` yields; durations may be given as text.

    Attributes:
        batches: the samples in each batch of one pass over the loader.
        max_duration: where training ends.
        microbatch_size: samples in a forward; None for whole batches.
        evaluators: label to :class:`EvaluatorPlan`, in the order in which they run.
        eval_interval: for evaluators without one of their own.
        tokens_per_sample, seconds_per_batch: how tokens and wall-clock time go by.
        batches_per_epoch: an epoch is cut after so many batches; None for the whole loader. Every epoch of a loader
            with a length begins with its first batch; one of a loader without a length with the batch after the last.
        batches_per_step: how many batches of the loader are one batch of the stream, as ``batches_per_epoch`` counts.
        sized: the loader has a length.
        iteration_length: in epochs or tokens; None for no iterations.
        order: ``"current"`` or ``"2021"``.
        stop_at: where an algorithm sets ``State.stop``: at EPOCH_END where it counts epochs, else at BATCH_END or at
            the BATCH_CHECKPOINT that follows; None: nowhere.
        fresh: False where the stream resumes from a State at the start of training.

    Raises:
        ArgumentError: (a ValueError) for a plan that no run can follow, such as one that never ends.
        ArgumentTypeError: (a TypeError) for a value of the wrong type.
    """

    batches: tuple[int, ...] = attrs.field(converter=_sizes, validator=_at_least(1))
    max_duration: Time = attrs.field(converter=_time)
    microbatch_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))
    evaluators: Mapping[str, EvaluatorPlan] = attrs.field(factory=dict, converter=_evaluators)
    eval_interval: Time = attrs.field(default=Time(1, TimeUnit.EPOCH), converter=_time)
    tokens_per_sample: int = attrs.field(default=0, validator=_at_least(0))
    seconds_per_batch: float = 0.0
    batches_per_epoch: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(1)))
    batches_per_step: int = attrs.field(default=1, validator=_at_least(1))
    sized: bool = True
    iteration_length: Time | None = attrs.field(default=None, converter=_time_or_none)
    order: Literal["current", "2021"] = "current"
    stop_at: Time | None = attrs.field(default=None, converter=_time_or_none)
    fresh: bool = True

    def interval_of(self, evaluator: EvaluatorPlan) -> Time:
        """How often one of its evaluators runs."""
        return self.eval_interval if evaluator.interval is None else evaluator.interval

    def __attrs_post_init__(self) -> None:
        if not self.batches:
            raise ArgumentError("batches=(): a loader that yields no batch in an epoch is an error, not a plan")
        length = math.ceil(len(self.batches) / self.batches_per_step)
        if self.sized and self.batches_per_epoch is not None and self.batches_per_epoch > length:
            raise ArgumentError(
                f"batches_per_epoch={self.batches_per_epoch}: the loader has a length of {length}; write"
                " that at most, or sized=False"
            )
        if not (math.isfinite(self.seconds_per_batch) and self.seconds_per_batch >= 0):
            raise ArgumentError(f"seconds_per_batch={self.seconds_per_batch!r} is not a finite time of at least 0")
        if self.order not in ("current", "2021"):
            raise ArgumentError(f"order={self.order!r} is not known; write 'current' or '2021'")
        self._check_iterations()
        if self.stop_at is not None and (not self.stop_at.value or self.stop_at.unit in _NO_STOPS):
            raise ArgumentError(f'stop_at="{self.stop_at}": write "2ep", "3ba", "8sp", "16tok" or "2s", more than 0')
        unit = self.max_duration.unit
        if unit is TimeUnit.DURATION:
            raise ArgumentError(f'max_duration="{self.max_duration}" is a fraction of itself; write "2ep" or "10ba"')
        if unit is TimeUnit.TOKEN and self.max_duration.value and not self.tokens_per_sample:
            raise ArgumentError(f'max_duration="{self.max_duration}" never ends without tokens; set tokens_per_sample')
        if unit is TimeUnit.SECOND and self.max_duration.value and not self.seconds_per_batch:
            raise ArgumentError(f'max_duration="{self.max_duration}" never ends in no time; set seconds_per_batch')

    def _check_iterations(self) -> None:
        length, unit = self.iteration_length, self.max_duration.unit
        if length is not None:
            if length.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN) or not length.value:
                raise ArgumentError(f'iteration_length="{length}": write "2ep" or "1e6tok", and more than 0')
            if length.unit is TimeUnit.TOKEN and not self.tokens_per_sample:
                raise ArgumentError(f'iteration_length="{length}" never ends without tokens; set tokens_per_sample')
            if self.order == "2021":
                raise ArgumentError('order="2021" has no events for iterations; leave iteration_length out')
        elif unit is TimeUnit.ITERATION and self.max_duration.value:
            raise ArgumentError(f'max_duration="{self.max_duration}" needs an iteration_length')
        for label, evaluator in self.evaluators.items():
            interval = self.interval_of(evaluator)
            counts = unit if interval.unit is TimeUnit.DURATION else interval.unit
            if interval.value and counts is TimeUnit.ITERATION:
                raise ArgumentError(
                    f'evaluators[{label!r}]: "{interval}" counts iterations; evaluate in "1ep" or "10ba"'
                )


@attrs.frozen
class _Counts:
    """What is finished, by the names of the units; seconds are exact."""

    epoch: int = 0
    batch: int = 0
    batch_in_epoch: int = 0
    sample: int = 0
    token: int = 0
    iteration: int = 0
    second: Fraction = Fraction(0)

    def of(self, unit: TimeUnit) -> Fraction:
        return Fraction(getattr(self, unit.name.lower()))


class _Run:
    """One run of a plan: the events so far, what is finished, and which evaluators ran at this very batch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events: list[Event] = []
        self.now = _Counts()
        self.iteration_began = self.now
        self.evaluated: set[str] = set()
        self.position = 0  # in its batches, of a loader without a length

    def say(self, *events: Event) -> None:
        self.events.extend(events)

    def over(self) -> bool:
        """Whether the duration is reached, or an algorithm has stopped training."""
        return self.reached(self.plan.max_duration) or self.reached(self.plan.stop_at)

    def over_before_epoch_end(self) -> bool:
        """Whether training ends before EPOCH_END, at which an algorithm that counts epochs stops training."""
        stop = self.plan.stop_at
        stops = stop is not None and stop.unit is not TimeUnit.EPOCH and self.reached(stop)
        return stops or self.reached(self.plan.max_duration)

    def reached(self, end: Time | None) -> bool:
        return end is not None and self.now.of(end.unit) >= end.exact

    # The current order

    def fit(self) -> None:
        if self.plan.fresh:
            self.say(Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)
        self.say(Event.FIT_START)
        if not self.over():
            if self.plan.iteration_length is not None:
                self.say(Event.ITERATION_START)
            while not self.over():
                self.epoch()
            self.evals(self.not_yet_evaluated())
        self.say(Event.FIT_END)

    def epoch(self) -> None:
        self.say(Event.EPOCH_START)
        for number, parts in enumerate(self.batches_of_an_epoch(), start=1):
            self.say(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER)
            before = self.batch(parts)
            self.evals(self.due(before, Event.BATCH_END))
            self.say(Event.BATCH_CHECKPOINT)
            self.iteration(TimeUnit.TOKEN)
            if self.over():
                if number == self.known_length():
                    break
                return
        else:
            self.say(Event.BEFORE_DATALOADER)
        before = self.count_epoch()
        self.say(Event.EPOCH_END)
        self.evals(self.due(before, Event.EPOCH_END))
        self.say(Event.EPOCH_CHECKPOINT)
        self.iteration(TimeUnit.EPOCH)

    def iteration(self, unit: TimeUnit) -> None:
        length = self.plan.iteration_length
        if length is None or length.unit is not unit:
            return
        if self.now.of(unit) - self.iteration_began.of(unit) >= length.exact:
            self.now = attrs.evolve(self.now, iteration=self.now.iteration + 1)
            self.iteration_began = self.now
            self.say(Event.ITERATION_END, Event.ITERATION_CHECKPOINT)
            if not self.over():
                self.say(Event.ITERATION_START)

    def evals(self, labels: Sequence[str]) -> None:
        if labels:
            self.say(Event.EVAL_BEFORE_ALL)
            self.evaluate_each(labels)
            self.say(Event.EVAL_AFTER_ALL)

    # The order of 2021

    def fit_2021(self) -> None:
        if self.plan.fresh:
            self.say(Event.INIT)
        self.say(Event.TRAINING_START)
        while not self.over():
            self.say(Event.EPOCH_START)
            for parts in self.batches_of_an_epoch():
                self.say(Event.AFTER_DATALOADER)
                before = self.batch(parts)
                self.evaluate_each(self.due(before, Event.BATCH_END))
                if self.over():
                    break
            before = self.count_epoch()
            due = self.due(before, Event.EPOCH_END)
            last = self.not_yet_evaluated() if self.over_before_epoch_end() else []
            self.evaluate_each([label for label in self.plan.evaluators if label in due or label in last])
            self.say(Event.EPOCH_END)
        self.say(Event.TRAINING_END)

    # Both orders

    def batches_of_an_epoch(self) -> list[tuple[int, ...]]:
        """The samples of the loader's batches in each batch of the stream."""
        limit, size = self.plan.batches_per_epoch, self.plan.batches_per_step
        steps = [self.plan.batches[start : start + size] for start in range(0, len(self.plan.batches), size)]
        if self.plan.sized or limit is None:
            return steps[:limit]
        epoch = steps[self.position : self.position + limit]  # goes on where the epoch before was cut
        self.position = (self.position + len(epoch)) % len(steps)
        return epoch

    def known_length(self) -> int | None:
        """The batches of an epoch, where that is known before the loader is exhausted."""
        loader = math.ceil(len(self.plan.batches) / self.plan.batches_per_step) if self.plan.sized else math.inf
        length = min(loader, self.plan.batches_per_epoch or math.inf)
        return None if math.isinf(length) else int(length)

    def batch(self, parts: tuple[int, ...]) -> _Counts:
        samples = sum(parts)
        self.say(Event.BATCH_START, Event.BEFORE_TRAIN_BATCH)
        for _ in range(sum(_microbatches(part, self.plan.microbatch_size) for part in parts)):
            self.say(Event.BEFORE_FORWARD, Event.AFTER_FORWARD)
            self.say(Event.BEFORE_LOSS, Event.AFTER_LOSS)
            self.say(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD)
        self.say(Event.AFTER_TRAIN_BATCH)
        before = self.now
        self.now = attrs.evolve(
            before,
            batch=before.batch + 1,
            batch_in_epoch=before.batch_in_epoch + 1,
            sample=before.sample + samples,
            token=before.token + samples * self.plan.tokens_per_sample,
            second=before.second + Fraction(repr(float(self.plan.seconds_per_batch))),
        )
        self.evaluated = set()
        self.say(Event.BATCH_END)
        return before

    def count_epoch(self) -> _Counts:
        before, self.now = self.now, attrs.evolve(self.now, epoch=self.now.epoch + 1, batch_in_epoch=0)
        return before

    def due(self, before: _Counts, event: Event) -> list[str]:
        evaluators = self.plan.evaluators.items()
        return [name for name, item in evaluators if self.is_due(name, self.plan.interval_of(item), before, event)]

    def is_due(self, label: str, interval: Time, before: _Counts, event: Event) -> bool:
        size, unit = interval.exact, interval.unit
        if unit is TimeUnit.DURATION:
            size, unit = size * self.plan.max_duration.exact, self.plan.max_duration.unit
            length = self.known_length()
            if size and unit is TimeUnit.EPOCH and length is not None:
                # Batches are what counts. An epoch that is shorter than known ends with a jump, which is looked at
                # unless its last batch had an evaluation.
                passed = self.epochs(before, length) // size != self.epochs(self.now, length) // size
                return passed and label not in self.evaluated
        if size == 0 or event is not (Event.EPOCH_END if unit is TimeUnit.EPOCH else Event.BATCH_END):
            return False
        return math.floor(before.of(unit) / size) != math.floor(self.now.of(unit) / size)

    @staticmethod
    def epochs(counts: _Counts, length: int) -> Fraction:
        """Finished epochs and the part of this one that is over, for epochs of a known length."""
        return counts.epoch + min(Fraction(counts.batch_in_epoch, length), Fraction(1))

    def not_yet_evaluated(self) -> list[str]:
        waiting = [item for item in self.plan.evaluators.items() if item[0] not in self.evaluated]
        return [label for label, evaluator in waiting if self.plan.interval_of(evaluator).value > 0]

    def evaluate_each(self, labels: Iterable[str]) -> None:
        for label in labels:
            self.evaluated.add(label)
            self.say(*_one_evaluation(self.plan.evaluators[label]))


def _microbatches(samples: int, size: int | None) -> int:
    return 1 if size is None else math.ceil(samples / size)


def _one_evaluation(evaluator: EvaluatorPlan) -> list[Event]:
    events = [Event.EVAL_START]
    for samples in evaluator.batches:
        forwards = _microbatches(samples, evaluator.microbatch_size)
        events += [Event.EVAL_BATCH_START, *[Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD] * forwards]
        events.append(Event.EVAL_BATCH_END)
    return [*events, Event.EVAL_END]


def expected(plan: Plan) -> list[Event]:
    """The events that ``fit`` yields for a plan, all of them, in order.

    >>> events = expected(Plan(batches=(4, 4, 2), max_duration="2ep", microbatch_size=2))
    >>> events.count(Event.BEFORE_DATALOADER), events.count(Event.BEFORE_FORWARD)
    (8, 10)
    >>> expected(Plan(batches=(4,), max_duration="0ba", fresh=False))
    [Event.FIT_START, Event.FIT_END]
    """
    run = _Run(plan)
    (run.fit_2021 if plan.order == "2021" else run.fit)()
    return run.events


def expected_evaluate(evaluators: Mapping[str, EvaluatorPlan]) -> list[Event]:
    """The events that ``evaluate`` yields: every evaluator once, in the order given.

    >>> expected_evaluate({})
    [Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END]
    """
    events = [event for evaluator in evaluators.values() for event in _one_evaluation(evaluator)]
    return [Event.EVAL_STANDALONE_START, *events, Event.EVAL_STANDALONE_END]


def expected_predict(batches: int) -> list[Event]:
    """The events that ``predict`` yields for so many batches.

    >>> len(expected_predict(3))
    14
    """
    forward = [Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD]
    batch = [Event.PREDICT_BATCH_START, *forward, Event.PREDICT_BATCH_END]
    return [Event.PREDICT_START, *batch * batches, Event.PREDICT_END]
