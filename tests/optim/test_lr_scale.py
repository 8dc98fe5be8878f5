"""``State.lr_scale``: the recorded rate is the one that was used, and a factor comes where it can be recorded.

That it multiplies each rate, and nothing else, is asked of each optimizer in test_rules.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import AlgorithmStructureError, ArgumentError
from pure_loop.loggers import InMemoryLogger
from pure_loop.testing.comparison import differences
from tests.support import problem
from tests.support.refused import Refusal, check

HALF = torch.tensor(0.5, dtype=torch.float64)
DATA = problem.points(4)


def fit(value: Any = HALF, event: Event = Event.BATCH_CHECKPOINT, **options: Any) -> Any:
    """The factor is set at an event, from batch 2 on."""
    set_it = lambda state: state.replace(lr_scale=value) if state.timestamp.batch >= 2 else state  # noqa: E731
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.25), "max_duration": "1ep", "strict": False}
    return problem.fit(None, DATA, [pl.Algorithm("halving", {event: set_it})], **settings | options)


def test_the_recorded_rate_is_the_one_used(tmp_path: Path) -> None:
    """By the recorder and by the monitor; and a file has it."""
    recorded, monitored = InMemoryLogger(), InMemoryLogger()
    pl.run(fit(loggers=[recorded]))
    end = pl.run(fit(loggers=[monitored], callbacks=[pl.callbacks.LRMonitor(name="rate")]))
    assert recorded.series("train/learning_rate")[1] == [0.25, 0.25, 0.125, 0.125]
    assert monitored.series("rate")[1] == [0.25, 0.25, 0.125, 0.125]
    pl.save(end, tmp_path / "end.safetensors")
    assert not differences(pl.load(tmp_path / "end.safetensors", model=problem.mlp()), end)


@pytest.mark.usefixtures("interpreted")
def test_a_factor_that_comes_in_a_compiled_run() -> None:
    problem.close(pl.run(fit(compile=True)).params, pl.run(fit()).params)


def refuse(says: str, error: type[Exception] = AlgorithmStructureError, **options: Any) -> None:
    check(Refusal(says, lambda: fit(**options), error, (says,), at_once=False))


def test_a_factor_that_would_not_be_the_recorded_one() -> None:
    stays = lambda grads, opt_state, params, timestamp: (params, opt_state)  # noqa: E731
    own = pl.optim.Optimizer(name="own", init=lambda params: pl.FrozenDict(), update=stays, lr=lambda timestamp: 0.1)
    for event in (Event.BATCH_END, Event.AFTER_TRAIN_BATCH, Event.BEFORE_TRAIN_BATCH, Event.EVAL_END):
        refuse(f"at {event.name} changed lr_scale, ", event=event, evaluators=DATA[:1])
    for value in (0.5, torch.ones(2), torch.tensor(1)):
        refuse("torch.tensor(0.5, dtype=torch.float64)", value=value)
    refuse("optimizer 'own' doesn't take it: read", ArgumentError, optimizer=own)
    refuse("lr_scale=-0.5 makes it", ArgumentError, value=-HALF)
