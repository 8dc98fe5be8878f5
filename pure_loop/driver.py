"""The driver: runs a script, applies the algorithms, shows the callbacks, hands over, sends back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack
from sys import _getframe, getrefcount
from typing import Any, NoReturn
from weakref import ref

import optree
import torch

from pure_loop._consumer import gives_up
from pure_loop._finite import total_loss
from pure_loop._losses import loss_problem
from pure_loop._parts import is_part, same_parts, shard_like
from pure_loop._pytree import NAMESPACE
from pure_loop.algorithm import Handler
from pure_loop.callback import Observer, refuse_return
from pure_loop.donation import ABOUT_TO_WRITE, Donation, drop_gradients
from pure_loop.engine import are_large
from pure_loop.errors import AlgorithmReturnError, AlgorithmStructureError, LossError, PureLoopError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model import ModelDef
from pure_loop.precision import LossScale
from pure_loop.state import NOT_READY, State, at_event, at_position, refuse_misfit
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
                new = _check(new, state, handler.algorithm, event)
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


def _check(new: Any, old: State, name: str, event: Event) -> State:
    """What an algorithm returned, with its events and mappings in order; or the error that says what is wrong."""
    cls = type(old)
    if type(new) is not cls:
        _refuse_type(new, cls, name, event)
    if new.event is not event:
        if new.event is not None:
            other = new.event.name if isinstance(new.event, Event) else repr(new.event)
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} returned a State of {other}: it returned a State that it "
                "had kept, or changed state.event. Return state.replace(...) of the State it is given."
            )
        new = new.replace(event=event)
    if new.timestamp is not old.timestamp and new.timestamp != old.timestamp:
        _refuse_field("timestamp", name, event, "only the loop counts")
    if new.previous_timestamp is not old.previous_timestamp or new.position is not old.position:
        _refuse_field("previous_timestamp or position", name, event, "only the loop counts")
    if new.seed != old.seed:
        _refuse_field("seed", name, event, "derive seeds of your own: pl.random.derive(state.seed, ...)")
    if new.model is not old.model:
        if event is not Event.INIT:
            _refuse_field("model", name, event, "model surgery is done at INIT, with state.with_module(module)")
        if not isinstance(new.model, ModelDef):
            what = f"to a {type(new.model).__name__}"
            _refuse_field(f"model {what}", name, event, "it is the structure alone; write state.with_module(module)")
        refuse_misfit(new)
        return new  # type: ignore[no-any-return]
    _refuse_ill_typed(new, old, name, event)
    if new.params is not old.params:
        if hasattr(old.params, "origin"):
            raise AlgorithmStructureError(
                f"algorithm {name!r} replaced params at {event.name}, between the forward and the backward of a "
                "microbatch: the loss is a function of the old ones. Replace params at BEFORE_FORWARD or earlier, "
                "or from AFTER_BACKWARD on."
            )
        new = _same_tensors("params", new, new.params, old.params, name, event)
    if new.buffers is not old.buffers:
        new = _same_tensors("buffers", new, new.buffers, old.buffers, name, event)
    if new.opt_state is not old.opt_state:
        _same_structure("opt_state", new.opt_state, old.opt_state, name, event)
    grads = new._grads
    if grads is None and event is not Event.BATCH_END and old._grads not in (None, NOT_READY):
        _refuse_field("grads to None", name, event, "the step needs them; to skip it, multiply them by 0")
    if grads is not old._grads and grads is not None and grads is not NOT_READY:
        reference = FrozenDict((key, old.params[key]) for key in old.model.trainable)
        new = _same_tensors("grads", new, grads, reference, name, event)
    return new  # type: ignore[no-any-return]


# What is needed to go on from these events.
_NEEDED = {
    **dict.fromkeys((Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH), "batch"),
    **dict.fromkeys((Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START), "batch"),
    **dict.fromkeys((Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD), "microbatch"),
}
_OF_THE_LOSS = frozenset({Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH})
_DIFFERENTIATED = frozenset({Event.AFTER_LOSS, Event.BEFORE_BACKWARD})


def _refuse_ill_typed(new: State, old: State, name: str, event: Event) -> None:
    """Refuse here what would be noticed further on, when nobody knows any more whose it is."""
    if new.loss is not old.loss and event in _OF_THE_LOSS:
        _refuse_loss(new, old, name, event)
    needed = _NEEDED.get(event)
    if needed is not None and getattr(new, needed) is None and getattr(old, needed) is not None:
        _refuse_field(f"{needed} to None", name, event, "the step needs it")
    if new.loss_scale is not old.loss_scale and not isinstance(new.loss_scale, LossScale | None):
        what = f"loss_scale to a {type(new.loss_scale).__name__}"
        _refuse_field(what, name, event, "precision='amp_fp16' brings a LossScale, and others None")
    for field in ("skipped", "nonfinite"):
        before, after = getattr(old, field), getattr(new, field)
        if after is not before and before is not None and not isinstance(after, torch.Tensor):
            _refuse_field(
                f"{field} to a {type(after).__name__}", name, event, "it is a tensor, which the loop counts in"
            )


def _refuse_loss(new: State, old: State, name: str, event: Event) -> None:
    if loss_problem(old.loss) is not None:  # that of a script which means something else by it
        return
    where = f"the loss that algorithm {name!r} returned at {event.name}, batch {old.timestamp.batch},"
    problem = loss_problem(new.loss)
    if problem is not None:
        raise LossError(f"{where} {problem}")
    if event in _DIFFERENTIATED and total_loss(old.loss).requires_grad and not total_loss(new.loss).requires_grad:
        raise LossError(
            f"{where} has no graph, so that nothing can be differentiated: compute it from state.loss without "
            ".detach(), .item() or torch.no_grad(). To leave a step out, multiply grads by 0 at AFTER_TRAIN_BATCH."
        )


def _same_tensors(field: str, state: State, new: Any, old: FrozenDict[str, Any], name: str, event: Event) -> State:
    """Refuse other names, shapes, dtypes or devices; bring the names back into their order."""
    if new.keys() != old.keys():
        missing, unknown = sorted(old.keys() - new.keys())[:3], sorted(new.keys() - old.keys())[:3]
        raise AlgorithmStructureError(
            f"algorithm {name!r} at {event.name} changed the names in {field}: missing {missing}, unknown {unknown}. "
            f"Keep the names: state.replace({field}={{**state.{field}, name: tensor}})"
            + ("; another model goes in at INIT, with state.with_module(module)." if field == "params" else ".")
        )
    in_parts = False
    for key, tensor in new.items():
        before = old[key]
        if tensor is before or (tensor is None and field == "grads"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} put {type(tensor).__name__} into {field}[{key!r}], not a tensor."
            )
        if tensor.shape != before.shape or tensor.dtype != before.dtype or tensor.device != before.device:
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} changed {field}[{key!r}] from {_describe(before)} to "
                f"{_describe(tensor)}; shapes, dtypes and devices stay as they are."
            )
        if not same_parts(tensor, before):
            was, now = (getattr(each, "placements", None) for each in (before, tensor))
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} changed {field}[{key!r}] from parts by {was} to parts by {now}; "
                "each rank keeps the part that it has: tensor.redistribute(placements=before.placements)."
            )
        in_parts = in_parts or is_part(before)
    if in_parts:
        new = FrozenDict((key, each if each is None else shard_like(each, old[key])) for key, each in new.items())
        state = state.replace(**{field: new})
    if any(a != b for a, b in zip(new, old, strict=True)):
        new = FrozenDict((key, new[key]) for key in old)
        state = state.replace(**{field: new})
    if any(t is not None and t.requires_grad for t in new.values()):
        detached = FrozenDict((key, t if t is None else t.detach()) for key, t in new.items())
        state = state.replace(**{field: detached})
    return state


def _same_structure(field: str, new: Any, old: Any, name: str, event: Event) -> None:
    """Refuse another tree, or leaves of other shapes."""
    before, spec = optree.tree_flatten(old, namespace=NAMESPACE)
    after, given = optree.tree_flatten(new, namespace=NAMESPACE)
    if given != spec:
        raise AlgorithmStructureError(
            f"algorithm {name!r} at {event.name} changed the structure of {field}, in which the optimizer would not "
            "find its memory again; map its leaves and keep the tree: optree.tree_map(function, state.opt_state, "
            f"namespace={NAMESPACE!r})."
        )
    for path, a, b in zip(optree.tree_paths(old, namespace=NAMESPACE), after, before, strict=True):
        if any(getattr(a, kind, None) != getattr(b, kind, None) for kind in ("shape", "dtype")):
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} changed the shape or dtype of {field}{_keys(path)}; both stay as "
                "they are."
            )
        if not same_parts(a, b) or is_part(b) is not is_part(a):
            raise AlgorithmStructureError(
                f"algorithm {name!r} at {event.name} changed {field}{_keys(path)}, of which each rank holds a part, to "
                "something else than parts by the same placements: pl.distributed.shard_like(whole, before)."
            )


def _keys(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _refuse_type(new: Any, cls: type, name: str, event: Event) -> NoReturn:
    if new is None:
        raise AlgorithmReturnError(
            f"algorithm {name!r} at {event.name} returned None. An algorithm returns the next State: end it with "
            "`return state.replace(...)`, or `return state` where nothing changes."
        )
    if isinstance(new, State):
        raise AlgorithmReturnError(
            f"algorithm {name!r} at {event.name} returned a {type(new).__name__} where it was given a {cls.__name__}: "
            "use state.replace(...), which keeps the class."
        )
    raise AlgorithmReturnError(
        f"algorithm {name!r} at {event.name} returned {type(new).__name__}, not a State: return state.replace(...)."
    )


def _refuse_field(field: str, name: str, event: Event, reason: str) -> NoReturn:
    raise AlgorithmStructureError(f"algorithm {name!r} at {event.name} changed {field}, and may not: {reason}.")


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
    followed, unsure = watch is None or Event.BATCH_END in watch, donation is not None
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
