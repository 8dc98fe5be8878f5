"""TimeLeft against times that are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

import pure_loop as pl
from pure_loop.callbacks import TimeLeft
from pure_loop.loggers import InMemoryLogger
from tests.support.runs import mlp, points, stream


class Clock:
    """Seconds that pass only in batches and evaluations."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def left(start: Any = None, batches: int = 4, evaluation: float = 10.0, **options: Any) -> Any:
    """``time/left`` by batch, where a batch takes 100 s and an evaluation of one batch 10 s; and the last State."""
    clock, logger = Clock(), InMemoryLogger()
    monitor = TimeLeft(options.pop("interval", "1ba"), clock=clock)
    settings = {"max_duration": "1ep", "callbacks": [monitor], "loggers": [logger], "clock": clock, **options}
    state = start
    for event, state in stream(  # noqa: B007 - the last one is returned
        mlp() if start is None else start, points(batches), **settings
    ):
        clock.now += 100.0 * (event is pl.Event.BATCH_START) + evaluation * (event is pl.Event.EVAL_BATCH_START)
    series = logger.series("time/left") if "time/left" in logger.metrics else ([], [])
    return dict(zip(*series, strict=True)), state


EVALUATED: dict[str, Any] = {"evaluators": points(1), "eval_interval": "1ba"}


def test_a_quarter_that_took_100_seconds_leaves_300() -> None:
    assert left()[0] == {1: 300.0, 2: 200.0, 3: 100.0, 4: 0.0}


def test_evaluations_are_counted_and_kept_apart() -> None:
    # At the first BATCH_END no evaluation was measured; at the second one of 10 s was, and three are left.
    assert left(**EVALUATED)[0] == pytest.approx({1: 300.0, 2: 200.0 + 30.0, 3: 100.0 + 20.0, 4: 10.0})


def test_several_evaluators() -> None:
    data = {"a": points(1), "b": pl.Evaluator(points(2), interval="2ba")}
    found = left(evaluators=data, eval_interval="1ba")[0]
    # At batch 3: evaluations of a at 3 and 4, and of b at 4, with 20 s for its two batches.
    assert found == pytest.approx({1: 300.0, 2: 230.0, 3: 100.0 + 20.0 + 20.0, 4: 10.0 + 20.0})


def test_the_last_batch_has_an_evaluation_in_any_case() -> None:
    found = left(batches=5, evaluators=points(1), eval_interval="3ba")[0]
    assert found == pytest.approx({1: 400.0, 2: 300.0, 3: 200.0, 4: 100.0 + 10.0, 5: 10.0})


def test_epochs_of_unknown_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            yield from points(2)

    clock, logger = Clock(), InMemoryLogger()
    for event, _ in stream(
        mlp(), Endless(), callbacks=[TimeLeft("1ba", clock=clock)], loggers=[logger], max_duration="3ep", clock=clock
    ):
        clock.now += 100.0 * (event is pl.Event.BATCH_START)
    found = dict(zip(*logger.series("time/left"), strict=True))
    assert found == pytest.approx({3: 300.0, 4: 200.0, 5: 100.0, 6: 0.0})


def test_at_the_ends_of_epochs() -> None:
    assert left(interval="1ep", max_duration="2ep")[0] == {4: 400.0, 8: 0.0}


def test_a_budget_in_seconds() -> None:
    assert left(max_duration="350s")[0] == {1: 250.0, 2: 150.0, 3: 50.0, 4: 0.0}


def test_a_resumed_run_estimates_at_once() -> None:
    whole, _ = left(max_duration="2ep", **EVALUATED)
    _, state = left(max_duration="2ba", **EVALUATED)
    resumed, _ = left(state, max_duration="2ep", **EVALUATED)
    # Of the 210 s that the State counts, 10 s were of an evaluation; before one is measured they count as training. The
    # evaluation after the last BATCH_END of the first part is in no timestamp.
    assert resumed[3] == pytest.approx(310.0 / 3 * 5)
    assert resumed[5] == pytest.approx(whole[5], rel=0.03)
    assert resumed.keys() == {3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("interval", [None, "soon", -1, 1.5])
def test_a_wrong_interval_is_refused(interval: Any) -> None:
    with pytest.raises(pl.PureLoopError, match=r"TimeLeft.*interval"):
        TimeLeft(interval)
