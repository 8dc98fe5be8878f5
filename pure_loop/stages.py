"""Stages: the computations between the events, as pure functions ``State -> State``.

A stage knows no events, algorithms or callbacks. It reads a State, computes, and returns another;
whatever it writes to is memory of its own. The loop's script strings stages and events together;
scripts of your own and algorithms call the same stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._autograd import GradMode, gradient_of, refuse_strangers
from pure_loop._finite import (
    find_nonfinite,
    gradients_nonfinite,
    is_nonfinite,
    loss_is_finite,
    nonfinite_error,
    total_loss,
)
from pure_loop._host_draws import Checked, Observed, SeededHosts, may_draw
from pure_loop._internal.torch_private import any_autocast_enabled, set_grad_enabled
from pure_loop._losses import check_loss, detached, detached_loss, measured_loss
from pure_loop._notes import note_stage, noting
from pure_loop._parts import part_of, with_part
from pure_loop._pytree import NAMESPACE
from pure_loop._weights import WEIGHTS_ARE, Weights, is_number, of_numbers
from pure_loop.data import describe
from pure_loop.donation import Donation, Taken
from pure_loop.engine import ONE_RANK, Engine, writable
from pure_loop.errors import AlgorithmStructureError, ArgumentError, ArgumentTypeError, DataError, LossError, ModelError
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients import clip_by_norm, clipping_factor, global_norm, in_dtypes_of, map_present
from pure_loop.model import ModelDef
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import is_laid_out, lie_plainly
from pure_loop.precision import Precision
from pure_loop.random import derive, seed_host, seeded, seeded_all, tracer, unseed_host
from pure_loop.state import NOT_READY, State, device_of, fresh_draft_of, memory_in
from pure_loop.task import OnTargets, Task, default_forward

__all__ = ["Stages", "draws_on_host", "refusing_to_differentiate", "value_and_grad"]

T = TypeVar("T")
ClipGrad: TypeAlias = Callable[[FrozenDict[str, Any], FrozenDict[str, Tensor]], FrozenDict[str, Any]]

# Buffers before a batch, and the structure then; None: known by the names of the buffers.
Before: TypeAlias = "tuple[FrozenDict[str, Tensor], ModelDef | None]"

_NOTHING: AbstractContextManager[None] = nullcontext()
_tracer = tracer.get
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


@attrs.frozen(kw_only=True)
class Stages:
    """The stages of training one model, with the settings they need.

    Args:
        task: what the model does with a batch.
        optimizer: how gradients become an update; None where nothing is updated.
        precision: of forward and loss.
        microbatch_size: samples a forward at most; None: the whole batch.
        clip_grad: a global norm, or a function ``(grads, params) -> grads``.
        nonfinite: ``"error"`` or ``"skip"``: what to do with a loss or gradient that is NaN or infinite.
        measures_norm: whether ``state.grad_norm`` is wanted where no clipping needs it.
        engine: where forwards and backwards run, and what ranks agree on.
        donation: who else sees the memory that an update could write to; None: it always copies.
        strict: see to it that forwards and losses draw from no other generators than those that are seeded, and alone.
    """

    task: Task
    optimizer: Optimizer | None = None
    precision: Precision = attrs.field(factory=lambda: Precision.parse("fp32"))
    microbatch_size: int | None = None
    clip_grad: float | ClipGrad | None = None
    nonfinite: str = "error"
    measures_norm: bool = False
    engine: Engine = ONE_RANK
    donation: Donation | None = None
    strict: bool = False
    # Whether the code of a stage draws from Python's or NumPy's global generator, as far as that is known.
    host_draws: dict[str, bool] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    # Whether complete gradients are clipped or measured.
    finishes: bool = attrs.field(init=False, repr=False, eq=False)
    # Whether an update is written where the old numbers are as soon as it may be, and asks nothing else.
    writes_in_place: bool = attrs.field(init=False, repr=False, eq=False)

    @finishes.default
    def _finishes(self) -> bool:
        return self.clip_grad is not None or self.measures_norm

    @writes_in_place.default
    def _writes_in_place(self) -> bool:
        return (
            self.nonfinite == "error"
            and type(self.engine) is Engine
            and self.donation is not None
            and not self.donation.compiled
            and self.optimizer is not None
            and self.optimizer.overwrite is not None
        )

    @property
    def harmless(self) -> bool:
        """Whether the gradient of a microbatch of weight 0 is known to be 0, and not NaN."""
        return self.task.harmless

    def microbatches(self, batch: Any, size: int | None = None) -> list[Any]:
        """The batch in parts of at most ``size`` (default: ``microbatch_size``) samples, the last one smaller."""
        size = self.microbatch_size if size is None else size
        return [batch] if size is None else self.task.split(batch, size)

    def weights(self, pieces: list[Any], state: State) -> tuple[Weights, int]:
        """What each microbatch of a batch counts, and how many every rank goes through."""
        task, engine = self.task, self.engine
        if len(pieces) == 1 and engine.ranks == 1 and task.by_samples and not task.summed:
            whole = of_numbers((task.samples(pieces[0]),))  # so targets need not be counted
            if whole is not None:
                return whole, 1
        split = self.microbatch_size is not None
        return engine.weigh(task.weigh_parts(state.batch, pieces), state, split=split, summed=task.summed)

    def forward(self, state: State, *, index: int = 0, last: bool = True) -> State:
        """``outputs`` of ``microbatch`` in training mode, and the buffers after it.

        ``params`` become autograd leaves, which :meth:`backward` differentiates by. Random numbers
        (dropout) come from the run's seed, the batch and ``index``, the microbatch's number in it. ``last`` says that
        no other microbatch follows in this batch: in its backward the ranks, if there are several, exchange gradients.
        """
        if state.microbatch is None:
            raise ArgumentError(
                "state.microbatch is None, and the forward runs on it: in a script, "
                "stages.forward(state.replace(microbatch=batch))."
            )
        draft = fresh_draft_of(state)
        self.forward_into(draft, index, last)
        return _frozen(draft, state)

    def forward_into(self, state: Any, index: int, last: bool) -> None:
        """Of a draft, as the following ones: what nobody sees in between need not be copied in between."""
        microbatch, model, task, engine, donation = state.microbatch, state.model, self.task, self.engine, self.donation
        if donation is None:
            params = engine.leaves(state, index=index, last=last)
        else:
            params = donation.leaves(state, engine, index=index, last=last)
        forward = task.forward
        draws = model.may_draw or forward is not default_forward
        if draws and state.timestamp.batch == 0 and index == 0 and task.loss is not None and task.loss_may_draw:
            forward = model.watching(forward, [getattr(task.loss, "loss", task.loss), task.forward])
        plain = self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled()
        if draws:
            plain = plain and self.host_draws.get("forward") is False and not self.strict and draws_on_host(params)
        if plain and type(engine) is Engine:
            # Written out, as below where the loss is: in the middle of a step a call takes a microsecond or two.
            drawn = None
            try:
                if draws:
                    drawn = seed_host(self.seed_of(state, "forward", index))
                instance = model.enter(params, state.buffers, training=True)
                if forward is default_forward and type(microbatch) is tuple and len(microbatch) == 2:
                    outputs = instance.module(microbatch[0])
                else:
                    outputs = forward(instance.module, microbatch)
                buffers = state.buffers
                if instance.buffers or instance.notes:
                    copy = forward is not default_forward or model.may_write_later()
                    buffers = instance.read_buffers(buffers, copy=copy)
                    if instance.altered is not model.altered:
                        state.model = model.with_altered(instance.altered)
                instance.be_held_by(params)
            except Exception as error:
                note_stage(error, "forward", state, index)
                raise
            finally:
                if drawn is not None:
                    unseed_host(drawn)
                set_grad_enabled(True)  # whatever the user's code has left
        else:

            def call() -> tuple[Any, FrozenDict[str, Tensor], ModelDef]:
                return engine.apply(state, lambda module: forward(module, microbatch), params, training=True, hold=True)

            outputs, buffers, state.model = self._with_gradients(call, state, "forward", index, draws)
        if donation is not None and donation.held is not None and donation.held.bound_to is None:
            donation.bound(params)
        state.params, state.outputs, state.buffers = params, outputs, buffers

    def loss(self, state: State, *, index: int = 0) -> State:
        """``loss`` of ``outputs``: the mean over this microbatch.

        Raises:
            LossError: it is not a scalar tensor, nor a dict of scalars with the key ``total``.
        """
        draft = fresh_draft_of(state)
        self.loss_into(draft, index)
        return _frozen(draft, state)

    def loss_into(self, state: Any, index: int) -> None:
        task, microbatch = self.task, state.microbatch
        of_batch = task.loss
        draws = task.loss_may_draw
        if task.implied is not None and task.implied.class_weights:
            self._refuse_other_targets(state)
        plain = self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled()
        if draws:
            plain = plain and self.host_draws.get("loss") is False and not self.strict and draws_on_host(state.params)
        if plain and of_batch is not None:
            drawn = None
            try:
                if draws:
                    drawn = seed_host(self.seed_of(state, "loss", index))
                if type(of_batch) is OnTargets and type(microbatch) is tuple and len(microbatch) == 2:
                    loss = of_batch.loss(state.outputs, microbatch[1])
                else:
                    loss = of_batch(state.outputs, microbatch)
            except Exception as error:
                note_stage(error, "loss", state, index)
                raise
            finally:
                if drawn is not None:
                    unseed_host(drawn)
                set_grad_enabled(True)
        else:

            def call() -> Any:
                return self._loss(state, training=True)

            loss, state.buffers, state.model = self._with_gradients(call, state, "loss", index, draws)
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, state, "AFTER_LOSS", task)
        state.loss = loss

    def _refuse_other_targets(self, state: Any) -> None:
        """Refuse probabilities in the place of class indices, by whose class weights microbatches were weighed.

        Raises:
            ArgumentError: an algorithm has put them there.
        """
        if self.microbatch_size is None and self.engine.ranks == 1:
            return
        try:
            before, now = state.batch[1], state.microbatch[1]
        except (LookupError, TypeError):
            return
        if now.is_floating_point() and not before.is_floating_point():
            raise ArgumentError(
                f"{self.task.loss_in_words} has class weights, and an algorithm (label_smoothing, or one that mixes "
                "targets) has made class indices probabilities. The mean of the loss divides by the class weights of "
                "indices, and by the number of probabilities, so microbatches and ranks weigh something else than it "
                "was taken for. Use the loss's own label_smoothing=, or task=pl.Task(weight=lambda batch: "
                "len(batch[1]))."
            )

    def backward(self, state: State, *, weight: float | Tensor = 1.0) -> State:
        """Add ``weight`` times the gradient of ``loss`` to ``grads``, and drop the graph.

        With a loss scale, gradients are scaled until :meth:`finish_gradients`.

        Raises:
            LossError: the loss doesn't depend on any parameter.
            AlgorithmStructureError: the parameters are not those of the forward.
        """
        loss = state.loss
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, state, "BEFORE_BACKWARD")
        taken = None
        if state._grads is not None and self.donation is not None:
            taken = self.donation.take_gradients(state)
        draft = fresh_draft_of(state)
        if taken is not None:
            draft._grads = taken
        self.backward_into(draft, weight, alone=taken is not None)
        return _frozen(draft, state)

    def backward_into(self, state: Any, weight: float | Tensor, *, alone: bool = False) -> None:
        if state._grads is NOT_READY:  # an algorithm takes a gradient of its own, at an event that has none yet
            state._grads = None
        loss, leaves, model, engine = state.loss, state.params, state.model, self.engine
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, state, "BEFORE_BACKWARD")
            loss = total_loss(loss)
        origin = getattr(leaves, "origin", None)
        if origin is None:
            raise AlgorithmStructureError(
                "params were replaced between the forward and the backward of a microbatch, so the loss is not a "
                "function of them. Replace params at BEFORE_FORWARD, or from AFTER_BACKWARD on."
            )
        unknown = type(weight) is not float and not is_number(weight)
        counts = unknown or weight != 0
        if not loss.requires_grad and counts:
            raise detached_loss(state)
        seed = weight if state.loss_scale is None else state.loss_scale.scale * weight
        found: Any
        if not counts:
            # The mean over nothing (a microbatch of padding) is NaN, and so would be 0 times its gradient.
            found = engine.gradient(state, None, seed, alone=alone)
        else:
            # Where only the device knows whether it counts, its gradient is made 0 there.
            mask: Any = weight > 0 if unknown and not self.harmless else None
            if state.timestamp.batch == 0 and _are_missing(state._grads):
                # Once a run: it looks at more than class and dtype, and walks the whole graph.
                check_loss(loss, state, "AFTER_LOSS", self.task)
                plain = [each for each in leaves.values() if type(each) is Tensor] if type(leaves) is FrozenDict else []
                known = engine.parameters()
                if known is not None and model.declared:
                    known = (*known, *leaves.values())  # which may be of a class of parameters
                refuse_strangers(loss, known, plain)
            # A checkpoint draws its dropout masks again here, and restores the global generator around that.
            draws = model.may_draw or self.task.forward is not default_forward
            guarded = draws and (self.host_draws.get("backward") is not False or not draws_on_host(origin))
            if guarded or any_autocast_enabled():
                with self._seeded(state, "backward", 0) if draws else _NOTHING, self._without_autocast(state):
                    found = engine.gradient(state, loss, seed, alone=alone, counts=mask)
            else:
                drawn = seed_host(self.seed_of(state, "backward", 0)) if draws else None
                try:
                    if (
                        state._grads is None
                        and type(engine) is Engine
                        and len(leaves) == len(model.trainable)
                        and mask is None
                    ):
                        found = gradient_of(loss, tuple(leaves.values()), seed)
                    else:
                        found = engine.gradient(state, loss, seed, alone=alone, counts=mask)
                finally:
                    if drawn is not None:
                        unseed_host(drawn)
        model.give_back(leaves)
        state.params = origin
        if found is not None:
            if counts and found[0] is None and all(gradient is None for gradient in found):
                raise detached_loss(state)
            before, grads = state._grads, FrozenDict(zip(model.trainable, found, strict=False))
            layout = getattr(origin, "layout", None)
            if (
                type(layout) is list
                and type(engine) is Engine
                and (before is None or is_laid_out(before, layout))
                and lie_plainly(found)
            ):
                grads.layout = layout  # autograd sees to it that a gradient is as large as what it is of
            state._grads = grads
        outputs, loss = state.outputs, state.loss
        state.outputs = outputs.detach() if type(outputs) is Tensor else detached(outputs)
        state.loss = loss.detach() if type(loss) is Tensor else detached(loss)

    def finish_gradients(
        self, state: State, *, divisor: float | Tensor = 1.0, loss: Any = None, alone: bool = False
    ) -> State:
        """Unscale the accumulated gradients, divide them by ``divisor``, and clip them; gives ``grad_norm``, too.

        ``loss``, if given, becomes the State's loss: that of the whole batch, or this rank's share of it. ``alone``
        says that nothing else refers to the gradients of ``state``: they are written to if they are large.

        Raises:
            DataError: the divisor is 0, because all microbatches weigh 0: the loss is a mean over nothing. With
                ``nonfinite="skip"`` the loss is NaN then, and :meth:`update` leaves the batch out.
        """
        clip: Any = self.clip_grad
        nothing = type(divisor) is float and divisor == 0
        if nothing and self.nonfinite == "error":
            raise DataError(
                f"all microbatches of batch {state.timestamp.batch} weigh 0, so its loss is a mean over nothing: "
                f'{WEIGHTS_ARE} nonfinite="skip" leaves such a batch out and counts it in state.skipped.'
            )
        if state.loss_scale is not None:
            divisor = divisor * state.loss_scale.scale
        scaled = type(divisor) is not float or divisor != 1.0
        unfinished, by_norm, taken = scaled or self.finishes, isinstance(clip, int | float), None
        if (scaled or by_norm) and not alone and self.donation is not None:
            taken = self.donation.take_gradients(state)
        if not unfinished and loss is None:
            return state
        draft = fresh_draft_of(state)
        if loss is not None:
            draft.loss = self.engine.settle(state, loss)
        if nothing:
            draft.loss = _times_nan(state.loss)
        if not unfinished:
            return _frozen(draft, state)
        if taken is not None:
            draft._grads, alone = taken, True
        with GradMode(False):
            present = [gradient for gradient in draft._grads.values() if gradient is not None] if alone else []
            in_place = alone and writable(present)
            if scaled and in_place:
                torch._foreach_div_(present, divisor)
            elif scaled:
                draft._grads = map_present(
                    lambda tensors: in_dtypes_of(tensors, torch._foreach_div(tensors, divisor)), draft._grads
                )
            if by_norm or self.measures_norm:
                draft.grad_norm = norm = global_norm(draft._grads)
                if by_norm and in_place:
                    torch._foreach_mul_(present, clipping_factor(draft._grads, clip, norm=norm))
                elif by_norm:
                    draft._grads = clip_by_norm(draft._grads, clip, norm=norm)
            if clip is not None and not by_norm:
                draft._grads = clip(draft._grads, state.params)
        return _frozen(draft, state)

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

        The new parameters are looked at for NaN and infinity: they show those of the gradients, whatever
        an algorithm did to them, and they are memory of ours, in which the cheapest kernel may write. Where a step
        may be skipped, loss and gradients are looked at before it, so that it can write where the old numbers are.

        Args:
            state: with gradients.
            buffers: those before the batch, which a batch that ``nonfinite="skip"`` leaves out must not change.
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
        return _frozen(draft, state)

    def update_draft(
        self, state: State, *, buffers: FrozenDict[str, Tensor] | None = None, model: ModelDef | None = None
    ) -> Any:
        """The draft of what :meth:`update` returns."""
        before: Before | None = None if buffers is None else (buffers, model)
        taken = None
        in_place = self.writes_in_place and state.loss_scale is None
        if in_place:
            taken = self.donation.take(state, shared=False)  # type: ignore[union-attr]
            if taken is not None:
                return self._update_in_place(state, taken, before)
        optimizer, engine = self.optimizer, self.engine
        if optimizer is None:
            raise ArgumentError("these stages have no optimizer: Stages(task=..., optimizer=pl.optim.adamw(...)).")
        optimizer = state.model.served_by(optimizer)
        donation, scale = self.donation, state.loss_scale
        if donation is not None and donation.compiled:  # compiled steps have a way of their own
            donation = None
        found = None
        if self.nonfinite == "skip" or scale is not None:
            found = self._overflow(state)
            scale = None if scale is None else scale.update(found)
            if found.is_cpu:
                if found.item():
                    if donation is not None:
                        donation.look_away()
                    return self._left_out(state, scale, before)
                found = None  # a step like any other
        overwrites = donation is not None and optimizer.overwrite is not None
        if overwrites and found is not None and not _leaves_out_itself(optimizer, state):
            donation.forget()  # type: ignore[union-attr]
            overwrites = False
        if overwrites and not in_place:
            shared = type(engine) is not Engine and engine.shares(state.params)
            taken = donation.take(state, shared=shared)  # type: ignore[union-attr]
        if taken is not None and found is None and type(engine) is Engine:
            draft = self._update_in_place(state, taken, before)
            draft.loss_scale = scale
            return draft
        draft = fresh_draft_of(state)
        draft.loss_scale = scale
        if taken is not None:
            params, trained, memory, _ = taken
        else:
            params, memory = state.params, memory_in(state)
            trained = state.model.trained(params)
        with GradMode(False):
            if taken is not None:
                new, opt_state = engine.overwrite(optimizer, state, trained, memory, found)
                fresh = list(new.values())
            else:
                new, opt_state = _updated(engine, optimizer, state, trained)
                if found is not None:
                    new, opt_state = _where(found[0].bool(), (trained, memory), (new, opt_state))
                # A parameter that was left as it is (it had no gradient) is still that of an earlier State.
                fresh = [
                    tensor for tensor, old in zip(new.values(), trained.values(), strict=True) if tensor is not old
                ]
            self._refuse_nonfinite(draft, state, fresh, found, before)
        if new is not trained:
            params = new if trained is params else FrozenDict({**params, **new})
        draft.params, draft.opt_state = params, opt_state
        if overwrites and not (taken is not None and donation.held is not None and donation.held.params is params):  # type: ignore[union-attr]
            donation.keep(draft, new, (trained, memory) if taken is None else (None, None), optimizer)  # type: ignore[union-attr]
        return draft

    def _update_in_place(self, state: State, taken: Taken, before: Before | None) -> Any:
        """The draft after an update that writes where the old numbers are, on one rank."""
        params, trained, memory, overwrite_unread = taken
        optimizer, donation, loss = self.optimizer, self.donation, state.loss
        assert optimizer is not None
        optimizer = state.model.served_by(optimizer)
        assert donation is not None
        draft = fresh_draft_of(state)
        overwrite: Any = overwrite_unread or optimizer.overwrite
        grad_mode = _grad_enabled()
        set_grad_enabled(False)
        try:
            new, draft.opt_state = overwrite(state._grads, memory, trained, state.timestamp)
            held = donation.held if new is trained else None
            if held is not None and held.alike and optimizer.spreads_nonfinite and type(loss) is Tensor and loss.is_cpu:
                if is_nonfinite(loss, held.values, alike=True):
                    raise nonfinite_error(state)
            else:
                self._refuse_nonfinite(draft, state, list(new.values()), None, before)
        finally:
            set_grad_enabled(grad_mode)
        if new is trained:
            draft.params = params
        else:
            draft.params = new if trained is params else FrozenDict({**params, **new})
        if held is None or held.params is not params:
            donation.keep(draft, new, (None, None), optimizer)
        return draft

    def _refuse_nonfinite(
        self,
        draft: Any,
        state: State,
        fresh: list[Tensor],
        found: Tensor | None,
        before: Before | None,
    ) -> None:
        """Raise for a loss or new parameters that are NaN or infinite, or note it on a device; see :meth:`update`."""
        assert self.optimizer is not None
        wrong = self._nonfinite(state, self.optimizer, fresh, found)
        if type(wrong) is not bool and not wrong.is_cpu:
            self._note_on_device(draft, state, found, wrong, before)
        elif wrong:
            raise nonfinite_error(state)

    def _overflow(self, state: State) -> Tensor:
        """1 where the loss or a gradient isn't finite, on any rank, else 0; float32, shape (1,)."""
        assert state._grads is not None
        with GradMode(False):
            grads = self.engine.local(state._grads.values())
            loss = total_loss(state.loss).to(device_of(state))
            return self.engine.anywhere(gradients_nonfinite(loss, grads))

    def _left_out(self, state: State, scale: Any, before: Before | None) -> Any:
        """The draft of the State after a step that is skipped."""
        if self.nonfinite == "error" and not loss_is_finite(state.loss):
            raise nonfinite_error(state)
        draft = fresh_draft_of(state)
        draft.loss_scale, draft.skipped = scale, state.skipped + 1
        if before is not None and self.nonfinite == "skip":
            _restore(draft, before)
        return draft

    def _nonfinite(self, state: State, optimizer: Optimizer, fresh: list[Tensor], found: Tensor | None) -> Any:
        """Whether the loss or one of the new parameters isn't finite: a tensor of shape (1,), or a bool.

        ``found``, if given, says so of the loss and the gradients already, on a device that isn't waited for.
        """
        loss, engine = total_loss(state.loss), self.engine
        if found is not None:
            return engine.anywhere(find_nonfinite(torch.zeros_like(found), engine.local(fresh)))
        if fresh and loss.is_cpu is not fresh[0].is_cpu:
            loss = loss.to(fresh[0].device)
        if loss.is_cpu and engine.ranks == 1 and optimizer.spreads_nonfinite:
            return is_nonfinite(loss, fresh)
        wrong = find_nonfinite(loss, engine.local(fresh))
        if not optimizer.spreads_nonfinite:
            assert state._grads is not None
            wrong = torch.maximum(wrong, gradients_nonfinite(loss, engine.local(state._grads.values())))
        return engine.anywhere(wrong)

    def _note_on_device(
        self, draft: Any, state: State, found: Tensor | None, wrong: Tensor, before: Before | None
    ) -> None:
        """Note the batch, without waiting for the device, and whether it was left out."""
        bad = wrong[0].bool()
        if found is not None:
            out = found[0].bool()
            draft.skipped = state.skipped + out
            if self.nonfinite == "error":
                bad = bad | ~torch.isfinite(total_loss(state.loss).to(wrong.device))
            elif before is not None:
                buffers, model = before
                if (model is None or model is state.model) and _alike(buffers, state.buffers):
                    draft.buffers = _where(out, buffers, state.buffers)
                elif bool(out):  # waits for the device, where forwards register or reshape buffers
                    _restore(draft, before)
        # full_like, because a Python number would be copied to the device, which waits for it.
        batch = torch.full_like(state.nonfinite, state.timestamp.batch)
        draft.nonfinite = torch.where(bad & (state.nonfinite < 0), batch, state.nonfinite)

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        """``outputs`` of ``microbatch`` in evaluation mode, without gradients.

        Args:
            state: with the microbatch.
            label, batch, index: of the evaluation, its batch and microbatch, from which random numbers come.
            gradients: whether the forward, or the loss of its outputs, may differentiate: outputs have a graph then.

        Raises:
            ModelError: the forward differentiates, and ``gradients`` is False.
        """
        microbatch, task = state.microbatch, self.task
        seed = derive(state.seed, label, batch, index, self.engine.rank)
        # Leaves, because a forward may differentiate by its parameters (an inner step) in evaluation too.
        params = self.engine.leaves(state, index=index, last=False)
        about = noting(lambda: f"raised in the forward of microbatch {index}, which is {describe(microbatch)}")
        refusing = refusing_to_differentiate("forward", gradients)
        with about, refusing, self._guard("validate", seed, state), GradMode(gradients), self._autocast(state):
            outputs, buffers, model = self.engine.apply(
                state, lambda module: task.evaluate(module, microbatch), params, training=False
            )
        self._forget_casts()
        if self.donation is not None:
            self.donation.seen = True
        draft = fresh_draft_of(state)
        draft.outputs, draft.buffers, draft.model = outputs, buffers, model
        return _frozen(draft, state)

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        """The loss of ``outputs`` in evaluation; shape (). ``gradients`` says whether it may differentiate."""
        seed, refusing = derive(state.seed, "validation loss"), refusing_to_differentiate("loss", gradients)
        with refusing, self._guard("validation loss", seed, state), GradMode(gradients), self._autocast(state):
            return measured_loss(self._loss(state, training=False)[0], self.task).detach()

    def _loss(self, state: State, *, training: bool) -> tuple[Any, FrozenDict[str, Tensor], ModelDef]:
        """The loss, and buffers and structure after it: a module's own loss may write to them."""
        outputs, microbatch = state.outputs, state.microbatch
        if self.task.loss is not None:
            return self.task.loss(outputs, microbatch), state.buffers, state.model

        def method(module: Any) -> Any:
            return module.loss(outputs, microbatch)

        return self.engine.apply(state, method, state.params, training=training)

    def _with_gradients(self, call: Callable[[], T], state: State, stage: str, index: int, draws: bool) -> T:
        """Call with gradients on, in this precision, and with random numbers of this stage, batch and microbatch."""
        try:
            if not draws and self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled():
                try:
                    return call()
                finally:
                    set_grad_enabled(True)  # whatever the user's code has left
            try:
                with GradMode(True), self._seeded(state, stage, index) if draws else _NOTHING, self._autocast(state):
                    return call()
            finally:
                self._forget_casts()
        except Exception as error:
            note_stage(error, stage, state, index)
            raise

    def _seeded(self, state: State, stage: str, index: int) -> AbstractContextManager[None]:
        return self._guard(stage, self.seed_of(state, stage, index), state)

    def _guard(self, stage: str, seed: int, state: State) -> AbstractContextManager[None]:
        """Seeds the global generators for a stage, those of Python and NumPy where its code may draw from them."""
        device = device_of(state)
        if _tracer() is not None:
            return seeded(seed, device)
        known = self.host_draws.get(stage)
        if known is None and stage == "backward":
            if self.host_draws.get("forward") is False:  # it runs no other code of the user's
                known = self.host_draws[stage] = False
        elif known is None:
            drawn, own = may_draw(self._code_of(stage, state))
            if drawn or not own:
                known = self.host_draws[stage] = drawn
        guard: AbstractContextManager[None]
        if known is None:
            guard = Observed(seed, device, partial(self.host_draws.__setitem__, stage))
        else:
            guard = SeededHosts(seed, device) if known else seeded(seed, device)
        if not self.strict:
            return guard
        hosts, alone = known is not False, stage != "backward"
        return Checked(guard, stage, state.timestamp.batch, hosts=hosts, device=device, alone=alone)

    def _code_of(self, stage: str, state: State) -> list[Any]:
        """Where the code of a stage begins."""
        task = self.task
        if stage in ("loss", "validation loss") and task.loss is not None:
            return [task.loss.loss if isinstance(task.loss, OnTargets) else task.loss]
        functions = [task.forward] if task.validate is None or stage != "validate" else [task.validate]
        return [state.model.code, *functions]

    def seed_of(self, state: State, stage: str, index: int) -> int:
        """Where the random numbers of a stage come from, in a microbatch of this number."""
        t = state.timestamp
        return derive(state.seed, stage, t.epoch, t.batch, index, self.engine.rank)

    def _autocast(self, state: State) -> AbstractContextManager[Any]:
        if self.precision.dtype is not None:
            context: AbstractContextManager[Any] = self.precision.autocast(device_of(state))
            return context
        return self._without_autocast(state)

    def _forget_casts(self) -> None:
        """Inside somebody's own autocast torch keeps casts of this step's leaves until that ends: after training."""
        if self.precision.dtype is not None and any_autocast_enabled():
            torch.clear_autocast_cache()

    def _without_autocast(self, state: State) -> AbstractContextManager[Any]:
        if not any_autocast_enabled():
            return _NOTHING
        kind = device_of(state).type
        # What is around the loop must not change what it computes.
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def draws_on_host(params: Any) -> bool:
    """Whether the generator of the CPU is all that is seeded with these parameters, and by itself."""
    return type(params) is FrozenDict and next(iter(params.values())).is_cpu and _tracer() is None


@contextmanager
def refusing_to_differentiate(what: str, gradients: bool) -> Iterator[None]:
    """Say what to write, where torch says that there is no graph.

    Raises:
        ModelError: the forward or the loss of an evaluation differentiates.
    """
    try:
        yield
    except RuntimeError as error:
        inference = torch.is_inference_mode_enabled()
        if "does not require grad" not in str(error) or (gradients and not inference):
            raise
        advice = (
            "run the stream outside of torch.inference_mode()"
            if inference
            else "ask for gradients, pl.Evaluator(data, gradients=True) or pl.predict(..., gradients=True)"
        )
        raise ModelError(
            f"the {what} differentiates (torch.autograd.grad), and in evaluation and prediction there is no graph by "
            f"default: {advice}."
        ) from error


def _are_missing(grads: Any) -> bool:
    """Whether no microbatch that counts has gone before."""
    return grads is None or all(gradient is None for gradient in grads.values())


def _times_nan(loss: Any) -> Any:
    if isinstance(loss, dict):
        return {name: _times_nan(part) for name, part in loss.items()}
    return loss * float("nan")


def _frozen(draft: Any, state: State) -> State:
    """A State again; nobody else has seen the draft."""
    draft.__class__ = state.__class__
    return draft  # type: ignore[no-any-return]


def _leaves_out_itself(optimizer: Optimizer, state: State) -> bool:
    """Whether the optimizer's kernel leaves a step out where a number on the device says so."""
    grads: Any = state._grads
    # Of which parameters had no gradient it keeps count on the host.
    return optimizer.takes_found_inf and all(each is not None and each.is_cuda for each in grads.values())


def _updated(
    engine: Engine, optimizer: Optimizer, state: State, trained: FrozenDict[str, Tensor]
) -> tuple[FrozenDict[str, Tensor], Any]:
    """What the optimizer makes of the parameters; its author may be the user."""
    updated: Any
    if optimizer.draws and _tracer() is None:
        # Of the batch, and not of the rank: replicated ranks draw alike.
        seed = derive(state.seed, "update", state.timestamp.epoch, state.timestamp.batch)
        with seeded_all(seed):
            updated = engine.update(optimizer, state, trained)
    else:
        updated = engine.update(optimizer, state, trained)
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


def _where(condition: Tensor, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``; waits for the device only where plain leaves differ."""
    leaves, spec = optree.tree_flatten(no, namespace=NAMESPACE)
    others, other_spec = optree.tree_flatten(yes, namespace=NAMESPACE)
    if spec != other_spec:  # an optimizer that keeps more, or less, after this step
        return yes if bool(condition) else no
    plain = [(a, b) for a, b in zip(others, leaves, strict=True) if not isinstance(b, Tensor)]
    if any(a != b for a, b in plain):
        return yes if bool(condition) else no
    chosen = [
        with_part(b, torch.where(condition, part_of(a), part_of(b))) if isinstance(b, Tensor) and a is not b else b
        for a, b in zip(others, leaves, strict=True)
    ]
    return optree.tree_unflatten(spec, chosen)


def value_and_grad(
    function: Callable[[FrozenDict[str, Tensor]], T], params: FrozenDict[str, Tensor]
) -> tuple[T, FrozenDict[str, Any]]:
    """``function(params)`` and its gradient, for scripts of your own: eager autograd, no ``.grad`` written.

    Args:
        function: of a mapping of names to tensors; gives a scalar tensor, or ``(tensor, anything)``.
        params: the point.

    Returns:
        What the function gave, without a graph, and the gradient by name (None where it has no part).

    Raises:
        LossError: the value is not a scalar tensor that depends on the parameters.

    >>> value_and_grad(lambda p: p["x"] ** 2, FrozenDict(x=torch.tensor(3.0)))
    (tensor(9.), FrozenDict({'x': tensor(6.)}))
    """
    leaves = FrozenDict((name, tensor.detach().requires_grad_()) for name, tensor in params.items())
    with GradMode(True):
        result = function(leaves)
        value: Any = result[0] if isinstance(result, tuple) else result
        if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
            raise LossError(
                f"value_and_grad: the function gave {value!r}, and what is differentiated is a tensor of shape () that "
                "depends on the parameters it was given: return loss, or (loss, anything)."
            )
        found = gradient_of(value, list(leaves.values()))
    return detached(result), FrozenDict(zip(leaves, found, strict=True))
