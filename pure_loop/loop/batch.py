"""The gradient of a batch as a script, and the stages that algorithms are given, which repeat it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs
from torch import Tensor

from pure_loop.errors import ArgumentError
from pure_loop.event import Event, events_between
from pure_loop.hooks import Handler
from pure_loop.loop.driver import Script, run_to_end
from pure_loop.stages import Stages
from pure_loop.state import Loss, State, raw_loss, setter, with_fields

# (state, number of the microbatch, whether it is the last, its weight)
Between: TypeAlias = Callable[[State, int, bool, float | Tensor], Script]
_MICROBATCH_EVENTS = events_between(Event.BEFORE_FORWARD, Event.AFTER_BACKWARD)
_cut = setter("microbatch", without=("outputs", "loss"))


@attrs.frozen(kw_only=True)
class LoopStages(Stages):
    """The second argument of a handler that takes one: the loop's stages, algorithms included.

    ``stages.gradients(state)`` is the gradient of the whole batch at ``state.params``, computed as the loop
    computes it: microbatches, weights, precision, clipping, and the other algorithms at the events
    from BEFORE_FORWARD to AFTER_BACKWARD. Random numbers are those of this batch, so a second call
    draws the same dropout masks. Nothing is yielded, and no callback is called.
    """

    handlers: dict[Event, tuple[Handler, ...]]
    observed: frozenset[Event] = frozenset(Event)

    @property
    def harmless(self) -> bool:
        # An algorithm at these events may have replaced the targets or the loss.
        return self.task.harmless and self.handlers.keys().isdisjoint(_MICROBATCH_EVENTS)

    def gradients(self, state: State) -> State:
        """``state``, of the same event, with the ``grads`` (with ``loss`` and ``grad_norm``) of its batch at its
        parameters.
        """
        if state.event in _MICROBATCH_EVENTS:
            raise ArgumentError(
                f"stages.gradients was called at {state.event.name}, inside the computation that it would repeat: its "
                "handler would be called again, without an end. Call it at AFTER_TRAIN_BATCH, or at BATCH_START."
            )
        script = gradients(state.replace(grads=None, grad_norm=None), self)
        result: State = run_to_end(script, self.handlers, self)
        return with_fields(result, event=state.event)


def gradients(state: State, stages: LoopStages, between: Between | None = None) -> Script:
    """The gradient of a batch, microbatch by microbatch; each weighs as many samples (or tokens) as it holds.

    ``between`` continues from the State of a microbatch's BEFORE_FORWARD to that of its AFTER_BACKWARD in another way.
    """
    engine = stages.engine
    pieces = stages.microbatches(state.batch)
    weights, count = stages.weights(pieces, state)
    losses: list[Loss] = []
    for index in range(count):
        last, weight = index == count - 1, weights.shares[index]
        buffers, model = state.buffers, state.model
        piece = pieces[min(index, len(pieces) - 1)]
        stages.place.microbatch = index
        state = yield Event.BEFORE_FORWARD, _cut[type(state)](state, piece)
        if between is not None:
            state = yield from between(state, index, last, weight)
        else:
            state = yield Event.AFTER_FORWARD, stages.forward(state, index=index, last=last)
            state = yield Event.BEFORE_LOSS, state
            state = yield Event.AFTER_LOSS, stages.loss(state, index=index)
            state = yield Event.BEFORE_BACKWARD, state
            # Not in one line: while it waited, the script would keep the graph alive in the State before.
            state = stages.backward(state, weight=weight)
        if not engine.counts_microbatch(index, len(pieces)):
            state = state.replace(buffers=buffers, model=model)
        state = yield Event.AFTER_BACKWARD, state
        losses.append(raw_loss(state))
    stages.place.microbatch = 0
    mean = engine.mean_loss(weights, losses)
    return stages.finish_gradients(state, divisor=engine.divisor(weights), loss=mean)
