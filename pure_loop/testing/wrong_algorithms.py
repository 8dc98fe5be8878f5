"""Algorithms that are deliberately wrong, each in one way, and the law that each breaks.

Laws of your own can be tried on them: a law that nothing breaks proves nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import pure_loop as pl
from pure_loop._internal.torch_private import fused_sgd
from pure_loop.algorithm import Algorithm
from pure_loop.event import Event
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State

__all__ = ["WRONG_ALGORITHMS"]


def adds_in_place() -> Algorithm:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def decay(state: State) -> State:
        assert state.grads is not None
        for gradient in state.grads.values():
            if gradient is not None:
                gradient.mul_(0.5)
        return state

    return decay


def writes_through_data() -> Algorithm:
    """Behind the back of the version counter."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def decay(state: State) -> State:
        assert state.grads is not None
        for gradient in state.grads.values():
            if gradient is not None:
                gradient.data *= 0.5
        return state

    return decay


def steps_with_a_fused_kernel() -> Algorithm:
    """Fused kernels write without counting versions."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def step(state: State) -> State:
        assert state.grads is not None
        pairs = [(state.params[name], gradient) for name, gradient in state.grads.items() if gradient is not None]
        if fused_sgd is None:
            raise RuntimeError("this version of torch lacks the fused kernel of SGD, which this algorithm calls.")
        fused_sgd(
            [tensor for tensor, _ in pairs],
            [gradient for _, gradient in pairs],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.01,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )
        return state

    return step


def lends_its_memory_to_batchnorm() -> Algorithm:
    """BatchNorm writes to the statistics that it is given."""
    name = "statistics"

    def update(state: State) -> State:
        losses = total_loss(state.loss)
        mean, variance = state.algorithm_state[name]
        values = torch.stack([losses, losses + 1]).detach().to(mean.dtype).reshape(2, 1)
        torch.nn.functional.batch_norm(values, mean, variance, training=True)
        return state.remember(name, (mean, variance))

    return Algorithm(name, {Event.BATCH_END: update}, init=lambda state: (torch.zeros(1), torch.ones(1)))


def keeps_an_alias_and_writes_to_it_later() -> Algorithm:
    kept: list[Tensor] = []

    def keep(state: State) -> State:
        kept[:] = [state.algorithm_state["alias"]]
        return state

    def write(state: State) -> State:
        if kept:
            kept[0].add_(0.0).mul_(0.5)
        return state

    return Algorithm(
        "alias",
        {
            Event.BATCH_START: keep,
            Event.BATCH_END: lambda state: state.remember("alias", torch.ones(2)),
            Event.EPOCH_END: write,
        },
        init=lambda state: torch.ones(2),
    )


def draws_from_the_operating_system() -> Algorithm:
    @pl.algorithm(Event.AFTER_LOSS)
    def jitter(state: State) -> State:
        return state.replace(loss=_times(state.loss, 1.0 + os.urandom(4)[0] / 1000 + os.urandom(4)[1] / 7000))

    return jitter


def draws_from_a_generator_of_its_own() -> Algorithm:
    """Its state is nowhere in the State; the global generators would have been seeded."""
    own = torch.Generator()

    @pl.algorithm(Event.AFTER_LOSS)
    def jitter(state: State) -> State:
        return state.replace(loss=_times(state.loss, 1.0 + float(torch.rand((), generator=own)) / 10))

    return jitter


def leaks_gradients() -> Algorithm:
    @pl.algorithm(Event.AFTER_LOSS)
    def backward(state: State) -> State:
        total: Any = total_loss(state.loss)
        total.backward(retain_graph=True)
        return state

    return backward


def leaves_grad_mode_off() -> Algorithm:
    @pl.algorithm(Event.BATCH_END)
    def look(state: State) -> State:
        torch.set_grad_enabled(False)
        return state

    return look


def hooks_a_tensor() -> Algorithm:
    @pl.algorithm(Event.AFTER_LOSS)
    def halve(state: State) -> State:
        total: Any = total_loss(state.loss)
        total.register_hook(lambda gradient: gradient * 0.5)
        return state

    return halve


def remembers_in_a_closure() -> Algorithm:
    seen: list[int] = []

    @pl.algorithm(Event.AFTER_LOSS)
    def warm_up(state: State) -> State:
        seen.append(1)
        return state.replace(loss=_times(state.loss, min(1.0, len(seen) / 10)))

    return warm_up


def sets_itself_up_at_the_start() -> Algorithm:
    """A fresh instance that joins later has not been set up."""
    settings: dict[str, float] = {}

    def set_up(state: State) -> State:
        settings["factor"] = 0.5
        return state

    def halve(state: State) -> State:
        return state.replace(loss=_times(state.loss, settings["factor"]))

    return Algorithm("set_up", {Event.FIT_START: set_up, Event.AFTER_LOSS: halve})


def remembers_on_a_tensor() -> Algorithm:
    """In an attribute of a tensor, which is no part of its value."""

    def count(state: State) -> State:
        before = state.algorithm_state["tally"]
        after = before.clone()
        after.seen = getattr(before, "seen", 0) + 1
        params = {name: tensor * (1 - after.seen / 1e3) for name, tensor in state.params.items()}
        return state.replace(params=params).remember("tally", after)

    return Algorithm("tally", {Event.BATCH_END: count}, init=lambda state: torch.zeros(()))


def remembers_in_its_predicate() -> Algorithm:
    calls: list[int] = []

    def every_other(state: State) -> bool:
        calls.append(1)
        return len(calls) % 2 == 0

    return pl.algorithm(Event.AFTER_LOSS, when=every_other, name="sometimes")(
        lambda state: state.replace(loss=_times(state.loss, 0.5))
    )


def lets_its_memory_grow() -> Algorithm:
    def note(state: State) -> State:
        history = state.algorithm_state["history"]
        return state.remember("history", torch.cat([history, torch.zeros(1)]))

    return Algorithm("history", {Event.BATCH_END: note}, init=lambda state: torch.zeros(1))


def remembers_a_graph() -> Algorithm:
    def note(state: State) -> State:
        total = total_loss(state.loss)
        return state.remember("gap", total - total.detach())

    return Algorithm(
        "gap", {Event.AFTER_LOSS: note}, init=lambda state: state.params[state.model.trainable[0]].sum() * 0
    )


def returns_another_dtype() -> Algorithm:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def compress(state: State) -> State:
        assert state.grads is not None
        return state.replace(grads={n: None if g is None else g.bfloat16() for n, g in state.grads.items()})

    return compress


def drops_the_memory_of_others() -> Algorithm:
    def count(state: State) -> State:
        return state.replace(algorithm_state={"count": state.algorithm_state["count"] + 1})

    return Algorithm("count", {Event.BATCH_END: count}, init=lambda state: 0)


def replaces_the_batch_too_late() -> Algorithm:
    """The batch has been split; nothing reads it any more."""

    @pl.algorithm(Event.BEFORE_FORWARD)
    def augment(state: State) -> State:
        inputs, targets = state.batch
        return state.replace(batch=(inputs.flip(-1) + 1, targets))

    return augment


def clips_after_the_step() -> Algorithm:
    @pl.algorithm(Event.BATCH_END)
    def clip(state: State) -> State:
        if state.grads is None:
            return state
        return state.replace(grads={n: None if g is None else g * 0.5 for n, g in state.grads.items()})

    return clip


def fails_on_a_single_sample() -> Algorithm:
    @pl.algorithm(Event.BEFORE_LOSS)
    def spread(state: State) -> State:
        if len(state.outputs) == 1:
            raise ValueError("the variance of one number is not defined")
        return state

    return spread


def fails_in_prediction() -> Algorithm:
    """There is no loss in prediction."""

    @pl.algorithm(Event.AFTER_LOSS, Event.PREDICT_BATCH_END)
    def look(state: State) -> State:
        return state.replace(loss=total_loss(state.loss) * 1.0)

    return look


def counts_microbatches_as_batches() -> Algorithm:
    def warm_up(state: State) -> State:
        seen = state.algorithm_state["warm_up"] + 1
        return state.replace(loss=_times(state.loss, min(1.0, seen / 10))).remember("warm_up", seen)

    return Algorithm("warm_up", {Event.AFTER_LOSS: warm_up}, init=lambda state: 0)


def takes_the_mean_of_means() -> Algorithm:
    """The gradient of the mean of the microbatches' means, whatever they hold."""
    name = "mean_of_means"

    def reset(state: State) -> State:
        return state.remember(name, (0.0, 0))

    def add(state: State) -> State:
        total = total_loss(state.loss)
        seen, count = state.algorithm_state[name]
        return state.remember(name, (seen + float(total.detach()), count + 1))

    def scale(state: State) -> State:
        seen, count = state.algorithm_state[name]
        assert state.grads is not None
        grads = {n: None if g is None else g * (1.0 + seen / count) for n, g in state.grads.items()}
        return state.replace(grads=grads)

    events = {Event.BEFORE_TRAIN_BATCH: reset, Event.AFTER_LOSS: add, Event.AFTER_TRAIN_BATCH: scale}
    return Algorithm(name, events, init=lambda state: (0.0, 0))


def normalises_within_a_microbatch() -> Algorithm:
    @pl.algorithm(Event.BEFORE_LOSS)
    def whiten(state: State) -> State:
        return state.replace(outputs=state.outputs - state.outputs.mean(dim=0, keepdim=True) * 0.5)

    return whiten


def trains_by_its_evaluations() -> Algorithm:
    def note(state: State) -> State:
        return state.remember("patience", state.algorithm_state["patience"] * 0.9)

    def scale(state: State) -> State:
        return state.replace(loss=_times(state.loss, state.algorithm_state["patience"]))

    return Algorithm("patience", {Event.EVAL_END: note, Event.AFTER_LOSS: scale}, init=lambda state: 1.0)


def trains_differently_when_watched() -> Algorithm:
    """It looks up the stack whether the loop has observers."""

    @pl.algorithm(Event.AFTER_LOSS)
    def show_off(state: State) -> State:
        frame = sys._getframe()
        while frame is not None and not (
            frame.f_locals.get("observers") or getattr(frame.f_locals.get("run"), "observers", None)
        ):
            frame = frame.f_back  # type: ignore[assignment]
        return state.replace(loss=_times(state.loss, 0.5)) if frame is not None else state

    return show_off


def depends_on_its_neighbours() -> Algorithm:
    @pl.algorithm(Event.AFTER_LOSS)
    def share(state: State) -> State:
        return state.replace(loss=_times(state.loss, 1.0 / (1 + len(state.algorithm_state))))

    return share


def starts_over_at_fit_start() -> Algorithm:
    """FIT_START comes in every call, when training resumes too."""

    def reset(state: State) -> State:
        return state.remember("ramp", 0)

    def ramp(state: State) -> State:
        seen = state.algorithm_state["ramp"] + 1
        params = {name: tensor * (1 - seen / 1e3) for name, tensor in state.params.items()}
        return state.replace(params=params).remember("ramp", seen)

    return Algorithm("ramp", {Event.FIT_START: reset, Event.BATCH_END: ramp}, init=lambda state: 0)


def remembers_a_fraction() -> Algorithm:
    """A value like any other, and none that a file can hold."""

    def count(state: State) -> State:
        return state.remember("thirds", state.algorithm_state["thirds"] + Fraction(1, 3))

    return Algorithm("thirds", {Event.BATCH_END: count}, init=lambda state: Fraction(0))


def leaves_a_thread() -> Algorithm:
    @pl.algorithm(Event.FIT_START)
    def prefetch(state: State) -> State:
        threading.Thread(target=threading.Event().wait, args=(2,), daemon=True, name="prefetch").start()
        return state

    return prefetch


def depends_on_its_rank() -> Algorithm:
    @pl.algorithm(Event.AFTER_LOSS)
    def favour(state: State) -> State:
        return state.replace(loss=_times(state.loss, 1.0 + int(os.environ.get("LOCAL_RANK", "0")) / 10))

    return favour


def communicates_on_one_rank_alone() -> Algorithm:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def share(state: State) -> State:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            torch.distributed.all_reduce(torch.ones(1))
        return state

    return share


def _times(loss: Any, factor: float) -> Any:
    return {**loss, "total": loss["total"] * factor} if isinstance(loss, dict) else loss * factor


def scales_by_the_samples_that_it_sees() -> Algorithm:
    """Of several ranks, each sees another number."""

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def scale(state: State) -> State:
        assert state.grads is not None
        size = len(state.batch[0])
        return state.replace(grads={name: g if g is None else g * size for name, g in state.grads.items()})

    return scale


WRONG_ALGORITHMS: dict[Callable[[], Algorithm], str] = {
    adds_in_place: "purity",
    writes_through_data: "purity",
    steps_with_a_fused_kernel: "purity",
    lends_its_memory_to_batchnorm: "purity",
    keeps_an_alias_and_writes_to_it_later: "purity",
    draws_from_the_operating_system: "purity",
    draws_from_a_generator_of_its_own: "memory",
    leaks_gradients: "purity",
    leaves_grad_mode_off: "purity",
    hooks_a_tensor: "purity",
    remembers_in_a_closure: "memory",
    remembers_in_its_predicate: "memory",
    sets_itself_up_at_the_start: "memory",
    lets_its_memory_grow: "structure",
    remembers_a_graph: "structure",
    returns_another_dtype: "structure",
    drops_the_memory_of_others: "discipline",
    replaces_the_batch_too_late: "discipline",
    clips_after_the_step: "discipline",
    fails_on_a_single_sample: "order",
    fails_in_prediction: "order",
    counts_microbatches_as_batches: "microbatch_invariance",
    takes_the_mean_of_means: "microbatch_invariance",
    normalises_within_a_microbatch: "microbatch_invariance",
    trains_by_its_evaluations: "evaluation_invariance",
    trains_differently_when_watched: "observer_invariance",
    depends_on_its_neighbours: "composition",
    starts_over_at_fit_start: "resumption",
    remembers_on_a_tensor: "resumption",
    remembers_a_fraction: "checkpoint",
    leaves_a_thread: "closing",
    depends_on_its_rank: "rank_agreement",
    communicates_on_one_rank_alone: "rank_agreement",
    scales_by_the_samples_that_it_sees: "world_size",
}
"""Functions that make a wrong algorithm, and the name of the law that each breaks."""
