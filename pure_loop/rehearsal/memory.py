"""The memory of a run, in bytes: what a State holds, and what a forward keeps for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pure_loop._internal.sizes import bytes_of
from pure_loop.data.batch import tensors_in
from pure_loop.stages import Stages
from pure_loop.state import State, raw_opt_state

__all__ = ["activations", "memory_of", "memory_per_rank"]

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
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, _same):
        after = stages.loss(stages.forward(state))
    size = sum(int(storage.nbytes()) for key, storage in kept.items() if key not in outside)
    state.model.release()
    del after
    return size


def _same(tensor: Tensor) -> Tensor:
    return tensor


def memory_of(state: State, batch: Any, kept: int | None) -> dict[str, int]:
    """The bytes of a run by what they hold.

    Args:
        state: after a step.
        batch: of training.
        kept: what a forward keeps; None: not measured.
    """
    trained = [state.params[name] for name in state.model.trainable]
    held = {
        "parameters": bytes_of(dict(state.params)),
        "buffers": bytes_of(dict(state.buffers)),
        "optimizer state": bytes_of(raw_opt_state(state)),
        "algorithm state": bytes_of(dict(state.algorithm_state)),
        "gradients": bytes_of(trained),
        "batch": bytes_of(list(tensors_in(batch))),
    }
    return held if kept is None else {**held, "activations": kept}


def memory_per_rank(
    memory: Mapping[str, int], ranks: int, samples: int, microbatch: int, *, sharded: bool
) -> dict[str, int]:
    """The same on each of several ranks, of which each takes its part of a batch.

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
