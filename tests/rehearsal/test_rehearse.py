"""A rehearsal leaves everything as it was, and says what it found and what it did not try."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl

E = pl.Event
DATA = [(torch.full((4, 3), 1.0), torch.tensor([0, 1, 1, 0]))] * 4
RUN: dict[str, Any] = {"loss": nn.functional.cross_entropy, "optimizer": pl.optim.adamw(lr=0.1)}


def rehearse(model: Any = None, data: Any = DATA, **options: Any) -> Any:
    return pl.rehearse(nn.Linear(3, 2) if model is None else model, data, **RUN | {"max_duration": "3ep"} | options)


def phases(*args: Any, **options: Any) -> list[str]:
    with pytest.raises(pl.errors.RehearsalError) as caught:
        rehearse(*args, **options)
    return [phase for phase, _ in caught.value.failures]


class Noting(pl.Callback):
    """A callback that keeps what it has seen, and draws from every global generator."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run_event(self, event: pl.Event, state: pl.State, logger: pl.callback.LoggerGroup) -> None:
        self.seen.append((event, torch.rand(1), random.random(), numpy.random.rand()))


class Refusing(pl.Logger):
    """A logger that must not be called."""

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        raise AssertionError("called")

    def log_audio(self, name: str) -> None:
        raise AssertionError("called")


def test_everything_stays_as_it_was(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(7)
    data = DataLoader(TensorDataset(torch.ones(16, 3), torch.arange(16) % 2), batch_size=4, shuffle=True, generator=own)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))

    def outside() -> list[Any]:
        tensors = [(tensor.tolist(), tensor._version) for tensor in model.state_dict().values()]
        states = [own.get_state().tolist(), torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()]
        flags = [model.training, torch.are_deterministic_algorithms_enabled()]
        grads = [parameter.grad for parameter in model.parameters()]
        return [tensors, *states, random.getstate(), threading.enumerate(), list(tmp_path.iterdir()), flags, grads]

    before, callback = outside(), Noting()
    saver = pl.callbacks.CheckpointSaver(tmp_path / "checkpoints", keep_best=1, metric="val/accuracy")
    writers: list[Any] = [pl.callbacks.ExportForInferenceCallback(tmp_path / "model.pt")]
    writers.append(pl.callbacks.MLPerfCallback(tmp_path / "results", "linear", 0.9, "val/accuracy"))
    report = rehearse(
        *(model, data),
        evaluators={"val": data},
        algorithms=[pl.algorithms.ema(half_life="4ba"), pl.algorithms.sam(rho=0.1)],
        callbacks=[callback, saver, pl.callbacks.LRMonitor(), pl.callbacks.GradMonitor(), *writers],
        loggers=[Refusing(), pl.loggers.CSVLogger(tmp_path / "log" / "metrics.csv")],
        autoresume=tmp_path / "checkpoints",
    )
    assert outside() == before
    assert callback.seen == []
    assert (report.batches, report.batches_per_epoch) == (12, 4)
    seen: list[bool] = []
    model[0].register_forward_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    rehearse(model, data, deterministic=True)
    assert seen[0]
    assert outside()[:-2] == before[:-2]


class Stream:
    """An object that has an iterator, or makes one."""

    def __init__(self, batches: Any, once: bool) -> None:
        self.batches = iter(batches) if once else batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def test_what_gives_each_batch_once_is_not_read() -> None:
    iterator, stream = iter(DATA), Stream(DATA, once=True)
    for data, says in ((iterator, "sample=batch"), (stream, "gives each batch once")):
        with pytest.raises(pl.errors.ArgumentError, match=says):
            rehearse(None, data)
    report = rehearse(None, iterator, evaluators={"val": iterator}, sample=DATA[0], max_duration="9ba")
    assert len(list(iterator)) == len(list(stream)) == len(DATA)
    assert "evaluator 'val': its dataloader gives each batch once: pass a DataLoader or a list." in report.skipped
    assert "none tried" in repr(report)
    report = rehearse(None, Stream(DATA, once=False))
    assert (report.batches, report.batches_per_epoch) == (None, None)
    assert report.phases[-1].found == "from batch 2"


def test_a_callback_sees_each_event_and_both_ends_of_the_run() -> None:
    seen: list[tuple[pl.Event, int]] = []
    watch = lambda event, state: seen.append((event, state.timestamp.epoch))  # noqa: E731
    rehearse(evaluators={"val": DATA}, callbacks=[watch])
    stream = pl.fit(nn.Linear(3, 2), DATA, **RUN, max_duration="1ep", evaluators={"val": DATA})
    assert {event for event, _ in seen} == {event for event, _ in stream}
    assert seen[-1] == (E.FIT_END, 3)
    assert {(E.BATCH_END, 0), (E.BATCH_END, 2)} <= {*seen}
    seen.clear()
    report = rehearse(callbacks=[watch], call_callbacks=False)
    assert (seen, report.skipped) == ([], ("callbacks: call_callbacks=False.",))


def test_each_unit_and_order_of_a_run() -> None:
    for duration, order, batches in (("5ba", "current", 5), ("1ep", "2021", 4), ("30s", "current", None)):
        report = rehearse(max_duration=duration, order=order, evaluators={"val": DATA})
        assert report.batches == batches
        names = "places, data, schedules, evaluators, two steps, checkpoint, end of the run"
        assert ", ".join(phase.name for phase in report.phases) == names
    assert rehearse(max_duration="2iter", iteration_length="2ep").batches == 16


@pytest.mark.parametrize("how", ["load_path", "autoresume"])
def test_a_checkpoint_from_which_training_resumes(how: str, tmp_path: Path) -> None:
    options = {"algorithms": [pl.algorithms.ema(half_life="4ba")], "evaluators": {"val": DATA}}
    pl.run(pl.fit(nn.Linear(3, 2), DATA, **RUN, **options, max_duration="1ep", autoresume=tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    seen = []
    options |= {"autoresume": tmp_path} if how == "autoresume" else {"load_path": pl.latest_path(tmp_path)}
    report = rehearse(**options, callbacks=[lambda event, state: seen.append(state.timestamp.batch)])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    assert report.batches == 12
    assert (min(seen[3:]), max(seen)) == (4, 12)  # before AFTER_LOAD there is a fresh State
    assert rehearse(**options, max_duration="1ep").skipped == ("steps: training has ended at this State.",)
    assert phases(nn.Linear(5, 2), **options) == ["arguments of fit"]


def test_what_a_predicate_puts_later_is_tried_at_its_time() -> None:
    def broken(state: pl.State) -> pl.State:
        raise LookupError(state.timestamp.epoch)

    late = pl.Algorithm("late", {E.BATCH_START: broken}, when=lambda state: state.timestamp.epoch == 2)
    never = pl.Algorithm("never", {E.BATCH_START: broken}, when=lambda state: False)
    assert phases(algorithms=[late]) == ["algorithm 'late' at BATCH_START"]
    skipped = rehearse(algorithms=[never]).skipped
    assert any("'never' at BATCH_START: its when= was False" in sentence for sentence in skipped)


class Wrong(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        raise LookupError

    batch_checkpoint = batch_end


class Returning(pl.Callback):
    def epoch_end(self, state: pl.State, logger: Any) -> Any:
        return 1


class Closing(Noting):
    def close(self) -> None:
        raise OSError("no")


class Speaking(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_audio("sound")


def test_callbacks_and_loggers_are_called_as_copies() -> None:
    """One that fails is one failure, and the others are called; one that can't be copied is not called."""
    assert phases(callbacks=[Wrong(), Returning(), Closing()]) == [
        *("callback Wrong at BATCH_END", "callback Returning at EPOCH_END", "callback Closing, close")
    ]
    locked = Noting()
    vars(locked)["lock"] = threading.Lock()
    (sentence,) = rehearse(callbacks=[locked]).skipped
    assert "callback Noting: it was not called, because a copy fails" in sentence
    assert locked.seen == []
    report = rehearse(callbacks=[Speaking()], loggers=[Refusing()])
    assert report.skipped == ("logger Refusing: what it is given was kept in memory, and it was not called.",)
    assert phases(callbacks=[Speaking()], loggers=[pl.loggers.InMemoryLogger()]) == ["callback Speaking at BATCH_END"]


def test_metrics_are_there_when_they_are_in_the_run() -> None:
    """A callback that reads them too early would fail, and one that reads them after a long epoch would not."""

    def read(event: pl.Event, state: pl.State) -> None:
        assert event is not E.EPOCH_CHECKPOINT or state.metrics["val"]["loss"] >= 0

    options = {"evaluators": {"val": DATA}, "callbacks": [read]}
    for interval in ("3ba", "1ep"):
        rehearse(eval_interval=interval, **options)
    assert phases(eval_interval="2ep", **options) == ["callback read at EPOCH_CHECKPOINT"]


def test_a_step_of_several_batches() -> None:
    report = rehearse(None, iter(DATA), batches_per_step=2, sample=DATA[0], max_duration="4ba")
    found = next(phase.found for phase in report.phases if phase.name == "data")
    assert found.startswith("train: 2 batches a step, the first of them (tensor (")
    assert report.memory["batch"] == 2 * (4 * 3 * 4 + 4 * 8)
    report = rehearse(batches_per_step=2)
    assert (report.batches, report.batches_per_epoch) == (6, 2)


def test_memory_is_counted_by_what_it_holds() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    options = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "world_size": 4}
    report = rehearse(model, **options, parallel="shard")
    memory, parameters = report.memory, 4 * sum(parameter.numel() for parameter in model.parameters())
    assert memory["parameters"] == memory["gradients"] == memory["optimizer state"] == parameters
    assert memory["batch"] == 4 * 3 * 4 + 4 * 8
    # The output of the ReLU; that of the last layer as logarithms, and a weight of cross_entropy.
    assert 4 * 8 * 4 + 4 * 2 * 4 <= memory["activations"] <= 4 * 8 * 4 + 2 * 4 * 2 * 4 + 16
    assert report.memory_per_rank["parameters"] == -(-parameters // 4)
    assert report.memory_per_rank["batch"] == memory["batch"] // 4
    assert rehearse(model, **options, parallel="replicate").memory_per_rank["parameters"] == parameters


def test_the_report_is_text_and_a_table() -> None:
    report = rehearse(evaluators={"val": DATA}, loggers=[Refusing()])
    text, html = repr(report), report._repr_html_()
    assert text.startswith("pl.rehearse: a run of 12 batches, 4 an epoch, tried; nothing was trained or written\n")
    for words in ("learning rate 0.1 0.1 0.1 0.1", "val: loss, accuracy", "not rehearsed", "from epoch 2, batch 10"):
        assert words in text
        assert words in html
    assert all(len(line) <= 100 for line in text.splitlines())


def test_wrong_arguments_are_errors_of_fit_and_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, error, says in (
        ({"epochs": 3}, pl.errors.ArgumentTypeError, "no argument 'epochs'"),
        ({"world_size": 0}, pl.errors.ArgumentError, "world_size must be"),
        ({"call_callbacks": 1}, pl.errors.ArgumentTypeError, "call_callbacks"),
    ):
        with pytest.raises(error, match=says):
            rehearse(**options)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pl.errors.ArgumentError, match="one of 2 ranks"):
        rehearse()


@pl.algorithm(E.AFTER_LOSS)
def branching(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * 2) if state.loss > 1e9 else state


@pytest.mark.slow
def test_a_step_that_is_to_be_compiled_is_traced() -> None:
    """Without a compiler, but torch's is imported."""
    stopping = {"evaluators": {"val": DATA}, "algorithms": [pl.algorithms.early_stopping("val/loss")]}
    for options in ({"algorithms": [pl.algorithms.ema(half_life="4ba")]}, {"steps_per_call": 2}, stopping):
        assert rehearse(compile=True, **options).phases[-1].name == "compile"
    state = pl.run(pl.fit(nn.Linear(3, 2), DATA, **RUN, max_duration="1ep", seed=7))
    assert rehearse(state, compile=True, seed=7).phases[-1].name == "compile"
    options = {"algorithms": [branching], "watch": {E.BATCH_END}}
    with pytest.raises(pl.errors.RehearsalError) as caught:
        rehearse(compile=True, **options)
    ((phase, error),) = caught.value.failures
    assert phase == "compile=, tracing of a step"
    assert isinstance(error, pl.errors.CompileError)
    assert rehearse(compile="where possible", **options).phases[-1].name == "compile"
    assert "compile=: the steps were not traced." in rehearse(compile=True, fake=True).skipped
