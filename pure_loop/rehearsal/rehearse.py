"""``rehearse``: the phases of a run in their order, each tried on one batch; what fails is collected, and raised."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import attrs
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag, check_integer
from pure_loop._internal.devices import shapes_only
from pure_loop._internal.processes import torch_distributed
from pure_loop._internal.processes import world_size as running_ranks
from pure_loop._internal.pytree import Batch
from pure_loop._internal.reprs import in_bytes
from pure_loop._internal.suggestions import arguments_of_call, passing_on, teaching
from pure_loop._internal.tree_ops import bytes_of
from pure_loop.data.batch import describe
from pure_loop.data.group import Batches, parts_of
from pure_loop.distributed.parallel import Parallel, read_parallel
from pure_loop.entry.assembly import Assembly, assemble
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.layers import layer_table
from pure_loop.entry.settings import Settings
from pure_loop.errors import ArgumentError, RehearsalError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.members.ensemble import refuse_several
from pure_loop.rehearsal.calls import Arguments, collectives, trace, without_numbers
from pure_loop.rehearsal.measures import Length, activations, memory_of, memory_per_rank, try_schedules
from pure_loop.rehearsal.passes import Passes, first_batch, is_never
from pure_loop.rehearsal.report import Phase, Place, Rehearsal
from pure_loop.rehearsal.standins import destinations, try_place
from pure_loop.state import State


@teaching
@passing_on(fit)
def rehearse(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Any],
    *,
    sample: Any = None,
    world_size: int | None = None,
    fake: bool = False,
    call_callbacks: bool = True,
    **settings: Unpack[FitOptions],
) -> Rehearsal:
    """Try all arguments of a call of ``fit`` on one batch of each dataloader, so that mistakes show before it starts.

    In this order: the arguments; whether the places of checkpoints and loggers can be written to; every schedule at
    the start, a quarter, the middle and the end of the run; the first batch of each dataloader; INIT and loading; each
    evaluator with its metrics; two steps of training with all algorithms, and with callbacks at all events up to
    EPOCH_CHECKPOINT; a checkpoint saved and loaded; and from it the last two batches of the run up to FIT_END. Handlers
    run whatever their ``when=`` says, evaluators whatever their interval says. Phases that don't depend on one another
    are all tried, and what failed is raised in one error.

    The model, dataloaders, random generators, files and loggers stay as they are; checkpoints are written to a
    temporary folder, which is removed. Callbacks are called as deep copies, and loggers are not called: what they are
    given is kept in memory. Functions in ``callbacks=`` are called as they are: what they print or append, they print
    or append now.

    Args:
        model_or_state, train_dataloader: as in :func:`pure_loop.fit`.
        sample: a batch in the place of the training data's first one, which is then not read; needed where the data is
            an iterator.
        world_size: a number of ranks, for which memory is reported.
        fake: whether tensors have shapes and dtypes alone, on the meta device: for a model that is too large for this
            machine, which may be on the meta device itself. Nothing is computed, so code that needs numbers is not
            tried: callbacks, checkpoints, and whatever calls ``.item()``. ``precision`` is that of the parameters.
        call_callbacks: whether callbacks are called at their events; if not, they are bound only.
        **settings: the other arguments of :func:`pure_loop.fit`.

    Returns:
        What was found, to print: phases, memory by what it holds, the number of batches, and what was not tried.

    Raises:
        RehearsalError: names each phase that fails, with its error; the cause is the first error.
        ArgumentTypeError: an argument that ``fit`` doesn't have, or that it lacks.
        ArgumentError: the data is an iterator, and there is no sample; or several ranks are running.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> wrong = [(torch.ones(4, 3), torch.zeros(4, 1))]
    >>> rehearse(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...          max_duration="2ep", evaluators={"val": wrong})
    Traceback (most recent call last):
        ...
    pure_loop.errors.RehearsalError: 1 phase failed, which would end the run:
      evaluator 'val', first batch, forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)
      not rehearsed: callbacks, and what comes after the second step: an evaluator was not tried to its end.
    """
    refuse_several(model_or_state, "rehearse")
    arguments = arguments_of_call(fit, (model_or_state, train_dataloader), settings)
    check_flag("call_callbacks", call_callbacks, where="rehearse")
    check_flag("fake", fake, where="rehearse")
    if world_size is not None:
        check_integer("world_size", world_size, where="rehearse", least=1)
    if running_ranks() > 1:
        raise ArgumentError(
            f"rehearse was called on one of {running_ranks()} ranks, and it runs in one process: call it in a program "
            f"of its own, with world_size={running_ranks()}."
        )
    place = Place(fake=fake)
    call = without_numbers(arguments, place) if fake else arguments
    token = shapes_only.set(fake)
    try:
        return _rehearsed(call, place, sample, world_size, call_callbacks and not fake)
    finally:
        shapes_only.reset(token)


def _rehearsed(
    arguments: Arguments, place: Place, sample: Batch, world_size: int | None, call_callbacks: bool
) -> Rehearsal:
    with _generators_kept(), tempfile.TemporaryDirectory(prefix="pure_loop-rehearsal-") as folder:
        try:
            assembly = assemble(Settings.of(arguments))
        except Exception as error:
            place.fail(error, "arguments of fit")
            lists = [arguments[name] for name in ("callbacks", "loggers")]
            _try_places([item for some in lists if isinstance(some, list | tuple) for item in some], place)
            raise _error(place) from error
        parallel = read_parallel(arguments["parallel"])
        phases = _Phases(assembly, place, Path(folder), sample, world_size, call_callbacks, parallel, arguments)
        return phases.run()


def _try_places(items: Sequence[object], place: Place) -> list[str]:
    """Try where callbacks and loggers write to; what was found, in words."""
    sentences = []
    for name, kind, where in destinations(items):
        with place.collecting(f"{kind} of {name}"):
            sentences.append(f"{name}: {try_place(kind, where)}")
    return sentences


@contextmanager
def _generators_kept() -> Iterator[None]:
    """The global random generators of torch, Python and NumPy, put back as they were."""
    numpy: Any = sys.modules.get("numpy")
    devices: list[Any] = [device for device in (torch.cuda, torch.xpu) if device.is_initialized()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    accelerators = [device.get_rng_state_all() for device in devices]
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        for device, states in zip(devices, accelerators, strict=True):
            device.set_rng_state_all(states)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _error(place: Place) -> RehearsalError:
    count = len(place.failures)
    lines = [f"{count} phase{'' if count == 1 else 's'} failed, which would end the run:"]
    for phase, error in place.failures:
        text = (str(error) or "no message").strip().replace("\n", "\n    ")
        lines.append(f"  {phase}: {type(error).__name__}: {text}")
    lines += [f"  not rehearsed: {sentence}" for sentence in place.skipped]
    result = RehearsalError("\n".join(lines))
    result.failures = tuple(place.failures)
    result.__cause__ = place.failures[0][1]
    return result


@attrs.define
class _Phases:
    """The phases of one rehearsal.

    Attributes:
        assembly: the call of ``fit``.
        place: what has failed.
        folder: a temporary one.
        sample, world_size, call_callbacks: the arguments.
        parallel: that of ``fit``.
        arguments: those of ``fit``, by name.
        passed: the phases that were tried.
        checkpoint: the bytes of one.
        scheduled: whether all schedules passed.
        missing: whether an evaluator has no batch.
    """

    assembly: Assembly
    place: Place
    folder: Path
    sample: Batch
    world_size: int | None
    call_callbacks: bool
    parallel: Parallel | None
    arguments: Arguments
    passed: list[Phase] = attrs.field(factory=list)
    checkpoint: int | None = None
    scheduled: bool = True
    missing: bool = False

    def run(self) -> Rehearsal:
        """Try all of them.

        Raises:
            RehearsalError: one fails, or several.
        """
        sentences = _try_places(self.assembly.run.callbacks, self.place)
        self.passed.append(Phase("places", "; ".join(sentences) or "nothing is written to"))
        batch, evaluators = self._data()
        task, source = self.assembly.fit.stages.task, self.assembly.fit.source
        length = Length(None, source.length, 0, 0, self.assembly.plan.state.timestamp)
        if batch is not _MISSING:
            with self.place.collecting("data, counting samples and tokens"):
                length = Length.of(self.assembly, task.samples(batch), task.tokens(batch))
        passes = Passes(self.assembly, self.place, length, batch, self.folder, self.call_callbacks)
        start = None
        if batch is not _MISSING:
            with self.place.collecting("start"):
                start = passes.start()
        before = len(self.place.failures)
        rates = try_schedules(self.assembly, passes.length, self.place)
        self.scheduled = len(self.place.failures) == before
        self.passed.append(Phase("schedules", rates))
        if start is not None:
            self._loop(passes, start, evaluators)
        if self.place.failures:
            raise _error(self.place)
        return self._report(passes, passes.length)

    def _data(self) -> tuple[Batch, list[tuple[BoundEvaluator, Batch]]]:
        """The first batch of training, and each evaluator that runs with its first batch."""
        source, texts = self.assembly.fit.source, list[str]()
        batch, per_step = _MISSING, self.assembly.plan.settings.batches_per_step
        if self.sample is not None:
            batch = self.sample if per_step == 1 else Batches((self.sample,) * per_step)
        if batch is _MISSING and source.reads_once:
            raise ArgumentError(
                "train_dataloader gives each batch once, so the run would miss what a rehearsal reads: pass a batch, "
                "rehearse(..., sample=batch), or a DataLoader or a list."
            )
        if batch is _MISSING:
            with self.place.collecting("data, first batch of train_dataloader"):
                batch = first_batch(source)
        if batch is not _MISSING:
            parts = parts_of(batch)
            several = f"{len(parts)} batches a step, the first of them " if len(parts) > 1 else ""
            texts.append(f"train: {several}{describe(parts[0])}")
        evaluators = []
        for evaluator in self.assembly.fit.evaluators:
            label = evaluator.label
            if is_never(evaluator):
                continue
            if evaluator.source.reads_once:
                self.place.skip(
                    f"evaluator {label!r}: its dataloader gives each batch once: pass a DataLoader or a list."
                )
                continue
            with self.place.collecting(f"data, first batch of evaluator {label!r}"):
                evaluators.append((evaluator, first_batch(evaluator.source)))
                texts.append(f"{label}: {describe(evaluators[-1][1])}")
        self.missing = len(evaluators) < sum(not is_never(item) for item in self.assembly.fit.evaluators)
        self.passed.append(Phase("data", "; ".join(texts)))
        return batch, evaluators

    def _loop(self, passes: Passes, start: State, evaluators: list[tuple[BoundEvaluator, Batch]]) -> None:
        """The loop on these batches, from the State at FIT_START: each pass depends on the one before it."""
        if not self.call_callbacks:
            self.place.skip(f"callbacks: {'fake=True' if self.place.fake else 'call_callbacks=False'}.")
        stops, texts = self.place.stops, list[str]()
        for evaluator, batch in evaluators:
            with self.place.collecting(f"evaluator {evaluator.label!r}"):
                after = passes.evaluate(start, evaluator, batch)
                texts.append(f"{evaluator.label}: {', '.join(after.metrics.get(evaluator.label, ()))}")
        self.passed.append(Phase("evaluators", "; ".join(texts) or ("none tried" if self.missing else "none")))
        to_end = self.place.stops == stops and not self.missing
        if not to_end:
            self.place.skip("callbacks, and what comes after the second step: an evaluator was not tried to its end.")
        stops = self.place.stops
        with self.place.collecting("training"):
            passes.train(evaluators if to_end else [], to_end=to_end)
        if self.place.stops == stops and passes.boundary is None:
            self.place.skip("steps: training has ended at this State.")
        if self.place.stops > stops or passes.boundary is None:
            return
        self.passed.append(Phase("two steps", "" if self.place.fake else _in_words(passes.losses)))
        loaded = passes.boundary if self.place.fake else self._saved(passes.boundary)
        if to_end and not self.scheduled:
            self.place.skip("the end of the run: a schedule fails there.")
        elif to_end:
            self.place.note = " (at the end of the run)"
            with self.place.collecting("training"):
                self.passed.append(Phase("end of the run", passes.finish(loaded, evaluators)))
            self.place.note = ""
        if self.assembly.plan.settings.compile:
            with self.place.collecting("compile=, tracing of a step"):
                watch, observed = self.assembly.plan.settings.watch, self.assembly.plan.observers
                watch = None if watch is None else watch | {event for event, some in observed.items() if some}
                trace({**self.arguments, "watch": watch}, passes.batch)
                self.passed.append(Phase("compile", "a step can be traced"))

    def _saved(self, state: State) -> State:
        """The State, saved and loaded; itself where that fails, or the temporary folder has no room."""
        from pure_loop.checkpoint.files import read_checkpoint, save

        size, free = 2 * bytes_of(state), shutil.disk_usage(self.folder).free
        if size > free:
            self.place.skip(f"checkpoint: {self.folder.parent} has {in_bytes(free)} free, and one may take as much.")
            return state
        path, loaded = self.folder / "state.safetensors", state
        with self.place.collecting("checkpoint of the State"):
            save(state, path)
            self.checkpoint = path.stat().st_size
            loaded = read_checkpoint(path).into(state)
            path.unlink()
            self.passed.append(Phase("checkpoint", f"saved and loaded, {in_bytes(self.checkpoint)}"))
        return loaded

    def _report(self, passes: Passes, length: Length) -> Rehearsal:
        activation_bytes, stages = None, self.assembly.fit.stages
        if passes.first is not None:
            try:
                activation_bytes = activations(passes.first, stages)
            except Exception as error:  # such as a forward with a transform of torch.func, which allows no such hooks
                self.place.skip(f"memory of activations: it could not be measured ({type(error).__name__}: {error}).")
        state = passes.boundary if passes.boundary is not None else self.assembly.plan.state
        memory = memory_of(state, passes.batch, activation_bytes)
        per_rank, exchanged = None, None
        if self.world_size is not None:
            sharded = self.parallel is not None and self.parallel.kind == "shard"
            size = length.samples if passes.first is None else stages.task.samples(passes.first.microbatch)
            per_rank = memory_per_rank(memory, self.world_size, length.samples, size, sharded=sharded)
            exchanged = self._exchanged(passes.batch, self.world_size)
        return Rehearsal(
            phases=tuple(self.passed),
            skipped=tuple(self.place.skipped),
            batches=length.batches,
            batches_per_epoch=length.per_epoch,
            memory=memory,
            layers=layer_table(state, stages.task, parts_of(passes.batch)[0]),
            memory_per_rank=per_rank,
            collectives=exchanged,
            checkpoint=self.checkpoint,
        )

    def _exchanged(self, batch: Batch, ranks: int) -> dict[str, tuple[int, int]] | None:
        """The collectives of a step on so many ranks; None where they can't be counted, or nothing trains together."""
        if self.parallel is None or ranks == 1:
            return None
        if self.place.fake or torch_distributed() is not None:
            why = "fake=True" if self.place.fake else "this process has a process group"
            self.place.skip(f"collectives: {why}.")
            return None
        try:
            return collectives(self.arguments, batch, ranks)
        except Exception as error:  # such as an algorithm that needs what other ranks would have answered
            self.place.skip(f"collectives: they could not be counted ({type(error).__name__}: {error}).")
            return None


_MISSING: Any = object()


def _in_words(losses: Sequence[Tensor]) -> str:
    """The losses of steps."""
    return f"loss {', '.join(f'{float(loss):.4g}' for loss in losses)}"
