"""Algorithms that are deliberately wrong, each in one way, and the law that each breaks.

Laws of your own can be tried on them: a law that nothing breaks proves nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loop._internal.frames import callers, frame_at, variable
from pure_loop._internal.torch_private import fused_sgd
from pure_loop.algorithm import Algorithm, algorithm
from pure_loop.event import Event
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.testing._patches import breaking

__all__ = ["WRONG_ALGORITHMS"]

Factory: TypeAlias = Callable[[], Algorithm]
Function: TypeAlias = Callable[[State], State]

WRONG_ALGORITHMS: dict[Factory, str] = {}
"""Functions that make a wrong algorithm, and the name of the law that each breaks."""


breaks = breaking(WRONG_ALGORITHMS)


def handler(
    law: str, name: str, *events: Event, init: Callable[[State], object] | None = None
) -> Callable[[Function], Factory]:
    """Make such a function of a handler that keeps nothing outside of the State.

    Args:
        law: the law that it breaks.
        name: of the algorithm.
        events: at which it runs.
        init: makes the algorithm's state; None: it has none.
    """

    def register(function: Function) -> Factory:
        @wraps(function)
        def make() -> Algorithm:
            return Algorithm(name, dict.fromkeys(events, function), init=init)

        return breaks(law)(make)

    return register


def gradients(state: State) -> dict[str, Tensor]:
    """Those that there are."""
    assert state.grads is not None
    return {name: gradient for name, gradient in state.grads.items() if gradient is not None}


def with_gradients(state: State, change: Callable[[Tensor], Tensor]) -> State:
    assert state.grads is not None
    return state.replace(grads={name: None if g is None else change(g) for name, g in state.grads.items()})


def with_loss(state: State, factor: float) -> State:
    loss = state.loss
    assert loss is not None
    return state.replace(loss={**loss, "total": loss["total"] * factor} if isinstance(loss, dict) else loss * factor)


def with_params(state: State, factor: float) -> State:
    return state.replace(params={name: tensor * factor for name, tensor in state.params.items()})


@handler("purity", "decay", Event.AFTER_TRAIN_BATCH)
def adds_in_place(state: State) -> State:
    for gradient in gradients(state).values():
        gradient.mul_(0.5)
    return state


@handler("purity", "decay", Event.AFTER_TRAIN_BATCH)
def writes_through_data(state: State) -> State:
    """Behind the back of the version counter."""
    for gradient in gradients(state).values():
        gradient.data *= 0.5
    return state


@handler("purity", "step", Event.AFTER_TRAIN_BATCH)
def steps_with_a_fused_kernel(state: State) -> State:
    """Fused kernels write without counting versions."""
    if fused_sgd is None:
        raise RuntimeError("this version of torch lacks the fused kernel of SGD, which this algorithm calls.")
    present = gradients(state)
    fused_sgd(
        [state.params[name] for name in present],
        [*present.values()],
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


@handler("purity", "statistics", Event.BATCH_END, init=lambda state: (torch.zeros(1), torch.ones(1)))
def lends_its_memory_to_batchnorm(state: State) -> State:
    """BatchNorm writes to the statistics that it is given."""
    losses = total_loss(state.loss)
    mean, variance = state.algorithm_state["statistics"]
    values = torch.stack([losses, losses + 1]).detach().to(mean.dtype).reshape(2, 1)
    torch.nn.functional.batch_norm(values, mean, variance, training=True)
    return state.remember("statistics", (mean, variance))


@breaks("purity")
def keeps_an_alias_and_writes_to_it_later() -> Algorithm:
    alias: list[Tensor] = []

    def keep(state: State) -> State:
        alias[:] = [state.algorithm_state["alias"]]
        return state

    def write(state: State) -> State:
        if alias:
            alias[0].add_(0.0).mul_(0.5)
        return state

    def renew(state: State) -> State:
        return state.remember("alias", torch.ones(2))

    handlers = {Event.BATCH_START: keep, Event.BATCH_END: renew, Event.EPOCH_END: write}
    return Algorithm("alias", handlers, init=lambda state: torch.ones(2))


@handler("purity", "jitter", Event.AFTER_LOSS)
def draws_from_the_operating_system(state: State) -> State:
    return with_loss(state, 1.0 + os.urandom(4)[0] / 1000 + os.urandom(4)[1] / 7000)


@breaks("memory")
def draws_from_a_generator_of_its_own() -> Algorithm:
    """Its state is nowhere in the State; the global generators would have been seeded."""
    own = torch.Generator()

    @algorithm(Event.AFTER_LOSS)
    def jitter(state: State) -> State:
        return with_loss(state, 1.0 + float(torch.rand((), generator=own)) / 10)

    return jitter


@handler("purity", "backward", Event.AFTER_LOSS)
def leaks_gradients(state: State) -> State:
    torch.autograd.backward(total_loss(state.loss), retain_graph=True)
    return state


@handler("purity", "look", Event.BATCH_END)
def leaves_grad_mode_off(state: State) -> State:
    torch.set_grad_enabled(False)
    return state


@handler("purity", "halve", Event.AFTER_LOSS)
def hooks_a_tensor(state: State) -> State:
    total: Any = total_loss(state.loss)  # torch has no types for hooks
    total.register_hook(lambda gradient: gradient * 0.5)
    return state


@breaks("memory")
def remembers_in_a_closure() -> Algorithm:
    calls: list[int] = []

    @algorithm(Event.AFTER_LOSS)
    def warm_up(state: State) -> State:
        calls.append(1)
        return with_loss(state, min(1.0, len(calls) / 10))

    return warm_up


@breaks("memory")
def remembers_in_its_predicate() -> Algorithm:
    calls: list[int] = []

    def every_other(state: State) -> bool:
        calls.append(1)
        return len(calls) % 2 == 0

    return algorithm(Event.AFTER_LOSS, when=every_other, name="sometimes")(lambda state: with_loss(state, 0.5))


@breaks("memory")
def sets_itself_up_at_the_start() -> Algorithm:
    """A fresh instance that joins later has not been set up."""
    settings: dict[str, float] = {}

    def set_up(state: State) -> State:
        settings["factor"] = 0.5
        return state

    def halve(state: State) -> State:
        return with_loss(state, settings["factor"])

    return Algorithm("set_up", {Event.FIT_START: set_up, Event.AFTER_LOSS: halve})


@handler("structure", "history", Event.BATCH_END, init=lambda state: torch.zeros(1))
def lets_its_memory_grow(state: State) -> State:
    return state.remember("history", torch.cat([state.algorithm_state["history"], torch.zeros(1)]))


@handler("structure", "gap", Event.AFTER_LOSS, init=lambda state: state.params[state.model.trainable[0]].sum() * 0)
def remembers_a_graph(state: State) -> State:
    total = total_loss(state.loss)
    return state.remember("gap", total - total.detach())


@handler("structure", "compress", Event.AFTER_TRAIN_BATCH)
def returns_another_dtype(state: State) -> State:
    return with_gradients(state, Tensor.bfloat16)


@handler("discipline", "count", Event.BATCH_END, init=lambda state: 0)
def drops_the_memory_of_others(state: State) -> State:
    return state.replace(algorithm_state={"count": state.algorithm_state["count"] + 1})


@handler("discipline", "augment", Event.BEFORE_FORWARD)
def replaces_the_batch_too_late(state: State) -> State:
    """The batch has been split; nothing reads it any more."""
    inputs, targets = state.batch
    return state.replace(batch=(inputs.flip(-1) + 1, targets))


@handler("discipline", "clip", Event.BATCH_END)
def clips_after_the_step(state: State) -> State:
    return state if state.grads is None else with_gradients(state, lambda gradient: gradient * 0.5)


@handler("order", "spread", Event.BEFORE_LOSS)
def fails_on_a_single_sample(state: State) -> State:
    if len(state.outputs) == 1:
        raise ValueError("the variance of one number is not defined")
    return state


@handler("order", "look", Event.AFTER_LOSS, Event.PREDICT_BATCH_END)
def fails_in_prediction(state: State) -> State:
    """There is no loss in prediction."""
    return state.replace(loss=total_loss(state.loss) * 1.0)


@handler("microbatch_invariance", "warm_up", Event.AFTER_LOSS, init=lambda state: 0)
def counts_microbatches_as_batches(state: State) -> State:
    count = state.algorithm_state["warm_up"] + 1
    return with_loss(state, min(1.0, count / 10)).remember("warm_up", count)


@breaks("microbatch_invariance")
def takes_the_mean_of_means() -> Algorithm:
    """The gradient of the mean of the microbatches' means, whatever they hold."""
    name = "mean_of_means"

    def reset(state: State) -> State:
        return state.remember(name, (0.0, 0))

    def add(state: State) -> State:
        total, count = state.algorithm_state[name]
        return state.remember(name, (total + float(total_loss(state.loss).detach()), count + 1))

    def scale(state: State) -> State:
        total, count = state.algorithm_state[name]
        return with_gradients(state, lambda gradient: gradient * (1.0 + total / count))

    events = {Event.BEFORE_TRAIN_BATCH: reset, Event.AFTER_LOSS: add, Event.AFTER_TRAIN_BATCH: scale}
    return Algorithm(name, events, init=lambda state: (0.0, 0))


@handler("microbatch_invariance", "whiten", Event.BEFORE_LOSS)
def normalises_within_a_microbatch(state: State) -> State:
    return state.replace(outputs=state.outputs - state.outputs.mean(dim=0, keepdim=True) * 0.5)


@breaks("evaluation_invariance")
def trains_by_its_evaluations() -> Algorithm:
    def note(state: State) -> State:
        return state.remember("patience", state.algorithm_state["patience"] * 0.9)

    def scale(state: State) -> State:
        return with_loss(state, state.algorithm_state["patience"])

    return Algorithm("patience", {Event.EVAL_END: note, Event.AFTER_LOSS: scale}, init=lambda state: 1.0)


@handler("observer_invariance", "show_off", Event.AFTER_LOSS)
def trains_differently_when_watched(state: State) -> State:
    """It looks up the stack whether the loop has observers, of which a State says nothing."""
    has_observers = any(variable(frame, "observers") for frame in callers(frame_at(0)))
    return with_loss(state, 0.5) if has_observers else state


@handler("composition", "share", Event.AFTER_LOSS)
def depends_on_its_neighbours(state: State) -> State:
    return with_loss(state, 1.0 / (1 + len(state.algorithm_state)))


@breaks("resumption")
def starts_over_at_fit_start() -> Algorithm:
    """FIT_START comes in every call, when training resumes too."""

    def reset(state: State) -> State:
        return state.remember("ramp", 0)

    def ramp(state: State) -> State:
        count = state.algorithm_state["ramp"] + 1
        return with_params(state, 1 - count / 1e3).remember("ramp", count)

    return Algorithm("ramp", {Event.FIT_START: reset, Event.BATCH_END: ramp}, init=lambda state: 0)


@handler("resumption", "tally", Event.BATCH_END, init=lambda state: torch.zeros(()))
def remembers_on_a_tensor(state: State) -> State:
    """In an attribute of a tensor, which is no part of its value."""
    before = state.algorithm_state["tally"]
    after = before.clone()
    after.count_of_calls = getattr(before, "count_of_calls", 0) + 1
    return with_params(state, 1 - after.count_of_calls / 1e3).remember("tally", after)


@handler("checkpoint", "thirds", Event.BATCH_END, init=lambda state: Fraction(0))
def remembers_a_fraction(state: State) -> State:
    """A value like any other, and none that a file can hold."""
    return state.remember("thirds", state.algorithm_state["thirds"] + Fraction(1, 3))


@handler("closing", "prefetch", Event.FIT_START)
def leaves_a_thread(state: State) -> State:
    threading.Thread(target=threading.Event().wait, args=(2,), daemon=True, name="prefetch").start()
    return state


@handler("rank_agreement", "favour", Event.AFTER_LOSS)
def depends_on_its_rank(state: State) -> State:
    return with_loss(state, 1.0 + int(os.environ.get("LOCAL_RANK", "0")) / 10)


@handler("rank_agreement", "share", Event.AFTER_TRAIN_BATCH)
def communicates_on_one_rank_alone(state: State) -> State:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
        torch.distributed.all_reduce(torch.ones(1))
    return state


@handler("world_size", "scale", Event.AFTER_TRAIN_BATCH)
def scales_by_the_samples_that_it_sees(state: State) -> State:
    """Of several ranks, each sees another number."""
    return with_gradients(state, lambda gradient: gradient * len(state.batch[0]))
