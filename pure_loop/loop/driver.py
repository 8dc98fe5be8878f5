"""The driver: runs a script, applies algorithms, calls callbacks, yields to the consumer, and sends States back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence, Set
from functools import partial
from sys import _getframe
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch

from pure_loop._internal.closing import call_all, closing
from pure_loop._internal.forks import generation, here
from pure_loop._internal.torch_private import set_grad_enabled
from pure_loop.algorithm import Handler
from pure_loop.cadence import Cadence
from pure_loop.callback import Observer, refuse_return
from pure_loop.donation.consumer import rebinds_loop_variable
from pure_loop.donation.donation import Donation, drop_gradients
from pure_loop.donation.references import holders_of
from pure_loop.donation.request import Request
from pure_loop.errors import AlgorithmReturnError, ForkedError, PureLoopError
from pure_loop.event import Event
from pure_loop.loop.contract import check_returned
from pure_loop.loop.fast import Observed, fast_text
from pure_loop.random.guards import guard
from pure_loop.stages.engine import worth_checking_references
from pure_loop.state import NOT_READY, POSITIONS, State, seal

if TYPE_CHECKING:
    from pure_loop.loop.strict import Strict

__all__ = ["Run", "apply", "run_script", "run_silently", "run_unwatched", "seal"]

Handlers = Mapping[Event, tuple[Handler, ...]]

_set_grads = vars(State)["_grads"].__set__
_NONE: Set[Event] = frozenset()


def apply(
    event: Event,
    state: State,
    handlers: Sequence[Handler],
    stages: Any,
    strict: Strict | None = None,
    observers: Sequence[Observer] | None = None,
) -> State:
    """Apply the handlers of one event, one after the other, and check what each returns.

    Those of ``observers`` that record are shown the State if a handler raises.
    """
    grads_missing = state._grads is None
    if grads_missing:
        _set_grads(state, NOT_READY)
    grad_mode = torch.is_grad_enabled()
    set_grad_enabled(True)
    handler = handlers[0]
    try:
        for handler in handlers:
            if handler.when is not None and not _is_true(handler, state, stages):
                continue
            if strict is not None:
                strict.before_handler(state, handler, event)
            if handler.takes_stages and stages is None:
                raise AlgorithmReturnError(
                    f"algorithm {handler.algorithm!r} takes the loop's stages, and this script has none: write "
                    "pl.drive(script, stages=...)."
                )
            arguments = (state, stages) if handler.takes_stages else (state,)
            if handler.path is None:
                new = handler.function(*arguments)
            else:
                with guard(state, handler.path) if stages is None else stages.guard(state, handler.path):
                    new = handler.function(*arguments)
            if strict is not None:
                strict.take_back(state, f"algorithm {handler.algorithm!r}", event)
            if new is not state:
                new = check_returned(new, state, handler.algorithm, event)
                state = new
    except BaseException as error:
        is_named = isinstance(error, PureLoopError) and f"algorithm {handler.algorithm!r}" in str(error)
        if isinstance(error, Exception) and not is_named:
            error.add_note(f"raised by algorithm {handler.algorithm!r} at {event.name}, batch {state.timestamp.batch}")
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "with parallel='shard' params, grads and opt_state are DTensors: "
                "pl.distributed.shard_like(whole, state.params[name]) makes one of a whole tensor"
            )
        _record(event, state, observers, error)
        raise
    finally:
        set_grad_enabled(grad_mode)
        if grads_missing and state._grads is NOT_READY:
            _set_grads(state, None)
    return state


def _is_true(handler: Handler, state: State, stages: Any) -> bool:
    """Whether a handler's ``when`` is true now."""
    when = handler.when
    assert when is not None
    if handler.path is None or isinstance(when, Cadence):
        return when(state)
    path = (*handler.path, "when")
    with guard(state, path) if stages is None else stages.guard(state, path):
        return when(state)


# From which on the gradients of the batch before are of no more use to the loop.
_BEFORE_GRADIENTS = frozenset({Event.BATCH_START, Request.COUNT_REFERENCES})
# Before gradients are added to, divided or clipped.
_OF_GRADIENTS = frozenset({Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD})
# At which the consumer's frame is inspected in the first batch, where all events are watched.
INSPECTED = frozenset({Event.BATCH_START, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD})


# In the place of a reference to the last State that was handed over, before there is one: gives None when called.
_no_state: Any = type(None)


def has_large_gradients(state: State) -> bool:
    """Whether a State has gradients that are large enough to count the references to them."""
    return state._grads is not None and worth_checking_references(state._grads.values())


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
        last_yielded: a weak reference to the State that the consumer was given last, where not all events are watched.
        consumer_rebinds: whether the State after an update is sure to replace the last one in the consumer's variable:
            it is yielded at once, and, as far as the first batch shows, nothing in between picks events out.
        calibrating: whether the first batch has yet to show that.
        measured: whether ``large_gradients`` is known.
        large_gradients: whether gradients are large enough to count the references to them.
        closing: what is called when the stream ends, however it does, in the process that began it.
        generation: of the process that began the stream.
        ended_by: the error that ended the stream, until it is closed.
        texts: the fast texts of inner scripts.
        strict: the checks; None: there are none.
        unhandled, unchecked: the events at which algorithms and callbacks, and the loop's body, have yet to be checked.
    """

    __slots__ = (
        *("calibrating", "closing", "consumer_rebinds", "donation", "ended_by", "generation", "handlers"),
        *("large_gradients", "last_yielded", "measured", "observed", "observers", "stages", "strict", "texts"),
        *("unchecked", "unhandled"),
    )

    def __init__(
        self,
        handlers: Handlers,
        observers: Mapping[Event, tuple[Observer, ...]],
        observed: Observed,
        *,
        stages: Any = None,
        donation: Donation | None = None,
        closing: Sequence[Callable[[], None]] = (),
        strict: Strict | None = None,
    ) -> None:
        self.closing, self.generation, self.strict = closing, generation(), strict
        self.unhandled, self.unchecked = (strict.handled, strict.yielded) if strict is not None else (_NONE, _NONE)
        self.ended_by: BaseException | None = None
        self.handlers, self.observers, self.observed = handlers, observers, observed
        self.stages, self.donation = stages, donation
        self.last_yielded: Callable[[], State | None] = _no_state
        watch = observed.watch
        self.consumer_rebinds = watch is None or Event.BATCH_END in watch
        self.calibrating = self.consumer_rebinds and donation is not None
        self.measured = self.large_gradients = False
        self.texts = Texts(observed)

    def begin(self) -> None:
        """The stream begins; it may have been made in the parent of this process."""
        self.closing, self.generation = [*map(here, self.closing)], generation()

    def close(self, state: State) -> None:
        """End the stream, whose last State this is."""
        ended_by, self.ended_by = self.ended_by, None  # its traceback refers to the frame that refers to this
        forget = [] if self.donation is None else [self.donation.forget]
        try:
            call_all([*forget, state.model.release, *self.closing], ended_by, "while closing: ")
        finally:
            del ended_by

    def dispatch(self, event: Event, state: State) -> State:
        """Apply the algorithms of an event to its State, and pass the result to the callbacks."""
        handling, observing = self.handlers.get(event), self.observers.get(event)
        strict = self.strict if event in self.unhandled else None
        if strict is not None:
            strict.advance(event)
            strict.begin(event, state, handling or ())
        if handling is not None:
            if self.large_gradients:
                self.donation.invalidate()  # type: ignore[union-attr]
            state = apply(event, state, handling, self.stages, strict, observing)
        if observing is not None:
            if self.generation != generation():
                refuse_fork(event, state)
            _observe(event, state, observing, self.stages, strict)
        if strict is not None:
            strict.end(event)
            if not self.observed.yields(event):
                strict.before_computation(state, event)
        return state

    def before_body(self, event: Event, state: State) -> None:
        """Before an event is yielded that is ``unchecked``."""
        assert self.strict is not None
        self.strict.advance(event)
        self.strict.before_body(state, event)

    def after_body(self, event: Event, state: State) -> None:
        """After it."""
        assert self.strict is not None
        self.strict.after_body(state, event)
        self.strict.before_computation(state, event)

    def one_by_one(self, script: Any) -> Generator[tuple[Event, State], None, Any]:
        """An inner script that has no fast text, event by event."""
        observed = self.observed
        state: Any = None
        with closing(script):  # in an evaluation, with its loader open in it
            while True:
                try:
                    event, state = script.send(state)
                except StopIteration as stop:
                    return stop.value
                if not observed.lists(event):
                    continue
                yields, dispatches = observed.yields(event), observed.dispatches(event)
                if yields or dispatches or event in POSITIONS:
                    state = seal(state, event)
                if dispatches:
                    state = self.dispatch(event, state)
                if yields:
                    if event in self.unchecked:
                        self.before_body(event, state)
                        yield event, state
                        self.after_body(event, state)
                    else:
                        yield event, state
                    if observed.watch is not None:  # the text around this one reads it there alone
                        self.last_yielded = ref(state)

    def measure(self, state: State) -> None:
        """Before the first update: whether gradients are large."""
        self.measured = True
        self.large_gradients = has_large_gradients(state)
        if self.observed.watch is None:
            self.calibrating = False

    def inspect(self, state: State) -> None:
        """In the first batch: whether the consumer puts what it is given into one variable."""
        self.consumer_rebinds = self.consumer_rebinds and rebinds_loop_variable(_getframe(1).f_back, state)
        if state.event is Event.BATCH_END:
            self.calibrating = False

    def record_references(self, about_to_change: ref[State]) -> None:
        """Before memory is written to: count the references to the State that has it.

        Args:
            about_to_change: the State, to which the script's variable refers, and the consumer's it may be.
        """
        assert self.donation is not None
        others = holders_of(about_to_change) - 1  # the script's variable
        yielded = self.last_yielded()
        seen: Callable[[], State | None]
        if yielded is None or yielded is about_to_change():
            seen, held_once, yielded = about_to_change, others == 1, None
        else:
            seen, held_once = self.last_yielded, holders_of(self.last_yielded) == 2  # `yielded`, and the consumer's
        in_turn = held_once and self.consumer_rebinds and not self.calibrating
        in_turn = in_turn and rebinds_loop_variable(_getframe(1).f_back, seen())
        self.donation.record_references(others, yielded, replaced=in_turn)

    def free(self) -> None:
        """A batch begins: the gradients of the State that the consumer's variable still holds make room."""
        seen = self.last_yielded()
        if (
            seen is not None
            and self.consumer_rebinds
            and not self.calibrating
            and holders_of(self.last_yielded) == 2  # `seen`, and the consumer's variable
            and rebinds_loop_variable(_getframe(1).f_back, seen)
        ):
            drop_gradients(seen)


def run_script(
    script: Generator[tuple[Event | Request, State], State, State],
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
    """Run a script, and yield each ``(event, state)`` after its algorithms and callbacks have run.

    Returns the State that the script returns. However the stream ends, the functions in ``closing`` are called then;
    before them ``failed``, if it ends before the script does, with the error (GeneratorExit where the loop was left),
    the last event and its State. ``donation`` is told before each update which references to the State there are.
    ``events``, if not None, are the run's order: other events of the script are passed over. A
    :class:`~pure_loop.donation.request.Request` of the script is answered by the driver alone.
    """
    attached = {event: (handlers.get(event), observers.get(event)) for event in {*handlers, *observers}}
    send, began = script.send, generation()
    closing = [*map(here, closing)]
    event: Event | Request = Event.INIT
    compiled = donation is not None and donation.compiled
    plain = watch is None and not compiled
    # After which memory is written to or freed, if nothing else refers to it; that of gradients, if they are large.
    writing: frozenset[Event | Request] = frozenset()
    if donation is not None:
        writing = frozenset({Request.COUNT_REFERENCES if compiled else Event.AFTER_TRAIN_BATCH})
    measured, large_gradients = compiled, False
    # Whether the State after the update is sure to replace the last one in the consumer's variable: it is yielded at
    # once, and, as far as the first batch shows, nothing in between picks some events out.
    consumer_rebinds = watch is None or Event.BATCH_END in watch
    calibrating = consumer_rebinds and donation is not None
    last_yielded: Any = _no_state
    skip: frozenset[Event | Request] = frozenset()
    if watch is not None and (strict is None or not strict.always):
        skip = frozenset(Event) - POSITIONS - set(watch) - set(attached) - writing
    passed_over = frozenset() if events is None else frozenset(Event) - frozenset(events)
    skip |= passed_over

    argument: Any = None  # what a generator that has not begun takes
    ended_by: BaseException | None = None
    try:
        while True:
            try:
                event, state = send(argument)
            except StopIteration as stop:
                # Only the script's: one that escapes an algorithm or a callback must not end training in silence.
                return stop.value
            if isinstance(event, Request) or event in skip:
                argument = state
                if event not in writing:
                    continue
            else:
                if strict is not None:
                    strict.advance(event)
                argument = seal(state, event)
                if event in attached:
                    handling, observing = attached[event]
                    checking = strict if strict is not None and event in strict.handled else None
                    if checking is not None:
                        checking.begin(event, argument, handling or ())
                    if handling is not None:
                        if large_gradients:
                            donation.invalidate()  # type: ignore[union-attr]
                        argument = apply(event, argument, handling, stages, checking, observing)
                    if observing is not None:
                        if began != generation():
                            refuse_fork(event, argument)
                        _observe(event, argument, observing, stages, checking)
                    if checking is not None:
                        checking.end(event)
                    if compiled:
                        donation.seen = True  # type: ignore[union-attr]
                checking = strict if strict is not None and event in strict.yielded else None
                if plain:
                    if checking is not None:
                        checking.before_body(argument, event)
                    yield event, argument
                    if checking is not None:
                        checking.after_body(argument, event)
                        checking.before_computation(argument, event)
                    if event not in writing:
                        if calibrating and event in INSPECTED:
                            consumer_rebinds = consumer_rebinds and rebinds_loop_variable(_getframe().f_back, argument)
                        continue
                    if event is Event.AFTER_TRAIN_BATCH:
                        calibrating = False
                elif watch is None or event in watch:
                    if checking is not None:
                        checking.before_body(argument, event)
                    if compiled:
                        donation.seen = True  # type: ignore[union-attr]
                    yield event, argument
                    last_yielded = ref(argument)
                    if calibrating and event is Event.BATCH_END:
                        consumer_rebinds = consumer_rebinds and rebinds_loop_variable(_getframe().f_back, argument)
                        calibrating = False
                        if compiled and has_large_gradients(argument):
                            large_gradients, writing = True, writing | ({Event.BATCH_START} & skip)
                    if checking is not None:
                        checking.after_body(argument, event)
                        checking.before_computation(argument, event)
                elif strict is not None:
                    strict.before_computation(argument, event)
            if event in writing and donation is not None:
                # Counted here, where nothing but variables refers to it: `argument` and `state`, and that of the script
                # if it is the one that it yielded.
                same, state = argument is state, argument
                _record_references(
                    donation,
                    ref(argument),
                    _no_state if plain else last_yielded,
                    ours=2 + same,
                    consumer_rebinds=consumer_rebinds and not calibrating,
                    writes=event is not Event.BATCH_START,
                    drops=large_gradients and event in _BEFORE_GRADIENTS,
                )
                if not measured:
                    measured = True
                    large_gradients = has_large_gradients(argument)
                    if large_gradients:
                        writing |= _OF_GRADIENTS if plain else _OF_GRADIENTS | {Event.BATCH_START}
                        skip -= writing - passed_over
    except BaseException as error:
        ended_by = error
        if failed is not None and began == generation():
            failed(error, Event.AFTER_TRAIN_BATCH if isinstance(event, Request) else event, argument)
        raise
    finally:
        forget = [] if donation is None or argument is None else [donation.forget]
        release = [] if argument is None else [argument.model.release]
        try:
            call_all([script.close, *forget, *release, *closing], ended_by, "while closing: ")
        finally:
            ended_by = None  # its traceback refers to this frame


def _record_references(
    donation: Donation,
    about_to_change: ref[State],
    last_yielded: Callable[[], State | None],
    *,
    ours: int,
    consumer_rebinds: bool,
    writes: bool,
    drops: bool,
) -> None:
    """Before memory is written to: count the references to the State that has it, for :func:`run_script`, the caller.

    Args:
        donation: what is told.
        about_to_change: the State.
        last_yielded: the State that the consumer was given last.
        ours: how many references to it the driver and the script have.
        consumer_rebinds: whether the next State replaces the consumer's last one, as far as the first batch shows.
        writes: whether memory is about to be written to.
        drops: whether the gradients of the last State make room.
    """
    others = holders_of(about_to_change) - ours
    yielded = last_yielded()
    seen: Callable[[], State | None]
    if yielded is None or yielded is about_to_change():
        seen, held_once, yielded = about_to_change, others == 1, None
    else:
        seen, held_once = last_yielded, holders_of(last_yielded) == 2  # `yielded`, and the consumer's variable
    in_turn = held_once and consumer_rebinds and rebinds_loop_variable(_getframe(1).f_back, seen())
    if writes:
        donation.record_references(others, yielded, replaced=in_turn)
    if drops and in_turn and yielded is not None:
        drop_gradients(yielded)


def refuse_fork(event: Event, state: State) -> NoReturn:
    """
    Raises:
        ForkedError: always: this process is a child of the one whose callbacks these are.
    """
    raise ForkedError(
        f"this process was forked inside of the loop, and continues the parent's stream, at {event.name} of batch "
        f"{state.timestamp.batch}: both would save and log to the same places. A child ends by itself (os._exit), or "
        "trains by a stream of its own: fit(state, ...) with other folders."
    )


def _observe(event: Event, state: State, seen: tuple[Observer, ...], stages: Any, strict: Strict | None) -> None:
    for place, observer in enumerate(seen):
        if strict is not None:
            strict.before_observer(state)
        try:
            try:
                if observer.path is None:
                    returned = observer.observe(event, state)
                else:
                    seeding = guard if stages is None else stages.guard
                    with seeding(state, observer.path, apart=True):
                        returned = observer.observe(event, state)
            except Exception as error:
                error.add_note(f"raised by callback {observer.name} at {event.name}, batch {state.timestamp.batch}")
                raise
            if returned is not None:
                refuse_return(returned, observer.name, event)
            if strict is not None:
                strict.take_back(state, f"callback {observer.name}", event)
        except BaseException as error:
            _record(event, state, seen[place + 1 :], error)
            raise


def _record(event: Event, state: State, observers: Sequence[Observer] | None, error: BaseException) -> None:
    """An error ends the stream at this event: observers that record are shown it, so that no value of it is lost."""
    recording = [partial(observer.observe, event, state) for observer in observers or () if observer.records]
    call_all(recording, error, f"while recording {event.name}: ")


def run_silently(script: Generator[tuple[Event, State], State, State], handlers: Handlers, stages: Any) -> State:
    """Run a script to its end with its algorithms, event by event, and nothing else; gives the State it returns."""
    argument: Any = None
    while True:
        try:
            event, state = script.send(argument)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        argument = seal(state, event)
        handling = handlers.get(event)
        if handling is not None:
            argument = apply(event, argument, handling, stages)


def run_unwatched(script: Callable[..., Any], arguments: Sequence[Any], handlers: Handlers, stages: Any) -> State:
    """The same by the script's fast text, where there is one."""
    run = Run(handlers, {}, Observed(frozenset(), frozenset(handlers)), stages=stages)
    try:
        next(run.texts[script](*arguments, run=run))
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise AssertionError("a script of which no event is watched yields nothing")
