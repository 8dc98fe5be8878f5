"""Saving beside training: two at most, no error lost, and no thread left."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import pure_loop as pl
from pure_loop import Event
from pure_loop.callbacks import CheckpointSaver
from pure_loop.checkpoint import paths
from pure_loop.errors import CheckpointWriteError
from tests.support.checkpoint_runs import fit, small


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


class TestBackground:
    def test_at_most_two_are_under_way(self, faulty: str) -> None:
        """On a slow disk training resumes, and waits where it is two ahead."""
        Faulty.ready.clear()
        ahead = []
        for event, state in fit(small(), callbacks=[CheckpointSaver(faulty, interval="1ba")]):
            if event is Event.BATCH_CHECKPOINT:
                ahead.append(state.timestamp.batch - Faulty.ended)
                assert threads()
                if len(ahead) == 2:
                    # While the third batch is trained; were its save not held back, it would be a third one.
                    threading.Timer(0.2, Faulty.ready.set).start()
        # The end of an epoch is saved as well, and counted in no batch.
        assert ahead[:2] == [1, 2]
        assert max(ahead) <= 2
        assert Faulty.ended >= 8
        assert not threads()

    def test_in_the_foreground_none_is(self, faulty: str) -> None:
        Faulty.seconds = 0.01
        saver = CheckpointSaver(faulty, interval="1ba", background=False)
        for event, _ in fit(small(), callbacks=[saver]):
            if event is Event.BATCH_CHECKPOINT:
                assert Faulty.ended == Faulty.began > 0

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("lost")])
    @pytest.mark.parametrize("failing", [1, 3])
    def test_an_error_surfaces_at_the_next_event(self, faulty: str, error: Exception, failing: int) -> None:
        name = f"ba{failing}.safetensors"
        Faulty.fail = staticmethod(lambda path: error if name in path else None)
        saver = CheckpointSaver(faulty, interval="1ba", filename="ba{batch}.safetensors")
        wrong: Any = CheckpointWriteError if isinstance(error, OSError) else type(error)
        seen: list[tuple[Event, int]] = []

        def loop() -> None:
            for event, state in fit(small(), callbacks=[saver]):
                seen.append((event, state.timestamp.batch))
                while event is Event.BATCH_CHECKPOINT and Faulty.ended + Faulty.failed < state.timestamp.batch:
                    time.sleep(0.001)
                if Faulty.failed:
                    time.sleep(0.1)  # from the disk to the thread that training reads

        with pytest.raises(wrong) as caught:
            loop()
        said = [str(caught.value), *caught.value.__notes__]
        assert any(f"{faulty}/{name}" in each for each in said)
        # Raised in the event, so that the last one seen is the one before it.
        assert seen[-1][1] <= failing + 1
        assert (Event.BATCH_CHECKPOINT, failing + 1) not in seen
        assert not threads()
        good = pl.latest(faulty)
        assert good == (None if failing == 1 else f"{faulty}/ba{failing - 1}.safetensors")
        assert not [each for each in Faulty.store if each.endswith(paths.LEFTOVER)]

    def test_errors_of_one_run_are_not_those_of_the_next(self, faulty: str) -> None:
        """Where two saves fail, one error is raised, and the other is not kept for a run that it isn't of."""
        Faulty.fail = staticmethod(lambda path: OSError(errno.ENOSPC, "full"))
        Faulty.ready.clear()  # neither of the two has failed when the loop is left
        saver = CheckpointSaver(faulty, interval="1ba")
        stream = fit(small(), callbacks=[saver])
        assert any(event is Event.BATCH_START and state.timestamp.batch == 2 for event, state in stream)
        Faulty.ready.set()
        with pytest.raises(CheckpointWriteError):
            stream.close()
        assert Faulty.began == 2
        Faulty.fail = staticmethod(lambda path: None)
        pl.run(fit(small(), callbacks=[saver]))

    @pytest.mark.parametrize("leave", ["end", "break", "raise", "close", "callback"])
    def test_no_thread_is_left(self, faulty: str, leave: str) -> None:
        """And what was handed over before is saved, however the stream is left."""
        Faulty.seconds = 0.02

        def raises(event: Event, state: pl.State) -> None:
            if leave == "callback" and state.timestamp.batch == 3:
                raise KeyError

        def loop() -> None:
            stream = fit(small(), callbacks=[CheckpointSaver(faulty, interval="1ba"), raises])
            for event, state in stream:
                if event is Event.BATCH_START and state.timestamp.batch == 3:
                    if leave == "close":
                        stream.close()
                    if leave == "raise":
                        raise KeyError
                    if leave == "break":
                        return

        with contextlib.suppress(KeyError):
            loop()
        assert not threads()
        assert Faulty.ended == Faulty.began >= 2
        newest = pl.latest(faulty)
        assert newest is not None
        assert pl.load(newest, model=small()).timestamp.batch == {"end": 8, "callback": 2}.get(leave, 3)
