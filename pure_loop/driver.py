"""The driver: runs a script, applies the algorithms, shows the callbacks, hands over, sends back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from sys import _getframe, getrefcount
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch

from pure_loop._consumer import gives_up
from pure_loop._plain import PLAIN_BATCHES, are_unseen, can_watch, plain_batches
from pure_loop._returned import check_returned
from pure_loop._unseen import unseen_batches
from pure_loop.algorithm import Handler
from pure_loop.callback import Observer, refuse_return
from pure_loop.donation import ABOUT_TO_WRITE, Donation, drop_gradients
from pure_loop.engine import are_large
from pure_loop.errors import AlgorithmReturnError, PureLoopError
from pure_loop.event import Event
from pure_loop.state import NOT_READY, State, at_event, at_position

if TYPE_CHECKING:
    from pure_loop.strict import Strict

__all__ = ["apply", "run_script", "run_silently", "seal"]

Handlers = Mapping[Event, tuple[Handler, ...]]

# Where a State says from where to go on. FIT_START is left out: a call that goes on yields it, and the State
# it yields there must still know the boundary that it came from.
POSITIONS = frozenset(
    {
        Event.AFTER_LOAD,
        Event.EPOCH_START,
        Event.BATCH_END,
        Event.BATCH_CHECKPOINT,
        Event.EPOCH_END,
        Event.EPOCH_CHECKPOINT,
        Event.FIT_END,
        Event.ITERATION_START,
        Event.ITERATION_END,
        Event.ITERATION_CHECKPOINT,
    }
)

_set_event = vars(State)["event"].__set__
_set_position = vars(State)["position"].__set__
_set_grads = vars(State)["_grads"].__set__


def seal(state: State, event: Event) -> State:
    """The State of an event. One that no event has had yet is nobody else's, and is written to in place."""
    # What was loaded from a checkpoint goes on from the boundary at which that was saved.
    passed = event in POSITIONS and (event is not Event.AFTER_LOAD or state.position is None)
    if state.event is None:
        _set_event(state, event)
        if passed:
            _set_position(state, event)
        return state
    if passed:
        return at_position[type(state)](state, event, event)  # type: ignore[no-any-return]
    return at_event[type(state)](state, event)  # type: ignore[no-any-return]


def apply(event: Event, state: State, handlers: Sequence[Handler], stages: Any, strict: Strict | None = None) -> State:
    """Apply the handlers of one event, one after the other, and check what each returns."""
    grads_missing = state._grads is None
    if grads_missing:
        _set_grads(state, NOT_READY)
    grad_mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    handler = handlers[0]
    try:
        for handler in handlers:
            if handler.when is not None and not handler.when(state):
                continue
            if strict is not None:
                strict.before_handler(state)
            if handler.takes_stages:
                if stages is None:
                    raise AlgorithmReturnError(
                        f"algorithm {handler.algorithm!r} asks for the loop's stages, and this script offers none: "
                        "pl.drive(script, stages=...)."
                    )
                new = handler.function(state, stages)
            else:
                new = handler.function(state)
            if strict is not None:
                strict.after_handler(state, handler.algorithm, event)
            if new is not state:
                new = check_returned(new, state, handler.algorithm, event)
                state = new
    except PureLoopError as error:
        if f"algorithm {handler.algorithm!r}" not in str(error):
            error.add_note(f"raised by algorithm {handler.algorithm!r} at {event.name}, batch {state.timestamp.batch}")
        raise
    except Exception as error:
        error.add_note(f"raised by algorithm {handler.algorithm!r} at {event.name}, batch {state.timestamp.batch}")
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "with parallel='shard' a rank holds parts of params, grads and opt_state: of a tensor that is whole, "
                "pl.distributed.shard_like(whole, state.params[name]) is its part"
            )
        raise
    finally:
        torch._C._set_grad_enabled(grad_mode)
        if grads_missing and state._grads is NOT_READY:
            _set_grads(state, None)
    return state


_OF_THE_FIRST_BATCH = frozenset({Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})


# From which on the gradients of the batch before are of no more use to the loop.
_BEFORE_GRADIENTS = frozenset({Event.BATCH_START, ABOUT_TO_WRITE})
# Before gradients are added to, divided or clipped.
_OF_GRADIENTS = frozenset({Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD})


def _no_state() -> None:
    """Stands for a reference to the last State that was handed over, before there is one."""


def run_script(
    script: Generator[tuple[Event, State], State, State],
    handlers: Handlers,
    observers: Mapping[Event, tuple[Observer, ...]],
    closing: Sequence[Callable[[], None]] = (),
    *,
    stages: Any = None,
    watch: Collection[Event] | None = None,
    strict: Strict | None = None,
    failed: Callable[[BaseException, Event, State | None], None] | None = None,
    donation: Donation | None = None,
) -> Generator[tuple[Event, State], None, Any]:
    """Run a script, and yield each ``(event, state)`` after the algorithms and callbacks have had it.

    Gives the State that the script returns. However the stream ends, the functions in ``closing`` are called then;
    before them ``failed``, if it ends before the script does, with the error (GeneratorExit where the loop was left),
    the last event and its State. ``donation`` is told before each update who else has the State.
    """
    attached = {event: (handlers.get(event), observers.get(event)) for event in {*handlers, *observers}}
    send, last = script.send, Event.INIT
    marking = donation is not None and donation.compiled
    plain = watch is None and strict is None and not marking
    # After which memory is written to or freed, if nobody else sees it; that of gradients, if they are large.
    writing: frozenset[Event] = frozenset()
    if donation is not None:
        writing = frozenset({ABOUT_TO_WRITE if marking else Event.AFTER_TRAIN_BATCH})
    measured, large = marking, False
    # Whether the State after the update is sure to take the place of the last one in the consumer's variable: it is
    # yielded at once, and, as far as the first batch shows, nothing in between picks some events out.
    followed = watch is None or Event.BATCH_END in watch
    unsure = followed and donation is not None
    shown: Any = _no_state
    ignored: frozenset[Event] = frozenset()
    if watch is not None and strict is None:
        ignored = frozenset(Event) - POSITIONS - set(watch) - set(attached) - writing
    if marking:
        ignored |= {ABOUT_TO_WRITE}
    # Where there is nothing to do but to hand the State over.
    swift: frozenset[Event] = frozenset()
    if plain:
        swift = frozenset(Event) - set(attached) - writing
    known, swift = swift, swift - _OF_THE_FIRST_BATCH if unsure else swift
    in_one = strict is None and not marking and can_watch(watch)
    in_one_go: Any = unseen_batches if watch is not None and are_unseen(watch, attached) else plain_batches

    def attend(event: Event, state: State) -> State:
        handling, observing = attached[event]
        if handling is not None:
            state = apply(event, state, handling, stages)
        if observing is not None:
            _observe(event, state, observing, None)
        return state

    given: Any = None  # what a generator that has not begun takes
    event = last
    try:
        while True:
            try:
                event, state = send(given)
            except StopIteration as stop:
                # Only the script's: one that escapes an algorithm or a callback must not end training in silence.
                return stop.value
            if event in swift:
                if event in POSITIONS:
                    given = seal(state, event)
                elif state.event is None:
                    _set_event(state, event)
                    given = state
                else:
                    given = at_event[type(state)](state, event)
                yield event, given
                continue
            if event is PLAIN_BATCHES:
                given = asked = cast("Any", state)
                if in_one and measured and not unsure and not large:
                    shown = yield from in_one_go(asked, attached, attend, watch, shown, followed)
                continue
            if event in ignored:
                given = state
                if event not in writing:
                    continue
            else:
                if strict is not None:
                    strict.after_computation(given, last)
                    strict.advance(event)
                    last = event
                given = seal(state, event)
                if event in attached:
                    handling, observing = attached[event]
                    if handling is not None:
                        if large:
                            donation.look_away()  # type: ignore[union-attr]
                        given = apply(event, given, handling, stages, strict)
                    if observing is not None:
                        _observe(event, given, observing, strict)
                    if marking:
                        donation.seen = True  # type: ignore[union-attr]
                if plain:
                    yield event, given
                    if event not in writing:
                        if unsure and event in _OF_THE_FIRST_BATCH:
                            followed = followed and gives_up(_getframe().f_back, given)
                        continue
                    if event is Event.AFTER_TRAIN_BATCH:
                        unsure, swift = False, known
                elif watch is None or event in watch:
                    if strict is not None:
                        strict.hand_over(given)
                    if marking:
                        donation.seen = True  # type: ignore[union-attr]
                    yield event, given
                    shown = ref(given)
                    if unsure and event is Event.BATCH_END:
                        followed, unsure = followed and gives_up(_getframe().f_back, given), False
                        if marking and given._grads is not None and are_large(given._grads.values()):
                            large, writing = True, writing | ({Event.BATCH_START} & ignored)
                    if strict is not None:
                        strict.take_back(given, "the loop's body", event)
                if strict is not None:
                    strict.hand_over(given)
            if event in writing and donation is not None:
                # Counted here, where nothing but variables refers to it: `given` and `state`, that of the script if it
                # is the one that it yielded, and what is counted with.
                same, state = given is state, given
                others = getrefcount(given) - 3 - same
                last_shown = given if plain else shown()
                if last_shown is None or last_shown is given:
                    last_shown, alone = None, others == 1
                else:
                    alone = getrefcount(last_shown) == 3
                in_turn = alone and followed and not unsure
                in_turn = in_turn and gives_up(_getframe().f_back, given if last_shown is None else last_shown)
                if event is not Event.BATCH_START:
                    donation.look(others, last_shown, replaced=in_turn)
                if event in _BEFORE_GRADIENTS and large and in_turn and last_shown is not None:
                    drop_gradients(last_shown)
                del last_shown
                if not measured:
                    measured = True
                    large = given._grads is not None and are_large(given._grads.values())
                    if large:
                        writing |= _OF_GRADIENTS if plain else _OF_GRADIENTS | {Event.BATCH_START}
                        swift, known, ignored = swift - writing, known - writing, ignored - writing
    except BaseException as error:
        if failed is not None:
            failed(error, Event.AFTER_TRAIN_BATCH if event is ABOUT_TO_WRITE else event, given)
        raise
    finally:
        with ExitStack() as stack:  # one that raises (a loader's own clean-up) keeps none of the others from running
            for close in reversed(closing):
                stack.callback(close)
            if given is not None:
                stack.callback(given.model.release)
                if donation is not None:
                    stack.callback(donation.forget)
            stack.callback(script.close)


def _observe(event: Event, state: State, seen: tuple[Observer, ...], strict: Strict | None) -> None:
    for observer in seen:
        if strict is not None:
            strict.hand_over(state)
        try:
            returned = observer.observe(event, state)
        except Exception as error:
            error.add_note(f"raised by callback {observer.name} at {event.name}, batch {state.timestamp.batch}")
            raise
        if returned is not None:
            refuse_return(returned, observer.name, event)
        if strict is not None:
            strict.take_back(state, f"callback {observer.name}", event)


def run_silently(script: Generator[tuple[Event, State], State, State], handlers: Handlers, stages: Any) -> State:
    """Run a script to its end with its algorithms, and nothing else; gives the State it returns."""
    given: Any = None
    while True:
        try:
            event, state = script.send(given)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        given = seal(state, event)
        found = handlers.get(event)
        if found is not None:
            given = apply(event, given, found, stages)
