"""A saver removes what is provably its run's and need not stay, and nothing else; of a link the link alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.names import Pattern
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint.index import INDEX
from pure_loop.checkpoint.paths import Names
from pure_loop.checkpoint.run_folder import Links, Retention, RunFolder, Saved
from tests.support.checkpoint_runs import fit, messages, names, state_at

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
