"""``pl.lr_find``: the learning-rate range test, on a fork of a State.

The learning rate grows exponentially from step to step, and the loss after each step shows where it falls fastest and
where it diverges: https://arxiv.org/abs/1506.01186 (section 3.3), with the exponential growth and the stop of fast.ai.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Unpack, cast

import attrs
from torch import nn

from pure_loop._internal.arguments import check_integer, check_number, refuse_iterator
from pure_loop._internal.closing import closing
from pure_loop._internal.pytree import PyTree
from pure_loop._internal.suggestions import arguments_of_call, passing_on, teaching
from pure_loop.entry.assembly import assemble, start
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.parallel import announced
from pure_loop.entry.settings import Settings
from pure_loop.errors import ArgumentError, NonFiniteError
from pure_loop.event import Event
from pure_loop.members.ensemble import refuse_several
from pure_loop.optim import Optimizer
from pure_loop.optim.optimizer import RateFunction, ScaledTimestamp, rate_at
from pure_loop.stages.nonfinite import total_loss
from pure_loop.state import State
from pure_loop.time import Timestamp
from pure_loop.tools.range_test import RangeTest

# What records, saves, or decides how a stream is read: the test has no use of it.
_LEFT_OUT: dict[str, object] = {
    "callbacks": (),
    "loggers": (),
    "run_name": None,
    "autoresume": None,
    "eval_interval": "1ep",
    "train_metrics": None,
    "iteration_length": None,
    "watch": {Event.BATCH_END},
    "compile": False,
    "steps_per_call": 1,
    "order": "current",
    "nonfinite": "error",
    "verify": None,
}
# How much the last losses weigh in the mean by which the test stops.
_DECAY = 0.9


@announced
@teaching
@passing_on(fit)
def lr_find(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[object],
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    steps: int = 100,
    **settings: Unpack[FitOptions],
) -> RangeTest:
    """Train for some steps at growing learning rates, on a fork, and report the losses with a suggestion.

    The rate of step ``i`` is ``lowest * (highest / lowest) ** (i / (steps - 1))``; a schedule in the optimizer is not
    used. In :func:`pl.optim.partition <pure_loop.optim.partition>` it is that of the first optimizer, and the others
    keep their ratio to it. The loss of a rate is that of the batch after its step. The test stops where the loss is not
    finite, or its running mean is above the first one and above four times the lowest one.

    Model, State and random numbers stay as they are, and dataloaders begin anew afterwards; data shorter than the test
    is read several times. Callbacks, loggers, evaluations and ``autoresume`` are left out; algorithms train as in
    ``fit``, except that fractions of the duration are those of the test.

    Args:
        model_or_state, train_dataloader: as in :func:`pure_loop.fit`.
        lowest: the first learning rate.
        highest: the last one.
        steps: how many rates are tried, at least 10.
        **settings: the other arguments of :func:`pure_loop.fit`.

    Raises:
        ArgumentTypeError: an argument that ``fit`` doesn't have, or that it lacks; one of another type.
        ArgumentError: ``lowest`` is not above 0 or not below ``highest``; fewer than 10 steps; data that is an
            iterator, which the test would use up; an optimizer with a learning rate that can't be set.
        NonFiniteError: the loss of the first batch, before any step, is NaN or infinite.

    >>> import torch, pure_loop as pl
    >>> inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> data = [(inputs, inputs.sum(1, keepdim=True))]
    >>> found = pl.lr_find(torch.nn.Linear(4, 1), data, loss=torch.nn.functional.mse_loss,
    ...                    optimizer=pl.optim.sgd(lr=0.1), max_duration="10ep", highest=10.0)
    >>> 0.01 < found.suggestion < 1.0
    True
    """
    refuse_several(model_or_state, "lr_find")
    arguments = arguments_of_call(fit, (model_or_state, train_dataloader), settings)
    sweep = Sweep.read(lowest, highest, steps)
    refuse_iterator(train_dataloader, "lr_find", "whose first batches the test would use up")
    wanted = Settings.of(arguments)  # what is wrong with the call of fit is said now
    _refuse_unscaled(wanted.optimizer)
    first = 0
    if isinstance(model_or_state, State):
        first = model_or_state.timestamp.batch
        arguments["model_or_state"] = model_or_state.replace(stop=False)
    arguments |= _LEFT_OUT
    arguments["donate"] = wanted.donate if wanted.donate is False else "auto"  # the State stays
    arguments["optimizer"] = sweep.optimizer(wanted.optimizer, first)
    # A batch more than there are rates: its loss is that of the last one.
    arguments["max_duration"] = f"{first + sweep.steps + 1}ba"
    assembly = assemble(Settings.of(arguments))
    # Algorithms have been bound with the evaluators that they watch.
    assembly = attrs.evolve(assembly, fit=attrs.evolve(assembly.fit, evaluators=()))
    with closing(start(assembly)) as stream:
        return _measured(stream, sweep)


def _refuse_unscaled(optimizer: Optimizer) -> None:
    """
    Raises:
        ArgumentError: the optimizer reads its learning rate otherwise than by ``rate_at``.
    """
    if not optimizer.takes_lr_scale:
        raise ArgumentError(
            f"lr_find: the learning rate of optimizer {optimizer.name!r} can't be set: read it as "
            "pl.optim.rate_at(name, lr, timestamp) in update, and write Optimizer(..., takes_lr_scale=True); of "
            "from_torch, give lr as a function: from_torch(cls, lr=pl.schedules.constant(1e-3))."
        )


def _measured(stream: Iterable[tuple[Event, State]], sweep: Sweep) -> RangeTest:
    """
    Raises:
        NonFiniteError: before the first step.
    """
    losses: list[float] = []
    mean, best, diverged = 0.0, math.inf, False
    initial: float | None = None
    try:
        for _, state in stream:
            loss = float(total_loss(state.loss))
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss}")
            if initial is None:
                initial = loss
                continue
            losses.append(loss)
            mean = _DECAY * mean + (1 - _DECAY) * loss
            smoothed = mean / (1 - _DECAY ** len(losses))
            best = min(best, smoothed)
            if smoothed > initial and smoothed - best > 3 * abs(best):
                diverged = True
                break
    except NonFiniteError as error:
        if initial is None:
            raise NonFiniteError(
                f"lr_find: {error} The first batch is trained on before any learning rate has had an effect: its data, "
                "the model or the precision is at fault, and fit would stop there, too."
            ) from error
        diverged = True
    assert initial is not None
    return RangeTest(sweep.rates[: len(losses)], tuple(losses), initial, diverged)


@attrs.frozen
class Sweep:
    """The learning rates of a test."""

    rates: tuple[float, ...]

    @classmethod
    def read(cls, lowest: object, highest: object, steps: object) -> Sweep:
        """
        Raises:
            ArgumentError, ArgumentTypeError: no range, or too few steps.
        """
        lowest = check_number("lowest", lowest, where="lr_find", above=0)
        highest = check_number("highest", highest, where="lr_find", above=0)
        steps = check_integer("steps", steps, where="lr_find", least=10)
        if lowest >= highest:
            raise ArgumentError(
                f"lr_find: lowest={lowest:g} must be below highest={highest:g}: lowest=1e-7, highest=1.0."
            )
        return cls(tuple(lowest * (highest / lowest) ** (step / (steps - 1)) for step in range(steps)))

    @property
    def steps(self) -> int:
        return len(self.rates)

    def optimizer(self, optimizer: Optimizer, first: int) -> Optimizer:
        """The optimizer at these rates; ``first``: how many batches were finished before the test."""

        def rate(timestamp: Timestamp) -> float:
            return self.rates[min(timestamp.batch - first, self.steps - 1)]

        def swept(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
            def update(
                grads: object,
                opt_state: object,
                params: object,
                timestamp: Timestamp | ScaledTimestamp,
                **options: object,
            ) -> object:
                if isinstance(timestamp, ScaledTimestamp):
                    timestamp = timestamp.timestamp
                at = cast("Timestamp", _AtRate(timestamp, rate(timestamp), optimizer.lr))
                return function(grads, opt_state, params, at, **options)

            return update

        overwrite = None if optimizer.overwrite is None else swept(optimizer.overwrite)
        seeing = optimizer.seeing
        return attrs.evolve(
            optimizer,
            update=swept(optimizer.update),
            overwrite=overwrite,
            lr=rate,
            seeing=None if seeing is None else lambda view: self.optimizer(seeing(view), first),
        )


class _AtRate(ScaledTimestamp):
    """The timestamp of a step at a learning rate, whatever the schedule says.

    Attributes:
        main: the schedule that has this rate; others keep their ratio to it.
    """

    __slots__ = ("main", "value")

    def __init__(self, timestamp: Timestamp, value: float, main: RateFunction) -> None:
        # It has no factor: its rate is another one.
        self.timestamp, self.value, self.main = timestamp, value, main

    def rate(self, where: str, lr: RateFunction) -> float:
        if lr is self.main or lr == self.main:
            return self.value
        asking, main = rate_at(where, lr, self.timestamp), rate_at(where, self.main, self.timestamp)
        if main == 0:
            raise ArgumentError(
                f"lr_find: the optimizers of a partition keep the ratio of their learning rates, and that of the first "
                f"one is 0 at batch {self.timestamp.batch}: give constant rates for the test."
            )
        return self.value * asking / main
