"""Which checkpoint of a folder is the newest, the best, a run's own, and may be removed: by States, and by no clock."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.names import Pattern
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, storage
from pure_loop.checkpoint.index import INDEX
from pure_loop.checkpoint.paths import Names
from pure_loop.checkpoint.run_folder import Links, Retention, RunFolder, Saved
from pure_loop.checkpoint.storage import storage_of
from pure_loop.errors import ArgumentError
from tests.support.checkpoint_runs import DATA, fit, messages, names, place, small, state_at, trained
from tests.support.streams import assert_same
from tests.support.tiers import examples

# Of one run, in the order in which it passes them.
PLACES = (
    *((0, 0, 0, "AFTER_LOAD"), (0, 0, 0, "EPOCH_START"), (1, 0, 0, "BATCH_END"), (1, 0, 0, "BATCH_CHECKPOINT")),
    *((2, 0, 0, "BATCH_END"), (2, 1, 0, "EPOCH_END"), (2, 1, 0, "EPOCH_CHECKPOINT"), (2, 1, 1, "ITERATION_END")),
    *((2, 1, 1, "ITERATION_CHECKPOINT"), (2, 1, 1, "EPOCH_START"), (10, 1, 1, "BATCH_END")),
)
CHAIN = [state_at(batch, epoch, Event[name], iteration=iteration) for batch, epoch, iteration, name in PLACES]
CLOCK = st.integers(-(10**20), 10**18) | st.just(OverflowError())


@examples(15, 300)
@given(st.lists(st.integers(0, len(CHAIN) - 1), min_size=2, max_size=4), st.permutations("abcd"), st.data())
def test_the_newest_is_the_furthest_on_whatever_clocks_say(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[int], names: list[str], data: st.DataObject
) -> None:
    """Of equal States the last by name. Clocks are set back, before 1970, and after 2262, where Python raises."""
    folder = tmp_path_factory.mktemp("run")

    def now() -> int:
        drawn: Any = data.draw(CLOCK)
        if isinstance(drawn, OverflowError):
            raise drawn
        return int(drawn)

    paths = {(number, name): folder / f"{name}.safetensors" for number, name in zip(chosen, names, strict=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", now)
        for (number, _), path in paths.items():
            pl.save(CHAIN[number], path)
    for path in paths.values():
        os.utime(path, (1, data.draw(st.integers(1, 10**9))))
    while paths:
        newest = paths.pop(max(paths))
        assert pl.latest_path(folder) == str(newest)
        newest.unlink()


def test_files_that_go_or_are_damaged_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = tmp_path / "older.safetensors", tmp_path / "newer.safetensors"
    pl.save(state_at(), older)
    pl.save(trained(), newer)
    verify = container.verify

    def gone(file: Any, path: Any) -> Any:
        if "newer" in str(path):
            raise OSError(errno.EIO, "the disk has a hole")
        return verify(file, path)

    with monkeypatch.context() as patch, messages() as said:
        patch.setattr(container, "verify", gone)
        assert pl.latest_path(tmp_path) == str(older)
    assert "the disk has a hole" in said[0]

    # What was opened is read, and not what has its name by then.
    opened, wanted = storage._Local.open, pl.load(newer, model=small())

    def replaced(self: Any) -> Any:
        found = opened(self)
        pl.save(state_at(9), newer)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(storage._Local, "open", replaced)
        assert_same(pl.load(newer, model=small()), wanted, "the file that was opened")

    for path in (older, newer):
        path.write_bytes(path.read_bytes()[:-1])
    with messages() as said:
        assert pl.latest_path(tmp_path) is None
    assert len(said) == 2


def test_autoresume_takes_the_furthest_on_of_the_run_that_is_resumed(tmp_path: Path) -> None:
    for seed, last in ((0, "8ba"), (1, "5ba")):
        saver = CheckpointSaver(tmp_path, interval="1ba", filename=f"seed{seed}-{{batch}}.safetensors")
        pl.run(fit(seed=seed, callbacks=[saver], max_duration=last))

    def starts_at(start: Any = None, **options: Any) -> tuple[int, int]:
        state = next(state for event, state in fit(start, autoresume=tmp_path, **options) if event is Event.FIT_START)
        return state.seed, state.timestamp.batch

    with messages() as said:
        assert starts_at(seed=1) == (1, 5)
    assert any("seed0-8.safetensors is passed over: it is of another run, with seed 0" in each for each in said)
    assert starts_at() == (0, 8)
    for kept in (pl.State.create(small(), seed=1), pl.load(tmp_path / "seed1-3.safetensors", model=small())):
        assert starts_at(kept) == (1, 5)
    with pytest.raises(ArgumentError, match=r"seed=7, and .*seed0-8\.safetensors has seed 0"):
        fit(seed=7, autoresume=tmp_path)
    for start in (pl.State.create(small(), seed=7), state_at(9, position=Event.BATCH_END)):
        with pytest.raises(ArgumentError, match="is not of a run that began with the State passed"):
            fit(start, autoresume=tmp_path)


# The best


def run(folder: Any, *savers: Any, mode: Any = "min", **options: Any) -> pl.Stream:
    return fit(**{"callbacks": savers or [saver(folder, mode)], "eval_interval": "1ba", **options})


def saver(folder: Any, mode: Any = "min", **options: Any) -> CheckpointSaver:
    settings = {"interval": "1ba", "filename": "{batch}.safetensors", "keep_last": 1, "keep_best": 2, **options}
    return CheckpointSaver(folder, metric="val/loss", mode=mode, **settings)


def scores(stream: pl.Stream) -> dict[int, float]:
    return {s.timestamp.batch: float(s.metrics["val"]["loss"]) for e, s in stream if e is Event.EVAL_AFTER_ALL}


@pytest.mark.parametrize("mode", ["min", "max", None])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_resumed_run_keeps_and_finds_the_best_of_both_parts(kind: str, mode: Any) -> None:
    """By the scores that were saved; of a loss less is better."""
    with place(kind) as folder:
        assert pl.best_path(folder) is None
        for event, state in run(folder, mode=mode):
            if event is Event.BATCH_START and state.timestamp.batch == 3:
                break
        pl.run(run(folder, mode=mode, autoresume=folder))
        measured = scores(fit(eval_interval="1ba"))
        best, second, *_ = sorted(measured, key=measured.__getitem__, reverse=mode == "max")
        assert pl.best_path(folder) == f"{folder}/{best}.safetensors"
        state = pl.load(f"{folder}/{best}.safetensors", model=small())
        assert float(state.metrics["val"]["loss"]) == measured[best]
        kept = {name for name in storage_of(folder).names() if name.endswith(".safetensors")}
        assert kept == {f"{batch}.safetensors" for batch in (best, second, 8)}
        if kind == "local":
            assert os.readlink(f"{folder}/best") == f"{best}.safetensors"
            content = bytearray(Path(folder, f"{best}.safetensors").read_bytes())
            content[-9] ^= 1
            Path(folder, f"{best}.safetensors").write_bytes(content)
            with messages() as said:
                assert pl.best_path(folder) == f"{folder}/{second}.safetensors"
            assert f"{best}.safetensors is passed over" in said[0]
        else:  # where there are no links
            with storage_of(f"{folder}/best").open() as file:
                assert file.read().decode() == f"{best}.safetensors\n"
            assert not storage_of(f"{folder}/latest").exists()


def test_the_best_by_what_notes_say(tmp_path: Path) -> None:
    def note(name: str, state: pl.State, score: float | None, **notes: Any) -> str:
        pl.save(state, tmp_path / f"{name}.safetensors", notes={"metric": "val/loss", "score": score, **notes})
        return str(tmp_path / f"{name}.safetensors")

    note("none", state_at(), None)
    assert pl.best_path(tmp_path) is None
    some = note("some", state_at(), 0.5)
    with pytest.raises(ArgumentError, match='write mode="max" or mode="min"'):
        pl.best_path(tmp_path)
    assert pl.best_path(tmp_path, mode="min") == some
    note("some", state_at(), 0.5, mode="max")
    note("none", state_at(), 0.25, mode="min")
    with pytest.raises(ArgumentError, match="say both"):
        pl.best_path(tmp_path)
    # Of equal ones that with the fewest batches, and of one batch the end of its epoch.
    of: dict[str, Any] = {"metric": "val/f1", "mode": "max"}
    note("z", state_at(4, position=Event.BATCH_CHECKPOINT), 0.5, **of)
    first = note("a", state_at(4, 1, position=Event.EPOCH_CHECKPOINT), 0.5, **of)
    note("b", state_at(5), 0.5, **of)
    assert pl.best_path(tmp_path, metric="val/f1") == first
    with pytest.raises(ArgumentError, match=r"has scores of val/f1, val/loss: say by which, metric='val/f1'"):
        pl.best_path(tmp_path)
    with pytest.raises(ArgumentError, match=r"did you mean 'val/loss'\?; there are val/f1, val/loss"):
        pl.best_path(tmp_path, metric="val/los")


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    data = [(inputs * float("nan"), targets) for inputs, targets in DATA[:1]]
    pl.run(run(tmp_path, saver(tmp_path, keep_best=1), evaluators={"val": data}))
    assert names(tmp_path) == ["8.safetensors"]
    notes = pl.checkpoint.describe(tmp_path / "8.safetensors")["notes"]
    assert (notes["metric"], notes["mode"], notes["score"]) == ("val/loss", "min", None)


def test_links_and_what_has_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl.run(run(tmp_path / "a", saver(tmp_path / "a", best="least-loss", latest=None)))
    pl.run(run(tmp_path / "b", saver(tmp_path / "b", best=None, latest=None)))
    pl.run(run(tmp_path / "c", CheckpointSaver(tmp_path / "c")))
    links = [path.name for path in sorted(tmp_path.rglob("*")) if path.is_symlink()]
    assert links == ["least-loss", "latest"]
    with pytest.raises(ArgumentError, match=r"link to their best in .* under one name"):
        run(tmp_path, saver(tmp_path), saver(tmp_path, filename="other-{batch}.safetensors"))
    for kind in ("local", "memory"):
        with place(kind) as folder:
            for name in ("best", "latest"):
                with storage_of(f"{folder}/{name}").writing() as file:
                    file.write(b"precious")
                with pytest.raises(ArgumentError, match=rf"{name}='{name}': .* is no link, and stays as it is"):
                    pl.run(run(folder))
                with storage_of(f"{folder}/{name}").open() as file:
                    assert file.read() == b"precious"
                storage_of(f"{folder}/{name}").remove()

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)  # a folder that can't have links has a file, which is replaced
    for overwrite in (False, True):
        with messages() as said:
            pl.run(run(tmp_path, saver(tmp_path / "d", overwrite=overwrite)))
        assert any("can't have links" in each for each in said)
    assert pl.best_path(tmp_path / "d") == str(
        tmp_path / "d" / (tmp_path / "d" / "best").read_text().removesuffix("\n")
    )


SAVED = st.lists(st.none() | st.floats(width=16), max_size=12).map(
    lambda scores: [Saved(str(index), index, score) for index, score in enumerate(scores)]
)


@given(SAVED, st.none() | st.integers(1, 4), st.none() | st.integers(1, 4), st.booleans())
def test_what_may_go(saved: list[Saved], last: int | None, best: int | None, largest: bool) -> None:
    gone = Retention(last, best, largest).expired(saved)
    kept = [each for each in saved if each not in gone]
    if last is None and best is None:
        assert not gone
        return
    newest = saved[-(last or 1) :]
    assert all(each in kept for each in newest)
    scores = {each.name: each.score for each in saved if each.score is not None and each.score == each.score}
    assert len(kept) <= (last or 1) + (best or 0)
    assert len([each for each in kept if each.name in scores]) >= min(best or 0, len(scores))
    # Nothing that went is better than something that stayed for its score.
    for stayed in (each for each in kept if each not in newest):
        for went in (each for each in gone if each.name in scores):
            better = scores[went.name] - scores[stayed.name]
            assert not (better > 0 if largest else better < 0)


KINDS = ("file", "sharded", "file that was moved", "sharded that was moved", "index that was moved", "dead link")


def content(folder: Path) -> dict[str, bytes | str]:
    """What is in a folder, by its path inside; links by where they lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def make(folder: RunFolder, kind: str, batch: int, archive: Path) -> Path:
    """A checkpoint of a batch, of which the archive has by now what the kind says."""
    sharded = kind.startswith(("sharded", "index"))
    path = Path(folder.path, f"ba{batch}.{'sharded' if sharded else 'safetensors'}")
    if sharded:
        path.mkdir()
        path.joinpath(INDEX).write_text(f"index {batch}")
    path.joinpath(*["part"][:sharded]).write_text(f"numbers {batch}")
    folder.add(Saved(path.name, batch, None))
    moved, target = path / INDEX if kind.startswith("index") else path, archive / f"{batch}"
    if "moved" in kind:
        moved.rename(target)
        moved.symlink_to(target)
    elif kind == "dead link":
        moved.unlink()
        moved.symlink_to(target)
    return path


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), st.integers(1, 3))
def test_what_links_lead_to_stays(tmp_path_factory: pytest.TempPathFactory, kinds: list[str], last: int) -> None:
    """Of all kinds of checkpoints that expire, moved or not: the archive is as it was, to the byte."""
    run, archive = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("archive")
    pattern = Names("ba{batch}.safetensors", ".safetensors")
    folder = RunFolder(Pattern(run, "folder"), pattern, Retention(last), Links("latest"))
    folder.settle({})
    made = [make(folder, kind, batch, archive) for batch, kind in enumerate(kinds)]
    before = content(archive)
    for batch in range(len(kinds), len(kinds) + last):
        make(folder, "file", batch, archive)
    assert content(archive) == before
    # What was the run's own, and is no link, is removed.
    assert not any(path.exists() for path, kind in zip(made, kinds, strict=True) if kind in ("file", "sharded"))


@pytest.mark.parametrize("seed", [0, 1])
def test_folders_without_an_index_stay(tmp_path: Path, seed: int) -> None:
    """Of another seed and of this one, with parts of a save under way, empty, with files of a user's, and a link."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    for batch in (1, 4, 100):
        path = folder / f"ep0-ba{batch}.sharded"
        path.mkdir(parents=True)
        (path / f"{batch:016x}-0-of-2.safetensors").write_bytes(b"a part")
        (path / f".{batch:016x}-1-of-2.safetensors.another-host-7-0123abcd-0.partial").write_bytes(b"half a part")
    (folder / "ep0-ba2.sharded").mkdir()
    (folder / "ep0-ba3.sharded").mkdir()
    (folder / "ep0-ba3.sharded" / "notes.txt").write_text("mine")
    (folder / "ep0-ba5.sharded").symlink_to(elsewhere)
    kept = [*folder.rglob("*"), elsewhere / "precious"]
    with messages() as said:
        pl.run(fit(seed=seed, callbacks=[CheckpointSaver(folder, interval="1ba", keep_last=1)]))
    assert all(os.path.lexists(path) for path in kept)
    assert sum("has no index" in each for each in said) == 6
    assert [path.name for path in folder.glob("*.safetensors")] == ["ep2-ba8.safetensors"]


@pytest.mark.parametrize("how", ["replaced", "touched", "removed"])
def test_one_that_another_run_has_replaced_stays(tmp_path: Path, how: str) -> None:
    """And one that was only touched does not; of one that is gone the log tells."""
    saver = CheckpointSaver(tmp_path, interval="1ba", keep_last=1, background=False)
    path = tmp_path / "ep0-ba2.safetensors"
    with messages() as said:
        for event, state in fit(callbacks=[saver], max_duration="3ba"):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
                if how == "replaced":
                    pl.save(state_at(2, seed=9), path)
                elif how == "touched":
                    os.utime(path, (5, 5))
                else:
                    path.unlink()
    assert names(tmp_path) == ["ep0-ba2.safetensors", "ep0-ba3.safetensors"][how != "replaced" :]
    says = {
        "replaced": "isn't removed: another run has saved in its place",
        "removed": "was removed by another process",
    }
    assert how == "touched" or any(f"{path.name} {says[how]}" in each for each in said)


def test_two_savers_of_one_folder_have_names_of_their_own(tmp_path: Path) -> None:
    often = CheckpointSaver(tmp_path, interval="1ba", keep_last=1)
    milestones = CheckpointSaver(tmp_path, interval="4ba", filename="milestone-{batch}.safetensors")
    pl.run(fit(callbacks=[often, milestones]))
    assert names(tmp_path) == ["ep2-ba8.safetensors", "milestone-4.safetensors", "milestone-8.safetensors"]


def test_earlier_names_are_the_same_functions_and_are_not_listed() -> None:
    assert (pl.best, pl.latest) == (pl.best_path, pl.latest_path)
    assert not {"best", "latest"} & {*pl.__all__, *pl.checkpoint.__all__}
