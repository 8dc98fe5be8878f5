"""What holds for each logger that keeps a record: what is logged is read back, once, whatever ended the run."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger
from tests.loggers import records
from tests.loggers.records import BACKENDS, STEPS, kill_process, killed, stream
from tests.support import problem
from tests.support.problem import points
from tests.support.refused import Refusal, check

INSTALLED = {name: backend for name, backend in BACKENDS.items() if backend.is_installed}
FILES = [name for name in ("CSVLogger", "JSONLinesLogger", "TensorBoardLogger") if name in INSTALLED]
KEEPS_NO_RECORD = {"ConsoleLogger", "InMemoryLogger", "RemoteUploader", "SlackLogger"}
# Those of trackers are slow: their packages take seconds to import.
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FILES)) for name in INSTALLED]
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("WANDB_MODE=offline", "WANDB_SILENT=true", "MLFLOW_DISABLE_TELEMETRY=true"):
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of a database


def steps(series: records.Series) -> dict[str, list[int]]:
    return {name: sorted(step for step, _ in series[name]) for name in STEPS}


@EACH
def test_what_is_logged_is_read_back_and_a_resumed_run_adds_to_it(name: str, tmp_path: Path) -> None:
    """The run is finished, which trained past its last checkpoint, and resumes from there."""
    backend, memory = BACKENDS[name], InMemoryLogger()
    pl.run(stream([backend.make(tmp_path / "whole"), memory], run_name="first"))
    found = backend.read(tmp_path / "whole")
    assert steps(found) == STEPS
    for metric in STEPS:
        assert [value for _, value in found[metric]] == pytest.approx(memory.series(metric)[1], rel=1e-6), metric
    if "inputs" in found:
        assert [step for step, _ in found["inputs"]] == [4, 8, 12]
    for _, state in stream([backend.make(tmp_path)], tmp_path / "checkpoints"):
        if state.timestamp.batch == 6:
            break
    pl.run(stream([backend.make(tmp_path)], tmp_path / "checkpoints"))
    assert steps(backend.read(tmp_path)) == STEPS


def comparable(folder: Path) -> Any:
    """A record without times, and without what names the run."""
    table = [{key: value for key, value in row.items() if key != "time"} for row in records.rows(folder / "m.csv")]
    kept = [line for line in records.lines(folder / "m.jsonl") if line["kind"] not in ("hyperparameters", "run")]
    for line in kept:
        del line["time"]
        if line["kind"] == "images":
            assert all((folder / image).exists() for image in line.pop("value"))
    return table, kept


@settings(max_examples=4, deadline=None)
@given(
    st.integers(1, 11),
    st.sampled_from([Event.BATCH_START, Event.BATCH_END, Event.EVAL_END, Event.EPOCH_CHECKPOINT]),
    st.sampled_from(["1ba", "50ba"]),
)
def test_a_run_that_is_killed_anywhere_and_resumes_has_the_record_of_one_that_is_not(
    tmp_path_factory: pytest.TempPathFactory, at: int, event: Event, flush: str
) -> None:
    torn = {"m.csv": b"11,1,17.5,0.2", "m.jsonl": b'{"time": 17, "event": "BATCH_END", "epo'}
    folder = tmp_path_factory.mktemp("killed")
    pl.run(stream([BACKENDS[name].make(folder / "whole") for name in FILES[:2]], run_name="one"))
    for name in FILES:
        checkpoints, before = folder / f"{name} checkpoints", set(folder.iterdir())
        killed(BACKENDS[name].make(folder, flush=flush), checkpoints, at, event)
        for path in set(folder.iterdir()) - before:
            if path.name in torn or path.name.startswith("events"):
                with path.open("ab") as file:
                    file.write(torn.get(path.name, b"\x20\0\0\0\0\0\0\0torn"))
        pl.run(stream([BACKENDS[name].make(folder, flush=flush)], checkpoints))
        assert steps(BACKENDS[name].read(folder)) == STEPS
    assert comparable(folder) == comparable(folder / "whole")


@pytest.mark.slow  # processes that are killed, with all trackers
def test_a_run_that_is_killed_by_a_signal_has_one_record(tmp_path: Path) -> None:
    making = ", ".join(backend.code.removesuffix(")") + ', flush="3ba")' for backend in INSTALLED.values())
    kill_process(making, tmp_path, at=9)
    loggers = [backend.make(tmp_path) for backend in INSTALLED.values()]
    assert len({logger.recorded_run_name for logger in loggers}) == 1, "one name for all"
    pl.run(stream(loggers, tmp_path / "checkpoints"))
    for name, backend in INSTALLED.items():
        found = backend.read(tmp_path)
        assert steps(found) == STEPS, name
        assert [step for step, _ in found.get("inputs", [])] in ([], [4, 8, 12]), name
    assert not list(tmp_path.glob("*_journal.jsonl")), "everything is sent"


@EACH
def test_a_fork_under_the_name_of_its_run(name: str, tmp_path: Path) -> None:
    """Files drop what is recorded again, and trackers keep what they have."""
    backend, run, fork = BACKENDS[name], InMemoryLogger(), InMemoryLogger()
    pairs = stream([backend.make(tmp_path), run], run_name="one", donate=False)
    kept, _ = (state for event, state in pairs if event is Event.EPOCH_CHECKPOINT)
    other = pl.optim.sgd(lr=0.01)
    pl.run(stream([backend.make(tmp_path), fork], start=kept, optimizer=other, run_name="one"))
    before, after = (dict(zip(*each.series("train/loss"), strict=True)) for each in (run, fork))
    assert all(after[batch] != before[batch] for batch in range(8, 13)), "other numbers"
    wanted = {**before, **after} if name in FILES else {**after, **before}
    assert dict(backend.read(tmp_path)["train/loss"]) == pytest.approx(wanted, rel=1e-6)


def lose(name: str, folder: Path, last: int) -> None:
    """Remove what is after a batch of a record."""
    if name == "TensorBoardLogger":
        from pure_loop.loggers.tensorboard import _cut, event_files

        for file in event_files(folder):
            _cut(file, last)
        return
    path = folder / ("m.csv" if name == "CSVLogger" else "m.jsonl")
    batch = {
        "CSVLogger": lambda line: int(line.split(",")[0]) if line[0].isdigit() else 0,
        "JSONLinesLogger": lambda line: json.loads(line)["batch"],
    }[name]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if batch(line) <= last))


def test_a_record_that_ends_before_the_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was cut, or restored from a copy: the batch at which it ends, and that at which the run resumes."""
    for name, last in itertools.product(FILES, (8, 6)):
        folder = tmp_path / name / str(last)
        pl.run(stream([BACKENDS[name].make(folder)], folder / "checkpoints", max_duration="8ba"))
        lose(name, folder, last)
        caplog.clear()
        pl.run(stream([BACKENDS[name].make(folder)], folder / "checkpoints", max_duration="9ba"))
        said = [text for text in caplog.messages if "what was recorded between them is not in it" in text]
        assert len(said) == (last < 8), name
        assert all(f"ends at batch {last}, and the run resumes at batch 8" in text for text in said)


# What ended the run.


class EndedError(Exception):
    pass


def at_batch(event: Event, error: type[BaseException] = EndedError) -> Any:
    def callback(now: Event, state: pl.State) -> None:
        if now is event and state.timestamp.batch == 4:
            raise error

    return callback


class Raises(pl.Logger):
    """A logger that can't take what it is given at an event of the fourth batch."""

    def __init__(self, event: Event) -> None:
        self.name = "val/loss" if event is Event.EVAL_END else "train/loss"

    def log_metrics(self, metrics: Any, state: pl.State) -> None:
        if self.name in metrics and state.timestamp.batch == 4:
            raise EndedError


def ways(event: Event) -> list[dict[str, Any]]:
    """An algorithm, a callback (the first or a later one, with few events observed), an interrupt, a logger."""

    @pl.algorithm(event)
    def fails(state: pl.State) -> pl.State:
        at_batch(event)(event, state)
        return state

    rate = pl.callbacks.LRMonitor(name="rate")
    return [
        {"algorithms": [fails]},
        {"callbacks": [at_batch(event), pl.callbacks.SpeedMonitor(), rate]},
        {"callbacks": [rate, at_batch(event)], "watch": ["fit_end"]},
        {"callbacks": [at_batch(event, KeyboardInterrupt), rate], "strict": True},
        {"loggers": [Raises(event)], "watch": ["fit_end"]},
    ]


def fit(*loggers: Any, **options: Any) -> Any:
    settings = {"evaluators": {"val": points(1)}, "eval_interval": "2ba", "strict": False, **options}
    return problem.fit(**{**settings, "loggers": [*options.get("loggers", ()), *loggers]})


def test_values_of_the_event_at_which_the_run_ended_are_recorded(tmp_path: Path) -> None:
    for event, evaluated in ((Event.BATCH_END, [2]), (Event.EVAL_END, [2, 4])):
        for number, way in enumerate(ways(event)):
            memory, folder = InMemoryLogger(), tmp_path / f"{event} {number}"
            with pytest.raises((EndedError, KeyboardInterrupt)):
                pl.run(fit(memory, *[BACKENDS[each].make(folder) for each in FILES[:2]], **way))
            found = [memory.series(each)[0] for each in ("train/loss", "val/loss")]
            assert found == [[1, 2, 3, 4], evaluated], way
            assert "callbacks" not in way or memory.series("rate")[0] == [1, 2, 3, 4], way
            for each in FILES[:2]:
                assert [step for step, _ in BACKENDS[each].read(folder)["val/loss"]] == evaluated, way


def test_what_the_body_raises_is_after_the_record_and_a_record_that_fails_is_a_note() -> None:
    logger, body = InMemoryLogger(), at_batch(Event.EVAL_END)
    with pytest.raises(EndedError):
        [body(event, state) for event, state in fit(logger)]
    assert logger.series("val/loss")[0] == [2, 4]
    with pytest.raises(EndedError) as caught:
        pl.run(fit(Raises(Event.EVAL_END), callbacks=[at_batch(Event.EVAL_END)]))
    assert "while recording EVAL_END: EndedError" in " ".join(caught.value.__notes__)


# One name has one value at one step, whatever is attached.

C = pl.callbacks
MONITORS: tuple[Callable[[], pl.Callback], ...] = (
    *(C.LRMonitor, lambda: C.LRMonitor(name="rate"), lambda: C.SpeedMonitor(window=1)),
    *(lambda: C.GradMonitor(interval="1ba", per_layer=True), lambda: C.ActivationMonitor(interval="1ba")),
    *(lambda: C.MemoryMonitor(interval="1ba"), lambda: C.TimeLeft(interval="1ba")),
)


@given(
    st.sets(st.sampled_from(range(len(MONITORS)))),
    st.sampled_from([None, 2]),
    st.sampled_from(["1ba", "2ba", "1ep", "7sp"]),
    st.sampled_from(["1ba", "4ba", "2ep"]),
    st.data(),
)
@settings(max_examples=10)
def test_each_name_has_one_value_at_each_step(
    attached: set[int], size: int | None, interval: str, end: str, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"microbatch_size": size, "eval_interval": interval, "max_duration": end}
    options |= {"evaluators": {"val": points(1), "train": points(2)}, "train_metrics": None}

    def keys(logger: InMemoryLogger) -> list[tuple[str, int]]:
        return [(name, moment.batch) for name, values in logger.metrics.items() for moment, _ in values]

    logger, more = InMemoryLogger(), InMemoryLogger()
    pairs = fit(logger, callbacks=[MONITORS[index]() for index in sorted(attached)], **options)
    kept = [state for event, state in pairs if event in (Event.BATCH_END, Event.EPOCH_END)]
    assert len(set(keys(logger))) == len(keys(logger))
    # The record of a resumed run adds to what was recorded up to there.
    state = data.draw(st.sampled_from(kept), label="resumed from")
    pl.run(fit(more, model=state, callbacks=[MONITORS[index]() for index in sorted(attached)], **options))
    later = [(name, step) for name, step in keys(more) if step > state.timestamp.batch]
    assert len(set(later)) == len(later)
    assert {key for key in keys(logger) if key[1] > state.timestamp.batch} == set(later)


class Records(pl.Callback):
    def __init__(self, metrics: Any) -> None:
        self.metrics = metrics

    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics(self.metrics, state)


def observed(*callbacks: Any) -> Any:
    return fit(InMemoryLogger(), callbacks=callbacks, clock=itertools.count().__next__)


AT_ONCE: dict[str, Any] = {
    "another name: LRMonitor(optimizer,": lambda: observed(C.LRMonitor(pl.optim.sgd(lr=0.5))),
    "two loggers write to": lambda: stream([CSVLogger("m.csv"), CSVLogger("m.csv")]),
    "CSVLogger path='..' is a folder: write the path of a file": lambda: CSVLogger(".."),
    "JSONLinesLogger path='.' is a folder": lambda: JSONLinesLogger("."),
}
LATER: dict[str, Any] = {
    "'f1/a/b' would be the name of two values": lambda: observed(Records({"f1": {"a/b": 1.0}, "f1/a": {"b": 2.0}})),
    "where callback SpeedMonitor": lambda: observed(C.SpeedMonitor(window=1), C.SpeedMonitor(window=2)),
    "records 'train/loss' at batch 1, where callback": lambda: observed(Records({"train/loss": 0.0})),
}
PACKAGES = {
    "CometMLLogger": ("comet_ml", "comet_ml", {"project": "digits", "mode": "offline"}),
    "MLFlowLogger": ("mlflow", "mlflow", {"experiment": "digits"}),
    "NeptuneLogger": ("neptune", "neptune", {"mode": "offline"}),
    "RemoteUploader": ("fsspec", "remote", {"url": "memory://x"}),
    "SlackLogger": ("slack_sdk", "slack", {"channel": "#training", "token": "x"}),
    "TensorBoardLogger": ("tensorboard", "tensorboard", {"folder": "runs"}),
    "WandBLogger": ("wandb", "wandb", {"project": "digits"}),
}


def test_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named with its extra."""
    assert {*BACKENDS, *KEEPS_NO_RECORD} == set(pl.loggers.__all__)
    for says, call in (AT_ONCE | LATER).items():
        check(Refusal(says, call, pl.errors.ArgumentError, (says,), says in AT_ONCE))
    for name, (package, extra, arguments) in PACKAGES.items():
        for module in [module for module in sys.modules if module == package or module.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(pl.errors.MissingExtraError, match=rf"{package}.*pip install 'pure_loop\[{extra}\]'"):
            getattr(pl.loggers, name)(**arguments)


@EACH
def test_a_folder_that_cant_be_written_is_an_error_at_fit_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen: list[Event] = []
    logger = BACKENDS[name].make(tmp_path / "file" / "m")
    with pytest.raises(OSError, match=rf"{name} can't write to the folder.*{tmp_path.name}/file"):
        pl.run(stream([logger], callbacks=[lambda event, _: seen.append(event)]))
    assert seen[-1] is Event.FIT_START, "no batch is trained"


@pytest.mark.slow  # packages of trackers
def test_trackers_refuse_bad_input_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # with no file of Comet's own
    for variable in ("COMET_API_KEY", "NEPTUNE_API_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for name, option in {"CometMLLogger": "tags", "WandBLogger": "id", "NeptuneLogger": "with_id"}.items():
        for options, says in (
            ({"options": {option: "x"}}, f"options has '{option}'"),
            ({"tags": "a"}, "tags"),
            ({"mode": "of line"}, "mode"),
            ({"mode": "online" if name == "CometMLLogger" else "async"}, r'api_key="\.\.\.".*mode="offline"|mode'),
        ):
            if name in INSTALLED:
                with pytest.raises((pl.errors.ArgumentError, pl.errors.ArgumentTypeError), match=says):
                    getattr(pl.loggers, name)(**{"mode": "offline", **options})


def test_values_are_read_from_the_device_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    pl.run(stream([JSONLinesLogger(tmp_path / "m.jsonl", flush="5ba", include="train/loss")], callbacks=[]))
    assert reads == [5, 5, 2]
