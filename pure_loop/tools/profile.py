"""``pl.profile``: where the time of a training run goes.

The parts of a stream of ``fit`` are replaced by timed ones while it is profiled: the class of its stages, the handlers
of algorithms, what callbacks and loggers are called by, and the batches of its sources. Nothing in the loop depends on
that, and a stream that is not profiled has nothing of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import attrs
import torch

from pure_loop._internal.arguments import check_flag, check_integer, path_text, positive_or_none
from pure_loop._internal.suggestions import teaching
from pure_loop.callback import Logger
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.storage import storage_of
from pure_loop.data.source import Source
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.exporting.export import try_to_write
from pure_loop.hooks import Handler, Observer
from pure_loop.loop.driver import Script
from pure_loop.loop.stream import Stream
from pure_loop.stages import Stages
from pure_loop.state import State
from pure_loop.tools.profile_report import Key, Profile, Recorder, TimedBatches, chrome_trace
from pure_loop.tools.steps import Parts, replace_each, set_attribute, set_method

T = TypeVar("T")

_STAGES = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "finish_gradients": "gradients: scale, clip",
    "microbatches": "split into microbatches",
}


@teaching
def profile(
    stream: Stream,
    *,
    batches: int | None = 100,
    warmup: int = 10,
    trace: PathLike | None = None,
    torch_profiler: bool = False,
    synchronize: bool = False,
) -> Profile:
    """Run a stream of ``fit``, and report where its time goes: stages, data, algorithms, callbacks and loggers.

    Each row has the time that no row inside it has: that of an algorithm such as SAM, which calls stages, is without
    theirs. What belongs to no row, the loop itself, is reported as ``unattributed``. Times are those of the host: on an
    accelerator a stage returns before its kernels have run, unless ``synchronize=True``. Each call of a row costs
    a few microseconds; training is bitwise the same.

    The stream has then run up to the event after the last of these batches, and can be iterated over further, at its
    usual speed.

    Args:
        stream: what ``pl.fit(...)`` returned, not begun.
        batches: how many are measured; None: to the end of training, with the evaluations there.
        warmup: batches before them, in which memory is allocated, workers start and graphs are compiled.
        trace: the path of a file to write for chrome://tracing or https://ui.perfetto.dev.
        torch_profiler: run ``torch.profiler`` meanwhile, with the rows as ranges: ``report.torch``. Its trace, with
            operators and kernels, is written to ``trace`` then.
        synchronize: wait for the device at the beginning and the end of each row, so that its time has that of its
            kernels. Slower, because host and device no longer overlap.

    Raises:
        ArgumentTypeError: it is no stream of ``fit``: ``pl.profile(pl.fit(...))``.
        ArgumentError: the stream has begun, or ended within the warmup; numbers out of range; a trace in a folder.
        CheckpointWriteError: (an OSError) the trace can't be written.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 20
    >>> report = profile(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                         optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"), batches=10, warmup=5)
    >>> report.batches, {"forward", "loss", "backward", "optimizer"} <= {row.name for row in report.rows}
    (10, True)
    """
    batches = positive_or_none("batches", batches, where="profile")
    warmup = check_integer("warmup", warmup, where="profile", least=0)
    for name, flag in (("torch_profiler", torch_profiler), ("synchronize", synchronize)):
        check_flag(name, flag, where="profile")
    if trace is not None:
        storage_of(trace)
        try_to_write(trace)
        if torch_profiler and "://" in os.fspath(trace):
            raise ArgumentError(f"profile: torch.profiler writes files of this machine, and trace={trace!r} is a URL.")
    parts = Parts.of(stream, "profile")
    device = parts.state.device
    recorder = Recorder(
        warmup=warmup,
        batches=batches,
        synchronize=synchronize and device.type != "cpu",
        keeps_spans=trace is not None,
        torch_profiler=_torch_profiler(device) if torch_profiler else None,
    )
    with ExitStack() as restoring:
        _time(parts, recorder, restoring)
        _advance(stream, recorder)
        recorder.end()
    if not recorder.over or recorder.finished == warmup:
        raise ArgumentError(
            f"profile: the stream ended after {recorder.finished} batches, within the warmup of {warmup}: write a "
            f"smaller warmup=, or a longer max_duration."
        )
    report = Profile.of(recorder, device, compiled=parts.fit.strategy.graphs is not None)
    if trace is not None:
        if recorder.torch_profiler is not None:
            recorder.torch_profiler.export_chrome_trace(path_text(trace))
        else:
            with storage_of(trace).writing() as file:
                file.write(chrome_trace(recorder.spans))
    return report


def _advance(stream: Stream, recorder: Recorder) -> None:
    pairs = iter(stream)
    if recorder.warmup == 0:
        recorder.begin()
    while not recorder.over:
        try:
            # In a variable, as in a loop over the stream: the next State replaces it, so that steps write in place.
            _, _state = next(pairs)
        except StopIteration:
            return


def _torch_profiler(device: torch.device) -> torch.profiler.profile:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as of_torch

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return of_torch(activities=activities, acc_events=True)


def _time(parts: Parts, recorder: Recorder, restoring: ExitStack) -> None:
    """Replace what is timed, until ``restoring`` ends."""
    stages, compiled = parts.fit.stages, parts.fit.strategy.graphs
    timed = _timed_stages(type(stages), recorder, ends_batches=compiled is None)
    set_attribute(restoring, stages, "__class__", timed)
    _time_batches(restoring, recorder, parts.fit.source, "train data")
    for evaluator in parts.fit.evaluators:
        _time_batches(restoring, recorder, evaluator.source, f"{evaluator.label} data")
        if evaluator.metrics is not None:
            measuring = Key("stage", f"{evaluator.label} metrics")
            metrics = tuple(
                attrs.evolve(
                    metric,
                    update=recorder.timed(measuring, metric.update),
                    compute=recorder.timed(measuring, metric.compute),
                )
                for metric in evaluator.metrics
            )
            set_attribute(restoring, evaluator, "metrics", metrics)
    if compiled is None:
        replace_each(restoring, parts.handlers, functools.partial(_timed_handler, recorder))
    else:
        _time_compiled(restoring, recorder, compiled)
    names = {type(logger).__name__ for logger in parts.loggers} | {"Recorder"}
    replace_each(restoring, parts.observers, functools.partial(_timed_observer, recorder, names))
    for logger in parts.loggers:
        _time_logger(restoring, recorder, logger)


def _timed_handler(recorder: Recorder, event: Event, handler: Handler) -> Handler:
    key = Key("algorithm", handler.algorithm, event.name)
    return attrs.evolve(handler, function=recorder.timed(key, handler.function))


def _timed_observer(recorder: Recorder, loggers: set[str], event: Event, observer: Observer) -> Observer:
    key = Key("logger" if observer.name in loggers else "callback", observer.name, event.name)
    return attrs.evolve(observer, observe=recorder.timed(key, observer.observe))


def _time_logger(restoring: ExitStack, recorder: Recorder, logger: Logger) -> None:
    """What callbacks record is written by methods of the logger, which are its time and not theirs."""
    if not hasattr(logger, "__dict__"):
        return
    for name in dir(type(logger)):
        if name == "flush" or name.startswith("log_"):
            method = getattr(logger, name)
            if callable(method):
                set_method(restoring, logger, name, recorder.timed(Key("logger", type(logger).__name__), method))


def _time_batches(restoring: ExitStack, recorder: Recorder, source: Source, name: str) -> None:
    epoch_of, key = source.epoch, Key("data", name)

    def timed(epoch: int, start: int = 0, seen: int = 0) -> TimedBatches:
        return TimedBatches.of(epoch_of(epoch, start, seen), key, recorder)

    set_method(restoring, source, "epoch", timed)


def _time_compiled(restoring: ExitStack, recorder: Recorder, compiled: Any) -> None:
    """A compiled batch is a row: what algorithms and stages do is in its graphs."""
    key = Key("stage", "compiled step")
    batch, steps_ahead = recorder.timed_script(key, compiled.batch), recorder.timed(key, compiled.steps_ahead)

    def counted_batch(*args: object) -> Script:
        result = yield from batch(*args)
        recorder.count_batches()
        return result

    def counted_steps(state: State, *args: object) -> State:
        before = state.timestamp.batch
        result: State = steps_ahead(state, *args)
        if result.timestamp.batch > before:
            recorder.count_batches(result.timestamp.batch - before)
        return result

    set_method(restoring, compiled, "batch", counted_batch)
    set_method(restoring, compiled, "steps_ahead", counted_steps)


def _timed_stages(cls: type[Stages], recorder: Recorder, *, ends_batches: bool) -> type:
    """Stages that are timed: a class of the same layout, so that an instance can become one of it."""

    def of_evaluator(stages: object, state: object, *, label: str, **_: object) -> Key:
        return Key("stage", f"{label.removeprefix('eval/')} forward")

    def of_loss(stages: object, state: State, **_: object) -> Key:
        return Key("stage", f"{state.evaluator} loss")

    methods: dict[str, object] = {
        name: recorder.timed(Key("stage", label), getattr(cls, name)) for name, label in _STAGES.items()
    }
    methods["validate"] = recorder.timed(of_evaluator, cls.validate)
    methods["validation_loss"] = recorder.timed(of_loss, cls.validation_loss)
    update = recorder.timed(Key("stage", "optimizer"), cls.update)
    methods["update"] = _ending(recorder, update) if ends_batches else update
    return type(cls.__name__, (cls,), {"__slots__": (), "__module__": cls.__module__, **methods})


def _ending(recorder: Recorder, update: Callable[..., T]) -> Callable[..., T]:
    """An update, after which a batch is over."""

    @functools.wraps(update)
    def called(*args: object, **kwargs: object) -> T:
        try:
            return update(*args, **kwargs)
        finally:
            recorder.count_batches()

    return called
