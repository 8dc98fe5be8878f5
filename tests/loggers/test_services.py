"""Loggers that send: to Slack and Comet, to file systems, and what trackers share."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loggers import JSONLinesLogger, RemoteUploader, SlackLogger
from pure_loop.loggers._entry import Entry
from pure_loop.loggers._tracker import Tracker
from tests.loggers.records import failing, killed, stream
from tests.support.extras import needs
from tests.support.refused import Refusal, check

Posted = list[dict[str, Any]]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Posted:
    """What is sent to Slack."""
    sdk, found = pytest.importorskip("slack_sdk"), Posted()
    post = lambda self, **message: found.append(message | {"token": self.token, "url": self.base_url})  # noqa: E731
    monkeypatch.setattr(sdk.WebClient, "chat_postMessage", post)
    return found


def slack(**options: Any) -> SlackLogger:
    return SlackLogger("#training", token="xoxb-1", base_url="http://127.0.0.1:9/slack", **options)


def test_slack_has_one_message_at_each_interval_with_the_newest_numbers(posted: Posted) -> None:
    pl.run(stream([slack(include=["train/learning_rate", "val/*"], exclude="val/loss")], run_name="first"))
    first, second = (message.pop("text").splitlines() for message in posted)
    assert posted[0] == {"url": "http://127.0.0.1:9/slack/", "token": "xoxb-1", "channel": "#training"}
    assert first[0] == "*first*, epoch 1, batch 6 of 2 epochs"
    assert [line.split()[0] for line in first[1:]] == ["train/learning_rate", "val/accuracy"]
    assert second[0] == "*first*, epoch 2, batch 12 of 2 epochs"
    assert "xoxb" not in repr(slack())
    posted.clear()
    with pytest.raises(RuntimeError, match="http"):  # a run that raises says why, and what is recorded is text
        pl.run(stream([slack(interval=0)], callbacks=[failing(6)], run_name="first"))
    assert [message["text"] for message in posted] == ["*first* ended with RuntimeError: &lt;http://x|y&gt;"]


def test_slack_posts_nothing_twice_and_a_failure_is_noted_once(
    posted: Posted, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(slack(folder=tmp_path, interval="3ba"), tmp_path / "checkpoints", at=7)
    pl.run(stream([slack(folder=tmp_path, interval="3ba")], tmp_path / "checkpoints"))
    texts = [message["text"] for message in posted]
    assert [int(text.split("batch ")[1].split()[0]) for text in texts] == [3, 6, 9, 12]
    assert len({text.split(",")[0] for text in texts}) == 1

    def fail(*_: Any, **message: Any) -> None:
        posted.append(message)
        raise OSError("channel_not_found")

    posted.clear()
    monkeypatch.setattr("slack_sdk.WebClient.chat_postMessage", fail)
    pl.run(stream([slack(interval="3ba")]))
    assert len(posted) == 4
    (message,) = caplog.messages
    assert "channel_not_found" in message


@pytest.mark.slow  # importing Comet takes three seconds
@needs("comet_ml")
def test_online_comet_is_asked_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = SimpleNamespace(get_metrics=lambda name: [{"step": 1}, {"step": 2}])
    found = SimpleNamespace(get_experiment_by_key={"b": experiment}.get)
    online = pl.loggers.CometMLLogger("p", folder=tmp_path, mode="online", api_key="x")
    monkeypatch.setattr("comet_ml.API", lambda api_key: found)
    assert online.received("b", {"train/loss"}) == {("train/loss", 1), ("train/loss", 2)}
    assert online.received("c", {"train/loss"}) == set()
    assert repr(online) == f"CometMLLogger(project='p', folder={tmp_path!r}, api_key='...', mode='online')"


class Notebook(Tracker):
    """A service that only notes what it is asked."""

    prefix, service, own_options = "noted", "noted.start", ("id",)

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        super().__init__(folder, (), None, include=None, exclude=None, flush="1ba")
        self.fails, self.begun, self.names = fails, [], set()  # type: ignore[var-annotated]

    def connect(self, run_id: str) -> None:
        assert json.loads((self.folder / "noted_run.json").read_text())["id"] == run_id
        self.begun.append(run_id)
        if self.fails:
            raise OSError("no route to the service")

    def pass_on(self, entries: Sequence[Entry]) -> None:
        self.names |= {entry.name for entry in self.counted_entries(entries)}

    def disconnect(self, *, failed: bool) -> None:
        pass


def test_a_run_of_a_tracker_that_could_not_begin_begins_with_its_id(tmp_path: Path) -> None:
    """A process that is killed while it connects leaves the id, too: it is on disk before."""
    first, second = Notebook(tmp_path, fails=True), Notebook(tmp_path)
    with pytest.raises(OSError, match="no route"):
        pl.run(stream([first], run_name="calm-otter"))
    pl.run(stream([second], run_name="calm-otter"))
    assert second.begun == first.begun
    assert "train/loss" in second.names


# Uploads: whole files arrive, failures are tried again, and what is missing is named.


@pytest.fixture
def flaky() -> Iterator[Any]:
    """A file system that fails so many times, or waits."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Flaky(MemoryFileSystem):  # type: ignore[misc]
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

    fsspec.register_implementation("flaky", Flaky, clobber=True)
    yield Flaky
    if Flaky.gate is not None:
        Flaky.gate.set()


def written(folder: Path, name: str = "a.txt") -> str:
    (folder / name).write_text(name)
    return str(folder / name)


class Writes(pl.Callback):
    """Records a file at the end of each epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def epoch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_file(name := f"epoch-{state.timestamp.epoch}.txt", written(self.folder, name))


@needs("fsspec")
def test_files_that_are_recorded_and_those_of_another_logger_arrive(tmp_path: Path) -> None:
    path, url = tmp_path / "metrics.jsonl", f"file://{tmp_path}/remote/{{run_name}}"
    loggers = [RemoteUploader(url, files=[path]), JSONLinesLogger(path)]
    pl.run(stream(loggers, callbacks=[Writes(tmp_path)], run_name="first"))
    found = {each.name: each.read_bytes() for each in (tmp_path / "remote" / "first").iterdir()}
    epochs = {name: name.encode() for name in ("epoch-1.txt", "epoch-2.txt")}
    assert found == {**epochs, "metrics.jsonl": path.read_bytes()}
    assert "BATCH_END" in path.read_text()


def test_an_upload_that_fails_is_tried_again_and_what_is_missing_is_named(tmp_path: Path, flaky: Any) -> None:
    uploader, flaky.failures = RemoteUploader("flaky://bucket", retries=3, wait=0), 3
    uploader.log_file("a.txt", written(tmp_path))
    uploader.close()
    assert flaky().cat("flaky://bucket/a.txt") == b"a.txt"
    flaky.failures = 2
    missing = r"1 of the files are not at flaky://bucket\. epoch-1.txt: .*network is down.*2 tries"
    with pytest.raises(OSError, match=missing):
        pl.run(stream([RemoteUploader("flaky://bucket", retries=1, wait=0)], callbacks=[Writes(tmp_path)]))
    flaky.failures = 9
    with pytest.raises(RuntimeError, match="http") as raised:
        pl.run(stream([RemoteUploader("flaky://bucket", retries=0)], callbacks=[Writes(tmp_path), failing(7)]))
    assert any("epoch-1.txt" in note for note in raised.value.__notes__)


def test_training_does_not_wait_and_closing_no_longer_than_it_was_told(tmp_path: Path, flaky: Any) -> None:
    flaky.gate = threading.Event()
    opened = []

    def open_gate(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.FIT_END:
            opened.append(event)
            flaky.gate.set()

    pl.run(stream([RemoteUploader("flaky://bucket")], callbacks=[Writes(tmp_path), open_gate]))
    assert opened
    assert flaky().cat("flaky://bucket/epoch-2.txt") == b"epoch-2.txt"
    flaky.gate = threading.Event()
    uploader = RemoteUploader("flaky://bucket", timeout=0.05)
    uploader.log_file("a.txt", written(tmp_path))
    with pytest.raises(OSError, match=r"a\.txt: not uploaded within 0\.05 seconds"):
        uploader.close()


@needs("fsspec", "slack_sdk")
def test_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_TOKEN", raising=False)
    refused: dict[str, Any] = {
        "nosuch": lambda: RemoteUploader("nosuch://bucket"),
        "files": lambda: RemoteUploader("memory://x", files=[3]),  # type: ignore[list-item]
        "two files of one name": lambda: RemoteUploader("memory://x", files=["a/m", "b/m"]),
        "there is no file": lambda: RemoteUploader("memory://x").log_file("a", "/nowhere/a"),
        "SLACK_TOKEN": lambda: SlackLogger("#training"),
        "channel": lambda: SlackLogger("", token="x"),
        "base_url": lambda: SlackLogger("#t", token="x", base_url="slack.com"),
    }
    for says, call in refused.items():
        check(Refusal(says, call, (pl.PureLoopError, OSError), (says,)))  # type: ignore[arg-type]
