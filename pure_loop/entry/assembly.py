"""A call of ``fit``, assembled: from its plan to what the loop needs, and to its stream.

Nothing is run here and no data is loaded: :func:`assemble` binds callbacks and algorithms to the call, and builds what
the script needs; :func:`start` makes the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import attrs

from pure_loop.callback import Callback, LastBoundary
from pure_loop.callback import Run as BoundRun
from pure_loop.data.samples import num_tokens
from pure_loop.entry.deterministic import stream_of
from pure_loop.entry.plan import Plan
from pure_loop.entry.record import new_run_name, noted_run_name, recorded_run_name
from pure_loop.entry.resume import loading
from pure_loop.entry.schedule_checks import counted_in, of_fit, refuse_no_iterations
from pure_loop.entry.settings import Settings
from pure_loop.event import Event
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import drive
from pure_loop.loop.order_2021 import script_of
from pure_loop.loop.stream import Stream
from pure_loop.loop.strict import Strict
from pure_loop.model.checks import is_on_meta
from pure_loop.observer import bind_callbacks
from pure_loop.random.authors import is_users
from pure_loop.random.guards import guard
from pure_loop.state import State
from pure_loop.time import TimeUnit


@attrs.frozen
class Assembly:
    """One call of ``fit``, ready to run.

    Attributes:
        plan: what it is about to do.
        run: what callbacks and loggers are bound to.
        fit: what the script needs besides a State.
    """

    plan: Plan
    run: BoundRun
    fit: Fit


def assemble(settings: Settings) -> Assembly:
    """Build what a call of ``fit`` runs.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError, DataError, ResumeError: for what can't run, before anything runs.
    """
    plan = Plan.of(settings)
    boundary = LastBoundary()
    run = _bound(plan, boundary)
    return Assembly(plan, run, _fit(plan, boundary))


def _bound(plan: Plan, boundary: LastBoundary) -> BoundRun:
    """What callbacks, loggers and algorithms are told of the call, once they are bound to it."""
    settings, stages = plan.settings, plan.stages
    run = BoundRun(
        function="fit",
        callbacks=plan.callbacks,
        optimizer=settings.optimizer,
        metrics={evaluator.label: evaluator.metrics for evaluator in plan.evaluators},
        train_metrics=settings.train_metrics,
        order=settings.order,
        max_duration=settings.max_duration,
        iteration_length=settings.iteration_length,
        ranks=stages.engine.world_size,
        task=stages.task,
        precision=settings.precision.name,
        microbatch_size=settings.fixed_size,
        algorithms=tuple(settings.algorithms_described),
        device=plan.state.device,
        sources=(plan.source, *(evaluator.source for evaluator in plan.evaluators)),
        boundary=boundary,
        run_name=_run_name(plan),
        autoresume=settings.autoresume,
        resumed_from=None if plan.checkpoint is None else plan.checkpoint.path,
        members=int(plan.state.members),
    )
    bind_callbacks(run)
    for algorithm in settings.algorithms:
        if algorithm.bind is not None:
            with guard(plan.state, ("bind", algorithm.name)) if is_users(algorithm.bind) else nullcontext():
                algorithm.bind(run)
    return run


def _fit(plan: Plan, boundary: LastBoundary) -> Fit:
    """What the script needs besides a State.

    Raises:
        ArgumentError: something counts iterations, and there are none.
        ResumeError: the checkpoint doesn't fit.
    """
    settings, stages, start = plan.settings, plan.stages, plan.start
    counted = list(of_fit(settings.optimizer, settings.algorithms, plan.evaluators, plan.callbacks))
    if settings.iteration_length is None:
        refuse_no_iterations(counted)
    resume = start.preparation(plan.described, fresh=False)
    units = {time.unit for time in (settings.max_duration, settings.iteration_length) if time is not None}
    return Fit(
        stages=stages,
        source=plan.source,
        evaluators=plan.evaluators,
        iteration_length=settings.iteration_length,
        clock=settings.clock,
        fresh=plan.fresh,
        meet=settings.parallel.beginning(stages.engine, plan.described, empty=is_on_meta(settings.model_or_state)),
        prepare=start.preparation(plan.described, fresh=plan.fresh),
        counts_tokens=TimeUnit.TOKEN in units,
        # A count of the user's own may begin later.
        needs_tokens=counted_in(TimeUnit.TOKEN, counted) if stages.task.tokens is num_tokens else None,
        order=settings.order,
        boundary=boundary,
        strategy=plan.strategy,
        evaluating=plan.evaluating,
        resumed_from=None if plan.checkpoint is None else plan.checkpoint.path,
        load=loading(
            plan.checkpoint,
            None if Event.INIT in stages.handlers else plan.state,
            start.refuse_misfit,
            lambda loaded: resume(start.fitted(loaded)),
        ),
    )


def start(assembly: Assembly) -> Stream:
    """The stream of a call."""
    settings, observed, fit = assembly.plan.settings, assembly.plan.observers, assembly.fit
    stages, handlers = fit.stages, fit.stages.handlers
    strict = Strict.of(
        settings.strict,
        settings.watch,
        frozenset({*handlers, *observed}),
        order=fit.order,
        loaded=fit.load is not None,
        batches=2,
    )
    script, events = script_of(assembly.plan.state, fit)
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
        failed=partial(_failed, assembly.run, stages.engine.failed),
    )
    return stream_of(pairs, settings.deterministic, _values(settings))


def _values(settings: Settings) -> dict[str, object]:
    """The settings by name, but the model or State, to which a stream does not refer."""
    fields = attrs.fields(Settings)
    return {field.name: getattr(settings, field.name) for field in fields if field.name != "model_or_state"}


def _failed(
    run: BoundRun,
    report: Callable[[BaseException, Event, State | None], None],
    error: BaseException,
    event: Event,
    state: State | None,
) -> None:
    """What is done where the stream ends before its script does: Ctrl-C says how to resume, unless a saver does."""
    if isinstance(error, KeyboardInterrupt):
        batch = 0 if state is None else state.timestamp.batch
        if run.autoresume is not None:
            error.add_note(f"interrupted after batch {batch}: the same command resumes from {str(run.autoresume)!r}")
        elif all(type(callback).saves_to is Callback.saves_to for callback in run.callbacks):
            error.add_note(
                f'interrupted after batch {batch}, and nothing is saved: with fit(..., autoresume="runs/1") Ctrl-C '
                "saves, and the same command resumes"
            )
    report(error, event, state)


def _run_name(plan: Plan) -> str | None:
    """The name that was passed; else that of the run that is resumed, by checkpoint or loggers, or a new one."""
    settings = plan.settings
    if settings.run_name is not None or settings.parallel.rank:
        return settings.run_name
    document = None if plan.checkpoint is None else plan.checkpoint.document
    batch = plan.state.timestamp.batch if document is None else document.batch
    noted = None if document is None else noted_run_name(document.notes)
    if noted is not None and settings.autoresume is not None:
        return noted
    # The same command, run again, may have been killed before its first checkpoint.
    recorded = recorded_run_name(plan.logger.loggers) if batch or settings.autoresume is not None else None
    # Loggers that have the record of another run than the checkpoint's refuse a new name.
    return recorded if recorded is not None and noted in (None, recorded) else new_run_name()


def _closing(assembly: Assembly) -> list[Callable[[], None]]:
    """What is called when the stream ends, the last one first."""
    fit, run = assembly.fit, assembly.run
    callbacks, sources = [item.close for item in run.callbacks], [item.close for item in run.sources]
    return [*callbacks, *sources, fit.strategy.close, fit.stages.engine.close, *run.at_end]
