"""``fit(verify="100ba")``: a due batch is computed twice from the same State, and compared bit by bit.

The first run is that of the loop: its events are observed. The second one runs silently from the State of
AFTER_DATALOADER, so no data is loaded again, and is compared with the States of the first, event by event. Where the
States before BATCH_END differ, a third run says whether the difference is transient, and the first event at which the
two differ says what computed it. Nothing is written in place in a due batch; its States are kept up to its end, and not
one of any other batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import attrs

from pure_loop._internal.bits import checksums, combined, count_of_differences
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.errors import NonFiniteError, VerificationError
from pure_loop.event import Event
from pure_loop.hooks import Handler
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Fit
from pure_loop.loop.driver import Script, run_to_end
from pure_loop.loop.evaluation import current
from pure_loop.loop.training import Eager
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State
from pure_loop.time import Timestamp
from pure_loop.verify.leaves import LOOP, Pair, distance, leaves_of, unequal_leaves

Handlers: TypeAlias = Mapping[Event, tuple[Handler, ...]]
# (event, the algorithm or LOOP's word, the State that it returned)
Take: TypeAlias = Callable[[Event, str, State], None]
# A batch gives the State before BATCH_END, or this error.
Outcome: TypeAlias = "State | NonFiniteError"


@attrs.define(eq=False)
class Recorder:
    """Where the States of a batch go that is verified.

    Attributes:
        take: takes a State; None: no batch is verified just now.
    """

    take: Take | None = None


def recorded(handlers: Handlers, recorder: Recorder) -> dict[Event, tuple[Handler, ...]]:
    """Handlers that hand their States to the recorder, but for those of calls inside another handler."""
    return {event: tuple(_recorded(event, handler, recorder) for handler in some) for event, some in handlers.items()}


def _recorded(event: Event, handler: Handler, recorder: Recorder) -> Handler:
    function: Any = handler.function

    def call(state: State, *stages: Any) -> Any:
        take = recorder.take
        if take is None:
            return function(state, *stages)
        recorder.take = None
        try:
            result = function(state, *stages)
        finally:
            recorder.take = take
        if isinstance(result, State):
            take(event, handler.algorithm, result)
        return result

    return attrs.evolve(handler, function=call)


@attrs.frozen(eq=False)
class _Record:
    event: Event
    by: str
    state: State


@attrs.define(eq=False)
class _Comparison:
    """Compares the States of a second run with the records of the first, up to the first difference.

    Attributes:
        records: of the first run.
        divergence: the first difference.
    """

    records: list[_Record]
    divergence: Found | None = None
    _index: int = 0
    _equal: Collection[Pair] = ()
    # The pairs are of its leaves; without it, their addresses would be those of others.
    _last: State | None = None

    def take(self, event: Event, by: str, state: State) -> None:
        index, self._index = self._index, self._index + 1
        if self.divergence is not None:
            return
        record = self.records[index] if index < len(self.records) else None
        if record is None or record.event is not event or record.by != by:
            self.divergence = Found(index, by, event, None)
            return
        names, self._equal = unequal_leaves(record.state, state, self._equal)
        self._last = state
        if names:
            self.divergence = Found(index, by, event, Difference.of(names, record.state, state))

    def end(self) -> None:
        """The second run is over."""
        if self.divergence is None and self._index < len(self.records):
            record = self.records[self._index]
            self.divergence = Found(self._index, record.by, record.event, None)


class Verified(Eager):
    """Batches computed one by one, of which those that are due are computed twice and compared.

    Args:
        every: how many batches come to one that is verified.
        stages: those of the loop.
        recorder: what its handlers are :func:`recorded` by.
    """

    def __init__(self, every: int, stages: LoopStages, recorder: Recorder) -> None:
        self._every, self._recorder, self._ownership = every, recorder, stages.workspace.ownership
        # Of its own: a tool may replace those of the loop for a time.
        self._handlers = dict(stages.handlers)
        self._stages = attrs.evolve(stages, workspace=Workspace(), handlers=self._handlers)

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        due = (state.timestamp.batch + 1) % self._every == 0
        if not due:
            return super().batch(state, fit, samples, tokens, seconds)
        return self._ended(self._verified(state, fit, samples, tokens, seconds), fit)

    def _ended(self, script: Script, fit: Fit) -> Script:
        """The script of a due batch, and its BATCH_END, at which nothing of what was compared is left."""
        state = yield from script
        state = current(state, fit, Event.BATCH_END)
        return (yield Event.BATCH_END, state)

    def _verified(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        """
        Raises:
            VerificationError: the second run gave another State, or the ranks have other parameters.
            NonFiniteError: both runs raised it.
        """
        if self._ownership is not None:
            self._ownership.forget()
        lap = cache(seconds)  # all runs take as long as the first
        unevaluated = attrs.evolve(fit, stages=self._stages, evaluators=())

        def script() -> Script:
            return super(Verified, self).batch(state, unevaluated, samples, tokens, lap)

        records: list[_Record] = []

        def take(event: Event, by: str, state: State) -> None:
            records.append(_Record(event, by, state))

        first = yield from self._noted(script(), take)
        comparison = _Comparison(records)
        second = self._again(state, script(), comparison)
        timestamp = state.timestamp.next_batch(*self._stages.engine.counts(samples, tokens, lap))
        self._compare(state, script, timestamp, comparison, first, second)
        if isinstance(first, NonFiniteError):
            raise first
        return first

    def _noted(self, script: Script, take: Take) -> Generator[tuple[Event, State], State, Outcome]:
        """A batch's script up to its BATCH_END; its States, and those that its algorithms return, are taken."""
        answer: Any = None
        self._recorder.take = take
        try:
            while True:
                try:
                    event, state = script.send(answer)
                except NonFiniteError as error:  # of the update: of one run alone it is a difference
                    return error
                if event in LOOP:
                    take(event, LOOP[event], state)
                if event is Event.BATCH_END:
                    return state
                answer = yield event, state
        finally:
            self._recorder.take = None
            script.close()

    def _again(self, state: State, script: Script, comparison: _Comparison | None) -> Outcome:
        """The batch of a State once more, with its algorithms and nothing else."""
        take = (lambda event, by, state: None) if comparison is None else comparison.take
        try:
            outcome: Outcome = run_to_end(self._noted(script, take), self._handlers, self._stages)
        except Exception as error:
            error.add_note(f"raised when verify= computed batch {state.timestamp.batch} again, from the same State")
            raise
        finally:
            if comparison is not None:
                comparison.end()
        return outcome

    def _compare(
        self,
        state: State,
        script: Callable[[], Script],
        timestamp: Timestamp,
        comparison: _Comparison,
        first: Outcome,
        second: Outcome,
    ) -> None:
        """
        Raises:
            VerificationError: the outcomes differ on a rank, or the parameters of the ranks do.
        """
        engine = self._stages.engine
        # A difference that nothing is left of before BATCH_END is none.
        divergence = comparison.divergence
        if divergence is not None and _are_equal(first, second):
            divergence = None
        sums: dict[str, int] = {}
        if engine.replicates and isinstance(first, State):
            sums = checksums(first.params)
        place = -1 if divergence is None else divergence.index
        rows = engine.by_rank((place, combined(sums.values())), state)
        if max(row[0] for row in rows) < 0:
            if len({row[1] for row in rows}) > 1:
                raise other_parameters_error(engine.gather(sums), timestamp)
            return
        third = self._again(state, script(), None)
        agrees: tuple[bool, bool] = (_are_equal(first, third), _are_equal(second, third))
        answers = engine.gather((divergence, agrees))
        raise verification_error(answers, timestamp, engine.global_rank)


def _are_equal(a: Outcome, b: Outcome) -> bool:
    if isinstance(a, State) and isinstance(b, State):
        return not unequal_leaves(a, b)[0]
    return not isinstance(a, State) and not isinstance(b, State)


@attrs.frozen
class Difference:
    """The first leaf in which two States differ.

    Attributes:
        leaf: its path, as ``grads/0.weight``.
        more: how many leaves differ besides.
        values: how many of its numbers differ, and the first of them in both runs.
        distance: the L2 norm of the difference; None where it has none.
    """

    leaf: str
    more: int
    values: str
    distance: float | None

    @classmethod
    def of(cls, names: Sequence[str], state_a: State, state_b: State) -> Difference:
        leaf = names[0]
        a, b = (local_tensor(leaves_of(state).get(leaf)) for state in (state_a, state_b))
        return cls(leaf, len(names) - 1, count_of_differences(a, b), distance(a, b))


@attrs.frozen
class Found:
    """The first place at which two runs of a batch differ.

    Attributes:
        index: how many places come before it.
        by: the algorithm, or what the loop computed, after which they do.
        event: at which, or before which.
        difference: in which leaf; None: one of the runs did not come to this place.
    """

    index: int
    by: str
    event: Event
    difference: Difference | None


# Of each rank: where its runs differ, and whether a third one agrees with the first and with the second.
Answer = tuple[Found | None, tuple[bool, bool]]


def verification_error(answers: Sequence[Answer], timestamp: Timestamp, rank: int) -> VerificationError:
    """The error of a batch with runs that differ, the same on all ranks.

    Args:
        answers: by rank; one of them at least has a difference.
        timestamp: that after the batch.
        rank: of this process.
    """
    first = min(place.index for place, _ in answers if place is not None)
    there = [number for number, (place, _) in enumerate(answers) if place is not None and place.index == first]
    place = answers[there[0]][0]
    assert place is not None
    agrees = [all(some[run] for _, some in answers) for run in (0, 1)]
    agreeing = (1, 3) if agrees[0] else (2, 3) if agrees[1] else None
    batch, difference = timestamp.batch - 1, place.difference
    where = f" on rank {there[0]}" if len(there) < len(answers) and len(there) == 1 else ""
    if len(answers) > 1 and len(there) > 1:
        where = f" on ranks {', '.join(map(str, there))}, which exchange what they compute"
    text = (
        f"verify=: batch {batch} was computed twice from the same State, and the States before its BATCH_END differ. "
        f"The first difference is after {_stage(place)}{where}: "
    )
    if difference is None:
        text += "one of the runs did not come to it. "
    else:
        besides = f", and in {difference.more} other leaves" if difference.more > 1 else ""
        besides = ", and in 1 other leaf" if difference.more == 1 else besides
        size = "" if difference.distance is None else f" (L2 norm of the difference: {difference.distance:.4g})"
        text += f"in {difference.leaf}{besides}: {difference.values}{size}. "
    text += _advice(agreeing)
    error = VerificationError(text)
    error.stage = place.by
    error.leaf = None if difference is None else difference.leaf
    error.difference = None if difference is None else difference.distance
    error.rank = there[0] if len(there) == 1 else None
    error.batch, error.timestamp = batch, timestamp
    error.transient, error.agreeing = agreeing is not None, agreeing
    return error


def _stage(place: Found) -> str:
    if place.by == "optimizer":
        return "the optimizer, before BATCH_END"
    return f"{place.by!r}, at {place.event.name}"


def _advice(agreeing: tuple[int, int] | None) -> str:
    stopped = "Training stopped before this batch was counted: resume from the last checkpoint."
    if agreeing is None:
        return (
            "A third run agrees with neither: something in the batch gives another result each time. An algorithm that "
            "isn't pure is found by pl.testing.check_algorithm, a kernel without a fixed order of operations by "
            f"fit(..., deterministic=True). {stopped}"
        )
    wrong = 2 if agreeing == (1, 3) else 1
    return (
        f"A third run agrees with run {agreeing[0]}, so that run {wrong} was wrong and the difference is transient: "
        "test the memory and the processors of this machine. If it comes again on another machine, a kernel has no "
        f"fixed order of operations, which fit(..., deterministic=True) finds. {stopped}"
    )


def other_parameters_error(by_rank: Sequence[Mapping[str, int]], timestamp: Timestamp) -> VerificationError:
    """The error where each rank computes the same twice, and the ranks have other parameters.

    Args:
        by_rank: the checksum of each parameter.
        timestamp: that after the batch.
    """
    names = [name for name in by_rank[0] if len({sums.get(name) for sums in by_rank}) > 1]
    sums: Counter[Any] = Counter(tuple(row.values()) for row in by_rank)
    usual, count = sums.most_common(1)[0]
    odd = [rank for rank, row in enumerate(by_rank) if tuple(row.values()) != usual]
    is_majority = 2 * count > len(by_rank)
    batch, leaf = timestamp.batch - 1, f"params/{names[0]}" if names else None
    who = f"rank {', '.join(map(str, odd))} has others than the rest" if is_majority else "no two of them need be right"
    error = VerificationError(
        f"verify=: after batch {batch} the {len(by_rank)} ranks have different parameters, {leaf} first: {who}. Each "
        "computed this batch twice alike, so the difference is older than the batch, or came from an exchange between "
        "ranks. Resume all ranks from one checkpoint; if it comes again, an algorithm treats ranks differently "
        "(pl.testing.check_algorithm), or the memory or the network of a machine is at fault."
    )
    error.leaf, error.batch, error.timestamp, error.transient = leaf, batch, timestamp, False
    error.rank = odd[0] if is_majority and len(odd) == 1 else None
    return error
