"""Which callback sees which event, in which order, and as what: methods named after events, or functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import attrs

from pure_loop._internal.arguments import accepts, name_of
from pure_loop._internal.reprs import brief
from pure_loop._internal.suggestions import advice_on
from pure_loop._internal.tree_ops import alone_on_rank
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.callback import Callback, Logger, LoggerGroup, Run
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event, nearest_event
from pure_loop.hooks import Observer
from pure_loop.random.authors import is_users
from pure_loop.random.seeds import derive, seeded_apart
from pure_loop.state import State

__all__ = ["bind_callbacks", "observers"]


def _alone(observer: Observer) -> Observer:
    """An observer on one of several ranks: what ranks have to do together is an error there."""
    name, observe = observer.name, observer.observe

    def observe_alone(event: Event, state: State) -> object:
        token = alone_on_rank.set(name)
        try:
            return observe(event, state)
        finally:
            alone_on_rank.reset(token)

    return attrs.evolve(observer, observe=observe_alone)


def _of_function(function: Callable[[Event, State], object]) -> Observer:
    name = name_of(function)
    if not accepts(function, 2):
        raise ArgumentTypeError(
            f"callback {name} can't be called with two arguments: a function in callbacks= is called as {name}(event, "
            "state)."
        )
    return Observer(name, function)


def _of_callback(callback: Callback, logger: LoggerGroup) -> dict[Event, Observer]:
    cls = type(callback)
    name, records = cls.__name__, callback.records
    logger = logger.for_callback(name)
    if cls.run_event is not Callback.run_event:
        observer = Observer(name, lambda event, state: callback.run_event(event, state, logger), records)
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
            table[event] = Observer(name, _calling(method, logger), records)
    if not table and not isinstance(callback, Logger):
        raise ArgumentError(
            f"callback {name} observes no event: give it methods named after events, such as "
            "epoch_end(self, state, logger), or run_event(self, event, state, logger)."
        )
    return table


def _calling(method: Callable[[State, LoggerGroup], object], logger: LoggerGroup) -> Callable[[Event, State], object]:
    return lambda event, state: method(state, logger)


def _refuse_near_misses(callback: Callback) -> None:
    """Refuse a method with almost the name of an event: it would silently never be called."""
    names = {event.value for event in Event}
    methods = [name for name, _ in inspect.getmembers(type(callback), inspect.isroutine)]
    for name in [*methods, *getattr(callback, "__dict__", ())]:
        near = None if name.startswith("_") or name in names or hasattr(Logger, name) else nearest_event(name, 0.8)
        method = None if near is None else getattr(callback, name)
        if near is None or not callable(method):
            continue
        names_of_arguments = _arguments(method)
        if any(name.startswith(f"{event}_") for event in names):  # a word more, as a helper has: epoch_end_path
            is_meant = {"state", "logger"} <= names_of_arguments
        else:
            is_meant = name.startswith("on_") or accepts(method, 2) or "state" in names_of_arguments
        if is_meant:
            raise ArgumentError(
                f"callback {type(callback).__name__} has a method {name!r}, which is no event and would never be "
                f"called: did you mean {near.value}(self, state, logger)? (A helper's name may start with an "
                "underscore.)"
            )


def _refuse_unlike(logger: Logger) -> None:
    """
    Raises:
        ArgumentTypeError: a method of a logger that can't be called as the loop calls it.
        ArgumentError: one with almost the name of such a method, which would silently never be called; or others alone.
    """
    name = type(logger).__name__
    known = {key: method for key, method in vars(Logger).items() if key.startswith("log_") or key == "flush"}
    heads = {}
    for key, method in known.items():
        head = inspect.signature(method)
        bare = [each.replace(annotation=each.empty) for each in head.parameters.values()]
        heads[key] = f"{key}{head.replace(parameters=bare, return_annotation=head.empty)}"
        options = [each.name for each in bare if each.kind is each.KEYWORD_ONLY]
        its = getattr(logger, key)
        if not callable(its) or not accepts(its, len(bare) - len(options) - 1, *options):
            what = inspect.signature(its) if callable(its) else f" = {brief(its)}"
            raise ArgumentTypeError(f"logger {name} has a method {key}{what}: write {heads[key]}.")
    own = dict(inspect.getmembers(Logger, inspect.isfunction))
    if any(getattr(getattr(logger, key), "__func__", None) is not own[key] for key in own if key[0] != "_"):
        return
    methods = dict(inspect.getmembers(type(logger), inspect.isroutine)) | vars(logger)
    added = sorted(key for key in methods if key[0] != "_" and not hasattr(Logger, key) and callable(methods[key]))
    for key in added:
        import difflib  # only where a logger records nothing

        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if near:
            raise ArgumentError(
                f"logger {name} has a method {key!r}, which the loop doesn't call: did you mean {heads[near[0]]}?"
            )
    events = {event.value for event in Event}
    if added and not any(key in events or key.startswith("log_") for key in added):
        raise ArgumentError(f"logger {name} would record nothing: give it {heads['log_metrics']}.")


def _arguments(method: Callable[..., object]) -> frozenset[str]:
    """Their names; none where a method has no signature."""
    try:
        return frozenset(inspect.signature(method).parameters)
    except ValueError:
        return frozenset()


def observers(
    callbacks: Any, loggers: Any, recorder: Callback | None = None, rank: int = 0, ranks: int = 1
) -> tuple[dict[Event, tuple[Observer, ...]], tuple[Callback, ...], LoggerGroup]:
    """For each event, the callbacks that see it, in order, loggers last; all Callback objects; the logger group.

    Where there are loggers, ``recorder`` comes before them, so that they have its values. A ``rank`` other than 0 has
    only those that ask for all ranks. The others may begin nothing for which the first of several ``ranks`` would wait.

    Raises:
        ArgumentTypeError: something is neither a callback nor a function, or a class instead of an instance.
        ArgumentError: a callback that observes no event, or that needs the gradient's norm on one rank alone; a logger
            that is given twice.
    """
    listed = _listed(callbacks, "callbacks")
    logged = _listed(loggers, "loggers")
    for logger in logged:
        if not isinstance(logger, Logger):
            raise ArgumentTypeError(
                f"loggers= holds {brief(logger)}, which is not a Logger: subclass pl.Logger, or give it in callbacks= "
                "if it only observes."
            )
        if sum(item is logger for item in (*listed, *logged)) > 1:
            raise ArgumentError(f"{logger!r} is given twice, and would record everything twice: leave one out.")
        _refuse_unlike(logger)
    for item in (*listed, *logged):
        if getattr(item, "needs_grad_norm", False) and not getattr(item, "all_ranks", False):
            raise ArgumentError(
                f"callback {type(item).__name__} has needs_grad_norm = True, and not all_ranks = True: ranks "
                "compute the norm together, so all have to know of it. Write both."
            )
    if rank:
        listed, logged = ([item for item in some if getattr(item, "all_ranks", False)] for some in (listed, logged))
    group = LoggerGroup(logged)
    table: dict[Event, list[Observer]] = {}
    objects: list[Callback] = []
    named: list[str] = []
    own = any(type(item) is type(recorder) for item in listed)  # of a script that was written when drive had none
    recorders = (recorder,) if recorder is not None and logged and not own else ()
    for callback in (*listed, *recorders, *logged):
        if isinstance(callback, Callback):
            callback.rank = rank
            objects.append(callback)
            observing = _of_callback(callback, group)
        else:
            observing = dict.fromkeys(Event, _of_function(callback))
        # A callback of the library may call functions that it was passed, and loggers.
        code = (callback, *(getattr(callback, "made_with", None) or {}).values(), *logged)
        if any(map(is_users, code)):
            name = name_of(callback)
            path = ("callback", name, named.count(name))
            named.append(name)
            observing = {event: attrs.evolve(observer, path=path) for event, observer in observing.items()}
        together = ranks > 1 and getattr(callback, "all_ranks", False)
        for event, observer in observing.items():
            if together:  # which one rank can't record by itself
                observer = attrs.evolve(observer, records=False)
            table.setdefault(event, []).append(_alone(observer) if ranks > 1 and not together else observer)
    return {event: tuple(result) for event, result in table.items()}, tuple(objects), group


def bind_callbacks(run: Run) -> None:
    """Call ``bind`` of each callback of a run.

    Raises:
        ArgumentError: a callback can't do its work in this run.
        ArgumentTypeError: a method named ``bind`` that can't be called with the run.
    """
    for callback in run.callbacks:
        if not accepts(callback.bind, 1):
            raise ArgumentTypeError(
                f"callback {type(callback).__name__} has a method bind{inspect.signature(callback.bind)}; it is called "
                "with the run before the stream begins: def bind(self, run). Give another method another name."
            )
        # Before there is a State: by its name alone.
        users = is_users(type(callback))
        with seeded_apart(derive(0, "bind", name_of(callback))) if users else nullcontext():
            callback.bind(run)


def _observes(value: object) -> bool:
    return isinstance(value, Callback) or (callable(value) and not isinstance(value, type | State | ModuleType))


def _listed(value: Any, argument: str) -> list[Any]:
    if _observes(value):
        value = [value]
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"{argument}={brief(value)}: give a list.")
    items = list(value)
    for item in items:
        if isinstance(item, Algorithm | Composition):
            raise ArgumentTypeError(
                f"{argument}= holds the algorithm {item!r}, which changes training: algorithms=[...]."
            )
        if isinstance(item, type):
            name = item.__name__
            raise ArgumentTypeError(f"{argument}= holds the class {name}; give an instance: {name}().")
        if not _observes(item):
            raise ArgumentTypeError(f"{argument}= holds {_instead(item, argument)}.")
    return items


def _instead(item: object, argument: str) -> str:
    """What is in the list and observes nothing, and what to write."""
    cls = type(item)
    if cls.__module__ == "builtins":
        text = advice_on(argument, item) or "give a pl.Callback or a function of (event, state)"
        return f"{item!r} of type {cls.__name__}; {text}"
    base = "Callback" if argument == "callbacks" else "Logger"
    return (
        f"an object of type {cls.__name__}, whose methods would never be called; write class "
        f"{cls.__name__}(pl.{base}), with methods named after events: epoch_end(self, state, logger)"
    )
