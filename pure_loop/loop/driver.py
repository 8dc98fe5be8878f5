"""The driver: runs a script, applies algorithms, calls callbacks, yields to the consumer, and sends States back."""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from weakref import ref

import torch

from pure_loop._internal.closing import call_all
from pure_loop._internal.processes import generation, here
from pure_loop._internal.tracebacks import OWN_HIDDEN, hide_own
from pure_loop.cadence import Cadence
from pure_loop.errors import AlgorithmReturnError, ForkedError, PureLoopError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.hooks import Handler, Handlers, Observer, Observers, refuse_return
from pure_loop.loop.contract import check_returned
from pure_loop.random.guards import guard
from pure_loop.stages.ownership import Ownership, Request
from pure_loop.stages.references import counting_doubt
from pure_loop.state import NOT_READY, POSITIONS, State, at_event, position_at, with_fields

if TYPE_CHECKING:
    from pure_loop.loop.strict import Strict
    from pure_loop.stages import Stages

Script: TypeAlias = Generator[tuple[Event, State], State, State]

_NOTHING: FrozenDict[Event, Any] = FrozenDict()
_set_grads = vars(State)["_grads"].__set__


def drive(
    script: Generator[tuple[Event, State], State, Any],
    handlers: Handlers = _NOTHING,
    observers: Observers = _NOTHING,
    *,
    stages: Stages | None = None,
    strict: Strict | None = None,
    watch: Collection[Event] | None = None,
    events: Collection[Event] | None = None,
    ownership: Ownership | None = None,
    closing: Sequence[Callable[[], None]] | None = None,
    failed: Callable[[BaseException, Event, State | None], None] | None = None,
) -> Generator[tuple[Event, State], None, Any]:
    """Run a script: at each event algorithms, then callbacks, then the consumer. Returns what the script returns.

    Args:
        script: yields events and States, and takes each State back.
        handlers: those of algorithms, by event.
        observers: callbacks and loggers, by event.
        stages: what handlers that take a second argument are given.
        strict: the checks; None: there are none.
        watch: the events that the consumer is given; None: all.
        events: those of the run's order; others of the script are passed over. None: it has all.
        ownership: decides, before memory is written to, whether it may be.
        closing: what is called when the stream ends, however it does; None: it runs inside of another one.
        failed: is called before, if the stream ends before the script does, with the error (GeneratorExit where the
            loop was left), the last event and its State.
    """
    began = generation()
    state: Any = None
    error: BaseException | None = None
    closing = None if closing is None else [*map(here, closing)]
    event = Event.INIT
    last_yielded: Callable[[], State | None] = _no_state
    checks = strict
    try:
        if ownership is not None and not ownership.measures:
            measure_references()
        while True:
            try:
                event, state = script.send(state)
            except StopIteration as stop:
                return stop.value  # only the script's: one that escapes an algorithm must not end training in silence
            if isinstance(event, Request) and ownership is not None:
                ownership.before(event, state, last_yielded, _no_state)
                continue
            if events is not None and event not in events:
                continue
            waiting = _no_state if ownership is None else ref(state)
            if checks is not None:
                checks.advance(event)
            checks = strict if strict is not None and event in strict.checked else None
            position = position_at(event, state) if event in POSITIONS else state.position
            state = at_event[type(state)](state, event, position)
            if ownership is not None and event in ownership.observed_at:
                ownership.observed = True
            algorithms, callbacks = handlers.get(event, ()), observers.get(event, ())
            if checks is not None:
                checks.begin(event, state, algorithms)
            if algorithms:
                state = apply(event, state, algorithms, stages, checks, callbacks)
            if callbacks:
                if began != generation():
                    refuse_fork(event, state)
                _observe(event, state, callbacks, stages, checks)
            if watch is None or event in watch:
                if checks is not None:
                    checks.show(event, state)
                yield event, state
                last_yielded = ref(state)
            if checks is not None:
                checks.end(event, state)
            if ownership is not None and event in ownership.counted:
                ownership.before(event, state, last_yielded, waiting)
    except BaseException as ended_by:
        error = ended_by
        if failed is not None and began == generation():
            failed(error, event, state)
        hide_own(error)
        raise
    finally:
        try:
            if closing is not None:
                forget = [] if ownership is None else [ownership.forget]
                release = [] if state is None else [state.model.release]
                with OWN_HIDDEN:
                    call_all([script.close, *forget, *release, *closing], error, "while closing: ")
        finally:
            error = None  # its traceback refers to this frame


def run_to_end(script: Generator[tuple[Event, State], State, Any], handlers: Handlers, stages: Any) -> Any:
    """Run a script to its end with its algorithms and nothing else; gives what it returns."""
    try:
        next(drive(script, handlers, stages=stages, watch=frozenset()))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a script of which no event is watched yields nothing")


def _no_state() -> None:
    """In the place of a weak reference to the State that was yielded last, before there is one."""


def measure_references() -> None:
    """Count references once, in a stream of which the consumer keeps nothing but the first State, in one variable.

    It runs in a thread of its own, where no debugger and no profiler reads the variables of frames, which would refer
    to States. Of three counts the lowest is right: another thread may look at all frames.
    """
    if Ownership.expected is not None or counting_doubt():
        return
    done = allocate_lock()
    done.acquire()

    def measure() -> None:
        try:
            for _ in range(3):
                _measure_references()
        finally:
            done.release()

    start_new_thread(measure, ())
    done.acquire()


def _measure_references() -> None:

    def script(state: State) -> Script:
        state = yield Event.BATCH_END, state
        state = with_fields(state)
        return (yield Event.AFTER_TRAIN_BATCH, state)

    model = torch.nn.LayerNorm(1, device="cpu")  # it draws nothing
    first = State.create(model, opt_state=FrozenDict(), grads=FrozenDict())
    ownership = Ownership(watch={Event.BATCH_END}, measures=True)
    pairs = drive(script(first), watch={Event.BATCH_END}, ownership=ownership)
    del first
    _event, _last = next(pairs)
    next(pairs, None)


def apply(
    event: Event,
    state: State,
    handlers: Sequence[Handler],
    stages: Any,
    strict: Strict | None = None,
    observers: Sequence[Observer] = (),
) -> State:
    """Apply the handlers of one event, one after the other, and check what each returns.

    Those of ``observers`` that record are shown the State if a handler raises.
    """
    grads_missing = state._grads is None
    if grads_missing:
        _set_grads(state, NOT_READY)
    handler = handlers[0]
    try:
        with torch.set_grad_enabled(True):
            for handler in handlers:
                path, when = handler.path, handler.when
                if when is not None:
                    path_of_when = None if path is None or isinstance(when, Cadence) else (*path, "when")
                    if not _called(when, (state,), state, path_of_when, stages):
                        continue
                if strict is not None:
                    strict.show(event, state, handler)
                if handler.takes_stages and stages is None:
                    raise AlgorithmReturnError(
                        f"algorithm {handler.algorithm!r} takes the loop's stages, and this script has none: write "
                        "pl.drive(script, stages=...)."
                    )
                arguments = (state, stages) if handler.takes_stages else (state,)
                result = _called(handler.function, arguments, state, path, stages)
                if strict is not None:
                    strict.take_back(state, f"algorithm {handler.algorithm!r}", event)
                if result is not state:
                    state = check_returned(result, state, handler.algorithm, event)
    except BaseException as error:
        _record_failure(event, state, f"algorithm {handler.algorithm!r}", observers, error)
        raise
    finally:
        if grads_missing and state._grads is NOT_READY:
            _set_grads(state, None)
    return state


def _called(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    state: State,
    path: tuple[str | int, ...] | None,
    stages: Any,
    *,
    apart: bool = False,
) -> Any:
    """What code returns that is called at an event; see :func:`guard`. ``path`` is None of what draws nothing."""
    if path is None:
        return function(*arguments)
    with (guard if stages is None else stages.guard)(state, path, apart=apart):
        return function(*arguments)


def refuse_fork(event: Event, state: State) -> NoReturn:
    """
    Raises:
        ForkedError: always: this process is a child of the one that made these callbacks.
    """
    raise ForkedError(
        f"this process was forked inside of the loop, and continues the parent's stream, at {event.name} of batch "
        f"{state.timestamp.batch}: both would save and log to the same places. A child ends by itself (os._exit), or "
        "trains by a stream of its own: fit(state, ...) with other folders."
    )


def _observe(event: Event, state: State, observers: Sequence[Observer], stages: Any, strict: Strict | None) -> None:
    for place, observer in enumerate(observers):
        if strict is not None:
            strict.show(event, state)
        try:
            returned = _called(observer.observe, (event, state), state, observer.path, stages, apart=True)
            if returned is not None:
                refuse_return(returned, observer.name, event)
            if strict is not None:
                strict.take_back(state, f"callback {observer.name}", event)
        except BaseException as error:
            _record_failure(event, state, f"callback {observer.name}", observers[place + 1 :], error)
            raise


def _record_failure(
    event: Event, state: State, author: str, observers: Sequence[Observer], error: BaseException
) -> None:
    """An error ends the stream at this event: note what raised it, unless the error says so itself.

    Of ``observers`` those that record are shown the State, so that no value of it is lost.
    """
    if isinstance(error, Exception) and not (isinstance(error, PureLoopError) and author in str(error)):
        error.add_note(f"raised by {author} at {event.name}, batch {state.timestamp.batch}")
    recording = [partial(observer.observe, event, state) for observer in observers if observer.records]
    call_all(recording, error, f"while recording {event.name}: ")
