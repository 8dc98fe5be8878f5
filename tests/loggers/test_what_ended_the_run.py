"""The record of a run ends with the values of its last event, whatever ended the run there.

Tried: an error of an algorithm, a callback before and after the monitors, a logger's own method, one logger that can't
record beside one that can, the loop's body, and an interrupt; at BATCH_END, EVAL_END and FIT_END; in memory and in
files; every event, some, strict, and compiled; replicated on two ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import LRMonitor, SpeedMonitor
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger
from tests.support.runs import cross_entropy, mlp, points
from tests.support.worlds import pool


class EndedError(Exception):
    pass


def fit(logger: Any, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "2ep",
        "evaluators": {"val": points(1)},
        "eval_interval": "2ba",
        "loggers": [*options.pop("more", ()), logger],
        "seed": 0,
    }
    return pl.fit(mlp(), points(3), **{**arguments, **options})


def at_batch(number: int, event: Event, error: type[BaseException] = EndedError) -> Callable[[Event, pl.State], None]:
    def callback(now: Event, state: pl.State) -> None:
        if now is event and state.timestamp.batch == number:
            raise error

    return callback


def by_algorithm(event: Event) -> dict[str, Any]:
    def function(state: pl.State) -> pl.State:
        at_batch(4, event)(event, state)
        return state

    return {"algorithms": [pl.algorithm(event)(function)]}


def by_callback(event: Event) -> dict[str, Any]:
    return {"callbacks": [at_batch(4, event), SpeedMonitor(), LRMonitor(name="rate")]}


def by_later_callback(event: Event) -> dict[str, Any]:
    return {"callbacks": [LRMonitor(name="rate"), at_batch(4, event)]}


def by_interrupt(event: Event) -> dict[str, Any]:
    return {"callbacks": [at_batch(4, event, KeyboardInterrupt), LRMonitor(name="rate")]}


def by_logger(event: Event) -> dict[str, Any]:
    class Raises(pl.Logger):
        def run_event(self, now: Event, state: pl.State, logger: Any) -> None:
            at_batch(4, event)(now, state)

    return {"more": [Raises()]}


def by_recording(event: Event) -> dict[str, Any]:
    """A logger that can't take what it is given."""

    class Raises(pl.Logger):
        def log_metrics(self, metrics: Any, state: pl.State) -> None:
            mine = ("val/loss" in metrics) if event is Event.EVAL_END else ("train/loss" in metrics)
            if mine and state.timestamp.batch == 4:
                raise EndedError

    return {"more": [Raises()]}


WAYS: dict[str, dict[str, Any]] = {"every event": {}, "few events": {"watch": ["fit_end"]}, "strict": {"strict": True}}
BY = [by_algorithm, by_callback, by_later_callback, by_interrupt, by_logger, by_recording]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EVAL_END])
@pytest.mark.parametrize("by", BY)
def test_values_of_the_event_at_which_the_run_ended_are_recorded(
    by: Callable[[Event], dict[str, Any]], event: Event, way: str
) -> None:
    logger = InMemoryLogger()
    with pytest.raises((EndedError, KeyboardInterrupt)):
        pl.run(fit(logger, **WAYS[way], **by(event)))
    assert logger.series("train/loss")[0] == [1, 2, 3, 4]
    assert logger.series("val/loss")[0] == ([2] if event is Event.BATCH_END else [2, 4])
    if "rate" in logger.metrics:
        assert logger.series("rate")[0] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.BATCH_END, Event.EVAL_END])
@pytest.mark.parametrize("by", BY)
def test_compiled_runs_too(by: Callable[[Event], dict[str, Any]], event: Event) -> None:
    logger = InMemoryLogger()
    with pytest.raises((EndedError, KeyboardInterrupt)):
        pl.run(fit(logger, compile=True, watch=["fit_end"], **by(event)))
    assert logger.series("train/loss")[0] == [1, 2, 3, 4]
    assert logger.series("val/loss")[0] == ([2] if event is Event.BATCH_END else [2, 4])


def test_the_values_are_in_files(tmp_path: Path) -> None:
    """Nothing was due to be written when the run ended."""
    for logger in (JSONLinesLogger(tmp_path / "metrics.jsonl"), CSVLogger(tmp_path / "metrics.csv")):
        with pytest.raises(EndedError):
            pl.run(fit(logger, **by_callback(Event.EVAL_END)))
    recorded = [
        line["batch"]
        for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if line.get("name") == "val/loss"
    ]
    assert recorded == [2, 4]
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows[-1].split(",")[header.split(",").index("val/loss")]


def test_what_the_body_raises_is_after_the_record() -> None:
    logger = InMemoryLogger()
    body = at_batch(4, Event.EVAL_END)
    with pytest.raises(EndedError):
        [body(event, state) for event, state in fit(logger)]
    assert logger.series("val/loss")[0] == [2, 4]


def test_a_record_that_fails_is_a_note_of_the_first_error() -> None:
    class Raises(pl.Logger):
        def log_metrics(self, metrics: Any, state: pl.State) -> None:
            if "val/loss" in metrics:
                raise OSError("no space left")

    with pytest.raises(EndedError) as caught:
        pl.run(fit(InMemoryLogger(), more=[Raises()], callbacks=[at_batch(2, Event.EVAL_END)]))
    assert "while recording EVAL_END: OSError: no space left" in caught.value.__notes__


def _two_ranks(rank: int) -> list[int]:
    logger = InMemoryLogger()
    with pytest.raises((EndedError, pl.DistributedError)):
        pl.run(fit(logger, parallel="replicate", callbacks=[at_batch(4, Event.EVAL_END)]))
    return logger.series("val/loss")[0] if "val/loss" in logger.metrics else []


@pytest.mark.slow
def test_on_two_ranks() -> None:
    assert pool().run(_two_ranks)[0] == [2, 4]
