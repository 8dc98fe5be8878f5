"""SlackLogger against a server of this machine."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

import pure_loop as pl
from pure_loop.loggers import SlackLogger
from tests.loggers.records import killed, stream

pytest.importorskip("slack_sdk")


class Server(HTTPServer):
    """Keeps what is posted; answers with an error while ``fails``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[dict[str, Any]] = []
        self.fails = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/api/"

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.posted]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        form = self.headers["Content-Type"].startswith("application/x-www-form-urlencoded")
        message = {k: v[0] for k, v in parse_qs(body.decode()).items()} if form else json.loads(body)
        message |= {"path": self.path, "authorization": self.headers["Authorization"]}
        self.server.posted.append(message)
        answer = {"ok": False, "error": "channel_not_found"} if self.server.fails else {"ok": True}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def slack(server: Server, **options: Any) -> SlackLogger:
    return SlackLogger("#training", token="xoxb-1", base_url=server.url, **options)


def test_one_message_at_each_interval_has_the_newest_numbers(server: Server) -> None:
    pl.run(stream([slack(server, include=["train/learning_rate", "val/*"], exclude="val/loss")], run_name="first"))
    assert len(server.posted) == 2
    assert server.posted[0]["path"] == "/api/chat.postMessage"
    assert server.posted[0]["authorization"] == "Bearer xoxb-1"
    assert server.posted[0]["channel"] == "#training"
    first, second = (text.splitlines() for text in server.texts)
    assert first[0] == "*first*, epoch 1, batch 6 of 2 epochs"
    assert [line.split()[0] for line in first[1:]] == ["train/learning_rate", "val/accuracy"]
    assert second[0] == "*first*, epoch 2, batch 12 of 2 epochs"


def test_checkpoints_post_nothing_and_a_resumed_run_posts_nothing_twice(server: Server, tmp_path: Path) -> None:
    killed([slack(server, folder=tmp_path, interval="3ba")], tmp_path / "checkpoints", at=7)
    pl.run(stream([slack(server, folder=tmp_path, interval="3ba")], tmp_path / "checkpoints"))
    assert [int(text.split("batch ")[1].split()[0]) for text in server.texts] == [3, 6, 9, 12]
    assert len({text.split(",")[0] for text in server.texts}) == 1


def test_a_failure_is_noted_once_and_training_continues(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.fails = True
    with caplog.at_level(logging.WARNING, "pure_loop.loggers"):
        pl.run(stream([slack(server, interval="3ba")]))
    assert len(server.posted) == 4
    (message,) = caplog.messages
    assert "channel_not_found" in message


def test_a_run_that_raises_says_why(server: Server) -> None:
    def fail(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.EPOCH_END:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        pl.run(stream([slack(server, interval=0)], callbacks=[fail], run_name="first"))
    assert server.texts == ["*first* ended with RuntimeError: on purpose"]


def test_the_token_is_in_no_repr(server: Server) -> None:
    assert "xoxb" not in repr(slack(server))
    assert "token='...'" in repr(slack(server))


def test_bad_input_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_TOKEN", raising=False)
    with pytest.raises(pl.ArgumentError, match="SLACK_TOKEN"):
        SlackLogger("#training")
    with pytest.raises(pl.ArgumentTypeError, match="channel"):
        SlackLogger("", token="x")
    with pytest.raises(pl.ArgumentError, match="base_url"):
        SlackLogger("#training", token="x", base_url="slack.com")
    monkeypatch.setitem(sys.modules, "slack_sdk", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[slack\]'"):
        SlackLogger("#training", token="x")
