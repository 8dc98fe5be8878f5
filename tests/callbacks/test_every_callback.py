"""All callbacks of the library: training is as it was, and a resumed run records what the whole run records."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.callback import LoggerGroup
from pure_loop.callbacks._beside import refuse_collectives
from pure_loop.errors import ArgumentError
from pure_loop.loggers import InMemoryLogger
from pure_loop.order import BOUNDARIES
from tests.support.problem import convnet, fit, images, mlp, points, run
from tests.support.served import required
from tests.support.streams import equal
from tests.support.worlds import pool

# Times of this machine and windows that begin anew are not those of the whole run.
MEASURED = ("speed/", "time/", "memory/", "system/")
CALLBACKS = sorted(set(pl.callbacks.__all__) - {"MemorySnapshot"})  # which needs a device


def made(name: str, folder: Path) -> Any:
    method = getattr(pl.callbacks, name)
    settings = required(method, folder)
    if "interval" in inspect.signature(method).parameters:
        settings["interval"] = "0.01s" if name == "SystemMonitor" else "2ba"
    settings |= {"SpeedMonitor": {"flops": "count"}, "GradMonitor": {"per_layer": True}}.get(name, {})
    return method(**settings)


def recorded(start: Any, *callbacks: pl.Callback) -> tuple[dict[Any, Any], list[pl.State]]:
    """What is recorded, by name and batch; and the States of all boundaries, the last one of the run at the end."""
    logger = InMemoryLogger()
    options: dict[str, Any] = {"optimizer": pl.optim.adam(lr=0.1), "evaluators": {"val": images(2)}, "clip_grad": 0.5}
    options |= {"callbacks": callbacks, "loggers": [logger], "eval_interval": "2ba", "donate": False}
    states = [s for _, s in fit(start, images(), strict=False, **options) if s.event in BOUNDARIES]
    entries: dict[Any, Any] = {}
    for name in logger.metrics:
        entries |= {(name, batch): value for batch, value in zip(*logger.series(name), strict=True)}
    for kind in (logger.tables, logger.images):
        entries |= {
            (name, kind is logger.images, at.batch): value for name, rows in kind.items() for at, *value in rows
        }
    return {key: value for key, value in entries.items() if not key[0].startswith(MEASURED)}, states


@pytest.fixture(scope="module")
def alone() -> list[pl.State]:
    return recorded(pl.State.create(convnet(), seed=1))[1]


@pytest.mark.parametrize("name", CALLBACKS)
def test_training_is_as_it_was_and_resumed_runs_record_the_same(name: str, alone: Any, tmp_path: Path) -> None:
    def training(state: pl.State) -> Any:
        return state.params, state.buffers, state.opt_state

    before = torch.get_rng_state()
    whole, states = recorded(alone[0], made(name, tmp_path / "whole"))
    equal([training(state) for state in states[1:]], [training(state) for state in alone[1 - len(states) :]])
    assert torch.equal(torch.get_rng_state(), before)
    for number, start in enumerate(alone[1:-1:4]):
        again, ended = recorded(start, made(name, tmp_path / str(number)))
        equal(training(ended[-1]), training(alone[-1]))
        assert {key for key in whole if key[-1] > start.timestamp.batch} <= again.keys()
        equal(again, {key: value for key, value in whole.items() if key in again})
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pure_loop-system")]


# What a callback is bound to, and what it records


class Bound(pl.Callback):
    """Keeps what it is bound to, and what happened when."""

    def bind(self, run: Any) -> None:
        self.run, self.happened = run, ["bind"]
        run.at_end.append(lambda: self.happened.append("end"))

    def fit_start(self, state: pl.State, logger: Any) -> None:
        self.happened.append("start")

    predict_start = fit_start

    def close(self) -> None:
        self.happened.append("close")


def test_a_callback_is_bound_before_anything_runs_and_ends_after_all_else() -> None:
    callback, other, optimizer = Bound(), Bound(), pl.optim.sgd(lr=0.1)
    evaluators = {"val": points(), "test": pl.Evaluator(points(), metrics=[pl.metrics.loss()])}
    options: dict[str, Any] = {"optimizer": optimizer, "max_duration": "2ba", "iteration_length": "1ep"}
    stream = fit(None, None, evaluators=evaluators, callbacks=[callback], **options)
    assert callback.happened == ["bind"]
    pl.run(stream)
    pl.run(pl.predict(mlp(), points(), callbacks=[other]))
    assert callback.happened == other.happened == ["bind", "start", "close", "end"]
    bound = callback.run
    assert (bound.function, bound.optimizer, bound.order, bound.ranks) == ("fit", optimizer, "current", 1)
    assert (str(bound.max_duration), str(bound.iteration_length), bound.callbacks) == ("2ba", "1ep", (callback,))
    assert (bound.precision, bound.microbatch_size, bound.device) == ("fp32", None, torch.device("cpu"))
    assert bound.task.loss(torch.zeros(1, 1), (None, torch.tensor([0]))) == 0.0
    assert (list(bound.metrics), bound.metrics["val"]) == (["val", "test"], None)
    assert [each.name for each in bound.metrics["test"]] == ["loss"]
    assert (other.run.function, other.run.optimizer, other.run.max_duration) == ("predict", None, None)


def test_what_loggers_can_record_beyond_the_common_goes_to_those_that_have_it() -> None:
    class Audio(pl.Logger):
        heard: tuple[Any, ...] = ()

        def log_audio(self, name: str, samples: Any) -> None:
            self.heard = (*self.heard, (name, samples))

    first, second = Audio(), Audio()
    group: Any = LoggerGroup([first, pl.Logger(), second])
    group.log_audio("a", samples=[1])
    assert first.heard == second.heard == (("a", [1]),)
    with pytest.raises(AttributeError, match=r"has a method 'log_metric'; did you mean log_metrics\?"):
        group.log_metric({})
    with pytest.raises(AttributeError, match="no logger of the run has a method 'log_audio'"):
        LoggerGroup().log_audio("a", [1])
    assert not hasattr(group, "audio")


def test_what_ranks_hold_parts_of_or_compute_together_is_refused() -> None:
    class Squares(pl.Callback):
        all_ranks = True

        def batch_end(self, state: pl.State, logger: Any) -> None:
            logger.log_metrics({"squares": state.params["0.weight"].square().sum()}, state)

    synchronized, alone = nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 3)), r"can't be computed on one"
    cases = (
        (mlp(), "shard", Squares, r"'squares' is a sharded tensor .* value\.full_tensor\(\)"),
        (mlp(), "shard", pl.callbacks.ActivationMonitor, f"a model with sharded parameters {alone}"),
        (synchronized, "replicate", pl.callbacks.ActivationMonitor, "SyncBatchNorm, which exchanges .* on GPUs alone"),
    )
    with pytest.raises(ArgumentError, match=f"a model with SyncBatchNorm on several ranks {alone}"):  # on GPUs
        refuse_collectives(pl.State.create(synchronized), 2, "ActivationMonitor")

    def program(rank: int, model: Any, parallel: Any, method: Any) -> str:
        options: dict[str, Any] = {"parallel": parallel, "max_duration": "1ba", "strict": False}
        with pytest.raises(pl.PureLoopError) as caught:
            run(model, points(), callbacks=[method()], loggers=[InMemoryLogger()], **options)
        return str(caught.value)

    for *case, says in cases:
        for error in pool(kind="shard").run(lambda rank, case=case: program(rank, *case)):
            assert re.search(says, error), error
