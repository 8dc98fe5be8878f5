"""Streams of events in words."""

from __future__ import annotations

from pure_loop.event import Event
from pure_loop.order import EvaluatorPlan

# Written by hand, from the specification: what stands in small letters is made of events. A batch of one microbatch is
# "batch", an evaluation of one batch "val"; "+" says that an evaluation is in it.
WORDS = {
    "load": "INIT BEFORE_LOAD AFTER_LOAD",
    "micro": "BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD",
    "take": "BEFORE_DATALOADER AFTER_DATALOADER",
    "batch": "BATCH_START BEFORE_TRAIN_BATCH micro AFTER_TRAIN_BATCH BATCH_END",
    "batch/2": "BATCH_START BEFORE_TRAIN_BATCH micro micro AFTER_TRAIN_BATCH BATCH_END",
    "pass": "EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD",
    "val_batch": "EVAL_BATCH_START pass EVAL_BATCH_END",
    "val_batch/2": "EVAL_BATCH_START pass pass EVAL_BATCH_END",
    "val": "EVAL_START val_batch EVAL_END",
    "val_of_2": "EVAL_START val_batch val_batch EVAL_END",
    "evals": "EVAL_BEFORE_ALL val EVAL_AFTER_ALL",
    "step": "take batch BATCH_CHECKPOINT",
    "step+": "take batch evals BATCH_CHECKPOINT",
    "close": "EPOCH_END EPOCH_CHECKPOINT",
    "close+": "EPOCH_END evals EPOCH_CHECKPOINT",
    "ask": "BEFORE_DATALOADER",
    "epoch": "EPOCH_START",
    "iteration": "ITERATION_END ITERATION_CHECKPOINT",
    "predicted": "PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END",
}


def events(text: str) -> list[Event]:
    return [event for word in text.split() for event in (events(WORDS[word]) if word in WORDS else [Event(word)])]


ONE = EvaluatorPlan(batches=(4,))
