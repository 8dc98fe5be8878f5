"""The size of a run before it: its number of batches, timestamps within it, and bytes by what they hold."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop._internal.tree_ops import bytes_of
from pure_loop.data.batch import tensors_in
from pure_loop.entry.assembly import Assembly
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import rate_at
from pure_loop.recorder import numbers_of, strengths_of
from pure_loop.rehearsal.report import Place
from pure_loop.stages import Stages
from pure_loop.state import State, raw_opt_state
from pure_loop.time import Time, Timestamp, TimeUnit


@attrs.frozen
class Length:
    """How long a run is, if each batch is as its first one.

    Attributes:
        batches: in all, from the start of training; None: not known.
        per_epoch: in an epoch; None: not known.
        samples, tokens: of a batch.
        start: the timestamp at which the run begins.
    """

    batches: int | None
    per_epoch: int | None
    samples: int
    tokens: int
    start: Timestamp

    @classmethod
    def of(cls, assembly: Assembly, samples: int, tokens: int) -> Length:
        """The length of a call of ``fit`` with so many samples and tokens in its first batch."""
        end, per_epoch = assembly.plan.settings.max_duration, assembly.fit.source.length
        batches = _batches(end, assembly.fit.iteration_length, per_epoch, samples, tokens)
        return cls(batches, per_epoch, samples, tokens, assembly.plan.state.timestamp)

    def at(self, batch: int) -> Timestamp:
        """The timestamp at which this batch starts, counted from the start of training."""
        per_epoch = self.per_epoch
        epoch = batch // per_epoch if per_epoch else 0
        inside = batch - epoch * (per_epoch or 0)
        return self.start.replace(
            epoch=epoch,
            batch=batch,
            sample=batch * self.samples,
            token=batch * self.tokens,
            batch_in_epoch=inside,
            sample_in_epoch=inside * self.samples,
            token_in_epoch=inside * self.tokens,
            epoch_in_iteration=0,
            batch_in_iteration=inside,
            token_in_iteration=inside * self.tokens,
        )

    def moments(self) -> Mapping[str, Timestamp]:
        """Timestamps at the start, a quarter, the middle and the end of the run."""
        end = self.start.max_duration
        first = self.start.batch
        if self.batches is not None and self.batches > first:
            last = self.batches - 1
            at = {name: first + (last - first) * part // 4 for name, part in _PARTS.items()}
            return {name: self.at(batch) if batch > first else self.start for name, batch in at.items()}
        if end is not None and end.unit is TimeUnit.SECOND:
            return {
                name: self.start.replace(total_seconds=float(end.value * part / 4)) for name, part in _PARTS.items()
            }
        if end is not None and end.unit is TimeUnit.EPOCH:  # of unknown length
            epochs = {name: max(end.value - 1, 0) * part // 4 for name, part in _PARTS.items()}
            return {name: self.start.replace(epoch=int(e), batch=int(e)) for name, e in epochs.items()}
        return {"start": self.start}


_PARTS = {"start": 0, "quarter": 1, "middle": 2, "end": 4}


def _batches(end: Time, iteration: Time | None, per_epoch: int | None, samples: int, tokens: int) -> int | None:
    value, unit = end.value, end.unit
    if unit is TimeUnit.ITERATION and iteration is not None:
        value, unit = value * iteration.value, iteration.unit
    size = {TimeUnit.EPOCH: 1 / per_epoch if per_epoch else 0, TimeUnit.BATCH: 1, TimeUnit.SAMPLE: samples}.get(unit)
    if unit is TimeUnit.EPOCH:
        return None if per_epoch is None else int(value) * per_epoch
    if unit is TimeUnit.TOKEN:
        size = tokens
    return math.ceil(value / size) if size else None


def try_schedules(assembly: Assembly, length: Length, place: Place) -> str:
    """Evaluate every schedule at the start, a quarter, the middle and the end of the run; the learning rates in words.

    A value that is out of range, and what a schedule raises, is a failure that names the schedule and the place.
    """
    settings = assembly.plan.settings
    rates: dict[str, list[str]] = {}
    strengths = {**strengths_of(settings.algorithms), **numbers_of(settings.optimizer)}
    for name, timestamp in length.moments().items():
        for label, optimizer in _parts(settings.optimizer).items():
            with place.collecting(f"schedule of {label}, {name} of the run (batch {timestamp.batch})"):
                rates.setdefault(label, []).append(f"{rate_at(optimizer.name, optimizer.lr, timestamp):.3g}")
        for strength_name, strength in strengths.items():
            with place.collecting(f"schedule of {strength_name}, {name} of the run (batch {timestamp.batch})"):
                strength(timestamp)
    return "; ".join(f"{label} {' '.join(values)}" for label, values in rates.items())


def _parts(optimizer: Optimizer, label: str = "learning rate") -> dict[str, Optimizer]:
    if not optimizer.parts:
        return {label: optimizer}
    result: dict[str, Optimizer] = {}
    for name, part in optimizer.parts.items():
        result |= _parts(part, f"{label} of {name}")
    return result


# What "shard" holds a part of on each rank.
_SHARDED = ("parameters", "gradients", "optimizer state", "algorithm state")


def activations(state: State, stages: Stages) -> int:
    """The bytes that forward and loss of the State's microbatch keep for the backward, parameters and batch left out.

    Args:
        state: of a BEFORE_FORWARD.
        stages: those of the run.
    """
    # Storages are objects of their own, as long as they live; those of the meta device have no address.
    tensors = (*state.params.values(), *tensors_in(state.microbatch))
    outside = {id(storage): storage for storage in map(Tensor.untyped_storage, tensors)}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, _same):
        after = stages.loss(stages.forward(state))
    size = sum(int(storage.nbytes()) for key, storage in storages.items() if key not in outside)
    state.model.release()
    del after
    return size


def _same(tensor: Tensor) -> Tensor:
    return tensor


def memory_of(state: State, batch: Batch, activation_bytes: int | None) -> dict[str, int]:
    """The bytes of a run by what they hold.

    Args:
        state: after a step.
        batch: of training.
        activation_bytes: what a forward keeps; None: not measured.
    """
    trained = [state.params[name] for name in state.model.trainable]
    sizes = {
        "parameters": bytes_of(dict(state.params)),
        "buffers": bytes_of(dict(state.buffers)),
        "optimizer state": bytes_of(raw_opt_state(state)),
        "algorithm state": bytes_of(dict(state.algorithm_state)),
        "gradients": bytes_of(trained),
        "batch": bytes_of(list(tensors_in(batch))),
    }
    return sizes if activation_bytes is None else {**sizes, "activations": activation_bytes}


def memory_per_rank(
    memory: Mapping[str, int], ranks: int, samples: int, microbatch: int, *, sharded: bool
) -> dict[str, int]:
    """The bytes of a run on each of several ranks, of which each takes its part of a batch.

    Args:
        memory: on one rank.
        ranks: how many.
        samples: of the batch.
        microbatch: the samples of a microbatch, of which the activations are.
        sharded: whether parameters, gradients and states are sharded; if not, each rank has all of them. What
            ``fully_shard`` gathers for one group of layers at a time is not in it.
    """
    part = -(-samples // ranks)
    shares = {"batch": part / max(samples, 1), "activations": min(part, microbatch) / max(microbatch, 1)}
    result = {}
    for name, size in memory.items():
        if sharded and name in _SHARDED:
            result[name] = -(-size // ranks)
        else:
            result[name] = round(size * shares.get(name, 1))
    return result
