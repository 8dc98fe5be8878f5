"""The evaluators of a call of ``fit``: which are due, and their evaluations one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from pure_loop._internal.closing import closing
from pure_loop.cadence import Cadence
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import drive
from pure_loop.loop.evaluation import Script, evaluation, refuse_misfit, without_metrics
from pure_loop.random.guards import is_users
from pure_loop.stages.notes import noting
from pure_loop.state import State, with_fields

__all__ = ["current", "evaluations", "refuse_misfits"]


def refuse_misfits(state: State, stages: LoopStages, evaluators: Sequence[BoundEvaluator]) -> None:
    """Refuse metrics that do not fit what they measure, before training: hours may pass before the first evaluation.

    Each evaluator with metrics that were passed measures one microbatch of its data, on a branch that is dropped. Left
    out is data that can't be begun again, or has workers to start, and what several ranks would have to do together.
    """
    if stages.engine.exchanges:
        return
    for evaluator in evaluators:
        never = isinstance(evaluator.interval, Cadence) and not evaluator.interval.interval
        if evaluator.source.repeats and not never and not all(metric.of_loss for metric in evaluator.metrics or ()):
            script, label = evaluation(state, stages, evaluator), evaluator.label
            about = noting(lambda: f"raised by the first microbatch of evaluator {label!r}, before training")  # noqa: B023
            with closing(script), about:
                for _, shown in drive(script, stages.handlers, stages=stages, watch={Event.EVAL_AFTER_FORWARD}):
                    refuse_misfit(shown, stages, evaluator.metrics or ())
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
