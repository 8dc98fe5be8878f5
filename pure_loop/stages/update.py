"""The update: one step of the optimizer, in place where nothing else can see the tensors, skipped where it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.cloning import unaliased
from pure_loop._internal.dtensor import from_local, local_tensor
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.torch_private import any_optimizer_hook, code_around_operations
from pure_loop.data.group import parts_of
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.model.names import sorted_by
from pure_loop.optim import Optimizer
from pure_loop.stages.nonfinite import (
    find_nonfinite,
    gradients_nonfinite,
    loss_is_finite,
    total_loss,
)
from pure_loop.stages.settings import NO_CONTEXT, StageSettings
from pure_loop.state import State, device_of, raw_loss, raw_opt_state, raw_params, with_fields

__all__ = ["UpdateStage", "in_order", "select"]

# Buffers before a batch, and the structure then; None: known by the names of the buffers.
Before: TypeAlias = "tuple[FrozenDict[str, Tensor], ModelDef | None]"


@attrs.frozen(kw_only=True)
class UpdateStage(StageSettings):
    """The update of :class:`~pure_loop.stages.stages.Stages`."""

    def update(
        self,
        state: State,
        *,
        buffers: FrozenDict[str, Tensor] | None = None,
        model: ModelDef | None = None,
        **counted: Any,
    ) -> State:
        """One step of the optimizer: in place if nothing else can see the tensors, else on copies.

        It is skipped, and counted in ``state.skipped``, where a gradient overflowed its loss scale, or with
        ``nonfinite="skip"`` the loss or a gradient isn't finite. The new parameters are checked for NaN and infinity:
        they show those of the gradients, also after an algorithm changed these, and nothing else refers to the
        memory of those that the step has made, so the cheapest kernel may write to it.

        Args:
            state: with gradients.
            buffers: those before the batch, which are restored if ``nonfinite="skip"`` skips the step.
            model: the structure before the batch, if forwards may register buffers.
            **counted: further fields to set, such as the timestamp after the batch.

        Raises:
            NonFiniteError: a loss or gradient that is not finite, or a parameter after a step that counts, on the CPU
                at once; on other devices it is noted in ``state.nonfinite`` and raised by
                :meth:`pure_loop.State.check_finite`.
        """
        if self.optimizer is None:
            raise ArgumentError("these stages have no optimizer: Stages(task=..., optimizer=pl.optim.adamw(...)).")
        if raw_loss(state) is None or state._grads is None:
            missing = "loss" if raw_loss(state) is None else "grads"
            raise ArgumentError(
                f"state.{missing} is None, and an update needs gradients and the loss that they are of: go through "
                "stages.forward, stages.loss and stages.backward first, or write state.replace(loss=..., grads=...)."
            )
        before: Before | None = None if buffers is None else (buffers, model)
        optimizer, scale, found_inf = state.model.served_by(self.optimizer), state.loss_scale, None
        if self.nonfinite == "skip" or scale is not None:
            found_inf = self._overflow(state)
            scale = None if scale is None else scale.update(found_inf)
            if found_inf.is_cpu:
                if found_inf.item():
                    return with_fields(state, **self._skipped(state, scale, before), **counted)
                found_inf = None  # a step like any other
        elif self.engine.ranks == 1 and self._is_nonfinite_at_once(state):  # before anything is written to
            raise self._nonfinite_error(state, before)
        with torch.set_grad_enabled(False):
            params, opt_state, fresh, in_place = self._step(state, optimizer, found_inf)
            wrong = self._nonfinite(state, optimizer, fresh, found_inf)
            noted: dict[str, Any] = {}
            if not wrong.is_cpu:
                noted = self._noted_on_device(state, found_inf, wrong, before)
            elif wrong:
                raise self._nonfinite_error(state, before, overwritten=in_place)
        result = with_fields(state, params=params, opt_state=opt_state, loss_scale=scale, **counted, **noted)
        # One of ours by itself keeps nothing, and neither does one of torch's. The label of a partition is the user's.
        may_keep = bool(optimizer.parts) or optimizer.draws
        lent = may_keep or any_optimizer_hook() or bool(code_around_operations())
        self.workspace.made(result, lent=lent)
        return result

    def _step(
        self, state: State, optimizer: Optimizer, found_inf: Tensor | None
    ) -> tuple[FrozenDict[str, Tensor], Any, list[Tensor], bool]:
        """The new parameters, the new optimizer state, the tensors that the step has made or written to, and whether it
        wrote in place.
        """
        engine, tensors = self.engine, None
        drawing = self.seeding(state, "update", code="users") if optimizer.draws else NO_CONTEXT
        if optimizer.overwrite is not None and (found_inf is None or _skips_by_itself(optimizer, state)):
            tensors = self.workspace.writable(state)
        params, memory = (raw_params(state), raw_opt_state(state)) if tensors is None else tensors
        trained, grads = state.model.trained(params), cast("Mapping[str, Tensor | None]", state._grads)
        fits = tensors is not None and self.workspace.fits(optimizer, memory, trained)
        with drawing:
            if tensors is not None:
                updated = engine.overwrite(optimizer, state, trained, memory, found_inf, fits=fits)
            else:
                updated = engine.update(optimizer, state, trained)
        new, opt_state = in_order(optimizer, updated, trained)
        if tensors is None and found_inf is not None:
            new, opt_state = select(found_inf[0].bool(), (trained, memory), (new, opt_state))
        if tensors is None and self.workspace.ownership is not None:
            new, opt_state = unaliased((new, opt_state), (trained, memory))
        # One without a gradient is as it was, whatever that is, and may be the very tensor of an earlier State.
        fresh = [
            tensor
            for name, tensor in new.items()
            if grads.get(name) is not None and (tensors is not None or tensor is not trained[name])
        ]
        if new is not trained:
            params = new if trained is params else FrozenDict({**params, **new})
        return params, opt_state, fresh, tensors is not None

    def _is_nonfinite_at_once(self, state: State) -> bool:
        """Whether the loss, or the norm of the gradients, is not finite, where that is known without waiting."""
        loss, norm = total_loss(raw_loss(state)), state.grad_norm
        if loss.is_cpu and not math.isfinite(loss.item()):
            return True
        if norm is None or not norm.is_cpu or math.isfinite(norm.item()):
            return False
        # It is that of the gradients that were measured, which an algorithm may have replaced since.
        assert state._grads is not None
        return bool(gradients_nonfinite(loss, self.engine.local_shards(state._grads.values())).item())

    def _nonfinite_error(self, state: State, before: Before | None, *, overwritten: bool = False) -> NonFiniteError:
        """What :meth:`update` raises; ``overwritten``: the step has written to the parameters of the State."""
        if before is not None and not overwritten:  # what the forward wrote to buffers is of the batch
            state = state.replace(**_restored(state, before))
        from pure_loop.stages.search import nonfinite_error  # no other run needs it

        def seeding(stage: str, index: int) -> AbstractContextManager[None]:
            code, gradients = self.code_of(state, stage), torch.is_grad_enabled()
            return self.running(state, stage, index, code=code, gradients=gradients)

        pieces = list(parts_of(state.batch)) if self.size is None else self.task.split(state.batch, self.size)
        return nonfinite_error(state, self.task, pieces, seeding, ranks=self.engine.ranks, overwritten=overwritten)

    def _overflow(self, state: State) -> Tensor:
        """1 where the loss or a gradient isn't finite, on any rank, else 0; float32, shape (1,)."""
        assert state._grads is not None
        with torch.set_grad_enabled(False):
            grads = self.engine.local_shards(state._grads.values())
            loss = total_loss(raw_loss(state)).to(device_of(state))
            return self.engine.any_rank(gradients_nonfinite(loss, grads))

    def _skipped(self, state: State, scale: Any, before: Before | None) -> dict[str, Any]:
        """The fields after a step that is skipped."""
        if self.nonfinite == "error" and not loss_is_finite(raw_loss(state)):
            raise self._nonfinite_error(state, before)
        restored = {} if before is None or self.nonfinite != "skip" else _restored(state, before)
        return {"loss_scale": scale, "skipped": cast("Tensor", state.skipped) + 1, **restored}

    def _nonfinite(self, state: State, optimizer: Optimizer, fresh: list[Tensor], result: Tensor | None) -> Tensor:
        """1 where the loss or one of the new parameters isn't finite, else 0; float32, shape (1,).

        ``result``, if given, says so of the loss and the gradients already, on a device that isn't waited for.
        """
        loss, engine = total_loss(raw_loss(state)), self.engine
        if result is not None:
            return engine.any_rank(find_nonfinite(torch.zeros_like(result), engine.local_shards(fresh)))
        if fresh and loss.is_cpu is not fresh[0].is_cpu:
            loss = loss.to(fresh[0].device)
        wrong = find_nonfinite(loss, engine.local_shards(fresh))
        if not optimizer.spreads_nonfinite:
            assert state._grads is not None
            wrong = torch.maximum(wrong, gradients_nonfinite(loss, engine.local_shards(state._grads.values())))
        return engine.any_rank(wrong)

    def _noted_on_device(
        self, state: State, found_inf: Tensor | None, wrong: Tensor, before: Before | None
    ) -> dict[str, Any]:
        """The fields that note the batch, without waiting for the device, and whether its step was skipped."""
        bad, fields = wrong[0].bool(), dict[str, Any]()
        if found_inf is not None:
            out = found_inf[0].bool()
            fields["skipped"] = cast("Tensor", state.skipped) + out
            if self.nonfinite == "error":
                bad = bad | ~torch.isfinite(total_loss(raw_loss(state)).to(wrong.device))
            elif before is not None:
                buffers, model = before
                if (model is None or model is state.model) and _alike(buffers, state.buffers):
                    fields["buffers"] = select(out, buffers, state.buffers)
                elif bool(out):  # waits for the device, where forwards register or reshape buffers
                    fields |= _restored(state, before)
        # full_like, because a Python number would be copied to the device, which waits for it.
        noted = cast("Tensor", state.nonfinite)
        batch = torch.full_like(noted, state.timestamp.batch)
        return {**fields, "nonfinite": torch.where(bad & (noted < 0), batch, noted)}


def _skips_by_itself(optimizer: Optimizer, state: State) -> bool:
    """Whether the optimizer's kernel skips a step by a number on the device."""
    grads: Any = state._grads
    # Of which parameters had no gradient it keeps count on the host.
    return optimizer.takes_found_inf and all(gradient is not None and gradient.is_cuda for gradient in grads.values())


def in_order(
    optimizer: Optimizer, updated: Any, trained: FrozenDict[str, Tensor]
) -> tuple[FrozenDict[str, Tensor], Any]:
    """What an update returned, with its parameters in their order.

    Raises:
        ArgumentTypeError, ArgumentError: it is something else.
    """
    if type(updated) is tuple and len(updated) == 2 and updated[0] is trained:
        return updated
    if not (isinstance(updated, tuple) and len(updated) == 2 and isinstance(updated[0], Mapping)):
        raise ArgumentTypeError(
            f"optimizer {optimizer.name!r}: update returned {type(updated).__name__}; it returns the new parameters by "
            "name, and the new opt_state: (params, opt_state)."
        )
    new, opt_state = updated
    if new.keys() != trained.keys():
        odd = sorted(new.keys() ^ trained.keys())[:3]
        raise ArgumentError(f"optimizer {optimizer.name!r}: update returned parameters of other names: {odd}.")
    return sorted_by(tuple(trained), new if type(new) is FrozenDict else FrozenDict(new)), opt_state


def _restored(state: State, before: Before) -> dict[str, Any]:
    """The buffers of before a batch, and the structure that has them."""
    buffers, model = before
    return {"buffers": buffers, "model": state.model.fitting(buffers) if model is None else model}


def _alike(some: FrozenDict[str, Tensor], others: FrozenDict[str, Tensor]) -> bool:
    """Whether these buffers have the same names, shapes and dtypes."""
    return some.keys() == others.keys() and all(
        tensor.shape == others[name].shape and tensor.dtype is others[name].dtype for name, tensor in some.items()
    )


def select(condition: Tensor, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``; waits for the device only where plain leaves differ."""
    leaves, spec = optree.tree_flatten(no, namespace=NAMESPACE)
    others, other_spec = optree.tree_flatten(yes, namespace=NAMESPACE)
    # An optimizer may keep more, or less, after this step.
    if spec != other_spec or any(a != b for a, b in zip(others, leaves, strict=True) if not isinstance(b, Tensor)):
        return yes if bool(condition) else no
    chosen = [
        from_local(b, torch.where(condition, local_tensor(a), local_tensor(b)))
        if isinstance(b, Tensor) and a is not b
        else b
        for a, b in zip(others, leaves, strict=True)
    ]
    return optree.tree_unflatten(spec, chosen)
