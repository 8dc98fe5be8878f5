"""Runtime checks of a stream: that no State is changed in place, and the order of events; errors name the author.

Every tensor of a State is compared, by value, before and after an algorithm, a callback, the loop's body, a forward or
a loss had it (the version counters of tensors miss what fused kernels, ``.data`` and BatchNorm write). By default the
first two batches are checked and the first event of each kind; ``strict=True`` checks all events, all computations and
the order of events.

No reference to a tensor is kept for it, and only small tensors are copied; of large ones there are sums of their bits.
So the update of a checked batch writes in place as any other does, and takes no more memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import ref

import optree

from pure_loop._internal.bits import Digest, digest
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.errors import ImpurityError
from pure_loop.event import Event, events_between
from pure_loop.state import State, raw_params, with_fields

if TYPE_CHECKING:
    from pure_loop.hooks import Handler
    from pure_loop.order import Checker

__all__ = ["Strict"]

# What is computed after an event; and the event that follows, if code of the user's is in it: that writes to no memory
# of a State, and an update may.
_COMPUTED: dict[Event, tuple[str, Event | None]] = {
    Event.BEFORE_FORWARD: ("the forward", Event.AFTER_FORWARD),
    Event.BEFORE_LOSS: ("the loss", Event.AFTER_LOSS),
    Event.BEFORE_BACKWARD: ("the backward", None),
    Event.AFTER_TRAIN_BATCH: ("the optimizer's step", None),
    Event.EVAL_BEFORE_FORWARD: ("the forward of the evaluation", Event.EVAL_AFTER_FORWARD),
    Event.EVAL_AFTER_FORWARD: ("a metric", Event.EVAL_BATCH_END),
    Event.PREDICT_BEFORE_FORWARD: ("the forward of the prediction", Event.PREDICT_AFTER_FORWARD),
}
_OTHER = ("the computation that followed", None)

# What a State is like, without a reference to its tensors: how many leaves each of its fields has, and the digest of
# each leaf; None: it is neither a tensor nor an array.
Value: TypeAlias = tuple[list[int], list[Digest | None]]

# Events of which a batch has one or more, besides those of its evaluations.
_OF_A_BATCH = events_between(Event.BEFORE_DATALOADER, Event.BATCH_CHECKPOINT)
_COUNTED = frozenset({Event.BATCH_END, Event.BATCH_CHECKPOINT})  # the timestamp of these counts their batch


class Strict:
    """The checks of one stream.

    Args:
        checker: what the events are held against; None: their order is free.
        observed: those at which there is an algorithm, a callback or the loop's body, and of which the first event of
            each kind is checked; None: all events are checked, always.
        batches: of these events those in so many batches, too.

    Attributes:
        checked: the events that are checked when they come next.
    """

    def __init__(
        self,
        checker: Checker | None = None,
        *,
        observed: Collection[Event] | None = None,
        batches: int = 0,
    ) -> None:
        self._checker, self._always, self._batches = checker, observed is None, batches
        self._in_batches = _OF_A_BATCH if batches else frozenset[Event]()
        self.checked = set(Event if observed is None else observed)
        self._computed = frozenset(
            event for event in self.checked if self._always or _COMPUTED.get(event, _OTHER)[1] in self.checked
        )
        self._first_batch: int | None = None
        self._is_due = True
        # By event: the handlers that have a `when` which has not been true yet.
        self._uncalled: dict[Event, set[int]] = {}
        # A State and its value, and whether that is passed on and to be compared.
        self._valued: tuple[ref[State], Value] | None = None
        self._is_out = False
        self._computing: tuple[State, Event] | None = None

    @classmethod
    def of(
        cls,
        strict: bool | None,
        watch: Collection[Event] | None,
        attached: Collection[Event],
        *,
        order: Literal["current", "2021"] | None = None,
        loaded: bool = False,
        batches: int = 0,
    ) -> Strict | None:
        """The checks that an argument ``strict`` asks for.

        Args:
            strict: True: all events; None: the first ones; False: none.
            watch: the events that the loop's body is given; None: all.
            attached: those with an algorithm or a callback.
            order: with ``True`` the events are held against it, too; None: their order is free.
            loaded: whether they begin with those of a checkpoint.
            batches: how many batches are among the first events.
        """
        if strict is None:
            observed = frozenset(Event) if watch is None else {*watch, *attached}
            return cls(observed=observed, batches=batches)
        if not strict:
            return None
        if order is None:
            return cls()
        from pure_loop.order import Checker

        return cls(Checker(order, loaded=loaded))

    def advance(self, event: Event) -> None:
        """The script has come to this event, from one that was checked, or from its beginning.

        Raises:
            OrderError: the event may not come here.
            ImpurityError: what was computed since the last event wrote to its State.
        """
        if self._computing is not None:
            (state, before), self._computing = self._computing, None
            self.take_back(state, _COMPUTED.get(before, _OTHER)[0], before)
            self._valued = None
        if self._checker is not None:
            self._checker.advance(event)

    def begin(self, event: Event, state: State, handlers: Sequence[Handler]) -> None:
        """Before the algorithms, the callbacks and the loop's body at an event in ``checked``."""
        self._is_due = self._always or event not in self._uncalled
        if event in self._in_batches:
            number = state.timestamp.batch - (event in _COUNTED)
            if self._first_batch is None:
                self._first_batch = number
            self._is_due = number < self._first_batch + self._batches
        if event not in self._uncalled:
            self._uncalled[event] = {id(handler) for handler in handlers if handler.when is not None}

    def show(self, event: Event, state: State, handler: Handler | None = None) -> None:
        """Before an algorithm, a callback or the loop's body is given the State; ``handler``: that of the algorithm."""
        uncalled = self._uncalled[event]
        if self._is_due or id(handler) in uncalled:
            self.hand_over(state)
        uncalled.discard(id(handler))

    def end(self, event: Event, state: State) -> None:
        """After all of them, and before the script goes on.

        Raises:
            ImpurityError: the loop's body changed its State.
        """
        self.take_back(state, "the loop's body", event)
        if not (self._always or self._uncalled[event] or (self._is_due and event in self._in_batches)):
            self.checked.discard(event)
        if self._is_due and event in self._computed:
            self.hand_over(state)
            self._computing = state, event
        else:
            self._valued = None  # which has copies of small tensors, and the next event has another State

    def hand_over(self, state: State) -> None:
        """Remember a State by value before it is passed on."""
        if self._valued is None or self._valued[0]() is not state:
            self._valued = ref(state), _value_of(state)
        self._is_out = True

    def take_back(self, state: State, holder: str, event: Event) -> None:
        """
        Raises:
            ImpurityError: something in the State has changed since :meth:`hand_over`; names the leaf and the author.
        """
        if not self._is_out or self._valued is None:
            return
        old, value = self._valued[1], _value_of(state)
        self._is_out = False
        if value == old:
            return
        self._valued = None
        raise ImpurityError(
            f"{holder} changed {_difference(state, old, value, f'in place, at or after {event.name}')}. A State never "
            "changes: compute a new tensor (`x = x + 1`, not `x += 1` or `x.add_(1)`), and give it back with "
            "state.replace(...)."
        )


def _stored(state: State) -> Any:
    """A State with the parameters that it stores, without what is made of them where a forward or a loss reads one.

    Of shards those are gathered, by all ranks together, and every one that is made is part of the gradient's exchange.
    """
    origin = getattr(raw_params(state), "origin", None)
    return state if origin is None else with_fields(state, params=origin)


def _value_of(state: State) -> Value:
    leaves, spec = optree.tree_flatten(_stored(state), namespace=NAMESPACE)
    return [child.num_leaves for child in spec.children()], list(map(digest, leaves))


def _difference(state: State, before: Value, after: Value, where: str) -> str:
    """The first leaf that differs, or the field that has another number of them."""
    (sizes, leaves), (sizes_now, leaves_now) = before, after
    if sizes != sizes_now:
        names = optree.tree_structure(_stored(state), namespace=NAMESPACE).entries()
        fields = zip(names, sizes, sizes_now, strict=True)
        name, size_before, size_now = next(item for item in fields if item[1] != item[2])
        return f"state.{name} {where}: it had {size_before} values and has {size_now}"
    pairs = enumerate(zip(leaves, leaves_now, strict=True))
    index, left, right = next((index, left, right) for index, (left, right) in pairs if left != right)
    path = optree.tree_accessors(_stored(state), namespace=NAMESPACE)[index].codify("state")
    return f"{path} {where}: it was {left or 'no tensor'} and is {right or 'no tensor'}"
