"""A call of ``fit``, assembled: from its settings to its State, engine, data, stages and script, and to its stream.

Nothing is run here and no data is loaded: :func:`assemble` builds what the loop needs, and what ``explain`` shows;
:func:`start` makes the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import attrs

from pure_loop.algorithm import bind
from pure_loop.callback import LoggerGroup
from pure_loop.callback import Run as BoundRun
from pure_loop.data.batch import num_tokens
from pure_loop.data.group import steps
from pure_loop.data.source import Source
from pure_loop.entry.auto_size import AutoSize
from pure_loop.entry.compiling import compiler
from pure_loop.entry.counted import counted_in, of_fit, refuse_no_iterations
from pure_loop.entry.deterministic import refuse_cublas, stream_of
from pure_loop.entry.resume import loading, read_start, saving, seed_of
from pure_loop.entry.run_name import new_run_name, noted_run_name, recorded_run_name
from pure_loop.entry.settings import Settings
from pure_loop.entry.start import first_state, preparation, refuse_no_boundary, refuse_other_optimizer
from pure_loop.entry.warmups import refuse_endless_warmups
from pure_loop.errors import ArgumentError
from pure_loop.evaluator import BoundEvaluator, bind_evaluators, refuse_empty, with_own_tasks
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Fit, LastBoundary, Strategy
from pure_loop.loop.driver import drive
from pure_loop.loop.observers import Observer, bind_callbacks, observers
from pure_loop.loop.order_2021 import script_of
from pure_loop.loop.stream import Stream
from pure_loop.loop.strict import Strict
from pure_loop.loop.training import Eager
from pure_loop.random.guards import guard, is_users
from pure_loop.recorder import Recorder
from pure_loop.stages.engine import Engine
from pure_loop.stages.ownership import Ownership, can_count
from pure_loop.stages.sizes import FoundSize
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State
from pure_loop.task import Task, make_task
from pure_loop.time import TimestampFields, TimeUnit

if TYPE_CHECKING:
    from pure_loop.checkpoint.checkpoint import Checkpoint

__all__ = ["Assembly", "assemble", "start"]

# Callbacks and loggers by event.
Observers = Mapping[Event, tuple[Observer, ...]]


@attrs.frozen(kw_only=True)
class Assembly:
    """One call of ``fit``, ready to run.

    Attributes:
        settings: its arguments.
        state: the State that it starts from.
        fit: what the script needs besides a State.
        observers: callbacks and loggers by event.
        run: what callbacks and loggers are bound to.
        logger: what is given to callbacks.
        checkpoint: where the numbers of the State come from, at BEFORE_LOAD; None: from ``state``.
    """

    settings: Settings
    state: State
    fit: Fit
    observers: dict[Event, tuple[Observer, ...]]
    run: BoundRun
    logger: LoggerGroup
    checkpoint: Checkpoint | None


def assemble(settings: Settings) -> Assembly:
    """Build what a call of ``fit`` runs.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError, DataError, ResumeError: for what can't run, before anything runs.
    """
    together, optimizer = settings.parallel, settings.optimizer
    beginning, checkpoint = read_start(
        settings.model_or_state, settings.load_path, settings.autoresume, settings.seed, settings.run_name
    )
    observed, callbacks, logger = observers(
        saving(settings.autoresume, settings.callbacks),
        settings.loggers,
        _recorder(settings),
        together.rank,
        together.ranks,
    )
    state, fresh = first_state(beginning, seed_of(checkpoint, settings.seed), together.device(settings.device))
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
    engine = together.engine(state)
    measures_norm = any(callback.needs_grad_norm for callback in callbacks)
    stages = _stages(settings, state, engine, observed, measures_norm=measures_norm)
    stages, strategy = _strategy(settings, stages)
    open_source = together.sources(stages.task)
    data = _training_data(settings, open_source, state.seed)
    known = _Start(settings, engine, data, stages.task)
    state = known.fitted(state)
    refuse_endless_warmups(
        optimizer,
        settings.algorithms,
        state.timestamp,
        settings.iteration_length,
        settings.train_dataloader,
        stages.task,
        batches_per_step=settings.batches_per_step,
        ranks=engine.ranks,
    )
    evaluators = bind_evaluators(
        settings.evaluators, settings.eval_interval, state.seed, settings.max_duration, sources=open_source
    )
    evaluators = with_own_tasks(evaluators, stages.task)
    if settings.train_metrics and any(evaluator.label == "train" for evaluator in evaluators):
        raise ArgumentError(
            "the label 'train' of an evaluator is that of train_metrics=, in state.metrics['train']: give the "
            'evaluator another one, evaluators={"train_data": ...}.'
        )
    boundary = LastBoundary()
    run = BoundRun(
        function="fit",
        callbacks=callbacks,
        optimizer=optimizer,
        metrics={evaluator.label: evaluator.metrics for evaluator in evaluators},
        order=settings.order,
        max_duration=settings.max_duration,
        iteration_length=settings.iteration_length,
        ranks=engine.ranks,
        task=stages.task,
        precision=settings.precision.name,
        microbatch_size=_fixed_size(settings),
        algorithms=tuple(settings.algorithms_described),
        device=state.device,
        sources=(data, *(evaluator.source for evaluator in evaluators)),
        boundary=boundary,
        run_name=_run_name(settings, state, checkpoint, logger, together.rank),
        autoresume=settings.autoresume,
        resumed_from=None if checkpoint is None else checkpoint.path,
    )
    bind_callbacks(run)
    for algorithm in settings.algorithms:
        if algorithm.bind is not None:
            with guard(state, ("bind", algorithm.name)) if is_users(algorithm.bind) else nullcontext():
                algorithm.bind(run)
    counted = list(of_fit(optimizer, settings.algorithms, evaluators, callbacks))
    if settings.iteration_length is None:
        refuse_no_iterations(counted)

    def described() -> dict[str, Any]:
        return _described(settings, state, stages, data, evaluators, checkpoint)

    compiled = compiler(settings, stages, observed, evaluators)
    if compiled is not None:
        strategy = cast("Strategy", compiled)  # whose script asks the driver for counts, too
    prepare = known.preparation(described, fresh=fresh)
    resume = known.preparation(described, fresh=False)
    units = {time.unit for time in (settings.max_duration, settings.iteration_length) if time is not None}
    return Assembly(
        settings=settings,
        state=state,
        fit=Fit(
            stages=stages,
            source=data,
            evaluators=evaluators,
            iteration_length=settings.iteration_length,
            clock=settings.clock,
            fresh=fresh,
            meet=together.beginning(engine, described),
            prepare=prepare,
            counts_tokens=TimeUnit.TOKEN in units,
            # A count of the user's own may begin later.
            needs_tokens=counted_in(TimeUnit.TOKEN, counted) if stages.task.tokens is num_tokens else None,
            order=settings.order,
            boundary=boundary,
            strategy=strategy if stages.found is None else AutoSize(stages, strategy),
            evaluating=stages if compiled is None else compiled.evaluating,
            load=loading(
                checkpoint,
                None if Event.INIT in stages.handlers else state,
                known.refuse_misfit,
                lambda loaded: resume(known.fitted(loaded)),
            ),
        ),
        observers=observed,
        run=run,
        logger=logger,
        checkpoint=checkpoint,
    )


def start(assembly: Assembly) -> Stream:
    """The stream of a call."""
    settings, observed, fit = assembly.settings, assembly.observers, assembly.fit
    stages, handlers = fit.stages, fit.stages.handlers
    strict = Strict.of(
        settings.strict,
        settings.watch,
        frozenset({*handlers, *observed}),
        order=fit.order,
        loaded=fit.load is not None,
        batches=2,
    )
    script, events = script_of(assembly.state, fit)
    pairs = drive(
        script,
        handlers,
        observed,
        stages=stages,
        strict=strict,
        watch=settings.watch,
        events=events,
        ownership=stages.workspace.ownership,
        closing=_closing(assembly),
        failed=stages.engine.failed,
    )
    return stream_of(pairs, settings.deterministic)


def _recorder(settings: Settings) -> Recorder:
    if isinstance(settings.loggers, tuple) and not settings.loggers:
        return Recorder(settings.optimizer)  # nothing is recorded
    from pure_loop.entry.hyperparameters import hyperparameters  # only loggers need it

    recorded, measured = hyperparameters(settings), bool(settings.train_metrics)
    return Recorder(settings.optimizer, recorded, settings.algorithms, train_metrics=measured)


def _run_name(
    settings: Settings, state: State, checkpoint: Checkpoint | None, logger: LoggerGroup, rank: int
) -> str | None:
    """The name that was passed; else that of the run that is resumed, by checkpoint or loggers, or a new one."""
    if settings.run_name is not None or rank:
        return settings.run_name
    document = None if checkpoint is None else checkpoint.document
    batch = state.timestamp.batch if document is None else document.batch
    noted = None if document is None else noted_run_name(document.notes)
    if noted is not None and settings.autoresume is not None:
        return noted
    # The same command, run again, may have been killed before its first checkpoint.
    recorded = recorded_run_name(logger.loggers) if batch or settings.autoresume is not None else None
    # Loggers that have the record of another run than the checkpoint's refuse a new name.
    return recorded if recorded is not None and noted in (None, recorded) else new_run_name()


def _closing(assembly: Assembly) -> list[Callable[[], None]]:
    """What is called when the stream ends, the last one first."""
    fit, run = assembly.fit, assembly.run
    to_close: list[Any] = [*run.callbacks, *run.sources, fit.strategy, fit.stages.engine]
    return [*(closed.close for closed in to_close), *run.at_end]


def _stages(
    settings: Settings, state: State, engine: Engine, observed: Observers, *, measures_norm: bool
) -> LoopStages:
    handlers, watch = bind(settings.algorithms), settings.watch
    everything = watch is None or settings.strict
    return LoopStages(
        task=_task(settings, state),
        engine=engine,
        optimizer=settings.optimizer,
        precision=settings.precision,
        microbatch_size=_fixed_size(settings),
        found=FoundSize() if settings.microbatch_size == "auto" else None,
        clip_grad=settings.clip_grad,
        nonfinite=settings.nonfinite,
        measures_norm=measures_norm,
        strict=bool(settings.strict),
        handlers=handlers,
        workspace=Workspace(_ownership(settings, engine, {*observed, *handlers})),
        observed=frozenset(Event) if everything else frozenset({*(watch or ()), *observed, *handlers}),
    )


def _strategy(settings: Settings, stages: LoopStages) -> tuple[LoopStages, Strategy]:
    """How batches are computed stage by stage, and stages whose handlers a verified batch sees."""
    if settings.verify is None:
        return stages, Eager()
    from pure_loop.verify.verify import Recorder, Verified, recorded  # no other run needs it

    recorder = Recorder()
    stages = attrs.evolve(stages, handlers=recorded(stages.handlers, recorder))
    return stages, Verified(int(settings.verify.value), stages, recorder)


def _task(settings: Settings, state: State) -> Task:
    task = make_task(state.model.skeleton, settings.loss, settings.task)
    return task if settings.batches_per_step == 1 else task.of_groups()


def _fixed_size(settings: Settings) -> int | None:
    return None if settings.microbatch_size == "auto" else settings.microbatch_size


def _ownership(settings: Settings, engine: Engine, attached: Collection[Event]) -> Ownership | None:
    """What decides where a step may write; None: it copies."""
    compiled = settings.compile is not False and not engine.in_parts
    overwrites = compiled or settings.optimizer.overwrite is not None
    if settings.strict or not settings.donate or not overwrites:
        return None
    if settings.donate == "auto" and not can_count():
        return None
    ownership = Ownership(always=settings.donate is True, watch=settings.watch, attached=attached, compiled=compiled)
    ownership.shares_storage, ownership.is_of_ranks = engine.shares_storage, engine.exchanges
    return ownership


def _training_data(settings: Settings, open_source: Callable[..., Source], seed: int) -> Source:
    """
    Raises:
        ArgumentTypeError: the data can't be iterated.
        ArgumentError: epochs of more batches than a loader has.
        DataError: data that says that it has no batch.
    """
    limit, per_step = settings.batches_per_epoch, settings.batches_per_step
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


@attrs.frozen
class _Start:
    """What a State has to fit to be trained by a call, the first one and one that is loaded, and what it lacks."""

    settings: Settings
    engine: Engine
    data: Source
    task: Task

    def refuse_misfit(self, state: State) -> None:
        """
        Raises:
            ResumeError: training can't resume from the State, or the optimizer or an algorithm is another one.
        """
        from pure_loop.entry.algorithm_state import refuse_other_memories

        refuse_no_boundary(state)
        refuse_other_optimizer(state, self.settings.optimizer)
        refuse_other_memories(state, self.settings.algorithms)

    def fitted(self, state: State) -> State:
        """The State with the duration and the length of this call's data, once it is sure to fit."""
        from pure_loop.entry.algorithm_state import refuse_other_memories

        refuse_other_optimizer(state, self.settings.optimizer)
        # Both timestamps, because the learning rate of a batch is asked for at the one before it.
        t = state.timestamp
        start = t.batch_in_epoch
        if start:
            changed = None not in (t.batches_per_epoch, self.data.length) and t.batches_per_epoch != self.data.length
            start = self.data.resume(t.epoch, start, t.sample_in_epoch, self.task.samples, changed=changed)
        lasting: TimestampFields = {"max_duration": self.settings.max_duration, "batches_per_epoch": self.data.length}
        now, before = t.replace(**lasting).replace(batch_in_epoch=start), state.previous_timestamp.replace(**lasting)
        state = state.replace(timestamp=now, previous_timestamp=before)
        refuse_other_memories(state, self.settings.algorithms)
        return state

    def preparation(self, described: Callable[[], Mapping[str, Any]], *, fresh: bool) -> Callable[[State], State]:
        """What gives a State optimizer memory, loss scale and the memory of algorithms, the same on all ranks."""
        settings = self.settings
        meeting = settings.parallel.meeting(self.engine, self.data, described, fresh)
        return preparation(settings.optimizer, settings.precision, settings.algorithms, self.engine, meeting)


def _described(
    settings: Settings,
    state: State,
    stages: LoopStages,
    data: Source,
    evaluators: tuple[BoundEvaluator, ...],
    checkpoint: Checkpoint | None,
) -> dict[str, Any]:
    """What has to be equal on all ranks, by the name in an error."""
    return {
        "seed": state.seed,
        "max_duration": str(settings.max_duration),
        "precision": settings.precision.name,
        "microbatch_size": settings.microbatch_size,
        "optimizer": repr(settings.optimizer),
        "nonfinite": settings.nonfinite,
        "clip_grad": settings.clip_grad,
        "batches_per_epoch": settings.batches_per_epoch,
        "batches_per_step": settings.batches_per_step,
        "learning rate": settings.optimizer.lr(state.timestamp),
        "loss": stages.task.loss_in_words,
        "eval_interval": [str(evaluator.interval) for evaluator in evaluators],
        "algorithms": settings.algorithms_described,
        "evaluators": [evaluator.described for evaluator in evaluators],
        "compile": settings.compile,
        "steps_per_call": settings.steps_per_call,
        "verify": str(settings.verify),
        "train_dataloader": data.described,
        "iteration_length": str(settings.iteration_length),
        "order": settings.order,
        "checkpoint": None if checkpoint is None else checkpoint.name,
    }
