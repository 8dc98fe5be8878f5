"""Streams that end while a batch is loaded, or in an evaluation: the State of the last boundary is saved.

The saved State is compared with what a run that nothing interrupts comes to, bit for bit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from tests.support import streams as sameness

in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals are for the main thread"
)


class Data:
    """Four batches an epoch; at one of them it does something else first."""

    def __init__(self, at: int | None = None, instead: Any = None) -> None:
        self.at, self.instead, self.given = at, instead, 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(4):
            if self.given == self.at:
                self.instead()
            self.given += 1
            generator = torch.Generator().manual_seed(index)
            yield torch.randn(4, 3, generator=generator), torch.zeros(4, 1)


def fail() -> None:
    raise KeyError("no such file")


def stream(data: Any, folder: Any = None, **overrides: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": pl.optim.adamw(lr=0.1),
        "max_duration": "3ep",
        "algorithms": [pl.algorithms.ema(half_life="2ba")],
        "autoresume": folder,
        **overrides,
    }
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    return pl.fit(model, data, **settings)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


class CodeError(Exception):
    """Can be compared with its like alone."""

    code = 3

    def __eq__(self, other: Any) -> bool:
        return bool(self.code == other.code)

    __hash__ = Exception.__hash__


def test_an_error_is_told_by_what_it_is(tmp_path: Path) -> None:
    def fail_oddly() -> None:
        raise CodeError

    with pytest.raises(CodeError):
        pl.run(stream(Data(6, fail_oddly), tmp_path))
    assert any(name.endswith("-ba6.safetensors") for name in names(tmp_path))


def test_nothing_is_saved_where_nothing_was_trained_or_the_loop_was_left(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        pl.run(stream(Data(0, fail), tmp_path))
    for event, state in stream(Data(), tmp_path):
        if event is Event.BEFORE_DATALOADER and state.timestamp.batch == 2:
            break

    def in_a_batch() -> None:
        for event, _ in stream(Data(), tmp_path):
            if event is Event.AFTER_LOSS:
                fail()

    with pytest.raises(KeyError):
        in_a_batch()
    assert names(tmp_path) == []


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    data = [(torch.ones(4, 3), torch.zeros(4, 1)), (torch.full((4, 3), float("nan")), torch.zeros(4, 1))]
    with pytest.raises(pl.NonFiniteError):
        pl.run(stream(data, tmp_path))
    assert names(tmp_path) == []


@pytest.mark.parametrize("interval", ["2ba", "1ep"])
def test_an_evaluation_that_fails(interval: str, tmp_path: Path) -> None:
    """The State before the evaluation is saved, which takes place again after resuming."""

    def evaluators(metric: Any) -> Any:
        return {
            "first": pl.Evaluator(list(Data()), metrics={"loss": pl.metrics.loss()}),
            "second": pl.Evaluator(list(Data()), metrics={"mine": pl.metrics.mean(metric, "mine")}),
        }

    calls: list[Any] = []

    def broken(outputs: Any, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) > 2:  # the first two calls are those before training
            raise TypeError("no metric")
        return good(outputs, batch)

    def good(outputs: Any, batch: Any) -> Any:
        return outputs[:, 0]

    with pytest.raises(TypeError, match="no metric"):
        pl.run(stream(Data(), tmp_path, evaluators=evaluators(broken), eval_interval=interval))
    assert names(tmp_path) == ["ep0-ba2.safetensors" if interval == "2ba" else "ep1-ba4.safetensors"]
    resumed = pl.run(stream(Data(), tmp_path, evaluators=evaluators(good), eval_interval=interval))
    sameness.assert_same(resumed, pl.run(stream(Data(), evaluators=evaluators(good), eval_interval=interval)), interval)


def test_it_says_where_the_state_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError):
        pl.run(stream(Data(6, fail), tmp_path))
    path = tmp_path / "ep1-ba6.safetensors"
    said = f"KeyError: 'no such file': the State of batch 6 is saved in {path}: the same command resumes from it"
    assert said in caplog.text
    with pytest.raises(KeyError):
        pl.run(stream(Data(6, fail), callbacks=[CheckpointSaver(tmp_path / "b")]))
    assert f"is saved in {tmp_path / 'b' / path.name}: resume it with fit(..., load_path=...)" in caplog.text


@in_main_thread
def test_a_hang_in_a_load_does_not_end_a_program_with_a_handler_of_its_own(tmp_path: Path) -> None:
    calls: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        state = pl.run(stream(Data(3, lambda: signal.raise_signal(signal.SIGTERM)), CheckpointSaver(tmp_path)))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert calls == [signal.SIGTERM]
    assert state.timestamp.batch == 12
    assert "ep1-ba4.safetensors" in names(tmp_path)


@in_main_thread
def test_a_load_outside_of_the_stream_is_not_ended(tmp_path: Path) -> None:
    """In the loop's body another stream loads its batch: the outer one waits for its own boundary."""
    seen = []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def loop() -> None:
        for event, state in stream(Data(), tmp_path):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
                pl.run(stream(Data(1, interrupt)))
                seen.append("inner")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert seen == ["inner"]
    assert len(names(tmp_path)) == 1


@in_main_thread
@pytest.mark.parametrize("interval", ["2ba", "1ep"])
def test_a_signal_in_an_evaluation(interval: str, tmp_path: Path) -> None:
    """It is not evaluated to its end, which may be far: the State before it is saved."""
    settings: dict[str, Any] = {"evaluators": {"val": list(Data())}, "eval_interval": interval}
    events = []

    def loop() -> None:
        for event, _ in stream(Data(), tmp_path, **settings):
            events.append(event)
            if event is Event.EVAL_BATCH_START and events.count(event) == 2:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        loop()
    assert Event.EVAL_END not in events
    assert len(names(tmp_path)) == 1
    resumed = pl.run(stream(Data(), tmp_path, **settings))
    sameness.assert_same(resumed, pl.run(stream(Data(), **settings)), interval)


@in_main_thread
@pytest.mark.parametrize("where", [Event.BEFORE_DATALOADER, Event.EVAL_AFTER_FORWARD, Event.BATCH_CHECKPOINT])
def test_a_loop_that_is_left_with_a_signal_held_back(where: Event, tmp_path: Path) -> None:
    def loop() -> None:
        for event, state in stream(Data(), tmp_path, evaluators=list(Data()), eval_interval="2ba"):
            if event is where and state.timestamp.batch == 2:
                signal.raise_signal(signal.SIGINT)
                break
        time.sleep(5)  # where the signal comes again

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert names(tmp_path) == ["ep0-ba2.safetensors"]


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)
        return torch.full((3,), index / 16), torch.zeros(1)


@in_main_thread
@pytest.mark.slow
def test_a_dead_worker_interrupts_no_batch(tmp_path: Path) -> None:
    """Torch raises its error in a handler of SIGCHLD, in any line: it has to come where a batch is loaded."""
    data = DataLoader(Slow(), batch_size=4, num_workers=1)
    seen: list[Event] = []
    raised = False

    def loop() -> None:
        nonlocal raised
        for event, state in stream(data, tmp_path):
            seen.append(event)
            if event is Event.AFTER_LOSS and state.timestamp.batch == 1:
                pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
                try:
                    os.kill(int(pids[-1]), signal.SIGKILL)
                    time.sleep(0.3)
                except RuntimeError:
                    raised = True

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        loop()
    assert not raised
    assert seen[-1] is Event.BEFORE_DATALOADER
    assert len(names(tmp_path)) == 1
    assert getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") != "pure_loop.checkpoint.signals"
    sameness.assert_same(pl.run(stream(data, tmp_path)), pl.run(stream(data)), "resumed")
