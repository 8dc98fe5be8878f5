"""Replicated: every rank holds the whole model, and torch's DistributedDataParallel averages gradients.

A private DistributedDataParallel holds parameters, which are given the memory of a State's; the forward runs on them,
outside of it. Only the loss goes through it, when the backward begins: from then on its buckets are exchanged while the
backward runs. Microbatches before the last one are differentiated on this rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pure_loop._internal.autograd import graph_of, scalar_like, zero_unless
from pure_loop._internal.torch_private import fill_buckets
from pure_loop.distributed.multi_rank import Gradients, MultiRankEngine, no_parameters, register_hook
from pure_loop.distributed.parameters import LazyLeaves, origin_of
from pure_loop.errors import ModelError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.state import State, device_of, raw_params, with_fields

T = TypeVar("T")


class _Holder(nn.Module):
    """Parameters without a model, and a forward for DistributedDataParallel to see the loss come by."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


def _exchange_at_once(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket in a group with exchanges without a future, for which DistributedDataParallel asks."""
    dist.all_reduce(bucket.buffer(), group=group)
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


class ReplicateEngine(MultiRankEngine):
    """Gradients averaged by DistributedDataParallel."""

    replicates = True

    _model: ModelDef | None = None
    _frozen: frozenset[str] = frozenset()
    # What DistributedDataParallel knows, by name, and the same with the parameters that are not trained.
    _held: Mapping[str, nn.Parameter] = FrozenDict()
    _bound: FrozenDict[str, Tensor] = FrozenDict()
    # The parameters that lend them their memory, unless they are gone.
    _lender: Callable[[], object] = staticmethod(no_parameters)
    _averaging: DistributedDataParallel | None = None
    _anchor: nn.Parameter
    # Whether batches leave parameters out, where gradients come from graphs.
    _unused: bool | None = None

    def leaves(self, state: State, *, index: int, last: bool) -> FrozenDict[str, Tensor]:
        if not last:
            return state.model.leaves(raw_params(state), state.frozen)
        if self._model is None or self._model.skeleton is not state.model.skeleton or self._frozen != state.frozen:
            self._hold(state)
        torch.clear_autocast_cache()  # of these very parameters, when they had the numbers of another State
        params = origin_of(raw_params(state))
        parameters, trained = self._held, frozenset(self._held)
        alive = ref(self)  # a State that is kept must not keep the process group

        def detached(name: str) -> Tensor:
            tensor: Tensor = params[name].detach()
            return tensor.requires_grad_(name in trained)

        def view(name: str) -> Tensor:
            engine = alive()
            if name not in trained or engine is None or engine._held is not parameters:
                return detached(name)
            engine._borrow(params)
            with torch.set_grad_enabled(True):
                return parameters[name].view_as(parameters[name])

        return LazyLeaves(params, view, detached, frozen=state.frozen, index=index, last=last)

    def _borrow(self, params: FrozenDict[str, Tensor]) -> None:
        """Set the memory of the parameters that DistributedDataParallel knows to that of these."""
        if self.shares_storage(params):
            return
        torch.clear_autocast_cache()  # of these very parameters, when they had other numbers
        for name, held in self._held.items():
            held.data = params[name]
        if len(self._held) < len(params):
            self._bound = _bound_to({**params, **self._held})
        self._lender = ref(params)

    def apply(
        self,
        state: State,
        function: Callable[[nn.Module], T],
        params: FrozenDict[str, Tensor],
        *,
        training: bool,
        hold: bool = False,
    ) -> tuple[T, FrozenDict[str, Tensor], ModelDef]:
        if not isinstance(params, LazyLeaves):
            return super().apply(state, function, params, training=training, hold=hold)
        self._borrow(params.origin)  # another forward may have come in between, of other parameters
        # The same mapping in every step, so that nothing has to be bound anew.
        bound = self._bound
        bound.holder = getattr(params, "holder", None)
        result = state.model.call(function, bound, state.buffers, training=training, hold=hold)
        params.holder, bound.holder = bound.holder, None
        return result

    def shares_storage(self, params: FrozenDict[str, Tensor]) -> bool:
        return self._lender() is params

    def parameters(self) -> Iterable[Tensor] | None:
        return self._held.values()

    def gradient(
        self,
        state: State,
        loss: Tensor | None,
        seed: Tensor | float,
        *,
        in_place: bool = False,
        counts: Tensor | None = None,
    ) -> Gradients | None:
        leaves = raw_params(state)
        if not isinstance(leaves, LazyLeaves):
            return super().gradient(state, loss, seed, in_place=in_place, counts=counts)
        self._borrow(leaves.origin)
        masked = self._held.values()
        hooks = [] if counts is None else [register_hook(held, partial(zero_unless, counts)) for held in masked]
        try:
            result = self._average(state, loss, seed, in_place=in_place)
        except BaseException:
            self._forget()  # what it has begun to exchange can't be taken back
            raise
        finally:
            for hook in hooks:
                hook.remove()
        leaves.close()
        return result

    def _average(self, state: State, loss: Tensor | None, seed: Tensor | float, *, in_place: bool) -> Gradients:
        averaging = self._averaging
        if averaging is None:
            averaging = self._averaging = self._wrapped(state, loss)
        reached = self._put_before(state, in_place=in_place)
        if loss is None and not averaging.find_unused_parameters:
            reached = list(self._held.values())
        with torch.set_grad_enabled(True):
            if reached:
                # Nothing of each, so that its gradient takes part, though this microbatch may leave it out.
                nothing = torch.stack([item.reshape(-1)[:0].sum() for item in reached]).sum()
                loss = nothing if loss is None else loss + nothing.to(loss)
            if loss is None:
                loss = self._anchor[:0].sum()
            # It divides by the number of ranks.
            factor = scalar_like(loss, seed) * self.ranks
            averaging(loss).backward(factor)
        result = tuple([held.grad for held in self._held.values()])
        for held in self._held.values():
            held.grad = None
        if not averaging.find_unused_parameters and any(gradient is None for gradient in result):
            self._refuse_unused(state, result)
        return result

    def accumulate(self, state: State, before: State, *, last: bool) -> State:
        if not last:
            return state
        grads: Mapping[str, Tensor | None] = state._grads
        names = list(state.model.differentiated(state.frozen))
        absent = [grads[name] is None for name in names]
        counts = not all(absent)  # of a rank of which nothing counts, nothing is known
        if self._leaves_out(state, sum(absent) if counts else 0, counts):
            ranks = self.talk.sum(torch.tensor(absent, dtype=torch.float32, device=device_of(state))).tolist()
            names = [name for name, without in zip(names, ranks, strict=True) if without < self.ranks]
        elif any(absent) and counts:
            self._refuse_unused(state, tuple([grads[name] for name in names]))
        gradients = ((name, grads[name]) for name in names)
        value = [torch.zeros_like(raw_params(state)[name]) if grad is None else grad for name, grad in gradients]
        result = dict(zip(names, self.sums_of(value), strict=True))
        return with_fields(state, _grads=FrozenDict((name, result.get(name)) for name in grads))

    def _leaves_out(self, state: State, absent: int, counts: bool) -> bool:
        """Whether batches may leave parameters out: the user says so, or the first one does, on any rank."""
        if self._unused is None:
            self._unused = self.parallel.find_unused_parameters
        if self._unused is None:
            rows = self.talk.exchange(Event.AFTER_BACKWARD, state.timestamp.batch, absent, counts)
            if not any(row[1] for row in rows):
                return True  # nothing counts on any rank: the next batch decides
            self._unused = any(row[0] for row in rows)
        return self._unused

    def _put_before(self, state: State, *, in_place: bool) -> list[nn.Parameter]:
        """Lay the gradients of earlier microbatches, on this rank alone, where this one's are added."""
        before = state._grads
        if before is None:
            return []
        names = [name for name in self._held if before[name] is not None]
        value = [before[name] for name in names]
        if value and in_place:
            torch._foreach_mul_(value, float(self.ranks))
        elif value:
            value = list(torch._foreach_mul(value, float(self.ranks)))
        result = dict(zip(names, value, strict=True))
        for name, held in self._held.items():
            held.grad = result.get(name)
        return [self._held[name] for name in names]

    def _hold(self, state: State) -> None:
        self._forget()
        self._held = {}
        for name in state.model.differentiated(state.frozen):
            empty = torch.empty_like(raw_params(state)[name], requires_grad=True)
            declared = state.model.seen_as_declared(name, empty)
            self._held[name] = declared if isinstance(declared, nn.Parameter) else nn.Parameter(empty)
        self._bound = _bound_to(self._held)
        self._lender = no_parameters
        self._model, self._frozen = state.model, state.frozen

    def _wrapped(self, state: State, loss: Tensor | None) -> DistributedDataParallel:
        unused = self.parallel.find_unused_parameters
        if unused is None:
            unreached = 0 if loss is None else _count_unreached(loss, self._held.values())
            rows = self.talk.exchange(Event.BEFORE_BACKWARD, state.timestamp.batch, unreached, loss is not None)
            # Where no rank has a loss it isn't known which are reached: DistributedDataParallel looks in each batch.
            unused = any(row[0] for row in rows) or not any(row[1] for row in rows)
        capacity = self.parallel.bucket_cap_mb
        options: dict[str, Any] = {} if capacity is None else {"bucket_cap_mb": capacity}
        held = list(self._held.values())
        if unused:
            # What a rank without samples reaches: a backward that reaches nothing ends before the others are heard.
            self._anchor = nn.Parameter(torch.zeros(1, device=device_of(state)))
            held.append(self._anchor)
        averaging = DistributedDataParallel(
            # In the order in which most of their gradients come.
            _Holder(held if unused else held[::-1]),
            process_group=self.talk.group,
            find_unused_parameters=bool(unused),
            init_sync=False,
            **options,
        )
        if self.talk.fake:
            # DistributedDataParallel compares annotations, which are texts here, with its classes.
            averaging.register_comm_hook(self.talk.group, lambda group, bucket: _exchange_at_once(group, bucket))
        if not unused:
            _fix_buckets(averaging)
        return averaging

    def _refuse_unused(self, state: State, result: Gradients) -> None:
        """
        Raises:
            ModelError: always.
        """
        trained = state.model.differentiated(state.frozen)
        names = [name for name, gradient in zip(trained, result, strict=True) if gradient is None]
        raise ModelError(
            f"rank {self.rank} of {self.ranks}: the loss of batch {state.timestamp.batch} does not reach the "
            f"parameters {names[:3]}, which that of the first batch did. Where batches use parts of a model write "
            "parallel=pl.distributed.Parallel(find_unused_parameters=True)."
        )

    def _forget(self) -> None:
        self._averaging = self._model = self._unused = None
        self._held = FrozenDict()
        self._bound = _bound_to({})
        self._lender = no_parameters


def _bound_to(params: Mapping[str, Tensor]) -> FrozenDict[str, Tensor]:
    """Parameters that a module is called with, which are leaves of no State's."""
    leaves = FrozenDict(params)
    leaves.origin, leaves.frozen, leaves.holder = FrozenDict(), frozenset(), None
    return leaves


def _fix_buckets(averaging: DistributedDataParallel) -> None:
    """Fill its buckets in the order of its parameters, from the first batch on.

    By itself it has one bucket in its first batch, and fills others, in the order in which that batch's gradients came,
    for the second. On three ranks and more numbers are added in another order where they are in another bucket, so
    training that is resumed would not come to the same bits.
    """
    if not fill_buckets(averaging.reducer):
        _backward_of_nothing(averaging)


def _backward_of_nothing(averaging: DistributedDataParallel) -> None:
    """A first batch with gradients that are zeros, and come in the order of the parameters."""
    held = list(averaging.parameters())
    # What was computed last is differentiated first.
    parts = [parameter.reshape(-1)[:0].sum() for parameter in reversed(held)]
    with torch.set_grad_enabled(True):
        averaging(torch.stack([part.to(parts[0]) for part in parts]).sum()).backward()
    for parameter in held:
        parameter.grad = None


def _count_unreached(loss: Tensor, parameters: Iterable[Tensor]) -> int:
    """How many of these parameters the loss doesn't depend on."""
    reached = {id(getattr(node, "variable", None)) for node in graph_of(loss)}
    return sum(id(parameter) not in reached for parameter in parameters)
