"""CheckpointSaver beside training: when it saves, what autoresume takes, on a slow disk and on one that fails."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import paths
from pure_loop.errors import CheckpointWriteError
from tests.support.checkpoint_runs import fit, names, small
from tests.support.streams import assert_same, frozen_copy

INTERVALS: dict[Any, list[int]] = {
    "1ep": [4, 8, 12],
    "2ep": [8, 12],
    "5ba": [5, 10, 12],
    "20sp": [5, 10, 12],
    "0.25dur": [3, 6, 9, 12],
    0: [12],
    (lambda state: state.timestamp.batch == 7): [7, 12],
}


def test_it_saves_at_its_interval_and_at_the_end(tmp_path: Path) -> None:
    for number, (interval, batches) in enumerate(INTERVALS.items()):
        folder = tmp_path / str(number)
        saver = CheckpointSaver(folder, interval=interval, filename="{batch:02}.safetensors", latest=None)
        pl.run(fit(max_duration="3ep", callbacks=saver))
        assert [path.name for path in sorted(folder.iterdir())] == [f"{batch:02}.safetensors" for batch in batches]


@pytest.mark.parametrize("interval", [*INTERVALS, "1ba", "10ba"])
@pytest.mark.parametrize("duration", ["3ep", "12ba", "10ba"])
def test_a_batch_has_one_checkpoint_and_that_is_the_later(interval: Any, duration: str, tmp_path: Path) -> None:
    """Of the end of a batch and that of its epoch, also where the same interval, or the end of the run, is at both."""
    pl.run(fit(max_duration=duration, callbacks=CheckpointSaver(tmp_path, interval=interval)))
    saved = sorted((name.removesuffix(".safetensors").split("-") for name in names(tmp_path)), key=lambda pair: pair[1])
    batches = [int(batch[2:]) for _, batch in saved]
    assert len({*batches}) == len(batches)
    assert max(batches) == (10 if duration == "10ba" else 12)
    assert f"ep{max(batches) // 4}-ba{max(batches)}.safetensors" in names(tmp_path)


class Faulty(MemoryFileSystem):  # type: ignore[misc]
    """A disk in memory that is slow, and fails when it is told."""

    protocol = "faulty"
    seconds = 0.0
    fail: Callable[[str], BaseException | None] = staticmethod(lambda path: None)
    ready = threading.Event()  # a save waits for it
    began = 0
    failed = 0
    ended = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and "probe" not in path:
            Faulty.began += 1
            assert Faulty.ready.wait(60)
            time.sleep(self.seconds)
            error = Faulty.fail(path)
            if error is not None:
                Faulty.failed += 1
                raise error
        return super()._open(path, mode, **options)

    def mv(self, *args: Any, **options: Any) -> None:
        super().mv(*args, **options)
        if "probe" not in str(args):
            Faulty.ended += 1


@pytest.fixture
def faulty() -> Iterator[str]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.began = Faulty.failed = Faulty.ended = 0
    Faulty.ready.set()
    try:
        yield "faulty://run"
    finally:
        Faulty.seconds, Faulty.fail = 0.0, staticmethod(lambda path: None)
        Faulty.ready.set()
        Faulty.store.clear()
        Faulty.pseudo_dirs[:] = [""]


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("pure_loop")]


@pytest.mark.parametrize("donate", [True, False])
def test_on_a_slow_disk_training_goes_on_two_saves_ahead(faulty: str, donate: bool) -> None:
    """And then it waits; memory that is being written is not reused meanwhile."""
    Faulty.ready.clear()
    ahead, wanted = [], {}
    for event, state in fit(donate=False):
        if event is Event.BATCH_CHECKPOINT:
            wanted[state.timestamp.batch] = frozen_copy(state)
    saver = CheckpointSaver(faulty, interval="1ba", filename="{batch}.safetensors")
    for event, state in fit(callbacks=[saver], donate=donate):
        if event is Event.BATCH_CHECKPOINT:
            ahead.append(state.timestamp.batch - Faulty.ended)
            assert threads()
            if len(ahead) == 2:
                # While the third batch is trained; were its save not held back, it would be a third one.
                threading.Timer(0.2, Faulty.ready.set).start()
    before = Faulty.began
    for event, _ in fit(callbacks=[CheckpointSaver(f"{faulty}/2", interval="1ba", background=False)]):
        assert event is not Event.BATCH_CHECKPOINT or Faulty.ended == Faulty.began > before, "none is under way"
    # The end of an epoch is saved as well, and counted in no batch.
    assert ahead[:2] == [1, 2]
    assert max(ahead) <= 2
    assert Faulty.ended >= 8
    assert not threads()
    for batch in (1, 2, 3, 5, 6, 7):
        found = pl.load(f"{faulty}/{batch}.safetensors", model=small())
        times = ("total_seconds", "epoch_seconds", "batch_seconds")
        assert_same(
            {name: leaf for name, leaf in frozen_copy(found).items() if not name.endswith(times)}, wanted[batch], faulty
        )


@pytest.mark.parametrize(
    ("error", "failing"), [(OSError(errno.ENOSPC, "full"), 1), (RuntimeError("lost"), 3)], ids=["full", "lost"]
)
def test_an_error_surfaces_at_the_next_event(faulty: str, error: Exception, failing: int) -> None:
    name = f"ba{failing}.safetensors"
    Faulty.fail = staticmethod(lambda path: error if name in path else None)
    saver = CheckpointSaver(faulty, interval="1ba", filename="ba{batch}.safetensors")
    wrong: Any = CheckpointWriteError if isinstance(error, OSError) else type(error)
    seen: list[tuple[Event, int]] = []

    def loop() -> None:
        for event, state in fit(callbacks=[saver]):
            seen.append((event, state.timestamp.batch))
            while event is Event.BATCH_CHECKPOINT and Faulty.ended + Faulty.failed < state.timestamp.batch:
                time.sleep(0.001)
            if Faulty.failed:
                time.sleep(0.1)  # from the disk to the thread that training reads

    with pytest.raises(wrong) as caught:
        loop()
    assert any(f"{faulty}/{name}" in each for each in [str(caught.value), *caught.value.__notes__])
    assert wrong is RuntimeError or "The disk is full" in str(caught.value)
    # Raised in the event, so that the last one seen is the one before it.
    assert seen[-1][1] <= failing + 1
    assert (Event.BATCH_CHECKPOINT, failing + 1) not in seen
    assert not threads()
    assert pl.latest_path(faulty) == (None if failing == 1 else f"{faulty}/ba{failing - 1}.safetensors")
    assert not [each for each in Faulty.store if each.endswith(paths.LEFTOVER)]


def test_errors_of_one_run_are_not_those_of_the_next(faulty: str) -> None:
    """Where two saves fail, one error is raised, and the other is not kept for a run that it isn't of."""
    Faulty.fail = staticmethod(lambda path: OSError(errno.ENOSPC, "full"))
    Faulty.ready.clear()  # neither of the two has failed when the loop is left
    saver = CheckpointSaver(faulty, interval="1ba")
    stream = fit(callbacks=[saver])
    assert any(event is Event.BATCH_START and state.timestamp.batch == 2 for event, state in stream)
    Faulty.ready.set()
    with pytest.raises(CheckpointWriteError):
        stream.close()
    assert Faulty.began == 2
    Faulty.fail = staticmethod(lambda path: None)
    pl.run(fit(callbacks=[saver]))


def test_what_autoresume_saves_to(tmp_path: Path) -> None:
    pl.run(fit(autoresume=tmp_path / "a", max_duration="3ep"))
    assert names(tmp_path / "a") == ["ep2-ba8.safetensors", "ep3-ba12.safetensors"]  # the last two
    pl.run(fit(callbacks=CheckpointSaver(tmp_path / "b", interval="2ep"), autoresume=str(tmp_path / "b") + "/"))
    assert names(tmp_path / "b") == ["ep2-ba8.safetensors"]
    pl.run(fit(callbacks=CheckpointSaver(tmp_path / "c", interval="2ep"), autoresume=tmp_path / "d"))
    assert len(names(tmp_path / "d")) == 2
    # A saver in the place of its folder may stand among the callbacks, too, and it serves one call after another.
    saver = CheckpointSaver(tmp_path / "e", interval="1ba", keep_last=3)
    pl.run(fit(autoresume=saver, max_duration="6ba"))
    assert names(tmp_path / "e") == ["ep0-ba4.safetensors", "ep1-ba5.safetensors", "ep1-ba6.safetensors"]
    assert [s.timestamp.batch for event, s in fit(autoresume=saver) if event is Event.FIT_START] == [6]
    for callbacks in ([saver], saver):
        last = pl.run(fit(autoresume=saver, callbacks=callbacks, max_duration="3ep"))
        assert len(names(tmp_path / "e")) == 3
    assert_same(last, pl.run(fit(max_duration="3ep")), "resumed")

    class Own(pl.Callback):
        """Saves where training ends."""

        folders: list[Any] = []  # noqa: RUF012

        def saves_to(self, folder: Any) -> bool:
            return folder == tmp_path / "f"

        def bind(self, run: Any) -> None:
            self.folders.append(run.autoresume)

        def fit_end(self, state: pl.State, logger: Any) -> None:
            pl.save(state, tmp_path / "f" / "own.safetensors")

    pl.run(fit(callbacks=Own(), autoresume=tmp_path / "f"))
    pl.run(fit(callbacks=Own()))
    assert names(tmp_path / "f") == ["own.safetensors"]
    assert Own.folders == [tmp_path / "f", None]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    def breaks(state: pl.State) -> pl.State:
        return state.replace(loss=state.loss * float("nan")) if state.timestamp.batch == 1 else state

    with pytest.raises(pl.errors.NonFiniteError):
        pl.run(fit(algorithms=[pl.Algorithm("nan", {Event.AFTER_LOSS: breaks})], autoresume=tmp_path))
    assert names(tmp_path) == []
