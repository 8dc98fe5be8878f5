"""Evaluation and prediction: the forward of a microbatch, and the loss of its outputs, as one graph."""

from __future__ import annotations

from functools import partial

import attrs
from torch import Tensor

from pure_loop._internal.pytree import Outputs
from pure_loop.compile.graph import PerBatch, Traced
from pure_loop.compile.refusals import Untraceable
from pure_loop.compile.replay import Recorders
from pure_loop.compile.segment import Segment
from pure_loop.compile.stages import fields_of
from pure_loop.loop.batch import LoopStages
from pure_loop.metrics import Metric
from pure_loop.stages.loss import detached
from pure_loop.state import State, raw_params, with_fields
from pure_loop.task import Task


@attrs.define
class _Last:
    """The outputs of the last microbatch, and their loss."""

    outputs: Outputs = None
    loss: Tensor | None = None
    eager: bool = False


@attrs.frozen(kw_only=True)
class CompiledEvaluation(LoopStages):
    """The loop's stages, of which those that evaluate are compiled.

    Attributes:
        with_loss: whether some metric is of the loss, which is computed with the outputs then.
        where_possible: whether a forward that can't be traced runs eagerly; else it is an error.
        single: the stages of this rank alone.
        segments: what is compiled, by whether it may differentiate.
        recorders: what records its graphs on a device.
        interprets: whether its graphs are not compiled.
        by_task: those of other tasks, by the ids of these.
    """

    with_loss: bool
    where_possible: bool
    single: LoopStages
    segments: dict[bool, Segment]
    last: _Last
    recorders: Recorders
    interprets: bool = False
    by_task: dict[int, CompiledEvaluation] = attrs.field(factory=dict, repr=False, eq=False)

    @classmethod
    def of(
        cls,
        stages: LoopStages,
        recorders: Recorders,
        *,
        with_loss: bool,
        where_possible: bool,
        interprets: bool = False,
    ) -> CompiledEvaluation:
        def program(gradients: bool, state: State, per_batch: PerBatch, traced: Traced) -> tuple[State, None, PerBatch]:
            state = with_fields(state, microbatch=per_batch[0])
            state = traced.stages.validate(state, label="", batch=0, gradients=gradients)
            loss = traced.stages.validation_loss(state, gradients=gradients) if with_loss else None
            return state, None, (detached(state.outputs) if gradients else state.outputs, loss)

        single = attrs.evolve(stages, engine=stages.engine.single_rank())
        name = "evaluation" if with_loss else "prediction"
        in_parts = stages.engine.in_parts
        segments = {
            gradients: Segment(
                name,
                partial(program, gradients),
                single,
                recorders,
                left_out=in_parts,
                brief=bool(in_parts),
                interprets=interprets,
            )
            for gradients in (False, True)
        }
        return cls(
            **fields_of(stages),
            with_loss=with_loss,
            where_possible=where_possible,
            single=single,
            segments=segments,
            last=_Last(),
            recorders=recorders,
            interprets=interprets,
        )

    def with_task(self, task: Task) -> CompiledEvaluation:
        if id(task) not in self.by_task:
            self.by_task[id(task)] = CompiledEvaluation.of(
                attrs.evolve(self.single, engine=self.engine, task=task),
                self.recorders,
                with_loss=self.with_loss,
                where_possible=self.where_possible,
                interprets=self.interprets,
            )
        return self.by_task[id(task)]

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        last = self.last
        unsharded = self.engine.unsharded(state)
        if not last.eager:
            try:
                timestamps = state.previous_timestamp, state.timestamp
                run = self.segments[gradients](unsharded, timestamps, (state.microbatch,))
            except Untraceable as error:
                if not (self.where_possible or error.runs_eagerly):
                    raise error.for_users() from error.__cause__  # not twice the same text
                error.let_go()
                last.eager = True
        if last.eager:
            result = self.single.validate(unsharded, label=label, batch=batch, index=index, gradients=gradients)
            return with_fields(state, outputs=result.outputs, buffers=result.buffers, model=result.model)
        last.outputs, last.loss = run.per_batch
        if self.workspace.ownership is not None:
            self.workspace.ownership.observed = True
        fields = dict(zip(run.names, run.durable, strict=True))
        return with_fields(state, **{**fields, "params": raw_params(state), "outputs": last.outputs})

    def default_metrics(self, state: State) -> tuple[Metric, ...]:
        return self.single.default_metrics(state)

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        # An algorithm at EVAL_AFTER_FORWARD may have put other outputs in.
        if state.outputs is self.last.outputs and self.last.loss is not None:
            return self.last.loss
        # Where a module has a loss of its own, that may be of its parameters.
        measured = self.engine.unsharded(state) if self.task.loss is None else state
        return self.single.validation_loss(measured, gradients=gradients)
