"""Which checkpoint of a folder is the newest, and which are a run's own: by what their States say, and by no clock."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from tests.support.checkpoint_runs import fit, messages, small
from tests.support.hostile import rewritten
from tests.support.tiers import examples


def at(batch: int = 0, epoch: int = 0, position: Event | None = None, seed: int = 0, **fields: Any) -> pl.State:
    """A State that has finished so much."""
    now = pl.Timestamp(batch=batch, epoch=epoch, sample=4 * batch, **fields)
    return pl.State.create(small(), seed=seed).replace(timestamp=now, event=position, position=position)


def dated(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


class TestNewest:
    """The State that is furthest on.

    Tried besides: a clock set back between two saves and before the first; dates of files in every order; both at
    once; boundaries of one batch; an epoch's start after another's end; iterations; equal States, whose names decide.
    """

    # Of one run, in the order in which it passes them.
    CHAIN = (
        at(position=Event.AFTER_LOAD),
        at(position=Event.EPOCH_START),
        at(1, position=Event.BATCH_END),
        at(1, position=Event.BATCH_CHECKPOINT),
        at(2, position=Event.BATCH_END),
        at(2, 1, position=Event.EPOCH_END),
        at(2, 1, position=Event.EPOCH_CHECKPOINT),
        at(2, 1, iteration=1, position=Event.ITERATION_END),
        at(2, 1, iteration=1, position=Event.ITERATION_CHECKPOINT),
        at(2, 1, iteration=1, position=Event.EPOCH_START),
        at(10, 1, iteration=1, position=Event.BATCH_END),
    )

    @examples(15, 300)
    @given(
        chosen=st.sets(st.integers(0, len(CHAIN) - 1), min_size=2, max_size=4),
        data=st.data(),
    )
    def test_it_is_the_furthest_on_whatever_clocks_say(
        self, tmp_path_factory: pytest.TempPathFactory, chosen: set[int], data: st.DataObject
    ) -> None:
        folder = tmp_path_factory.mktemp("run")
        names = data.draw(st.permutations("abcd"))
        clock = st.integers(1, 10**18)
        paths = {}
        with pytest.MonkeyPatch.context() as patch:
            for number, name in zip(data.draw(st.permutations(sorted(chosen))), names, strict=False):
                now = data.draw(clock)
                patch.setattr(time, "time_ns", lambda now=now: now)
                paths[number] = folder / f"{name}.safetensors"
                pl.save(self.CHAIN[number], paths[number])
        for path in paths.values():
            dated(path, data.draw(clock) / 1e9)
        while paths:
            assert pl.latest(folder) == str(paths[max(paths)])
            paths.pop(max(paths)).unlink()

    def test_equal_states_are_told_apart_by_their_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("b", "c", "a"):
            pl.save(at(3), tmp_path / f"{name}.safetensors")
        assert pl.latest(tmp_path) == str(tmp_path / "c.safetensors")

    def test_parts_and_files_are_one_order(self, sharded_copy: str) -> None:
        """Folders of batches 1 and 2, and files of 1 and 3."""
        from tests.support.sharding import network

        state = pl.State.create(network(), seed=3)
        pl.save(state.count_batch(samples=4), Path(sharded_copy) / "z.safetensors")
        assert str(pl.latest(sharded_copy)).endswith("newer.sharded")
        for _ in range(3):
            state = state.count_batch(samples=4)
        pl.save(state, Path(sharded_copy) / "a.safetensors")
        assert str(pl.latest(sharded_copy)).endswith("a.safetensors")


class TestRuns:
    """Several runs in one folder: autoresume takes the furthest on of the run that is resumed."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for seed, last in ((0, "8ba"), (1, "5ba")):
            saver = CheckpointSaver(tmp_path, interval="1ba", filename=f"seed{seed}-{{batch}}.safetensors")
            pl.run(fit(small(), seed=seed, callbacks=[saver], max_duration=last))
        return tmp_path

    def starts_at(self, stream: Any) -> tuple[int, int]:
        state = next(state for event, state in stream if event is Event.FIT_START)
        stream.close()
        return state.seed, state.timestamp.batch

    def test_by_the_seed(self, folder: Path) -> None:
        with messages() as said:
            assert self.starts_at(fit(small(), seed=1, autoresume=folder)) == (1, 5)
        assert any("seed0-8.safetensors is passed over: it is of another run, with seed 0" in each for each in said)

    def test_without_a_seed(self, folder: Path) -> None:
        assert self.starts_at(fit(small(), autoresume=folder)) == (0, 8)

    def test_by_a_state(self, folder: Path) -> None:
        fresh = pl.State.create(small(), seed=1)
        assert self.starts_at(fit(fresh, autoresume=folder)) == (1, 5)
        kept = pl.load(folder / "seed1-3.safetensors", model=small())
        assert self.starts_at(fit(kept, autoresume=folder)) == (1, 5)

    def test_of_none_of_them(self, folder: Path) -> None:
        with pytest.raises(pl.ArgumentError, match=r"seed=7, and .*seed0-8\.safetensors has seed 0"):
            fit(small(), seed=7, autoresume=folder)
        for start in (pl.State.create(small(), seed=7), at(9, position=Event.BATCH_END)):
            with pytest.raises(pl.ArgumentError, match="is not of a run that began with the State passed"):
                fit(start, autoresume=folder)


class TestOwn:
    """A saver removes what is provably its run's, and nothing else.

    Tried besides: a folder without an index of another seed and of this one, further on and not, empty, with parts of
    a save under way, with files of a user's; a link; a file that another run has saved in the place of this run's.
    """

    def strangers(self, folder: Path) -> list[Path]:
        for batch in (1, 4, 100):
            path = folder / f"ep0-ba{batch}.sharded"
            path.mkdir()
            (path / f"{batch:016x}-0-of-2.safetensors").write_bytes(b"a part")
            (path / f".{batch:016x}-1-of-2.safetensors.another-host-7-0123abcd-0.partial").write_bytes(b"half a part")
        (folder / "ep0-ba2.sharded").mkdir()
        (folder / "ep0-ba3.sharded").mkdir()
        (folder / "ep0-ba3.sharded" / "notes.txt").write_text("mine")
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "precious").write_text("mine")
        (folder / "ep0-ba5.sharded").symlink_to(elsewhere)
        return [*sorted(folder.rglob("*")), elsewhere / "precious"]

    @pytest.mark.parametrize("seed", [0, 1])
    def test_folders_without_an_index_stay(self, tmp_path: Path, seed: int) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        kept = self.strangers(folder)
        with messages() as said:
            pl.run(fit(small(), seed=seed, callbacks=[CheckpointSaver(folder, interval="1ba", keep_last=1)]))
        assert all(os.path.lexists(path) for path in kept)
        assert sum("has no index" in each for each in said) == 6
        assert sorted(path.name for path in folder.glob("*.safetensors")) == ["ep2-ba8.safetensors"]

    def test_one_in_whose_place_another_run_has_saved_stays(self, tmp_path: Path) -> None:
        saver = CheckpointSaver(tmp_path, interval="1ba", keep_last=1, background=False)
        with messages() as said:
            for event, state in fit(small(), callbacks=[saver], max_duration="3ba"):
                if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
                    pl.save(at(2, seed=9), tmp_path / "ep0-ba2.safetensors")
        assert {path.name for path in tmp_path.glob("*.safetensors")} == {"ep0-ba2.safetensors", "ep0-ba3.safetensors"}
        assert any("ep0-ba2.safetensors isn't removed: another run has saved in its place" in each for each in said)

    def test_one_that_was_only_touched_is_removed(self, tmp_path: Path) -> None:
        saver = CheckpointSaver(tmp_path, interval="1ba", keep_last=1, background=False)
        for event, state in fit(small(), callbacks=[saver], max_duration="3ba"):
            if event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 2:
                dated(tmp_path / "ep0-ba2.safetensors", 5)
        assert [path.name for path in tmp_path.glob("*.safetensors")] == ["ep0-ba3.safetensors"]


NO_COUNTS = {
    "infinite": "1e999",
    "infinite below": "-1e999",
    "Infinity": "Infinity",
    "NaN": "NaN",
    "beyond all": "1" + "0" * 400,
    "beyond any reader": "1" + "0" * 5000,
    "below zero": "-1",
    "a bool": "true",
    "a float": "1.5",
    "a float that is whole": "1.0",
    "a text": '"1"',
    "null": "null",
    "a list": "[1]",
    "our infinity": '{"float": "inf"}',
    "our NaN": '{"float": "nan"}',
    "63 bits and one": str(1 << 63),
}
COUNTS = (
    *(("saved_at",), ("format",)),
    *(
        ("fields", stamp, "fields", name)
        for stamp in ("timestamp", "previous_timestamp")
        for name in ("epoch", "batch", "sample", "token", "batch_in_epoch", "iteration", "token_in_iteration")
    ),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and one that is further on, to be changed."""
    folder = tmp_path_factory.mktemp("numbers")
    for number, name in ((1, "good"), (2, "bad")):
        pl.save(at(number, position=Event.BATCH_END), folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def content(pair: Path) -> bytes:
    return (pair / "bad.safetensors").read_bytes()


class TestNumbers:
    """Each number of a description as one that it can't be, with a digest that is right."""

    @pytest.mark.parametrize("number", NO_COUNTS)
    def test_counts(self, pair: Path, content: bytes, number: str) -> None:
        for path in COUNTS:
            if path != ("saved_at",) or number not in ("below zero", "63 bits and one"):  # clocks may be wrong
                self.refused(pair, content, path, NO_COUNTS[number])

    @pytest.mark.parametrize("number", ["infinite", "NaN", "beyond all", "a bool", "a text", "null", "our infinity"])
    def test_seconds_and_durations(self, pair: Path, content: bytes, number: str) -> None:
        for name in ("total_seconds", "epoch_seconds", "batch_seconds"):
            self.refused(pair, content, ("fields", "timestamp", "fields", name), NO_COUNTS[number])
        time = '{"record":"pure_loop.Time","fields":{"value":%s,"unit":{"enum":["pure_loop.TimeUnit","EPOCH"]}}}'
        self.refused(pair, content, ("fields", "timestamp", "fields", "max_duration"), time % NO_COUNTS[number])

    @pytest.mark.parametrize("number", ["infinite", "NaN", "a bool", "a float", "a text", "null", "our infinity"])
    def test_seeds(self, pair: Path, content: bytes, number: str) -> None:
        self.refused(pair, content, ("fields", "seed"), NO_COUNTS[number])

    @pytest.mark.parametrize(
        "event", ["null1", '{"enum":["pure_loop.Event","NO"]}', "3", '"BATCH_END"', '{"enum":"xB"}']
    )
    def test_events(self, pair: Path, content: bytes, event: str) -> None:
        for name in ("event", "position"):
            self.refused(pair, content, ("fields", name), event)

    def test_a_position_that_is_no_boundary(self, pair: Path, content: bytes) -> None:
        self.refused(pair, content, ("fields", "position"), '{"enum":["pure_loop.Event","BEFORE_FORWARD"]}')

    @examples(10, 100)
    @given(year=st.integers(-10_000, 100_000), overflows=st.booleans())
    def test_any_clock_of_the_machine(
        self, tmp_path_factory: pytest.TempPathFactory, year: int, overflows: bool
    ) -> None:
        """Before 1970, and after 2262, where nanoseconds no longer fit into 64 bits and Python raises."""

        def now() -> int:
            if overflows:
                raise OverflowError("timestamp out of range for platform time_t")
            return (year - 1970) * 31_556_952 * 10**9

        path = tmp_path_factory.mktemp("clock") / "x.safetensors"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time_ns", now)
            pl.save(at(3), path)
        assert pl.load(path, model=small()).timestamp.batch == 3
        assert pl.latest(path.parent) == str(path)
        if not overflows:
            assert pl.checkpoint.describe(path)["saved_at"] == pytest.approx((year - 1970) * 31_556_952)

    def refused(self, pair: Path, content: bytes, path: tuple[str, ...], number: str) -> None:
        bad = pair / "bad.safetensors"
        bad.write_bytes(rewritten(content, path, number))
        with pytest.raises(pl.CheckpointError) as caught:
            pl.load(bad, model=small())
        assert len(str(caught.value)) < 1000
        with pytest.raises(pl.CheckpointError):
            pl.checkpoint.describe(bad)
        with messages() as said:
            assert pl.latest(pair) == str(pair / "good.safetensors")
        assert any(str(bad) in each for each in said)

    def test_autoresume_passes_over_it(self, pair: Path, content: bytes) -> None:
        for number in ("1e999", "-1", "NaN", "true", "1" + "0" * 400):
            (pair / "bad.safetensors").write_bytes(
                rewritten(content, ("fields", "timestamp", "fields", "batch"), number)
            )
            event, state = next(iter(fit(small(), autoresume=pair, callbacks=[])))
            assert (event, state.timestamp.batch) == (Event.INIT, 0)
            stream = fit(small(), autoresume=pair)
            assert next(state.timestamp.batch for event, state in stream if event is Event.AFTER_LOAD) == 1
            stream.close()

    def test_a_large_seed_is_a_seed(self, tmp_path: Path) -> None:
        state = at(1, seed=-(10**400))
        pl.save(state, tmp_path / "x.safetensors")
        assert pl.load(tmp_path / "x.safetensors", model=small()).seed == -(10**400)

    def test_an_integer_that_no_file_can_hold(self, tmp_path: Path) -> None:
        with pytest.raises(
            pl.ArgumentTypeError, match=r"state\.algorithm_state\.x is an integer of more than 4300 digits"
        ):
            pl.save(at(1).remember("x", 10**5000), tmp_path / "x.safetensors")
        pl.save(at(1).remember("x", torch.zeros(1)), tmp_path / "x.safetensors")
        assert json.dumps(pl.checkpoint.describe(tmp_path / "x.safetensors")["notes"]) == "{}"
