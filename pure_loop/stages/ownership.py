"""Ownership: whether a step may write where a State's tensors are, or has to copy them. A State that is kept stays.

A step writes in place if nothing outside of the loop has read the tensors since the last step, which their mapping
notes (:func:`pure_loop.state.lend`), and if no State that is alive has that mapping, but for the loop's own variables
and the variable of the loop that reads the stream, which the next State replaces. The second is one count of references
to the mapping and one to the State. If tensors were read, one precise look follows, at the references to each, to its
storage, and to what is behind it. In doubt the step copies. Code of the user's that a stage calls counts as having read
what it is given.

What refers to a tensor, :mod:`pure_loop.stages.references` says; what the consumer's loop does with a pair,
:mod:`pure_loop._internal.frames`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, auto
from operator import is_
from types import FrameType
from typing import Any, TypeAlias
from weakref import getweakrefcount, ref

from torch import Tensor

from pure_loop._internal.frames import consumer_doubt, count, frame_at, is_watched, rebinds_loop_variable
from pure_loop._internal.torch_private import storage_uses, tensor_uses
from pure_loop._internal.tree_ops import clone_all
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict, Overwritten
from pure_loop.model.parameters import are_marked
from pure_loop.stages.references import (
    LARGE,
    Tensors,
    are_unaliased,
    count_in,
    counting_doubt,
    expected_uses,
    is_private,
)
from pure_loop.state import State, raw_opt_state, raw_params


class Request(Enum):
    """What a script of the library may yield in the place of an event; the driver serves it and sends the State back.

    Attributes:
        COUNT_REFERENCES: the next computation writes to what this State has, where nothing else refers to it.
    """

    COUNT_REFERENCES = auto()


# A weak reference to a State, or what stands in its place.
Weak: TypeAlias = "Callable[[], State | None]"


def _nothing(_: object = None) -> None:
    """In the place of a weak reference, before there is one; and what one of the stream's own calls at the end."""


class Ownership:
    """What one stream knows of its tensors, and its decisions.

    Args:
        always: whether States that are kept lose their tensors, too (``donate=True``).
        watch: the events that the consumer is given; None: all.
        attached: those with an algorithm or a callback.
        compiled: whether graphs ask for memory, by :meth:`writable_or_copies`, and not the stages.
        measures: whether nothing of the stream is kept, and its counts are what those of all others are compared with.

    Attributes:
        counted: the events and requests before and after which the driver calls.
        observed_at: the events at which a State is yielded, or passed to algorithms or callbacks.
        observed: whether a State was yielded, or passed to algorithms, callbacks or an evaluation, since a graph last
            asked.
        fits: what the optimizer's ``fits`` says of them, once it was asked.
        is_of_ranks: whether an engine of several ranks has a weak reference to the parameters.
        shares_storage: a function of parameters: whether tensors of the engine's own have their memory.
    """

    __slots__ = (
        *("_decides", "_first_batch", "_granted", "_instance", "_last", "_leaves", "_memory"),
        *("_params", "_step", "_tensors", "_yields_next"),
        *("always", "compiled", "counted", "fits", "is_of_ranks"),
        *("measures", "observed", "observed_at", "shares_storage"),
    )

    expected: tuple[int, ...] | None = None  # what is counted where nothing is kept (see loop/driver.py)

    def __init__(
        self,
        *,
        always: bool = False,
        watch: Collection[Event] | None = None,
        attached: Collection[Event] = (),
        compiled: bool = False,
        measures: bool = False,
    ) -> None:
        self.always, self.compiled, self.measures, self.observed = always, compiled, measures, True
        self.is_of_ranks = False
        self.shares_storage: Callable[[FrozenDict[str, Tensor]], bool] = lambda params: False
        # The State after a step then replaces the one in the variable of the consumer before that is read.
        self._yields_next = (watch is None or Event.BATCH_END in watch) and not consumer_doubt()
        self.observed_at = frozenset(Event) if watch is None else frozenset({*watch, *attached})
        # After these it is decided; up to the end of the first batch all events are looked at.
        self._decides: frozenset[Event | Request] = _OF_GRAPHS if compiled else frozenset({_BEFORE_STEP})
        self.counted: frozenset[Event | Request] = frozenset({*Event, *Request})
        self._first_batch = "awaited"
        self.forget()

    def forget(self) -> None:
        """The tensors may be those of others, too, from now on: the stream is over, or computes in another way."""
        self._params: Callable[[], Any] = _nothing
        self._memory: Callable[[], Any] = _nothing
        self.fits: bool | None = None
        self._granted: Weak = _nothing
        self._step: Weak = _nothing
        self._last: Weak = _nothing
        self._leaves: Callable[[], FrozenDict[str, Tensor] | None] = _nothing
        self._instance: Any = None  # the private module in which they stand
        self._tensors: Tensors | None = None  # of the adopted parameters, once they were looked at

    def adopt(self, state: State) -> None:
        """Parameters and optimizer state of this State were made by the stream for itself."""
        self._granted = self._last = _nothing  # a step that copied has not used the decision, and no other one may
        if self.owns(state):
            return
        params, memory = raw_params(state), raw_opt_state(state)
        both = type(params) is FrozenDict and type(memory) is FrozenDict
        self.fits = self._tensors = None  # which would keep other tensors alive
        # With a callback each is a weak reference of its own, beside which another one counts.
        self._params, self._memory = (ref(params, _nothing), ref(memory, _nothing)) if both else (_nothing, _nothing)

    def stand_in(self, instance: Any, leaves: FrozenDict[str, Tensor]) -> None:
        """These leaves of autograd, which share the memory of parameters, stand in this private module."""
        self._instance, self._leaves = instance, ref(leaves, _nothing)

    def leaves_of(self, params: FrozenDict[str, Tensor]) -> FrozenDict[str, Tensor] | None:
        """The leaves of these parameters, if the last forward of the stream went through them and they are alive."""
        leaves = self._leaves()
        return leaves if leaves is not None and leaves.origin is params else None

    def takes_kept(self, state: State) -> bool:
        """Whether the step of this State takes its tensors, kept or not, if only the State and the stream have them.

        It is the one that the script goes on with, to its step: an algorithm may call the stages with others.
        """
        return self.always and not self.compiled and self._step() is state and self.owns(state)

    def owns(self, state: State) -> bool:
        """Whether parameters and optimizer state are those that were adopted."""
        return self._params() is raw_params(state) and self._memory() is raw_opt_state(state)

    def before(self, event: Event | Request, state: State, last: Weak, waiting: Weak) -> None:
        """Decide, right before a script goes on, whether what it computes next may write to what this State has.

        Args:
            event: the one after which it goes on, one of ``counted``.
            state: what the script is sent; the caller is the driver, which has it in one variable.
            last: a weak reference to the State that the consumer was given last.
            waiting: one to the State that the script waits with in its variable, where ``state`` was made of that.
        """
        self._step = ref(state) if event is _BEFORE_STEP else _nothing
        if counting_doubt():
            return
        frame = frame_at(1).f_back
        if self._first_batch:
            self._look_between(event, state, last, frame)
        if event not in self._decides:
            return
        if self.compiled or event is Event.BATCH_START:
            self._make_room(state, last, frame)
        if event is not Event.BATCH_START:
            self._granted = self._last = _nothing
            if self._is_unseen(event, state, last, waiting, frame):
                self._granted = ref(state)

    def _look_between(self, event: Event | Request, state: State, last: Weak, frame: FrameType | None) -> None:
        """In the first batch: find out whether something between the stream and the variable leaves events out.

        ``filter`` does, which has no frame. Its variable keeps the State before the step if it leaves out BATCH_END.
        """
        # Where graphs compute a batch, a script may yield nothing in between.
        begins, ends = (_OF_LOADING, _AFTER_BATCH) if self.compiled else (Event.BATCH_START, Event.BATCH_END)
        if event is begins:
            self._first_batch = "under way"
            if not self.compiled and _has_large_gradients(state):
                self._decides |= _OF_GRADIENTS
        if self._first_batch == "under way":
            if last() is state:
                self._yields_next = self._is_replaced(frame, state)
            if event is ends:
                self._first_batch = ""
                self.counted = self._decides

    def _is_unseen(
        self, event: Event | Request, state: State, last: Weak, waiting: Weak, frame: FrameType | None
    ) -> bool:
        """Whether nothing that stays refers to what is written to next."""
        # At a request the script has this very State in its variable, and not the one that it was made of.
        same, scripts, yielded = isinstance(event, Request), waiting(), last()
        if not same:
            written = slice(0, 2) if event is _BEFORE_STEP else slice(2, 3)
            # Else an algorithm put in others, and the script's variable has those before.
            if scripts is None or not all(map(is_, _mappings(scripts)[written], _mappings(state)[written])):
                return False
        shares = [False] * 3
        if yielded is state:
            yielded = None
        if yielded is not None:
            shares = [
                mapping is shared is not None
                for mapping, shared in zip(_mappings(yielded), _mappings(state), strict=True)
            ]
        counts = _counts(state, shares, yielded, scripts)
        if self.measures:
            Ownership.expected = tuple(map(min, counts, Ownership.expected or counts))
        if self.measures or Ownership.expected is None:
            return False
        held, params, memory, grads, shown, waits = map(int.__sub__, counts, Ownership.expected)
        # The State in the script's variable may be one that was yielded at an event before, and is kept.
        if waits and not same:
            return False
        if any(shares):
            if shown or held != same or not self._is_replaced(frame, yielded):
                return False
            self._last = last
        # One more may be the variable of the consumer, of this State itself.
        elif held != same and not (held == same + 1 and self._is_replaced(frame, state)):
            return False
        if self.compiled:
            return True  # the segment counts the rest
        if event is not _BEFORE_STEP:
            return not grads and not _lent(state._grads) and are_unaliased(state._grads)
        leaves = self.leaves_of(raw_params(state))
        if leaves is not None:
            params -= 1  # that of the leaves, to which the variable here and the module refer
            if count_in([leaves]) != [1 + (self._instance.params is leaves)]:
                return False
        return not params and not memory and self.owns(state) and self.has_tensors_alone(state, leaves)

    def _is_replaced(self, frame: FrameType | None, state: State | None) -> bool:
        """Whether the consumer has this State in the variable that it puts the next one in."""
        # A debugger reads, and may write back, the variables that are read there.
        return self._yields_next and not is_watched(by_profilers=False) and rebinds_loop_variable(frame, state)

    def _make_room(self, state: State, last: Weak, frame: FrameType | None) -> None:
        """A batch begins: let go of the gradients of the State that only the variable of the consumer has."""
        yielded = last()
        if yielded is None or yielded._grads is None or yielded._grads is state._grads:
            return
        # The variable here, and the consumer's.
        if count_in([yielded]) == [2] and _has_large_gradients(state) and self._is_replaced(frame, yielded):
            _SLOTS["grads"].__set__(
                yielded, Overwritten.by("grads", f"let go when batch {state.timestamp.batch} began")
            )

    def has_tensors_alone(self, state: State, leaves: FrozenDict[str, Tensor] | None) -> bool:
        """Whether nothing but its mappings, and these leaves of the stream, has what a State has to be written to.

        Where nothing outside of the loop has read a mapping it is so. Else each tensor is looked at. Leaves with a hook
        or a gradient stay noted as read, for the next forward.
        """
        params, memory = raw_params(state), raw_opt_state(state)
        read = _lent(params, leaves, memory)
        if not read:
            return True
        if tensor_uses is None or storage_uses is None:
            return False
        # A hook or a gradient on a leaf stays there, and the next forward has to see that something may be.
        marked = leaves is not None and are_marked(leaves)
        # Before the look: what another thread reads meanwhile is noted anew, which `take` finds.
        for mapping in read:
            mapping.lent = None
        alone = (
            # Of the stream's own; engines of several ranks have one, too.
            getweakrefcount(params) <= 1 + self.is_of_ranks
            and getweakrefcount(memory) <= 1
            and (read[0] is memory or self._has_parameters_alone(state, leaves))
            and (read[-1] is not memory or is_private(memory))
        )
        for mapping in read:
            if not alone or (marked and mapping is leaves):
                mapping.lent = True
        return alone

    def _has_parameters_alone(self, state: State, leaves: FrozenDict[str, Tensor] | None) -> bool:
        """Whether nothing else has the parameters that are trained, or their leaves."""
        params, names, expected = raw_params(state), state.model.trainable, expected_uses()
        shared = leaves is not None or self.shares_storage(params)
        if self._tensors is None:
            self._tensors = Tensors(params[name] for name in names)
        # The tensors are in a list here, as they were where this was counted.
        if not self._tensors.have_uses(expected["shared" if shared else "alone"]):
            return False
        if leaves is None:
            return True
        bound = self._instance.bound() is leaves
        if getweakrefcount(leaves) > 1 + bound:  # that of the stream, and of the module
            return False
        # Their memory is that of the parameters.
        places, tensors = self._instance.places if bound else {}, list(map(leaves.get, names))
        uses = zip(map(count, tensors), map(tensor_uses, tensors), map(getweakrefcount, tensors), strict=True)
        variables, *counts = expected["alone"][:3]
        return list(uses) == [(variables + places.get(name, 0), *counts) for name in names]

    def take(self, state: State, *fields: str) -> bool:
        """Whether these fields may be written to; the State has them no more then."""
        if self.compiled or self._granted() is not state:
            return False
        yielded, self._granted, self._last = self._last(), _nothing, _nothing
        what, written = overwritten_by(fields[0], state.timestamp.batch), []
        for field in fields:
            slot = _SLOTS[field]
            mapping = slot.__get__(state)
            for owner in (state, yielded):
                if owner is not None and slot.__get__(owner) is mapping:
                    slot.__set__(owner, Overwritten.by(field, what))
                    written.append((slot, owner, mapping))
        # Something may have read one since references were counted: a thread, or code of the user's before the step.
        # From here on a thread that reads one finds it overwritten.
        if _lent(*[mapping for _, _, mapping in written]):
            for slot, owner, mapping in written:
                slot.__set__(owner, mapping)
            return False
        return True

    def writable_or_copies(
        self, tensors: list[Tensor], are_private: Callable[[State | None], bool] | None
    ) -> list[Tensor]:
        """For tensors that a graph made: the list itself, to be written to, if nothing else has them; or copies.

        A graph calls no Python code, so a State that was not observed can't have been stored. After copies were
        returned, the memory is the graph's own until a State is observed again.

        Args:
            tensors: what is about to be written to.
            are_private: whether only the graph, the State that it is called with, and the one that it is passed, refer
                to them; takes them out of both.
        """
        yielded, granted, observed = self._last(), self._granted() is not None, self.observed
        self._granted, self._last, self.observed = _nothing, _nothing, False
        if not observed or (granted and are_private is not None and are_private(yielded)):
            return tensors
        return clone_all(tensors)


_BEFORE_STEP = Event.AFTER_TRAIN_BATCH
_OF_LOADING, _AFTER_BATCH = Event.AFTER_DATALOADER, Event.BATCH_CHECKPOINT
# At which graphs ask for memory, and the gradients of the batch before are of no use any more.
_OF_GRAPHS: frozenset[Event | Request] = frozenset({Request.COUNT_REFERENCES, Event.BATCH_START})
# After these, gradients are added to, divided or clipped, or those of the batch before are of no use any more.
_OF_GRADIENTS = frozenset({Event.BATCH_START, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD})
_SLOTS: dict[str, Any] = {name: vars(State)[f"_{name}"] for name in ("params", "opt_state", "grads")}


def overwritten_by(field: str, batch: int) -> str:
    """What became of a field of a State, to which a batch has written."""
    if field == "grads":
        return f"added to, divided or clipped in place by batch {batch}"
    return f"overwritten by the step of batch {batch}"


def _has_large_gradients(state: State) -> bool:
    """Whether a check of references is cheaper than to copy the gradients, or to have them once more."""
    return sum(map(Tensor.numel, raw_params(state).values())) >= LARGE


def _mappings(state: State) -> tuple[Any, Any, Any]:
    """What a step may write to."""
    return raw_params(state), raw_opt_state(state), state._grads


def _lent(*mappings: Any) -> list[Any]:
    """Those of these mappings that code outside of the loop has read."""
    return [mapping for mapping in mappings if getattr(mapping, "lent", None) is not None]


def _counts(state: State, shares: list[bool], yielded: Any, scripts: Any) -> tuple[int, ...]:
    """References to a State, to its mappings of parameters, optimizer state and gradients, but for those that another
    one shares, and to two other States.
    """
    mappings = map(int.__sub__, map(count, _mappings(state)), shares)
    return count(state), *mappings, count(yielded), count(scripts)
