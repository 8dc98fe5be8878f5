"""The update: one step of the optimizer, in place where nothing else can see the tensors, skipped where it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.torch_private import any_optimizer_hook, code_around_operations
from pure_loop._internal.tree_ops import map_local, unaliased
from pure_loop.errors import ArgumentError, ArgumentTypeError, NonFiniteError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.model.names import sorted_by
from pure_loop.optim import Optimizer
from pure_loop.stages.nonfinite import find_nonfinite, gradients_nonfinite, total_loss
from pure_loop.stages.settings import NO_CONTEXT, StageSettings
from pure_loop.state import State, device_of, raw_loss, raw_opt_state, raw_params, with_fields

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
        **counted: object,
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
        engine, optimizer, found_inf = self.engine, state.model.served_by(self.optimizer), None
        loss, scale = total_loss(raw_loss(state)), state.loss_scale
        grads: Mapping[str, Tensor | None] = state._grads
        with torch.set_grad_enabled(False):
            if self.nonfinite == "skip" or scale is not None:
                found_inf = engine.any_nonfinite(gradients_nonfinite, loss.to(device_of(state)), grads.values())
                counted["loss_scale"] = None if scale is None else scale.update(found_inf)
                if found_inf.is_cpu:
                    if found_inf.item():
                        if self.nonfinite == "error" and not math.isfinite(loss.item()):
                            raise self._nonfinite_error(state, before)
                        return with_fields(state, **counted, **self._left_out(state, found_inf, before))
                    found_inf = None  # a step like any other
            elif not engine.exchanges:
                # What is known without waiting, before anything is written to. The norm is that of the gradients that
                # were measured, which an algorithm may have replaced since.
                numbers = [number.item() for number in (loss, state.grad_norm) if number is not None and number.is_cpu]
                doubtful = not all(map(math.isfinite, numbers))
                if doubtful and engine.any_nonfinite(gradients_nonfinite, loss, grads.values()):
                    raise self._nonfinite_error(state, before)

            params, opt_state, fresh, in_place = self._step(state, optimizer, found_inf)
            if found_inf is not None:
                counted |= self._left_out(state, found_inf, before)
                if self.nonfinite == "skip":  # a loss that is not finite was left out, too
                    loss = torch.zeros_like(found_inf[0])
            if fresh and loss.is_cpu is not fresh[0].is_cpu:
                loss = loss.to(fresh[0].device)
            if found_inf is None and not optimizer.spreads_nonfinite:
                wrong = engine.any_nonfinite(gradients_nonfinite, loss, [*fresh, *grads.values()])
            else:
                wrong = engine.any_nonfinite(find_nonfinite, loss, fresh)
            if not wrong.is_cpu:
                # full_like, because a Python number would be copied to the device, which waits for it.
                noted = cast("Tensor", state.nonfinite)
                batch = torch.full_like(noted, state.timestamp.batch)
                counted["nonfinite"] = torch.where(wrong[0].bool() & (noted < 0), batch, noted)
            elif wrong:
                raise self._nonfinite_error(state, before, overwritten=in_place)
        result = with_fields(state, params=params, opt_state=opt_state, **counted)
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
        # By the device of the parameters, which the State may have no more afterwards.
        drawing = self.seeding(state, "update", code="users") if optimizer.draws else NO_CONTEXT
        if optimizer.overwrite is not None and (found_inf is None or _skips_by_itself(optimizer, state)):
            tensors = self.workspace.writable(state)
        params, memory = tensors or (raw_params(state), raw_opt_state(state))
        trained, grads = state.model.trained(params), cast("Mapping[str, Tensor | None]", state._grads)
        with drawing:
            if tensors is not None:
                fits = self.workspace.fits(optimizer, memory, trained)
                updated = engine.overwrite(optimizer, state, trained, memory, found_inf, fits=fits)
            else:
                updated = engine.update(optimizer, state, trained)
        updated = in_order(optimizer, updated, trained)
        if tensors is None and found_inf is not None:
            updated = select(found_inf[0].bool(), (trained, memory), updated)
        if tensors is None and self.workspace.ownership is not None:
            updated = unaliased(updated, (trained, memory))
        new_params, opt_state = updated
        # One without a gradient is as it was, whatever that is, and may be the very tensor of an earlier State.
        fresh = [
            tensor
            for name, tensor in new_params.items()
            if grads.get(name) is not None and (tensors is not None or tensor is not trained[name])
        ]
        if new_params is not trained:
            params = new_params if trained is params else FrozenDict({**params, **new_params})
        return params, opt_state, fresh, tensors is not None

    def _left_out(self, state: State, found_inf: Tensor, before: Before | None) -> dict[str, PyTree]:
        """The fields of a step that is left out where ``found_inf`` is 1; a device isn't waited for."""
        out = found_inf[0].bool()
        fields: dict[str, Any] = {"skipped": cast("Tensor", state.skipped) + out}
        if before is None or self.nonfinite == "error":
            return fields
        buffers, model = before
        if not out.is_cpu and (model is None or model is state.model) and _alike(buffers, state.buffers):
            return {**fields, "buffers": select(out, buffers, state.buffers)}
        # It waits for the device where forwards register or reshape buffers.
        return {**fields, **_restored(state, before)} if bool(out) else fields

    def _nonfinite_error(self, state: State, before: Before | None, *, overwritten: bool = False) -> NonFiniteError:
        """What :meth:`update` raises; ``overwritten``: the step has written to the parameters of the State."""
        if before is not None and not overwritten:  # what the forward wrote to buffers is of the batch
            state = state.replace(**_restored(state, before))
        from pure_loop.stages.search import nonfinite_error  # no other run needs it

        return nonfinite_error(state, self, overwritten=overwritten)


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
    new_params, opt_state = updated
    if new_params.keys() != trained.keys():
        odd = sorted(new_params.keys() ^ trained.keys())[:3]
        raise ArgumentError(f"optimizer {optimizer.name!r}: update returned parameters of other names: {odd}.")
    return sorted_by(
        tuple(trained), new_params if type(new_params) is FrozenDict else FrozenDict(new_params)
    ), opt_state


def _restored(state: State, before: Before) -> dict[str, PyTree]:
    """The buffers of before a batch, and the structure that has them."""
    buffers, model = before
    return {"buffers": buffers, "model": state.model.fitting(buffers) if model is None else model}


def _alike(tensors: FrozenDict[str, Tensor], references: FrozenDict[str, Tensor]) -> bool:
    """Whether these buffers have the same names, shapes and dtypes."""
    return tensors.keys() == references.keys() and all(
        tensor.shape == references[name].shape and tensor.dtype is references[name].dtype
        for name, tensor in tensors.items()
    )


def select(condition: Tensor, yes: PyTree, no: PyTree) -> PyTree:
    """``yes`` where the condition holds, else ``no``; waits for the device only where plain leaves differ."""
    leaves, spec = optree.tree_flatten(no, namespace=NAMESPACE)
    leaves_of_yes, other_spec = optree.tree_flatten(yes, namespace=NAMESPACE)
    # An optimizer may keep more, or less, after this step.
    if spec != other_spec or any(
        a != b for a, b in zip(leaves_of_yes, leaves, strict=True) if not isinstance(b, Tensor)
    ):
        return yes if bool(condition) else no
    places = [
        i for i, (a, b) in enumerate(zip(leaves_of_yes, leaves, strict=True)) if isinstance(b, Tensor) and a is not b
    ]

    def choose(old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
        return [torch.where(condition, a, b) for a, b in zip(new, old, strict=True)]

    chosen = map_local(choose, [leaves[i] for i in places], [leaves_of_yes[i] for i in places])
    for i, tensor in zip(places, chosen, strict=True):
        leaves[i] = tensor
    return optree.tree_unflatten(spec, leaves)
