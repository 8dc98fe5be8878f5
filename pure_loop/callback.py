"""Callbacks: read-only observers of ``(event, state)``.

A callback sees what the algorithms left and can't change it. At one event callbacks come after the
algorithms, in the order given, and loggers last. What a callback wants recorded goes to the logger
that it is handed: callbacks say what, loggers say where.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from pure_loop._signature import accepts, name_of
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.errors import ArgumentError, ArgumentTypeError, CallbackReturnError
from pure_loop.event import Event
from pure_loop.state import State

__all__ = ["Callback", "CallbackLike", "Logger", "LoggerGroup", "Observer", "observers"]


class Callback:
    """The base of callbacks: override methods named after events, or ``run_event``, which then serves all.

    ``epoch_end(self, state, logger)`` runs at EPOCH_END, and so on for every event. A plain function of
    ``(event, state)`` is a callback too. Events at which nothing is overridden cost nothing.

    Of several ranks the first one alone calls it, unless it has the attribute ``all_ranks = True`` (a function may have
    it as well).

    >>> class Greeter(Callback):
    ...     def fit_start(self, state, logger):
    ...         print("training starts at batch", state.timestamp.batch)
    """

    all_ranks: bool = False

    rank: int = 0
    """Which rank of the stream calls it; the loop says so before it begins."""

    def run_event(self, event: Event, state: State, logger: LoggerGroup) -> None:
        """Called at every event, if overridden."""

    def close(self) -> None:
        """Called once when the stream ends, is left or raises: close files here."""


class Logger(Callback):
    """The base of loggers: where recorded things go. Override what the destination can hold.

    A logger is a callback as well, so that it can flush or print at events.
    """

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """The settings of the run, once."""

    def log_metrics(self, metrics: Mapping[str, Any], state: State) -> None:
        """Values by name at ``state.timestamp``: numbers, or tensors of shape () that may still be on a device.

        Reading such a tensor waits for the device: read at intervals, and call ``state.check_finite()``
        when you do.
        """

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], state: State) -> None:
        """A table."""

    def log_images(self, name: str, images: Any, state: State) -> None:
        """Images, ``(n, height, width, channels)``."""

    def log_file(self, name: str, path: str) -> None:
        """A file."""


class LoggerGroup:
    """The logger that callbacks are handed: passes everything on to each logger of the run."""

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self.loggers = tuple(loggers)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        for logger in self.loggers:
            logger.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, Any], state: State) -> None:
        for logger in self.loggers:
            logger.log_metrics(metrics, state)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], state: State) -> None:
        for logger in self.loggers:
            logger.log_table(name, columns, rows, state)

    def log_images(self, name: str, images: Any, state: State) -> None:
        for logger in self.loggers:
            logger.log_images(name, images, state)

    def log_file(self, name: str, path: str) -> None:
        for logger in self.loggers:
            logger.log_file(name, path)


CallbackLike: TypeAlias = "Callback | Callable[[Event, State], None]"


@attrs.frozen
class Observer:
    """One callback at one event."""

    name: str
    observe: Callable[[Event, State], Any]


_NOT_EVENTS = frozenset({"run_event", "close"})


def _of_function(function: Callable[..., Any]) -> Observer:
    name = name_of(function)
    if not accepts(function, 2):
        raise ArgumentTypeError(
            f"callback {name} can't be called with two arguments: a function in callbacks= is called as {name}(event, "
            "state)."
        )
    return Observer(name, function)


def _of_callback(callback: Callback, logger: LoggerGroup) -> dict[Event, Observer]:
    cls = type(callback)
    name = cls.__name__
    if cls.run_event is not Callback.run_event:
        observer = Observer(name, lambda event, state: callback.run_event(event, state, logger))
        return dict.fromkeys(Event, observer)
    _refuse_near_misses(callback)
    table = {}
    for event in Event:
        method = getattr(callback, event.value, None)
        if callable(method):
            if not accepts(method, 2):
                raise ArgumentTypeError(
                    f"callback {name} has a method {event.value}{inspect.signature(method)}; the loop calls it with "
                    f"the State and the logger: def {event.value}(self, state, logger)."
                )
            table[event] = Observer(name, _calling(method, logger))
    if not table and not isinstance(callback, Logger):
        raise ArgumentError(
            f"callback {name} observes no event: give it methods named after events, such as "
            "epoch_end(self, state, logger), or run_event(self, event, state, logger)."
        )
    return table


def _calling(method: Callable[[State, LoggerGroup], Any], logger: LoggerGroup) -> Callable[[Event, State], Any]:
    return lambda event, state: method(state, logger)


def _refuse_near_misses(callback: Callback) -> None:
    """A method with a callback's arguments whose name is no event would never be called, without a word."""
    values = [event.value for event in Event]
    aliases = {alias.lower(): [event.value] for alias, event in Event.__members__.items()}
    for name, method in inspect.getmembers(type(callback), inspect.isfunction):
        if name.startswith("_") or name in values or hasattr(Logger, name):
            continue
        bare = name.removeprefix("on_")
        near = aliases.get(bare) or difflib.get_close_matches(bare, values, n=1, cutoff=0.8)
        if near and (accepts(method, 3) or name.startswith("on_")):
            raise ArgumentError(
                f"callback {type(callback).__name__} has a method {name!r}, which is no event and would never be "
                f"called: did you mean {near[0]}(self, state, logger)? (A helper's name may start with an underscore.)"
            )


def observers(
    callbacks: Any, loggers: Any, recorder: Callback | None = None, rank: int = 0
) -> tuple[dict[Event, tuple[Observer, ...]], tuple[Callback, ...], LoggerGroup]:
    """For each event, the callbacks that see it, in order, loggers last; all Callback objects; the logger group.

    Where there are loggers, ``recorder`` comes before them, so that they have its values. A ``rank`` other than 0 has
    only those that ask for all ranks.

    Raises:
        ArgumentTypeError: something is neither a callback nor a function, or a class instead of an instance.
        ArgumentError: a callback that observes no event.
    """
    listed = _listed(callbacks, "callbacks")
    logged = _listed(loggers, "loggers")
    for logger in logged:
        if not isinstance(logger, Logger):
            raise ArgumentTypeError(
                f"loggers= holds {logger!r}, which is not a Logger: subclass pl.Logger, or give it in callbacks= if it "
                "only observes."
            )
    if rank:
        listed, logged = ([each for each in some if getattr(each, "all_ranks", False)] for some in (listed, logged))
    group = LoggerGroup(logged)
    table: dict[Event, list[Observer]] = {}
    objects: list[Callback] = []
    recorders = (recorder,) if recorder is not None and logged else ()
    for callback in (*listed, *recorders, *logged):
        if isinstance(callback, Callback):
            callback.rank = rank
            objects.append(callback)
            for event, observer in _of_callback(callback, group).items():
                table.setdefault(event, []).append(observer)
        else:
            observer = _of_function(callback)
            for event in Event:
                table.setdefault(event, []).append(observer)
    return {event: tuple(found) for event, found in table.items()}, tuple(objects), group


def _listed(given: Any, argument: str) -> list[Any]:
    if isinstance(given, Callback) or (callable(given) and not isinstance(given, type)):
        given = [given]
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ArgumentTypeError(f"{argument}={given!r}: give a list.")
    items = list(given)
    for item in items:
        if isinstance(item, Algorithm | Composition):
            raise ArgumentTypeError(
                f"{argument}= holds the algorithm {item!r}, which changes training: algorithms=[...]."
            )
        if isinstance(item, type):
            name = item.__name__
            raise ArgumentTypeError(f"{argument}= holds the class {name}; give an instance: {name}().")
        if not callable(item) and not isinstance(item, Callback):
            raise ArgumentTypeError(
                f"{argument}= holds {item!r} of type {type(item).__name__}; give a pl.Callback or a function of "
                "(event, state)."
            )
    return items


def refuse_return(value: Any, name: str, event: Event) -> None:
    """
    Raises:
        CallbackReturnError: always; a callback returned something.
    """
    raise CallbackReturnError(
        f"callback {name} returned {type(value).__name__} at {event.name}. Callbacks observe and return nothing; what "
        "changes training is an algorithm: @pl.algorithm(Event...) on a function State -> State."
    )
