"""The plan of a call of ``fit``: from its settings to its State, engine, data, stages and evaluators.

Nothing is run here and no data is loaded. ``explain`` prints a plan, ``assembly.py`` makes what the loop needs of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

import attrs
from torch import nn

from pure_loop.algorithm import bind
from pure_loop.callback import Callback, LoggerGroup
from pure_loop.data.group import steps
from pure_loop.data.source import Source
from pure_loop.entry import member_data, members
from pure_loop.entry.auto_size import AutoSize
from pure_loop.entry.compiling import compiler
from pure_loop.entry.deterministic import refuse_cublas
from pure_loop.entry.member_callbacks import MemberRecorder, member_callbacks, member_count
from pure_loop.entry.resume import read_start, saving, seed_of
from pure_loop.entry.schedule_checks import refuse_endless_warmups
from pure_loop.entry.settings import Settings
from pure_loop.entry.start import Start, first_state
from pure_loop.errors import ArgumentError
from pure_loop.evaluator import BoundEvaluator, bind_evaluators, refuse_empty, with_own_tasks
from pure_loop.event import Event
from pure_loop.hooks import Observer
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Strategy
from pure_loop.loop.training import Eager
from pure_loop.members.ensemble import Ensemble
from pure_loop.members.turns import of_each
from pure_loop.model.checks import refuse_sync_batchnorm
from pure_loop.observer import observers
from pure_loop.recorder import Recorder
from pure_loop.stages import Stages
from pure_loop.stages.engine import Engine
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import can_count
from pure_loop.stages.settings import FoundSize
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State
from pure_loop.task import Task, make_task

if TYPE_CHECKING:
    from pure_loop.checkpoint.checkpoint import Checkpoint

# Callbacks and loggers by event.
Observers = Mapping[Event, tuple[Observer, ...]]


@attrs.frozen(kw_only=True)
class Plan:
    """What a call of ``fit`` is about to do.

    Attributes:
        settings: its arguments.
        checkpoint: where the numbers of the State come from, at BEFORE_LOAD; None: from ``state``.
        state: the State that it starts from.
        fresh: whether it starts from a module, with INIT.
        start: what a State has to fit, and what it lacks before training.
        stages: those of a batch.
        strategy: how batches are computed.
        evaluating: the stages of evaluations.
        source: the batches of training.
        evaluators: those of the call.
        observers: callbacks and loggers by event.
        callbacks: all Callback objects, loggers last.
        logger: what is given to callbacks.
    """

    settings: Settings
    checkpoint: Checkpoint | None
    state: State
    fresh: bool
    start: Start
    stages: LoopStages
    strategy: Strategy
    evaluating: Stages
    source: Source
    evaluators: tuple[BoundEvaluator, ...]
    observers: dict[Event, tuple[Observer, ...]]
    callbacks: tuple[Callback, ...]
    logger: LoggerGroup

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """
        Raises:
            ArgumentError, ArgumentTypeError, ModelError, DataError, ResumeError: for what can't run.
        """
        beginning, checkpoint = read_start(
            settings.model_or_state, settings.load_path, settings.autoresume, settings.seeds[0], settings.run_name
        )
        count = member_count(beginning)
        attached = saving(settings.autoresume, settings.callbacks)
        observed, callbacks, logger = observers(
            member_callbacks(attached, count) if count else attached,
            settings.loggers,
            _recorder(settings, MemberRecorder if count else Recorder),
            settings.parallel.rank,
            settings.parallel.ranks,
        )
        state, fresh = _beginning(settings, beginning, checkpoint)
        measures_norm = any(callback.needs_grad_norm for callback in callbacks)
        stages = _stages(settings, state, observed, measures_norm=measures_norm)
        open_source = settings.parallel.sources(stages.task)
        source = _training_data(settings, open_source, state)
        start = Start(
            settings.optimizer,
            settings.precision,
            settings.algorithms,
            settings.max_duration,
            settings.parallel,
            stages.engine,
            source,
            stages.task,
        )
        state = start.fitted(state)
        of_each(partial(_refuse_endless_warmups, settings, state, stages), len(state.ensemble or ()))
        evaluators = _evaluators(settings, open_source, state, stages.task)
        if state.ensemble is None:
            stages, strategy, evaluating = _computation(settings, stages, observed, evaluators)
        else:
            stages, strategy, evaluating = members.computation(settings, stages, observed, evaluators, state.ensemble)
        return cls(
            settings=settings,
            checkpoint=checkpoint,
            state=state,
            fresh=fresh,
            start=start,
            stages=stages,
            strategy=strategy,
            evaluating=evaluating,
            source=source,
            evaluators=evaluators,
            observers=observed,
            callbacks=callbacks,
            logger=logger,
        )

    def described(self) -> dict[str, object]:
        """What has to be equal on all ranks, by the name in an error."""
        settings = self.settings
        return {
            "seed": self.state.seed,
            "max_duration": str(settings.max_duration),
            "precision": settings.precision.name,
            "microbatch_size": settings.microbatch_size,
            "optimizer": repr(settings.optimizer),
            "nonfinite": settings.nonfinite,
            "clip_grad": settings.clip_grad,
            "batches_per_epoch": settings.batches_per_epoch,
            "batches_per_step": settings.batches_per_step,
            "learning rate": settings.optimizer.lr(self.state.timestamp),
            "loss": self.stages.task.loss_in_words,
            "eval_interval": [str(evaluator.interval) for evaluator in self.evaluators],
            "algorithms": settings.algorithms_described,
            "evaluators": [evaluator.described for evaluator in self.evaluators],
            "compile": settings.compile,
            "steps_per_call": settings.steps_per_call,
            "verify": str(settings.verify),
            "train_dataloader": self.source.described,
            "iteration_length": str(settings.iteration_length),
            "order": settings.order,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
        }


def _refuse_endless_warmups(settings: Settings, state: State, stages: LoopStages) -> None:
    refuse_endless_warmups(
        settings.optimizer,
        settings.algorithms,
        state.timestamp,
        settings.iteration_length,
        settings.train_dataloader,
        stages.task,
        batches_per_step=settings.batches_per_step,
        ranks=stages.engine.ranks,
    )


def _recorder(settings: Settings, kind: type[Recorder]) -> Recorder:
    if isinstance(settings.loggers, tuple) and not settings.loggers:
        return kind(settings.optimizer)  # nothing is recorded
    from pure_loop.entry.record import hyperparameters  # only loggers need it

    recorded, measured = hyperparameters(settings), bool(settings.train_metrics)
    return kind(settings.optimizer, recorded, settings.algorithms, train_metrics=measured)


def _beginning(
    settings: Settings, beginning: nn.Module | State | Ensemble, checkpoint: Checkpoint | None
) -> tuple[State, bool]:
    """The State to start from, on its device and in its precision, and whether it is a fresh start."""
    seed, seeds = settings.seeds
    seed = seed_of(checkpoint, seed)
    state, fresh = first_state(beginning, seed, settings.parallel.device(settings.device), seeds)
    members.refuse_settings(settings, state)
    if settings.parallel.ranks > 1:
        refuse_sync_batchnorm(state.model.skeleton, state.device)
    if settings.deterministic:
        refuse_cublas(state.device)
    if settings.precision.float8:
        from pure_loop.entry.float8 import (  # no other run needs it
            changes_at_init,
            in_float8,
            refuse_float8,
            refuse_no_layer,
        )

        refuse_float8(settings.precision, state.device)
        if not fresh:
            state = in_float8(state, settings.precision)
        elif not changes_at_init(settings.algorithms):
            refuse_no_layer(state.model.skeleton)
    return state, fresh


def _stages(settings: Settings, state: State, observed: Observers, *, measures_norm: bool) -> LoopStages:
    engine = settings.parallel.engine(state)
    handlers, watch = bind(settings.algorithms), settings.watch
    own: dict[str, Any] = {}
    if state.ensemble is not None:
        own = members.stages_of_members(handlers)
        handlers, engine = own.pop("handlers"), own.pop("engine")
    everything = watch is None or settings.strict
    return (members.MemberStages if own else LoopStages)(
        **own,
        task=_task(settings, state),
        engine=engine,
        optimizer=settings.optimizer,
        precision=settings.precision,
        microbatch_size=settings.fixed_size,
        found=FoundSize() if settings.microbatch_size == "auto" else None,
        clip_grad=settings.clip_grad,
        nonfinite=settings.nonfinite,
        measures_norm=measures_norm,
        strict=bool(settings.strict),
        handlers=handlers,
        workspace=Workspace(_ownership(settings, engine, {*observed, *handlers})),
        observed=frozenset(Event) if everything else frozenset({*(watch or ()), *observed, *handlers}),
    )


def _task(settings: Settings, state: State) -> Task:
    task = make_task(state.model.skeleton, settings.loss)
    return task if settings.batches_per_step == 1 else task.of_groups()


def _ownership(settings: Settings, engine: Engine, attached: Collection[Event]) -> Ownership | None:
    """What decides where a step may write; None: it copies."""
    compiled = (settings.compile is not False or isinstance(engine, member_data.MemberEngine)) and not engine.in_parts
    overwrites = compiled or settings.optimizer.overwrite is not None
    if settings.strict or not settings.donate or not overwrites:
        return None
    if settings.donate == "auto" and not can_count():
        return None
    ownership = Ownership(always=settings.donate is True, watch=settings.watch, attached=attached, compiled=compiled)
    ownership.shares_storage, ownership.is_of_ranks = engine.shares_storage, engine.exchanges
    return ownership


def _training_data(settings: Settings, open_source: Callable[..., Source], state: State) -> Source:
    """
    Raises:
        ArgumentTypeError: the data can't be iterated.
        ArgumentError: epochs of more batches than a loader has.
        DataError: data that says that it has no batch.
    """
    limit, per_step = settings.batches_per_epoch, settings.batches_per_step
    seed = member_data.seed_of_data(state)
    if state.ensemble is not None and state.data_seed is None:
        open_source = member_data.member_sources(open_source, state.ensemble.seeds)
    data = open_source(
        settings.train_dataloader, seed=seed, stream="train", batches_per_epoch=limit, batches_per_step=per_step
    )
    refuse_empty(data, "train_dataloader")
    length = None if data.loader_length is None else steps(data.loader_length, per_step)
    # Ranks with data of their own may have unequally many.
    if limit is not None and length is not None and limit > length and data.uneven is None:
        batches = "batches," if per_step == 1 else f"batches, by batches_per_step={per_step},"
        raise ArgumentError(
            f"batches_per_epoch={limit}: train_dataloader has {length} {batches} and its epochs can only be "
            f"cut; write a number up to {length}, or leave batches_per_epoch out. To go through it several times in an "
            "epoch, repeat its data (torch.utils.data.ConcatDataset, or a list times a number)."
        )
    return data


def _evaluators(
    settings: Settings, open_source: Callable[..., Source], state: State, task: Task
) -> tuple[BoundEvaluator, ...]:
    """
    Raises:
        ArgumentError: an evaluator has the label of the metrics of training.
    """
    seed = member_data.seed_of_data(state)
    evaluators = bind_evaluators(
        settings.evaluators, settings.eval_interval, seed, settings.max_duration, sources=open_source
    )
    evaluators = with_own_tasks(evaluators, task, state.model.skeleton)
    if state.ensemble is not None:
        evaluators = member_data.with_member_metrics(evaluators, len(state.ensemble))
    if settings.train_metrics and any(evaluator.label == "train" for evaluator in evaluators):
        raise ArgumentError(
            "the label 'train' of an evaluator is that of train_metrics=, in state.metrics['train']: give the "
            'evaluator another one, evaluators={"train_data": ...}.'
        )
    return evaluators


def _computation(
    settings: Settings, stages: LoopStages, observed: Observers, evaluators: tuple[BoundEvaluator, ...]
) -> tuple[LoopStages, Strategy, Stages]:
    """The stages of a batch, its handlers recorded to verify it; how batches are computed; those of an evaluation."""
    strategy: Strategy = Eager()
    if settings.verify is not None:
        from pure_loop.verify.verify import Recorder, Verified, recorded  # no other run needs it

        recorder = Recorder()
        stages = attrs.evolve(stages, handlers=recorded(stages.handlers, recorder))
        strategy = Verified(int(settings.verify.value), stages, recorder)
    compiled = compiler(settings, stages, observed, evaluators)
    if compiled is not None:
        strategy = cast("Strategy", compiled)  # its script asks the driver for counts, too
    evaluating = stages if compiled is None else compiled.evaluating
    return stages, strategy if stages.found is None else AutoSize(stages, strategy), evaluating
