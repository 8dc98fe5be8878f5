"""Stages: the computations between the events, as pure functions ``State -> State``.

A stage knows no events, algorithms or callbacks. It reads a State, computes, and returns another;
whatever it writes to is memory of its own. The loop's script strings stages and events together;
scripts of your own and algorithms call the same stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import GradMode, gradient_of, refuse_strangers
from pure_loop._internal.torch_private import any_autocast_enabled, set_grad_enabled
from pure_loop._internal.weights import WEIGHTS_ARE, Weights, is_number, of_numbers
from pure_loop.data.group import Batches, parts_of
from pure_loop.errors import AlgorithmStructureError, ArgumentError, DataError
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients import clip_by_norm, clipping_factor, global_norm, in_dtypes_of, map_present
from pure_loop.model.model import ModelDef
from pure_loop.optim.kernels import are_contiguous, has_layout
from pure_loop.random.seeds import pop_cpu_seed, push_cpu_seed
from pure_loop.stages.engine import Engine, writable
from pure_loop.stages.evaluation import EvaluationStage
from pure_loop.stages.loss import check_loss, detached, detached_loss
from pure_loop.stages.nonfinite import (
    total_loss,
)
from pure_loop.stages.notes import note_stage
from pure_loop.stages.settings import NO_CONTEXT, uses_cpu_rng_only
from pure_loop.stages.update import UpdateStage, as_state
from pure_loop.state import NOT_READY, State, fresh_draft_of, with_fields
from pure_loop.task import OnTargets, Task, default_forward

__all__ = ["Stages"]

T = TypeVar("T")
_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


@attrs.frozen(kw_only=True)
class Stages(UpdateStage, EvaluationStage):
    """The stages of training one model, with the settings they need.

    Args:
        task: what the model does with a batch.
        optimizer: how gradients become an update; None where nothing is updated.
        precision: of forward and loss.
        microbatch_size: samples a forward at most; None: the whole batch.
        found: the size in the place of ``microbatch_size`` that ``"auto"`` has found; None: it is not ``"auto"``.
        clip_grad: a global norm, or a function ``(grads, params) -> grads``.
        nonfinite: ``"error"`` or ``"skip"``: what to do with a loss or gradient that is NaN or infinite.
        measures_norm: whether ``state.grad_norm`` is wanted where no clipping needs it.
        engine: where forwards and backwards run, and what ranks agree on.
        donation: counts references to the memory that an update could write to; None: updates copy.
        strict: see to it that forwards and losses draw from no other generators than those that are seeded, and alone.
    """

    def with_task(self, task: Task) -> Stages:
        """The same stages of another task, such as that of an evaluator with a loss of its own."""
        return attrs.evolve(self, task=task)

    def microbatches(self, batch: Any, size: int | None = None) -> list[Any]:
        """The batch in parts of at most ``size`` (default: that of the stages) samples, the last one smaller.

        Each of the :class:`~pure_loop.data.group.Batches` of a step is split by itself.
        """
        size = self.size if size is None else size
        return list(parts_of(batch)) if size is None else self.task.split(batch, size)

    def weights(self, pieces: list[Any], state: State) -> tuple[Weights, int]:
        """The weight of each microbatch of a batch, and how many microbatches every rank runs."""
        task, engine = self.task, self.engine
        if len(pieces) == 1 and engine.ranks == 1 and task.by_samples and not task.summed:
            whole = of_numbers((task.samples(pieces[0]),))  # so targets need not be counted
            if whole is not None:
                return whole, 1
        split = self.splits or type(state.batch) is Batches
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
        return as_state(draft, state)

    def forward_into(self, state: Any, index: int, last: bool) -> None:
        """:meth:`forward` on a draft, which becomes a State only where one is observed; ``*_into`` alike."""
        microbatch, model, task, engine, donation = state.microbatch, state.model, self.task, self.engine, self.donation
        if donation is None:
            params = engine.leaves(state, index=index, last=last)
        else:
            params = donation.leaves(state, engine, index=index, last=last)
        forward = task.forward
        draws = model.may_use_rng or forward is not default_forward
        if draws and state.timestamp.batch == 0 and index == 0 and task.loss is not None and task.loss_may_use_rng:
            forward = model.watching(forward, [getattr(task.loss, "loss", task.loss), task.forward])
        plain = self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled()
        if draws:
            plain = plain and self.host_draws.get("forward") is False and not self.strict and uses_cpu_rng_only(params)
        if plain and type(engine) is Engine:
            # Written out, as in loss_into: in the middle of a step a call takes a microsecond or two.
            drawn = None
            try:
                if draws:
                    drawn = push_cpu_seed(self.seed_of(state, "forward", index))
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
                instance.bind_to_graph(params)
            except Exception as error:
                note_stage(error, "forward", state, index)
                raise
            finally:
                if drawn is not None:
                    pop_cpu_seed(drawn)
                set_grad_enabled(True)  # user code may have turned it off
        else:

            def call() -> tuple[Any, FrozenDict[str, Tensor], ModelDef]:
                return engine.apply(state, lambda module: forward(module, microbatch), params, training=True, hold=True)

            outputs, buffers, state.model = self._call_with_grad(call, state, "forward", index, draws)
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
        return as_state(draft, state)

    def loss_into(self, state: Any, index: int) -> None:
        task, microbatch = self.task, state.microbatch
        of_batch = task.loss
        draws = task.loss_may_use_rng
        if task.implied is not None and task.implied.class_weights:
            self._refuse_other_targets(state)
        plain = self.precision.dtype is None and _grad_enabled() and not any_autocast_enabled()
        if draws:
            plain = (
                plain and self.host_draws.get("loss") is False and not self.strict and uses_cpu_rng_only(state.params)
            )
        if plain and of_batch is not None:
            drawn = None
            try:
                if draws:
                    drawn = push_cpu_seed(self.seed_of(state, "loss", index))
                if type(of_batch) is OnTargets and type(microbatch) is tuple and len(microbatch) == 2:
                    loss = of_batch.loss(state.outputs, microbatch[1])
                else:
                    loss = of_batch(state.outputs, microbatch)
            except Exception as error:
                note_stage(error, "loss", state, index)
                raise
            finally:
                if drawn is not None:
                    pop_cpu_seed(drawn)
                set_grad_enabled(True)
        else:

            def call() -> Any:
                return self._loss(state, training=True)

            loss, state.buffers, state.model = self._call_with_grad(call, state, "loss", index, draws)
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, state, "AFTER_LOSS", task)
        state.loss = loss

    def _refuse_other_targets(self, state: Any) -> None:
        """Refuse probabilities in place of class indices, by whose class weights microbatches were weighted.

        Raises:
            ArgumentError: an algorithm replaced the indices.
        """
        if not self.splits and self.engine.ranks == 1 and type(state.batch) is not Batches:
            return
        try:
            before, now = parts_of(state.batch)[0][1], state.microbatch[1]
        except (LookupError, TypeError):
            return
        if now.is_floating_point() and not before.is_floating_point():
            raise ArgumentError(
                f"{self.task.loss_in_words} has class weights, and an algorithm (label_smoothing, or one that mixes "
                "targets) turned class indices into probabilities. For indices the mean divides by their class "
                "weights, and for probabilities by their number, so the weights of microbatches and ranks would be "
                "wrong. Use the loss's own label_smoothing=, or task=pl.Task(weight=lambda batch: len(batch[1]))."
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
        draft.__class__ = state.__class__
        return draft  # type: ignore[no-any-return]

    def backward_into(self, state: Any, weight: float | Tensor, *, alone: bool = False) -> None:
        if state._grads is NOT_READY:  # an algorithm takes a gradient of its own at an event without gradients
            state._grads = None
        loss, leaves, model, engine = state.loss, state.params, state.model, self.engine
        names = model.differentiated(state.frozen)
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
        result: Any
        if not counts:
            # The mean over nothing (a microbatch of padding) is NaN, and so would be 0 times its gradient.
            result = engine.gradient(state, None, seed, alone=alone)
        else:
            # If only the device knows whether the weight is 0, the gradient is made 0 there.
            mask: Any = weight > 0 if unknown and not self.harmless else None
            if state.timestamp.batch == 0 and _are_missing(state._grads):
                # Once a run: it checks more than class and dtype, and walks the whole graph.
                check_loss(loss, state, "AFTER_LOSS", self.task)
                plain = [leaf for leaf in leaves.values() if type(leaf) is Tensor] if type(leaves) is FrozenDict else []
                known = engine.parameters()
                if known is not None and model.declared:
                    known = (*known, *leaves.values())  # which may be of a subclass of nn.Parameter
                refuse_strangers(loss, known, plain)
            # A checkpoint draws its dropout masks again here, and restores the global generator around that.
            draws = model.may_use_rng or self.task.forward is not default_forward
            guarded = draws and (self.host_draws.get("backward") is not False or not uses_cpu_rng_only(origin))
            if guarded or any_autocast_enabled():
                with self._seeded(state, "backward", 0) if draws else NO_CONTEXT, self._without_autocast(state):
                    result = engine.gradient(state, loss, seed, alone=alone, counts=mask)
            else:
                drawn = push_cpu_seed(self.seed_of(state, "backward", 0)) if draws else None
                try:
                    if state._grads is None and type(engine) is Engine and len(leaves) == len(names) and mask is None:
                        result = gradient_of(loss, tuple(leaves.values()), seed)
                    else:
                        result = engine.gradient(state, loss, seed, alone=alone, counts=mask)
                finally:
                    if drawn is not None:
                        pop_cpu_seed(drawn)
        model.release_graph(leaves)
        state.params = origin
        if result is not None:
            if counts and result[0] is None and all(gradient is None for gradient in result):
                raise detached_loss(state)
            before = state._grads
            if state.frozen:
                by_name = dict(zip(names, result, strict=True))
                grads = FrozenDict((name, by_name.get(name)) for name in model.trainable)
            else:
                grads = FrozenDict(zip(names, result, strict=False))
            layout = getattr(origin, "layout", None)
            if (
                type(layout) is list
                and not state.frozen
                and type(engine) is Engine
                and (before is None or has_layout(before, layout))
                and are_contiguous(result)
            ):
                grads.layout = layout  # autograd guarantees that a gradient has the shape of its parameter
            state._grads = grads
        outputs, loss = state.outputs, state.loss
        state.outputs = outputs.detach() if type(outputs) is Tensor else detached(outputs)
        state.loss = loss.detach() if type(loss) is Tensor else detached(loss)

    def finish_gradients(
        self, state: State, *, divisor: float | Tensor = 1.0, loss: Any = None, alone: bool = False
    ) -> State:
        """Unscale the accumulated gradients, divide them by ``divisor``, and clip them; sets ``grad_norm``, too.

        ``loss``, if not None, becomes the State's loss: that of the whole batch, or this rank's share of it. ``alone``:
        nothing else refers to the gradients of ``state``, so they are written to if they are large.

        Raises:
            DataError: the divisor is 0, because all microbatches have weight 0: the loss is a mean over nothing. With
                ``nonfinite="skip"`` the loss is NaN then, and :meth:`update` skips the step.
        """
        if state.grad_norm is not None:  # of the batch before, in a script of a user's own
            state = with_fields(state, grad_norm=None)
        if (
            loss is None
            and type(divisor) is float
            and divisor == 1.0
            and not self.finishes
            and state.loss_scale is None
        ):
            return state
        clip: Any = self.clip_grad
        nothing = type(divisor) is float and divisor == 0
        if nothing and self.nonfinite == "error":
            raise DataError(
                f"all microbatches of batch {state.timestamp.batch} weigh 0, so its loss is a mean over nothing: "
                f'{WEIGHTS_ARE} nonfinite="skip" skips such a batch and counts it in state.skipped.'
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
            draft.loss = self.engine.reduce_loss(state, loss)
        if nothing:
            draft.loss = _times_nan(state.loss)
        if not unfinished:
            return as_state(draft, state)
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
        return as_state(draft, state)


def _are_missing(grads: Any) -> bool:
    """Whether no microbatch before this one had a gradient."""
    return grads is None or all(gradient is None for gradient in grads.values())


def _times_nan(loss: Any) -> Any:
    if isinstance(loss, dict):
        return {name: _times_nan(part) for name, part in loss.items()}
    return loss * float("nan")
