"""Cases: all inputs of a run of ``fit`` as a value, so that a law can repeat the run, and code that makes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from torch import nn

from pure_loop import optim, schedules
from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm, AlgorithmLike, flatten
from pure_loop.entry.fit import fit as library_fit
from pure_loop.errors import ArgumentError
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.optim import Optimizer
from pure_loop.order import Plan
from pure_loop.precision import Precision
from pure_loop.state import State
from pure_loop.task import OnTargets, Task
from pure_loop.testing.problems import PROBLEMS, Problem, as_problem
from pure_loop.time import Time


def code(value: object) -> str:
    """Code that makes the value: records by the fields that are not at their default.

    >>> from pure_loop.order import Plan
    >>> code(Plan(batches=(4, 2), max_duration="1ep", microbatch_size=2))
    "Plan(batches=(4, 2), max_duration='1ep', microbatch_size=2)"
    """
    if isinstance(value, Time):
        return repr(str(value))
    if isinstance(value, Problem):
        return repr(value.name) if PROBLEMS.get(value.name) is value else f"Problem(name={value.name!r}, ...)"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{code(key)}: {code(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(code, value)) + (",)" if len(value) == 1 else ")")
    cls = type(value)
    if attrs.has(cls):
        values = [(field, getattr(value, field.name)) for field in attrs.fields(cls)]
        written = [f"{field.alias}={code(item)}" for field, item in values if not _is_default(field.default, item)]
        return f"{cls.__name__}({', '.join(written)})"
    return repr(value)


def _is_default(default: object, value: object) -> bool:
    factory = getattr(default, "factory", None)  # of attrs, which makes the default
    return bool(value == (default if factory is None else factory()))


Running: TypeAlias = Generator[tuple[Event, State], None, object]

Fit: TypeAlias = Callable[..., Any]
"""``pl.fit``, or a loop with the same arguments and events."""

Pairs: TypeAlias = list[tuple[Event, State]]


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: optim.sgd(lr=0.05, momentum=0.9),
    "adamw": lambda: optim.adamw(lr=schedules.linear(0.05, 0.01, "12ba")),
}
"""Optimizers of cases: both have a state, and AdamW has a schedule as well."""


class _Unsized:
    """Batches in an iterable without a length."""

    def __init__(self, batches: Sequence[object]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[object]:
        return iter(self._batches)


def _one_of(choices: Collection[str]) -> Callable[[object, attrs.Attribute[str], str], None]:
    def validate(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value not in choices:
            raise ArgumentError(f"{attribute.name}={value!r} is not known; write {' or '.join(map(repr, choices))}.")

    return validate


def _stopping(plan: Plan, when: Time) -> Algorithm:
    def stop(state: State) -> State:
        return state.replace(stop=True) if state.timestamp >= when else state

    of_2021 = plan.order == "2021"
    events = (Event.BATCH_END, Event.EPOCH_END) if of_2021 else (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT)
    return Algorithm("stopping", dict.fromkeys(events, stop))


def _never(interval: Time | None) -> Time | Literal[0] | None:
    """An interval as ``fit`` takes it: it refuses a zero with a unit, and takes 0 for "never"."""
    return 0 if interval is not None and not interval else interval


@attrs.frozen(kw_only=True, repr=False)
class Case:
    """A plan, a problem and settings: all inputs of a run of ``fit`` except algorithms and callbacks.

    Args:
        plan: duration, batch sizes and evaluators (:class:`pure_loop.order.Plan`).
        problem: a :class:`Problem`, or the name of a built-in one.
        seed: of the parameters, the data and the run.
        optimizer: a name in :data:`OPTIMIZERS`.
        precision: as in ``fit``.
        clip_grad: as in ``fit``.

    Raises:
        ArgumentError: an unknown name, or a plan that doesn't begin with INIT.

    >>> from pure_loop.order import Plan
    >>> case = Case(plan=Plan(batches=(4,), max_duration="1ba"))
    >>> [event.value for event, state in case.run()][:3]
    ['init', 'before_load', 'after_load']
    >>> case
    Case(plan=Plan(batches=(4,), max_duration='1ba'))
    """

    plan: Plan
    problem: Problem = attrs.field(default=PROBLEMS["linear"], converter=as_problem)
    seed: int = 0
    optimizer: str = attrs.field(default="sgd", validator=_one_of(OPTIMIZERS))
    precision: str = "fp32"
    clip_grad: float | None = None

    def __attrs_post_init__(self) -> None:
        Precision.parse(self.precision)
        if not self.plan.fresh:
            raise ArgumentError(
                "Case: its plan must have fresh=True, since a case is a run from INIT; stream(start=state) resumes."
            )

    def model(self) -> nn.Module:
        """A module with this case's first parameters; a new one in every call."""
        return self.problem.model(self.seed)

    def data(self) -> Iterable[Batch]:
        """The batches of an epoch."""
        batches = self.problem.batches(self.plan.batches, self.seed + 1)
        return batches if self.plan.sized else _Unsized(batches)

    def held_out(self) -> dict[str, list[Batch]]:
        """The batches of each evaluator, by its label."""
        return {label: self.problem.batches(plan.batches, seed=7) for label, plan in self.plan.evaluators.items()}

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``fit`` after the model and the data."""
        plan, held_out = self.plan, self.held_out()
        return {
            "loss": Task(
                loss=OnTargets(self.problem.loss), tokens=lambda batch: plan.tokens_per_sample * len(batch[0])
            ),
            "optimizer": OPTIMIZERS[self.optimizer](),
            "max_duration": plan.max_duration,
            "microbatch_size": plan.microbatch_size,
            "seed": self.seed,
            "precision": self.precision,
            "clip_grad": self.clip_grad,
            "evaluators": {
                label: Evaluator(
                    held_out[label], interval=_never(evaluator.interval), microbatch_size=evaluator.microbatch_size
                )
                for label, evaluator in plan.evaluators.items()
            },
            "eval_interval": _never(plan.eval_interval),
            "batches_per_epoch": plan.batches_per_epoch,
            "batches_per_step": plan.batches_per_step,
            "iteration_length": plan.iteration_length,
            "order": plan.order,
            "strict": False,  # laws compare by themselves
            # A simulated clock: each batch takes the plan's seconds_per_batch.
            "clock": itertools.count(0.0, plan.seconds_per_batch).__next__,
        }

    def stopping(self) -> tuple[Algorithm, ...]:
        """The algorithm that stops training at the plan's ``stop_at``, which :meth:`stream` adds; none without one."""
        return () if self.plan.stop_at is None else (_stopping(self.plan, self.plan.stop_at),)

    def stream(
        self,
        algorithms: AlgorithmLike | Sequence[AlgorithmLike] = (),
        *,
        fit: Fit = library_fit,
        start: State | nn.Module | None = None,
        **overrides: object,
    ) -> Running:
        """The stream of a run.

        Args:
            algorithms: as in ``fit``.
            fit: the loop.
            start: a State to resume from, or a module; None for :meth:`model`.
            **overrides: arguments of ``fit`` that are added to those of the case, or replace them.
        """
        if self.plan.stop_at is not None:  # else as they are: how a loop takes a composition is on trial, too
            algorithms = (*flatten(algorithms), *self.stopping())
        arguments = {**self.arguments(), "algorithms": algorithms, **overrides}
        stream: Running = fit(self.model() if start is None else start, self.data(), **arguments)
        return stream

    def run(
        self,
        algorithms: AlgorithmLike | Sequence[AlgorithmLike] = (),
        *,
        fit: Fit = library_fit,
        start: State | nn.Module | None = None,
        **overrides: object,
    ) -> Pairs:
        """All pairs of :meth:`stream`, as a list."""
        return list(self.stream(algorithms, fit=fit, start=start, **overrides))

    def __repr__(self) -> str:
        return code(self)
