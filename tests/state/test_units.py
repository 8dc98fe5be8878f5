"""Schedules and intervals in a unit that never moves: tokens that no batch has, iterations that there are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, DataError
from tests.support.worlds import KINDS, pool

mse = nn.functional.mse_loss
S = pl.schedules
DATA = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3


def fit(data: Any = DATA, model: Any = None, **options: Any) -> Any:
    settings = {"loss": mse, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep", **options}
    return pl.fit(nn.Linear(2, 1) if model is None else model, data, **settings)


class Reports(pl.Callback):
    def __init__(self, interval: str) -> None:
        self.every = pl.every(interval)

    def batch_end(self, state: pl.State, logger: Any) -> None:
        self.every(state)


@pl.algorithm(Event.BATCH_END, when=pl.every("100tok"))
def shrink(state: pl.State) -> pl.State:
    return state


@pl.algorithm(Event.ITERATION_END, when=pl.every("1iter"))
def shrink_each_iteration(state: pl.State) -> pl.State:
    return state


def partition(lr: Any) -> pl.optim.Optimizer:
    parts = {"a": pl.optim.sgd(lr=0.1), "b": pl.optim.from_torch(torch.optim.RMSprop, lr=lr)}
    return pl.optim.partition(parts, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b")


IN_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "linear": ({"optimizer": pl.optim.sgd(lr=S.linear(0.1, 0.0, "100tok"))}, r"rate of sgd \('100tok'\)"),
    "warmup": (
        {"optimizer": pl.optim.adamw(lr=S.warmup("10tok", S.cosine("9ba", peak=1.0)))},
        r"rate of adamw \('10tok'\)",
    ),
    "multistep": ({"optimizer": pl.optim.sgd(lr=S.multistep(["1ep", "50tok"], gamma=0.1))}, r"\('50tok'\)"),
    "product": ({"optimizer": pl.optim.sgd(lr=0.5 * S.linear(0.1, 0.0, "100tok"))}, r"\('100tok'\)"),
    "partition": ({"optimizer": partition(S.linear(0.1, 0.0, "100tok"))}, r"rate of from_torch\(RMSprop\) \('b'\)"),
    "evaluator": ({"evaluators": {"val": DATA}, "eval_interval": "50tok"}, r"interval of evaluator 'val' \('50tok'\)"),
    "algorithm": ({"algorithms": [shrink]}, r"algorithm 'shrink' \('100tok'\)"),
    "ema": ({"algorithms": [pl.algorithms.ema(half_life="100tok")]}, r"algorithm 'ema' \('100tok'\)"),
    "callback": ({"callbacks": [Reports("7tok")]}, r"Reports \('7tok'\)"),
    "logger": ({"loggers": [pl.loggers.ConsoleLogger(interval="7tok")]}, r"ConsoleLogger \('7tok'\)"),
}
WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "compiled": {"compile": True, "watch": {Event.BATCH_END}},
    "order 2021": {"order": "2021"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["linear", "evaluator", "algorithm"])
def test_tokens_that_no_batch_has(case: str, way: str, interpreted: None) -> None:
    """Before the first batch trains."""
    options, says = IN_TOKENS[case]
    model = nn.Linear(2, 1)
    with pytest.raises(DataError, match=rf"{says} counts tokens, and batch 0 has none.*pl\.Task\(tokens="):
        pl.run(fit(model=model, **options, **WAYS[way]))


@pytest.mark.parametrize("case", IN_TOKENS)
def test_whatever_counts_tokens_is_named(case: str) -> None:
    """Schedules, alone and in others, of each group; evaluators, algorithms, callbacks and loggers."""
    options, says = IN_TOKENS[case]
    seen = []
    with pytest.raises(DataError, match=says):
        seen.extend(event for event, _ in fit(**options))
    assert Event.BATCH_END not in seen


def test_a_checkpoint_saver_counts_tokens(tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"CheckpointSaver \('50tok'\)"):
        pl.run(fit(callbacks=[pl.callbacks.CheckpointSaver(str(tmp_path), interval="50tok")]))


@pytest.mark.parametrize("case", IN_TOKENS)
def test_tokens_that_are_counted(case: str) -> None:
    options, _ = IN_TOKENS[case]
    task = pl.Task(loss=lambda outputs, batch: mse(outputs, batch[1]), tokens=lambda batch: len(batch[0]))
    assert pl.run(fit(task=task, loss=None, **options)).timestamp.token == 24


def test_batches_without_tokens_between_others() -> None:
    """A count of one's own may be 0 in the first batch, and any in a later one."""
    counts = iter([0, 5, 0])
    task = pl.Task(loss=lambda outputs, batch: mse(outputs, batch[1]), tokens=lambda batch: next(counts))
    optimizer = pl.optim.sgd(lr=S.linear(0.1, 0.0, "100tok"))
    assert pl.run(fit(task=task, loss=None, optimizer=optimizer, max_duration="1ep")).timestamp.token == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": pl.optim.sgd(lr=S.linear(0.1, 0.0, "2iter"))}, r"rate of sgd \('2iter'\)"),
        ({"algorithms": [shrink_each_iteration]}, r"algorithm 'shrink_each_iteration' \('1iter'\)"),
        ({"callbacks": [Reports("1iter")]}, r"Reports \('1iter'\)"),
    ],
)
def test_iterations_that_there_are_not(options: dict[str, Any], says: str) -> None:
    """At the call; with an iteration_length there are some."""
    with pytest.raises(ArgumentError, match=rf"{says} counts iterations.*iteration_length="):
        fit(**options)
    assert pl.run(fit(iteration_length="1ep", **options)).timestamp.iteration == 2


def test_an_interval_of_0_never_comes() -> None:
    assert pl.run(fit(evaluators=DATA, eval_interval=0)).timestamp.batch == 6


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks(kind: str) -> None:
    def program(rank: int) -> str:
        try:
            pl.run(fit(optimizer=pl.optim.sgd(lr=S.linear(0.1, 0.0, "100tok")), parallel=kind))
        except Exception as error:
            return str(error)
        return ""

    assert any("counts tokens, and batch 1 has none" in said for said in pool(kind=kind).run(program))
