"""RemoteUploader: whole files arrive, failures are tried again, and what is missing is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loggers import JSONLinesLogger, RemoteUploader
from tests.loggers.records import stream

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")


class Flaky(memory.MemoryFileSystem):  # type: ignore[misc,name-defined]
    """A file system that fails so many times, or waits."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    failures = 0
    gate: threading.Event | None = None

    def _open(self, *args: Any, **kwargs: Any) -> Any:
        if Flaky.gate is not None:
            Flaky.gate.wait()
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("the network is down")
        return super()._open(*args, **kwargs)


@pytest.fixture
def flaky() -> Iterator[Any]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures, Flaky.gate = 0, None
    yield fsspec.filesystem("flaky")
    if Flaky.gate is not None:
        Flaky.gate.set()


def written(folder: Path, name: str = "a.txt", text: str = "written") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


class Writes(pl.Callback):
    """Records a file at the end of each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def epoch_end(self, state: pl.State, logger: Any) -> None:
        name = f"epoch-{state.timestamp.epoch}.txt"
        logger.log_file(name, written(self.folder, name, name))


def test_files_that_are_recorded_arrive(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote/{{run_name}}"
    pl.run(stream([RemoteUploader(url)], callbacks=[Writes(tmp_path)], run_name="first"))
    found = {path.name: path.read_text() for path in (tmp_path / "remote" / "first").iterdir()}
    assert found == {"epoch-1.txt": "epoch-1.txt", "epoch-2.txt": "epoch-2.txt"}


def test_the_file_of_another_logger_arrives_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loggers = [RemoteUploader(f"file://{tmp_path}/remote", files=[path]), JSONLinesLogger(path)]
    pl.run(stream(loggers))
    assert (tmp_path / "remote" / "metrics.jsonl").read_bytes() == path.read_bytes()
    assert "BATCH_END" in path.read_text()


def test_an_upload_that_fails_is_tried_again(tmp_path: Path, flaky: Any) -> None:
    uploader = RemoteUploader("flaky://bucket", retries=3, wait=0)
    Flaky.failures = 3
    uploader.log_file("a.txt", written(tmp_path))
    uploader.close()
    assert flaky.cat("flaky://bucket/a.txt") == b"written"


def test_what_is_missing_is_named_when_the_stream_closes(tmp_path: Path, flaky: Any) -> None:
    Flaky.failures = 2
    uploader = RemoteUploader("flaky://bucket", retries=1, wait=0)
    with pytest.raises(
        OSError, match=r"1 of the files are not at flaky://bucket\. epoch-1.txt: .*network is down.*2 tries"
    ):
        pl.run(stream([uploader], callbacks=[Writes(tmp_path)]))


def test_where_training_raises_what_is_missing_is_a_note(tmp_path: Path, flaky: Any) -> None:
    Flaky.failures = 9

    def fail(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.BATCH_START and state.timestamp.batch == 7:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose") as raised:
        pl.run(stream([RemoteUploader("flaky://bucket", retries=0)], callbacks=[Writes(tmp_path), fail]))
    assert any("epoch-1.txt" in note for note in raised.value.__notes__)


def test_closing_waits_no_longer_than_it_was_told(tmp_path: Path, flaky: Any) -> None:
    Flaky.gate = threading.Event()
    uploader = RemoteUploader("flaky://bucket", timeout=0.05)
    uploader.log_file("a.txt", written(tmp_path))
    with pytest.raises(OSError, match=r"a\.txt: not uploaded within 0\.05 seconds"):
        uploader.close()


def test_training_does_not_wait_for_an_upload(tmp_path: Path, flaky: Any) -> None:
    Flaky.gate = threading.Event()
    ended = []

    def open_gate(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.FIT_END:
            ended.append(event)
            assert Flaky.gate is not None
            Flaky.gate.set()

    pl.run(stream([RemoteUploader("flaky://bucket")], callbacks=[Writes(tmp_path), open_gate]))
    assert ended
    assert flaky.cat("flaky://bucket/epoch-2.txt") == b"epoch-2.txt"


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(pl.ArgumentError, match="nosuchprotocol"):
        RemoteUploader("nosuchprotocol://bucket")
    with pytest.raises(pl.ArgumentTypeError, match="files"):
        RemoteUploader("memory://x", files=[3])  # type: ignore[list-item]
    with pytest.raises(pl.ArgumentError, match="two files of one name"):
        RemoteUploader("memory://x", files=["a/m", "b/m"])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        RemoteUploader("memory://x").log_file("a", str(tmp_path / "nothing"))
