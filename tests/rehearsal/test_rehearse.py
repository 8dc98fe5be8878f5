"""A rehearsal leaves everything as it was, and says what it found and what it did not try."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl

E = pl.Event
DATA = [(torch.full((4, 3), 1.0), torch.tensor([0, 1, 1, 0]))] * 4


def rehearse(*args: Any, **options: Any) -> Any:
    plain = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "3ep"}
    return pl.rehearse(*(args or (torch.nn.Linear(3, 2), DATA)), **{**plain, **options})


def phases(**options: Any) -> list[str]:
    with pytest.raises(pl.RehearsalError) as caught:
        rehearse(**options)
    return [phase for phase, _ in caught.value.failures]


class Noting(pl.Callback):
    """A callback that keeps what it has seen, and draws from every global generator."""

    def __init__(self) -> None:
        self.seen: list[pl.Event] = []

    def run_event(self, event: pl.Event, state: pl.State, logger: pl.callback.LoggerGroup) -> None:
        self.seen.append(event)
        torch.rand(1)
        random.random()
        numpy.random.rand()


class Refusing(pl.Logger):
    """A logger that must not be called."""

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        raise AssertionError("called")

    def log_audio(self, name: str) -> None:
        raise AssertionError("called")


def test_everything_stays_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = {name: tensor._version for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
    callback, logger = Noting(), Refusing()
    saver = pl.callbacks.CheckpointSaver(tmp_path / "checkpoints", keep_best=1, metric="val/accuracy")
    drawn = generator.get_state(), torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    threads = threading.enumerate()

    report = rehearse(
        model,
        loader,
        evaluators={"val": loader},
        algorithms=[pl.algorithms.ema(half_life="4ba"), pl.algorithms.sam(rho=0.1)],
        callbacks=[callback, saver, pl.callbacks.LRMonitor()],
        loggers=[logger, pl.loggers.CSVLogger(tmp_path / "log" / "metrics.csv")],
        autoresume=tmp_path / "checkpoints",
    )

    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert versions == {name: tensor._version for name, tensor in model.state_dict().items()}
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generator.get_state(), drawn[0])
    assert torch.equal(torch.get_rng_state(), drawn[1])
    assert random.getstate() == drawn[2]
    assert numpy.random.get_state()[1].tolist() == drawn[3]
    assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []
    assert callback.seen == []
    assert report.batches == 12
    assert report.batches_per_epoch == 4


def test_a_run_after_it_is_the_run_without_it() -> None:
    def trained(*, rehearsed: bool) -> pl.State:
        torch.manual_seed(0)
        dataset = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        model, options = torch.nn.Linear(3, 2), {"algorithms": [pl.algorithms.ema(half_life="4ba")]}
        if rehearsed:
            rehearse(model, loader, **options)
        return pl.run(
            pl.fit(model, loader, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", **options)
        )

    one, other = (trained(rehearsed=rehearsed) for rehearsed in (False, True))
    assert all(torch.equal(tensor, other.params[name]) for name, tensor in one.params.items())


def test_an_iterator_is_not_read() -> None:
    iterator = iter(DATA)
    with pytest.raises(pl.errors.ArgumentError, match="sample=batch"):
        rehearse(torch.nn.Linear(3, 2), iterator)
    report = rehearse(torch.nn.Linear(3, 2), iterator, evaluators={"val": iterator}, sample=DATA[0], max_duration="9ba")
    assert len(list(iterator)) == len(DATA)
    assert "evaluator 'val': its dataloader gives each batch once: pass a DataLoader or a list." in report.skipped
    assert "none tried" in repr(report)


def test_an_object_that_has_an_iterator_is_not_read() -> None:
    class Stream:
        def __init__(self) -> None:
            self.batches = iter(DATA)

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    stream = Stream()
    with pytest.raises(pl.errors.ArgumentError, match="gives each batch once"):
        rehearse(torch.nn.Linear(3, 2), stream)
    assert len(list(stream)) == len(DATA)


def test_a_callback_sees_each_event_and_both_ends_of_the_run() -> None:
    seen = []

    def watch(event: pl.Event, state: pl.State) -> None:
        seen.append((event, state.timestamp.epoch))

    rehearse(evaluators={"val": DATA}, callbacks=[watch])
    stream = pl.fit(
        torch.nn.Linear(3, 2),
        DATA,
        loss=cross_entropy,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="1ep",
        evaluators={"val": DATA},
    )
    assert {event for event, _ in seen} == {event for event, _ in stream}
    assert seen[-1] == (E.FIT_END, 3)
    assert (E.BATCH_END, 0) in seen
    assert (E.BATCH_END, 2) in seen
    seen.clear()
    report = rehearse(evaluators={"val": DATA}, callbacks=[watch], call_callbacks=False)
    assert seen == []
    assert report.skipped == ("callbacks: call_callbacks=False.",)


@pytest.mark.parametrize("order", ["current", "2021"])
@pytest.mark.parametrize("duration", ["1ba", "2ba", "5ba", "1ep", "20sp", "30s", "2iter"])
def test_each_unit_and_order_of_a_run(duration: str, order: Any) -> None:
    if duration == "2iter" and order == "2021":
        return
    options = {"iteration_length": "2ep"} if duration == "2iter" else {}
    report = rehearse(max_duration=duration, order=order, evaluators={"val": DATA}, **options)
    known = {"1ba": 1, "2ba": 2, "5ba": 5, "1ep": 4, "20sp": 5, "30s": None, "2iter": 16}
    assert report.batches == known[duration]
    assert [phase.name for phase in report.phases] == [
        *("places", "data", "schedules", "evaluators", "two steps", "checkpoint", "end of the run")
    ]


def test_data_without_a_length() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(DATA)

    report = rehearse(torch.nn.Linear(3, 2), Unsized())
    assert (report.batches, report.batches_per_epoch) == (None, None)
    assert report.phases[-1].found == "from batch 2"


@pytest.mark.parametrize("event", [E.BATCH_CHECKPOINT, E.EPOCH_CHECKPOINT, E.BATCH_END])
def test_a_state_from_which_training_resumes(event: pl.Event) -> None:
    stream = pl.fit(
        torch.nn.Linear(3, 2), DATA, loss=cross_entropy, optimizer=pl.optim.adamw(lr=0.1), max_duration="2ep"
    )
    state = next(state for at, state in stream if at is event)
    before = {name: tensor.clone() for name, tensor in state.params.items()}
    assert rehearse(state, DATA).batches == 12
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.params.items())
    with pytest.raises(pl.RehearsalError, match="arguments of fit: ResumeError"):
        rehearse(state, DATA, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9))


@pytest.mark.parametrize("how", ["load_path", "autoresume"])
def test_a_checkpoint_from_which_training_resumes(how: str, tmp_path: Path) -> None:
    plain = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1)}
    options = {"algorithms": [pl.algorithms.ema(half_life="4ba")], "evaluators": {"val": DATA}}
    pl.run(pl.fit(torch.nn.Linear(3, 2), DATA, **plain, **options, max_duration="1ep", autoresume=tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    seen = []
    where = {"autoresume": tmp_path} if how == "autoresume" else {"load_path": pl.latest(tmp_path)}
    report = rehearse(**options, **where, callbacks=[lambda event, state: seen.append(state.timestamp.batch)])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    assert report.batches == 12
    assert (min(seen[3:]), max(seen)) == (4, 12)  # before AFTER_LOAD there is a fresh State
    ended = rehearse(**options, **where, max_duration="1ep").skipped
    assert ended == ("steps: training has ended at this State.",)
    with pytest.raises(pl.RehearsalError, match="arguments of fit"):
        rehearse(torch.nn.Linear(5, 2), DATA, **options, **where)


def test_what_a_predicate_puts_later_is_tried_at_its_time() -> None:
    def broken(state: pl.State) -> pl.State:
        raise LookupError(state.timestamp.epoch)

    late = pl.Algorithm("late", {E.BATCH_START: broken}, when=lambda state: state.timestamp.epoch == 2)
    never = pl.Algorithm("never", {E.BATCH_START: broken}, when=lambda state: False)
    assert phases(algorithms=[late]) == ["algorithm 'late' at BATCH_START"]
    report = rehearse(algorithms=[never])
    assert any("'never' at BATCH_START: its when= was False" in sentence for sentence in report.skipped)


def test_methods_of_the_loggers_can_be_called() -> None:
    class Speaking(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            logger.log_audio("sound")

    report = rehearse(callbacks=[Speaking()], loggers=[Refusing()])
    assert report.skipped == ("logger Refusing: what it is given was kept in memory, and it was not called.",)
    assert phases(callbacks=[Speaking()], loggers=[pl.loggers.InMemoryLogger()]) == ["callback Speaking at BATCH_END"]


def test_callbacks_of_the_library_write_to_a_temporary_folder(tmp_path: Path) -> None:
    callbacks = [
        pl.callbacks.CheckpointSaver(tmp_path / "checkpoints", interval="1ba", keep_last=1),
        pl.callbacks.ExportForInferenceCallback(tmp_path / "model.pt"),
        pl.callbacks.MLPerfCallback(tmp_path / "results", "linear", 0.9, "val/accuracy"),
        *(pl.callbacks.GradMonitor(), pl.callbacks.SpeedMonitor(), pl.callbacks.TimeLeft()),
    ]
    report = rehearse(
        evaluators={"val": DATA}, callbacks=callbacks, loggers=[pl.loggers.JSONLinesLogger(tmp_path / "l")]
    )
    assert list(tmp_path.iterdir()) == []
    assert report.skipped == ()
    assert sum("can be written to" in text for text in report.phases[0].found.split("; ")) == 4


def test_a_callback_that_fails_is_one_failure_and_the_others_are_called() -> None:
    class Wrong(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            raise LookupError

        def batch_checkpoint(self, state: pl.State, logger: Any) -> None:
            raise LookupError

    class Returning(pl.Callback):
        def epoch_end(self, state: pl.State, logger: Any) -> Any:
            return 1

    class Closing(Noting):
        def close(self) -> None:
            raise OSError("no")

    assert phases(callbacks=[Wrong(), Returning(), Closing()]) == [
        *("callback Wrong at BATCH_END", "callback Returning at EPOCH_END", "callback Closing, close")
    ]


def test_metrics_are_there_when_they_are_in_the_run() -> None:
    """A callback that reads them too early would fail, and one that reads them after a long epoch would not."""

    def reading(at: pl.Event) -> Any:
        def read(event: pl.Event, state: pl.State) -> None:
            if event is at:
                assert state.metrics["val"]["loss"] >= 0

        return read

    def found(at: pl.Event, interval: str) -> list[str]:
        try:
            rehearse(evaluators={"val": DATA}, eval_interval=interval, callbacks=[reading(at)])
        except pl.RehearsalError as error:
            return [phase for phase, _ in error.failures]
        return []

    assert (
        found(E.EPOCH_CHECKPOINT, "3ba") == found(E.EPOCH_CHECKPOINT, "1ep") == found(E.BATCH_CHECKPOINT, "1ba") == []
    )
    assert found(E.BATCH_CHECKPOINT, "1ep") == ["callback read at BATCH_CHECKPOINT"]
    assert found(E.EPOCH_CHECKPOINT, "2ep") == ["callback read at EPOCH_CHECKPOINT"]


def test_a_step_of_several_batches() -> None:
    report = rehearse(batches_per_step=2)
    found = next(phase.found for phase in report.phases if phase.name == "data")
    assert found.startswith("train: 2 batches a step, the first of them (tensor (")
    assert (report.batches, report.batches_per_epoch) == (6, 2)
    report = rehearse(torch.nn.Linear(3, 2), iter(DATA), batches_per_step=2, sample=DATA[0], max_duration="4ba")
    assert report.memory["batch"] == 2 * (4 * 3 * 4 + 4 * 8)


def test_switches_for_deterministic_algorithms_are_set() -> None:
    seen = []

    class Watching(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().forward(inputs)

    rehearse(Watching(3, 2), DATA, deterministic=True)
    assert seen[0]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_callback_that_cannot_be_copied_is_not_called() -> None:
    class Locked(Noting):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    callback = Locked()
    (sentence,) = rehearse(callbacks=[callback]).skipped
    assert "callback Locked: it was not called, because a copy fails" in sentence
    assert callback.seen == []


def test_memory_is_counted_by_what_it_holds() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    report = rehearse(model, DATA, optimizer=pl.optim.sgd(lr=0.1, momentum=0.9), world_size=4, parallel="shard")
    parameters = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert report.memory["parameters"] == report.memory["gradients"] == report.memory["optimizer state"] == parameters
    assert report.memory["batch"] == 4 * 3 * 4 + 4 * 8
    # The output of the ReLU; that of the last layer as logarithms, and a weight of cross_entropy.
    assert 4 * 8 * 4 + 4 * 2 * 4 <= report.memory["activations"] <= 4 * 8 * 4 + 2 * 4 * 2 * 4 + 16
    assert report.memory_per_rank["parameters"] == -(-parameters // 4)
    assert report.memory_per_rank["batch"] == report.memory["batch"] // 4
    replicated = rehearse(model, DATA, world_size=4, parallel="replicate").memory_per_rank
    assert replicated["parameters"] == parameters


def test_the_report_is_text_and_a_table() -> None:
    report = rehearse(evaluators={"val": DATA}, loggers=[Refusing()])
    text, html = repr(report), report._repr_html_()
    assert text.startswith("pl.rehearse: a run of 12 batches, 4 an epoch, tried; nothing was trained or written\n")
    for words in ("learning rate 0.1 0.1 0.1 0.1", "val: loss, accuracy", "not rehearsed", "from batch 10 (epoch 2)"):
        assert words in text
        assert words in html
    assert all(len(line) <= 100 for line in text.splitlines())


def test_wrong_arguments_are_errors_of_fit() -> None:
    with pytest.raises(pl.errors.ArgumentTypeError, match="no argument 'epochs'"):
        rehearse(epochs=3)
    with pytest.raises(pl.errors.ArgumentError, match="world_size must be"):
        rehearse(world_size=0)
    with pytest.raises(pl.errors.ArgumentTypeError, match="call_callbacks"):
        rehearse(call_callbacks=1)


def test_a_place_is_tried_where_the_arguments_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saver = pl.callbacks.CheckpointSaver(tmp_path / "file" / "in", keep_best=1, metric="test/loss")
    assert phases(callbacks=[saver]) == ["arguments of fit", "folder of CheckpointSaver"]


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pl.errors.ArgumentError, match="one of 2 ranks"):
        rehearse()
