"""The metric by which a saver keeps the best: where it is measured, and what is noted of it in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pure_loop.errors import ArgumentError
from pure_loop.metrics import Metric
from pure_loop.metrics.loss import DEFAULT_NAMES
from pure_loop.state import State

if TYPE_CHECKING:
    from pure_loop.algorithms._monitored import Mode

__all__ = ["Scored"]


class Scored:
    """A metric of an evaluator, or none.

    Args:
        best: how many of the best stay; None: there is no metric.
        metric: label of an evaluator and name, ``"val/accuracy"``.
        mode: ``"max"`` or ``"min"``; None: known from the name.

    Raises:
        ArgumentError: one without the other, or no such text.
    """

    def __init__(self, best: int | None, metric: object, mode: object) -> None:
        self.metric, self.mode = _read(best, metric, mode)
        self._label, _, self._name = ("" if self.metric is None else self.metric).partition("/")
        # At which batch it was measured, and of which tensors.
        self._measured: int | None = None
        self._trained: list[int] = []
        # The States whose weights were measured since the last batch, by the labels of evaluators.
        self._evaluated: dict[str, State] = {}

    @property
    def largest(self) -> bool:
        return self.mode == "max"

    def begin(self, evaluated: dict[str, State]) -> None:
        """At FIT_START.

        Args:
            evaluated: for the States at EVAL_START; another part of the loop takes them out at the next batch.
        """
        self._measured, self._evaluated = None, evaluated

    def begins(self, state: State) -> None:
        """At EVAL_BEFORE_ALL."""
        if self.metric is not None:
            self._trained = _identities(state)

    def evaluates(self, state: State) -> None:
        """At EVAL_START, where the weights are saved that are measured."""
        if self._is_of(state):
            self._evaluated[self._label] = state

    def _is_of(self, state: State) -> bool:
        """Whether this evaluation measures it."""
        return self.metric is not None and state.evaluator == self._label

    def with_measured_weights(self, state: State) -> State:
        """The State with the weights of the last evaluation."""
        evaluated = self._evaluated[self._label]
        return state.replace(model=evaluated.model, params=evaluated.params, buffers=evaluated.buffers)

    def evaluated(self, state: State) -> None:
        """At EVAL_END.

        Raises:
            ArgumentError: its evaluator doesn't measure it; says what it does.
        """
        if self._is_of(state):
            self._measured = state.timestamp.batch
            self._refuse_other([*state.metrics[self._label]])

    def is_measured(self, state: State, *, evaluated: bool) -> bool:
        """Whether what is saved at this batch was measured.

        Args:
            state: of the boundary.
            evaluated: whether the weights of the evaluation are saved, and not those of the State, which algorithms may
                have changed since.
        """
        return self._measured == state.timestamp.batch and (evaluated or self._trained == _identities(state))

    def notes(self, state: State) -> dict[str, object]:
        """What a checkpoint of this State, at which it was measured, says of it."""
        score = float(state.metrics[self._label][self._name])
        # NaN and infinity are never the best, and JSON doesn't have them.
        return {"metric": self.metric, "mode": self.mode, "score": score if math.isfinite(score) else None}

    def refuse_unmeasured(self, evaluators: Mapping[str, Sequence[Metric] | None]) -> None:
        """Refuse a metric that is sure not to be measured.

        Args:
            evaluators: the metrics of each by its label; None: those that fit its outputs.

        Raises:
            ArgumentError: says which there are.
        """
        if self.metric is None:
            return
        if self._label not in evaluators:
            raise ArgumentError(
                f"metric={self.metric!r}: there is no evaluator {self._label!r} in evaluators=; there are "
                f"{', '.join(evaluators) or 'none'}."
            )
        metrics = evaluators[self._label]
        self._refuse_other(DEFAULT_NAMES if metrics is None else [metric.name for metric in metrics])

    def _refuse_other(self, names: Sequence[str]) -> None:
        if self._name not in names:
            measured = ", ".join(f"{self._label}/{name}" for name in names)
            raise ArgumentError(f"metric={self.metric!r} is not measured; there are {measured}.")


def _identities(state: State) -> list[int]:
    return [id(tensor) for tensor in (*state.params.values(), *state.buffers.values())]


def _read(best: int | None, metric: object, mode: object) -> tuple[str | None, Mode | None]:
    if best is None:
        if metric is not None or mode is not None:
            raise ArgumentError(f"metric={metric!r} and mode={mode!r} say which are best: keep_best=1 keeps the best.")
        return None, None
    if not isinstance(metric, str) or not all(metric.partition("/")):
        raise ArgumentError(
            f'metric={metric!r}: for keep_best give the label of an evaluator and the name of a metric, "val/accuracy".'
        )
    if mode is None:
        from pure_loop.algorithms._monitored import known_mode  # autoresume= saves without a metric

        mode = known_mode(metric.partition("/")[2])
    if mode not in ("min", "max"):
        raise ArgumentError(f'mode={mode!r}: is the best {metric} the largest, mode="max", or the smallest, "min"?')
    return metric, mode
