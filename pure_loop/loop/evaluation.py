"""Evaluation and prediction as scripts: forwards in eval mode, on a branch of the State; which evaluators are due."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count

import optree
import torch
from torch import Tensor

from pure_loop._internal.bits import Digest, digest
from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.cadence import Cadence
from pure_loop.data.batch import map_tensors
from pure_loop.data.group import END
from pure_loop.data.source import Source
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.evaluator import BoundEvaluator, measure_loss
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import Script, drive
from pure_loop.metrics import Metric
from pure_loop.metrics._base import updated
from pure_loop.random.authors import is_users
from pure_loop.stages import Stages
from pure_loop.stages.loss import detached, weighed_loss
from pure_loop.stages.notes import noting
from pure_loop.state import MetricValue, State, outside_batch, with_fields


def _no_rows(tensor: Tensor) -> Tensor:
    """Of a batch that only keeps a rank company."""
    return tensor[:0] if tensor.ndim else tensor


def _untimed() -> float:
    return 0.0


def without_metrics(state: State, labels: Collection[str]) -> State:
    """The State without what evaluators of these labels have measured."""
    if state.metrics.keys().isdisjoint(labels):
        return state
    return state.replace(metrics={label: value for label, value in state.metrics.items() if label not in labels})


def _with_metrics(
    metrics: FrozenDict[str, FrozenDict[str, MetricValue]],
    label: str,
    values: FrozenDict[str, MetricValue],
    labels: Sequence[str],
) -> FrozenDict[str, FrozenDict[str, MetricValue]]:
    """Metrics with those of one evaluator, in the order of all ``labels``: which of them are due makes none."""
    measured = {**metrics, label: values}
    places = {name: place for place, name in enumerate(labels)}
    return FrozenDict({name: measured[name] for name in sorted(measured, key=lambda name: places.get(name, -1))})


def evaluation(state: State, stages: Stages, evaluator: BoundEvaluator, labels: Sequence[str] = ()) -> Script:
    """One evaluator. It runs on a branch of the State, of which only metrics and algorithm state are kept.

    ``labels`` are those of all evaluators of the call, in order.
    """
    label, engine, gradients = evaluator.label, stages.engine, evaluator.gradients
    if evaluator.task is not None:
        stages = stages.with_task(evaluator.task)
    branch = yield Event.EVAL_START, state.replace(evaluator=label, event=None)
    metrics = evaluator.metrics
    accumulated: dict[str, PyTree] = {}
    number = 0
    about = noting(lambda: f"raised in evaluator {label!r}, batch {number}")
    with closing(evaluator.source.epoch(0)) as batches, about:
        for number in count():
            loaded = next(batches, END)
            ready = engine.next_batch(branch, stages.task, evaluator.source, loaded, _untimed, Event.EVAL_BATCH_START)
            if ready is None:
                break
            branch = branch.replace(batch=ready[0], microbatch=None, outputs=None, event=None)
            stages.place.batch, stages.place.microbatch = number, 0
            branch = yield Event.EVAL_BATCH_START, branch
            size = evaluator.microbatch_size
            pieces = [branch.batch] if size is None else stages.microbatches(branch.batch, size)
            for index in range(len(pieces) if size is None else engine.num_microbatches(len(pieces), branch)):
                piece = pieces[min(index, len(pieces) - 1)]
                stages.place.microbatch = index
                branch = yield Event.EVAL_BEFORE_FORWARD, branch.replace(microbatch=piece, outputs=None, event=None)
                branch = stages.validate(branch, label=f"eval/{label}", batch=number, index=index, gradients=gradients)
                branch = yield Event.EVAL_AFTER_FORWARD, branch
                if metrics is None:
                    metrics = stages.default_metrics(branch)
                if engine.counts_microbatch(index, len(pieces)):
                    accumulated = _measure(accumulated, metrics, branch, stages, gradients)
                if gradients:
                    branch = branch.replace(outputs=detached(branch.outputs))
            stages.place.microbatch = 0
            branch = yield Event.EVAL_BATCH_END, branch
    stages.place.clear()
    with stages.guard(branch, ("merge",)) if is_users(list(metrics or ())) else nullcontext():
        accumulated = engine.merge_metrics(metrics or (), accumulated, branch)
    measured = _with_metrics(branch.metrics, label, _values(metrics or (), accumulated, branch, stages), labels)
    branch = branch.replace(metrics=measured, batch=None, microbatch=None, outputs=None, event=None)
    branch = yield Event.EVAL_END, branch
    return state.replace(metrics=branch.metrics, algorithm_state=branch.algorithm_state, event=None)


def _values(
    metrics: Sequence[Metric], accumulated: dict[str, PyTree], state: State, stages: Stages
) -> FrozenDict[str, MetricValue]:
    """What the metrics come to; an error of one of them names it."""
    label, values = state.evaluator, dict[str, MetricValue]()
    for metric in metrics:
        about = noting(lambda: f"raised by the metric {metric.name!r} ({metric!r}) of evaluator {label!r}")  # noqa: B023
        with about, _guard(state, stages, metric):
            values[metric.name] = metric.value_of(accumulated[metric.name])
    return FrozenDict(values)


def _measure(
    accumulated: dict[str, PyTree], metrics: Sequence[Metric], branch: State, stages: Stages, gradients: bool
) -> dict[str, PyTree]:
    """The accumulators after one microbatch; ``gradients``: its outputs may have a graph."""
    measured = None
    if any(metric.of_loss for metric in metrics):
        measured = weighed_loss(stages.validation_loss(branch, gradients=gradients), stages.task, branch.microbatch)
    outputs = detached(branch.outputs) if gradients else branch.outputs
    guard = partial(_guard, branch, stages)
    return updated(metrics, accumulated, *stages.task.measured(outputs, branch.microbatch), measured, guard=guard)


def _guard(state: State, stages: Stages, metric: Metric) -> AbstractContextManager[None]:
    """What a metric is called in: a user's may draw from global generators."""
    return stages.guard(state, ("metric", metric.name)) if is_users(metric) else nullcontext()


def refuse_misfit(state: State, stages: Stages, metrics: Sequence[Metric]) -> None:
    """See whether metrics that were passed fit the first microbatch of an evaluation, and keep nothing.

    Args:
        state: that of its EVAL_AFTER_FORWARD.
        stages: the loop's, with the evaluator's task.
        metrics: of its evaluator.

    Raises:
        ArgumentError: a metric gives two values for one batch.
        DataError: a metric does not, or the error that it raised; names the evaluator and the metric.
    """
    label = state.evaluator
    outputs, microbatch = stages.task.measured(detached(state.outputs), state.microbatch)
    for metric in metrics:
        if metric.of_loss:
            continue
        bits = _bits((outputs, microbatch))
        try:
            with _guard(state, stages, metric):
                numbers = _numbers(metric.update(metric.init(), outputs, microbatch))
            with _guard(state, stages, metric):
                again = _numbers(metric.update(metric.init(), outputs, microbatch))
        except Exception as error:
            kind = type(error) if isinstance(error, DataError | ArgumentError | ArgumentTypeError) else DataError
            reason = str(error) or type(error).__name__
            raise kind(
                f"evaluator {label!r}: the metric {metric.name!r} ({metric!r}) does not fit its data: {reason}"
            ) from error
        # A metric that writes to what it is given measures two batches; the checks of an evaluation name it.
        if not _are_close(numbers, again) and _bits((outputs, microbatch)) == bits:
            raise ArgumentError(
                f"evaluator {label!r}: the metric {metric.name!r} ({metric!r}) measured one batch twice, each time "
                f"from init(), and gave {_shown(numbers)}, then {_shown(again)}. It keeps something outside of its "
                "accumulator, which would go from one evaluation to the next and be lost where training resumes: "
                "let init() return a new accumulator, and update() keep all in what it returns."
            )


def _bits(value: PyTree) -> list[Digest | None]:
    return [digest(leaf) for leaf in optree.tree_leaves(value, namespace=NAMESPACE)]


def _numbers(accumulator: PyTree) -> list[Tensor]:
    """Copies of the numbers of an accumulator, which its metric may write to."""
    leaves = optree.tree_leaves(accumulator, namespace=NAMESPACE)
    tensors = [torch.tensor(float(leaf)) if isinstance(leaf, int | float) else leaf for leaf in leaves]
    return [tensor.detach().clone() for tensor in tensors if isinstance(tensor, Tensor) and _has_numbers(tensor)]


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def _are_close(tensors: list[Tensor], references: list[Tensor]) -> bool:
    """Whether they are equal, but for the order in which a device adds."""

    def close(tensor: Tensor, reference: Tensor) -> bool:
        rtol = max(1e-3, 8 * torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 1e-3
        return torch.allclose(tensor.to(torch.complex128), reference.to(torch.complex128), rtol=rtol, equal_nan=True)

    return list(map(torch.Tensor.size, tensors)) == list(map(torch.Tensor.size, references)) and all(
        map(close, tensors, references)
    )


def _shown(numbers: list[Tensor]) -> str:
    return ", ".join(str(tensor.flatten()[:3].tolist()) for tensor in numbers[:3]) or "no numbers"


def _begun(state: State, stages: Stages, **settings: object) -> State:
    """The State outside of a batch, where all ranks have met; ``settings``, and those of stages, are equal on all."""
    settings |= {"precision": stages.precision.name, "loss": stages.task.loss_in_words}
    return stages.engine.start(outside_batch(state), settings, fresh=state.position is None)


def evaluate(
    state: State, stages: Stages, evaluators: Sequence[BoundEvaluator], algorithms: Sequence[str] = ()
) -> Script:
    """Evaluation by itself; ``algorithms`` are described, for ranks to compare."""
    state = _begun(state, stages, evaluators=[item.described for item in evaluators], algorithms=algorithms)
    state = without_metrics(state, {evaluator.label for evaluator in evaluators})
    state = yield Event.EVAL_STANDALONE_START, state
    for evaluator in evaluators:
        state = yield from evaluation(state, stages, evaluator)
    stages.engine.barrier(state, Event.EVAL_STANDALONE_END)
    return (yield Event.EVAL_STANDALONE_END, state)


def predict(
    state: State, stages: Stages, source: Source, algorithms: Sequence[str] = (), *, gradients: bool = False
) -> Script:
    """Prediction: ``outputs`` at PREDICT_AFTER_FORWARD and PREDICT_BATCH_END, batch by batch."""
    state = _begun(state, stages, dataloader=source.described, algorithms=algorithms)
    state = yield Event.PREDICT_START, state
    number = 0
    with closing(source.epoch(0)) as batches, noting(lambda: f"raised in prediction, batch {number}"):
        for number in count():
            loaded = next(batches, END)
            ready = stages.engine.next_batch(state, stages.task, source, loaded, _untimed, Event.PREDICT_BATCH_START)
            if ready is None:
                break
            state = state.replace(batch=ready[0], microbatch=None, outputs=None, event=None)
            stages.place.batch = number
            state = yield Event.PREDICT_BATCH_START, state
            state = yield Event.PREDICT_BEFORE_FORWARD, state.replace(microbatch=state.batch, event=None)
            state = stages.validate(state, label="predict", batch=number, gradients=gradients)
            if gradients:
                state = state.replace(outputs=detached(state.outputs))
            if stages.task.predictions is not None:
                state = state.replace(outputs=stages.task.predictions(state.outputs))
            if stages.engine.padding:
                state = state.replace(outputs=map_tensors(_no_rows, state.outputs))
            state = yield Event.PREDICT_AFTER_FORWARD, state
            state = yield Event.PREDICT_BATCH_END, state
    stages.place.clear()
    stages.engine.barrier(state, Event.PREDICT_END)
    return (yield Event.PREDICT_END, outside_batch(state))


def refuse_misfits(state: State, stages: LoopStages, evaluators: Sequence[BoundEvaluator]) -> None:
    """Refuse metrics that do not fit what they measure, before training: hours may pass before the first evaluation.

    Each evaluator with metrics that were passed measures one microbatch of its data, on a branch that is dropped; so
    does one that measures the loss, where the task has another forward in evaluation, which the loss may not fit. Left
    out is data that can't be begun again, or has workers to start, and what several ranks would have to do together.
    """
    if stages.engine.exchanges:
        return
    for evaluator in evaluators:
        never = isinstance(evaluator.interval, Cadence) and not evaluator.interval.interval
        own = stages if evaluator.task is None else stages.with_task(evaluator.task)
        of_loss = own.task.validate is not None and measure_loss([evaluator])
        passed = not all(metric.of_loss for metric in evaluator.metrics or ())
        if evaluator.source.repeats and not never and (of_loss or passed):
            script, label = evaluation(state, stages, evaluator), evaluator.label
            about = noting(lambda: f"raised by the first microbatch of evaluator {label!r}, before training")  # noqa: B023
            with closing(script), about:
                for _, evaluated in drive(script, stages.handlers, stages=stages, watch={Event.EVAL_AFTER_FORWARD}):
                    if of_loss:
                        own.validation_loss(evaluated, gradients=evaluator.gradients)
                    refuse_misfit(evaluated, own, evaluator.metrics or ())
                    break


def due_evaluators(state: State, fit: Fit, event: Event) -> list[BoundEvaluator]:
    """The evaluators due at BATCH_END or EPOCH_END; at FIT_END those that did not run at the last batch.

    A function that is an interval is asked about a State without the metrics of evaluators: its answer is the same
    before and after :func:`current`, and where training resumes in between.
    """
    if not all(isinstance(evaluator.interval, Cadence) for evaluator in fit.evaluators):
        if fit.stages.workspace.ownership is not None:
            fit.stages.workspace.ownership.observed = True  # a function of the user's is shown the State
        state = without_metrics(state, {evaluator.label for evaluator in fit.evaluators})
    due = []
    for evaluator in fit.evaluators:
        users = is_users(evaluator.interval)
        at = with_fields(state, event=event) if users else state
        with fit.stages.guard(at, ("interval", evaluator.label)) if users else nullcontext():
            if evaluator.due_at_end(state) if event is Event.FIT_END else evaluator.due(state, event):
                due.append(evaluator)
    return due


def current(state: State, fit: Fit, event: Event) -> State:
    """The State of BATCH_END or EPOCH_END, without metrics that are about to be measured again at this event.

    They are those of an earlier evaluation, and would be taken for those of the batch or epoch that has just ended.
    """
    if state.metrics.keys().isdisjoint([evaluator.label for evaluator in fit.evaluators]):
        return state
    return without_metrics(state, {evaluator.label for evaluator in due_evaluators(state, fit, event)})


def evaluations(state: State, fit: Fit, *events: Event) -> Script:
    """The evaluators that are due at one of these events; decided before the first one runs."""
    requested = [item for event in events for item in due_evaluators(state, fit, event)]
    due_now = [item for item in fit.evaluators if item in requested]
    if not due_now:
        return state
    state = without_metrics(state, {item.label for item in due_now})
    fit.boundary.state = state if state.event is not None else state.replace(event=state.position)
    state = yield Event.EVAL_BEFORE_ALL, state
    labels = [item.label for item in fit.evaluators]
    for evaluator in due_now:
        state = yield from evaluation(state, fit.evaluating, evaluator, labels)
    state = yield Event.EVAL_AFTER_ALL, state
    fit.boundary.state = None
    return state
