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
from pure_loop.frozendict import FrozenDict
from pure_loop.loggers import InMemoryLogger
from pure_loop.testing.comparison import differences
from tests.support import problem
from tests.support.refused import Refusal, check

HALF = torch.tensor(0.5, dtype=torch.float64)
DATA = problem.points(4)


def setting(value: Any, event: Event = Event.BATCH_START, batch: int = 0) -> pl.Algorithm:
    """Sets the factor at an event of a batch."""
    set_it = lambda state: state.replace(lr_scale=value) if state.timestamp.batch >= batch else state  # noqa: E731
    return pl.Algorithm("halving", {event: set_it})


def fit(*algorithms: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.25), "max_duration": "1ep", "strict": False}
    return problem.fit(None, DATA, algorithms, **settings | options)


def test_the_recorded_rate_is_the_one_used(tmp_path: Path) -> None:
    recorded, monitored = InMemoryLogger(), InMemoryLogger()
    halved = setting(HALF, Event.BATCH_CHECKPOINT, batch=2)
    pl.run(fit(halved, loggers=[recorded]))
    end = pl.run(fit(halved, loggers=[monitored], callbacks=[pl.callbacks.LRMonitor(name="rate")]))
    assert recorded.series("train/learning_rate")[1] == [0.25, 0.25, 0.125, 0.125]
    assert monitored.series("rate")[1] == [0.25, 0.25, 0.125, 0.125]
    pl.save(end, tmp_path / "end.safetensors")
    assert not differences(pl.load(tmp_path / "end.safetensors", model=problem.mlp()), end)


def own(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
    return FrozenDict({name: tensor - 0.1 * grads[name] for name, tensor in params.items()}), opt_state


OWN = pl.optim.Optimizer(name="own", init=lambda params: FrozenDict(), update=own, lr=lambda timestamp: 0.1)
SAYS = ("lr_scale to ", "torch.tensor(0.5, dtype=torch.float64)")


def test_a_factor_that_would_not_be_the_recorded_one() -> None:
    for event in (Event.BATCH_END, Event.AFTER_TRAIN_BATCH, Event.BEFORE_TRAIN_BATCH, Event.EVAL_END):
        says = f"at {event.name} changed lr_scale, ", "BATCH_CHECKPOINT"
        call = lambda: fit(setting(HALF, event), evaluators={"val": DATA[:1]})  # noqa: E731
        check(Refusal(event.name, call, AlgorithmStructureError, says, at_once=False))
    for value in (0.5, torch.ones(2), torch.tensor(1)):
        check(Refusal("value", lambda: fit(setting(value)), AlgorithmStructureError, SAYS, at_once=False))
    says = "optimizer 'own' ", "pl.optim.rate_at", "takes_lr_scale=True"
    check(Refusal("own", lambda: fit(setting(HALF), optimizer=OWN), ArgumentError, says, at_once=False))
    check(Refusal("negative", lambda: fit(setting(-HALF)), ArgumentError, ("lr_scale=-0.5 makes it",), at_once=False))


@pytest.mark.usefixtures("interpreted")
def test_a_factor_that_comes_in_a_compiled_run() -> None:
    halved = setting(HALF, Event.BATCH_CHECKPOINT, batch=2)
    compiled, eager = (pl.run(fit(halved, compile=graphs)) for graphs in (True, False))
    torch.testing.assert_close(dict(compiled.params), dict(eager.params), rtol=1e-6, atol=1e-6)
