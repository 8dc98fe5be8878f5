"""What is compiled of a call of ``fit``: a segment for each stretch of a batch between two observed events."""

from __future__ import annotations

from collections.abc import Hashable

import attrs

from pure_loop.compile.refusals import Untraceable
from pure_loop.compile.replay import Recorders
from pure_loop.compile.segment import PerBatch, Program, Run, Segment
from pure_loop.event import Event
from pure_loop.loop.batch import LoopStages
from pure_loop.stages.ownership import Ownership
from pure_loop.state import State
from pure_loop.time import Timestamp

__all__ = ["AROUND_MICROBATCH", "BEFORE_GRADIENTS", "INSIDE_MICROBATCH", "OF_MICROBATCHES", "Segments"]

BEFORE_GRADIENTS = frozenset({Event.BATCH_START, Event.BEFORE_TRAIN_BATCH})
AROUND_MICROBATCH = frozenset({Event.BEFORE_FORWARD, Event.AFTER_BACKWARD})
INSIDE_MICROBATCH = frozenset({Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD})
OF_MICROBATCHES = AROUND_MICROBATCH | INSIDE_MICROBATCH
# The segments that end with an update.
_UPDATING = frozenset({"step", "gradients and update", "update"})


class Segments:
    """The segments of a call, which reach from one event that is observed to the next.

    What can't be traced is left out where that is allowed, and its event observed from then on.

    Args:
        stages: the loop's.
        observed: events that are observed outside the graphs: by the consumer, callbacks, loggers.
        where_possible: whether what can't be traced runs eagerly between graphs; else it is an error.
        ownership: gives memory that a graph may write to, for tensors that are those of a State of this loop's making:
            the same list, where they are not aliased, or copies. None: copies, always.

    Attributes:
        single: the stages of this rank by itself: what ranks exchange is no part of a graph.
        eager: the parts that run eagerly.
        recorders: what records graphs on a device.
    """

    def __init__(
        self, stages: LoopStages, observed: frozenset[Event], *, where_possible: bool, ownership: Ownership | None
    ) -> None:
        self.stages = stages
        # A segment ends where ranks exchange something, which is no part of a graph, and what follows begins anew.
        together = stages.engine.exchanges
        exchanges = BEFORE_GRADIENTS | AROUND_MICROBATCH | _calling_stages(stages)
        self.observed = observed | exchanges if together else observed
        self.single = attrs.evolve(stages, engine=stages.engine.single_rank()) if together else stages
        self.eager: set[str] = set()
        if stages.engine.in_parts:
            # What works on parts runs eagerly: the optimizer, whose kernels are as fast, and algorithms, which may need
            # more than this rank's.
            self.eager.add("update")
            self.observed |= frozenset(stages.handlers)
        self.where_possible = where_possible
        self.ownership = ownership
        self.recorders = Recorders()
        self._segments: dict[Hashable, Segment] = {}

    def segment(self, name: str, program: Program, *, connected: bool = False) -> Segment:
        """The segment of this name, as far as the events observed now let it reach."""
        key = name, self.observed, self.stages.size  # of microbatches, whose number is a part of the graph
        result = self._segments.get(key)
        if result is None:
            brief = name not in _UPDATING
            # References to a State are counted once an update; other graphs write to little of it.
            ownership = None if brief else self.ownership
            result = self._segments[key] = Segment(
                name,
                program,
                self.single,
                self.recorders,
                ownership=ownership,
                left_out=self.stages.engine.in_parts,
                brief=brief,
                connected=connected,
            )
        return result

    def leave_out(self, error: Untraceable) -> None:
        """From here on, run this part eagerly; or raise the error."""
        kind, event = error.part
        left_out = self.where_possible or error.runs_eagerly
        if not left_out or event in self.observed or kind in self.eager:
            raise error.for_users() from error.__cause__
        error.let_go()
        if event is not None:
            self.observed |= {event}
        else:
            self.eager.add(kind)

    def attempt(
        self,
        name: str,
        program: Program,
        state: State,
        timestamps: tuple[Timestamp, ...],
        per_batch: PerBatch,
        index: int = 0,
        *,
        connected: bool = False,
    ) -> Run | None:
        """Call the segment of this name; None: a part of it can't be traced, and is left out from here on."""
        try:
            return self.segment(name, program, connected=connected)(state, timestamps, per_batch, index)
        except Untraceable as error:
            self.leave_out(error)
            return None

    def close(self) -> None:
        """Let go of what was compiled, which on a GPU holds the memory of recordings."""
        self._segments.clear()


def _calling_stages(stages: LoopStages) -> frozenset[Event]:
    """The events outside microbatches whose algorithms ask for the stages: for a gradient of all ranks, it may be."""
    return frozenset(
        event for event, listed in stages.handlers.items() if any(handler.takes_stages for handler in listed)
    ).difference(OF_MICROBATCHES)
