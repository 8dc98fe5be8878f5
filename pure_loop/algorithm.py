"""Algorithms: pure functions ``State -> State`` bound to events.

An algorithm changes training by returning another State. It keeps values between events in
``state.algorithm_state``, never in itself, so that resuming from a State is exact. At every event
algorithms apply in the order given, and in reverse on the AFTER half of a BEFORE/AFTER pair, so
that what opened last closes first; AFTER_DATALOADER is the exception (:func:`reversed_at`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import attrs

from pure_loop._internal.arguments import accepts, check_flag
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.reprs import call
from pure_loop._internal.suggestions import advice_on, teaching
from pure_loop._internal.tracebacks import OWN_HIDDEN
from pure_loop.cadence import Cadence, CadenceLike, Predicate, as_predicate
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event, EventName, as_event, events_between
from pure_loop.frozendict import FrozenDict
from pure_loop.hooks import Handler, HandlerFunction
from pure_loop.random import derive
from pure_loop.random.authors import is_users
from pure_loop.state import State
from pure_loop.time import TimeUnit

if TYPE_CHECKING:
    from pure_loop.callback import Run
    from pure_loop.loop.batch import LoopStages

__all__ = ["Algorithm", "AlgorithmLike", "Composition", "algorithm", "bind", "compose", "one_of", "reversed_at"]

S = TypeVar("S", bound=State)
_OF_A_COMPUTATION = events_between(Event.BATCH_START, Event.AFTER_TRAIN_BATCH)
UserHandler: TypeAlias = "Callable[[Any], State] | Callable[[Any, LoopStages], State]"


def _takes_stages(function: HandlerFunction, where: str) -> bool:
    """Whether a handler takes the loop's stages as a second argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) > 2 or (not required and not any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        raise ArgumentTypeError(
            f"{where} takes {len(required)} arguments; a handler is a function of (state), or of (state, stages) "
            "where it calls the loop's own stages."
        )
    if required and required[0].name == "self":
        raise ArgumentTypeError(
            f"{where} is a method that is bound to no object: write a function of (state), or bind it, "
            "pl.algorithm(Event.BATCH_END)(instance.method)."
        )
    if len(required) == 2 and required[0].name == "event":
        raise ArgumentTypeError(
            f"{where} is a function of ({required[0].name}, {required[1].name}), as callbacks are. An algorithm's "
            "handler is a function of (state), which finds its event in state.event."
        )
    return len(required) == 2


@attrs.frozen(init=False, repr=False)
class Algorithm:
    """A named set of handlers, and the algorithm state with which they start.

    Args:
        name: its name, which is also its key in ``state.algorithm_state``; unique in a run.
        handlers: an event, or a tuple of events, to a function ``state -> state`` (or
            ``(state, stages) -> state``: see :class:`pure_loop.loop.batch.LoopStages`).
        init: ``state -> value``, any pytree; called once, after INIT. The value is the first
            ``state.algorithm_state[name]``. When training resumes, ``init`` is called with tensors on the meta device,
            and the shapes of its value are compared with those of the algorithm state.
        when: how often the handlers run, such as ``pl.every("10ba")``; None: always.
        claims: names of effects that two algorithms of a run can't both have, as strings: ``{"mixes targets"}``.
        bind: ``run -> None``, called once before the stream of ``fit`` starts, with a :class:`pure_loop.callback.Run`;
            raises if the algorithm can't work in this run.
        across_members: whether its handlers, and ``init``, are given the State of an ensemble, to compare and change
            its members; they are bound to BATCH_END, or to events outside of batches, and tensors in its algorithm
            state have a leading dimension of members. Else each member is given its own.

    Raises:
        ArgumentError: it binds no event, or a name that is no event.
        ArgumentTypeError: a handler that can't be called with a State.

    Attributes:
        factory: the function of the library that made it, such as ``"sam"``; "" for other algorithms.
        settings: the arguments of that call by name, defaults included.

    >>> from pure_loop import Event
    >>> def count(state):
    ...     return state.remember("counter", state.algorithm_state["counter"] + 1)
    >>> Algorithm("counter", {Event.BATCH_END: count}, init=lambda state: 0)
    Algorithm('counter', batch_end)
    """

    name: str
    handlers: Mapping[Event, tuple[HandlerFunction, ...]]
    init: Callable[[State], PyTree] | None
    when: Predicate | None
    claims: frozenset[str]
    bind: Callable[[Run], None] | None
    across_members: bool = False
    factory: str = attrs.field(default="", eq=False)
    settings: Mapping[str, object] = attrs.field(factory=FrozenDict, eq=False)

    def __init__(
        self,
        name: str,
        handlers: Mapping[Any, UserHandler | Sequence[UserHandler]],  # of events, names, or tuples of them
        init: Callable[[State], PyTree] | None = None,
        *,
        when: CadenceLike | None = None,
        claims: Collection[str] = frozenset(),
        bind: Callable[[Run], None] | None = None,
        across_members: bool = False,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentTypeError(f"an algorithm's name is a text that is not empty, not {name!r}.")
        where = f"algorithm {name!r}"
        table: dict[Event, tuple[HandlerFunction, ...]] = {}
        if not isinstance(handlers, Mapping):
            raise ArgumentTypeError(f"{where}: handlers is a mapping of events to functions, not {handlers!r}.")
        for events, functions in handlers.items():
            for event in events if isinstance(events, tuple | list | frozenset) else (events,):
                member = as_event(event, where)
                listed = tuple(functions) if isinstance(functions, list | tuple) else (functions,)
                for function in listed:
                    if not callable(function):
                        raise ArgumentTypeError(f"{where} at {member.name}: {function!r} is not a function.")
                    _takes_stages(function, f"{where} at {member.name}")
                table[member] = table.get(member, ()) + listed
        if not table:
            raise ArgumentError(
                f"{where} binds no event, so it would never run: Algorithm({name!r}, {{Event.BATCH_END: function}})."
            )
        if init is not None and not (callable(init) and accepts(init, 1)):
            raise ArgumentTypeError(
                f"{where}: init={init!r} is not a function of (state) that returns the first algorithm state: "
                "init=lambda state: 0."
            )
        cadence = as_predicate(when, f"{where}: when")
        if isinstance(cadence, Cadence):
            for member in table:
                _refuse_never(cadence, member, where)
        if isinstance(claims, str) or not all(isinstance(claim, str) for claim in claims):
            raise ArgumentTypeError(f'{where}: claims={claims!r}: give a set of texts, such as {{"mixes targets"}}.')
        if bind is not None and not (callable(bind) and accepts(bind, 1)):
            raise ArgumentTypeError(f"{where}: bind={bind!r} is not a function of (run), which fit calls once.")
        inside = [event for event in table if event in _OF_A_COMPUTATION]
        if check_flag("across_members", across_members, where=where) and inside:
            raise ArgumentError(
                f"{where}: across_members=True at {inside[0].name}: inside a batch each member is computed alone. Bind "
                "it to BATCH_END, or to an event outside of batches, such as EPOCH_END or EVAL_AFTER_ALL."
            )
        self.__attrs_init__(name, table, init, cadence, frozenset(claims), bind, across_members)

    def __call__(self, state: State, *stages: object) -> State:
        """Apply the algorithm to a State by hand: the function itself, or the handlers of ``state.event``."""
        functions = {function for listed in self.handlers.values() for function in listed}
        chosen = tuple(functions)
        if len(chosen) > 1:
            chosen = () if state.event is None else self.handlers.get(state.event, ())
        for function in chosen:
            state = function(state, *stages)
        return state

    def made_by(self, factory: str, settings: Mapping[str, object]) -> Algorithm:
        """This algorithm, with the call that made it."""
        result = copy.copy(self)
        object.__setattr__(result, "factory", factory)
        object.__setattr__(result, "settings", FrozenDict(settings))
        return result

    def __repr__(self) -> str:
        if self.factory:
            settings = {name: value for name, value in self.settings.items() if value is not None}
            if settings.get("name") == self.factory:
                del settings["name"]
            return call(self.factory, settings)
        return f"Algorithm({self.name!r}, {', '.join(event.value for event in self.handlers)})"


def _refuse_never(cadence: Cadence, event: Event, where: str) -> None:
    """Refuse a cadence that never comes round at this event: epochs are counted after the batch."""
    counted = {TimeUnit.EPOCH: Event.EPOCH_END, TimeUnit.ITERATION: Event.ITERATION_END}.get(cadence.interval.unit)
    if counted is not None and event in (Event.BATCH_END, Event.BATCH_CHECKPOINT):
        raise ArgumentError(
            f"{where} would never run: {cadence} is counted at {counted.name}, after {event.name}. Bind it to "
            f"{counted.name}, or count in batches."
        )


@attrs.frozen(repr=False)
class Composition:
    """Several algorithms as one; ``[compose(a, b), c]`` is ``[a, b, c]``."""

    members: tuple[Algorithm, ...]

    def __call__(self, state: State, *stages: object) -> State:
        for algorithm in self.members:
            state = algorithm(state, *stages)
        return state

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.members))})"


AlgorithmLike: TypeAlias = "Algorithm | Composition"


@teaching
def algorithm(
    *events: Event | EventName,
    when: CadenceLike | None = None,
    name: str | None = None,
    init: Callable[[State], PyTree] | None = None,
    across_members: bool = False,
) -> Callable[[Callable[[S], S] | Callable[[S, LoopStages], S]], Algorithm]:
    """Make an algorithm of a function ``State -> State``.

    Args:
        *events: when it runs.
        when: how often, such as ``pl.every("10ba")`` or a pure predicate of the State; None: every time.
        name: default: the function's name.
        init: ``state -> memory``, kept in ``state.algorithm_state[name]``.
        across_members: whether it is given the State of an ensemble, to compare and change its members.

    Raises:
        ArgumentError: no event is given, or a name that is no event.
        ArgumentTypeError: events in a list, or an ``init`` that can't be called with a State.

    >>> import torch, pure_loop as pl
    >>> @pl.algorithm(pl.Event.AFTER_LOSS)
    ... def halve(state):
    ...     return state.replace(loss=state.loss / 2)
    >>> halve(State.create(torch.nn.Linear(1, 1)).replace(loss=torch.tensor(4.0))).loss
    tensor(2.)
    """
    value = cast("tuple[object, ...]", events)
    if len(value) == 1 and callable(value[0]) and not isinstance(value[0], str):
        function_name = getattr(value[0], "__name__", "function")
        raise ArgumentError(
            f"algorithm {function_name!r} binds no event: write @pl.algorithm(Event.BATCH_END) above it, with the "
            "event at which it runs."
        )
    if any(isinstance(event, list | tuple | set | frozenset) for event in value):
        raise ArgumentTypeError(
            "pl.algorithm takes events one by one, not in a list: pl.algorithm(Event.BATCH_START, Event.BATCH_END)."
        )
    if not events:
        raise ArgumentError("pl.algorithm() binds no event: write pl.algorithm(Event.BATCH_END), for example.")

    def decorate(function: HandlerFunction) -> Algorithm:
        label = name if name is not None else getattr(function, "__name__", type(function).__name__)
        with OWN_HIDDEN:
            return Algorithm(label, {events: function}, init, when=when, across_members=across_members)

    return decorate


@teaching
def compose(*algorithms: AlgorithmLike) -> Composition:
    """Several algorithms as one value: ``compose(a, b)`` in a list does what ``a, b`` does there."""
    return Composition(flatten(algorithms))


def _no_algorithm(item: object) -> str:
    """What is in the list and is no algorithm, and what to write."""
    name = type(item).__name__
    if hasattr(item, "match") and hasattr(item, "apply"):
        return (
            f"an object of type {name}, an algorithm of Composer's kind; here match is an event and apply a function: "
            "write @pl.algorithm(Event.BATCH_END) above def apply(state), which returns state.replace(...)"
        )
    if isinstance(item, list | tuple):
        return f"a {name} of {len(item)}; write its members themselves: algorithms=[*first, second]"
    what = repr(item) if isinstance(item, str | int | float | None) else "an object"
    text = advice_on("algorithms", item) or (
        "algorithms are made by @pl.algorithm(Event...) and pl.Algorithm(...), and what only observes goes into "
        "callbacks="
    )
    return f"{what} of type {name}, not an algorithm; {text}"


# Those of one batch, while the timestamp counts it as the next one.
_OF_A_BATCH = events_between(Event.BEFORE_DATALOADER, Event.AFTER_TRAIN_BATCH)


@teaching
def one_of(*alternatives: AlgorithmLike, probabilities: Sequence[float] | None = None) -> Composition:
    """Algorithms of which one draw for each batch decides which acts, at all its events: ``one_of(mixup(), cutmix())``.

    The draw depends on the run's seed, the names and the number of the batch alone, so ranks and microbatches agree,
    and a resumed run draws the same. What two alternatives claim, such as mixing targets, one does in a batch.

    Args:
        *alternatives: algorithms that act on single batches, from BEFORE_DATALOADER to AFTER_TRAIN_BATCH.
        probabilities: that of each alternative, of a sum of at most 1; in the other batches none acts. None: all alike,
            and one acts in each batch.

    Raises:
        ArgumentError: other than one probability from 0 to 1 for each alternative, or a sum above 1; no alternative, or
            one that acts at other events, such as an average of weights.
        ArgumentTypeError: an alternative that is no algorithm.

    >>> from pure_loop.algorithms import cutmix, mixup
    >>> [member.name for member in one_of(mixup(0.2), cutmix(1.0), probabilities=[0.5, 0.3]).members]
    ['mixup', 'cutmix']
    """
    groups = [flatten([item]) for item in alternatives]
    count = len(groups)
    alike = [1 / max(count, 1)] * count
    chances = alike if probabilities is None else list(probabilities) if isinstance(probabilities, Iterable) else []
    of_range = all(isinstance(chance, int | float) and 0 <= chance <= 1 for chance in chances)
    if not groups or len(chances) != count or not of_range or math.fsum(chances) > 1 + 1e-9:
        raise ArgumentError(
            f"one_of: probabilities={probabilities!r} of {count} alternatives: give a number from 0 to 1 for each, of "
            "a sum of at most 1: one_of(mixup(), cutmix(), probabilities=[0.5, 0.5])."
        )
    path = ("one_of", *(member.name for group in groups for member in group))
    ends = [round(min(1.0, math.fsum(chances[: number + 1])) * 2**63) for number in range(count)]
    members: list[Algorithm] = []
    for group, chance, start, end in zip(groups, chances, [0, *ends], ends, strict=False):
        claimed = frozenset(itertools.chain.from_iterable(member.claims for member in members))
        members += [_chosen(member, chance, path, start, end, claimed) for member in group]
    return Composition(tuple(members))


def _chosen(
    member: Algorithm, chance: float, path: tuple[str, ...], start: int, end: int, claimed: frozenset[str]
) -> Algorithm:
    """An algorithm that acts in batches of which the draw, below 2**63, is at least ``start`` and below ``end``."""
    for event in member.handlers:
        if event not in _OF_A_BATCH:
            raise ArgumentError(
                f"one_of: the algorithm {member.name!r} acts at {event.name}, which is of no single batch, so no draw "
                "for a batch can leave it out: put it in algorithms= by itself."
            )

    def gated(handler: HandlerFunction) -> HandlerFunction:
        @functools.wraps(handler)
        def applied(state: State, *stages: Any) -> State:
            drawn = derive(state.seed, *path, state.timestamp.batch)
            # In a compiled step each comparison is a decision.
            acts = (not start or drawn >= start) and (end == 2**63 or drawn < end)
            return handler(state, *stages) if acts else state

        return applied

    result = copy.copy(member)
    table = {event: tuple(map(gated, handlers)) for event, handlers in member.handlers.items()}
    object.__setattr__(result, "handlers", table)
    object.__setattr__(result, "claims", member.claims - claimed)
    return result.made_by(member.factory, {**member.settings, "one_of": chance})


def flatten(algorithms: object) -> tuple[Algorithm, ...]:
    """The algorithms of an ``algorithms=`` argument, one after the other.

    Raises:
        ArgumentTypeError: something in it is not an algorithm.
        ArgumentError: two of them have one name.
    """
    if isinstance(algorithms, Algorithm | Composition):
        algorithms = (algorithms,)
    if isinstance(algorithms, str | Mapping) or not isinstance(algorithms, Iterable):
        raise ArgumentTypeError(f"algorithms={algorithms!r}: give a list of algorithms.")
    result: list[Algorithm] = []
    for item in algorithms:
        if isinstance(item, Algorithm):
            result.append(item)
        elif isinstance(item, Composition):
            result.extend(item.members)
        elif isinstance(item, type):
            name = item.__name__
            raise ArgumentTypeError(f"algorithms= holds the class {name}; give an algorithm: {name}(...).")
        elif callable(item) and not isinstance(item, State | ModuleType):
            name = getattr(item, "__name__", type(item).__name__)
            text = advice_on("algorithms", item) or (
                f"if it is an algorithm, write pl.algorithm(Event.BATCH_END)({name}); if it makes one, call it: "
                f"{name}(...)"
            )
            raise ArgumentTypeError(f"{name} in algorithms= is a function that is bound to no event; {text}.")
        else:
            raise ArgumentTypeError(f"algorithms= holds {_no_algorithm(item)}.")
    names = [item.name for item in result]
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(
                f"two algorithms are named {name!r}, and algorithm_state keeps one memory a name: give one of them "
                f"another, such as name={name + '_2'!r}."
            )
    _refuse_two_claims(result)
    return tuple(result)


def _refuse_two_claims(algorithms: Sequence[Algorithm]) -> None:
    """
    Raises:
        ArgumentError: two algorithms claim the same.
    """
    claimed: dict[str, Algorithm] = {}
    for algorithm in algorithms:
        for claim in sorted(algorithm.claims):
            if claim in claimed:
                pair = claimed[claim], algorithm
                written = ", ".join(f"{item.factory}(...)" if item.factory else item.name for item in pair)
                raise ArgumentError(
                    f"algorithms {pair[0].name!r} and {pair[1].name!r} both claim {claim!r}, and one algorithm of a "
                    f"run can: leave one of them out, or let one draw for each batch decide: pl.one_of({written}, "
                    "probabilities=[0.5, 0.5])."
                )
            claimed[claim] = algorithm


def reversed_at(event: Event) -> bool:
    """Whether algorithms apply in reverse: on the AFTER half of a BEFORE/AFTER pair, so that brackets nest.

    AFTER_DATALOADER is not: data passes through transforms in the order given. *_END events are not: the pair is
    START and END.

    >>> reversed_at(Event.AFTER_FORWARD), reversed_at(Event.AFTER_DATALOADER), reversed_at(Event.EPOCH_END)
    (True, False, False)
    """
    return "after" in event.value.split("_") and event is not Event.AFTER_DATALOADER


def _path(algorithm: Algorithm, function: HandlerFunction, number: int) -> tuple[str | int, ...] | None:
    code = (function, algorithm.when, *algorithm.settings.values())
    return ("algorithm", algorithm.name, number) if any(map(is_users, code)) else None


def bind(algorithms: Sequence[Algorithm]) -> dict[Event, tuple[Handler, ...]]:
    """For each event, the handlers that run at it, in the order in which they run."""
    table: dict[Event, tuple[Handler, ...]] = {}
    for event in Event:
        handlers = [
            Handler(
                *(item.name, function, item.when, _takes_stages(function, item.name), _path(item, function, number)),
                across_members=item.across_members,
            )
            for item in (reversed(algorithms) if reversed_at(event) else algorithms)
            for number, function in enumerate(item.handlers.get(event, ()))
        ]
        if handlers:
            table[event] = tuple(handlers)
    return table
