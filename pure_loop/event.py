"""The events of a training run: the words in which everything else is said.

An event names a moment. :func:`pure_loop.entry.fit` yields one at each of them, algorithms and callbacks are
bound to them, and :mod:`pure_loop.order` says in which order they come.
"""

from __future__ import annotations

from enum import EnumType, StrEnum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from pure_loop.errors import ArgumentError, EventNameError, MissingNameError

__all__ = ["Event", "EventName", "as_event", "events_between", "nearest_event"]

# tests/typing compares it with the members of Event.
EventName: TypeAlias = Literal[
    "init",
    "before_load",
    "after_load",
    "fit_start",
    "epoch_start",
    "before_dataloader",
    "after_dataloader",
    "batch_start",
    "before_train_batch",
    "before_forward",
    "after_forward",
    "before_loss",
    "after_loss",
    "before_backward",
    "after_backward",
    "after_train_batch",
    "batch_end",
    "batch_checkpoint",
    "epoch_end",
    "epoch_checkpoint",
    "fit_end",
    "eval_before_all",
    "eval_start",
    "eval_batch_start",
    "eval_before_forward",
    "eval_after_forward",
    "eval_batch_end",
    "eval_end",
    "eval_after_all",
    "eval_standalone_start",
    "eval_standalone_end",
    "predict_start",
    "predict_batch_start",
    "predict_before_forward",
    "predict_after_forward",
    "predict_batch_end",
    "predict_end",
    "iteration_start",
    "iteration_end",
    "iteration_checkpoint",
]
"""The name of an event, as a text."""


class _EventType(EnumType):
    """The class of :class:`Event`: a name that no event has is an error that gives the nearest one."""

    if not TYPE_CHECKING:  # a type checker finds such a name, unless it is told that any name may be there

        def __getattr__(cls, name: str) -> NoReturn:
            raise AttributeError(f"Event.{name} is not an event{_suggestion(name)}", name=name)

    def __getitem__(cls, name: str) -> Any:
        if name not in cls.__members__:
            raise MissingNameError(f"Event[{name!r}] is not an event{_suggestion(name)}")
        return cls.__members__[name]


class Event(StrEnum, metaclass=_EventType):
    """A moment of training, evaluation or prediction; a ``str`` with its name in lower case as the value.

    An event equals its value. A comparison with any other text that is no event's value raises, because it would never
    be true. A set or a dict finds texts by their hash and raises nothing: write events into it, ``{Event.BATCH_END}``.

    Attributes:
        is_before_event: something is about to happen (``BEFORE_*``, ``*_START``, ``*_BEFORE_*``).
        is_after_event: something has just happened (``AFTER_*``, ``*_END``, ``*_AFTER_*``). INIT and the
            checkpoints are neither.
        canonical_name: what it is about: the value without before, after, start and end. The two halves
            of a pair have the same one.
        is_eval: it belongs to evaluation, inside ``fit`` or by itself.
        is_predict: it belongs to prediction.

    Raises:
        EventNameError: (a ValueError) for a name that no event has, and for a comparison with such a text; the message
            gives the nearest event.

    >>> Event("epoch_end") is Event("EPOCH_END") is Event.EPOCH_END
    True
    >>> Event.EPOCH_END.is_after_event, Event.EPOCH_END.canonical_name
    (True, 'epoch')
    >>> Event.EVAL_BEFORE_ALL.canonical_name
    'eval_all'
    >>> Event.TRAINING_START  # the name in older documents
    Event.FIT_START
    >>> Event.BATCH_END == "batch_ends"
    Traceback (most recent call last):
    ...
    pure_loop.errors.EventNameError: an event is compared with 'batch_ends', which is no event and never comes; did \
you mean 'batch_end' (Event.BATCH_END)?
    """

    # Attributes, not properties: they are read at every event of every batch.
    is_before_event: bool
    is_after_event: bool
    is_eval: bool
    is_predict: bool
    canonical_name: str

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    ITERATION_START = "iteration_start"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"

    TRAINING_START = "fit_start"
    TRAINING_END = "fit_end"

    def __init__(self, value: str) -> None:
        words = value.split("_")
        self.is_before_event = "before" in words or words[-1] == "start"
        self.is_after_event = "after" in words or words[-1] == "end"
        self.is_eval = words[0] == "eval"
        self.is_predict = words[0] == "predict"
        self.canonical_name = "_".join(word for word in words if word not in ("before", "after", "start", "end"))

    def __eq__(self, other: object) -> bool:
        member = _BY_VALUE.get(other) if type(other) is str else None  # first, because a body asks at every event
        if member is not None:
            return member is self
        if other is self:
            return True
        if not isinstance(other, str):
            return NotImplemented
        if isinstance(other, Event):
            return False
        text = str.__str__(other)  # of a class of its own
        if text not in _BY_VALUE:
            raise EventNameError(
                f"an event is compared with {text!r}, which is no event and never comes{_advice(text)}"
            )
        return str.__eq__(self, text)

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return f"Event.{self.name}"

    @classmethod
    def _missing_(cls, value: object) -> Event:
        member = cls.__members__.get(value.strip().upper()) if isinstance(value, str) else None
        if member is None:
            raise EventNameError(f"{value!r} is not an event{_suggestion(value)}")
        return member


_BY_VALUE: dict[str, Event] = {event.value: event for event in Event}


def events_between(first: Event, last: Event) -> frozenset[Event]:
    """These two events, and those that are declared between them: of one batch it is the order in which they come.

    >>> sorted(events_between(Event.BEFORE_FORWARD, Event.BEFORE_LOSS))
    [Event.AFTER_FORWARD, Event.BEFORE_FORWARD, Event.BEFORE_LOSS]
    """
    events = list(Event)
    return frozenset(events[events.index(first) : events.index(last) + 1])


def nearest_event(name: object, cutoff: float = 0.6) -> Event | None:
    """The event that was probably meant, if there is one; names of other libraries are ``on_train_batch_end``."""
    import difflib  # only on the way to an error
    import re

    if not isinstance(name, str):
        return None
    words = re.sub("([a-z])([A-Z])", r"\1_\2", name).strip().upper().replace("-", "_").replace(" ", "_")
    words = re.sub("^(VALIDATION|VAL|TEST)_", "EVAL_", words.removeprefix("ON_"))
    if words.removeprefix("TRAIN_") in Event.__members__:
        words = words.removeprefix("TRAIN_")
    near = difflib.get_close_matches(words, Event.__members__, n=1, cutoff=cutoff)
    return Event.__members__[near[0]] if near else None


def _suggestion(name: object) -> str:
    """The end of an error about a name that no event has."""
    near = nearest_event(name)
    return (
        f"; the events are {', '.join(event.name for event in Event)}" if near is None else f"; did you mean {near!r}?"
    )


def _advice(text: str) -> str:
    near = nearest_event(text)
    return _suggestion(text) if near is None else f"; did you mean {near.value!r} ({near!r})?"


def as_event(value: object, where: str) -> Event:
    """The event that an argument names.

    Raises:
        ArgumentError: there is none; the message begins with ``where`` and gives the nearest one.
    """
    try:
        return Event(value)  # type: ignore[arg-type]
    except EventNameError as error:
        raise ArgumentError(f"{where}: {error}") from None
