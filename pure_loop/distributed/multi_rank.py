"""What the engines of several ranks share: what ranks tell each other in a step, and what they start from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pure_loop._internal.pytree import Batch, PyTree
from pure_loop._internal.tree_ops import are_sharded, full_tensor
from pure_loop._internal.weights import WEIGHTS_ARE, Weights, power_of_two, read_weight
from pure_loop.data.batch import map_tensors, to_device
from pure_loop.data.group import END, Part
from pure_loop.data.position import Position, digest_of
from pure_loop.data.source import Source
from pure_loop.distributed.agreement import (
    Buffers,
    broadcast_state,
    compare,
    digests,
    is_wide,
    refuse_other_data,
    refuse_sparse,
    refuse_unequal_data,
    settings_of,
    untouched,
    versions,
)
from pure_loop.distributed.meshes import map_state, mesh_of, on_usable_mesh
from pure_loop.distributed.parallel import Parallel
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import DataError, DistributedError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.initial import initialised
from pure_loop.metrics import Metric
from pure_loop.stages.engine import Engine
from pure_loop.stages.loss import map_loss
from pure_loop.state import Loss, State, device_of, raw_params
from pure_loop.task import Task

T = TypeVar("T")

# A sum of checksums stays below it, and exact in a float64.
_CHECKSUMS = 1 << 48
# What a rank has instead of a batch that counts.
_NOTHING, _PADDING, _BATCH = 0, 1, 2
# Which event follows the end of the data, by the one that follows a batch.
_ENDS = {
    Event.AFTER_DATALOADER: Event.EPOCH_END,
    Event.EVAL_BATCH_START: Event.EVAL_END,
    Event.PREDICT_BATCH_START: Event.PREDICT_END,
}


Gradients: TypeAlias = tuple[Tensor | None, ...]


def no_parameters() -> None:
    """Stands for a weak reference to parameters, before there are any."""


class Hook(Protocol):
    """A hook of a tensor."""

    def remove(self) -> None: ...


# Calls a function with the gradient of a tensor, which it replaces; torch has no types for it.
register_hook: Callable[[Tensor, Callable[[Tensor], Tensor]], Hook] = Tensor.register_hook


class MultiRankEngine(Engine):
    """Several ranks. What is computed where is left to its subclasses.

    Args:
        parallel: what the user chose.
        ranks: this process and the others, not yet connected.
    """

    def __init__(self, parallel: Parallel, ranks: Ranks) -> None:
        self.parallel = parallel
        self.talk = ranks
        self.rank, self.ranks = ranks.data_rank, ranks.data_ranks
        self.global_rank, self.world_size = ranks.rank, ranks.size
        # How many batches an evaluation or prediction has had.
        self._given = 0
        # What this rank has to say of the last batch, which has to be the same on all.
        self._signature = 0.0
        # Samples, tokens and seconds of the batch: of this rank's part of it, and of the whole.
        self._mine = self._counts = (0, 0, 0.0)
        # The weight of each rank's part of the batch, of all of it, and what the sum of gradients is divided by.
        self._weights: list[float] = []
        self._total: float | Tensor = 0.0
        self._divisor: float | Tensor = 1.0
        # The power of two by which the weights of microbatches are divided.
        self._power: float | Tensor = 1.0
        self._on_device: Tensor | None = None
        # Whether the loss is a sum, and not a mean.
        self._summed = False
        self._asked: Callable[[], list[tuple[float, ...]]] | None = None
        self._batch = 0
        # What there was before INIT.
        self._begun: list[tuple[int, Tensor]] | None = None
        # Of the whole batch: samples, and a checksum of their indices; and both summed over an evaluation.
        self._whole = (0, 0)
        # A checksum of this rank's own data.
        self._own = 0.0
        self._seen = [0, 0]
        self._agreed_buffers = Buffers(ranks)
        # Whether data of the ranks' own may have positions.
        self._positions = True

    exchanges = True

    # Whether ranks exchange in every forward, so that one without a batch would let the others wait.
    _meets_before_forwards = False

    # The beginning and the end.

    def begin(self, state: State, settings: Mapping[str, object], *, empty: bool = False) -> State:
        self._meet(state, settings, fresh=True)
        state = self._initialised(state) if empty else broadcast_state(self.talk, state)
        self._begun = versions(state)
        return state

    def start(self, state: State, settings: Mapping[str, object], *, fresh: bool) -> State:
        self._meet(state, settings, fresh=fresh)
        if are_sharded(state.params):
            state = on_usable_mesh(state, self.talk)
            mesh = mesh_of(state)
            if mesh is not None and not self._keeps(mesh):
                state = map_state(full_tensor, state)
        if fresh:
            # What INIT changed, such as layers that were put in, each rank may have initialised for itself.
            begun, self._begun = self._begun, None
            changed = self.talk.exchange(Event.BEFORE_LOAD, 0, begun is None or not untouched(begun, state))
            return broadcast_state(self.talk, state) if any(row[0] for row in changed) else state
        self.refuse_others(state, "resumes from another State than rank 0")
        return state

    def _initialised(self, state: State) -> State:
        """A State with numbers, which all ranks make alike."""
        return initialised(state)

    def _keeps(self, mesh: DeviceMesh) -> bool:
        """Whether a State in parts over this mesh is taken as it is; if not, its tensors are gathered."""
        return False

    def _meet(self, state: State, settings: Mapping[str, object], *, fresh: bool) -> None:
        """Connect, and refuse ranks that are about to do something else than the first."""
        self.talk.connect()
        mine = settings_of(state, {"device": self.talk.device.type, **settings}, self.parallel, fresh=fresh)
        compare(self.talk, mine, "is about to do something else than rank 0")
        refuse_sparse(state)

    def refuse_others(self, state: State, what: str) -> None:
        """Refuse ranks that have another State than the first; ``what`` says so.

        Raises:
            DistributedError: names the rank, the tensor, and both digests.
        """
        compare(self.talk, digests(state), what)

    def barrier(self, state: State, event: Event) -> None:
        by_rank = self.talk.exchange(event, state.timestamp.batch, self._signature)
        self._refuse_others([row[0] for row in by_rank])

    def _refuse_others(self, signatures: list[float]) -> None:
        """
        Raises:
            DistributedError: the losses of the last batch reached other parameters on one rank than on another.
        """
        if any(signature != signatures[0] for signature in signatures):
            raise DistributedError(
                "the losses of the last batch reached other parameters on one rank than on another, and with "
                'parallel="shard" their gradients were mixed up: resume from a State before it, and let every batch '
                'reach all parameters, or write parallel="replicate".'
            )

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        self._forget()
        self.talk.failed(error, event, 0 if state is None else state.timestamp.batch)

    def close(self) -> None:
        self._forget()
        self.talk.close()

    def _forget(self) -> None:
        """Let go of what holds the process group."""

    # Data.

    def next_batch(
        self, state: State, task: Task, source: Source, loaded: Batch, seconds: Callable[[], float], event: Event
    ) -> tuple[Batch, int, int] | None:
        part = loaded if type(loaded) is Part else Part(loaded, loaded is not END)
        batch, counted = part.batch, part.counts
        samples, tokens = (task.samples(batch), task.tokens(batch)) if counted else (0, 0)
        self._mine = (samples, tokens, 0.0 if batch is END else seconds())
        # Ranks of one data rank pass equal data, which is compared where they load it by themselves.
        own = source.uneven is not None and self.talk.layout.cut > 1 and event is Event.AFTER_DATALOADER and counted
        self._whole = part.samples, part.order
        self._own = float(digest_of(batch)) if own else 0.0
        if source.uneven is not None:
            batch = self._vote(state, batch, event, counted, source)
        outside = event is not Event.AFTER_DATALOADER
        if batch is END:
            seen, self._seen = (self._given, *self._seen), [0, 0]
            self._given = 0
            # Of an evaluation these are sums: its batches are not compared one by one.
            by_rank = self.talk.exchange(_ENDS[event], state.timestamp.batch, *seen)
            refuse_other_data(self.talk, by_rank, f"before {_ENDS[event].name}", "{} batches")
            return None
        if outside:
            self._given += 1
            self._seen = [self._seen[0] + part.samples, (self._seen[1] + part.order) % _CHECKSUMS]
            if self._meets_before_forwards:
                self.barrier(state, event)
        self.padding = not counted
        return to_device(batch, state.device, stays=source.keeps_pinned), samples, tokens

    def counts_microbatch(self, index: int, pieces: int) -> bool:
        # A rank with fewer microbatches repeats its last one, and one without samples has padding.
        self.repeats = index >= pieces
        return not (self.padding or self.repeats)

    def _vote(self, state: State, batch: Batch, event: Event, counted: bool, source: Source) -> Batch:
        """The batch that this rank trains with, where each has data of its own; END comes for all at once."""
        has = _BATCH if counted else _NOTHING if batch is END else _PADDING
        by_rank = [row[0] for row in self.talk.exchange(event, state.timestamp.batch, has)]
        if max(by_rank) == _NOTHING or (source.uneven == "stop" and _NOTHING in by_rank):
            source.last_batch = END
            return END
        if batch is END and source.last_batch is END:
            # Training resumed from a State at which this rank's data had ended already.
            source.last_batch = deque(source.epoch(state.timestamp.epoch), maxlen=1)[0]
        if batch is END:
            batch = source.last_batch
        if source.uneven == "pad":
            source.last_batch = batch
        return batch

    def positions(self, position: Position | None, tells: bool) -> PyTree:
        if not self._positions:
            return None
        by_rank = self.talk.layout.first_of(self.talk.gather((position, tells)))
        # Data with indices has none in any batch.
        self._positions = any(tells for _, tells in by_rank)
        return tuple(position for position, _ in by_rank) if any(position for position, _ in by_rank) else None

    def length(self, length: int | None, uneven: str | None) -> int | None:
        lengths = [item for item in self.talk.gather(length) if item is not None]
        if len(lengths) < self.world_size:
            return None
        # Of data that is split they are equal.
        return max(lengths) if uneven == "pad" else min(lengths)

    def counts(self, samples: int, tokens: int, seconds: Callable[[], float]) -> tuple[int, int, float]:
        return self._counts

    def weigh(
        self, weights: Sequence[float | Tensor], state: State, *, split: bool, summed: bool
    ) -> tuple[Weights, int]:
        self._batch, self._summed = state.timestamp.batch, summed
        what = f"a microbatch of batch {self._batch} on rank {self.global_rank}"
        mine: list[float | Tensor] = (
            [0] * len(weights) if self.padding else [read_weight(weight, what) for weight in weights]
        )
        # By the weights that were given: all ranks have to take the same way.
        if any(isinstance(weight, Tensor) and weight.device.type != "cpu" for weight in weights):
            share = torch.as_tensor(sum(mine), dtype=torch.float64, device=device_of(state)).reshape(1)
            self._on_device = self.talk.sum(share)[0]
            own = 0.0 if self.padding else 1.0
        else:
            self._on_device = None
            own = math.fsum(mine) if all(weight >= 0 for weight in mine) else math.nan
        numbers = (len(mine), own, *self._mine, self._signature, *self._whole, self._own)
        self._asked = self.talk.ask(Event.BEFORE_FORWARD, self._batch, *numbers)
        # The answer is not waited for before the backward is over, where what it says is not needed before: each
        # gradient is multiplied by its weight over a power of two, which only has to be the same on all ranks, and
        # where training resumes: it is made of the counts of the State. Weights that count something else than samples
        # (tokens) make it larger or smaller than the gradient by their ratio, for which float16 alone has no room.
        before = state.timestamp
        counted = before.batch and before.sample
        narrow = any(tensor.dtype is torch.float16 for tensor in raw_params(state).values())
        if split or not counted or narrow or state.loss_scale is not None:
            mine += [0] * (self._answered() - len(mine))
            Weights.of(mine, self._batch, self._total)  # refuses what can't be weighed
            self._power = power_of_two(self._total)
        else:
            self._power = power_of_two(before.sample / before.batch)
        if summed:
            shares: tuple[float | Tensor, ...] = tuple([float(weight != 0) for weight in mine])
        else:
            shares = tuple([weight / self._power for weight in mine])
        # Losses are added up with the same factors as gradients, and divided by the same divisor.
        return Weights(shares, 1.0, shares), len(mine)

    def _answered(self) -> int:
        """Wait for what the others said of the batch; gives how many microbatches there are."""
        if self._asked is None:
            return 0
        by_rank, self._asked = self._asked(), None
        self._refuse_others([row[5] for row in by_rank])
        refuse_other_data(self.talk, [row[6:8] for row in by_rank], f"in batch {self._batch}")
        refuse_unequal_data(self.talk, by_rank, self._batch)
        by_rank = self.talk.layout.first_of(by_rank)
        self._weights = [row[1] for row in by_rank]
        self._total = sum(self._weights) if self._on_device is None else self._on_device
        # Seconds are those of rank 0.
        self._counts = int(sum(row[2] for row in by_rank)), int(sum(row[3] for row in by_rank)), by_rank[0][4]
        return int(max(row[0] for row in by_rank))

    def divisor(self, weights: Weights) -> float | Tensor:
        self._answered()
        if self._on_device is None and not 0 <= self._total < math.inf:
            raise DataError(f"batch {self._batch} weighs {self._weights}, rank by rank: {WEIGHTS_ARE}")
        self._divisor = 1.0 if self._summed else self._total / self._power
        return self._divisor

    def mean_loss(self, weights: Weights, losses: list[Loss]) -> Loss | None:
        mean: Loss | None = weights.mean_of(losses, always=True)
        return map_loss(lambda part: torch.zeros_like(torch.as_tensor(part)), losses[-1]) if mean is None else mean

    def num_microbatches(self, pieces: int, state: State) -> int:
        return int(max(row[0] for row in self.talk.exchange(Event.EVAL_BEFORE_FORWARD, state.timestamp.batch, pieces)))

    def single_rank(self) -> Engine:
        engine = Engine()
        engine.rank = self.rank
        return engine

    # After a batch.

    def reduce_loss(self, state: State, loss: Loss) -> Loss:
        if not isinstance(loss, dict):
            return self._sum_of([loss], device_of(state))[0] / self._divisor
        sums = self._sum_of(list(loss.values()), device_of(state))
        return {name: value / self._divisor for name, value in zip(loss, sums, strict=True)}

    def _sum_of(self, values: list[Tensor], device: torch.device) -> list[Tensor]:
        """Each of these scalars, summed over ranks in one exchange."""
        tensors = [torch.as_tensor(value, device=device) for value in values]
        wide = torch.stack([tensor.double() if is_wide(tensor) else tensor.float() for tensor in tensors])
        return [total.to(tensor.dtype) for total, tensor in zip(self.talk.sum(wide).unbind(), tensors, strict=True)]

    def sums_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each of these tensors summed over ranks: those of one dtype in one exchange."""
        result: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
            total = self.talk.sum(torch.cat([tensors[i].reshape(-1) for i in alike]))
            parts = torch.split(total, [tensors[i].numel() for i in alike])
            result |= {i: part.view(tensors[i].shape) for i, part in zip(alike, parts, strict=True)}
        return [result[i] for i in range(len(tensors))]

    def sync_buffers(self, state: State, before: FrozenDict[str, Tensor]) -> State:
        return self._agreed_buffers.averaged(state, before, self._weights)

    def largest(self, numbers: Sequence[float], state: State) -> Sequence[float]:
        by_rank = self.talk.exchange(Event.BATCH_START, state.timestamp.batch, *numbers)
        return [max(column) for column in zip(*by_rank, strict=True)]

    def by_rank(self, numbers: Sequence[float], state: State) -> Sequence[Sequence[float]]:
        return self.talk.exchange(Event.BATCH_END, state.timestamp.batch, *numbers)

    def gather(self, value: T) -> list[T]:
        return self.talk.gather(value)

    def merge_metrics(
        self, metrics: Sequence[Metric], accumulated: dict[str, PyTree], state: State
    ) -> dict[str, PyTree]:
        def to(device: torch.device | str) -> Callable[[Tensor], Tensor]:
            return lambda tensor: tensor.detach().to(device)

        by_rank = self.talk.layout.first_of(self.talk.gather(map_tensors(to("cpu"), accumulated)))
        merged = {}
        for metric in metrics:
            parts = [row[metric.name] for row in by_rank if row]
            merge = metric.merge
            if merge is None:
                raise DistributedError(
                    f"evaluator {state.evaluator!r}: the metric {metric.name!r} of {len(parts)} ranks can't be put "
                    "together: give it pl.Metric(..., merge=lambda one, other: ...), one accumulator from two."
                )
            merged[metric.name] = map_tensors(to(device_of(state)), reduce(merge, parts))
        return merged
