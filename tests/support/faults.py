"""Faults: one bit that flips once, in one of the runs of one batch, at a place of the computation."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import from_local, local_tensor
from pure_loop.frozendict import FrozenDict
from tests.support.problem import points

__all__ = ["INTEGERS", "PLACES", "Fault", "bits_of", "fit", "flipped"]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of the computation, and the stage that a difference is to be found after at the earliest.
PLACES = {
    "inputs": "flip",
    "inputs of the forward": "forward",
    "activation": "forward",
    "parameter read by the forward": "forward",
    "outputs in the loss": "loss",
    "loss": "flip",
    "gradient in the backward": "backward",
    "gradient": "flip",
    "gradient of the batch": "flip",
    "gradient in the clipping": "gradients: scale, clip",
    "parameter": "flip",
    "optimizer state": "flip",
    "new parameter": "optimizer",
    "new optimizer state": "optimizer",
}


def flipped(tensor: Tensor, choice: random.Random) -> Tensor:
    """A copy with one bit flipped."""
    tensor = tensor.detach()
    copy = local_tensor(tensor).clone().contiguous()
    size = 8 * copy.element_size()
    integers = copy.view(INTEGERS[copy.element_size()]).view(-1)
    place, bit = choice.randrange(integers.numel()), choice.randrange(size)
    mask = 1 << bit if bit < size - 1 or size == 8 else -(1 << bit)
    integers[place] ^= mask
    return from_local(tensor, copy)


class _Flip(torch.autograd.Function):
    """The identity, whose output or gradient has a flipped bit."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward: bool, choice: random.Random) -> Tensor:  # type: ignore[override]
        context.choice = None if forward else choice
        return flipped(x, choice) if forward else x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient if context.choice is None else flipped(gradient, context.choice), None, None


@attrs.define(eq=False)
class Fault:
    """One flipped bit.

    Attributes:
        place: one of :data:`PLACES`.
        run: in which run of the batch, from 1; 0: in none.
        batch: in which.
        seed: says which number and which bit, and in which of several microbatches.
        microbatches: of a batch.
        has_fired: whether it is over.
    """

    place: str
    run: int
    batch: int
    seed: int
    microbatches: int = 1
    has_fired: bool = False
    _runs: int = 0
    _passed: int = 0
    _wait: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._wait = random.Random(-1 - self.seed).randrange(self.microbatches)

    def begin(self, batch: int) -> None:
        """A run of a batch begins."""
        self._runs = self._runs + 1 if batch == self.batch else 0
        self._passed = 0

    def is_due(self, place: str) -> bool:
        """Whether the bit flips here and now."""
        if place != self.place or self.has_fired or self._runs != self.run or not self.run:
            return False
        self._passed += 1
        once = PLACES[place] in ("optimizer", "gradients: scale, clip") or place in _ONCE
        if not once and self._passed <= self._wait:
            return False
        self.has_fired = True
        return True

    def of(self, place: str, tensor: Tensor) -> Tensor:
        """The tensor, or a copy with the flipped bit."""
        return flipped(tensor, random.Random(self.seed)) if self.is_due(place) else tensor

    def one_of(self, place: str, mapping: Any) -> Any:
        """The mapping, with one of its tensors flipped."""
        names = [name for name, value in mapping.items() if isinstance(value, Tensor) and value.numel()]
        if not names or not self.is_due(place):
            return mapping
        name = random.Random(self.seed).choice(names)
        return FrozenDict({**mapping, name: flipped(mapping[name], random.Random(self.seed))})


_ONCE = {"inputs", "gradient of the batch", "parameter", "optimizer state"}


class Net(nn.Module):
    """Layers with buffers and random numbers, in which a fault may be."""

    def __init__(self, fault: list[Fault]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.2)
        self._fault = fault

    def forward(self, x: Tensor) -> Tensor:
        (fault,) = self._fault
        x = fault.of("inputs of the forward", x)
        weight = self.first.weight
        if fault.is_due("parameter read by the forward"):
            weight = _Flip.apply(weight, True, random.Random(fault.seed))  # type: ignore[no-untyped-call]
        x = functional.linear(x, weight, self.first.bias)
        for place in ("activation", "gradient in the backward"):
            if fault.is_due(place):
                x = _Flip.apply(x, place == "activation", random.Random(fault.seed))  # type: ignore[no-untyped-call]
        out: Tensor = self.last(torch.relu(self.drop(self.norm(x))))
        return out


def _algorithm(fault: Fault) -> pl.Algorithm:
    def begin(state: pl.State) -> pl.State:
        fault.begin(state.timestamp.batch)
        batch = state.batch
        return (
            state.replace(batch=(flipped(batch[0], random.Random(fault.seed)), batch[1]))
            if fault.is_due("inputs")
            else state
        )

    def after_loss(state: pl.State) -> pl.State:
        if not fault.is_due("loss"):
            return state
        value: Any = state.loss
        return state.replace(loss=value + (flipped(value, random.Random(fault.seed)) - value.detach()))

    def after_backward(state: pl.State) -> pl.State:
        return state.replace(grads=fault.one_of("gradient", state.grads))

    def after_batch(state: pl.State) -> pl.State:
        state = state.replace(grads=fault.one_of("gradient of the batch", state.grads))
        state = state.replace(params=fault.one_of("parameter", state.params))
        return state.replace(opt_state=_in_memory(fault, "optimizer state", state.opt_state))

    handlers = {
        Event.BATCH_START: begin,
        Event.AFTER_LOSS: after_loss,
        Event.AFTER_BACKWARD: after_backward,
        Event.AFTER_TRAIN_BATCH: after_batch,
    }
    return pl.Algorithm("flip", handlers)


def _in_memory(fault: Fault, place: str, memory: Any) -> Any:
    leaves, structure = optree.tree_flatten(memory, namespace="pure_loop")
    flips = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if not fault.is_due(place):
        return memory
    index = random.Random(fault.seed).choice(flips)
    leaves[index] = flipped(leaves[index], random.Random(fault.seed))
    return optree.tree_unflatten(structure, leaves)


def _optimizer(fault: Fault, optimizer: pl.optim.Optimizer) -> pl.optim.Optimizer:
    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        new, memory = optimizer.update(grads, memory, params, timestamp)
        return fault.one_of("new parameter", new), _in_memory(fault, "new optimizer state", memory)

    return attrs.evolve(optimizer, update=update)


def fit(fault: Fault, make: Callable[..., Any] = pl.fit, **options: Any) -> Any:
    """A stream with a fault in it."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if fault.is_due("outputs in the loss"):
            outputs = _Flip.apply(outputs, True, random.Random(fault.seed))  # type: ignore[no-untyped-call]
        return functional.cross_entropy(outputs, targets)

    def clip(grads: Any, params: Any) -> Any:
        return fault.one_of("gradient in the clipping", grads)

    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": pl.optim.adamw(lr=0.1),
        "max_duration": "3ba",
        "clip_grad": clip,
        "algorithms": [],
        **options,
    }
    settings["algorithms"] = [_algorithm(fault), *settings["algorithms"]]
    settings["optimizer"] = _optimizer(fault, settings["optimizer"])
    return make(Net([fault]), points(size=8, seed=1), **settings)


def bits_of(state: pl.State) -> dict[str, Any]:
    """The bits of each leaf of a State but those of time, with one NaN for all."""
    tree: Any = state
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace="pure_loop")
    passing = {"event", "position", "timestamp", "previous_timestamp"}
    kept = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if path[0] not in passing]
    return {"/".join(map(str, path)): _bits(leaf) for path, leaf in kept}


def _bits(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = local_tensor(leaf).detach()
    leaf = torch.where(leaf.isnan(), torch.nan, leaf) if leaf.is_floating_point() else leaf
    return leaf.reshape(-1).cpu().view(torch.uint8).numpy().tobytes()
