"""Replicated: every rank holds the whole model, and torch's DistributedDataParallel averages gradients.

A private DistributedDataParallel holds parameters whose memory is set to that of a State's; the forward runs on views
of them, outside of it. Only the loss goes through it, when the backward begins: from then on its buckets are exchanged
while the backward goes on. Microbatches before the last one are differentiated on this rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pure_loop._autograd import GradMode
from pure_loop.distributed.joint import JointEngine
from pure_loop.errors import ModelError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model import ModelDef
from pure_loop.state import State

__all__ = ["ReplicateEngine"]


class _Holder(nn.Module):
    """Parameters without a model, and a forward for DistributedDataParallel to see the loss come by."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class ReplicateEngine(JointEngine):
    """Gradients averaged by DistributedDataParallel."""

    _model: ModelDef | None = None
    _held: Sequence[nn.Parameter] = ()
    _averaging: DistributedDataParallel | None = None
    _views: FrozenDict[str, Tensor] | None = None

    def leaves(self, state: State, *, last: bool) -> FrozenDict[str, Tensor]:
        if not last:
            return state.model.leaves(state.params)
        if self._model is not state.model:
            self._hold(state)
        params: Any = state.params
        params = getattr(params, "origin", params)
        views = dict(params)
        with GradMode(True):
            for name, held in zip(state.model.trainable, self._held, strict=True):
                held.data = params[name]
                # A State keeps the view, which stays as it is when the held parameter gets other memory.
                views[name] = held.view_as(held)
        leaves = FrozenDict(views)
        leaves.origin = params
        self._views = leaves
        return leaves

    def parameters(self) -> Iterable[Tensor] | None:
        return self._held

    def gradient(
        self, state: State, loss: Tensor | None, inputs: list[Tensor], seed: Tensor | None
    ) -> tuple[Any, ...] | None:
        if state.params is not self._views:
            return super().gradient(state, loss, inputs, seed)
        self._views = None
        try:
            return self._average(state, loss, inputs, seed)
        except BaseException:
            self._forget()  # what it has begun to exchange can't be taken back
            raise

    def _average(self, state: State, loss: Tensor | None, inputs: list[Tensor], seed: Tensor | None) -> tuple[Any, ...]:
        averaging = self._averaging
        if averaging is None:
            averaging = self._averaging = self._wrapped(state, loss, inputs)
        before = self._put_before(state)
        reached = before
        if loss is None:
            reached = before or (inputs[:1] if averaging.find_unused_parameters else inputs)
        elif not averaging.find_unused_parameters:
            reached = []
        with GradMode(True):
            if reached:
                # Nothing of each, so that its gradient takes part.
                nothing = torch.stack([each.reshape(-1)[:0].sum() for each in reached]).sum()
                loss = nothing if loss is None else loss + nothing.to(loss)
            assert loss is not None
            # It divides by the number of ranks.
            factor = torch.full_like(loss, self.ranks) if seed is None else seed.to(loss) * self.ranks
            averaging(loss).backward(factor)
        found = tuple(held.grad for held in self._held)
        for held in self._held:
            held.grad = None
        if not averaging.find_unused_parameters and any(gradient is None for gradient in found):
            self._refuse_unused(state, found)
        return found

    def _put_before(self, state: State) -> list[Tensor]:
        """Lay the gradients of earlier microbatches, on this rank alone, where this one's are added."""
        before = state._grads
        if before is None:
            return []
        views: Any = state.params
        names = [name for name in state.model.trainable if before[name] is not None]
        given = torch._foreach_mul([before[name] for name in names], float(self.ranks)) if names else []
        found = dict(zip(names, given, strict=True))
        for name, held in zip(state.model.trainable, self._held, strict=True):
            held.grad = found.get(name)
        return [views[name] for name in names]

    def _hold(self, state: State) -> None:
        self._forget()
        self._held = [nn.Parameter(torch.empty_like(state.params[name])) for name in state.model.trainable]
        self._model = state.model

    def _wrapped(self, state: State, loss: Tensor | None, inputs: list[Tensor]) -> DistributedDataParallel:
        unused = self.parallel.find_unused_parameters
        if unused is None:
            unreached = 0 if loss is None else _count_unreached(loss, inputs)
            unused = any(row[0] for row in self.talk.exchange(Event.BEFORE_BACKWARD, state.timestamp.batch, unreached))
        options: dict[str, Any] = {}
        if self.parallel.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = self.parallel.bucket_cap_mb
        return DistributedDataParallel(
            _Holder(self._held),
            process_group=self.talk.group,
            find_unused_parameters=bool(unused),
            init_sync=False,
            **options,
        )

    def _refuse_unused(self, state: State, found: tuple[Any, ...]) -> None:
        """
        Raises:
            ModelError: always.
        """
        names = [name for name, gradient in zip(state.model.trainable, found, strict=True) if gradient is None]
        raise ModelError(
            f"rank {self.rank} of {self.ranks}: the loss of batch {state.timestamp.batch} does not reach the "
            f"parameters {names[:3]}, which that of the first batch did. Where batches use parts of a model write "
            "parallel=pl.distributed.Parallel(find_unused_parameters=True)."
        )

    def _forget(self) -> None:
        self._averaging = self._model = self._views = None
        self._held = ()


def _count_unreached(loss: Tensor, inputs: list[Tensor]) -> int:
    """How many of these tensors the loss doesn't depend on."""
    wanted = {each.grad_fn for each in inputs}
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [function for function, _ in node.next_functions]
    return len(wanted - seen)
