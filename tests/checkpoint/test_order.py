"""Which checkpoint of a folder is the newest, the best, and which are a run's own: by their States, and by no clock."""

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
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container, storage
from pure_loop.checkpoint.storage import storage_of
from tests.support.checkpoint_runs import DATA, fit, messages, names, place, small, state_at, trained, wide
from tests.support.streams import assert_same
from tests.support.tiers import examples

# Of one run, in the order in which it passes them.
CHAIN = (
    state_at(position=Event.AFTER_LOAD),
    state_at(position=Event.EPOCH_START),
    state_at(1, position=Event.BATCH_END),
    state_at(1, position=Event.BATCH_CHECKPOINT),
    state_at(2, position=Event.BATCH_END),
    state_at(2, 1, position=Event.EPOCH_END),
    state_at(2, 1, position=Event.EPOCH_CHECKPOINT),
    state_at(2, 1, iteration=1, position=Event.ITERATION_END),
    state_at(2, 1, iteration=1, position=Event.ITERATION_CHECKPOINT),
    state_at(2, 1, iteration=1, position=Event.EPOCH_START),
    state_at(10, 1, iteration=1, position=Event.BATCH_END),
)
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
        assert pl.latest(folder) == str(newest)
        newest.unlink()


def test_files_that_go_are_damaged_or_become_others_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = tmp_path / "older.safetensors", tmp_path / "newer.safetensors"
    pl.save(state_at(), older)
    pl.save(trained(), newer)
    verify, opened = container.verify, storage._Local.open

    def gone(file: Any, path: Any) -> Any:
        if "newer" in str(path):
            raise OSError(errno.EIO, "the disk has a hole")
        return verify(file, path)

    with monkeypatch.context() as patch, messages() as said:
        patch.setattr(container, "verify", gone)
        assert pl.latest(tmp_path) == str(older)
    assert "the disk has a hole" in said[0]

    def opening(self: Any) -> Any:
        found = opened(self)
        pl.save(pl.State.create(wide()), newer)
        return found

    with monkeypatch.context() as patch:  # what was opened is read, and not what has its name by then
        patch.setattr(storage._Local, "open", opening)
        assert_same(pl.load(newer, model=small()), trained(), "the file that was opened")
    for path in (older, newer):
        path.write_bytes(path.read_bytes()[:-1])
    with messages() as said:
        assert pl.latest(tmp_path) is None
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
    with pytest.raises(pl.ArgumentError, match=r"seed=7, and .*seed0-8\.safetensors has seed 0"):
        fit(seed=7, autoresume=tmp_path)
    for start in (pl.State.create(small(), seed=7), state_at(9, position=Event.BATCH_END)):
        with pytest.raises(pl.ArgumentError, match="is not of a run that began with the State passed"):
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
        assert pl.best(folder) is None
        for event, state in run(folder, mode=mode):
            if event is Event.BATCH_START and state.timestamp.batch == 3:
                break
        pl.run(run(folder, mode=mode, autoresume=folder))
        measured = scores(fit(eval_interval="1ba"))
        best, second, *_ = sorted(measured, key=measured.__getitem__, reverse=mode == "max")
        assert pl.best(folder) == f"{folder}/{best}.safetensors"
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
                assert pl.best(folder) == f"{folder}/{second}.safetensors"
            assert f"{best}.safetensors is passed over" in said[0]
        else:  # where there are no links
            with storage_of(f"{folder}/best").open() as file:
                assert file.read().decode() == f"{best}.safetensors\n"
            assert not storage_of(f"{folder}/latest").exists()


def test_the_best_by_what_notes_say(tmp_path: Path) -> None:
    def note(name: str, state: pl.State = state_at(), **notes: Any) -> str:  # noqa: B008
        pl.save(state, tmp_path / f"{name}.safetensors", notes=notes)
        return str(tmp_path / f"{name}.safetensors")

    note("none")
    assert pl.best(tmp_path) is None
    some = note("some", metric="val/loss", score=0.5)
    with pytest.raises(pl.ArgumentError, match='write mode="max" or mode="min"'):
        pl.best(tmp_path)
    assert pl.best(tmp_path, mode="min") == some
    note("some", metric="val/loss", mode="max", score=0.5)
    # Of equal ones that with the fewest batches, and of one batch the end of its epoch.
    note("later", state_at(9), metric="val/loss", mode="max", score=0.5)
    note("z", state_at(4, position=Event.BATCH_CHECKPOINT), metric="val/f1", mode="max", score=0.5)
    first = note("a", state_at(4, 1, position=Event.EPOCH_CHECKPOINT), metric="val/f1", mode="max", score=0.5)
    note("b", state_at(5), metric="val/f1", mode="max", score=0.5)
    assert pl.best(tmp_path, metric="val/f1") == first
    assert pl.best(tmp_path, metric="val/loss") == some
    with pytest.raises(pl.ArgumentError, match=r"has scores of val/f1, val/loss: say by which, metric='val/f1'"):
        pl.best(tmp_path)
    with pytest.raises(pl.ArgumentError, match=r"did you mean 'val/loss'\?; there are val/f1, val/loss"):
        pl.best(tmp_path, metric="val/los")
    note("least", metric="val/loss", mode="min", score=0.25)
    with pytest.raises(pl.ArgumentError, match="say both"):
        pl.best(tmp_path, metric="val/loss")


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
    with pytest.raises(pl.ArgumentError, match=r"link to their best in .* under one name"):
        run(tmp_path, saver(tmp_path), saver(tmp_path, filename="other-{batch}.safetensors"))
    for kind in ("local", "memory"):
        with place(kind) as folder:
            for name in ("best", "latest"):
                with storage_of(f"{folder}/{name}").writing() as file:
                    file.write(b"precious")
                with pytest.raises(pl.ArgumentError, match=rf"{name}='{name}': .* is no link, and stays as it is"):
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
    assert pl.best(tmp_path / "d") == str(tmp_path / "d" / (tmp_path / "d" / "best").read_text().removesuffix("\n"))
