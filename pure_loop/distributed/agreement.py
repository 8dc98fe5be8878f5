"""What is equal on all ranks: settings and State, compared at the start, and buffers, averaged after each batch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop._internal.tree_ops import is_sharded
from pure_loop.distributed._rendezvous import named
from pure_loop.distributed.parallel import Parallel
from pure_loop.distributed.ranks import Ranks
from pure_loop.errors import DistributedError, ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.state import State

# What ranks have to choose alike; the mesh is compared by its shape.
_CHOICES = ("kind", "parallelize", "data", "uneven", "find_unused_parameters", "bucket_cap_mb", "groups", "mesh")


def settings_of(state: State, settings: Mapping[str, object], parallel: Parallel, *, fresh: bool) -> dict[str, str]:
    """What this rank is about to do, by name, to be compared with the others."""
    mine = {"the start": "afresh" if fresh else "from a State that was kept"}
    mine |= {name: _without_addresses(value) for name, value in settings.items()}
    mine |= {f"parallel.{name}": _without_addresses(getattr(parallel, name)) for name in _CHOICES}
    mine |= _model(state)
    if not fresh:
        mine |= {"timestamp": _counts(state), "position": str(state.position), "seed": str(state.seed)}
        mine |= {"frozen": str(sorted(state.frozen))}
    return mine


def compare(talk: Ranks, mine: dict[str, str], what: str) -> None:
    """Refuse ranks of which one differs from the first.

    Raises:
        DistributedError: names the rank, what differs, and both values.
    """
    difference = _difference(talk.gather(mine), "nothing")
    if difference is not None:
        rank, name, value, first = difference
        raise DistributedError(
            f"rank {rank} of {talk.size} {what}, at the start: {name} is {_short(value)} on rank {rank} "
            f"and {_short(first)} on rank 0. Every rank runs the same script with the same arguments; what "
            "may differ between ranks is the data, with Parallel(data='own')."
        )


def _difference(by_rank: Sequence[Mapping[str, str]], absent: str) -> tuple[int, str, str, str] | None:
    """The first rank that differs from rank 0, in what, its value, and that of rank 0."""
    for rank, theirs in enumerate(by_rank):
        for name in {**by_rank[0], **theirs}:
            value, first = theirs.get(name, absent), by_rank[0].get(name, absent)
            if value != first:
                return rank, name, value, first
    return None


def broadcast_state(talk: Ranks, state: State) -> State:
    """The State with the parameters and buffers of rank 0, whatever each rank's module began with."""
    kept = {name: tensor for name, tensor in state.params.items() if is_sharded(tensor)}  # made alike on all ranks
    tensors = [*(tensor for name, tensor in state.params.items() if name not in kept), *state.buffers.values()]
    copies = iter(
        [
            torch.empty_like(old).copy_(copy) if old.stride() != copy.stride() else copy
            for old, copy in zip(tensors, talk.broadcast(tensors), strict=True)
        ]
    )
    params = FrozenDict((name, kept[name] if name in kept else next(copies)) for name in state.params)
    return state.replace(params=params, buffers=FrozenDict((name, next(copies)) for name in state.buffers))


def versions(state: State) -> list[tuple[int, Tensor]]:
    """The parameters and buffers, and how often each was written to."""
    return [(tensor._version, tensor) for tensors in (state.params, state.buffers) for tensor in tensors.values()]


def untouched(before: list[tuple[int, Tensor]], state: State) -> bool:
    """Whether nothing was written to the parameters and buffers since, and none was replaced."""
    after = versions(state)
    return len(before) == len(after) and all(
        tensor is old and count == old_count for (old_count, old), (count, tensor) in zip(before, after, strict=True)
    )


def refuse_sparse(state: State) -> None:
    """
    Raises:
        ModelError: a layer gives sparse gradients, which torch's exchanges between ranks don't take.
    """
    for name, module in state.model.skeleton.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        weight = f"{name}.weight" if name else "weight"
        if sparse and weight in state.model.trainable:
            raise ModelError(
                f"the gradient of {weight!r} is sparse, and ranks exchange dense ones: with parallel= write "
                f"torch.nn.{type(module).__name__}(..., sparse=False)."
            )


def digests(state: State) -> dict[str, str]:
    """A few bytes for each tensor that a State holds between batches."""
    result = {}
    for kind in ("params", "buffers", "opt_state", "algorithm_state", "loss_scale"):
        paths, leaves, _ = optree.tree_flatten_with_path(getattr(state, kind), namespace=NAMESPACE)
        for path, leaf in zip(paths, leaves, strict=True):
            where = kind + "".join(f"[{entry!r}]" for entry in path)
            if is_sharded(leaf):
                result[where] = f"{tuple(leaf.shape)} {leaf.dtype} in parts"  # each rank has another one
            else:
                result[where] = _digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)
    return result


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    numbers = flat.view(torch.uint8) if flat.numel() else flat
    digest = hashlib.blake2b(bytes(numbers.untyped_storage())[: numbers.numel()], digest_size=8).hexdigest()
    return f"{tuple(tensor.shape)} {tensor.dtype} with digest {digest}"


def _model(state: State) -> dict[str, str]:
    tensors = [("params", state.params), ("buffers", state.buffers)]
    shapes = {
        f"{kind}[{name!r}]": f"{tuple(tensor.shape)} {tensor.dtype}"
        for kind, some in tensors
        for name, tensor in some.items()
    }
    return {"the model": type(state.model.skeleton).__name__, **shapes, "trained": str(list(state.model.trainable))}


def _counts(state: State) -> str:
    t = state.timestamp
    return f"{t}, sample {t.sample}, batch {t.batch_in_epoch} in its epoch"


def _without_addresses(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _short(value: str) -> str:
    return value if len(value) <= 200 else f"{value[:200]} ..."


def refuse_other_data(talk: Ranks, by_rank: list[tuple[float, ...]], where: str, *counted: str) -> None:
    """Refuse unequal data on ranks that each take their part of it.

    Args:
        by_rank: for each rank some counts, then the samples of whole batches, and a checksum of their indices.
        where: the place, for the error.
        counted: formats of the counts.

    Raises:
        DistributedError: they differ; names the ranks, and the two numbers.
    """
    if all(row == by_rank[0] for row in by_rank):
        return
    texts = (*counted, "{} samples")
    for column, text in enumerate(texts):
        numbers = [int(row[column]) for row in by_rank]
        if len(set(numbers)) > 1:
            stand = talk.stand([f"given {text.format(number)}" for number in numbers], ("was", "were"))
            break
    else:
        unlike = [rank for rank, row in enumerate(by_rank) if row != by_rank[0]]
        stand = f"{named(unlike)} took other samples than rank 0 from the dataset, or in another order"
    raise DistributedError(
        f"{where} the data differs between ranks: {stand}. Each batch is split over the ranks, so every rank needs "
        "the same data, in the same order; where each has data of its own, write "
        "parallel=pl.distributed.Parallel(data='own')."
    )


def refuse_unequal_data(talk: Ranks, by_rank: list[tuple[float, ...]], batch: int) -> None:
    """Refuse ranks of one data rank that were given other data.

    Raises:
        DistributedError: names two of them.
    """
    for data_rank, ranks in enumerate(talk.layout.ranks):
        first = by_rank[ranks[0]]
        for rank in ranks[1:]:
            row = by_rank[rank]
            if (row[:4], row[8]) != (first[:4], first[8]):
                raise DistributedError(
                    f"in batch {batch} rank {rank} was given other samples than rank {ranks[0]}: both are "
                    f"data rank {data_rank}, and compute one model on one part of the batch, so they pass the same "
                    "data, in the same order: that of pl.distributed.data_rank()."
                )


class Buffers:
    """Averages the buffers to which forwards write, so that they are equal on all ranks after a batch.

    Args:
        talk: the ranks.
    """

    def __init__(self, talk: Ranks) -> None:
        self._talk = talk
        # The names of those that were written to so far; None before the first batch of the call.
        self._written: frozenset[str] | None = None
        self._epoch: int | None = None

    def averaged(self, state: State, before: FrozenDict[str, Tensor], weights: Sequence[float]) -> State:
        """The State with buffers averaged by the weights of the ranks.

        Args:
            state: after the gradients.
            before: the buffers before the batch.
            weights: of each rank's part of the batch.
        """
        talk = self._talk
        self._refuse_reshaped(state, before)
        names = self._names_written(state, before)
        if not names:
            return state
        everything = sum(weights)
        share = weights[talk.data_rank] / everything if everything else 1.0 / talk.data_ranks
        floats = [name for name in names if state.buffers[name].is_floating_point()]
        rest = [name for name in names if name not in floats]
        agreed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(state.buffers[name].dtype for name in floats):
            alike = [name for name in floats if state.buffers[name].dtype is dtype]
            tensors = [state.buffers[name] for name in alike]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            wide = flat.double() if is_wide(flat) else flat.float()
            # A rank without samples may hold what is no number, which 0 times it would not be either.
            total = talk.sum(wide * share if share else torch.zeros_like(wide)).to(dtype)
            parts = torch.split(total, [tensor.numel() for tensor in tensors])
            agreed |= zip(
                alike, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)], strict=True
            )
        first = talk.layout.first_of(range(talk.size))
        source = next((first[data_rank] for data_rank, weight in enumerate(weights) if weight > 0), first[0])
        agreed |= zip(rest, talk.broadcast([state.buffers[name] for name in rest], source), strict=True)
        return state.replace(
            buffers=FrozenDict((name, agreed.get(name, tensor)) for name, tensor in state.buffers.items())
        )

    def _refuse_reshaped(self, state: State, before: FrozenDict[str, Tensor]) -> None:
        """
        Raises:
            ModelError: a forward changed the shape or dtype of a buffer, removed one, or registered one after the first
                batch of the call.
        """
        result = None
        for name, tensor in state.buffers.items():
            old = before.get(name)
            if old is None and self._written is not None:
                result = f"registered the buffer {name!r}, which the first batch didn't"
            elif old is not None and (old.shape != tensor.shape or old.dtype is not tensor.dtype):
                result = f"changed the buffer {name!r} from {shape_and_dtype(old)} to {shape_and_dtype(tensor)}"
        removed = [name for name in before if name not in state.buffers]
        if removed:
            result = f"removed the buffer {removed[0]!r}"
        if result is not None:
            raise ModelError(
                f"rank {self._talk.rank} of {self._talk.size}: a forward of batch {state.timestamp.batch} {result}. "
                "Ranks average buffers, which therefore are the same on all, and of one shape, after the first batch. "
                "Register a buffer of the full size in __init__ and write into it, or train on one rank."
            )

    def _refuse_unequal(self, state: State) -> None:
        """
        Raises:
            DistributedError: a forward has registered a buffer on one rank, and not or of another shape on another one.
        """
        shapes = {name: shape_and_dtype(tensor) for name, tensor in state.buffers.items()}
        difference = _difference(self._talk.gather(shapes), "None")
        if difference is not None:
            rank, name, shape, first = difference
            raise DistributedError(
                f"after the forward of batch {state.timestamp.batch} the buffer {name!r} is {shape} on rank "
                f"{rank} and {first} on rank 0. Ranks average buffers, which therefore have one shape: "
                "register it with that shape in __init__."
            )

    def _names_written(self, state: State, before: FrozenDict[str, Tensor]) -> list[str]:
        """The buffers that are cheap, or to which forwards write in the first batch of an epoch; the same on all."""
        epoch = state.timestamp.epoch
        if self._written is None:
            # A forward of the first batch may have registered some, on one rank and not on another.
            self._refuse_unequal(state)
            self._written = frozenset()
        if not state.buffers:
            return []
        if epoch != self._epoch:
            changed = [
                name
                for name, tensor in state.buffers.items()
                if _is_cheap(tensor) or name not in before or not torch.equal(tensor, before[name])
            ]
            self._written |= frozenset(name for names in self._talk.gather(changed) for name in names)
            self._epoch = epoch
        return [name for name in state.buffers if name in self._written]


def _is_cheap(buffer: Tensor) -> bool:
    """Whether it costs little to exchange a buffer in every batch, whether or not something is written to it."""
    return buffer.numel() <= (4096 if buffer.is_floating_point() else 1)


def is_wide(tensor: Tensor) -> bool:
    """Whether sums of such numbers are in float64, and not in float32."""
    return tensor.dtype in (torch.float64, torch.int64)
