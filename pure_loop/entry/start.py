"""Where a call starts: the State that it begins or resumes from, and what it must not be.

A State may come from a file of another run, so the memory in it is compared with what the algorithms make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any, NoReturn

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.devices import read_device
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.algorithm import Algorithm
from pure_loop.data.source import Source
from pure_loop.entry.parallel import Together
from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.event import Event
from pure_loop.members.ensemble import Ensemble
from pure_loop.members.stacking import over_members
from pure_loop.model.checks import refuse_untrainable
from pure_loop.model.names import completed
from pure_loop.optim import Optimizer
from pure_loop.precision import LossScale, Precision
from pure_loop.random.authors import is_users
from pure_loop.random.guards import guard
from pure_loop.stages.engine import Engine
from pure_loop.state import POSITIONS, State, refuse_misfit, sort_by_model
from pure_loop.task import Task
from pure_loop.time import Time, TimestampFields


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
        refuse_untrainable(model_or_state)
        return State.create(model_or_state, seed=seed, device=wanted), True
    state = model_or_state
    refuse_no_boundary(state)
    _refuse_misfit(state)
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


def _refuse_misfit(state: State) -> None:
    refuse_misfit(state if state.ensemble is None else state.member(0))


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
        _refuse_misfit(model_or_state)
        state = sort_by_model(model_or_state)
        wanted = read_device(device)
        return state if wanted is None else _moved(state, wanted)
    refuse_untrainable(model_or_state)
    return State.create(model_or_state, seed=seed, device=read_device(device))


def _moved(state: State, device: torch.device) -> State:
    return _map_tensors(lambda tensor: tensor.to(device), state)


def _map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    tree: PyTree = state  # a node by its registration
    result = optree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE)
    assert isinstance(result, State)
    return result


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
        self._refuse_other_memories(one, state)

    def fitted(self, state: State) -> State:
        """The State with the duration and the length of this call's data, once it is sure to fit."""
        one = state if state.ensemble is None else state.member(0)
        refuse_other_optimizer(self._completed(one), self.optimizer)
        state = over_members(self._completed, stopped=True)(state)
        # Both timestamps, because the learning rate of a batch is asked for at the one before it.
        t = state.timestamp
        start = t.batch_in_epoch
        if start:
            changed = len({t.batches_per_epoch, self.source.length} - {None}) > 1
            start = self.source.resume(t.epoch, start, t.sample_in_epoch, self.task.samples, changed=changed)
        fields: TimestampFields = {"max_duration": self.max_duration, "batches_per_epoch": self.source.length}
        state = state.replace(
            timestamp=t.replace(**fields).replace(batch_in_epoch=start),
            previous_timestamp=state.previous_timestamp.replace(**fields),
        )
        self._refuse_other_memories(state if state.ensemble is None else state.member(0), state)
        return state

    def _refuse_other_memories(self, one: State, state: State) -> None:
        """Compare memories of one model with those of this State, and those that compare members with the State's."""
        refuse_other_memories(one, [item for item in self.algorithms if not item.across_members])
        refuse_other_memories(state, [item for item in self.algorithms if item.across_members])

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
            across = [algorithm for algorithm in self.algorithms if algorithm.across_members]
            return with_first_memories(prepared, across)

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


Path = tuple[Any, ...]


def refuse_other_memories(state: State, algorithms: Iterable[Algorithm]) -> None:
    """Refuse a State with an algorithm state of another structure than the algorithms' ``init`` returns for it.

    Tensors at the same place of both are compared. Numbers may differ; a tree may have further entries; a dtype may be
    wider, of the same kind; a dimension of size 0 in the result of ``init``, by which an algorithm declares that it
    grows, may have any size; so may values for a buffer of a shape that changes. If ``init`` makes a tensor under the
    name of a parameter, the State must have one, and its mapping may have no names that are not in the State. Of an
    algorithm of the library all that ``init`` makes has to be there, but for buffers; one of the user's may know how to
    go on without.

    ``init`` is called with tensors on the meta device, so it computes nothing; where it reads their numbers, nothing
    is compared.

    Raises:
        ResumeError: names the leaf, its value, and that of ``init``.
    """
    requested = [item for item in algorithms if item.init is not None and item.name in state.algorithm_state]
    if not requested:
        return
    meta, names = _without_numbers(state), frozenset({*state.params, *state.buffers, *state.model.altered})
    for algorithm in requested:
        expected = _asked(algorithm, meta)
        if expected is not None:
            comparison = _Comparison(state, bool(algorithm.factory), names)
            comparison.refuse_other((algorithm.name,), state.algorithm_state[algorithm.name], expected[0])


def _without_numbers(state: State) -> State:
    durable = state.replace(batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    return _map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), durable)


def _asked(algorithm: Algorithm, state: State) -> tuple[object] | None:
    """The result of ``init`` for a State without numbers; None if it reads them."""
    assert algorithm.init is not None
    try:
        with guard(state, ("init", algorithm.name)):
            return (algorithm.init(state),)
    except Exception:
        # Reading numbers of the meta device has no error of its own, and an error of `init` itself is none of resuming,
        # which doesn't call it.
        return None


_MISSING = object()


@attrs.frozen
class _Comparison:
    """Compares a memory in a State with what ``init`` makes.

    Attributes:
        whole: all of it has to be there, and not only tensors under names of parameters.
        names: of parameters, and of buffers, with those that are gone.
    """

    state: State
    whole: bool
    names: frozenset[str]

    def refuse_other(self, path: Path, value: PyTree, expected: PyTree) -> None:
        """
        Raises:
            ResumeError: the value, at this path of ``algorithm_state``, has another structure.
        """
        if not self._matches(path, value, expected):
            _refuse(path, f"{_described(value)}, and init makes {_described(expected)}")
        children, wanted = _children(value) or {}, _children(expected) or {}
        by_name = bool(wanted) and wanted.keys() <= self.names
        for key, child in wanted.items():
            # Buffers come and go.
            if key in children or not (by_name and key in self.state.buffers):
                self.refuse_other((*path, key), children.get(key, _MISSING), child)
        for key, child in children.items() if by_name else ():
            if (self.whole or isinstance(child, Tensor)) and key not in self.names:
                _refuse((*path, key), f"{_described(child)}, and the model has no parameter or buffer of that name")

    def _matches(self, path: Path, value: PyTree, expected: PyTree) -> bool:
        if isinstance(expected, Tensor):
            keys = path[1:]
            if isinstance(value, Tensor):
                return _fits(value, expected) or any(key in self.state.model.altered for key in keys)
            return not self.whole and not any(key in self.state.params for key in keys)
        if not self.whole:
            return True
        if isinstance(expected, Real):
            return isinstance(value, Real) or (isinstance(value, Tensor) and not value.ndim)
        return _children(expected) is None or isinstance(value, Mapping) is isinstance(expected, Mapping)


def _described(value: PyTree) -> str:
    kind = "missing" if value is _MISSING else type(value).__name__
    return shape_and_dtype(value) if isinstance(value, Tensor) else kind


def _refuse(path: Path, what: str) -> NoReturn:
    from pure_loop.checkpoint.validation import shortened  # only on the way to an error

    raise ResumeError(
        f"algorithm_state{''.join(f'[{shortened(key)}]' for key in path)} is {what}: the memory is of another model or "
        "algorithm, or was altered. Give the State that was trained with this one, or let it begin anew: pl.load(path, "
        f"model=model, exclude=[{f'algorithm_state/{path[0]}'!r}]), or state.replace(algorithm_state={{...}}) without "
        f"{path[0]!r}. (A memory that grows begins with a dimension of size 0.)"
    )


def _children(tree: PyTree) -> Mapping[Any, PyTree] | None:
    """The items of a container by key or number; None: it is none."""
    if tree is None or optree.tree_is_leaf(tree, namespace=NAMESPACE):
        return None
    level: Any = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    return dict(zip(level.entries, level.children, strict=True))


def _fits(tensor: Tensor, expected: Tensor) -> bool:
    sizes = zip(tensor.shape, expected.shape, strict=False)
    if tensor.ndim != expected.ndim or any(size != init_size != 0 for size, init_size in sizes):
        return False
    # An average of float16 is kept in float32.
    same_kind = tensor.is_floating_point() == expected.is_floating_point()
    return same_kind and torch.promote_types(tensor.dtype, expected.dtype) is tensor.dtype
