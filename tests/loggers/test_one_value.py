"""One name has one value at one step, whatever is attached.

Tried: all callbacks of the library at once, over plans with microbatches, evaluations and resumption, with every local
logger; a monitor under the name that ``fit`` records; two monitors of one kind; a callback that records under a name of
the library. What one callback records several times in a batch is its own series.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import ActivationMonitor, GradMonitor, LRMonitor, MemoryMonitor, SpeedMonitor, TimeLeft
from pure_loop.loggers import InMemoryLogger, JSONLinesLogger
from tests.support.runs import cross_entropy, mlp, points

MONITORS = {
    "lr": LRMonitor,
    "lr under another name": lambda: LRMonitor(name="rate"),
    "speed": lambda: SpeedMonitor(window=1),
    "gradients": lambda: GradMonitor(interval="1ba", per_layer=True),
    "activations": lambda: ActivationMonitor(interval="1ba"),
    "memory": lambda: MemoryMonitor(interval="1ba"),
    "time": lambda: TimeLeft(interval="1ba"),
}


class Everything(pl.Logger):
    """Each number with its name and step."""

    def __init__(self) -> None:
        self.values: list[tuple[str, int]] = []

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        self.values += [(name, state.timestamp.batch) for name in metrics]


def fit(start: Any, loggers: list[Any], **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.1, "2ep")),
        "max_duration": "2ep",
        "evaluators": {"val": points(1), "train": points(2)},
        "train_metrics": None,
    }
    return pl.fit(start, points(3), loggers=loggers, **{**arguments, **options})


def repeated(values: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [key for key, count in Counter(values).items() if count > 1]


@given(data=st.data())
@settings(max_examples=15)
def test_each_name_has_one_value_at_each_step(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(MONITORS)), unique=True), label="monitors")
    options = {
        "microbatch_size": data.draw(st.sampled_from([None, 2]), label="microbatch_size"),
        "eval_interval": data.draw(st.sampled_from(["1ba", "2ba", "1ep", "7sp"]), label="eval_interval"),
        "max_duration": data.draw(st.sampled_from(["1ba", "4ba", "2ep"]), label="max_duration"),
    }
    logger = Everything()
    stream = fit(mlp(), [logger], callbacks=[MONITORS[name]() for name in names], **options)
    kept = [state for event, state in stream if event in (Event.BATCH_END, Event.EPOCH_END)]
    assert not repeated(logger.values)
    if "lr" in names:
        batches = [step for name, step in logger.values if name == "train/learning_rate"]
        assert batches == list(range(1, max(batches) + 1))
    # The record of a resumed run adds to what was recorded up to there.
    state = data.draw(st.sampled_from(kept), label="resumed from")
    more = Everything()
    pl.run(fit(state, [more], callbacks=[MONITORS[name]() for name in names], **options))
    later = [(name, step) for name, step in more.values if step > state.timestamp.batch]
    assert not repeated(later)
    assert {key for key in logger.values if key[1] > state.timestamp.batch} == set(later)


def test_the_rate_of_a_batch_is_recorded_once_with_its_number(tmp_path: Path) -> None:
    """1 to 0 over four batches: 1, 0.75, 0.5, 0.25."""
    path = tmp_path / "metrics.jsonl"
    rate = pl.schedules.linear(1.0, 0.0, "4ba")
    options: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=rate), "max_duration": "4ba"}
    pl.run(fit(mlp(), [JSONLinesLogger(path)], callbacks=[LRMonitor(), LRMonitor(name="rate")], **options))
    record = [json.loads(line) for line in path.read_text().splitlines()]
    for name in ("train/learning_rate", "rate"):
        recorded = [(line["batch"], line["value"]) for line in record if line.get("name") == name]
        assert recorded == [(1, 1.0), (2, 0.75), (3, 0.5), (4, 0.25)]


def test_another_optimizer_under_the_name_of_the_run_is_refused() -> None:
    other = LRMonitor(pl.optim.sgd(lr=0.5))
    with pytest.raises(pl.ArgumentError, match=r'another name: LRMonitor\(optimizer, name="other/learning_rate"\)'):
        fit(mlp(), [InMemoryLogger()], callbacks=[other])


class OfTheLibrary(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"train/loss": 0.0}, state)


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (
            [SpeedMonitor(window=1), SpeedMonitor(window=2)],
            r"callback SpeedMonitor records .* at batch \d, where callback Sp",
        ),
        ([OfTheLibrary()], "callback Recorder records 'train/loss' at batch 1, where callback OfTheLibrary has"),
    ],
)
def test_a_second_value_is_refused(callbacks: list[pl.Callback], words: str) -> None:
    with pytest.raises(pl.ArgumentError, match=words):
        pl.run(fit(mlp(), [InMemoryLogger()], callbacks=callbacks, microbatch_size=2))
