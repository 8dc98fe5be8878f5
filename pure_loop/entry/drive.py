"""``drive``: a script of the user's own, run with algorithms, callbacks and loggers as ``fit`` runs its own."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from typing import Literal

from pure_loop._internal.arguments import name_of
from pure_loop._internal.closing import closing
from pure_loop._internal.reprs import brief
from pure_loop._internal.suggestions import teaching
from pure_loop.algorithm import Algorithm, AlgorithmLike, bind
from pure_loop.callback import CallbackLike, Logger, Run
from pure_loop.distributed.parallel import Parallel
from pure_loop.distributed.scripts import Alone, Meeting, refuse_of_fit
from pure_loop.entry.deterministic import stream_of
from pure_loop.entry.parallel import Together, algorithm_described, announced
from pure_loop.entry.settings import StreamSettings
from pure_loop.entry.start import with_first_memories
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event, EventName, as_event
from pure_loop.loop import driver
from pure_loop.loop.driver import Script
from pure_loop.loop.stream import Stream
from pure_loop.loop.strict import Strict
from pure_loop.observer import bind_callbacks, observers
from pure_loop.recorder import Recorder
from pure_loop.stages import Stages
from pure_loop.state import State


@announced
@teaching
def drive(
    script: Script,
    *,
    algorithms: Iterable[AlgorithmLike] = (),
    callbacks: Iterable[CallbackLike] = (),
    loggers: Iterable[Logger] = (),
    stages: Stages | None = None,
    watch: Collection[Event | EventName] | None = None,
    strict: bool | None = None,
    deterministic: bool = False,
    parallel: Literal["replicate", False] | Parallel | None = None,
) -> Stream:
    """Run a script of your own: algorithms, callbacks and loggers as in :func:`fit`.

    Args:
        script: a generator that yields ``(event, state)``, takes the State back, and returns the last one.
        loggers: as in :func:`fit`. Recorded are ``state.loss`` and its parts at BATCH_END, as ``train/loss`` and
            ``train/loss/<part>``, settings of algorithms that are schedules, and what callbacks record.
        stages: what handlers that take a second argument are given.
        algorithms, callbacks, watch, deterministic: as in :func:`fit`. The memory of algorithms is there
            from the first State on.
        strict: see to it, by value, that no State is changed in place: None: at the first event of each kind; True:
            always; False: never. The order is yours.
        parallel: as in :func:`fit`; on several ranks the script takes its part of each batch, and exchanges by
            :func:`pure_loop.distributed.mean`. States have to be the same on all ranks, which is checked at the first
            event, at the first BATCH_END and at the end.

    >>> import torch, pure_loop as pl
    >>> def script(state):
    ...     for _ in range(2):
    ...         state = yield pl.Event.BATCH_START, state
    ...         state = yield pl.Event.BATCH_END, state
    ...     return state
    >>> state = pl.State.create(torch.nn.Linear(1, 1))
    >>> [event.value for event, _ in pl.drive(script(state))]
    ['batch_start', 'batch_end', 'batch_start', 'batch_end']
    """
    if not isinstance(script, Generator):
        raise ArgumentTypeError(
            f"script is {brief(script)} of type {type(script).__name__}, not a generator: call the function, "
            "drive(script(state))."
        )
    generator: object = script  # for type checkers a Stream is no Script
    if isinstance(generator, Stream):
        raise ArgumentTypeError(
            "script is a stream of fit, evaluate, predict or drive, which applies algorithms of its own and takes no "
            "State back: give algorithms, callbacks and loggers to that function, fit(..., algorithms=[...])."
        )
    settings = StreamSettings.of(locals())
    together, meeting = Together.of(parallel), Alone()
    if together.parallel is not None:
        refuse_of_fit(together.parallel)
        alike = {"script": name_of(script), "algorithms": [algorithm_described(item) for item in settings.algorithms]}
        meeting = Meeting(together.parallel, alike)
    recorder = Recorder(algorithms=settings.algorithms)
    observed, objects, _ = observers(settings.callbacks, settings.loggers, recorder, meeting.rank, meeting.ranks)
    run = Run(function="drive", callbacks=objects, ranks=meeting.ranks)
    bind_callbacks(run)
    handlers = bind(settings.algorithms)
    checks = Strict.of(settings.strict, settings.watch, {*handlers, *observed})
    pairs = driver.drive(
        _with_memory(script, settings.algorithms, meeting),
        handlers,
        observed,
        stages=stages,
        strict=checks,
        watch=settings.watch,
        closing=[meeting.close, *(callback.close for callback in objects), *run.at_end],
        failed=meeting.failed,
    )
    return stream_of(pairs, settings.deterministic)


def _with_memory(script: Script, algorithms: tuple[Algorithm, ...], meeting: Alone) -> Script:
    """The script; its first State has the initial state of the algorithms, and is that of all ranks."""
    try:
        with meeting.computing():
            event, state = _pair(next(script))
    except StopIteration as stop:
        final_state: State = stop.value
        return final_state
    state = with_first_memories(meeting.begin(event, state), algorithms)
    last = 0
    with closing(script):
        while True:
            if event is Event.BATCH_END:
                _refuse_standstill(state, last)
                last = state.timestamp.batch
            meeting.come_to(event, state)
            state = yield event, state
            try:
                with meeting.computing():
                    yielded = script.send(state)
            except StopIteration as stop:
                final_state = stop.value
                meeting.end(final_state)
                return final_state
            event, state = _pair(yielded)


def _refuse_standstill(state: State, last: int) -> None:
    """
    Raises:
        ArgumentError: a script that counts its batches has counted none since the BATCH_END before: it would never end.
    """
    batch = state.timestamp.batch
    if batch and batch == last:
        raise ArgumentError(
            f"the script yielded BATCH_END twice with {batch} finished {'batch' if batch == 1 else 'batches'}: a yield "
            "gives the State back, and the next one is made of it. Write state = yield Event.BATCH_END, state, at each "
            "event."
        )


def _pair(yielded: object) -> tuple[Event, State]:
    """
    Raises:
        ArgumentTypeError: a user's script yielded something else than an event and a State.
    """
    if isinstance(yielded, tuple) and len(yielded) == 2 and isinstance(yielded[1], State):
        event, state = yielded
        if isinstance(event, Event):
            return event, state
        if isinstance(event, str):
            name = as_event(event, "drive").name
            raise ArgumentTypeError(
                f"the script yielded the text {event!r}: write Event.{name}, state = yield Event.{name}, state."
            )
    raise ArgumentTypeError(
        f"the script yielded {brief(yielded)}, and what it yields is an event and a State, which it takes back as the "
        "algorithms left it: state = yield Event.BATCH_START, state."
    )
