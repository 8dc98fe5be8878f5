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
# What is of a rank's part of a batch.
_OF_SAMPLES = ("batch", "activations")


def activations(state: State, stages: Stages) -> int:
    """The bytes that forward and loss of the State's microbatch keep for the backward, parameters and batch left out.

    Args:
        state: of a BEFORE_FORWARD.
        stages: those of the run.
    """
    outside = {_address(tensor) for tensor in (*state.params.values(), *tensors_in(state.microbatch))}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, _same):
        after = stages.loss(stages.forward(state))
    size = sum(size for address, size in kept.items() if address not in outside)
    state.model.release()
    del after
    return size


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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


def memory_per_rank(memory: Mapping[str, int], ranks: int, samples: int, *, sharded: bool) -> dict[str, int]:
    """The same on each of several ranks, of which each takes its part of a batch.

    Args:
        memory: on one rank.
        ranks: how many.
        samples: of the batch.
        sharded: whether parameters, gradients and states are sharded; if not, each rank has all of them. What
            ``fully_shard`` gathers for one group of layers at a time is not in it.
    """
    share = -(-samples // ranks) / max(samples, 1)
    result = {}
    for name, size in memory.items():
        if sharded and name in _SHARDED:
            result[name] = -(-size // ranks)
        else:
            result[name] = round(size * share) if name in _OF_SAMPLES else size
    return result
