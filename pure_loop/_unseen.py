"""Batches that nobody looks into: what script and driver do with one, with everything between its kernels written out.

Where neither the consumer, an algorithm nor a callback is at an event from BEFORE_DATALOADER to AFTER_TRAIN_BATCH, a
batch needs one State, that of BATCH_END, and no way back to anybody in between. What is left between the kernels of a
small model is calls, each of which takes a microsecond or two there; so forward, loss, backward and update of the
commonest batch stand here once more, without what others need: one rank, ``(inputs, targets)`` at once and in full
precision, and a loss of torch's. Any other batch goes through the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from sys import _getframe, getrefcount
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from pure_loop._autograd import gradient_of
from pure_loop._batches import train_batch
from pure_loop._consumer import gives_up
from pure_loop._finite import total_loss
from pure_loop._losses import check_loss, detached, detached_loss
from pure_loop._notes import note_stage
from pure_loop.donation import drop_gradients
from pure_loop.engine import Engine
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.optim.optimizer import lie_plainly
from pure_loop.random import seed_host, seed_host_again, unseed_host
from pure_loop.sources import END
from pure_loop.stages import Stages, draws_on_host
from pure_loop.state import State, fresh_draft_of, outside_batch_at
from pure_loop.task import OnTargets, default_forward

if TYPE_CHECKING:
    from pure_loop._plain import PlainBatches

__all__ = ["unseen_batches"]

_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
BATCH_END, BATCH_CHECKPOINT = Event.BATCH_END, Event.BATCH_CHECKPOINT


def unseen_batches(
    asked: PlainBatches,
    attached: Collection[Event],
    attend: Callable[[Event, State], State],
    watch: Collection[Event],
    shown: Callable[[], State | None],
    followed: bool,
) -> Generator[tuple[Event, State], None, Callable[[], State | None]]:
    """:func:`pure_loop._plain.plain_batches`, where nobody looks before BATCH_END."""
    fit, batches, lap = asked.fit, asked.batches, asked.stopwatch.lap
    stages, boundary = fit.stages, fit.boundary
    donation, update_draft, common = stages.donation, stages.update_draft, _is_common(stages)
    assert donation is not None
    end, checkpoint = [(event in watch) + 2 * (event in attached) for event in (BATCH_END, BATCH_CHECKPOINT)]
    state: Any = asked.given.pop()
    try:
        while True:
            ready = train_batch(state, fit, next(batches, END), lap)
            if ready is None:
                asked.at = END
                return shown
            boundary.state = None
            batch, samples, tokens = ready
            # As in the driver, which is what has called: who has what the consumer was given last.
            seen = shown()
            given_up = seen is not None and followed and gives_up(_getframe(1).f_back, seen)
            if given_up and getrefcount(seen) == 3:
                drop_gradients(seen)  # type: ignore[arg-type]  # else they would be in the way of those of this batch
            del seen
            before, unchanged = state.timestamp, (state.buffers, state.model)
            draft = _gone_through(state, stages, batch, samples) if common else None
            if draft is None or state.model.may_draw:
                given_up = given_up and gives_up(_getframe(1).f_back, shown())  # code of the user's has run
            if draft is None:
                draft = fresh_draft_of(state)
                draft.batch = batch
                draft.__class__ = state.__class__
                draft = stages.gradients_of(draft)
            state = draft
            del draft, batch, ready

            # Nothing but `state` refers to it here, and who counts.
            others, seen = getrefcount(state) - 2, shown()
            given_up = given_up and getrefcount(seen) == 3
            donation.look(others, seen, replaced=given_up)
            del seen
            now = before.next_batch(samples, tokens, lap())
            draft = update_draft(state, unchanged)
            draft.timestamp, draft.previous_timestamp = now, before
            draft.event = draft.position = BATCH_END
            draft.__class__ = state.__class__
            state = draft
            del draft, before, unchanged
            if end:
                if end > 1:
                    state = attend(BATCH_END, state)
                if end != 2:
                    yield BATCH_END, state
                    shown = ref(state)
            if fit.evaluators:
                asked.at = BATCH_END
                return shown
            state = outside_batch_at[state.__class__](state, BATCH_CHECKPOINT, BATCH_CHECKPOINT)
            if checkpoint:
                if checkpoint > 1:
                    state = attend(BATCH_CHECKPOINT, state)
                if checkpoint != 2:
                    yield BATCH_CHECKPOINT, state
                    shown = ref(state)
            now = state.timestamp
            duration = now.max_duration
            if duration is not None and now.get(duration.unit) >= duration.value:
                asked.at = BATCH_CHECKPOINT
                return shown
    finally:
        asked.given.append(state)
        asked.model = state.model


def _is_common(stages: Stages) -> bool:
    """Whether batches may be of the commonest kind, as far as it doesn't change in a run."""
    task = stages.task
    return (
        type(stages.engine) is Engine
        and stages.microbatch_size is None
        and stages.precision.dtype is None
        and task.weight is None
        and task.forward is default_forward
        and type(task.loss) is OnTargets
        and not task.loss_may_draw
    )


def _gone_through(state: State, stages: Stages, batch: Any, samples: int) -> State | None:
    """The State after forward, loss and backward of all of a batch.

    None, and nothing is done, where it is of another kind after all.
    """
    model, donation = state.model, stages.donation
    draws = model.may_draw
    if (
        type(batch) is not tuple
        or len(batch) != 2
        or (weights := stages.weights_of_whole(batch, samples)) is None
        or state.timestamp.batch == 0  # the first backward looks through its graph
        or state.loss_scale is not None
        or len(model.trainable) != len(model.parameter_names)
        or not _grad_enabled()
        or _any_autocast()
        or (draws and not (stages.host_draws.get("forward") is False and draws_on_host(state.params)))
    ):
        return None
    assert donation is not None
    draft = fresh_draft_of(state)
    draft.batch = draft.microbatch = batch
    params = state.params
    leaves = donation.leaves(draft, stages.engine, index=0, last=True)
    stage, drawn = "forward", None
    try:
        if draws:
            drawn = seed_host(stages.seed_of(state, "forward", 0))
        try:
            instance = model.enter(leaves, draft.buffers, training=True)
            outputs = instance.module(batch[0])
            _set_grad_enabled(True)  # whatever the user's code has left
            if instance.buffers or instance.notes:
                draft.buffers = instance.read_buffers(draft.buffers, copy=model.may_write_later())
                if instance.altered is not model.altered:
                    draft.model = model.with_altered(instance.altered)
            instance.be_held_by(leaves)
            stage = "loss"
            loss: Any = stages.task.loss.loss(outputs, batch[1])  # type: ignore[union-attr]
        except Exception as error:
            note_stage(error, stage, draft, 0)
            raise
        finally:
            _set_grad_enabled(True)
        held = donation.held
        if held is not None and held.bound_to is None:
            donation.bound(leaves)
        if type(loss) is not Tensor or loss.ndim or not loss.is_floating_point():
            check_loss(loss, draft, "AFTER_LOSS", stages.task)
        total = loss if type(loss) is Tensor else total_loss(loss)
        if not total.requires_grad:
            raise detached_loss(draft)
        if drawn is not None:
            seed_host_again(stages.seed_of(state, "backward", 0))
        found = gradient_of(total, tuple(leaves.values()), weights.shares[0])
    finally:
        if drawn is not None:
            unseed_host(drawn)
    model.give_back(leaves)
    if found[0] is None and all(gradient is None for gradient in found):
        raise detached_loss(draft)
    grads = FrozenDict(zip(model.trainable, found, strict=False))
    layout = getattr(params, "layout", None)
    if type(layout) is list and lie_plainly(found):
        grads.layout = layout
    draft._grads = grads
    draft.loss = loss.detach() if type(loss) is Tensor else detached(loss)
    draft.outputs = outputs.detach() if type(outputs) is Tensor else detached(outputs)
    draft.__class__ = state.__class__
    if weights.divisor == 1.0 and not stages.finishes:
        return draft  # type: ignore[no-any-return]
    return stages.finish_gradients(draft, divisor=weights.divisor)
