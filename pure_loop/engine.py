"""The engine: where forwards and backwards run, and what ranks have to agree on. Here: one rank, eagerly.

The stages and the loop ask an engine whatever may depend on there being several ranks, and so don't know whether there
are. :mod:`pure_loop.distributed` has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from pure_loop._autograd import add_gradient, gradient_of, zero_unless
from pure_loop._ownership import held_once
from pure_loop._weights import Weights
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict

if TYPE_CHECKING:
    from pure_loop.metrics import Metric
    from pure_loop.model import ModelDef
    from pure_loop.optim import Optimizer
    from pure_loop.sources import Part, Source
    from pure_loop.state import State

__all__ = ["ONE_RANK", "Engine", "are_large", "writable"]

T = TypeVar("T")


class Engine:
    """One rank: nothing has to be agreed on.

    Attributes:
        rank: this process among the ranks, part of every seed that must differ between them.
        ranks: how many there are.
        padding: whether the batch at hand only keeps this rank company: it has samples, and none of them counts.
        in_parts: the fields of a State, besides its parameters, of which a rank holds parts. No graph takes them.
    """

    rank = 0
    ranks = 1
    padding = False
    in_parts: tuple[str, ...] = ()

    def begin(self, state: State, settings: Mapping[str, Any]) -> State:
        """Meet the others before INIT, and show what rank 0 begins with."""
        return state

    def start(self, state: State, settings: Mapping[str, Any], *, fresh: bool) -> State:
        """Meet the others, see that all are about to do the same, and start from the same State."""
        return state

    def next_batch(
        self,
        state: State,
        part: Part,
        samples: int,
        tokens: int,
        seconds: Callable[[], float],
        event: Event,
        source: Source,
    ) -> Any:
        """The batch that this rank goes on with; END comes for all at once.

        Args:
            state: the State before it.
            part: what this rank's data gave: its part of a batch, or END, which doesn't count.
            samples, tokens: in it.
            seconds: how long it is since this was asked last.
            event: which comes next if there is a batch.
            source: where it comes from.
        """
        return part.batch

    def length(self, length: int | None, uneven: str | None) -> int | None:
        """How many batches an epoch has for all, where this rank's data has so many."""
        return length

    def counts(self, samples: int, tokens: int, seconds: Callable[[], float]) -> tuple[int, int, float]:
        """Samples and tokens of the batch, over all ranks, and how long it took: the same on all.

        Args:
            samples, tokens: in this rank's part.
            seconds: how long it is since this was asked last.
        """
        return samples, tokens, seconds()

    def meet(self, state: State, event: Event) -> None:
        """Wait until all ranks are here."""

    def weigh(
        self, weights: Sequence[float | Tensor], state: State, *, split: bool, summed: bool
    ) -> tuple[Weights, int]:
        """What each microbatch counts in the whole batch, and how many every rank goes through.

        Args:
            weights: of each microbatch.
            state: the State before them.
            split: whether the batch was split at all: if not, there is one on every rank.
            summed: whether the loss is a sum, and not a mean.
        """
        found = Weights.of_sum(len(weights)) if summed else Weights.of(weights, state.timestamp.batch)
        return found, len(weights)

    def divisor(self, weights: Weights) -> Any:
        """What the sum of gradients is divided by."""
        return weights.divisor

    def count(self, pieces: int, state: State) -> int:
        """How many microbatches of an evaluation every rank goes through, if this one has so many."""
        return pieces

    def leaves(self, state: State, *, index: int, last: bool) -> FrozenDict[str, Tensor]:
        """The parameters that a forward differentiates by.

        Args:
            state: the one that has them.
            index: the microbatch's number in its batch.
            last: whether it is the last one, after which ranks exchange.
        """
        return state.model.leaves(state.params)

    def apply(
        self,
        state: State,
        function: Callable[[nn.Module], T],
        params: FrozenDict[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor], ModelDef]:
        """Call ``function(module)`` with these parameters; gives its result, and buffers and structure after it."""
        return state.model.call(function, params, state.buffers, training=training, hold=hold)

    def parameters(self) -> Iterable[Tensor] | None:
        """Parameters of the engine's own that stand for those of a State in a graph; None where it can't tell."""
        return ()

    def shares(self, params: FrozenDict[str, Tensor]) -> bool:
        """Whether each of these parameters that is trained has its memory in one more tensor, of the engine's own."""
        return False

    def gradient(
        self,
        state: State,
        loss: Tensor | None,
        seed: Tensor | float,
        *,
        alone: bool = False,
        counts: Tensor | None = None,
    ) -> tuple[Any, ...] | None:
        """The gradient of this microbatch and of those before it; None where it is known after the last one only.

        Args:
            state: with the gradients of the microbatches before, and the leaves that the forward went through.
            loss: what is differentiated; None for a microbatch that counts nothing.
            seed: what the loss is multiplied by.
            alone: whether nobody but this State has the mapping of the gradients before, which it has no more then.
            counts: where only the device knows whether the microbatch counts: whether it does; bool, shape (). Where it
                does not, its gradient is 0, though that of its loss may be NaN.
        """
        leaves, names = state.params, state.model.trainable
        inputs = list(leaves.values()) if len(names) == len(leaves) else [leaves[name] for name in names]
        # By name: who calls the stages himself may have made a mapping in another order.
        before = None if state._grads is None else [state._grads[name] for name in names]
        if loss is None:
            return tuple([None] * len(inputs) if before is None else before)
        found: tuple[Any, ...]
        if alone and before is not None and writable(before):
            found = add_gradient(loss, inputs, before, seed, counts)
            if all(gradient is None for gradient in found):
                return found
            return tuple(map(_first, found, before))
        found = gradient_of(loss, inputs, seed)
        if counts is not None:
            found = tuple([None if each is None else zero_unless(counts, each) for each in found])
        if before is None or (found[0] is None and all(gradient is None for gradient in found)):
            return found
        return _sum(before, found)

    def alone(self) -> Engine:
        """The engine of what this rank does by itself, between two exchanges: what a graph can hold."""
        return self

    def gathered(self, state: State) -> State:
        """The State that :meth:`alone` computes with: with whole parameters. All ranks ask for it."""
        return state

    def add_up(self, ended: list[State], before: State, *, last: bool) -> State:
        """The State after a microbatch, from what a rank found :meth:`alone`: after the last one with the gradients.

        Args:
            ended: the State with this rank's gradients, of this microbatch and, unless the engine adds them up, of
                those before; in a list, out of which it is taken, so that nothing keeps its tensors alive.
            before: what was :meth:`gathered`.
            last: whether ranks exchange: no other microbatch follows in this batch.
        """
        return ended.pop()

    def settle(self, state: State, loss: Any) -> Any:
        """The loss of the whole batch from this rank's share of it."""
        return loss

    def agree(self, state: State, before: FrozenDict[str, Tensor]) -> State:
        """The State of a batch on which all ranks agree: buffers, which forwards wrote to, are averaged.

        Args:
            state: after the gradients.
            before: the buffers before the batch.
        """
        return state

    def memory(self, optimizer: Optimizer, trained: FrozenDict[str, Tensor]) -> Any:
        """The optimizer's memory of nothing yet."""
        return optimizer.init(trained)

    def update(self, optimizer: Optimizer, state: State, trained: FrozenDict[str, Tensor]) -> Any:
        """What the optimizer makes of the parameters and its memory."""
        return optimizer.update(state._grads, state.opt_state, trained, state.timestamp)

    def overwrite(
        self,
        optimizer: Optimizer,
        state: State,
        trained: FrozenDict[str, Tensor],
        memory: Any,
        found_inf: Tensor | None = None,
    ) -> Any:
        """The same, written where the parameters and the memory are; both were taken out of the State.

        Where ``found_inf``, if there is one, is 1 on the device, everything stays as it is.
        """
        assert optimizer.overwrite is not None
        options = {} if found_inf is None else {"found_inf": found_inf}
        return optimizer.overwrite(state._grads, memory, trained, state.timestamp, **options)

    def local(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """What this rank holds of these tensors."""
        return [tensor for tensor in tensors if tensor is not None]

    def anywhere(self, found: Tensor) -> Tensor:
        """1 where any rank found something; float32, shape (1,)."""
        return found

    def measured(self, metrics: Sequence[Metric], accumulated: dict[str, Any], state: State) -> dict[str, Any]:
        """The accumulators of an evaluation over all ranks."""
        return accumulated

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        """The stream ends with this error: tell the others; or raise one that says which of them failed."""

    def close(self) -> None:
        """Leave the others."""


ONE_RANK = Engine()

# Numbers in gradients from which it takes less to ask who has their memory than to take other memory.
_LARGE = 2**18


def are_large(gradients: Iterable[Tensor | None]) -> bool:
    """Whether to ask who has their memory takes less than to take other memory."""
    numbers = 0
    for each in gradients:
        if each is not None:
            numbers += each.numel()
            if numbers >= _LARGE:
                return True
    return False


def writable(gradients: list[Any]) -> bool:
    """Whether these gradients, which stand in one mapping and are large, can be written to: nobody else has them."""
    if not are_large(gradients) or _any_sparse([each for each in gradients if each is not None]):
        return False
    return held_once(gradients, mappings=1)


_is_sparse = attrgetter("is_sparse")


def _any_sparse(gradients: Iterable[Any]) -> bool:
    """Whether one of them is sparse: its numbers are in two tensors of other sizes."""
    return any(map(_is_sparse, gradients))


def _first(one: Any, other: Any) -> Any:
    return other if one is None else one


def _added(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients: torch adds a sparse one to a dense one, and not the other way round."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def _sum(before: list[Any], found: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(a is None or b is None for a, b in zip(before, found, strict=True)):
        return tuple(b if a is None else a if b is None else _added(a, b) for a, b in zip(before, found, strict=True))
    if _any_sparse(before) or _any_sparse(found):
        return tuple(map(_added, before, found))
    # Somebody has those before. What was just found is nobody's, if autograd didn't pass on what somebody has.
    if are_large(found) and held_once(found):
        torch._foreach_add_(found, before)
        return found
    return tuple(torch._foreach_add(before, list(found)))
