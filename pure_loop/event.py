"""The events of a training run: the words in which everything else is said.

An event names a moment. :func:`pure_loop.entry.fit` yields one at each of them, algorithms and callbacks are
bound to them, and :mod:`pure_loop.order` says in which order they come.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

__all__ = ["Event", "EventName"]

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


class Event(StrEnum):
    """A moment of training, evaluation or prediction; a ``str`` whose value is its name in lower case.

    Attributes:
        is_before_event: something is about to happen (``BEFORE_*``, ``*_START``, ``*_BEFORE_*``).
        is_after_event: something has just happened (``AFTER_*``, ``*_END``, ``*_AFTER_*``). INIT and the
            checkpoints are neither.
        canonical_name: what it is about: the value without before, after, start and end. The two halves
            of a pair have the same one.
        is_eval: it belongs to evaluation, inside ``fit`` or by itself.
        is_predict: it belongs to prediction.

    Raises:
        ValueError: for a name that no event has; the message gives the nearest one.

    >>> Event("epoch_end") is Event("EPOCH_END") is Event.EPOCH_END
    True
    >>> Event.EPOCH_END.is_after_event, Event.EPOCH_END.canonical_name
    (True, 'epoch')
    >>> Event.EVAL_BEFORE_ALL.canonical_name
    'eval_all'
    >>> Event.TRAINING_START  # the name in older documents
    Event.FIT_START
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

    def __repr__(self) -> str:
        return f"Event.{self.name}"

    @classmethod
    def _missing_(cls, value: object) -> Event:
        name = value.strip().upper() if isinstance(value, str) else repr(value)
        if name in cls.__members__:
            return cls.__members__[name]
        import difflib  # only on the way to an error

        near = difflib.get_close_matches(name, cls.__members__, n=1)
        hint = f"; did you mean Event.{near[0]}?" if near else f"; the events are {', '.join(cls.__members__)}"
        raise ValueError(f"{value!r} is not an event{hint}")
