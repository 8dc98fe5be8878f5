"""A second run in the first one's folder: every writer of files refuses it before training, unless told to replace."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop import callbacks as C
from pure_loop import loggers as L
from pure_loop._internal.names import COUNTS, FIELDS
from pure_loop.callbacks import CheckpointSaver, ExportForInferenceCallback, FlightRecorder
from pure_loop.errors import RunExistsError
from tests.support import problem
from tests.support.problem import mlp, points
from tests.support.tiers import examples


def fit(start: Any, *writers: Any, **options: Any) -> Any:
    """Of four batches an epoch, with the real clock, by which runs are told apart."""
    loggers = [each for each in writers if isinstance(each, pl.Logger)]
    callbacks = [each for each in writers if each not in loggers]
    given = {"callbacks": callbacks, "loggers": loggers, "strict": False, "clock": time.perf_counter, **options}
    return problem.fit(start, points(4), **given)


def go(start: Any, *writers: Any, **options: Any) -> pl.State:
    return pl.run(fit(start, *writers, **options))


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(call: Callable[[], Any], folder: Path, says: str = "overwrite=True") -> None:
    """Before anything is trained, and no byte is changed."""
    before, events = content(folder), list[Event]()
    with pytest.raises(RunExistsError, match=says) as caught:
        events.extend(event for event, _ in call())
    assert isinstance(caught.value, FileExistsError)
    assert isinstance(caught.value, pl.errors.ArgumentError)
    assert Event.BATCH_START not in events
    assert content(folder) == before


WRITERS: dict[str, Callable[..., Any]] = {
    "checkpoints": lambda folder, **o: CheckpointSaver(folder / "c", **o),
    "checkpoints, the last two": lambda folder, **o: CheckpointSaver(folder / "c", interval="1ba", keep_last=2, **o),
    "weights": lambda folder, **o: CheckpointSaver(folder / "c", weights_only=True, **o),
    "one name": lambda folder, **o: CheckpointSaver(folder / "c", filename="last.safetensors", **o),
    "flight": lambda folder, **o: FlightRecorder(folder / "f", keep="3ba", **o),
    "csv": lambda folder, **o: L.CSVLogger(folder / "m.csv", **o),
    "json lines": lambda folder, **o: L.JSONLinesLogger(folder / "m.jsonl", **o),
    "tensorboard": lambda folder, **o: L.TensorBoardLogger(folder / "t", **o),
    "export": lambda folder, **o: ExportForInferenceCallback(folder / "model.pt", **o),
    "export by counts": lambda folder, **o: ExportForInferenceCallback(folder / "ep{epoch}-ba{batch:03}.pt", **o),
}


@pytest.mark.parametrize("name", WRITERS)
def test_another_run_is_refused_before_training_and_what_resumes_is_its_own(name: str, tmp_path: Path) -> None:
    """The same script twice, another seed, the same ``run_name``; unless that is written, which leaves its own alone.

    A run resumes from the State that it returned, from its last checkpoint by either argument, and after a kill.
    """
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    make, place, auto = WRITERS[name], tmp_path / "place", tmp_path / "auto"
    state = go(mlp(), make(place), run_name="one", autoresume=auto, max_duration="1ep")
    go(state, make(place))
    go(mlp(), make(place), autoresume=auto, max_duration="3ep")
    go(mlp(), make(place), load_path=pl.latest_path(auto), max_duration="4ep")
    for options in ({"seed": 1}, {}, {"run_name": "one"}):
        refused(lambda options=options: fit(mlp(1), make(place), **options), place, r"another run.*overwrite.*run_name")
    saver, killed = CheckpointSaver(tmp_path / "auto2", interval="100ba", signals=()), tmp_path / "killed"
    for _, state in fit(mlp(), make(killed), autoresume=saver):  # before the first checkpoint
        if state.timestamp.batch == 3:
            break
    go(mlp(), make(killed), autoresume=saver)
    go(mlp(1), make(place, overwrite=True), max_duration="1ep", run_name="second")
    go(mlp(1), make(tmp_path / "alone"), max_duration="1ep", run_name="second")
    there, own = ({re.sub(r"tfevents.*", "", path) for path in content(at)} for at in (place, tmp_path / "alone"))
    assert there == own or (there > own and name == "export by counts")


# Folders of checkpoints


def every_batch(folder: Path, **options: Any) -> CheckpointSaver:
    return CheckpointSaver(folder, interval="1ba", **options)


def test_a_fork_from_a_kept_state_is_another_run(tmp_path: Path) -> None:
    """It would replace what is further on; from the last State nothing is."""
    pairs = fit(mlp(), every_batch(tmp_path))
    states = {state.timestamp.batch: state for event, state in pairs if event is Event.BATCH_CHECKPOINT}
    for kept in (2, 4, 5):
        fork = fit(states[kept], every_batch(tmp_path), optimizer=pl.optim.sgd(lr=0.01))
        refused(lambda fork=fork: fork, tmp_path, f"this one resumes at batch {kept}")
    before = content(tmp_path)
    go(states[8], every_batch(tmp_path), max_duration="3ep")
    assert before.items() <= content(tmp_path).items()
    # Its own checkpoints up to where it begins stay, and those after it are the fork's.
    go(states[4], every_batch(tmp_path, overwrite=True), max_duration="6ba")
    found = {int(re.findall("ba([0-9]+)", name)[0]) for name in content(tmp_path) if name.endswith("safetensors")}
    assert found == set(range(1, 7))


def test_a_clock_alone_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """A State of another run of the same seed; a twin in the folder of autoresume: the newest is resumed from."""
    _, second = (go(mlp(), CheckpointSaver(tmp_path / name)) for name in "ab")
    before = content(tmp_path)
    go(second, CheckpointSaver(tmp_path / "a", latest=None, keep_last=1), max_duration="3ep")
    assert before.items() <= content(tmp_path).items()
    kept = [state for event, state in fit(mlp()) if event is Event.BATCH_END][3]
    for seconds in (0.0, 1e6):
        folder = tmp_path / str(seconds)
        go(mlp(), every_batch(folder, keep_last=2), max_duration="2ba")
        twin = kept.replace(timestamp=attrs.evolve(kept.timestamp, total_seconds=seconds))
        pl.save(twin, folder / "twin.safetensors")
        before = content(folder)
        assert go(mlp(), every_batch(folder, latest=None), autoresume=folder).timestamp.batch == 8
        assert before.items() <= content(folder).items()


def test_older_files_and_those_that_cannot_be_read_are_in_nobodys_way_but_a_new_run_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a kill; a file cut by a full disk, and files of other names; nor is anything removed too early."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine.safetensors").write_bytes(b"mine")
    saver = CheckpointSaver(tmp_path, interval="2ba")
    go(mlp(), saver)
    go(mlp(), saver, load_path=tmp_path / "ep0-ba2.safetensors")
    assert "further on than batch 2, at which it resumes, up to ep2-ba8.safetensors" in caplog.text
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "ep7-ba70.safetensors").write_bytes(b"cut")
    go(mlp(), autoresume=saver, max_duration="3ep")
    refused(lambda: fit(mlp(), CheckpointSaver(tmp_path / "other")), tmp_path)
    before = content(tmp_path)
    assert before["notes.txt"] + before["mine.safetensors"] == b"minemine"
    for event, _ in fit(mlp(1), CheckpointSaver(tmp_path, overwrite=True)):
        if event is Event.BATCH_START:
            assert content(tmp_path) == before, "there is nothing in its place yet"
            break


def test_several_savers_of_one_run_share_a_folder(tmp_path: Path) -> None:
    def savers(**options: Any) -> list[Any]:
        milestones = CheckpointSaver(tmp_path, filename="milestone-{epoch}.safetensors", latest=None, **options)
        return [every_batch(tmp_path, keep_last=2, **options), milestones]

    go(mlp(), *savers())
    go(mlp(), *savers(), autoresume=tmp_path, max_duration="3ep")
    refused(lambda: fit(mlp(), *savers()), tmp_path)
    go(mlp(), *savers(overwrite=True), max_duration="1ep")
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    assert names == {"ep0-ba3.safetensors", "ep1-ba4.safetensors", "milestone-1.safetensors"}


def test_a_script_of_ones_own_is_refused_and_resumed_as_a_run_is(tmp_path: Path) -> None:
    def script(state: pl.State) -> Any:
        state = yield Event.FIT_START, state
        for _ in range(3):
            state = yield Event.BATCH_CHECKPOINT, state.replace(timestamp=state.timestamp.next_batch(4))
        return state

    def drive(state: pl.State, **options: Any) -> Any:
        return pl.drive(script(state), callbacks=[every_batch(tmp_path, **options)])

    state = pl.run(drive(pl.State.create(mlp())))
    refused(lambda: drive(pl.State.create(mlp())), tmp_path)
    pl.run(drive(state.replace(event=None)))
    pl.run(drive(pl.State.create(mlp()), overwrite=True))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"ep0-ba{n}.safetensors" for n in (1, 2, 3)}


STARTS = st.sampled_from(["fresh", "autoresume", "newest", "end", "kept"])


@examples(10, 200)
@given(st.lists(st.tuples(STARTS, st.booleans(), st.integers(0, 1)), min_size=2, max_size=4))
def test_what_is_there_is_never_changed_unless_that_was_written(runs: list[tuple[str, bool, int]]) -> None:
    """Runs in one folder, one after the other: each resumes from the newest, from the last State, or a kept one."""
    with tempfile.TemporaryDirectory() as place:
        folder, last, kept = Path(place), None, None
        for number, (start, overwrite, seed) in enumerate(runs):
            before, newest = content(folder), pl.latest_path(folder)
            saver = every_batch(folder, latest=None, overwrite=overwrite)
            options: dict[str, Any] = {"max_duration": f"{number + 2}ba", "optimizer": pl.optim.sgd(lr=0.1 + number)}
            beginning: Any = mlp(number)
            if start == "autoresume":
                options["autoresume"] = saver
            elif start == "newest" and newest is not None:
                options["load_path"] = newest
            elif start in ("end", "kept") and last is not None:
                beginning = last if start == "end" else kept
            else:
                options["seed"] = seed
            try:
                for event, state in fit(beginning, *[saver] * (start != "autoresume"), **options):
                    if event is Event.BATCH_CHECKPOINT:
                        kept = kept if kept is not None and state.timestamp.batch % 2 else state
                last = state
            except RunExistsError:
                assert before
                assert (content(folder), overwrite) == (before, False)
            else:
                assert overwrite or before.items() <= content(folder).items()


# Paths with fields: each writer puts in the same.

PLACES: list[Callable[[str], Any]] = [
    *(CheckpointSaver, FlightRecorder, L.CSVLogger, L.JSONLinesLogger, L.TensorBoardLogger),
    *(C.MemorySnapshot, lambda path: L.RemoteUploader("memory://" + path)),
    lambda path: ExportForInferenceCallback(path + ".pt"),
    *(lambda path: L.WandBLogger("p", folder=path), lambda path: L.MLFlowLogger("p", folder=path)),
    lambda path: CheckpointSaver("x", filename=path.replace("/", "") + ".safetensors"),
    lambda path: C.MLPerfCallback(path, "b", 0.1, "val/loss"),
]


def test_a_field_that_there_is_not_and_a_wide_format_are_refused_at_construction() -> None:
    for package in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(package)
    for make in PLACES:
        for path in ("runs/{run}", "runs/{run_nmae}/x", "runs/{}", "runs/{0}", "runs/{run_name", "{epoch.x}"):
            with pytest.raises(pl.errors.ArgumentError, match=r"there are epoch, batch.*run_name, rank, start"):
                make(path)
        for path in ("runs/{batch:999999999}", "runs/{epoch:,}", "runs/{run_name!r}", "{start:x}"):
            with pytest.raises(pl.errors.ArgumentError, match="digits alone"):
                make(path)


def test_fields_are_put_in_where_the_run_starts(tmp_path: Path) -> None:
    """The same name and the same second in every writer; braces of the name itself are doubled."""
    where, now = str(tmp_path) + "/{{x}}-{run_name}/{start}/e{epoch}-b{batch:03}-r{rank}", int(time.time())
    saver = CheckpointSaver(where + "/c", filename="{run_name}-{start}-{rank}-{batch:02}.safetensors")
    others = FlightRecorder(where + "/f"), ExportForInferenceCallback(where + "/e{epoch}-b{batch}-{run_name}.pt")
    loggers = L.CSVLogger(where + "/m.csv"), L.JSONLinesLogger(where + "/{run_name}.jsonl")
    go(mlp(), saver, *others, *loggers, max_duration="1ep", run_name="calm")
    (folder,) = tmp_path.glob("{x}-calm/*/e0-b000-r0")
    start = folder.parent.name
    assert now - 1 <= int(start) <= time.time()
    names = {path.rpartition("/")[2] for path in content(folder)}
    flight = {"start-ba0.safetensors", "ba4.safetensors", "journal.jsonl", "run.json"}
    assert names == flight | {f"calm-{start}-0-04.safetensors", "e1-b4-calm.pt", "m.csv", "m.run.json", "calm.jsonl"}


def test_every_field_of_composer_is_in_every_path(tmp_path: Path) -> None:
    """Counts of the State in a name, and of the start in folders; seconds are whole ones; one rank is the first."""
    fields = [*FIELDS[1:], "epoch"]
    text = "-".join(f"{{{name}}}" for name in fields)
    saver = CheckpointSaver(tmp_path / ("c" + text), filename=text + ".safetensors", interval="3ba")
    others = ExportForInferenceCallback(tmp_path / f"x{text}.pt"), L.CSVLogger(tmp_path / ("l" + text))
    state = go(mlp(), saver, *others, max_duration="3ba", run_name="calm")
    here = {"run_name": "calm", "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "node_rank": 0}
    for path in tmp_path.iterdir():
        now = state.timestamp if path.name.startswith("x") else pl.Timestamp()
        found = dict(zip(fields, path.name[1:].removesuffix(".run.json").removesuffix(".pt").split("-"), strict=True))
        wanted = {name: int(getattr(now, name)) for name in COUNTS} | here
        assert found | {name: str(value) for name, value in wanted.items()} == found
    (path,) = Path(saver.place).glob("*.safetensors")
    assert path.name.startswith("-".join(str(getattr(state.timestamp, name)) for name in ("batch", "sample", "token")))
    for wrong, right in (("total_wct", "total_seconds"), ("timestamp", "start")):
        with pytest.raises(pl.errors.ArgumentError, match=rf"{{{wrong}}} is no field, write {{{right}}}"):
            CheckpointSaver("runs", filename=f"{{{wrong}}}.safetensors")


def test_names_of_runs_are_made_up_kept_in_checkpoints_and_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two runs of one second draw the same words once in 144 times.
    monkeypatch.setattr("pure_loop.entry.record.secrets.choice", lambda words: words[0])
    for _ in range(2):  # a cell of a notebook that is run twice
        state = go(mlp(), CheckpointSaver(tmp_path / "a/{run_name}"), L.CSVLogger(tmp_path / "a/{run_name}/m.csv"))
    first, second = ({path.name for path in folder.rglob("*.*")} for folder in (tmp_path / "a").iterdir())
    assert first == second
    for duration in ("1ep", "2ep"):
        named = L.JSONLinesLogger(tmp_path / "{run_name}.jsonl")
        go(mlp(), named, autoresume=tmp_path / "auto", max_duration=duration)
        go(mlp(), autoresume=tmp_path / "{run_name}", run_name="one", max_duration=duration)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1, "a run that is resumed finds its name in its checkpoint"
    assert {path.name for path in (tmp_path / "one").glob("ep*")} == {"ep1-ba4.safetensors", "ep2-ba8.safetensors"}
    for path, name in (("{run_name}", None), ("{start}", "one"), ("{batch}", "one")):
        with pytest.raises(pl.errors.ArgumentError, match="the same command has to find this folder again"):
            fit(mlp(), autoresume=tmp_path / path, run_name=name)
    with pytest.raises(pl.errors.ArgumentError, match="run_name} has no value here"):
        pl.evaluate(state, points(1), loss=problem.cross_entropy, loggers=[L.CSVLogger(tmp_path / "{run_name}.csv")])
