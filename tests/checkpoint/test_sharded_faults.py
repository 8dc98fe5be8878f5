"""Ranks that fail, are told to stop, or are killed while they save a State in parts."""

from __future__ import annotations

import os
import signal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import container
from pure_loop.checkpoint.index import INDEX
from pure_loop.testing.ranks import RankError
from tests.support.sharding import last, network, pool, train, with_everything
from tests.support.streams import assert_same


def outcome(run):
    """What a rank raised, with notes; "" where it came to its end."""
    try:
        run()
    except BaseException as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def fails_on(rank, error, skip):
    """container.write of this rank raises, after so many that go well."""
    real, left = container.write, [skip]

    def failing(file, tensors, metadata):
        left[0] -= 1
        if left[0] < 0:
            file.write(b"half")
            raise error
        return real(file, tensors, metadata)

    return patch.object(container, "write", failing if dist.get_rank() == rank else real)


@pytest.mark.slow  # real ranks, which end
@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_ends_the_run_and_the_last_checkpoint_stays(tmp_path, background):
    folder = str(tmp_path)

    def program(rank):
        saver = CheckpointSaver(folder, interval="1ba", background=background)
        with fails_on(1, OSError(28, "No space left on device"), skip=2):
            return outcome(lambda: last(train(network(), parallel="shard", callbacks=saver)))

    first, second = pool().run(program)
    assert "DistributedError" in first
    assert "rank 1 raised CheckpointWriteError" in first
    assert "CheckpointWriteError" in second
    assert "disk is full" in second
    for text in (first, second):
        assert "ep0-ba3.sharded" in text
    assert pl.latest(folder) == os.path.join(folder, "ep0-ba2.sharded")


def test_a_rank_that_cannot_complete_tells_the_others(tmp_path):
    path = str(tmp_path / "a.sharded")

    def program(rank):
        def run():
            for event, state in train(network(), parallel="shard"):
                if event is Event.BATCH_CHECKPOINT:
                    # Rank 0 writes its part, what is in no parts, and then the index.
                    with fails_on(0, OSError(28, "No space left on device"), skip=2):
                        pl.save(state, path)

        return outcome(run)

    first, second = pool().run(program)
    assert "CheckpointWriteError" in first
    assert "raised on rank 0 of 2" in first
    assert "DistributedError" in second
    assert "rank 0 raised CheckpointWriteError" in second
    assert path in second
    assert not os.path.exists(os.path.join(path, INDEX))


def test_what_differs_between_ranks_is_refused(tmp_path):
    def program(rank):
        def one_each(path, remembered=0):
            for event, state in train(network(), parallel="shard"):
                if event is Event.BATCH_CHECKPOINT:
                    pl.save(state.remember("mine", torch.tensor(remembered)), path)

        return [
            outcome(lambda: one_each(str(tmp_path / "a.sharded"), remembered=rank)),
            outcome(lambda: one_each(str(tmp_path / f"{rank}.sharded"))),
        ]

    (different, paths), (different_1, paths_1) = pool().run(program)
    for text in (different, different_1):
        assert "state.algorithm_state.mine differs between rank 1 and rank 0" in text
    for text in (paths, paths_1):
        assert "the ranks save different ones: rank 0 saves" in text
    assert pl.latest(str(tmp_path)) is None


def goes_on(folder):
    def program(rank):
        found = last(with_everything(parallel="shard", autoresume=folder))
        return found, last(with_everything(parallel="shard"))

    for found, wanted in pool().run(program):
        assert_same(found, wanted, "gone on")


@pytest.mark.slow  # real ranks, which are signalled
@pytest.mark.parametrize("who", [(1,), pytest.param((0, 1), marks=pytest.mark.thorough)])
def test_a_signal_stops_all_ranks_at_the_same_boundary(tmp_path, who):
    folder = str(tmp_path)

    def stopped(rank):
        def run():
            saver = CheckpointSaver(folder, interval="10ep")
            for event, state in with_everything(parallel="shard", callbacks=saver):
                if rank in who and event is Event.BATCH_START and state.timestamp.batch == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

        return outcome(run)

    assert pool().run(stopped) == [f"SystemExit: {128 + signal.SIGTERM}"] * 2
    # The boundary after the one at which the others were told.
    assert [name for name in os.listdir(folder) if name.endswith(".sharded")] == ["ep0-ba4.sharded"]

    goes_on(folder)


def test_folders_are_kept_and_removed_as_files_are(tmp_path):
    folder = str(tmp_path)
    torn = tmp_path / "ep9-ba99.sharded"
    torn.mkdir()
    (torn / f"{'0' * 16}-0-of-2.safetensors").write_bytes(b"half")
    mine = tmp_path / "mine.sharded"
    mine.mkdir()

    def program(rank):
        saver = CheckpointSaver(folder, interval="1ba", keep_last=2)
        return last(train(network(), parallel="shard", callbacks=saver))

    pool().run(program)
    # Of the last batch that of its epoch's end is enough.
    # A folder without an index may be another run's, which is saving now.
    names = {"ep1-ba7.sharded", "ep2-ba8.sharded", "latest", "mine.sharded", torn.name}
    assert set(os.listdir(folder)) == names
    assert len(list(torn.iterdir())) == 1
    # A run in one process resumes from there, and takes its place.
    last(train(network(), max_duration="3ep", autoresume=folder, callbacks=CheckpointSaver(folder, keep_last=1)))
    assert set(os.listdir(folder)) == {"ep3-ba12.safetensors", "latest", "mine.sharded", torn.name}


def test_a_checkpoint_that_was_moved_and_linked_is_neither_removed_nor_overwritten(tmp_path):
    """Neither by retention nor by a save in its place, as where a run is trained again from before it."""
    archive, folder = tmp_path / "archive", tmp_path / "run"
    archive.mkdir()

    def content():
        return {str(path.relative_to(archive)): path.read_bytes() for path in archive.rglob("*") if path.is_file()}

    def save():
        def program(rank):
            pl.save(pl.run(train(network(), parallel="shard", max_duration="1ba")), folder / "ba1.sharded")

        pool().run(program)

    save()
    (folder / "ba1.sharded").rename(archive / "ba1.sharded")
    (folder / "ba1.sharded").symlink_to(archive / "ba1.sharded")
    before = content()
    save()
    assert content() == before
    assert not (folder / "ba1.sharded").is_symlink()
    assert pl.load(folder / "ba1.sharded", model=network()).timestamp.batch == 1


def test_ranks_have_one_folder_and_a_second_run_in_it_is_refused_on_all(tmp_path):
    """Its name and its second are the first rank's, also where no name was passed."""

    def program(rank):
        saver = CheckpointSaver(str(tmp_path / "{run_name}-{start}-{rank}"), filename="{run_name}-{epoch}.safetensors")
        pl.run(train(network(), parallel="shard", callbacks=saver))
        again = CheckpointSaver(saver.place, filename="{epoch}.safetensors")
        pl.run(train(network(), parallel="shard", callbacks=again))
        third = CheckpointSaver(saver.place, filename="{epoch}.safetensors")
        return saver.place, outcome(lambda: pl.run(train(network(), parallel="shard", callbacks=third)))

    (place, first), (other, second) = pool().run(program)
    assert place == other
    assert place.endswith("-0")
    name = os.path.basename(place).rsplit("-", 2)[0]
    kinds = {"latest", "1.sharded", "2.sharded", f"{name}-1.sharded", f"{name}-2.sharded"}
    assert set(os.listdir(place)) == kinds
    assert "RunExistsError" in first
    assert "1.sharded" in first
    assert "RunExistsError" in second


def dies_at(moment):
    """Kills this process at one of the moments of its saving: before a piece is written, flushed, or renamed."""
    left = [moment]

    def counted(real):
        def function(*arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return function

    patches = (container, "_put"), (os, "fsync"), (os, "replace")
    for owner, name in patches:
        setattr(owner, name, counted(getattr(owner, name)))


def kill_and_go_on(folder, rank, moment):
    def killed(here):
        if here == rank:
            dies_at(moment)
        last(with_everything(parallel="shard", autoresume=folder, callbacks=CheckpointSaver(folder, interval="1ba")))

    with pytest.raises(RankError, match="SIGKILL"):
        pool().run(killed)
    return pl.latest(folder)


@pytest.mark.slow  # real ranks, which are killed
def test_after_a_kill_in_the_middle_of_a_save_the_last_complete_one_resumes(tmp_path):
    folder = str(tmp_path)
    # The first save is complete; in the second rank 1 dies between pieces of its part.
    found = kill_and_go_on(folder, 1, 50)
    assert found == os.path.join(folder, "ep0-ba1.sharded")
    assert os.path.exists(os.path.join(folder, "ep0-ba2.sharded"))
    goes_on(folder)


@pytest.mark.thorough  # real ranks, which are killed again and again
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", range(0, 60, 7))
def test_after_a_kill_at_any_moment(tmp_path, rank, moment):
    folder = str(tmp_path)
    kill_and_go_on(folder, rank, moment)
    goes_on(folder)


def test_a_pool_is_left_as_it_was():
    assert pool().run(lambda rank: rank) == [0, 1]
