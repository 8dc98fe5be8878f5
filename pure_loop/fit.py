"""The door: ``fit`` reads its arguments, refuses what can't work, and starts.

Everything that can be wrong is refused here, when the function is called and before anything runs;
what comes back is a generator of ``(event, state)`` that the driver feeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from torch import nn

from pure_loop import loop
from pure_loop._arguments import (
    read_clip,
    read_donate,
    read_duration,
    read_iteration_length,
    read_watch,
    refuse_auto,
    refuse_no_optimizer,
)
from pure_loop._calls import teaching
from pure_loop._compiling import compiler
from pure_loop._counted import counted_in, of_fit, refuse_no_iterations
from pure_loop._fast import Observed, fast_text
from pure_loop._loading import loading, read_start, refuse_savers, savers_among, saving, seed_of
from pure_loop._start import (
    first_state,
    preparation,
    refuse_no_boundary,
    refuse_other_optimizer,
)
from pure_loop._together import Together, algorithm_described, announced
from pure_loop._values import read_flag
from pure_loop.algorithm import Algorithm, AlgorithmLike, bind, flatten
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, CallbackLike, Logger, LoggerGroup, Observer, observers
from pure_loop.data import num_tokens
from pure_loop.distributed.parallel import Parallel
from pure_loop.driver import Run, run_fast, run_script
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import _positive, bind_evaluators, refuse_empty
from pure_loop.event import Event
from pure_loop.loop import LoopStages
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.recorder import Recorder
from pure_loop.sources import Source
from pure_loop.state import State
from pure_loop.stream import Stream
from pure_loop.task import Task, make_task
from pure_loop.time import Time, TimeUnit

if TYPE_CHECKING:
    from pure_loop.checkpoint.files import Checkpoint

__all__ = ["Prepared", "fit", "prepare"]


@attrs.frozen(kw_only=True)
class Prepared:
    """The arguments of one call of ``fit``, read and checked: what runs, and what ``explain`` shows."""

    state: State
    fit: loop.Fit
    algorithms: tuple[Algorithm, ...]
    observers: dict[Event, tuple[Observer, ...]]
    callbacks: tuple[Callback, ...]
    logger: LoggerGroup
    watch: frozenset[Event] | None
    strict: bool
    checkpoint: Checkpoint | None


@announced
@teaching
def fit(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Any],
    *,
    loss: Callable[..., Any] | Task | None = None,
    optimizer: Optimizer,
    max_duration: str | int | Time,
    task: Task | None = None,
    microbatch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    evaluators: Any = None,
    eval_interval: CadenceLike = "1ep",
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    clip_grad: float | Callable[..., Any] | None = None,
    nonfinite: Literal["error", "skip"] = "error",
    device: torch.device | str | None = None,
    load_path: str | os.PathLike[str] | None = None,
    autoresume: str | os.PathLike[str] | None = None,
    batches_per_epoch: int | None = None,
    iteration_length: str | Time | None = None,
    watch: Collection[Event | str] | None = None,
    donate: bool | Literal["auto"] = "auto",
    compile: bool | Literal["where possible"] = False,
    steps_per_call: int = 1,
    strict: bool = False,
    order: Literal["current", "2021"] = "current",
    parallel: Literal["replicate", "shard"] | Parallel | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Stream:
    """Train: yields ``(event, state)`` at every event of the specification, in order.

    Args:
        model_or_state: a module (a fresh start; it stays as it was), or a State kept at a boundary, from
            which training goes on as if it had never stopped. A State brings its seed, loss scale,
            optimizer state and algorithms' memory; data and functions are given again, from the start.
        train_dataloader: any iterable of batches: a ``DataLoader``, a list, an iterator, endless or not.
        loss: ``(outputs, targets) -> scalar``, a mean over the batch; or a Task; or None if the module has
            a method ``loss(outputs, batch)``.
        optimizer: such as ``pl.optim.adamw(lr=3e-4)``.
        max_duration: when to stop: ``"3ep"``, ``"1000ba"``, ``"1e6tok"``, ``"90m"``; an int counts epochs.
        task: what to do with batches that are not ``(inputs, targets)``: :class:`pure_loop.Task`.
        microbatch_size: samples a forward at most; None: the whole batch. Gradients don't depend on it.
        precision: ``"fp32"``, ``"amp_bf16"`` or ``"amp_fp16"``.
        seed: where all random numbers of the run come from, shuffling and dropout included.
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        eval_interval: how often they run: ``"1ep"``, ``"100ba"``, ``"0.1dur"``, a predicate; 0: never.
        algorithms: pure functions ``State -> State`` bound to events (:func:`pure_loop.algorithm`).
        callbacks: read-only observers: :class:`pure_loop.Callback`, or functions of ``(event, state)``.
        loggers: where recorded values go.
        clip_grad: a global norm that gradients are scaled down to, or ``(grads, params) -> grads``.
        nonfinite: ``"error"``: a loss or gradient that is NaN or infinite raises and names its batch, on an
            accelerator only when a logger or you call ``state.check_finite()``; ``"skip"``: its step is left out
            and counted in ``state.skipped``, and buffers are again what they were before its forward.
        device: where to train; None: where the model is. Batches are moved there once.
        load_path: a checkpoint to go on from, of ``pl.save`` or a ``CheckpointSaver``; or a plain safetensors file of
            weights to start with. It is read between BEFORE_LOAD and AFTER_LOAD.
        autoresume: a folder of checkpoints: start from the newest that is whole, if there is one, and save there at the
            end of each epoch, unless a ``CheckpointSaver`` in ``callbacks`` does so. The same command, run again after
            it was killed, goes on.
        batches_per_epoch: cut epochs to so many batches. Every epoch of a dataloader with a length begins with its
            first batch; data without one, endless data among it, continues where the epoch before was cut.
        iteration_length: the length of an iteration, in epochs or tokens; None: no iteration events.
        watch: yield only these events; algorithms and callbacks see all.
        donate: let a step write to the memory of the State before it. ``"auto"``: where nobody can tell, because
            nobody but the loop variable has it; ``True``: always, and a State that you kept raises DonatedStateError
            when it is touched; ``False``: never. See :mod:`pure_loop.donation`.
        compile: make graphs of what runs between events that somebody attends to: you (``watch``), callbacks, loggers.
            True: an algorithm that can't be traced is an error; ``"where possible"``: it runs eagerly in between.
        steps_per_call: how many batches are loaded at a time, for compiled steps that follow one another where nobody
            attends to anything in between.
        strict: check while training the order of events and, by value, that nobody changes a State.
        order: ``"current"``, or ``"2021"``, the order of the older documents.
        parallel: with several ranks, started by ``torchrun``: ``"replicate"``, ``"shard"``, or
            :class:`pure_loop.distributed.Parallel`; every rank takes its part of each batch. None: this process alone.
        clock: where seconds come from.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError, WrappedModelError, ResumeError: at the call, before
            anything runs; each says what was given and what to write instead.
        DistributedError: from the stream, where another rank failed, died, hangs or does something else; names it.
        DataError, LossError, NonFiniteError, AlgorithmReturnError, AlgorithmStructureError, ...: from the
            stream, naming batch and event.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> sum(event is pl.Event.BATCH_END for event, state in stream)
    6
    """
    return _start(prepare(**locals()))


def _start(prepared: Prepared) -> Stream:
    handlers, observers, fit = bind(prepared.algorithms), prepared.observers, prepared.fit
    stages, engine = fit.stages, fit.stages.engine
    sources = [fit.source, *(evaluator.source for evaluator in fit.evaluators)]
    compiled = [] if fit.compiled is None else [fit.compiled]
    to_close: list[Any] = [*prepared.callbacks, *sources, *compiled, engine]
    savers = savers_among(prepared.callbacks)
    strict = None
    if prepared.strict:
        from pure_loop.strict import Strict

        strict = Strict.of_order(fit.order, loaded=fit.load is not None)
    for saver in savers:
        saver.serve(prepared.fit)
    closing = [*(closed.close for closed in to_close), *(saver.closed for saver in savers)]
    events = loop.EVENTS_OF_2021 if fit.order == "2021" else None
    if engine.ranks == 1 and not prepared.strict and fit.compiled is None:
        observed = Observed(prepared.watch, frozenset({*handlers, *observers}), events, stages.donation is not None)
        text = fast_text(loop.fit, observed, outermost=True)
        if text is not None:
            run = Run(handlers, observers, observed, stages=stages, donation=stages.donation)
            return Stream(run_fast(text(prepared.state, fit, run=run), run, closing))
    pairs = run_script(
        loop.fit(prepared.state, fit),
        handlers,
        observers,
        closing,
        stages=stages,
        watch=prepared.watch,
        events=events,
        strict=strict,
        failed=engine.failed if engine.ranks > 1 else None,
        donation=stages.donation,
    )
    return Stream(pairs)


def prepare(
    *,
    model_or_state: Any,
    train_dataloader: Any,
    loss: Any,
    optimizer: Any,
    max_duration: Any,
    task: Task | None,
    microbatch_size: Any,
    precision: Any,
    seed: Any,
    evaluators: Any,
    eval_interval: Any,
    algorithms: Any,
    callbacks: Any,
    loggers: Any,
    clip_grad: Any,
    nonfinite: Any,
    device: Any,
    load_path: Any,
    autoresume: Any,
    batches_per_epoch: Any,
    iteration_length: Any,
    watch: Any,
    donate: Any,
    compile: Any,
    steps_per_call: Any,
    strict: bool,
    order: Any,
    parallel: Any,
    clock: Callable[[], float],
) -> Prepared:
    """Read and check the arguments of ``fit``; nothing is run, no data is loaded."""
    from pure_loop._memories import refuse_other_memories

    if order not in ("current", "2021"):
        raise ArgumentError(f'order={order!r}: write "current" or "2021".')
    if nonfinite not in ("error", "skip"):
        raise ArgumentError(f'nonfinite={nonfinite!r}: write "error" or "skip".')
    if not callable(clock):
        raise ArgumentTypeError(f"clock={clock!r}: give a function that returns seconds, such as time.monotonic.")
    strict = read_flag("strict", strict)
    refuse_no_optimizer(optimizer)
    duration = read_duration(max_duration)
    length = read_iteration_length(iteration_length, duration)
    if length is not None and order == "2021":
        raise ArgumentError('order="2021" has no events for iterations; leave iteration_length out.')
    listed = flatten(algorithms)
    watched = read_watch(watch)
    mode = Precision.parse(precision)
    together = Together.of(parallel)
    start, checkpoint = read_start(model_or_state, load_path, autoresume, seed)
    callbacks = saving(autoresume, callbacks)
    observed, objects, group = observers(callbacks, loggers, Recorder(optimizer), together.rank)
    state, fresh = first_state(start, seed_of(checkpoint, seed), together.device(device))
    module = state.model._skeleton
    engine = together.engine(state)
    stages = LoopStages(
        task=make_task(module, loss, task),
        engine=engine,
        optimizer=optimizer,
        precision=mode,
        microbatch_size=_positive(refuse_auto(microbatch_size), "microbatch_size"),
        clip_grad=read_clip(clip_grad),
        nonfinite=nonfinite,
        strict=bool(strict),
        handlers=bind(listed),
        donation=None
        if strict
        else read_donate(
            donate,
            compiled=compile is not False and not engine.in_parts,
            useful=optimizer.overwrite is not None,
        ),
        attended=frozenset(Event if watched is None or strict else {*watched, *observed, *bind(listed)}),
    )
    if isinstance(train_dataloader, nn.Module | State):
        raise ArgumentTypeError(
            f"train_dataloader is a {type(train_dataloader).__name__}; the model comes first, then the data: "
            "fit(model, train_dataloader, ...)."
        )
    open_source = together.sources(stages.task)
    data = open_source(
        train_dataloader,
        seed=state.seed,
        stream="train",
        batches_per_epoch=_positive(batches_per_epoch, "batches_per_epoch"),
    )
    refuse_empty(data, "train_dataloader")
    _refuse_longer_epochs(data, batches_per_epoch)

    def known(given: State) -> State:
        """The State with the duration and the length of this call's data, once it is sure to fit."""
        refuse_other_optimizer(given, optimizer)
        # Both timestamps, because the learning rate of a batch is asked for at the one before it.
        lasting = {"max_duration": duration, "batches_per_epoch": data.length}
        now, before = given.timestamp.replace(**lasting), given.previous_timestamp.replace(**lasting)
        lasted = given.replace(timestamp=now, previous_timestamp=before)
        refuse_other_memories(lasted, listed)
        return lasted

    state = known(state)
    bound = bind_evaluators(evaluators, eval_interval, state.seed, duration, sources=open_source)
    refuse_savers(objects, bound, order, length)
    counted = list(of_fit(optimizer, listed, bound, objects))
    if length is None:
        refuse_no_iterations(counted)
    # A count of the user's own may begin later.
    counts_itself = stages.task.tokens is not num_tokens
    settings = lambda: {  # noqa: E731
        "seed": state.seed,
        "max_duration": str(duration),
        "precision": mode.name,
        "microbatch_size": stages.microbatch_size,
        "optimizer": repr(optimizer),
        "nonfinite": nonfinite,
        "clip_grad": clip_grad,
        "batches_per_epoch": batches_per_epoch,
        "learning rate": optimizer.lr(state.timestamp),
        "loss": stages.task.loss_in_words,
        "eval_interval": [str(each.interval) for each in bound],
        "algorithms": list(map(algorithm_described, listed)),
        "evaluators": [each.described for each in bound],
        "compile": compile,
        "steps_per_call": steps_per_call,
        "train_dataloader": data.described,
        "iteration_length": str(length),
        "order": order,
        "checkpoint": None if checkpoint is None else checkpoint.name,
    }

    def preparing(new: bool) -> Callable[[State], State]:
        meeting = together.meeting(engine, data, settings, new)
        return preparation(optimizer, mode, listed, engine, meeting)

    def refuse(found: State) -> None:
        refuse_no_boundary(found)
        refuse_other_optimizer(found, optimizer)
        refuse_other_memories(found, listed)

    return Prepared(
        state=state,
        fit=loop.Fit(
            stages=stages,
            source=data,
            evaluators=bound,
            iteration_length=length,
            clock=clock,
            fresh=fresh,
            meet=together.beginning(engine, settings),
            prepare=preparing(fresh),
            counts_tokens=TimeUnit.TOKEN in (duration.unit, None if length is None else length.unit),
            needs_tokens=None if counts_itself else counted_in(TimeUnit.TOKEN, counted),
            order=order,
            compiled=compiler(compile, steps_per_call, stages, watched, observed, strict, order, bound),
            load=loading(
                checkpoint,
                None if Event.INIT in bind(listed) else state.model,
                refuse,
                lambda found: preparing(False)(known(found)),
            ),
        ),
        algorithms=listed,
        observers=observed,
        callbacks=objects,
        logger=group,
        watch=watched,
        strict=strict,
        checkpoint=checkpoint,
    )


def _refuse_longer_epochs(data: Source, batches_per_epoch: int | None) -> None:
    """Refuse epochs of more batches than a loader has. Ranks with data of their own may have unequally many."""
    length = data.loader_length
    if batches_per_epoch is not None and length is not None and batches_per_epoch > length and data.uneven is None:
        raise ArgumentError(
            f"batches_per_epoch={batches_per_epoch}: train_dataloader has {length} batches, and its epochs can only be "
            f"cut; write a number up to {length}, or leave batches_per_epoch out. To go through it several times in an "
            "epoch, repeat its data (torch.utils.data.ConcatDataset, or a list times a number)."
        )
