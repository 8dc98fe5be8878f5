"""The forward and the loss of evaluation and prediction, in eval mode."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from pure_loop.data.batch import describe
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.random.seeds import derive
from pure_loop.stages.differentiation import refusing_to_differentiate
from pure_loop.stages.loss import measured_loss
from pure_loop.stages.notes import noting
from pure_loop.stages.settings import StageSettings
from pure_loop.state import State, raw_outputs, raw_params, setter, with_fields

__all__ = ["EvaluationStage"]


@attrs.frozen(kw_only=True)
class EvaluationStage(StageSettings):
    """Evaluation and prediction of :class:`~pure_loop.stages.stages.Stages`."""

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
        about = noting(lambda: f"raised in the forward of microbatch {index}, which is {describe(microbatch)}")
        refusing = refusing_to_differentiate("forward", gradients)
        code = self.code_of(state, "validate")
        with about, refusing, self.running(state, "validate", index, code=code, seed=seed, gradients=gradients):
            outputs, buffers, model = self.engine.apply(
                state, lambda module: task.evaluate(module, microbatch), params, training=False
            )
        self.workspace.went_through(state.model, params, lent=code == "users")
        return _validated[type(state)](state, outputs, buffers, model)  # type: ignore[no-any-return]

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        """The loss of ``outputs`` in evaluation; shape (). ``gradients`` says whether it may differentiate."""
        seed, refusing = derive(state.seed, "validation loss"), refusing_to_differentiate("loss", gradients)
        code = self.code_of(state, "validation loss")
        with refusing, self.running(state, "validation loss", code=code, seed=seed, gradients=gradients):
            return measured_loss(self._loss(state, training=False)[0], self.task).detach()

    def _loss(self, state: State, *, training: bool) -> tuple[Any, FrozenDict[str, Tensor], ModelDef]:
        """The loss, and buffers and structure after it: a module's own loss may write to them."""
        outputs, microbatch = raw_outputs(state), state.microbatch
        if self.task.loss is not None:
            return self.task.loss(outputs, microbatch), state.buffers, state.model

        def method(module: Any) -> Any:
            return module.loss(outputs, microbatch)

        return self.engine.apply(state, method, raw_params(state), training=training)


_validated = setter("outputs", "buffers", "model")
