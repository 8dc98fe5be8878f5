"""What stands in a rehearsal for callbacks, loggers, handlers and metrics: nothing is written, and errors have a phase.

The places that callbacks and loggers write to are tried, and left as they were.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs

from pure_loop._internal.arguments import name_of, path_text
from pure_loop.cadence import Cadence
from pure_loop.callback import Callback, Logger
from pure_loop.checkpoint.storage import try_folder
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.hooks import Handler, Observer, refuse_return
from pure_loop.loggers.in_memory import InMemoryLogger
from pure_loop.loop.contract import check_returned
from pure_loop.metrics import Metric
from pure_loop.rehearsal.report import Place
from pure_loop.state import State
from pure_loop.time import Timestamp


def try_place(name: str, place: str) -> str:
    """Try that a file can be written to a folder, or in the place of a file; folders that are made are removed.

    Args:
        name: ``"folder"``, or ``"path"`` of a file.
        place: where; a URL of fsspec is tried if it is a local or an in-memory one, so that no service is called.

    Returns:
        A sentence that says what was found.

    Raises:
        CheckpointWriteError, OSError: no file can be written there; names the place.
    """
    if "://" in place:
        return f"{place} is remote, and was not tried"
    folder = Path(place).absolute()
    if name == "path":
        if os.path.isdir(place):
            raise IsADirectoryError(errno.EISDIR, "there is a folder in the place of the file", place)
        if os.path.exists(place) and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, "the file can't be written to", place)
        folder = folder.parent
    missing = []
    above = folder
    while not os.path.lexists(above) and above != above.parent:
        missing.append(above)
        above = above.parent
    try:
        try_folder(os.fspath(folder))
        if name == "path":
            with contextlib.suppress(FileNotFoundError):
                os.lstat(place)  # a name that is too long
    finally:
        for path in missing:
            with contextlib.suppress(OSError):  # it was not made, or another process has put something there
                path.rmdir()
    return f"{place} can be written to" + (", once it is made" if missing and name == "folder" else "")


# The arguments of callbacks and loggers of the library that are places.
_PLACES = ("folder", "path")


def _is_ours(item: object) -> bool:
    return type(item).__module__.startswith("pure_loop.")


def _arguments(item: Callback) -> dict[str, Any]:
    """The arguments with which a callback of the library was made, defaults included."""
    bound = inspect.signature(type(item)).bind_partial(**(item.made_with or {}))
    bound.apply_defaults()
    return dict(bound.arguments)


def destinations(items: Sequence[object]) -> list[tuple[str, str, str]]:
    """Where callbacks and loggers of the library write to: the class, ``"folder"`` or ``"path"``, and the place."""
    places = []
    for item in items:
        if isinstance(item, Callback) and _is_ours(item) and item.made_with is not None:
            for name in _PLACES:
                place = _arguments(item).get(name)
                if place is not None:
                    places.append((type(item).__name__, name, path_text(place)))
    return places


def callback_standins(callbacks: Sequence[object], folder: Path, place: Place) -> list[object]:
    """Copies of the callbacks, to be called in their places.

    Those of the library that write to a folder or a file write to one in ``folder``; of those of the user's the copies
    are deep, and functions are themselves.
    """
    result = []
    for number, callback in enumerate(callbacks):
        where = folder / f"callback-{number}"
        if not isinstance(callback, Callback):
            result.append(callback)
        elif _is_ours(callback) and callback.made_with is not None:
            if type(callback).__name__ == "MemorySnapshot":
                place.skip(f"callback {type(callback).__name__}: it records the memory of the whole process.")
            else:
                result.append(_of_library(callback, where))
        else:
            try:
                result.append(copy.deepcopy(callback))
            except Exception as error:  # whatever user code raises that can't be copied
                reason = f"{type(error).__name__}: {error}"
                place.skip(f"callback {name_of(type(callback))}: it was not called, because a copy fails ({reason}).")
    return result


def _of_library(callback: Callback, where: Path) -> Callback:
    arguments = dict(callback.made_with or {})
    signature = inspect.signature(type(callback))
    for name in _PLACES:
        if arguments.get(name) is not None:
            where.mkdir(parents=True, exist_ok=True)
            path = cast("str | os.PathLike[str]", arguments[name])
            arguments[name] = os.fspath(where if name == "folder" else where / Path(path).name)
    if "signals" in signature.parameters:  # the handlers of the process stay as they are
        arguments["signals"] = ()
    if "overwrite" in signature.parameters:  # of the rehearsal's own files, which it writes where it begins and ends
        arguments["overwrite"] = True
    if "background" in signature.parameters:
        arguments["background"] = False
    bound = signature.bind_partial()
    bound.arguments.update(arguments)
    result: Callback = type(callback)(*bound.args, **bound.kwargs)
    result.rank = callback.rank
    return result


class _Recorded(InMemoryLogger):
    """Keeps what is recorded in memory, under the methods that the loggers of the call have."""

    def __init__(self, methods: Sequence[str]) -> None:
        super().__init__()
        for name in methods:
            if not hasattr(self, name):
                setattr(self, name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """A method ``log_*`` of a logger that is not called."""


def logger_standin(loggers: Sequence[Logger], place: Place) -> list[Logger]:
    """One logger that keeps everything in memory, in the place of the loggers of the call; none for none."""
    if not loggers:
        return []
    for logger in loggers:
        if not _is_ours(logger):
            place.skip(f"logger {type(logger).__name__}: what it is given was kept in memory, and it was not called.")
    methods = sorted({name for logger in loggers for name in dir(logger) if name.startswith("log_")})
    return [_Recorded(methods)]


# What is computed after each event, until the next one.
_COMPUTED_AFTER = {
    Event.INIT: "start, agreement after INIT",
    Event.BEFORE_LOAD: "load_path, numbers of the checkpoint",
    Event.BEFORE_DATALOADER: "data, batch",
    Event.BEFORE_TRAIN_BATCH: "microbatches and their weights",
    Event.BEFORE_FORWARD: "forward",
    Event.BEFORE_LOSS: "loss",
    Event.BEFORE_BACKWARD: "backward",
    Event.AFTER_BACKWARD: "gradients",
    Event.AFTER_TRAIN_BATCH: "optimizer step",
}


def marker(place: Place) -> Observer:
    """The last observer of each event: what fails next belongs to the computation that follows the event."""

    def observe(event: Event, state: State) -> None:
        if event.is_eval and state.evaluator is not None:
            what = {Event.EVAL_BEFORE_FORWARD: ", forward"}.get(event, ", metrics")
            place.phase = f"evaluator {state.evaluator!r}, first batch{what}"
            return
        number = state.timestamp.batch
        computed = _COMPUTED_AFTER.get(event)
        place.phase = f"{computed}, batch {number}" if computed else f"the loop after {event.name}, batch {number}"

    return Observer("rehearse", observe)


def caught_observer(observer: Observer, place: Place) -> Observer:
    """A callback that is called no more after its first error, which is a failure of its own."""

    def observe(event: Event, state: State) -> None:
        if observer.name in place.silenced:
            return
        count = len(place.failures)
        with place.collecting(f"callback {observer.name} at {event.name}"):
            returned = observer.observe(event, state)
            if returned is not None:
                refuse_return(returned, observer.name, event)
        if len(place.failures) > count:
            place.silenced.add(observer.name)

    return Observer(observer.name, observe)


def forced_handlers(
    handlers: Mapping[Event, tuple[Handler, ...]], place: Place, later: tuple[Timestamp, ...]
) -> dict[Event, tuple[Handler, ...]]:
    """The handlers, each of which runs although its ``when`` may come round later only.

    Args:
        handlers: of the algorithms of the call.
        place: where their errors belong.
        later: timestamps of the run, at which a predicate of the user's that says no is evaluated again.
    """
    return {event: tuple(_forced(handler, event, place, later) for handler in some) for event, some in handlers.items()}


def _forced(handler: Handler, event: Event, place: Place, later: tuple[Timestamp, ...]) -> Handler:
    when, function = handler.when, handler.function
    phase = f"algorithm {handler.algorithm!r} at {event.name}"

    def run(state: State, *stages: object) -> State:
        with place.during(phase):
            if when is None or isinstance(when, Cadence) or when(state):
                result: State = function(state, *stages)
                return result if result is state else check_returned(result, state, handler.algorithm, event)
            for timestamp in later:
                moved = state.replace(timestamp=timestamp, previous_timestamp=state.timestamp)
                if when(moved):
                    answer = _moved_back(function(moved, *stages), state)
                    return check_returned(answer, state, handler.algorithm, event)
        place.skip(f"{phase}: its when= was False at the start, in the middle and at the end of the run.")
        return state

    return attrs.evolve(handler, function=run, when=None)


def _moved_back(result: object, state: State) -> object:
    """What a handler returned, at the time of the State that it was to be called with."""
    if not isinstance(result, State):
        return result  # which the driver refuses
    return result.replace(timestamp=state.timestamp, previous_timestamp=state.previous_timestamp)


def named_metrics(evaluator: BoundEvaluator, place: Place) -> BoundEvaluator:
    """The evaluator, with each of its metrics named where it fails."""
    if evaluator.metrics is None:
        return evaluator
    metrics = tuple(_named(metric, evaluator.label, place) for metric in evaluator.metrics)
    return attrs.evolve(evaluator, metrics=metrics)


def _named(metric: Metric, label: str, place: Place) -> Metric:
    result = copy.copy(metric)
    phase = f"metric {metric.name!r} of evaluator {label!r}"

    def naming(function: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any) -> Any:
            with place.during(phase):
                return function(*args)

        return called

    for name in ("init", "update", "compute"):
        object.__setattr__(result, name, naming(getattr(metric, name)))
    return result
