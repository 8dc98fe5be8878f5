"""What a call does otherwise for a State with members: its steps, handlers, data, metrics and records.

A handler of an algorithm is a function of the State of one model. Inside a batch it is called while the step is traced,
for one member; at other events it is called once a member. So nothing in the loop knows of members.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
import torch
from torch import Tensor

from pure_loop.algorithm import Algorithm
from pure_loop.cadence import Cadence
from pure_loop.entry.algorithm_states import refuse_tensors_without_members
from pure_loop.entry.compiling import evaluating, member_steps
from pure_loop.entry.member_data import MemberEngine, of_members
from pure_loop.errors import ArgumentError
from pure_loop.evaluator import BoundEvaluator
from pure_loop.event import Event, events_between
from pure_loop.hooks import Handler, Observer
from pure_loop.loop.batch import LoopStages
from pure_loop.loop.call import Fit, Strategy
from pure_loop.loop.contract import check_returned
from pure_loop.loop.driver import Script, drive
from pure_loop.loop.evaluation import current
from pure_loop.loop.training import Eager
from pure_loop.members import turns
from pure_loop.members.each import Each
from pure_loop.members.stacking import over_members, settled, split, stacked
from pure_loop.membership import Members
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.random.guards import guard
from pure_loop.ranges.strengths import Scheduled
from pure_loop.stages import Stages
from pure_loop.stages.notes import noting
from pure_loop.stages.workspace import Workspace
from pure_loop.state import State, with_fields

if TYPE_CHECKING:
    from pure_loop.entry.settings import ModelSettings, Settings

# Whose handlers are called in the computation of a batch.
IN_BATCH = events_between(Event.BATCH_START, Event.BATCH_END)


# Values of members.


def refuse_each(optimizer: Optimizer, algorithms: Iterable[Algorithm], state: State) -> None:
    """
    Raises:
        ArgumentError: ``pl.each`` with other than one value a member, or for one model.
    """
    settings: list[tuple[str, object]] = [(f"{optimizer.name}(...)", item) for item in _of_optimizer(optimizer)]
    settings += [
        (f"the {name} of algorithm {algorithm.name!r}", value)
        for algorithm in algorithms
        for name, value in algorithm.settings.items()
    ]
    for where, value in settings:
        for item in _each_in(value):
            if state.ensemble is None:
                raise ArgumentError(
                    f"{where} has pl.each of length {len(item.values)}, and one model is trained: give fit "
                    "pl.ensemble(make_model, seeds=...), or write the number."
                )
            if len(item.values) != len(state.ensemble):
                raise ArgumentError(
                    f"{where} has pl.each of length {len(item.values)}, and there are {len(state.ensemble)} members: "
                    "write one value a member."
                )


def _of_optimizer(optimizer: Optimizer) -> Iterator[object]:
    yield optimizer.lr
    yield from optimizer.options.values()
    for part in optimizer.parts.values():
        yield from _of_optimizer(part)


def _each_in(value: object) -> Iterator[Each]:
    if isinstance(value, Each):
        yield value
    elif isinstance(value, Scheduled):
        yield from _each_in(value.schedule)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _each_in(item)
    elif attrs.has(type(value)) and callable(value):  # a schedule of others
        for field in attrs.fields(cast("type[attrs.AttrsInstance]", type(value))):
            yield from _each_in(getattr(value, field.name, None))


def refuse_settings(settings: Settings, state: State) -> None:
    """
    Raises:
        ArgumentError: what an ensemble can't have; or ``pl.each`` for one model, or of other than one value a member.
    """
    refuse_each(settings.optimizer, settings.algorithms, state)
    refuse_shared_settings(settings, state)
    comparing = [item for item in settings.algorithms if item.across_members]
    if state.ensemble is None:
        if comparing:
            raise ArgumentError(
                f"algorithm {comparing[0].name!r} compares members, and there is one model: give "
                "pl.ensemble(make_model, seeds=...) in its place."
            )
        return
    method = next((item for item in comparing if item.factory), None)
    if method is not None and len(state.ensemble) == 1:
        raise ArgumentError(
            f"algorithm {method.name!r} compares members, and the ensemble has one: give pl.ensemble(make_model, "
            "seeds=...) several seeds, or leave it out."
        )
    refused = {'microbatch_size="auto"': settings.microbatch_size == "auto", "verify=": settings.verify is not None}
    refused["compile="] = bool(settings.compile) and state.ensemble.fallback == "loop"
    _refuse(name for name, is_true in refused.items() if is_true)
    if state.ensemble.fallback is None:
        of_torch = next(filter(_is_of_torch, _parts_of(settings.optimizer)), None)
        if of_torch is not None:
            raise ArgumentError(
                f"optimizer {of_torch.name!r} steps in torch's own Python code, which can't be mapped over "
                "members: write one of pl.optim, such as pl.optim.adamw(lr=pl.each(rates)), or "
                'pl.ensemble(..., fallback="loop").'
            )


def refuse_shared_settings(settings: ModelSettings, state: State) -> None:
    """What ``fit``, ``evaluate`` and ``predict`` refuse.

    Raises:
        ArgumentError: what an ensemble can't have, or one model.
    """
    if state.ensemble is None:
        if isinstance(settings.seed, Each):
            raise ArgumentError(f"seed={settings.seed!r}, and there is one model: write one number.")
        return
    refused = {
        "parallel=": settings.parallel.parallel is not None,
        'precision="amp_fp8"': settings.precision.float8,
    }
    _refuse(name for name, is_true in refused.items() if is_true)


def _refuse(names: Iterator[str]) -> None:
    for name in names:
        raise ArgumentError(f"{name} with members: {_INSTEAD[name]}")


def _parts_of(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for part in optimizer.parts.values():
        yield from _parts_of(part)


def _is_of_torch(optimizer: Optimizer) -> bool:
    if optimizer.in_torch is None:
        return False
    from pure_loop.optim.from_torch import ClassInTorch  # an optimizer of the library may do without

    return type(optimizer.in_torch) is ClassInTorch


_INSTEAD = {
    "parallel=": "an ensemble is trained by one process. Start one process a part of the members, each with its own "
    "seeds and parallel=False.",
    'microbatch_size="auto"': "write a number; a step of all members needs as many times the memory of one.",
    "compile=": 'with fallback="loop" they are computed one after the other, not compiled: leave one of the two out.',
    "verify=": "a mapped step is one graph, which has no stages to compare. Leave it out.",
    'precision="amp_fp8"': 'its layers can\'t be mapped; write "amp_bf16".',
}


# Handlers.


@attrs.define
class MemberHandlers:
    """Handlers of States of one model, for those with members.

    Attributes:
        outside: the events of a batch whose handlers its computation leaves to the driver.
        stages: those of the loop.
    """

    outside: Callable[[], Iterable[Event]] = tuple
    stages: Stages | None = None

    def of(self, handlers: Mapping[Event, tuple[Handler, ...]]) -> dict[Event, tuple[Handler, ...]]:
        return {event: tuple(self._of(handler, event) for handler in listed) for event, listed in handlers.items()}

    def _of(self, handler: Handler, event: Event) -> Handler:
        when, path = handler.when, handler.path

        def of_one(state: State, *stages: object) -> State:
            if when is not None and not self._called(when, None if path is None else (*path, "when"), state):
                return state
            result = self._called(handler.function, path, state, *stages)
            return state if result is state else check_returned(result, state, handler.algorithm, event)

        def of_evaluated(state: State, *stages: object) -> State:
            # One that has stopped is evaluated as it was then, and remembers nothing of it.
            result = of_one(state, *stages)
            return with_fields(result, algorithm_state=state.algorithm_state) if state.stop else result

        of_all = over_members(of_evaluated, stopped=True) if event.is_eval else over_members(of_one)

        def function(state: State, *stages: object) -> State:
            if handler.across_members:  # which is no part of the computation of one
                return state if state.ensemble is None else compared(handler, state, event, *stages)
            if state.ensemble is None:
                return handler.function(state, *stages)
            return of_all(state, *stages) if event not in IN_BATCH or event in self.outside() else state

        def applies(state: State) -> bool:
            if handler.across_members:
                return state.ensemble is not None and bool(when and when(state))
            return state.ensemble is not None or bool(when and when(state))

        own = when is None or isinstance(when, Cadence)  # which asks for the time alone
        return attrs.evolve(handler, function=function, when=when if own else applies)

    def _called(self, function: Any, path: tuple[str | int, ...] | None, state: State, *stages: object) -> Any:
        if path is None:
            return function(state, *stages)
        with guard(state, path) if self.stages is None else self.stages.guard(state, path):
            return function(state, *stages)


def compared(handler: Handler, state: State, event: Event, *stages: object) -> State:
    """The State of an algorithm that compares members.

    Raises:
        AlgorithmStructureError: a tensor in its algorithm state has no leading dimension of members.
    """
    result: State = handler.function(state, *stages)
    if result is not state and isinstance(result, State):
        name, value = handler.algorithm, result.algorithm_state.get(handler.algorithm)
        refuse_tensors_without_members(name, f"at {event.name}", value, state.members)
    return result


# Computations.


@attrs.frozen(kw_only=True)
class MemberStages(LoopStages):
    """Stages of evaluations that compute members one after the other.

    Attributes:
        calls: how the handlers are called.
    """

    calls: MemberHandlers = attrs.field(factory=MemberHandlers, repr=False, eq=False)

    def validate(self, state: State, *, label: str, batch: int, index: int = 0, gradients: bool = False) -> State:
        def of_one(one: State) -> State:
            return LoopStages.validate(self, one, label=label, batch=batch, index=index, gradients=gradients)

        return over_members(of_one, stopped=True)(state)

    def validation_loss(self, state: State, *, gradients: bool = False) -> Tensor:
        if state.ensemble is None:
            return LoopStages.validation_loss(self, state, gradients=gradients)
        losses = []
        for number, one in enumerate(split(state)):
            with turns.turn(number):
                losses.append(LoopStages.validation_loss(self, one, gradients=gradients))
        return torch.stack(losses)

    def default_metrics(self, state: State) -> tuple[Metric, ...]:
        if state.ensemble is None:
            return LoopStages.default_metrics(self, state)
        metrics = LoopStages.default_metrics(self, state.member(0))
        return tuple(of_members(metric, len(state.ensemble)) for metric in metrics)


@attrs.frozen
class MemberLoop(Eager):
    """Batches of an ensemble, its members one after the other: of each event the States of all are stacked.

    Attributes:
        stages: those of the call.
        handlers: of one model, by event.
        observed: the events that are observed.
    """

    stages: LoopStages
    handlers: Mapping[Event, tuple[Handler, ...]]
    observed: frozenset[Event]

    def batch(self, state: State, fit: Fit, samples: int, tokens: int, seconds: Callable[[], float]) -> Script:
        assert state.ensemble is not None
        lap, state = seconds(), settled(state)
        assert state.ensemble is not None
        single = attrs.evolve(self.stages, workspace=Workspace(), handlers=dict(self.handlers))
        of_one = attrs.evolve(fit, stages=single, evaluators=())
        before = split(state)
        pairs = [
            drive(
                Eager().batch(one, of_one, samples, tokens, lambda: lap),
                self.handlers,
                stages=single,
                watch=(self.observed & IN_BATCH) - {Event.BATCH_END},
            )
            for one in before
        ]
        while True:
            advanced = [self._advance(stream, number) for number, stream in enumerate(pairs)]
            if any(ended for _, _, ended in advanced):
                break
            yield advanced[0][0], stacked([one for _, one, _ in advanced], state, before)
        after = [
            one if running else with_fields(old, **{name: getattr(one, name) for name in _PER_BATCH})
            for (_, one, _), old, running in zip(advanced, before, state.ensemble.running, strict=True)
        ]
        state = stacked(after, state, before)
        if state.metrics:
            state = current(state, fit, Event.BATCH_END)
        return (yield Event.BATCH_END, state)

    def _advance(self, stream: Generator[tuple[Event, State], None, State], number: int) -> tuple[Event, State, bool]:
        """The next event and State of a member; or its last State, and that it has ended."""
        with turns.turn(number), noting(lambda: f"raised for member {number}"):
            try:
                return *next(stream), False
            except StopIteration as stop:
                return Event.BATCH_END, stop.value, True


_PER_BATCH = ("event", "position", "batch", "microbatch", "outputs", "loss", "_grads", "grad_norm")


def computation(
    settings: Settings,
    stages: LoopStages,
    observers: Mapping[Event, tuple[Observer, ...]],
    evaluators: tuple[BoundEvaluator, ...],
    members: Members,
) -> tuple[LoopStages, Strategy, Stages]:
    """The stages of a batch, how batches are computed, and the stages of an evaluation."""
    assert isinstance(stages, MemberStages)
    stages.calls.stages = stages
    if members.fallback == "loop":
        return stages, MemberLoop(stages, stages.handlers, stages.observed), stages
    # What compares members at BATCH_END is given the State there.
    compared = {
        event
        for event, listed in stages.handlers.items()
        if event is Event.BATCH_END and any(handler.across_members for handler in listed)
    }
    steps = member_steps(settings, stages, {**observers, **dict.fromkeys(compared, True)}, evaluators)
    stages.calls.outside = lambda: steps.outside
    return stages, cast("Strategy", steps), steps.evaluating


def evaluating_stages(
    compile: bool | Literal["where possible"],
    stages: MemberStages,
    evaluators: Iterable[BoundEvaluator],
    members: Members,
) -> LoopStages:
    """The stages of an evaluation or a prediction by itself."""
    stages.calls.stages = stages
    return stages if members.fallback == "loop" else evaluating(compile, stages, evaluators, mapped=True)


def stages_of_members(handlers: Mapping[Event, tuple[Handler, ...]]) -> dict[str, Any]:
    """What :class:`MemberStages` have of their own."""
    calls = MemberHandlers()
    return {"engine": MemberEngine(), "handlers": calls.of(handlers), "calls": calls}
