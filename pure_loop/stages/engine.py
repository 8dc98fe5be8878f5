"""The engine: where forwards and backwards run, and what ranks have to agree on. Here: one rank, eagerly.

The stages and the loop call an engine for everything that may differ with several ranks, so that their code is the same
for one and for many. Its methods, here those of one rank, are of three kinds: data (the next batch, and its counts),
computations (gradient and update) and agreement (what ranks exchange). :mod:`pure_loop.distributed` has the engines of
several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pure_loop._internal.autograd import add_gradient, gradient_of, zero_unless
from pure_loop._internal.pytree import Batch, PyTree
from pure_loop._internal.weights import Weights
from pure_loop.data.batch import to_device
from pure_loop.data.group import END
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import time_of_step
from pure_loop.stages.references import LARGE, are_unaliased
from pure_loop.state import Loss, State, raw_opt_state, raw_params

if TYPE_CHECKING:
    from pure_loop.data.position import Position
    from pure_loop.data.source import Source
    from pure_loop.metrics import Metric
    from pure_loop.model.model import ModelDef
    from pure_loop.optim import Optimizer
    from pure_loop.task import Task

T = TypeVar("T")


class Engine:
    """One rank, eagerly: nothing has to be agreed on, and nothing is sharded.

    Attributes:
        padding: whether the current batch is padding: it has samples, all of weight 0, because other ranks still have
            batches.
        repeats: whether the current microbatch is a repeated one of weight 0, so that all ranks run equally many.
        in_parts: the fields of a State, besides its parameters, of which a rank holds shards. No graph takes them.
        rank: the number of this rank's data; part of every seed that must differ between ranks with other data.
        ranks: how many parts a batch has. Fewer than there are ranks, where several compute one model together.
        global_rank: of this process.
        world_size: the number of ranks.
        exchanges: whether batches, forwards, gradients and looks for NaN may wait for other ranks, so that all have to
            ask for them together.
        cuts_layers: whether layers are cut over ranks, which then exchange inside of them.
        replicates: whether other ranks have the same parameters.
    """

    padding = False
    repeats = False
    in_parts: tuple[str, ...] = ()
    rank = 0
    ranks = 1
    global_rank = 0
    world_size = 1
    exchanges = False
    cuts_layers = False
    replicates = False

    # Data: the batches of a rank, and their counts over all ranks.

    def next_batch(
        self, state: State, task: Task, source: Source, loaded: Batch, seconds: Callable[[], float], event: Event
    ) -> tuple[Batch, int, int] | None:
        """The batch of this rank on the device, and its samples and tokens; None at the end of the data, for all ranks.

        Args:
            state: the State before it.
            task: counts samples and tokens.
            source: of the batches.
            loaded: what it gave: a batch, this rank's part of one, or END.
            seconds: returns the seconds since its last call.
            event: the next event if there is a batch.
        """
        if loaded is END:
            return None
        device = next(iter(raw_params(state).values())).device
        batch = to_device(loaded, device, stays=source.keeps_pinned)
        # Where it comes from: on the device a count of numbers would wait for the batches before.
        return batch, task.samples(loaded), task.tokens(loaded)

    def positions(self, position: Position | None, tells: bool) -> PyTree:
        """Where the data of each rank's own stands after a batch; ``tells``: whether this rank's can say it."""
        return position

    def length(self, length: int | None, uneven: str | None) -> int | None:
        """The number of batches of an epoch on all ranks, where this rank's data has ``length``."""
        return length

    def counts(self, samples: int, tokens: int, seconds: Callable[[], float]) -> tuple[int, int, float]:
        """Samples and tokens of the batch over all ranks, and the seconds it took: equal on all ranks.

        Args:
            samples, tokens: in this rank's part.
            seconds: returns the seconds since its last call.
        """
        return samples, tokens, seconds()

    def weigh(
        self, weights: Sequence[float | Tensor], state: State, *, split: bool, summed: bool
    ) -> tuple[Weights, int]:
        """The weight of each microbatch in the whole batch, and the number of microbatches that every rank runs.

        Args:
            weights: of each microbatch.
            state: the State before them.
            split: whether the batch was split; if not, every rank has one microbatch.
            summed: whether the loss is a sum, and not a mean.
        """
        result = Weights.of_sum(len(weights)) if summed else Weights.of(weights, state.timestamp.batch)
        return result, len(weights)

    def counts_microbatch(self, index: int, pieces: int) -> bool:
        """Whether a microbatch counts; one that does not is there because other ranks have more of them.

        Args:
            index: its number.
            pieces: how many of the batch this rank has.
        """
        return True

    def divisor(self, weights: Weights) -> Any:
        """The divisor of the sum of gradients."""
        return weights.divisor

    def mean_loss(self, weights: Weights, losses: list[Loss]) -> Loss | None:
        """The loss of a batch from those of its microbatches; None: it is that of the last one, as it stands."""
        return cast("Loss | None", weights.mean_of(losses))

    def num_microbatches(self, pieces: int, state: State) -> int:
        """The number of microbatches of an evaluation that every rank runs, where this one has ``pieces``."""
        return pieces

    # The computations of a rank for a batch: forwards, gradients, and the update.

    def leaves(self, state: State, *, index: int, last: bool) -> FrozenDict[str, Tensor]:
        """The parameters that a forward differentiates by.

        Args:
            state: the one that has them.
            index: the microbatch's number in its batch.
            last: whether it is the last one, after which ranks exchange.
        """
        return state.model.leaves(raw_params(state), state.frozen)

    def apply(
        self,
        state: State,
        function: Callable[[nn.Module], T],
        params: FrozenDict[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor], ModelDef]:
        """Call ``function(module)`` with these parameters; returns its result, and buffers and structure after it."""
        return state.model.call(function, params, state.buffers, training=training, hold=hold)

    def parameters(self) -> Iterable[Tensor] | None:
        """The engine's own tensors that stand for parameters of a State in a graph; None: not known."""
        return ()

    def shares_storage(self, params: FrozenDict[str, Tensor]) -> bool:
        """Whether each of these parameters that is trained shares its storage with a tensor of the engine's own."""
        return False

    def gradient(
        self,
        state: State,
        loss: Tensor | None,
        seed: Tensor | float,
        *,
        in_place: bool = False,
        counts: Tensor | None = None,
    ) -> tuple[Tensor | None, ...] | None:
        """The gradient of this microbatch and of those before it; None where it is known after the last one only.

        It is by the parameters that are trained and not frozen, in the order of ``state.model.differentiated(frozen)``.

        Args:
            state: with the gradients of the microbatches before, and the leaves that the forward went through.
            loss: the tensor to differentiate; None for a microbatch of weight 0.
            seed: a factor of the loss.
            in_place: whether the accumulated gradients may be written to.
            counts: if only the device knows the weight: whether it is not 0; bool, shape (). If False, the gradient is
                0, though that of the loss may be NaN.
        """
        leaves, names = raw_params(state), state.model.differentiated(state.frozen)
        inputs = list(leaves.values()) if len(names) == len(leaves) else [leaves[name] for name in names]
        # By name: a caller of the stages may have made a mapping in another order.
        before = None if state._grads is None else [state._grads[name] for name in names]
        if loss is None:
            return tuple([None] * len(inputs) if before is None else before)
        total = before if in_place and before is not None and all(item is not None for item in before) else None
        if total is not None:
            result = add_gradient(loss, inputs, total, seed, counts)
        else:
            result = gradient_of(loss, inputs, seed)
            if counts is not None:
                result = tuple([None if item is None else zero_unless(counts, item) for item in result])
        if before is None or (result[0] is None and all(gradient is None for gradient in result)):
            return result
        if total is not None:
            return tuple(old if computed is None else computed for computed, old in zip(result, before, strict=True))
        if any(gradient is None or gradient.is_sparse for gradient in (*before, *result)):
            return tuple(map(_added, before, result))
        # The accumulated gradients are aliased. The new ones are not, unless autograd passed on a tensor that is.
        if sum(gradient.numel() for gradient in result) >= LARGE and are_unaliased(result):
            torch._foreach_add_(result, before)
            return result
        return tuple(torch._foreach_add(before, list(result)))

    def unsharded(self, state: State) -> State:
        """The State that :meth:`Engine.single_rank` computes with: parameters are whole. All ranks call it together."""
        return state

    def accumulate(self, state: State, before: State, *, last: bool) -> State:
        """The State after a microbatch that was computed by :meth:`Engine.single_rank`.

        Args:
            state: with this rank's gradients, of this microbatch and, unless the engine accumulates them, of those
                before; passed without another reference, so that nothing keeps its tensors alive.
            before: the result of :meth:`unsharded`.
            last: whether no other microbatch follows in this batch: ranks exchange, and the State has the gradients.
        """
        return state

    def init_opt_state(self, optimizer: Optimizer, trained: FrozenDict[str, Tensor]) -> PyTree:
        """The optimizer state before the first step."""
        return optimizer.init(trained)

    def update(self, optimizer: Optimizer, state: State, trained: FrozenDict[str, Tensor]) -> PyTree:
        """The new parameters and the new optimizer state."""
        timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
        return optimizer.update(state._grads, raw_opt_state(state), trained, timestamp)

    def overwrite(
        self,
        optimizer: Optimizer,
        state: State,
        trained: FrozenDict[str, Tensor],
        opt_state: PyTree,
        found_inf: Tensor | None = None,
        *,
        fits: bool = False,
    ) -> PyTree:
        """:meth:`update`, written in place of parameters and optimizer state, which were taken out of the State.

        Where ``found_inf``, if there is one, is 1 on the device, everything stays as it is. ``fits`` is what
        ``optimizer.fits`` says of them.
        """
        assert optimizer.overwrite is not None
        options: dict[str, Any] = {} if found_inf is None else {"found_inf": found_inf}
        if fits:
            options["fits"] = True
        timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
        return optimizer.overwrite(state._grads, opt_state, trained, timestamp, **options)

    def any_nonfinite(
        self, look: Callable[[Tensor, list[Tensor]], Tensor], loss: Tensor, tensors: Iterable[Tensor | None]
    ) -> Tensor:
        """1 where the loss or one of these tensors is not finite on any rank, else 0; float32, shape (1,).

        Args:
            look: finds that of the loss and the tensors that this rank holds.
            loss, tensors: None of these is left out.
        """
        return look(loss, [tensor for tensor in tensors if tensor is not None])

    # What ranks exchange: that they do the same, their results, and that one of them failed.

    def begin(self, state: State, settings: Mapping[str, object], *, empty: bool = False) -> State:
        """Wait for all ranks before INIT, and compare their settings with those of rank 0.

        ``empty``: the tensors of the State have no numbers, which this gives them.
        """
        return state

    def start(self, state: State, settings: Mapping[str, object], *, fresh: bool) -> State:
        """Compare the settings of all ranks, and start from the same State."""
        return state

    def barrier(self, state: State, event: Event) -> None:
        """Wait until all ranks have called this."""

    def reduce_loss(self, state: State, loss: Loss) -> Loss:
        """The loss of the whole batch, from this rank's share of it."""
        return loss

    def sync_buffers(self, state: State, before: FrozenDict[str, Tensor]) -> State:
        """The State with the same buffers on all ranks: those to which forwards wrote are averaged.

        Args:
            state: after the gradients.
            before: the buffers before the batch.
        """
        return state

    def largest(self, numbers: Sequence[float], state: State) -> Sequence[float]:
        """The largest over all ranks of each of these numbers, before the BATCH_START of the batch of a State."""
        return numbers

    def by_rank(self, numbers: Sequence[float], state: State) -> Sequence[Sequence[float]]:
        """These numbers of every rank, at most 8, before the BATCH_END of the batch of a State."""
        return [numbers]

    def gather(self, value: T) -> list[T]:
        """A value of every rank, which can be pickled."""
        return [value]

    def merge_metrics(
        self, metrics: Sequence[Metric], accumulated: dict[str, PyTree], state: State
    ) -> dict[str, PyTree]:
        """The accumulators of the metrics of an evaluation, over all ranks."""
        return accumulated

    def failed(self, error: BaseException, event: Event, state: State | None) -> None:
        """The stream ends with this error: tell the other ranks, or raise an error that names the rank that failed."""

    def close(self) -> None:
        """Release what is shared with the other ranks."""

    def single_rank(self) -> Engine:
        """The engine for this rank's computations between two exchanges, which a graph can hold."""
        return self


ONE_RANK = Engine()


def _added(gradient: Tensor | None, addend: Tensor | None) -> Tensor | None:
    """The sum of two gradients, each of which may be None or sparse."""
    if gradient is None or addend is None:
        return addend if gradient is None else gradient
    # Torch adds a sparse one to a dense one, and not the other way round.
    return addend + gradient if gradient.is_sparse and not addend.is_sparse else gradient + addend
