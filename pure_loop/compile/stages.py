"""The loop's stages as they are traced: random numbers get groups, updates no branches on data, and errors names.

What a stage computes stays that of :class:`pure_loop.stages.Stages`; only the update is written again, because in eager
steps it reads from the device whether anything was not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import attrs
import torch
from torch import Tensor

from pure_loop.compile._torch import Function
from pure_loop.compile.draws import Group
from pure_loop.compile.guards import FORWARD, Part
from pure_loop.compile.kernels import NONFINITE
from pure_loop.compile.numbers import traced_timestamp
from pure_loop.compile.refusals import (
    WHERE_POSSIBLE,
    Undifferentiated,
    Untraceable,
    naming,
    refuse_kept,
    refuse_memory,
    refuse_plain,
    refuse_recurrence,
    refuse_subclasses,
)
from pure_loop.compile.tracing import Tracing
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.hooks import Handler
from pure_loop.loop.batch import LoopStages
from pure_loop.precision import LossScale
from pure_loop.random.guards import Place
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.settings import NO_CONTEXT, Code
from pure_loop.stages.update import in_order, select
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State, raw_loss, raw_params, with_fields

# What the one number that a step reports is made of.
LOSS_BAD, UPDATE_BAD = 1, 2


def traced_handlers(
    handlers: Mapping[Event, tuple[Handler, ...]], tracing: Tracing, place: Place
) -> dict[Event, tuple[Handler, ...]]:
    """Handlers that record what they read while they are traced, and that errors name when they can't be.

    Args:
        handlers: by event.
        tracing: the trace.
        place: the microbatch under way in it.
    """
    return {
        event: tuple(_traced(handler, event, tracing, place) for handler in listed)
        for event, listed in handlers.items()
    }


def _traced(handler: Handler, event: Event, tracing: Tracing, place: Place) -> Handler:
    what, part = f"algorithm {handler.algorithm!r} at {event.name}", ("handler", event)

    def drawing(state: State, path: tuple[str | int, ...] | None) -> AbstractContextManager[None]:
        if path is None:
            return nullcontext()
        return tracing.drawing(
            Group.of_code(path, event, place.microbatch, traced_timestamp(state).slot, tracing.device)
        )

    def guarded(function: Function, path: tuple[str | int, ...] | None) -> Function:
        def call(*args: Any) -> object:
            connected = _connected(tracing, what, part)
            context = tracing.context.on_behalf_of(what, part)
            with context, naming(tracing, what, part), connected, drawing(args[0], path):
                result = function(*args)
                refuse_memory(what, args[0].algorithm_state.get(handler.algorithm), part)
            return result

        return call

    path = handler.path
    when = None if handler.when is None else guarded(handler.when, None if path is None else (*path, "when"))
    return attrs.evolve(handler, function=guarded(handler.function, path), when=when, path=None)


def _connected(tracing: Tracing, what: str, part: Part = FORWARD) -> AbstractContextManager[object]:
    """Around code that may differentiate, if the forward is in its graph."""
    return nullcontext() if tracing.begins_with_leaves else Undifferentiated(what, part)


def fields_of(stages: LoopStages) -> dict[str, Any]:
    """What the loop's stages are made of, for others."""
    return {field.name: getattr(stages, field.name) for field in attrs.fields(LoopStages) if field.init}


@attrs.frozen(kw_only=True)
class TracedStages(LoopStages):
    """The loop's stages, on tensors without numbers."""

    tracing: Tracing

    @classmethod
    def of(
        cls, stages: LoopStages, tracing: Tracing, handlers: dict[Event, tuple[Handler, ...]], place: Place
    ) -> TracedStages:
        # Each event has its turn, and what is written to is decided outside.
        changes = {"handlers": handlers, "observed": frozenset(Event), "workspace": Workspace(), "place": place}
        return cls(**fields_of(stages) | changes, tracing=tracing)

    def gradients(self, state: State) -> State:
        with self.tracing.context.quiet():
            return LoopStages.gradients(self, state)

    def forward(self, state: State, *, index: int = 0, last: bool = True) -> State:
        what = f"the forward of {type(state.model.skeleton).__name__}"
        refuse_recurrence(what, state.model)
        with self.tracing.context.quiet(), naming(self.tracing, what):
            result = LoopStages.forward(self, state, index=index, last=last)
            self._refuse_other_buffers(what, state, result)
            refuse_subclasses(what, result.outputs)
            refuse_kept(what, result.model)
            return result

    def _refuse_other_buffers(self, what: str, state: State, after: State) -> None:
        """Refuse a graph in which buffers come, go, or change shape or dtype: the next batch needs another one."""
        model, before = state.model, state.buffers
        if after.model is model and after.buffers is before:
            return
        result: list[str] = []
        for name in {**before, **after.buffers}:
            was, buffer = before.get(name), after.buffers.get(name)
            if was is None or buffer is None:
                result.append(f"{'registers' if was is None else 'removes'} the buffer {name!r}")
            elif was.shape != buffer.shape or was.dtype is not buffer.dtype:
                shapes = f"{tuple(was.shape)} {was.dtype} to {tuple(buffer.shape)} {buffer.dtype}"
                result.append(f"changes the buffer {name!r} from {shapes}")
        if result or after.model is not model:
            raise Untraceable(
                f"{what} can't be compiled: it {result[0] if result else 'alters the buffers of the model'}, and a "
                "graph has buffers of one shape. Register a buffer of the full size in __init__ and write into it (a "
                "ring buffer, with its position), or call the model on one batch before training; "
                f"{WHERE_POSSIBLE}",
            )

    def loss(self, state: State, *, index: int = 0) -> State:
        with (
            self.tracing.context.quiet(),
            naming(self.tracing, "the loss"),
            _connected(self.tracing, "the loss"),
        ):
            result = LoopStages.loss(self, state, index=index)
            self._refuse_other_buffers("the loss", state, result)
            refuse_subclasses("the loss", result.loss)
            return result

    def backward(self, state: State, *, weight: float | Tensor = 1.0) -> State:
        with self.tracing.context.quiet(), naming(self.tracing, "the backward"):
            state = LoopStages.backward(self, state, weight=weight)
        for name, gradient in (state._grads or {}).items():
            if gradient is not None and gradient.is_sparse:
                raise Untraceable(
                    f"the gradient of {name!r} is sparse, and a graph holds dense tensors: use "
                    f"torch.nn.Embedding(..., sparse=False); {WHERE_POSSIBLE}",
                )
        return state

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        what = f"the forward of {type(state.model.skeleton).__name__} in evaluation"
        refuse_recurrence(what, state.model)
        with naming(self.tracing, what):
            result = LoopStages.validate(self, state, label=label, batch=batch, index=index, gradients=gradients)
        self._refuse_other_buffers(what, state, result)
        return result

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        with naming(self.tracing, "the loss in evaluation"):
            return LoopStages.validation_loss(self, state, gradients=gradients)

    def code_of(self, state: State, stage: str) -> Code:
        # What is drawn there is refused, as in an update.
        has_no_draws = stage in ("clip_grad", "validate", "validation loss")
        return None if has_no_draws else LoopStages.code_of(self, state, stage)

    def seeding(
        self, state: State, stage: str, index: int = 0, *, code: Code, seed: int | None = None
    ) -> AbstractContextManager[None]:
        if code is None:
            return NO_CONTEXT
        return self.tracing.drawing(Group.of_stage(stage, index, traced_timestamp(state).slot, self.tracing.device))


def update(
    stages: TracedStages, state: State, buffers: FrozenDict[str, Tensor], **counted: Any
) -> tuple[State, Tensor]:
    """One step of the optimizer without a branch on data, and what was not finite in it; int64, shape ().

    It does what :meth:`pure_loop.stages.Stages.update` does; on a CPU the caller reads the number and raises.
    """
    optimizer, params = stages.optimizer, raw_params(state)
    assert optimizer is not None
    optimizer = state.model.served_by(optimizer)
    trained = state.model.trained(params)
    fields: dict[str, Any] = {}
    context = stages.tracing.context
    what = f"optimizer {optimizer.name!r}"
    with torch.set_grad_enabled(False):
        with context.on_behalf_of(what), naming(stages.tracing, what, ("update", None)):
            updated, opt_state = in_order(optimizer, stages.engine.update(optimizer, state, trained), trained)
        loss = total_loss(raw_loss(state))
        old = list(trained.values())
        fresh = [tensor for tensor, before in zip(updated.values(), old, strict=True) if tensor is not before]
        grads = [gradient for gradient in state._grads.values() if gradient is not None]
        scale = state.loss_scale
        skips = stages.nonfinite == "skip" or scale is not None
        zero = stages.tracing.lift(torch.float32, lambda env: 0.0)
        bad_loss = ~torch.isfinite(loss.detach())
        if fresh:
            bad_loss = bad_loss.to(fresh[0].device)  # the loss may be on the host, where it would not be reported
        bad_update = NONFINITE(fresh if optimizer.spreads_nonfinite or skips else [*fresh, *grads], zero)
        wrong = bad_loss | bad_update
        if skips:
            refuse_plain(state.opt_state, opt_state)
            left_out = bad_loss | NONFINITE(grads, zero)
            bad_update = bad_update & ~left_out
            wrong = bad_update if stages.nonfinite == "skip" else bad_update | bad_loss
            updated, opt_state = select(left_out, trained, updated), select(left_out, state.opt_state, opt_state)
            fields["skipped"] = state.skipped + left_out
            if scale is not None:
                fields["loss_scale"] = _next_scale(scale, left_out)
            if stages.nonfinite == "skip":
                fields["buffers"] = select(left_out, buffers, state.buffers)
        if not wrong.is_cpu:
            batch = traced_timestamp(state).as_input(lambda timestamp: float(timestamp.batch))
            earlier = cast("Tensor", state.nonfinite)
            noted = torch.zeros_like(earlier) + batch.to(torch.int64)
            fields["nonfinite"] = torch.where(wrong & (earlier < 0), noted, earlier)
        report = wrong.long() * (LOSS_BAD * bad_loss.long() + UPDATE_BAD * bad_update.long())
    fields["params"] = updated if trained is params else FrozenDict({**params, **updated})
    return with_fields(state, opt_state=opt_state, **fields, **counted), report


def _next_scale(scale: LossScale, bad: Tensor) -> LossScale:
    """:meth:`LossScale.update`, in operations that a compiler sees through."""
    grown = scale.growth_tracker + 1
    grows = grown == LossScale.GROWTH_INTERVAL
    larger = scale.scale * LossScale.GROWTH_FACTOR
    grown_scale = torch.where(grows & torch.isfinite(larger), larger, scale.scale)
    return LossScale(
        torch.where(bad, scale.scale * LossScale.BACKOFF_FACTOR, grown_scale),
        torch.where(bad | grows, torch.zeros_like(grown), grown),
    )
