"""Stages: the computations between the events, as pure functions ``State -> State``.

A stage knows no events, algorithms or callbacks. It reads a State, computes, and returns another;
whatever it writes to is memory of its own. The loop's script strings stages and events together;
scripts of your own and algorithms call the same stages.
"""

from __future__ import annotations

import math
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from pure_loop._internal.autograd import refuse_strangers
from pure_loop._internal.pytree import Batch
from pure_loop._internal.weights import WEIGHTS_ARE, Weights, is_number, of_numbers
from pure_loop.data.batch import describe
from pure_loop.data.group import Batches, parts_of
from pure_loop.errors import AlgorithmStructureError, ArgumentError, DataError
from pure_loop.frozendict import FrozenDict
from pure_loop.gradients.clipping import clipping_factor, global_norm, in_dtypes_of, map_present
from pure_loop.metrics import Metric
from pure_loop.metrics.loss import default_metrics
from pure_loop.model.model import ModelDef
from pure_loop.random.seeds import derive
from pure_loop.stages.differentiation import refusing_to_differentiate
from pure_loop.stages.loss import check_loss, detached, detached_loss, map_loss, measured_loss
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.notes import note_loss, note_module, note_stage
from pure_loop.stages.update import UpdateStage
from pure_loop.state import NOT_READY, State, lend, raw_loss, raw_outputs, raw_params, setter, with_fields
from pure_loop.task import Task


@attrs.frozen(kw_only=True)
class Stages(UpdateStage):
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
        workspace: where tensors are, and which of them may be written to; by default a stage copies.
        strict: see to it that forwards and losses draw from no other generators than those that are seeded, and alone.
    """

    def with_task(self, task: Task) -> Stages:
        """These stages with another task, such as that of an evaluator with a loss of its own."""
        return attrs.evolve(self, task=task)

    def default_metrics(self, state: State) -> tuple[Metric, ...]:
        """What an evaluator without metrics measures, judging by the outputs of a microbatch."""
        return default_metrics(*self.task.measured(state.outputs, state.microbatch), self.task)

    def weights(self, pieces: list[Batch], state: State) -> tuple[Weights, int]:
        """The weight of each microbatch of a batch, and how many microbatches every rank runs."""
        task, engine = self.task, self.engine
        if len(pieces) == 1 and not engine.exchanges and task.by_samples and not task.summed:
            samples_alone = of_numbers((task.samples(pieces[0]),))  # so targets need not be counted
            if samples_alone is not None:
                return samples_alone, 1
        split = self.splits or type(state.batch) is Batches
        return engine.weigh(task.weigh_parts(state.batch, pieces), state, split=split, summed=task.summed)

    def forward(self, state: State, *, index: int = 0, last: bool = True) -> State:
        """``outputs`` of ``microbatch`` in training mode, and the buffers after it.

        ``params`` become autograd leaves, which :meth:`backward` differentiates by. Random numbers
        (dropout) come from the run's seed, the batch and ``index``, the microbatch's number in it. ``last`` says that
        no other microbatch follows in this batch: in its backward the ranks, if there are several, exchange gradients.
        """
        microbatch, task, forward = state.microbatch, self.task, self.task.forward
        if microbatch is None:
            raise ArgumentError(
                "state.microbatch is None, and the forward runs on it: in a script, "
                "stages.forward(state.replace(microbatch=batch))."
            )
        params = self.engine.leaves(state, index=index, last=last)
        if state.timestamp.batch == 0 and index == 0 and task.loss is not None and task.loss_may_use_rng:
            forward = state.model.watching(forward, [getattr(task.loss, "loss", task.loss), task.forward])
        code = self.code_of(state, "forward")
        try:
            with self.running(state, "forward", index, code=code):
                outputs, buffers, model = self.engine.apply(
                    state, lambda module: forward(module, microbatch), params, training=True, hold=True
                )
        except Exception as error:
            note_module(error)
            note_stage(error, "forward", state, index)
            raise
        self.workspace.went_through(state.model, params, lent=code == "users")
        return _forwarded[type(state)](state, params, outputs, buffers, model)

    def loss(self, state: State, *, index: int = 0) -> State:
        """``loss`` of ``outputs``: the mean over this microbatch.

        Raises:
            LossError: it is not a scalar tensor, nor a dict of scalars with the key ``total``.
        """
        task = self.task
        if task.implied is not None and task.implied.class_weights:
            self._refuse_other_targets(state)
        code = self.code_of(state, "loss")
        try:
            with self.running(state, "loss", index, code=code):
                loss, buffers, model = self._loss(state, training=True)
        except Exception as error:
            note_loss(error, task.loss_in_words, state)
            note_stage(error, "loss", state, index)
            raise
        if code == "users":
            lend(raw_params(state))
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, state, "AFTER_LOSS", task)
        return _measured[type(state)](state, loss, buffers, model)

    def _refuse_other_targets(self, state: State) -> None:
        """Refuse probabilities in place of class indices: microbatches were weighted by the class weights of these.

        Raises:
            ArgumentError: an algorithm replaced the indices.
        """
        if not self.splits and not self.engine.exchanges and type(state.batch) is not Batches:
            return
        try:
            before, targets = parts_of(state.batch)[0][1], state.microbatch[1]
        except (LookupError, TypeError):
            return
        if targets.is_floating_point() and not before.is_floating_point():
            raise ArgumentError(
                f"{self.task.loss_in_words} has class weights, and an algorithm (label_smoothing, or one that mixes "
                "targets) turned class indices into probabilities. For indices the mean divides by their class "
                "weights, and for probabilities by their number, so the weights of microbatches and ranks would be "
                "wrong. Use the loss's own label_smoothing=, or loss=pl.Task(loss=..., weight=lambda batch: "
                "len(batch[1]))."
            )

    def backward(self, state: State, *, weight: float | Tensor = 1.0) -> State:
        """Add ``weight`` times the gradient of ``loss`` to ``grads``, and drop the graph.

        With a loss scale, gradients are scaled until :meth:`finish_gradients`.

        Raises:
            LossError: the loss doesn't depend on any parameter.
            AlgorithmStructureError: the parameters are not those of the forward.
        """
        loss, leaves, model = raw_loss(state), raw_params(state), state.model
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
        # An algorithm takes a gradient of its own at an event without gradients.
        grads = None if state._grads is NOT_READY else state._grads
        # More than class and dtype, and the whole graph. A second batch shows whether it goes through the first; with
        # compile=True that is the third, because the first one is traced.
        if counts and state.timestamp.batch < 3:
            check_loss(raw_loss(state), state, "AFTER_LOSS", self.task)
            parameters = self.engine.parameters()
            if parameters is not None and model.declared:
                parameters = (*parameters, *leaves.values())  # which may be of a subclass of nn.Parameter
            own = leaves.values() if type(leaves) is FrozenDict else ()
            refuse_strangers(loss, parameters, own, model.attribute_with)
        seed = weight if state.loss_scale is None else state.loss_scale.scale * weight
        # The mean over nothing (a microbatch of padding) is NaN, and so would be 0 times its gradient. If only the
        # device knows whether the weight is 0, the gradient is made 0 there.
        mask: Any = weight > 0 if unknown and not self.harmless else None
        # A checkpoint draws its dropout masks again here, and restores the global generator around that.
        in_place = grads is not None and self.workspace.take_gradients(state)
        summed = state if state._grads is grads else with_fields(state, _grads=grads)
        try:
            with self.running(state, "backward", code=self.code_of(state, "backward"), casts=False):
                result = self.engine.gradient(summed, loss if counts else None, seed, in_place=in_place, counts=mask)
        except Exception as error:
            error.add_note(f"raised in the backward of batch {state.timestamp.batch}")
            raise
        model.release_graph(leaves)
        if result is not None:
            if counts and (not result or result[0] is None) and all(gradient is None for gradient in result):
                raise detached_loss(state)
            grads = FrozenDict(zip(model.differentiated(state.frozen), result, strict=True))
            if state.frozen:
                grads = FrozenDict((name, grads.get(name)) for name in model.trainable)
        return _differentiated[type(state)](
            state, origin, grads, detached(raw_outputs(state)), detached(raw_loss(state))
        )

    def finish_gradients(self, state: State, *, divisor: float | Tensor = 1.0, loss: Any = None) -> State:
        """Unscale the accumulated gradients, divide them by ``divisor``, and clip them; sets ``grad_norm``, too.

        ``loss``, if not None, becomes the State's loss: that of the whole batch, or this rank's share of it.

        Raises:
            DataError: the divisor is 0, because all microbatches have weight 0: the loss is a mean over nothing. With
                ``nonfinite="skip"`` the loss is NaN then, and :meth:`update` skips the step.
        """
        is_number, clip = type(divisor) is float, cast("Any", self.clip_grad)
        is_plain = clip is None and not self.measures_norm and state.loss_scale is None
        if loss is None and is_number and divisor == 1.0 and is_plain:
            return state if state.grad_norm is None else with_fields(state, grad_norm=None)
        nothing = is_number and divisor == 0
        if nothing and self.nonfinite == "error":
            raise DataError(
                f"all microbatches of batch {state.timestamp.batch} weigh 0, so its loss is a mean over nothing: "
                f'{WEIGHTS_ARE} nonfinite="skip" skips such a batch and counts it in state.skipped.'
            )
        if state.loss_scale is not None:
            divisor = divisor * state.loss_scale.scale
        mean = raw_loss(state) if loss is None else self.engine.reduce_loss(state, loss)
        if nothing:
            mean = map_loss(lambda part: part * math.nan, raw_loss(state))
        norm, grads = None, state._grads
        by_norm = isinstance(clip, int | float)
        factors = [divisor] if type(divisor) is not float or divisor != 1.0 else []
        in_place = bool(factors or by_norm) and self.workspace.take_gradients(state)
        with torch.set_grad_enabled(False):
            if factors:
                grads = _scaled(grads, in_place, divisor, torch._foreach_div, torch._foreach_div_)
            if by_norm or self.measures_norm:
                norm = global_norm(grads)
            if by_norm:
                factor = clipping_factor(grads, clip, norm=norm)
                grads = _scaled(grads, in_place, factor, torch._foreach_mul, torch._foreach_mul_)
            elif clip is not None:
                lend(grads)
                with self.seeding(state, "clip_grad", code=self.code_of(state, "clip_grad")):
                    grads = clip(grads, state.params)
        return _finished[type(state)](state, grads, norm, mean)

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        """``outputs`` of ``microbatch`` in evaluation mode, without gradients.

        Args:
            state: with the microbatch.
            label, batch, index: of the evaluation, its batch and microbatch; they seed the random numbers.
            gradients: whether the forward, or the loss of its outputs, may differentiate: outputs have a graph then.

        Raises:
            ModelError: the forward differentiates, and ``gradients`` is False.
        """
        microbatch, task = state.microbatch, self.task
        seed = derive(state.seed, label, batch, index, self.engine.rank)
        # Leaves, because a forward may differentiate by its parameters (an inner step) in evaluation too, and by those
        # that are frozen in training.
        params = self.engine.leaves(with_fields(state, frozen=frozenset()), index=index, last=False)
        refusing = refusing_to_differentiate("forward", gradients)
        code = self.code_of(state, "validate")
        try:
            with refusing, self.running(state, "validate", index, code=code, seed=seed, gradients=gradients):
                outputs, buffers, model = self.engine.apply(
                    state, lambda module: task.evaluate(module, microbatch), params, training=False
                )
        except Exception as error:
            note_module(error)
            error.add_note(f"raised in the forward of microbatch {index}, which is {describe(microbatch)}")
            raise
        self.workspace.went_through(state.model, params, lent=code == "users")
        return _validated[type(state)](state, outputs, buffers, model)

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        """The loss of ``outputs`` in evaluation; shape (). ``gradients`` says whether it may differentiate."""
        seed, refusing = derive(state.seed, "validation loss"), refusing_to_differentiate("loss", gradients)
        code = self.code_of(state, "validation loss")
        try:
            with refusing, self.running(state, "validation loss", code=code, seed=seed, gradients=gradients):
                return measured_loss(self._loss(state, training=False)[0], self.task).detach()
        except Exception as error:
            note_loss(error, self.task.loss_in_words, state)
            raise

    def _loss(self, state: State, *, training: bool) -> tuple[Any, FrozenDict[str, Tensor], ModelDef]:
        """The loss, and buffers and structure after it: a module's own loss may write to them."""
        outputs, microbatch = raw_outputs(state), state.microbatch
        if self.task.loss is not None:
            loss = self.task.loss(outputs, microbatch)
            loss = loss if self.task.loss_total is None else self.task.totalled(loss)
            return loss, state.buffers, state.model

        def method(module: Any) -> Any:
            return self.task.totalled(module.loss(outputs, microbatch))

        return self.engine.apply(state, method, raw_params(state), training=training)


def _scaled(grads: Any, in_place: bool, factor: Any, copying: Any, writing: Any) -> Any:
    """Gradients times a factor, or divided by one: by torch's function that copies, or the one that writes."""
    if in_place:
        writing([gradient for gradient in grads.values() if gradient is not None], factor)
        return grads
    return map_present(lambda tensors: in_dtypes_of(tensors, copying(tensors, factor)), grads)


_forwarded = setter("params", "outputs", "buffers", "model")
_measured = setter("loss", "buffers", "model")
_differentiated = setter("params", "_grads", "outputs", "loss")
_finished = setter("_grads", "grad_norm", "loss")
_validated = setter("outputs", "buffers", "model")
