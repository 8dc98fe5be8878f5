"""A second run in the first one's folder: every writer of files refuses it before training, unless told to replace."""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import (
    CheckpointSaver,
    ExportForInferenceCallback,
    FlightRecorder,
    MemorySnapshot,
    MLPerfCallback,
)
from pure_loop.errors import RunExistsError
from pure_loop.loggers import CSVLogger, JSONLinesLogger, MLFlowLogger, RemoteUploader, TensorBoardLogger, WandBLogger
from tests.support import problem
from tests.support.tiers import examples

DATA = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(4)]


def model(value: float = 0.0) -> nn.Module:
    net = nn.Linear(3, 1)
    nn.init.constant_(net.weight, value)
    return net


def fit(start: Any, writer: Any = None, **options: Any) -> Any:
    """With the real clock, by which runs are told apart."""
    at = {} if writer is None else {"loggers" if isinstance(writer, pl.Logger) else "callbacks": [writer]}
    settings = {"loss": nn.functional.mse_loss, "strict": False, "clock": time.perf_counter, **at, **options}
    return problem.fit(start, DATA, **settings)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


WRITERS: dict[str, Callable[..., Any]] = {
    "checkpoints": lambda folder, **o: CheckpointSaver(folder / "c", **o),
    "checkpoints, the last two": lambda folder, **o: CheckpointSaver(folder / "c", interval="1ba", keep_last=2, **o),
    "weights": lambda folder, **o: CheckpointSaver(folder / "c", weights_only=True, **o),
    "one name": lambda folder, **o: CheckpointSaver(folder / "c", filename="last.safetensors", **o),
    "flight": lambda folder, **o: FlightRecorder(folder / "f", keep="3ba", **o),
    "csv": lambda folder, **o: CSVLogger(folder / "m.csv", **o),
    "json lines": lambda folder, **o: JSONLinesLogger(folder / "m.jsonl", **o),
    "tensorboard": lambda folder, **o: TensorBoardLogger(folder / "t", **o),
    "export": lambda folder, **o: ExportForInferenceCallback(folder / "model.pt", **o),
    "export by counts": lambda folder, **o: ExportForInferenceCallback(folder / "ep{epoch}-ba{batch:03}.pt", **o),
}


@pytest.fixture(params=list(WRITERS))
def writer(request: pytest.FixtureRequest) -> Callable[..., Any]:
    if request.param == "tensorboard":
        pytest.importorskip("tensorboard")
    return WRITERS[request.param]


def test_another_run_is_refused_before_training_and_replaces_it_where_that_is_written(
    writer: Callable[..., Any], tmp_path: Path
) -> None:
    """The same script twice, another seed, the same ``run_name``: nothing is trained and no byte is changed."""
    pl.run(fit(model(), writer(tmp_path), run_name="one"))
    before = content(tmp_path)
    for options in ({"seed": 1}, {}, {"run_name": "one"}):
        events: list[Event] = []
        with pytest.raises(RunExistsError, match=r"another run.*overwrite=True.*run_name") as caught:
            events.extend(event for event, _ in fit(model(1.0), writer(tmp_path), **options))
        assert isinstance(caught.value, FileExistsError)
        assert isinstance(caught.value, pl.ArgumentError)
        assert Event.BATCH_START not in events
        assert content(tmp_path) == before
    alone = tmp_path / "alone"
    for folder, replaced in ((tmp_path, {"overwrite": True}), (alone, {})):
        pl.run(fit(model(1.0), writer(folder, **replaced), max_duration="1ep", run_name="second"))
    there, own = ({re.sub(r"tfevents.*", "tfevents", n) for n in content(f)} for f in (tmp_path, alone))
    there = {name for name in there if not name.startswith("alone")}
    assert there == own or (there > own and isinstance(writer(tmp_path), ExportForInferenceCallback))


def test_what_is_resumed_is_its_own(writer: Callable[..., Any], tmp_path: Path) -> None:
    """From the State that it returned, from its last checkpoint by either argument, and after a kill."""
    state = pl.run(fit(model(), writer(tmp_path), autoresume=tmp_path / "auto", max_duration="1ep"))
    pl.run(fit(state, writer(tmp_path)))
    pl.run(fit(model(), writer(tmp_path), autoresume=tmp_path / "auto", max_duration="3ep"))
    pl.run(fit(model(), writer(tmp_path), load_path=pl.latest(tmp_path / "auto"), max_duration="4ep"))
    # Killed before the first checkpoint: the same command is the same run.
    auto, place = CheckpointSaver(tmp_path / "auto2", interval="100ba", signals=()), tmp_path / "killed"
    for _, state in fit(model(), writer(place), autoresume=auto):
        if state.timestamp.batch == 3:
            break
    pl.run(fit(model(), writer(place), autoresume=auto))
    with pytest.raises(RunExistsError):
        pl.run(fit(model(1.0), writer(place)))


# Folders of checkpoints


@pytest.mark.parametrize("kept", [2, 4, 5])
def test_a_fork_from_a_kept_state_is_another_run(kept: int, tmp_path: Path) -> None:
    """It would replace what is further on; from the last State nothing is."""
    saver = CheckpointSaver(tmp_path, interval="1ba")
    states = {state.timestamp.batch: state for event, state in fit(model(), saver) if event is Event.BATCH_CHECKPOINT}
    before = content(tmp_path)
    with pytest.raises(RunExistsError, match=f"this one resumes at batch {kept}"):
        pl.run(fit(states[kept], saver, optimizer=pl.optim.sgd(lr=0.01)))
    assert content(tmp_path) == before
    pl.run(fit(states[8], saver, max_duration="3ep"))
    assert before.items() <= content(tmp_path).items()
    # Its own checkpoints up to where it begins stay, and those after it are the fork's.
    pl.run(fit(states[kept], CheckpointSaver(tmp_path, interval="1ba", overwrite=True), max_duration="6ba"))
    found = {int(re.findall("ba([0-9]+)", name)[0]) for name in content(tmp_path) if name.endswith("safetensors")}
    assert found == set(range(1, 7))


def test_a_clock_alone_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """A State of another run of the same seed; a twin in the folder of autoresume: the newest is resumed from."""
    first, second = (pl.run(fit(model(), CheckpointSaver(tmp_path / name))) for name in "ab")
    before = content(tmp_path)
    pl.run(fit(second, CheckpointSaver(tmp_path / "a", latest=None, keep_last=1), max_duration="3ep"))
    assert before.items() <= content(tmp_path).items()
    (tmp_path / "a" / "ep3-ba12.safetensors").unlink()
    pl.run(fit(first, CheckpointSaver(tmp_path / "a", keep_last=1), max_duration="3ep"))
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 1
    kept = [state for event, state in fit(model(), None) if event is Event.BATCH_END][3]
    for seconds in (0.0, 1e6):
        folder = tmp_path / str(seconds)
        pl.run(fit(model(), CheckpointSaver(folder, interval="1ba", keep_last=2), max_duration="2ba"))
        timestamp = attrs.evolve(kept.timestamp, total_seconds=seconds)
        pl.save(kept.replace(timestamp=timestamp), folder / "twin.safetensors")
        before = content(folder)
        end = pl.run(fit(model(), CheckpointSaver(folder, interval="1ba", latest=None), autoresume=folder))
        assert end.timestamp.batch == 8
        assert before.items() <= content(folder).items()


def test_an_older_checkpoint_of_the_folder_resumes_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a kill, where another folder, such as a recorder's, was saved to more often. The log says what stays."""
    pl.run(fit(model(), CheckpointSaver(tmp_path, interval="2ba")))
    older = tmp_path / "ep0-ba2.safetensors"
    pl.run(fit(model(), CheckpointSaver(tmp_path, interval="2ba"), load_path=older))
    assert "further on than batch 2, at which it resumes, up to ep2-ba8.safetensors" in caplog.text


def test_a_checkpoint_that_cannot_be_read_is_in_nobodys_way_but_a_new_run_s(tmp_path: Path) -> None:
    """A file cut by a full disk, plain weights, and files of other names; nor is anything removed too early."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    pl.run(fit(model(), CheckpointSaver(tmp_path, interval="2ba"), max_duration="1ep"))
    (tmp_path / "ep7-ba70.safetensors").write_bytes(b"cut")
    pl.run(fit(model(), autoresume=CheckpointSaver(tmp_path, interval="2ba")))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ep7-ba70.safetensors").write_bytes(b"cut")
    with pytest.raises(RunExistsError):
        pl.run(fit(model(), CheckpointSaver(tmp_path / "other")))
    assert (tmp_path / "notes.txt").read_text() + (tmp_path / "mine.safetensors").read_text() == "minemine"
    before = content(tmp_path)
    for event, _ in fit(model(1.0), CheckpointSaver(tmp_path, overwrite=True)):
        if event is Event.BATCH_START:
            assert content(tmp_path) == before, "there is nothing in its place yet"
            break


def test_several_savers_of_one_run_share_a_folder(tmp_path: Path) -> None:
    def savers(**options: Any) -> list[Any]:
        often = CheckpointSaver(tmp_path, interval="1ba", keep_last=2, **options)
        return [often, CheckpointSaver(tmp_path, filename="milestone-{epoch}.safetensors", latest=None, **options)]

    pl.run(fit(model(), callbacks=savers()))
    pl.run(fit(model(), callbacks=savers(), autoresume=tmp_path, max_duration="3ep"))
    with pytest.raises(RunExistsError):
        pl.run(fit(model(), callbacks=savers()))
    pl.run(fit(model(), callbacks=savers(overwrite=True), max_duration="1ep"))
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {"ep0-ba3.safetensors", "ep1-ba4.safetensors", "milestone-1.safetensors"}


def test_a_script_of_ones_own_is_refused_and_resumed_as_a_run_is(tmp_path: Path) -> None:
    def script(state: pl.State) -> Any:
        state = yield Event.FIT_START, state
        for _ in range(3):
            state = state.replace(timestamp=state.timestamp.next_batch(4))
            state = yield Event.BATCH_END, state
            state = yield Event.BATCH_CHECKPOINT, state
        return state

    def drive(state: pl.State, **options: Any) -> pl.State:
        return pl.run(pl.drive(script(state), callbacks=[CheckpointSaver(tmp_path, interval="1ba", **options)]))

    state = drive(pl.State.create(model()))
    with pytest.raises(RunExistsError):
        drive(pl.State.create(model()))
    drive(state.replace(event=None))
    drive(pl.State.create(model()), overwrite=True)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"ep0-ba{n}.safetensors" for n in (1, 2, 3)}


STARTS = st.sampled_from(["fresh", "autoresume", "newest", "end", "kept"])


@examples(10, 200)
@given(st.lists(st.tuples(STARTS, st.booleans(), st.integers(0, 1)), min_size=2, max_size=4))
def test_what_is_there_is_never_changed_unless_that_was_written(runs: list[tuple[str, bool, int]]) -> None:
    """Runs in one folder, one after the other: each resumes from the newest, from the last State, or a kept one."""
    with tempfile.TemporaryDirectory() as place:
        folder, last, kept = Path(place), None, None
        for number, (start, overwrite, seed) in enumerate(runs):
            before, newest = content(folder), pl.latest(folder)
            saver = CheckpointSaver(folder, interval="1ba", latest=None, overwrite=overwrite)
            options: dict[str, Any] = {"max_duration": f"{number + 2}ba", "optimizer": pl.optim.sgd(lr=0.1 + number)}
            beginning: Any = model(float(number))
            if start == "autoresume":
                options["autoresume"] = saver
            elif start == "newest" and newest is not None:
                options["load_path"] = newest
            elif start in ("end", "kept") and last is not None:
                beginning = last if start == "end" else kept
            else:
                options["seed"] = seed
            try:
                for event, state in fit(beginning, None if start == "autoresume" else saver, **options):
                    if event is Event.BATCH_CHECKPOINT:
                        kept = kept if kept is not None and state.timestamp.batch % 2 else state
                last = state
            except RunExistsError:
                assert content(folder) == before
                assert not overwrite
                assert before
            else:
                assert overwrite or before.items() <= content(folder).items()


# Paths with fields: each writer puts in the same.

PLACES: dict[str, Callable[[str], Any]] = {
    "CheckpointSaver": CheckpointSaver,
    "CheckpointSaver filename": lambda path: CheckpointSaver("x", filename=path.replace("/", "") + ".safetensors"),
    "FlightRecorder": FlightRecorder,
    "CSVLogger": CSVLogger,
    "JSONLinesLogger": JSONLinesLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": lambda path: WandBLogger("p", folder=path),
    "mlflow": lambda path: MLFlowLogger("p", folder=path),
    "RemoteUploader": lambda path: RemoteUploader("memory://" + path),
    "ExportForInferenceCallback": ExportForInferenceCallback,
    "MemorySnapshot": MemorySnapshot,
    "MLPerfCallback": lambda path: MLPerfCallback(path, "b", 0.1, "val/loss"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_field_that_there_is_not_and_a_wide_format_are_refused_at_construction(name: str) -> None:
    if name.islower():
        pytest.importorskip(name)
    for path in ("runs/{run}", "runs/{run_nmae}/x", "runs/{}", "runs/{0}", "runs/{run_name", "{epoch.x}"):
        with pytest.raises(pl.ArgumentError, match=r"there are epoch, batch.*run_name, rank, start"):
            PLACES[name](path)
    for path in ("runs/{batch:999999999}", "runs/{epoch:,}", "runs/{run_name!r}", "{start:x}"):
        with pytest.raises(pl.ArgumentError, match="digits alone"):
            PLACES[name](path)


def test_fields_are_put_in_where_the_run_starts(tmp_path: Path) -> None:
    """The same name and the same second in every writer; braces of the name itself are doubled."""
    where, now = str(tmp_path) + "/{{x}}-{run_name}/{start}/e{epoch}-b{batch:03}-r{rank}", int(time.time())
    saver = CheckpointSaver(where + "/c", filename="{run_name}-{start}-{rank}-{batch:02}.safetensors")
    export = ExportForInferenceCallback(where + "/e{epoch}-b{batch}-{run_name}.pt")
    loggers = [CSVLogger(where + "/m.csv"), JSONLinesLogger(where + "/{run_name}.jsonl")]
    callbacks = [saver, FlightRecorder(where + "/f"), export]
    pl.run(fit(model(), max_duration="1ep", callbacks=callbacks, loggers=loggers, run_name="calm"))
    (folder,) = tmp_path.glob("{x}-calm/*/e0-b000-r0")
    start = folder.parent.name
    assert now - 1 <= int(start) <= time.time()
    names = {path.name for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    assert names == {
        f"calm-{start}-0-04.safetensors",
        *("start-ba0.safetensors", "ba4.safetensors", "journal.jsonl", "run.json"),
        *("e1-b4-calm.pt", "m.csv", "m.run.json", "calm.jsonl"),
    }


def test_names_of_runs_are_made_up_kept_in_checkpoints_and_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two runs of one second would have one name once in 144 times.
    draws = itertools.count()
    monkeypatch.setattr("pure_loop.entry.record.secrets.choice", lambda words: words[next(draws) % len(words)])
    saver, logger = CheckpointSaver(tmp_path / "a" / "{run_name}"), CSVLogger(tmp_path / "a" / "{run_name}" / "m.csv")
    for _ in range(2):  # a cell of a notebook that is run twice
        state = pl.run(fit(model(), callbacks=[saver], loggers=[logger]))
    first, second = ({path.name for path in folder.rglob("*.*")} for folder in (tmp_path / "a").iterdir())
    assert first == second
    for duration in ("1ep", "2ep"):
        named = JSONLinesLogger(tmp_path / "{run_name}.jsonl")
        pl.run(fit(model(), named, autoresume=tmp_path / "auto", max_duration=duration))
        pl.run(fit(model(), autoresume=tmp_path / "{run_name}", run_name="one", max_duration=duration))
    assert len(list(tmp_path.glob("*.jsonl"))) == 1, "a run that is resumed finds its name in its checkpoint"
    assert {path.name for path in (tmp_path / "one").glob("ep*")} == {"ep1-ba4.safetensors", "ep2-ba8.safetensors"}
    for path, name in (("{run_name}", None), ("{start}", "one"), ("{batch}", "one")):
        with pytest.raises(pl.ArgumentError, match="the same command has to find this folder again"):
            fit(model(), autoresume=tmp_path / path, run_name=name)
    with pytest.raises(pl.ArgumentError, match="run_name} has no value here"):
        pl.evaluate(state, {"val": DATA}, loss=nn.functional.mse_loss, loggers=[CSVLogger(tmp_path / "{run_name}.csv")])
