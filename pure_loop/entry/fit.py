"""``fit``: its arguments and what they mean.

Everything that can be wrong is refused when the function is called and before anything runs (``settings.py``,
``assembly.py``); what comes back is a generator of ``(event, state)``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn

from pure_loop._internal.suggestions import teaching
from pure_loop.algorithm import AlgorithmLike
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, CallbackLike, Logger
from pure_loop.distributed.parallel import Parallel
from pure_loop.entry.parallel import announced
from pure_loop.evaluator import EvaluatorsLike
from pure_loop.event import Event, EventName
from pure_loop.gradients.clipping import ClipFunction
from pure_loop.loop.stream import Stream
from pure_loop.metrics._base import MetricsLike
from pure_loop.optim import Optimizer
from pure_loop.precision import PrecisionName
from pure_loop.state import Loss, State
from pure_loop.task import Task
from pure_loop.time import Time

if TYPE_CHECKING:
    from pure_loop.members.each import Each
    from pure_loop.members.ensemble import Ensemble


class ModelOptions(TypedDict, total=False):
    """The arguments of :func:`fit` that ``evaluate`` and ``predict`` have, too."""

    precision: PrecisionName
    algorithms: Iterable[AlgorithmLike]
    callbacks: Iterable[CallbackLike]
    loggers: Iterable[Logger]
    seed: int | Each
    deterministic: bool
    strict: bool | None
    device: torch.device | str | None
    parallel: Literal["replicate", "shard", False] | Parallel | None
    compile: bool | Literal["where possible"]
    watch: Collection[Event | EventName] | None


class SharedOptions(ModelOptions, total=False):
    """The arguments of :func:`fit` that are of one type in a recipe, too."""

    loss: Callable[[Any, Any], Loss] | Task | None

    # Evaluation.
    evaluators: EvaluatorsLike
    eval_interval: CadenceLike
    train_metrics: MetricsLike

    # A step.
    microbatch_size: int | Literal["auto"] | None
    batches_per_step: int
    clip_grad: float | ClipFunction | None
    nonfinite: Literal["error", "skip"]

    # What takes part, and what is recorded.
    run_name: str | None

    # Saving and resuming.
    autoresume: str | os.PathLike[str] | Callback | None
    load_path: str | os.PathLike[str] | None

    # Reproduction and checks.
    verify: str | Time | None

    # Where it runs, and how fast.
    steps_per_call: int
    donate: bool | Literal["auto"]

    # Epochs, iterations and time.
    batches_per_epoch: int | None
    iteration_length: str | Time | None
    order: Literal["current", "2021"]
    clock: Callable[[], float]


class FitOptions(SharedOptions, total=False):
    """The arguments of :func:`fit` after the model and the data, for the types of functions that pass them on."""

    optimizer: Optimizer
    max_duration: str | Time


@announced
@teaching
def fit(
    model_or_state: nn.Module | State | Ensemble,
    train_dataloader: Iterable[Any],
    *,
    # What is trained, and for how long.
    loss: Callable[[Any, Any], Loss] | Task | None = None,
    optimizer: Optimizer,
    max_duration: str | Time,
    # Evaluation.
    evaluators: EvaluatorsLike = None,
    eval_interval: CadenceLike = "1ep",
    train_metrics: MetricsLike = None,
    # A step.
    microbatch_size: int | Literal["auto"] | None = None,
    batches_per_step: int = 1,
    precision: PrecisionName = "fp32",
    clip_grad: float | ClipFunction | None = None,
    nonfinite: Literal["error", "skip"] = "error",
    # What takes part, and what is recorded.
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    run_name: str | None = None,
    # Saving and resuming.
    autoresume: str | os.PathLike[str] | Callback | None = None,
    load_path: str | os.PathLike[str] | None = None,
    # Reproduction and checks.
    seed: int | Each = 0,
    deterministic: bool = False,
    strict: bool | None = None,
    verify: str | Time | None = None,
    # Where it runs, and how fast.
    device: torch.device | str | None = None,
    parallel: Literal["replicate", "shard", False] | Parallel | None = None,
    compile: bool | Literal["where possible"] = False,
    steps_per_call: int = 1,
    watch: Collection[Event | EventName] | None = None,
    donate: bool | Literal["auto"] = "auto",
    # Epochs, iterations and time.
    batches_per_epoch: int | None = None,
    iteration_length: str | Time | None = None,
    order: Literal["current", "2021"] = "current",
    clock: Callable[[], float] = time.monotonic,
) -> Stream:
    """Train: yields ``(event, state)`` at every event of the specification, in order.

    Args:
        model_or_state: a module (a fresh start; it stays as it was); or several, :func:`pure_loop.ensemble`, each
            trained as if it was alone; or a State of a boundary, from which training resumes as if it had never
            stopped. Seed, loss scale, optimizer state and algorithm state are in the State; data and functions are
            passed again, as at the start.
        train_dataloader: any iterable of batches: a ``DataLoader``, a list, an iterator, endless or not.

    Args: What is trained, and for how long
        loss: ``(outputs, targets) -> scalar``, a mean over the batch; or a :class:`pure_loop.Task`, for batches that
            are not ``(inputs, targets)``; or None if the module has a method ``loss(outputs, batch)``.
        optimizer: such as ``pl.optim.adamw(lr=3e-4)``.
        max_duration: when to stop: ``"3ep"``, ``"1000ba"``, ``"1e6tok"``, ``"90m"``.

    Args: Evaluation
        evaluators: a dataloader, or a mapping of labels to dataloaders or :class:`pure_loop.Evaluator`.
        eval_interval: how often evaluators run: ``"1ep"``, ``"100ba"``, ``"0.1dur"``, a predicate; 0: never.
        train_metrics: metrics of training, as those of an evaluator, of the outputs that the step has computed. At each
            BATCH_END ``state.metrics["train"]`` has their values over the epoch so far; loggers are given them.

    Args: A step
        microbatch_size: the samples of a forward, at most; None: the whole batch. Gradients don't depend on it.
            ``"auto"``: the whole batch, and half as many as often as a batch runs out of memory; the size that was
            found stays for later batches, in the State.
        batches_per_step: how many batches of the dataloader a step accumulates gradients over. They count as one batch,
            in events, timestamps, durations and ``batches_per_epoch``, and ``state.batch`` is a
            :class:`pure_loop.Batches` of them; each is split into microbatches by itself. The last ones of an epoch
            make a step, too.
        precision: ``"fp32"``, ``"amp_bf16"``, ``"amp_fp16"``, or ``"amp_fp8"``, with which linear layers multiply in
            8-bit floats (the extra ``fp8``, and a GPU that can).
        clip_grad: a global norm that gradients are scaled down to, or ``(grads, params) -> grads``.
        nonfinite: ``"error"``: a loss or gradient that is NaN or infinite raises and names its batch, on an
            accelerator only when a logger or you call ``state.check_finite()``; ``"skip"``: the step is skipped
            and counted in ``state.skipped``, and buffers are restored to those before its forward.

    Args: What takes part, and what is recorded
        algorithms: pure functions ``State -> State`` bound to events (:func:`pure_loop.algorithm`).
        callbacks: read-only observers: :class:`pure_loop.Callback`, or functions of ``(event, state)``.
        loggers: destinations of recorded values (:mod:`pure_loop.loggers`).
        run_name: the name of the run in all loggers. None: a run that resumes has the name that its loggers recorded,
            another one a new name of the time and two words.

    Args: Saving and resuming
        autoresume: a folder of checkpoints: start from the newest intact one, if there is one, and save there at the
            end of each epoch, of which the last two checkpoints stay. The same command, run again after it was killed,
            resumes. A ``CheckpointSaver(folder, interval="100ba", keep_last=5)`` in the place of the folder says how
            often, how many stay and on which signals; one in ``callbacks`` with this folder does so as well.
        load_path: a checkpoint to resume from, of ``pl.save`` or a ``CheckpointSaver``; or a plain safetensors file of
            weights to start with. It is read between BEFORE_LOAD and AFTER_LOAD.

    Args: Reproduction and checks
        seed: seeds all random numbers of the run, shuffling and dropout included. Of an ensemble, what its members
            share; :func:`pure_loop.each` gives them seeds other than those of their models.
        deterministic: set torch's switches for deterministic algorithms while the stream computes; the body of the loop
            has its own. An operation that has none is a NondeterministicError that names it and its module.
        strict: see to it, by value, that no State is changed in place by an algorithm, a callback, the loop's body, a
            forward or a loss: None: in the first two batches of the call and at the first event of each other kind;
            True: always, and that events come in their order; False: never.
        verify: ``"100ba"``: every 100th batch is computed twice from the same State, and where a bit differs before its
            BATCH_END, a VerificationError names stage, leaf and rank, and says whether it is transient.

    Args: Where it runs, and how fast
        device: the device of training; None: that of the model. Batches are moved there once.
        parallel: with several ranks, started by ``torchrun``, ``srun`` or ``mpirun``: ``"replicate"``, ``"shard"``, or
            :class:`pure_loop.distributed.Parallel`; every rank takes its part of each batch. None: there is one
            process, and where a launcher started several it is an error. False: this process runs on its own, whatever
            a launcher started.
        compile: make graphs of the code between observed events: those of ``watch``, of callbacks, of loggers.
            True: an algorithm that can't be traced is an error; ``"where possible"``: it runs eagerly in between.
        steps_per_call: how many batches are loaded at a time, for compiled steps that follow one another where nothing
            in between is observed.
        watch: yield only these events; algorithms and callbacks see all.
        donate: let a step write to the memory of the State before it. ``"auto"``: where no State that is alive has the
            tensors but the loop variable, and nothing outside of the loop refers to one; ``True``: States that you
            keep lose them, too, and raise a DonatedStateError, which says the field and the batch, when they are
            accessed; ``False``: never.

    Args: Epochs, iterations and time
        batches_per_epoch: cut epochs to this number of batches. Every epoch of a dataloader with a length begins with
            its first batch; data without a length continues where the epoch before was cut.
        iteration_length: the length of an iteration, in epochs or tokens; None: no iteration events.
        order: ``"current"``, or ``"2021"``, the order of older documents.
        clock: a function that returns seconds, for durations in seconds; NaN and infinity are errors. Where it is set
            back, the batch takes 0 seconds.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError, WrappedModelError, ResumeError: at the call, before
            anything runs; each says what was passed and what to write instead.
        DistributedError: from the stream, if another rank fails, dies, hangs or does something else; names it.
        DataError, LossError, NonFiniteError, VerificationError, AlgorithmReturnError, ...: from the stream, naming
            batch and event.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep")
    >>> sum(event is pl.Event.BATCH_END for event, state in stream)
    6
    """
    arguments = {**locals()}
    # Imported by the first call: what a call is assembled from is half of what the package has to import.
    from pure_loop.entry.assembly import assemble, start
    from pure_loop.entry.settings import Settings

    return start(assemble(Settings.of(arguments)))
