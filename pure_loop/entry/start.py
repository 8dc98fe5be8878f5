"""Where a call starts: the State that it begins or resumes from, and what it must not be.

A State may come from a file of another run, so its algorithm states are compared with what ``init`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from pure_loop._internal.devices import read_device
from pure_loop._internal.hints import SEED_OF_MEMBERS
from pure_loop._internal.logs import get_logger
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithm import Algorithm
from pure_loop.data.source import Source
from pure_loop.entry.algorithm_states import (
    map_tensors,
    refuse_other_algorithm_states,
    refuse_tensors_without_members,
)
from pure_loop.entry.parallel import Together
from pure_loop.errors import ArgumentError, ArgumentTypeError, ResumeError
from pure_loop.event import Event
from pure_loop.members.ensemble import Ensemble
from pure_loop.members.stacking import over_members
from pure_loop.model.checks import is_on_meta, refuse_untrainable
from pure_loop.model.names import completed
from pure_loop.optim import Optimizer
from pure_loop.precision import LossScale, Precision
from pure_loop.random.authors import is_users
from pure_loop.random.guards import guard
from pure_loop.stages.engine import Engine
from pure_loop.state import POSITIONS, State, refuse_misfit, sort_by_model
from pure_loop.task import Task
from pure_loop.time import Time, TimestampFields

if TYPE_CHECKING:
    from pure_loop.data.position import Position


def first_state(
    model_or_state: nn.Module | State | Ensemble,
    seed: int,
    device: torch.device | str | None,
    seeds: Iterable[int] | None = None,
) -> tuple[State, bool]:
    """The State to start from, and whether it is a fresh start; ``seeds``: of members, if not those of their models."""
    wanted = read_device(device)
    if isinstance(model_or_state, Ensemble):
        return model_or_state.state(seed, wanted, seeds), True
    if not isinstance(model_or_state, State):
        if is_on_meta(model_or_state):
            from pure_loop.initial import without_numbers  # no other run needs it

            return without_numbers(model_or_state, seed, wanted or torch.get_default_device()), True
        refuse_untrainable(model_or_state)
        return State.create(model_or_state, seed=seed, device=wanted), True
    state = model_or_state
    if seeds is not None:
        raise ArgumentError(f"seed=pl.each(...) and a State, whose members have their seeds: {SEED_OF_MEMBERS}")
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


def any_state(
    model_or_state: nn.Module | State | Ensemble,
    seed: int,
    device: torch.device | str | None,
    seeds: Iterable[int] | None = None,
) -> State:
    """The State to evaluate or predict with, kept anywhere; ``seeds`` as of :func:`first_state`."""
    if isinstance(model_or_state, Ensemble):
        return model_or_state.state(seed, read_device(device), seeds)
    if isinstance(model_or_state, State):
        refuse_misfit(model_or_state)
        state = sort_by_model(model_or_state)
        wanted = read_device(device)
        return state if wanted is None else _moved(state, wanted)
    refuse_untrainable(model_or_state)
    return State.create(model_or_state, seed=seed, device=read_device(device))


def _moved(state: State, device: torch.device) -> State:
    move: Callable[[State], State] = lambda one: map_tensors(lambda tensor: tensor.to(device), one)  # noqa: E731
    return over_members(move, stopped=True)(state)


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


_log = get_logger("pure_loop.fit")


@attrs.frozen
class Start:
    """What a State has to fit to be trained by a call, the first one and one that is loaded, and what it lacks.

    The stream has it for as long as it runs, so it refers to nothing that refers to the user's module or first State.
    """

    optimizer: Optimizer
    precision: Precision
    algorithms: tuple[Algorithm, ...]
    max_duration: Time
    parallel: Together
    engine: Engine
    source: Source
    task: Task

    def refuse_misfit(self, state: State) -> None:
        """
        Raises:
            ResumeError: training can't resume from the State, or the optimizer or an algorithm is another one.
        """
        one = state if state.ensemble is None else state.member(0)
        refuse_no_boundary(one)
        if _begun(one) and one.device.type == "meta":
            return  # which begins when there are numbers, and is compared then
        one = self._completed(one)
        refuse_other_optimizer(one, self.optimizer)
        refuse_other_algorithm_states(state, self.algorithms)

    def fitted(self, state: State) -> State:
        """The State with the duration and the length of this call's data, once it is sure to fit."""
        one = state if state.ensemble is None else state.member(0)
        refuse_other_optimizer(self._completed(one), self.optimizer)
        state = over_members(self._completed, stopped=True)(state)
        # Both timestamps, because the learning rate of a batch is asked for at the one before it.
        t = state.timestamp
        start, at = t.batch_in_epoch, self._own_position(state.data)
        goes_on = at is not None and self.source.goes_on(at, t.epoch, start, t.batch)
        if start and not goes_on:
            changed = len({t.batches_per_epoch, self.source.length} - {None}) > 1
            start = self.source.resume(t.epoch, start, t.sample_in_epoch, self.task.samples, changed=changed)
        fields: TimestampFields = {"max_duration": self.max_duration, "batches_per_epoch": self.source.length}
        state = state.replace(
            data=state.data if goes_on else None,
            timestamp=t.replace(**fields).replace(batch_in_epoch=start),
            previous_timestamp=state.previous_timestamp.replace(**fields),
        )
        refuse_other_algorithm_states(state, self.algorithms)
        return state

    def _own_position(self, data: PyTree) -> Position | None:
        """The position of this rank's data."""
        if data is None:
            return None
        from pure_loop.data.position import Position  # which most runs have not

        by_rank, own = type(data) is tuple, self.source.uneven is not None
        if not all(item is None or isinstance(item, Position) for item in (data if by_rank else (data,))):
            raise ArgumentTypeError(
                f"state.data is where the data stands, which the loop writes, and is {data!r:.60} of type "
                f"{type(data).__name__}: state.replace(data=None) lets training read the epoch again."
            )
        if not (by_rank or own):
            return data  # type: ignore[no-any-return]
        if by_rank and own and len(data) == self.engine.ranks:
            return data[self.engine.rank]  # type: ignore[no-any-return]
        saved = f"{len(data)} ranks with data of their own" if by_rank else "data that all ranks share"
        now = "have data of their own" if own else "share their data"
        _log.warning("state.data is of %s, and %d ranks %s: streams are read again", saved, self.engine.ranks, now)
        return None

    def _completed(self, state: State) -> State:
        """The State with the optimizer state of what a migration excluded; algorithms that lack it begin anew."""
        names = _begun(state)
        if not names:
            return state
        if state.opt_state is not None:
            from pure_loop.optim.resuming import joined  # no other run needs it

            state = state.replace(opt_state=joined(state.opt_state, self._first_opt_state(state), names))
        for algorithm in self.algorithms:
            memory = state.algorithm_state.get(algorithm.name)
            if algorithm.init is None or memory is None:
                continue
            first = _first_memory(algorithm.name, algorithm.init, state)
            if completed(memory, first, names) is not memory:  # the file had no such name that its memory could hold
                note = attrs.evolve(state.notes[-1], begun_anew=(*state.notes[-1].begun_anew, algorithm.name))
                state = state.remember(algorithm.name, first).replace(notes=(*state.notes[:-1], note))
        return sort_by_model(state)

    def _first_opt_state(self, state: State) -> PyTree:
        served, trained = state.model.served_by(self.optimizer), state.model.trained(state.params)
        with guard(state, ("init", "optimizer")) if is_users(served.init) else nullcontext():
            if self.engine.in_parts and not are_sharded(state.params):
                return served.init(trained)  # of a State that is not sharded yet
            return self.engine.init_opt_state(served, trained)

    def preparation(self, described: Callable[[], Mapping[str, object]], *, fresh: bool) -> Callable[[State], State]:
        """What gives a State what it lacks before training: optimizer memory, loss scale, the memory of algorithms.

        Where there are several ranks, they agree first on what they start from, of which ``described`` must be equal.
        """
        meet = self.parallel.meeting(self.engine, self.source, described, fresh)

        def prepare(state: State) -> State:
            if meet is not None:
                state = meet(state)
            prepared: State = over_members(complete, stopped=True)(state)
            comparing = [algorithm for algorithm in self.algorithms if algorithm.across_members]
            prepared = with_first_memories(prepared, comparing)
            for algorithm in comparing:
                value = prepared.algorithm_state.get(algorithm.name)
                refuse_tensors_without_members(algorithm.name, "in init", value, prepared.members)
            return prepared

        def complete(state: State) -> State:
            if state.opt_state is None:
                state = state.replace(opt_state=self._first_opt_state(state))
            if self.precision.scaled and state.loss_scale is None:
                state = state.replace(loss_scale=LossScale.initial(state.device))
            elif not self.precision.scaled and state.loss_scale is not None:
                state = state.replace(loss_scale=None)
            return with_first_memories(state, [item for item in self.algorithms if not item.across_members])

        return prepare


def _begun(state: State) -> set[str]:
    """The names that were excluded when the State was loaded from a file, until it is trained on."""
    batch = state.timestamp.batch
    return {name for note in state.notes if note.migrated and note.batch == batch for name in note.added}


def with_first_memories(state: State, algorithms: Iterable[Algorithm]) -> State:
    """The State with the memory of each algorithm that has none yet."""
    for algorithm in algorithms:
        if algorithm.init is not None and algorithm.name not in state.algorithm_state:
            state = state.remember(algorithm.name, _first_memory(algorithm.name, algorithm.init, state))
    return state


def _first_memory(name: str, init: Callable[[State], object], state: State) -> object:
    guarded = guard(state, ("init", name)) if is_users(init) else nullcontext()
    try:
        with guarded:
            return init(state)
    except Exception as error:
        error.add_note(f"raised by init of algorithm {name!r}")
        raise
