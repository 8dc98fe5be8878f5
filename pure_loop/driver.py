"""The driver: runs a script, applies the algorithms, shows the callbacks, hands over, sends back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from sys import _getframe, getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from pure_loop._consumer import gives_up
from pure_loop._fast import Observed, fast_text
from pure_loop._internal.torch_private import set_grad_enabled
from pure_loop._returned import check_returned
from pure_loop.algorithm import Handler
from pure_loop.callback import Observer, refuse_return
from pure_loop.donation import ABOUT_TO_WRITE, Donation, drop_gradients
from pure_loop.engine import are_large
from pure_loop.errors import AlgorithmReturnError, PureLoopError
from pure_loop.event import Event
from pure_loop.state import NOT_READY, POSITIONS, State, seal

if TYPE_CHECKING:
    from pure_loop.strict import Strict

__all__ = ["Run", "apply", "run_fast", "run_script", "run_silently", "run_unwatched", "seal"]

Handlers = Mapping[Event, tuple[Handler, ...]]

_set_grads = vars(State)["_grads"].__set__


def apply(event: Event, state: State, handlers: Sequence[Handler], stages: Any, strict: Strict | None = None) -> State:
    """Apply the handlers of one event, one after the other, and check what each returns."""
    grads_missing = state._grads is None
    if grads_missing:
        _set_grads(state, NOT_READY)
    grad_mode = torch.is_grad_enabled()
    set_grad_enabled(True)
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
        set_grad_enabled(grad_mode)
        if grads_missing and state._grads is NOT_READY:
            _set_grads(state, None)
    return state


# From which on the gradients of the batch before are of no more use to the loop.
_BEFORE_GRADIENTS = frozenset({Event.BATCH_START, ABOUT_TO_WRITE})
# Before gradients are added to, divided or clipped.
_OF_GRADIENTS = frozenset({Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD})
# At which the consumer's frame is inspected in the first batch, where all events are watched.
INSPECTED = frozenset({Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})


def _no_state() -> None:
    """Stands for a reference to the last State that was handed over, before there is one."""


class Texts(dict[Callable[..., Any], Callable[..., Any]]):
    """The fast texts of inner scripts in one run; a script that has none is run event by event."""

    def __init__(self, observed: Observed) -> None:
        self.observed = observed

    def __missing__(self, script: Callable[..., Any]) -> Callable[..., Any]:
        text = fast_text(script, self.observed)
        if text is None:

            def text(*args: Any, run: Run) -> Any:
                return run.one_by_one(script(*args))

        self[script] = text
        return text


class Run:
    """A script under way: what is attached to it, and what its consumer holds.

    Attributes:
        shown: a weak reference to the State that the consumer was given last, where not all events are watched.
        followed: whether the State after an update is sure to replace the last one in the consumer's variable: it is
            yielded at once, and, as far as the first batch shows, nothing in between picks events out.
        unsure: whether the first batch has yet to show that.
        measured: whether ``large`` is known.
        large: whether gradients are large enough to count the references to them.
        last: the State in which the script ended.
        texts: the fast texts of inner scripts.
    """

    __slots__ = (
        *("donation", "followed", "handlers", "large", "last", "measured", "observed", "observers"),
        *("shown", "stages", "texts", "unsure"),
    )

    def __init__(
        self,
        handlers: Handlers,
        observers: Mapping[Event, tuple[Observer, ...]],
        observed: Observed,
        *,
        stages: Any = None,
        donation: Donation | None = None,
    ) -> None:
        self.handlers, self.observers, self.observed = handlers, observers, observed
        self.stages, self.donation = stages, donation
        self.shown: Callable[[], State | None] = _no_state
        watch = observed.watch
        self.followed = watch is None or Event.BATCH_END in watch
        self.unsure = self.followed and donation is not None
        self.measured = self.large = False
        self.last: State | None = None
        self.texts = Texts(observed)

    def attend(self, event: Event, state: State) -> State:
        """Let the algorithms have the State of an event, and show what they make of it to the callbacks."""
        handling, observing = self.handlers.get(event), self.observers.get(event)
        if handling is not None:
            if self.large:
                self.donation.look_away()  # type: ignore[union-attr]
            state = apply(event, state, handling, self.stages)
        if observing is not None:
            _observe(event, state, observing, None)
        return state

    def one_by_one(self, script: Any) -> Generator[tuple[Event, State], None, Any]:
        """An inner script that has no fast text, event by event."""
        observed = self.observed
        state: Any = None
        try:
            while True:
                try:
                    event, state = script.send(state)
                except StopIteration as stop:
                    return stop.value
                if not observed.lists(event):
                    continue
                yields, attends = observed.yields(event), observed.attends(event)
                if yields or attends or event in POSITIONS:
                    state = seal(state, event)
                if attends:
                    state = self.attend(event, state)
                if yields:
                    yield event, state
                    self.shown = ref(state)
        finally:
            script.close()

    def measure(self, state: State) -> None:
        """Before the first update: whether gradients are large."""
        self.measured = True
        self.large = state._grads is not None and are_large(state._grads.values())
        if self.observed.watch is None:
            self.unsure = False

    def inspect(self, state: State) -> None:
        """In the first batch: whether the consumer puts what it is given into one variable."""
        self.followed = self.followed and gives_up(_getframe(1).f_back, state)
        if state.event is Event.BATCH_END:
            self.unsure = False

    def look(self, others: int, state: State) -> None:
        """Before memory is written to: count the references to it.

        Args:
            others: how many references to ``state`` there are besides the script's variable.
            state: the State whose parameters or gradients are about to be written to.
        """
        donation = self.donation
        assert donation is not None
        seen = self.shown()
        if seen is state:
            seen = None
        alone = others == 1 if seen is None else getrefcount(seen) == 3
        in_turn = alone and self.followed and not self.unsure
        in_turn = in_turn and gives_up(_getframe(1).f_back, state if seen is None else seen)
        donation.look(others, seen, replaced=in_turn)

    def free(self) -> None:
        """A batch begins: the gradients of the State that the consumer's variable still holds make room."""
        seen = self.shown()
        if (
            seen is not None
            and self.followed
            and not self.unsure
            and getrefcount(seen) == 3
            and gives_up(_getframe(1).f_back, seen)
        ):
            drop_gradients(seen)


def run_fast(
    text: Generator[tuple[Event, State], None, Any],
    run: Run,
    closing: Sequence[Callable[[], None]] = (),
) -> Generator[tuple[Event, State], None, Any]:
    """Run the fast text of a script, a generator that was made with ``run``, and give the State that it returns.

    However the stream ends, the functions in ``closing`` are called then.
    """
    try:
        return (yield from text)
    finally:
        with ExitStack() as stack:  # one that raises (a loader's own clean-up) keeps none of the others from running
            for close in reversed(closing):
                stack.callback(close)
            if run.last is not None:
                stack.callback(run.last.model.release)
                run.last = None
            if run.donation is not None:
                stack.callback(run.donation.forget)


def run_script(
    script: Generator[tuple[Event, State], State, State],
    handlers: Handlers,
    observers: Mapping[Event, tuple[Observer, ...]],
    closing: Sequence[Callable[[], None]] = (),
    *,
    stages: Any = None,
    watch: Collection[Event] | None = None,
    events: Collection[Event] | None = None,
    strict: Strict | None = None,
    failed: Callable[[BaseException, Event, State | None], None] | None = None,
    donation: Donation | None = None,
) -> Generator[tuple[Event, State], None, Any]:
    """Run a script, and yield each ``(event, state)`` after the algorithms and callbacks have had it.

    Gives the State that the script returns. However the stream ends, the functions in ``closing`` are called then;
    before them ``failed``, if it ends before the script does, with the error (GeneratorExit where the loop was left),
    the last event and its State. ``donation`` is told before each update which references to the State there are. Of
    ``events``, if given, consists the run's order: others of the script are passed over.
    """
    attached = {event: (handlers.get(event), observers.get(event)) for event in {*handlers, *observers}}
    send, last = script.send, Event.INIT
    marking = donation is not None and donation.compiled
    plain = watch is None and strict is None and not marking
    # After which memory is written to or freed, if nothing else refers to it; that of gradients, if they are large.
    writing: frozenset[Event] = frozenset()
    if donation is not None:
        writing = frozenset({ABOUT_TO_WRITE if marking else Event.AFTER_TRAIN_BATCH})
    measured, large = marking, False
    # Whether the State after the update is sure to replace the last one in the consumer's variable: it is yielded at
    # once, and, as far as the first batch shows, nothing in between picks some events out.
    followed = watch is None or Event.BATCH_END in watch
    unsure = followed and donation is not None
    shown: Any = _no_state
    ignored: frozenset[Event] = frozenset()
    if watch is not None and strict is None:
        ignored = frozenset(Event) - POSITIONS - set(watch) - set(attached) - writing
    passed_over = frozenset() if events is None else frozenset(Event) - frozenset(events)
    ignored |= passed_over
    if marking:
        ignored |= {ABOUT_TO_WRITE}

    given: Any = None  # what a generator that has not begun takes
    event = last
    try:
        while True:
            try:
                event, state = send(given)
            except StopIteration as stop:
                # Only the script's: one that escapes an algorithm or a callback must not end training in silence.
                return stop.value
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
                        if unsure and event in INSPECTED:
                            followed = followed and gives_up(_getframe().f_back, given)
                        continue
                    if event is Event.AFTER_TRAIN_BATCH:
                        unsure = False
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
                        ignored -= writing - passed_over
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
    """Run a script to its end with its algorithms, event by event, and nothing else; gives the State it returns."""
    given: Any = None
    while True:
        try:
            event, state = script.send(given)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        given = seal(state, event)
        handling = handlers.get(event)
        if handling is not None:
            given = apply(event, given, handling, stages)


def run_unwatched(script: Callable[..., Any], arguments: Sequence[Any], handlers: Handlers, stages: Any) -> State:
    """The same by the script's fast text, where there is one."""
    run = Run(handlers, {}, Observed(frozenset(), frozenset(handlers)), stages=stages)
    try:
        next(run.texts[script](*arguments, run=run))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("a script of which no event is watched yields nothing")
