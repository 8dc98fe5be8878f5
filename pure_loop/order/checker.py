"""The specification: in which order the events come.

It stands here as data, once for each order, in the notation of :mod:`pure_loop.order.grammar`. From the data come the
checker for streams (:func:`check`, :class:`Checker`), the next legal events (:func:`successors`), the table, the
outline and the diagram. :func:`expected` is the oracle: given a :class:`Plan` it writes down the exact list of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Literal, get_args

import attrs

from pure_loop.errors import ArgumentError, OrderError
from pure_loop.event import Event
from pure_loop.order import grammar as _grammar
from pure_loop.order.grammar import MODES, Automaton, Node, Rule, parse

Order = Literal["current", "2021"]

BOUNDARIES = frozenset(
    {
        Event.AFTER_LOAD,
        Event.FIT_START,
        Event.EPOCH_START,
        Event.BATCH_END,
        Event.BATCH_CHECKPOINT,
        Event.EPOCH_END,
        Event.EPOCH_CHECKPOINT,
    }
)
"""The events at which a State can be kept so that training resumes from it."""


_BATCH = Rule(
    "batch",
    "BATCH_START BEFORE_TRAIN_BATCH microbatch+ AFTER_TRAIN_BATCH BATCH_END",
    "the optimizer steps between AFTER_TRAIN_BATCH and BATCH_END",
    box=True,
)
_MICROBATCH = Rule(
    "microbatch",
    "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD",
    "ceil(n / microbatch_size) times for a batch of n samples",
    title="for each microbatch",
    box=True,
)
_EVAL = Rule("eval", "EVAL_START eval_batch* EVAL_END", title="for each evaluator that is due", box=True)
_EVAL_BATCH = Rule(
    "eval_batch",
    "EVAL_BATCH_START (EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD)+ EVAL_BATCH_END",
    "one pair for each microbatch of the evaluator's own microbatch size",
    title="for each batch of it",
    box=True,
)

GRAMMARS: Mapping[Order, tuple[Rule, ...]] = {
    "current": (
        Rule(
            "fit",
            "[INIT BEFORE_LOAD AFTER_LOAD] FIT_START [training] FIT_END",
            "INIT and the load events on a fresh start only; no training where max_duration is already reached",
            title="fit",
            box=True,
        ),
        Rule(
            "training",
            "{ITERATION_START} (epoch {ep: [turn]})* last [evals]",
            "the evaluators that did not run at the very last batch run once more",
        ),
        Rule(
            "epoch",
            "EPOCH_START (step {tok: [turn]})+ BEFORE_DATALOADER closing",
            "until max_duration is reached; its last BEFORE_DATALOADER finds the loader exhausted",
            title="for each epoch",
            box=True,
        ),
        Rule(
            "last",
            "epoch {ep: [finish]} | EPOCH_START (step {tok: [turn]})* step {tok: [finish]} [closing {ep: [finish]}]",
            "cut short by max_duration, it closes only after a batch that is known to be the loader's last",
            title="the last epoch",
            folded=True,
        ),
        Rule("closing", "EPOCH_END [evals] EPOCH_CHECKPOINT"),
        Rule(
            "step",
            "BEFORE_DATALOADER AFTER_DATALOADER batch [evals] BATCH_CHECKPOINT",
            "until the loader is exhausted or max_duration is reached",
            title="for each batch",
        ),
        _BATCH,
        _MICROBATCH,
        Rule(
            "turn",
            "ITERATION_END ITERATION_CHECKPOINT ITERATION_START",
            "the event before completed it; max_duration is checked after ITERATION_CHECKPOINT",
            title="where an iteration is complete",
        ),
        Rule("finish", "ITERATION_END ITERATION_CHECKPOINT", "the same, and max_duration is reached"),
        Rule(
            "evals",
            "EVAL_BEFORE_ALL eval+ EVAL_AFTER_ALL",
            "which evaluators run is decided before the first one runs",
            title="where an evaluator is due",
            box=True,
            apart=True,
        ),
        _EVAL,
        _EVAL_BATCH,
        Rule("evaluate", "EVAL_STANDALONE_START eval* EVAL_STANDALONE_END", title="evaluate"),
        Rule("predict", "PREDICT_START predict_batch* PREDICT_END", title="predict"),
        Rule(
            "predict_batch",
            "PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END",
            title="for each batch",
        ),
    ),
    "2021": (
        Rule(
            "fit",
            "[INIT] TRAINING_START epoch* TRAINING_END",
            "INIT on a fresh start only; no epoch where max_duration is already reached",
            title="fit",
            box=True,
        ),
        Rule(
            "epoch",
            "EPOCH_START step+ eval* EPOCH_END",
            "the epoch's evaluation, and the last one of all, before EPOCH_END; an epoch cut short closes too",
            title="for each epoch",
            box=True,
        ),
        Rule("step", "AFTER_DATALOADER batch eval*", title="for each batch"),
        _BATCH,
        _MICROBATCH,
        attrs.evolve(_EVAL, apart=True),
        _EVAL_BATCH,
    ),
}
"""The grammar of each order: whole streams are ``fit``, ``evaluate`` and ``predict``."""

NOTES: Mapping[Event, str] = {
    Event.INIT: "a fresh start only",
    Event.BEFORE_LOAD: "a fresh start only",
    Event.AFTER_LOAD: "where fit is given a module; load_path= is read before it",
    Event.FIT_START: "resuming from a kept State starts here",
    Event.EPOCH_START: "not when resuming in the middle of an epoch",
    Event.BEFORE_DATALOADER: "also once where the loader turns out to be exhausted",
    Event.AFTER_DATALOADER: "data transforms: algorithms apply in the order given",
    Event.BEFORE_TRAIN_BATCH: "the batch is split into microbatches after it",
    Event.AFTER_BACKWARD: "from here on there are gradients",
    Event.AFTER_TRAIN_BATCH: "gradients are complete, unscaled and clipped; the optimizer steps next",
    Event.BATCH_END: "the optimizer has stepped; the batch is counted",
    Event.EPOCH_END: "the epoch is counted",
    Event.FIT_END: "always the last event",
    Event.ITERATION_START: "only where iteration_length is set",
    Event.ITERATION_END: "the iteration is counted",
}
"""What is worth knowing at an event."""

_REASONS: Mapping[tuple[object, ...], str] = {
    (Event.FIT_START, Event.FIT_END): "max_duration already reached",
    (Event.BEFORE_DATALOADER, Event.EPOCH_END): "loader exhausted",
    (Event.BATCH_CHECKPOINT, Event.EPOCH_END): "max_duration reached on the last batch",
    (Event.BATCH_CHECKPOINT, Event.FIT_END): "max_duration reached",
    (Event.EPOCH_CHECKPOINT, Event.FIT_END): "max_duration reached",
}

_STREAMS = ("fit", "evaluate", "predict")


@cache
def _rules(order: Order) -> dict[str, Rule]:
    if order not in get_args(Order):
        raise ArgumentError(f"order={order!r} is not known; write {' or '.join(map(repr, get_args(Order)))}")
    return {rule.name: rule for rule in GRAMMARS[order]}


@cache
def _trees(order: Order) -> dict[str, Node]:
    return {name: parse(rule.body) for name, rule in _rules(order).items()}


@cache
def _automaton(order: Order) -> Automaton:
    trees = _trees(order)
    automaton = Automaton(trees, [stream for stream in _STREAMS if stream in trees])
    # Going on: FIT_START, and then whatever comes after the boundary at which the State was kept.
    iterations = {event for event in Event if event.name.startswith("ITERATION")}
    resumable = set(automaton.at(frozenset(BOUNDARIES - {Event.AFTER_LOAD} | iterations)))
    automaton.add(Event.FIT_START, set().union(*(automaton.follow[position] for position in resumable)))
    return automaton


@cache
def _moves(order: Order, positions: frozenset[int]) -> dict[Event, frozenset[int]]:
    automaton, moves = _automaton(order), dict[Event, set[int]]()
    for position in positions:
        for after in automaton.follow[position]:
            label = automaton.labels[after]
            assert isinstance(label, Event)
            moves.setdefault(label, set()).add(after)
    return {event: frozenset(after) for event, after in moves.items()}


class Checker:
    """Follows one stream of events, from its first, and refuses the first one that breaks the order.

    Streams of ``fit`` (fresh, or resuming from a boundary), ``evaluate`` and ``predict`` are legal.

    Args:
        order: ``"current"`` or ``"2021"``.
        loaded: whether ``fit`` loads a checkpoint: then what follows FIT_START resumes from that one's boundary.

    Raises:
        OrderError: (a ValueError) from :meth:`advance`; the checker stays where it was.

    >>> checker = Checker()
    >>> for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
    ...     checker.advance(event)
    >>> sorted(checker.legal), checker.complete
    ([Event.EPOCH_START, Event.FIT_END, Event.ITERATION_START], False)
    """

    __slots__ = ("_count", "_event", "_loaded", "_order", "_positions")

    def __init__(self, order: Order = "current", *, loaded: bool = False) -> None:
        _rules(order)
        self._loaded = loaded
        self._order: Order = order
        self._positions = frozenset({0})
        self._event: Event | None = None
        self._count = 0

    @property
    def legal(self) -> frozenset[Event]:
        """The events that may come next; empty after the last one."""
        return frozenset(_moves(self._order, self._positions))

    @property
    def complete(self) -> bool:
        """Whether the stream may end here."""
        return not self._positions.isdisjoint(_automaton(self._order).last)

    def advance(self, event: Event) -> None:
        """Take the next event of the stream."""
        positions = _moves(self._order, self._positions).get(event)
        if positions is None:
            after = "can't begin a stream" if self._event is None else f"can't follow {self._event!r}"
            raise OrderError(
                f"event {self._count} of the stream is {event!r}, which {after}; legal there: {self._describe()}. "
                f"Read the order with print(pl.order.table({self._order!r}))"
            )
        if self._loaded and event is Event.FIT_START:
            positions = _moves(self._order, frozenset({0}))[event]
        self._positions, self._event, self._count = positions, event, self._count + 1

    def finish(self) -> None:
        """Refuse a stream that stops before it is complete."""
        if not self.complete:
            where = "is empty" if self._event is None else f"ends after event {self._count - 1}, {self._event!r}"
            raise OrderError(f"the stream {where}, which does not complete it; legal there: {self._describe()}")

    def _describe(self) -> str:
        return ", ".join(repr(event) for event in Event if event in self.legal) or "nothing, the stream is over"


def check(
    events: Iterable[Event | str], *, complete: bool = False, order: Order = "current", loaded: bool = False
) -> None:
    """Refuse a stream of events that is not in order.

    Args:
        events: events or their names, from the first one that the stream yielded.
        complete: also refuse a stream that stops early.
        order: ``"current"`` or ``"2021"``.
        loaded: whether the stream began with a checkpoint that ``fit`` loaded.

    Raises:
        OrderError: (a ValueError) naming the position, the event, and what was legal there.

    >>> check([Event.FIT_START, Event.EPOCH_END])
    >>> check([Event.FIT_START, Event.EPOCH_START, Event.BATCH_START])
    Traceback (most recent call last):
    ...
    pure_loop.errors.OrderError: event 2 of the stream is Event.BATCH_START, which can't follow Event.EPOCH_START; \
legal there: Event.BEFORE_DATALOADER. Read the order with print(pl.order.table('current'))
    """
    checker = Checker(order, loaded=loaded)
    for event in events:
        checker.advance(Event(event))
    if complete:
        checker.finish()


def successors(event: Event | str, *, order: Order = "current") -> frozenset[Event]:
    """The events that can come right after one, in some legal stream.

    >>> successors(Event.BATCH_CHECKPOINT) >= {Event.BEFORE_DATALOADER, Event.EPOCH_END, Event.FIT_END}
    True
    """
    _rules(order)
    return frozenset(_moves(order, frozenset(_automaton(order).at(frozenset({Event(event)})))))


def nearest_boundary(event: Event | str) -> Event:
    """The boundary at which to keep a State instead of at ``event``: itself, or the next one in the order.

    Where none comes later (FIT_END, and the events of ``evaluate`` and ``predict``), the last one of a run.

    >>> nearest_boundary(Event.AFTER_BACKWARD)
    Event.BATCH_END
    """
    event = Event(event)
    for mode in MODES:
        labels = Automaton(_trees("current"), ["fit"], [mode]).labels
        if event in labels:
            later = (
                label for label in labels[labels.index(event) :] if isinstance(label, Event) and label in BOUNDARIES
            )
            return next(later, Event.EPOCH_CHECKPOINT)
    return Event.EPOCH_CHECKPOINT


def going_on(events: Sequence[Event], kept: int) -> list[Event]:
    """What a stream yields that resumes from the State kept at ``events[kept]`` of a complete one.

    Raises:
        OrderError: where ``events[kept]`` is not a boundary.
    """
    event = events[kept]
    if event not in BOUNDARIES:
        raise OrderError(f"nothing resumes from {event!r}; keep a State at {nearest_boundary(event)!r} instead")
    rest = list(events[kept + 1 :])
    return rest if event is Event.AFTER_LOAD else [Event.FIT_START, *rest]


def table(order: Order = "current") -> str:
    """The grammar as text for a terminal."""
    return _grammar.table(_rules(order))


def outline(order: Order = "current") -> list[tuple[int, str | Event, str]]:
    """The order as an indented list of ``(depth, heading or event, note)``: ``fit``, ``evaluate`` and ``predict``.

    A group that was written out before comes back as its heading alone.
    """
    rules = _rules(order)
    return _grammar.outline(rules, [stream for stream in _STREAMS if stream in rules], NOTES)


def mermaid(order: Order = "current") -> str:
    """The order of ``fit`` as a Mermaid flowchart, without iterations; events with a thick border are boundaries."""
    return _grammar.mermaid(_rules(order), BOUNDARIES, _REASONS)
