"""The update: one step of the optimizer, written in place where it may be, and skipped where it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode
from pure_loop._internal.dtensor import from_local, local_tensor
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.torch_private import set_grad_enabled
from pure_loop.data.group import parts_of
from pure_loop.donation.donation import Taken
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import time_of_step
from pure_loop.random.seeds import derive, seeded_all, tracer
from pure_loop.stages.engine import Engine
from pure_loop.stages.nonfinite import (
    find_nonfinite,
    gradients_nonfinite,
    is_finite_number,
    is_nonfinite,
    loss_is_finite,
    total_loss,
)
from pure_loop.stages.settings import StageSettings
from pure_loop.state import State, device_of, fresh_draft_of, raw_opt_state

__all__ = ["UpdateStage", "apply_optimizer", "as_state", "select"]

# Buffers before a batch, and the structure then; None: known by the names of the buffers.
Before: TypeAlias = "tuple[FrozenDict[str, Tensor], ModelDef | None]"

_tracer = tracer.get
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


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
        """One step of the optimizer; skipped, and counted in ``state.skipped``, where a gradient overflowed its loss
        scale, or with ``nonfinite="skip"`` the loss or a gradient isn't finite.

        The new parameters are checked for NaN and infinity: they show those of the gradients, also after an algorithm
        changed these, and nothing else refers to their memory, so the cheapest kernel may write to it. Where a step
        may be skipped, loss and gradients are checked before it, so that it can be written in place.

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
        draft = self.update_draft(state, buffers=buffers, model=model)
        for name, value in counted.items():
            setattr(draft, name, value)
        return as_state(draft, state)

    def update_draft(
        self, state: State, *, buffers: FrozenDict[str, Tensor] | None = None, model: ModelDef | None = None
    ) -> Any:
        """The draft of what :meth:`update` returns."""
        before: Before | None = None if buffers is None else (buffers, model)
        taken = None
        in_place = self.writes_in_place and state.loss_scale is None
        if in_place:
            # Before anything is written to, so that the error has the State before the step.
            loss, norm = total_loss(state.loss), state.grad_norm
            if (loss.is_cpu and not is_finite_number(loss)) or (
                norm is not None and norm.is_cpu and not norm.isfinite()
            ):
                raise self._nonfinite_error(state, before)
            taken = self.donation.donate(state, shared=False)  # type: ignore[union-attr]
            if taken is not None:
                return self._update_in_place(state, taken, before)
        optimizer, engine = self.optimizer, self.engine
        if optimizer is None:
            raise ArgumentError("these stages have no optimizer: Stages(task=..., optimizer=pl.optim.adamw(...)).")
        optimizer = state.model.served_by(optimizer)
        donation, scale = self.donation, state.loss_scale
        if donation is not None and donation.compiled:  # compiled steps donate by themselves
            donation = None
        result = None
        if self.nonfinite == "skip" or scale is not None:
            result = self._overflow(state)
            scale = None if scale is None else scale.update(result)
            if result.is_cpu:
                if result.item():
                    if donation is not None:
                        donation.invalidate()
                    return self._skip_step(state, scale, before)
                result = None  # a step like any other
        overwrites = donation is not None and optimizer.overwrite is not None
        if overwrites and result is not None and not _skips_by_itself(optimizer, state):
            donation.forget()  # type: ignore[union-attr]
            overwrites = False
        if overwrites and not in_place:
            shared = type(engine) is not Engine and engine.shares_storage(state.params)
            taken = donation.donate(state, shared=shared)  # type: ignore[union-attr]
        if taken is not None and result is None and type(engine) is Engine:
            draft = self._update_in_place(state, taken, before)
            draft.loss_scale = scale
            return draft
        draft = fresh_draft_of(state)
        draft.loss_scale = scale
        if taken is not None:
            params, trained, memory, _ = taken
        else:
            params, memory = state.params, raw_opt_state(state)
            trained = state.model.trained(params)
        with GradMode(False):
            if taken is not None:
                new, opt_state = _in_order(
                    optimizer, engine.overwrite(optimizer, state, trained, memory, result), trained
                )
                fresh = list(new.values())
            else:
                new, opt_state = apply_optimizer(engine, optimizer, state, trained)
                if result is not None:
                    new, opt_state = select(result[0].bool(), (trained, memory), (new, opt_state))
                # A parameter that was left as it is (it had no gradient) is still that of an earlier State.
                fresh = [
                    tensor for tensor, old in zip(new.values(), trained.values(), strict=True) if tensor is not old
                ]
            self._refuse_nonfinite(draft, state, fresh, result, before, overwritten=taken is not None)
        if new is not trained:
            params = new if trained is params else FrozenDict({**params, **new})
        draft.params, draft.opt_state = params, opt_state
        if overwrites and not (taken is not None and donation.held is not None and donation.held.params is params):  # type: ignore[union-attr]
            donation.track(draft, new, (trained, memory) if taken is None else (None, None), optimizer)  # type: ignore[union-attr]
        return draft

    def _update_in_place(self, state: State, taken: Taken, before: Before | None) -> Any:
        """The draft after an update in place, on one rank."""
        params, trained, memory, overwrite_private = taken
        optimizer, donation, loss = self.optimizer, self.donation, state.loss
        assert optimizer is not None
        if state.model.declared:
            optimizer = state.model.served_by(optimizer)
        assert donation is not None
        draft = fresh_draft_of(state)
        overwrite: Any = overwrite_private or optimizer.overwrite
        grad_mode = _grad_enabled()
        set_grad_enabled(False)
        try:
            timestamp = time_of_step(optimizer, state.timestamp, state.lr_scale)
            updated = overwrite(state._grads, memory, trained, timestamp)
            new, draft.opt_state = _in_order(optimizer, updated, trained)
            held = donation.held if new is trained else None
            if held is not None and held.alike and optimizer.spreads_nonfinite and type(loss) is Tensor and loss.is_cpu:
                if is_nonfinite(loss, held.values, alike=True):
                    raise self._nonfinite_error(state, before, overwritten=True)
            else:
                self._refuse_nonfinite(draft, state, list(new.values()), None, before, overwritten=True)
        finally:
            set_grad_enabled(grad_mode)
        if new is trained:
            draft.params = params
        else:
            draft.params = new if trained is params else FrozenDict({**params, **new})
        if held is None or held.params is not params:
            donation.track(draft, new, (None, None), optimizer)
        return draft

    def _refuse_nonfinite(
        self,
        draft: Any,
        state: State,
        fresh: list[Tensor],
        result: Tensor | None,
        before: Before | None,
        *,
        overwritten: bool,
    ) -> None:
        """Raise for a loss or new parameters that are NaN or infinite, or note it on a device; see :meth:`update`."""
        assert self.optimizer is not None
        wrong = self._nonfinite(state, self.optimizer, fresh, result)
        if type(wrong) is not bool and not wrong.is_cpu:
            self._note_on_device(draft, state, result, wrong, before)
        elif wrong:
            raise self._nonfinite_error(state, before, overwritten=overwritten)

    def _nonfinite_error(self, state: State, before: Before | None, *, overwritten: bool = False) -> NonFiniteError:
        """What :meth:`update` raises; ``overwritten``: the step has written to the parameters of the State."""
        if before is not None and not overwritten:  # what the forward wrote to buffers is of the batch
            buffers, model = before
            state = state.replace(buffers=buffers, model=state.model.fitting(buffers) if model is None else model)
        from pure_loop.stages.search import nonfinite_error  # no other run needs it

        @contextmanager
        def seeding(stage: str, index: int) -> Iterator[None]:
            with self._seeded(state, stage, index), self._autocast(state):
                yield

        pieces = list(parts_of(state.batch)) if self.size is None else self.task.split(state.batch, self.size)
        return nonfinite_error(state, self.task, pieces, seeding, ranks=self.engine.ranks, overwritten=overwritten)

    def _overflow(self, state: State) -> Tensor:
        """1 where the loss or a gradient isn't finite, on any rank, else 0; float32, shape (1,)."""
        assert state._grads is not None
        with GradMode(False):
            grads = self.engine.local_shards(state._grads.values())
            loss = total_loss(state.loss).to(device_of(state))
            return self.engine.any_rank(gradients_nonfinite(loss, grads))

    def _skip_step(self, state: State, scale: Any, before: Before | None) -> Any:
        """The draft of the State after a step that is skipped."""
        if self.nonfinite == "error" and not loss_is_finite(state.loss):
            raise self._nonfinite_error(state, before)
        draft, skipped = fresh_draft_of(state), cast("Tensor", state.skipped)
        draft.loss_scale, draft.skipped = scale, skipped + 1
        if before is not None and self.nonfinite == "skip":
            _restore(draft, before)
        return draft

    def _nonfinite(self, state: State, optimizer: Optimizer, fresh: list[Tensor], result: Tensor | None) -> Any:
        """Whether the loss or one of the new parameters isn't finite: a tensor of shape (1,), or a bool.

        ``result``, if given, says so of the loss and the gradients already, on a device that isn't waited for.
        """
        loss, engine = total_loss(state.loss), self.engine
        if result is not None:
            return engine.any_rank(find_nonfinite(torch.zeros_like(result), engine.local_shards(fresh)))
        if fresh and loss.is_cpu is not fresh[0].is_cpu:
            loss = loss.to(fresh[0].device)
        if loss.is_cpu and engine.ranks == 1 and optimizer.spreads_nonfinite:
            return is_nonfinite(loss, fresh)
        wrong = find_nonfinite(loss, engine.local_shards(fresh))
        if not optimizer.spreads_nonfinite:
            assert state._grads is not None
            wrong = torch.maximum(wrong, gradients_nonfinite(loss, engine.local_shards(state._grads.values())))
        return engine.any_rank(wrong)

    def _note_on_device(
        self, draft: Any, state: State, result: Tensor | None, wrong: Tensor, before: Before | None
    ) -> None:
        """Note the batch, without waiting for the device, and whether its step was skipped."""
        bad = wrong[0].bool()
        if result is not None:
            out = result[0].bool()
            draft.skipped = cast("Tensor", state.skipped) + out
            if self.nonfinite == "error":
                bad = bad | ~torch.isfinite(total_loss(state.loss).to(wrong.device))
            elif before is not None:
                buffers, model = before
                if (model is None or model is state.model) and _alike(buffers, state.buffers):
                    draft.buffers = select(out, buffers, state.buffers)
                elif bool(out):  # waits for the device, where forwards register or reshape buffers
                    _restore(draft, before)
        # full_like, because a Python number would be copied to the device, which waits for it.
        noted = cast("Tensor", state.nonfinite)
        batch = torch.full_like(noted, state.timestamp.batch)
        draft.nonfinite = torch.where(bad & (noted < 0), batch, noted)


def as_state(draft: Any, state: State) -> State:
    """The draft as a State; no other reference to it exists."""
    draft.__class__ = state.__class__
    return draft  # type: ignore[no-any-return]


def _skips_by_itself(optimizer: Optimizer, state: State) -> bool:
    """Whether the optimizer's kernel skips a step by a number on the device."""
    grads: Any = state._grads
    # Of which parameters had no gradient it keeps count on the host.
    return optimizer.takes_found_inf and all(gradient is not None and gradient.is_cuda for gradient in grads.values())


def apply_optimizer(
    engine: Engine, optimizer: Optimizer, state: State, trained: FrozenDict[str, Tensor]
) -> tuple[FrozenDict[str, Tensor], Any]:
    """The result of the optimizer's ``update``, which may be user code, checked."""
    updated: Any
    if optimizer.draws and _tracer() is None:
        # Of the batch, and not of the rank: replicated ranks draw alike.
        seed = derive(state.seed, "update", state.timestamp.epoch, state.timestamp.batch)
        with seeded_all(seed):
            updated = engine.update(optimizer, state, trained)
    else:
        updated = engine.update(optimizer, state, trained)
    return _in_order(optimizer, updated, trained)


def _in_order(
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
    names = list(trained)
    if list(new) == names and type(new) is FrozenDict:
        return new, opt_state
    if new.keys() != trained.keys():
        odd = sorted(new.keys() ^ trained.keys())[:3]
        raise ArgumentError(f"optimizer {optimizer.name!r}: update returned parameters of other names: {odd}.")
    return FrozenDict((name, new[name]) for name in names), opt_state


def _restore(draft: Any, before: Before) -> None:
    """Put back the buffers of before a batch."""
    buffers, model = before
    draft.buffers, draft.model = buffers, draft.model.fitting(buffers) if model is None else model


def _alike(some: FrozenDict[str, Tensor], others: FrozenDict[str, Tensor]) -> bool:
    """Whether these buffers have the same names, shapes and dtypes."""
    return some.keys() == others.keys() and all(
        tensor.shape == others[name].shape and tensor.dtype is others[name].dtype for name, tensor in some.items()
    )


def select(condition: Tensor, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``; waits for the device only where plain leaves differ."""
    leaves, spec = optree.tree_flatten(no, namespace=NAMESPACE)
    others, other_spec = optree.tree_flatten(yes, namespace=NAMESPACE)
    if spec != other_spec:  # an optimizer that keeps more, or less, after this step
        return yes if bool(condition) else no
    plain = [(a, b) for a, b in zip(others, leaves, strict=True) if not isinstance(b, Tensor)]
    if any(a != b for a, b in plain):
        return yes if bool(condition) else no
    chosen = [
        from_local(b, torch.where(condition, local_tensor(a), local_tensor(b)))
        if isinstance(b, Tensor) and a is not b
        else b
        for a, b in zip(others, leaves, strict=True)
    ]
    return optree.tree_unflatten(spec, chosen)
