"""What members have of their own besides a step: the order of their batches, and what is measured of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from pure_loop._internal.closing import call_all
from pure_loop._internal.pytree import Batch, Outputs, PyTree
from pure_loop.data.batch import to_device
from pure_loop.data.group import END
from pure_loop.data.source import Batches, Source
from pure_loop.errors import ArgumentError, DataError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event
from pure_loop.membership import PerMember, measured, member_value, stacked_batches
from pure_loop.metrics import Metric
from pure_loop.stages.engine import Engine
from pure_loop.stages.notes import noting
from pure_loop.state import State
from pure_loop.task import Task

if TYPE_CHECKING:
    from pure_loop.data.position import Position


def seed_of_data(state: State) -> int:
    """The seed of the order of data that all members share, or one model has."""
    return state.seed if state.data_seed is None else state.data_seed


class MemberEngine(Engine):
    """Counts batches that each member has of its own."""

    def next_batch(
        self, state: State, task: Task, source: Source, loaded: Batch, seconds: Callable[[], float], event: Event
    ) -> tuple[Batch, int, int] | None:
        if not isinstance(loaded, PerMember):
            return super().next_batch(state, task, source, loaded, seconds, event)
        one = member_value(loaded, 0, "batch")
        batch = to_device(loaded, state.device, stays=source.keeps_pinned)
        return batch, task.samples(one), task.tokens(one)


class MemberSource(Source):
    """The batches of a dataloader in the order of each member's seed."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        first = sources[0]
        self.uneven, self.length, self.loader_length = first.uneven, first.length, first.loader_length

    @property
    def described(self) -> dict[str, object]:
        return self._sources[0].described

    @property
    def reads_once(self) -> bool:
        return self._sources[0].reads_once

    def epoch(self, epoch: int, start: int = 0, seen: int = 0) -> Batches:
        streams = [source.epoch(epoch, start, seen) for source in self._sources]
        try:
            while True:
                batches = [next(stream, END) for stream in streams]
                ended = [batch is END for batch in batches]
                if all(ended):
                    return
                if any(ended):
                    raise DataError(
                        f'data="own": the data of member {ended.index(True)} has ended, and that of member '
                        f"{ended.index(False)} has not: the epochs of all members need one number of batches."
                    )
                with noting(lambda: 'with data="own" the batches of all members in one step are of one size'):
                    stacked = stacked_batches("batch", batches)
                yield PerMember(stacked)
        finally:
            call_all([stream.close for stream in streams], None, "while closing: ")

    def goes_on(self, at: Position, epoch: int, start: int, seen: int) -> bool:
        return False  # it is that of data which members shared, or one of them had

    def resume(self, epoch: int, start: int, samples: int, count: Callable[[Batch], int], *, changed: bool) -> int:
        starts = [source.resume(epoch, start, samples, count, changed=changed) for source in self._sources]
        return starts[0]

    def close(self) -> None:
        call_all([source.close for source in self._sources], None, "while closing: ")

    def _batches(self, epoch: int, start: int, seen: int) -> Batches:
        raise AssertionError("its sources have the batches")


def member_sources(open_source: Callable[..., Source], seeds: Iterable[int]) -> Callable[..., Source]:
    """What opens the data of members that each have their own order."""

    def opened(dataloader: Any, *, seed: int, **options: Any) -> Source:
        sources = [open_source(dataloader, seed=member_seed, **options) for member_seed in seeds]
        if sources[0].reads_once:
            raise ArgumentError(
                'data="own" with an iterator: each member goes through the data by itself, and an iterator is gone '
                'through once. Give a DataLoader or a list, or write data="shared".'
            )
        return MemberSource(sources)

    return opened


def of_members(metric: Metric, count: int) -> Metric:
    """A metric that measures each member."""

    def parts(value: Any) -> list[Any]:
        if metric.of_loss:
            loss, weight = value
            return [(loss[number], weight) for number in range(count)]
        return [member_value(value, number, "outputs") for number in range(count)]

    def init() -> PyTree:
        return tuple(metric.init() for _ in range(count))

    def update(accumulators: PyTree, outputs: Outputs, batch: Batch) -> PyTree:
        batches = [member_value(batch, number, "batch") for number in range(count)]
        return tuple(map(metric.update, accumulators, parts(outputs), batches))

    def compute(accumulators: PyTree) -> PyTree:
        return measured(f"metric {metric.name!r}", [metric.value_of(item) for item in accumulators])

    result = attrs.evolve(metric, init=init, update=update, compute=compute, merge=None)
    return result.made_by("", {"metric": metric})


def with_member_metrics(evaluators: Iterable[BoundEvaluator], count: int) -> tuple[BoundEvaluator, ...]:
    """Evaluators that measure each member."""
    return tuple(
        evaluator
        if evaluator.metrics is None
        else attrs.evolve(evaluator, metrics=tuple(of_members(metric, count) for metric in evaluator.metrics))
        for evaluator in evaluators
    )
