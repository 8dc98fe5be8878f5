"""What ``hypothesis.strategies.from_type`` draws for the types of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pure_loop import metrics, optim, schedules
from pure_loop.algorithm import Algorithm, Composition
from pure_loop.evaluator import Evaluator
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.testing import strategies
from pure_loop.testing.case import Case
from pure_loop.testing.problems import Problem
from pure_loop.time import Time, Timestamp

__all__ = ["BY_TYPE"]

Drawn: TypeAlias = "st.SearchStrategy[Any]"


def _algorithms(requested: object) -> Drawn:
    return strategies.algorithms(min_size=1, max_size=1).map(lambda composition: composition.members[0])


def _evaluator_plans(requested: object) -> Drawn:
    plans = strategies.plans(min_evaluators=1, max_evaluators=1)
    return plans.map(lambda plan: next(iter(plan.evaluators.values())))


def _frozen_dicts(requested: object) -> Drawn:
    """Names of parameters to tensors, as a State has them; or what ``FrozenDict[K, V]`` says."""
    keys, values = get_args(requested) or (str, Tensor)
    names = st.sampled_from(("weight", "bias", "head.weight", "head.bias"))
    tensors = strategies.batches(dtypes=[torch.float32], nested=False).map(lambda batch: batch[0])
    items = st.dictionaries(
        names if keys is str else st.from_type(keys),
        tensors if values is Tensor else st.from_type(values),
        max_size=4,
    )
    return st.builds(FrozenDict, items)


def _evaluators(requested: object) -> Drawn:
    sizes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
    return st.builds(
        Evaluator,
        st.builds(lambda problem, sizes: problem.batches(sizes, seed=7), strategies.problems(), sizes),
        interval=st.none() | strategies.times(units=["ep", "ba", "sp"], max_value=9).filter(bool).map(str),
        batches=st.none() | st.integers(1, 3),
        microbatch_size=st.none() | st.integers(1, 6),
    )


def _optimizers(requested: object) -> Drawn:
    rates = st.floats(0.001, 0.5) | st.just(schedules.linear(0.05, 0.01, "12ba"))
    return st.builds(optim.sgd, lr=rates, momentum=st.sampled_from((0.0, 0.9))) | st.builds(optim.adamw, lr=rates)


def _cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch[1])


def _tokens(batch: Any) -> int:
    return int(batch[1].numel())


def _tasks(requested: object) -> Drawn:
    tokens = st.just(_tokens)
    return st.builds(Task, loss=st.just(_cross_entropy)) | st.builds(
        Task, loss=st.just(_cross_entropy), tokens=tokens, weight=tokens
    )


def _absolute(outputs: Any, batch: Any) -> Tensor:
    size: Tensor = outputs.abs()
    return size


def _metrics(requested: object) -> Drawn:
    mean = st.builds(metrics.mean, st.just(_absolute), st.just("size"))
    return st.builds(metrics.loss) | mean | st.builds(metrics.accuracy)


BY_TYPE: dict[type, Callable[[Any], Drawn]] = {
    State: lambda asked: strategies.states(),
    Timestamp: lambda asked: strategies.timestamps(),
    Time: lambda asked: strategies.times(),
    Plan: lambda asked: strategies.plans(),
    EvaluatorPlan: _evaluator_plans,
    Case: lambda asked: strategies.cases(),
    Problem: lambda asked: strategies.problems(),
    Algorithm: _algorithms,
    Composition: lambda asked: strategies.algorithms(),
    FrozenDict: _frozen_dicts,
    Evaluator: _evaluators,
    Optimizer: _optimizers,
    Task: _tasks,
    Metric: _metrics,
}
"""A strategy for each type, made of what was asked for: the type, or ``FrozenDict`` of something."""
