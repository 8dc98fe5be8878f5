"""Evaluation and prediction as scripts: forwards in eval mode, on a branch of the State."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import count
from typing import Any, TypeAlias

from torch import Tensor

from pure_loop._batches import next_batch
from pure_loop._losses import detached
from pure_loop._notes import noting
from pure_loop._weights import WEIGHTS_ARE, counted_loss, is_number, read_weight
from pure_loop.data import map_tensors
from pure_loop.errors import DataError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics import Metric, default_metrics
from pure_loop.sources import END, Source
from pure_loop.stages import Stages
from pure_loop.state import State, outside_batch

__all__ = ["Script", "evaluate", "evaluation", "predict"]

Script: TypeAlias = Generator[tuple[Event, State], State, State]


def _no_rows(tensor: Tensor) -> Tensor:
    """Of a batch that only keeps a rank company."""
    return tensor[:0] if tensor.ndim else tensor


def _untimed() -> float:
    return 0.0


def evaluation(state: State, stages: Stages, evaluator: BoundEvaluator) -> Script:
    """One evaluator. It runs on a branch of the State: only metrics and algorithms' memory come back."""
    label, engine = evaluator.label, stages.engine
    branch = yield Event.EVAL_START, state.replace(evaluator=label, event=None)
    metrics = evaluator.metrics
    accumulated: dict[str, Any] = {}
    number = 0
    about = noting(lambda: f"raised in evaluator {label!r}, batch {number}")
    with closing(evaluator.source.epoch(0)) as batches, about:
        for number in count():
            ready = next_batch(branch, stages, evaluator.source, next(batches, END), _untimed, Event.EVAL_BATCH_START)
            if ready is None:
                break
            branch = branch.replace(batch=ready[0], microbatch=None, outputs=None, event=None)
            branch = yield Event.EVAL_BATCH_START, branch
            size = evaluator.microbatch_size
            pieces = [branch.batch] if size is None else stages.microbatches(branch.batch, size)
            for index in range(len(pieces) if size is None else engine.count(len(pieces), branch)):
                piece = pieces[min(index, len(pieces) - 1)]
                branch = yield Event.EVAL_BEFORE_FORWARD, branch.replace(microbatch=piece, outputs=None, event=None)
                options = {"gradients": True} if evaluator.gradients else {}
                branch = stages.validate(branch, label=f"eval/{label}", batch=number, index=index, **options)
                branch = yield Event.EVAL_AFTER_FORWARD, branch
                if metrics is None:
                    metrics = default_metrics(branch.outputs, branch.microbatch, stages.task)
                if not (engine.padding or index >= len(pieces)):
                    accumulated = _measure(accumulated, metrics, branch, stages, options)
                if options:
                    branch = branch.replace(outputs=detached(branch.outputs))
            branch = yield Event.EVAL_BATCH_END, branch
    accumulated = engine.measured(metrics or (), accumulated, branch)
    values = {metric.name: metric.compute(accumulated[metric.name]) for metric in metrics or ()}
    measured = FrozenDict({**branch.metrics, label: FrozenDict(values)})
    branch = branch.replace(metrics=measured, batch=None, microbatch=None, outputs=None, event=None)
    branch = yield Event.EVAL_END, branch
    return state.replace(metrics=branch.metrics, algorithm_state=branch.algorithm_state, event=None)


def _measure(
    accumulated: dict[str, Any], metrics: Sequence[Metric], branch: State, stages: Stages, options: dict[str, bool]
) -> dict[str, Any]:
    """The accumulators after one microbatch."""
    outputs, microbatch, task, measured = branch.outputs, branch.microbatch, stages.task, None
    if any(metric.of_loss for metric in metrics):
        loss = stages.validation_loss(branch, **options)
        weight = None if task.summed else read_weight(task.weigh(microbatch), "a microbatch")
        if weight is not None and is_number(weight) and not 0 <= weight < math.inf:
            raise DataError(f"a microbatch weighs {weight}: {WEIGHTS_ARE}")
        measured = loss if weight is None else counted_loss(loss, weight), weight
    if options:
        outputs = detached(outputs)
    before = accumulated or {metric.name: metric.init() for metric in metrics}
    found = {}
    for metric in metrics:
        of_loss, accumulator = metric.of_loss, before[metric.name]
        # What is a mean over nothing is left out. Where only a device knows whether it is, its loss is 0.
        nothing = of_loss and measured is not None and is_number(measured[1]) and measured[1] == 0
        given = measured if of_loss else outputs
        found[metric.name] = accumulator if nothing else metric.update(accumulator, given, microbatch)
    return found


def _settings(stages: Stages, algorithms: Sequence[str]) -> dict[str, Any]:
    """What has to be equal on all ranks."""
    return {"precision": stages.precision.name, "loss": stages.task.loss_in_words, "algorithms": list(algorithms)}


def evaluate(
    state: State, stages: Stages, evaluators: Sequence[BoundEvaluator], algorithms: Sequence[str] = ()
) -> Script:
    """Evaluation by itself; ``algorithms`` are described, for ranks to compare."""
    settings = {"evaluators": [each.described for each in evaluators], **_settings(stages, algorithms)}
    state = stages.engine.start(outside_batch(state), settings, fresh=state.position is None)
    state = yield Event.EVAL_STANDALONE_START, state
    for evaluator in evaluators:
        state = yield from evaluation(state, stages, evaluator)
    stages.engine.meet(state, Event.EVAL_STANDALONE_END)
    return (yield Event.EVAL_STANDALONE_END, state)


def predict(
    state: State, stages: Stages, source: Source, algorithms: Sequence[str] = (), *, gradients: bool = False
) -> Script:
    """Prediction: ``outputs`` at PREDICT_AFTER_FORWARD and PREDICT_BATCH_END, batch by batch."""
    settings = {"dataloader": source.described, **_settings(stages, algorithms)}
    state = stages.engine.start(outside_batch(state), settings, fresh=state.position is None)
    state = yield Event.PREDICT_START, state
    number = 0
    with closing(source.epoch(0)) as batches, noting(lambda: f"raised in prediction, batch {number}"):
        for number in count():
            ready = next_batch(state, stages, source, next(batches, END), _untimed, Event.PREDICT_BATCH_START)
            if ready is None:
                break
            state = state.replace(batch=ready[0], microbatch=None, outputs=None, event=None)
            state = yield Event.PREDICT_BATCH_START, state
            state = yield Event.PREDICT_BEFORE_FORWARD, state.replace(microbatch=state.batch, event=None)
            if gradients:
                state = stages.validate(state, label="predict", batch=number, gradients=True)
                state = state.replace(outputs=detached(state.outputs))
            else:
                state = stages.validate(state, label="predict", batch=number)
            if stages.engine.padding:
                state = state.replace(outputs=map_tensors(_no_rows, state.outputs))
            state = yield Event.PREDICT_AFTER_FORWARD, state
            state = yield Event.PREDICT_BATCH_END, state
    stages.engine.meet(state, Event.PREDICT_END)
    return (yield Event.PREDICT_END, outside_batch(state))
