"""Where a call starts: the State that it begins or resumes from, and what it must not be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.devices import read_device
from pure_loop._internal.pytree import NAMESPACE
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.event import Event
from pure_loop.model.checks import refuse_untrainable
from pure_loop.optim import Optimizer
from pure_loop.precision import LossScale, Precision
from pure_loop.random.guards import guard, is_users
from pure_loop.stages.engine import ONE_RANK, Engine
from pure_loop.state import POSITIONS, State, refuse_misfit, sort_by_model

__all__ = [
    "any_state",
    "first_memory",
    "first_state",
    "can_resume_from",
    "preparation",
    "refuse_no_boundary",
    "refuse_other_optimizer",
]


def first_state(model_or_state: Any, seed: int, device: Any) -> tuple[State, bool]:
    """The State to start from, and whether it is a fresh start."""
    wanted = read_device(device)
    if not isinstance(model_or_state, State):
        refuse_untrainable(model_or_state)
        return State.create(model_or_state, seed=seed, device=wanted), True
    state = model_or_state
    refuse_no_boundary(state)
    refuse_misfit(state)
    state = sort_by_model(state)
    if seed not in (0, state.seed):
        raise ArgumentError(
            f"seed={seed}, and the State given has seed {state.seed}, with which it resumes. To fork it with other "
            f"random numbers write fit(state.replace(seed={seed}), ...)."
        )
    if wanted is not None and (wanted.type != state.device.type or wanted.index not in (None, state.device.index)):
        state = _moved(state, wanted)
    # Evaluating a model comes before INIT, not in its place: surgery that is bound there is still to be done.
    untrained = state.event is None or (state.event is Event.EVAL_STANDALONE_END and state.opt_state is None)
    return state, state.position is None and untrained


def any_state(model_or_state: Any, seed: int, device: Any) -> State:
    """The State to evaluate or predict with, kept anywhere."""
    if isinstance(model_or_state, State):
        state = model_or_state
        refuse_misfit(state)
        state = sort_by_model(state)
        wanted = read_device(device)
        return state if wanted is None else _moved(state, wanted)
    refuse_untrainable(model_or_state)
    return State.create(model_or_state, seed=seed, device=read_device(device))


def _moved(state: State, device: torch.device) -> State:
    return optree.tree_map(  # type: ignore[return-value]
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
        state,  # type: ignore[arg-type]
        namespace=NAMESPACE,
    )


_KEEPABLE = frozenset({*POSITIONS, Event.FIT_START, Event.EVAL_STANDALONE_END, None})


def can_resume_from(event: Event | None) -> bool:
    """Whether training resumes from a State that was kept at this event."""
    return event in _KEEPABLE


# Where training ended, the evaluation before FIT_END has no boundary after it.
_AFTER_EVALUATION: dict[Event | None, Event] = {
    Event.BATCH_END: Event.BATCH_CHECKPOINT,
    Event.EPOCH_END: Event.EPOCH_CHECKPOINT,
    Event.BATCH_CHECKPOINT: Event.FIT_END,
    Event.EPOCH_CHECKPOINT: Event.FIT_END,
    Event.ITERATION_CHECKPOINT: Event.FIT_END,
}


def refuse_no_boundary(state: State) -> None:
    """
    Raises:
        ResumeError: the State was kept at an event from which training can't resume.
    """
    event = state.event
    if can_resume_from(event):
        return
    from pure_loop.order import BOUNDARIES, nearest_boundary  # only on the way to an error

    assert event is not None
    if event.is_predict:
        nearest = "the State that you predicted from"
    elif event is Event.EVAL_STANDALONE_START:
        nearest = "the State that you evaluated, or the one at EVAL_STANDALONE_END"
    elif event.is_eval and state.position in _AFTER_EVALUATION:
        nearest = f"the one at {_AFTER_EVALUATION[state.position].name}, which follows this evaluation"
    else:
        nearest = f"the one at {nearest_boundary(event).name}, the next boundary after it"
    raise ResumeError(
        f"this State was kept at {event.name}, in the middle of a computation, where training can't resume. Keep "
        f"{nearest}. Boundaries are {', '.join(e.name for e in Event if e in BOUNDARIES)}."
    )


def refuse_other_optimizer(state: State, optimizer: Optimizer) -> None:
    """
    Raises:
        ResumeError: the State has the memory of another optimizer, or of other parameters.
    """
    if state.opt_state is not None:
        from pure_loop.optim.resuming import refuse_other_memory  # no fresh start needs it

        served, trained = state.model.served_by(optimizer), state.model.trained(state.params)
        refuse_other_memory(served, state.opt_state, trained)


def preparation(
    optimizer: Optimizer,
    precision: Precision,
    algorithms: tuple[Algorithm, ...],
    engine: Engine = ONE_RANK,
    meet: Callable[[State], State] | None = None,
) -> Callable[[State], State]:
    """What a State still lacks before training: optimizer memory, loss scale, the memory of algorithms.

    ``meet`` comes first: where there are several ranks, they agree on what they start from.
    """

    def prepare(state: State) -> State:
        if meet is not None:
            state = meet(state)
        if state.opt_state is None:
            served, trained = state.model.served_by(optimizer), state.model.trained(state.params)
            guarded = guard(state, ("init", "optimizer")) if is_users(served.init) else nullcontext()
            with guarded:
                memory = engine.init_opt_state(served, trained)
            state = state.replace(opt_state=memory)
        if precision.scaled and state.loss_scale is None:
            state = state.replace(loss_scale=LossScale.initial(state.device))
        elif not precision.scaled and state.loss_scale is not None:
            state = state.replace(loss_scale=None)
        for algorithm in algorithms:
            if algorithm.init is not None and algorithm.name not in state.algorithm_state:
                state = state.remember(algorithm.name, first_memory(algorithm, state))
        return state

    return prepare


def first_memory(algorithm: Algorithm, state: State) -> Any:
    assert algorithm.init is not None
    guarded = guard(state, ("init", algorithm.name)) if is_users(algorithm.init) else nullcontext()
    try:
        with guarded:
            return algorithm.init(state)
    except Exception as error:
        error.add_note(f"raised by init of algorithm {algorithm.name!r}")
        raise
