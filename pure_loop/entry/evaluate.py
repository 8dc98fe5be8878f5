"""The loops that don't train: ``evaluate`` and ``predict``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag, refusal
from pure_loop._internal.suggestions import teaching
from pure_loop.algorithm import AlgorithmLike, bind
from pure_loop.callback import CallbackLike, Logger, Run
from pure_loop.data.source import Source
from pure_loop.distributed.parallel import Parallel
from pure_loop.entry import member_data, members
from pure_loop.entry.algorithm_states import refuse_other_algorithm_states
from pure_loop.entry.compiling import evaluating
from pure_loop.entry.deterministic import refuse_cublas, stream_of
from pure_loop.entry.member_callbacks import MemberRecorder, member_callbacks, member_count
from pure_loop.entry.parallel import announced
from pure_loop.entry.settings import ModelSettings
from pure_loop.entry.start import any_state
from pure_loop.errors import ArgumentTypeError
from pure_loop.evaluator import (
    BoundEvaluator,
    EvaluatorsLike,
    bind_evaluators,
    measure_loss,
    refuse_empty,
    with_own_tasks,
)
from pure_loop.event import Event, EventName
from pure_loop.loop import evaluation as loop
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.driver import Script, drive
from pure_loop.loop.stream import Stream
from pure_loop.loop.strict import Strict
from pure_loop.members.each import Each
from pure_loop.members.ensemble import Ensemble
from pure_loop.observer import bind_callbacks, observers
from pure_loop.precision import PrecisionName
from pure_loop.recorder import Recorder
from pure_loop.state import Loss, State
from pure_loop.task import Task, has_loss_method, make_task


@announced
@teaching
def evaluate(
    model_or_state: nn.Module | State | Ensemble,
    evaluators: EvaluatorsLike,
    *,
    loss: Callable[[Any, Any], Loss] | Task | None = None,
    precision: PrecisionName = "fp32",
    seed: int | Each = 0,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    device: torch.device | str | None = None,
    watch: Collection[Event | EventName] | None = None,
    compile: bool | Literal["where possible"] = False,
    strict: bool | None = None,
    deterministic: bool = False,
    parallel: Literal["replicate", "shard", False] | Parallel | None = None,
) -> Stream:
    """Evaluate without training; the last State has the results in ``state.metrics[label]``.

    Args:
        model_or_state: a module, or an ensemble, or a State of any event.
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        algorithms: algorithms that act in evaluation, such as EMA.
        loss: as in :func:`fit`; not needed where evaluators have metrics, and none is of the loss.
        strict: see to it, by value, that no State is changed in place: None: at the first event of each kind; True: at
            all, and that events come in their order; False: never.
        precision, seed, callbacks, loggers, device, watch, compile, deterministic, parallel: as in :func:`fit`.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> state = pl.run(pl.evaluate(torch.nn.Linear(2, 1), {"test": data}, loss=torch.nn.functional.mse_loss))
    >>> list(state.metrics["test"])
    ['loss']
    """
    settings = ModelSettings.of(locals())
    state = _state(settings)
    if evaluators is None:
        raise ArgumentTypeError("evaluators=None: give a dataloader, or a mapping of labels to dataloaders.")
    module, task = state.model.skeleton, loss if isinstance(loss, Task) else Task()
    bound = bind_evaluators(evaluators, "1ep", member_data.seed_of_data(state), sources=settings.parallel.sources(task))
    if state.ensemble is not None:
        bound = member_data.with_member_metrics(bound, len(state.ensemble))
    lacks_loss = loss is None or (loss is task and task.loss is None)
    if lacks_loss and not has_loss_method(module) and not measure_loss(bound, of_call=True):
        loss = attrs.evolve(task, loss=_no_loss)
    run_task = make_task(module, loss)
    bound = with_own_tasks(bound, run_task, module)
    stages = _stages(settings, state, run_task, bound)
    script = loop.evaluate(state, stages, bound, _described(settings))
    return _stream(settings, stages, script, [evaluator.source for evaluator in bound], bound)


@announced
@teaching
def predict(
    model_or_state: nn.Module | State | Ensemble,
    dataloader: Iterable[Any],
    *,
    task: Task | None = None,
    precision: PrecisionName = "fp32",
    seed: int | Each = 0,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    device: torch.device | str | None = None,
    watch: Collection[Event | EventName] | None = None,
    compile: bool | Literal["where possible"] = False,
    strict: bool | None = None,
    deterministic: bool = False,
    gradients: bool = False,
    parallel: Literal["replicate", "shard", False] | Parallel | None = None,
) -> Stream:
    """Predict: ``state.outputs`` at PREDICT_AFTER_FORWARD and PREDICT_BATCH_END, in evaluation mode.

    Args:
        model_or_state: a module, or an ensemble, or a State of any event.
        task: what the forward does with a batch; None: that of :class:`pure_loop.Task`.
        dataloader: batches as in training, ``(inputs, targets)``, or whatever ``task.validate`` takes.
        gradients: whether the forward differentiates, as in :class:`pure_loop.Evaluator`; outputs have no graph.
        strict: see to it, by value, that no State is changed in place: None: at the first event of each kind; True: at
            all, and that events come in their order; False: never, which saves a service that predicts one batch a
            call some milliseconds.
        precision, seed, algorithms, callbacks, loggers, device, watch, compile, deterministic, parallel:
            as in :func:`fit`; each rank predicts its part of every batch.

    >>> import torch, pure_loop as pl
    >>> stream = pl.predict(torch.nn.Linear(2, 1), [(torch.ones(4, 2), None)])
    >>> [state.outputs.shape for event, state in stream if event is pl.Event.PREDICT_BATCH_END]
    [torch.Size([4, 1])]
    """
    check_flag("gradients", gradients, where="pl.predict")
    if not isinstance(task, Task | None):
        raise refusal("task", task, "a Task, such as pl.Task(forward=...)", "pl.predict")
    settings = ModelSettings.of(locals())
    state = _state(settings)
    if task is None:
        module = state.model.skeleton
        task = make_task(module, None if has_loss_method(module) else _no_loss)
    data = settings.parallel.sources(task)(dataloader, seed=member_data.seed_of_data(state), stream="predict")
    refuse_empty(data, "dataloader")
    stages = _stages(settings, state, task)
    script = loop.predict(state, stages, data, _described(settings), gradients=gradients)
    return _stream(settings, stages, script, [data])


def _no_loss(outputs: object, targets: object) -> Tensor:
    raise AssertionError("no metric uses a loss")


def _state(settings: ModelSettings) -> State:
    seed, seeds = settings.seeds
    state = any_state(settings.model_or_state, seed, settings.parallel.device(settings.device), seeds)
    if settings.deterministic:
        refuse_cublas(state.device)
    if settings.precision.float8:
        from pure_loop.entry.float8 import in_float8, refuse_float8  # no other run needs it

        refuse_float8(settings.precision, state.device)
        state = in_float8(state, settings.precision)
    return state


def _stages(settings: ModelSettings, state: State, task: Task, evaluators: Sequence[BoundEvaluator] = ()) -> LoopStages:
    members.refuse_shared_settings(settings, state)
    # One that compares members has nothing to do where there is one model.
    algorithms = [item for item in settings.algorithms if state.members or not item.across_members]
    refuse_other_algorithm_states(state, algorithms)
    engine, handlers = settings.parallel.engine(state), bind(algorithms)
    if state.ensemble is not None:
        own = members.stages_of_members(handlers)
        member_stages = members.MemberStages(task=task, precision=settings.precision, **own)
        return members.evaluating_stages(settings.compile, member_stages, evaluators, state.ensemble)
    stages = LoopStages(task=task, precision=settings.precision, handlers=handlers, engine=engine)
    return evaluating(settings.compile, stages, evaluators)


def _described(settings: ModelSettings) -> list[str]:
    """What the ranks compare of the algorithms."""
    return [] if settings.parallel.parallel is None else settings.algorithms_described


def _stream(
    settings: ModelSettings,
    stages: LoopStages,
    script: Script,
    sources: Sequence[Source],
    evaluators: Sequence[BoundEvaluator] | None = None,
) -> Stream:
    engine = stages.engine
    count = member_count(settings.model_or_state)
    observed, objects, _ = observers(
        member_callbacks(settings.callbacks, count) if count else settings.callbacks,
        settings.loggers,
        MemberRecorder() if count else Recorder(),
        settings.parallel.rank,
        engine.world_size,
    )
    run = Run(
        function="predict" if evaluators is None else "evaluate",
        callbacks=objects,
        metrics={evaluator.label: evaluator.metrics for evaluator in evaluators or ()},
        ranks=engine.world_size,
        precision=settings.precision.name,
        sources=tuple(sources),
        members=count,
    )
    bind_callbacks(run)
    handlers = stages.handlers
    strict = Strict.of(settings.strict, settings.watch, {*handlers, *observed}, order="current")
    pairs = drive(
        script,
        handlers,
        observed,
        stages=stages,
        strict=strict,
        watch=settings.watch,
        closing=[*(item.close for item in objects), *(item.close for item in sources), engine.close, *run.at_end],
        failed=engine.failed,
    )
    return stream_of(pairs, settings.deterministic)
