"""What a stream says of a run before it begins: the optimizer, the evaluators and how many batches they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any

import attrs

from pure_loop.cadence import Cadence
from pure_loop.evaluator import BoundEvaluator
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.call import Fit
from pure_loop.loop.stream import Stream, arguments_of
from pure_loop.optim import Optimizer
from pure_loop.state import State
from pure_loop.time import Time

__all__ = ["EvaluatorFacts", "Facts", "rates"]


@attrs.frozen
class EvaluatorFacts:
    """One evaluator.

    Attributes:
        batches: how many an evaluation has; None: not known.
        interval: how often it runs; None: a predicate decides.
    """

    batches: int | None = None
    interval: Time | None = None


@attrs.frozen
class Facts:
    """What is known of a run; nothing of a stream that is no stream of ``fit``, ``evaluate`` or ``predict``.

    Attributes:
        optimizer: that of training.
        evaluators: by label, in their order.
        batches: those of a prediction.
        skips: whether batches that are not finite are left out of training.
    """

    optimizer: Optimizer | None = None
    evaluators: Mapping[str, EvaluatorFacts] = attrs.field(factory=FrozenDict)
    batches: int | None = None
    skips: bool = False

    @classmethod
    def of(cls, stream: Iterable[Any]) -> Facts:
        """Read the arguments of a stream that has not begun; of one that has, nothing is read."""
        pairs: Any = iter(stream) if isinstance(stream, Stream) else None
        while isinstance(pairs, GeneratorType) and getgeneratorstate(pairs) == GEN_CREATED:
            arguments = arguments_of(pairs)
            fit, evaluators, source = (arguments.get(name) for name in ("fit", "evaluators", "source"))
            if isinstance(fit, Fit):
                return cls(fit.stages.optimizer, _by_label(fit.evaluators), skips=fit.stages.nonfinite == "skip")
            if evaluators is not None:
                return cls(evaluators=_by_label(evaluators))
            if source is not None:
                return cls(batches=source.length)
            pairs = arguments.get("script") or arguments.get("pairs")
        return cls()

    @property
    def evaluation_batches(self) -> int | None:
        """Those of one evaluation by every evaluator."""
        counts = [facts.batches for facts in self.evaluators.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None


def _by_label(evaluators: Iterable[BoundEvaluator]) -> Mapping[str, EvaluatorFacts]:
    return {
        evaluator.label: EvaluatorFacts(
            evaluator.source.length,
            evaluator.interval.interval if isinstance(evaluator.interval, Cadence) else None,
        )
        for evaluator in evaluators
    }


def rates(optimizer: Optimizer | None, state: State, name: str = "lr") -> dict[str, Any]:
    """The learning rates of the last batch by name, that of a part as ``lr:<label>``; nothing is read from a device."""
    if optimizer is None:
        return {}
    if optimizer.parts:
        values: dict[str, Any] = {}
        for label, part in optimizer.parts.items():
            values |= rates(part, state, f"{name}:{label}")
        return values
    rate = optimizer.lr(state.previous_timestamp)
    if rate != rate:  # an optimizer without a learning rate has NaN
        return {}
    return {name: rate if state.lr_scale is None else rate * state.lr_scale}
