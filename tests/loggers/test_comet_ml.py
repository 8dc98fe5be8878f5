"""CometMLLogger offline, whose archives are read back, and what it asks Comet online."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loggers import CometMLLogger, InMemoryLogger
from tests.loggers.records import expected_steps, stream
from tests.support.extras import needs

pytestmark = needs("comet_ml")


def names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def messages(folder: Path, kind: str) -> Iterator[Any]:
    """What archives hold of a kind, in the order of their processes' ends."""
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                if message["type"] == kind:
                    yield message["payload"]


def values(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for message in messages(folder, "metric_msg"):
        metric = message["metric"]
        found.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
    return found


def steps(folder: Path) -> dict[str, list[int]]:
    return {name: sorted(step for step, _ in found) for name, found in values(folder).items()}


def uploads(folder: Path) -> list[tuple[str, int, str]]:
    """The kind, step and name of each file."""
    return [
        (message["upload_type"], parameters["step"], parameters.get("figName") or parameters["fileName"])
        for message in messages(folder, "file_upload")
        for parameters in [message["additional_params"]]
    ]


def keys(folder: Path) -> set[tuple[str, str]]:
    found = set()
    for path in folder.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            experiment = json.loads(archive.read("experiment.json"))
            found.add((experiment["offline_id"], experiment["project_name"]))
    return found


def logger(folder: Path, **options: Any) -> CometMLLogger:
    return CometMLLogger("digits", folder=folder, mode="offline", **options)


@pytest.mark.slow
def test_an_archive_has_what_the_run_had(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    pl.run(stream([logger(tmp_path, tags=["a"]), memory], run_name="first"))
    found = values(tmp_path)
    for name, batches in expected_steps().items():
        assert found[name] == list(zip(batches, memory.series(name)[1], strict=True)), name
    settings = {m["param"]["paramName"]: m["param"]["paramValue"] for m in messages(tmp_path, "parameter_msg")}
    assert memory.hyperparameters.items() <= {**settings, **memory.hyperparameters}.items()
    assert settings["batch_size"] == 5
    assert settings["max_duration"] == "2ep"
    found_uploads = uploads(tmp_path)
    assert [step for kind, step, _ in found_uploads if kind == "text-sample"] == [4, 8, 12]
    assert ("asset", 4, "ba4-confusion.csv") in found_uploads
    images = [(step, name) for kind, step, name in found_uploads if kind == "visualization"]
    assert [name for step, name in images if step == 4] == [
        *(f"inputs/{index}" for index in range(2)),
        *(f"inputs/targets/{index}" for index in range(2)),
    ]
    others = {message["key"]: message["value"] for message in messages(tmp_path, "log_other")}
    assert others["Name"] == "first"
    assert others["failed"] is False
    assert len(keys(tmp_path)) == 1


@pytest.mark.slow
def test_a_run_that_was_finished_and_resumes_sends_no_step_twice(tmp_path: Path) -> None:
    """It trained past its last checkpoint, and resumes from there."""
    for event, state in stream([logger(tmp_path)], tmp_path / "checkpoints"):
        if event is pl.Event.BATCH_START and state.timestamp.batch == 6:
            break
    pl.run(stream([logger(tmp_path)], tmp_path / "checkpoints"))
    found = steps(tmp_path)
    assert {name: found[name] for name in expected_steps()} == expected_steps()
    assert len(keys(tmp_path)) == 1
    assert len(list(tmp_path.glob("*.zip"))) == 2
    pl.run(stream([logger(tmp_path)], run_name="other", max_duration="1ba"))
    assert len(keys(tmp_path)) == 2, "another experiment"


@pytest.mark.slow
def test_importing_comet_changes_no_other_package() -> None:
    code = """
import sys, torch
before, backward = list(sys.meta_path), torch.Tensor.backward
from pure_loop.loggers import CometMLLogger
CometMLLogger(mode="offline")
assert sys.meta_path == before and torch.Tensor.backward is backward
import os
assert "COMET_DISABLE_AUTO_LOGGING" not in os.environ
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COMET_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


class Comet(BaseHTTPRequestHandler):
    """Answers as Comet does where it is asked for the values of a metric."""

    def do_GET(self) -> None:
        metrics = [{"metricName": "train/loss", "metricValue": "0.5", "step": step} for step in (1, 2)]
        known = {"metrics": metrics, "experimentKey": "b" * 32, "workspaceName": "w", "projectName": "p"}
        body = json.dumps(known).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.slow  # importing Comet takes three seconds
def test_online_comet_is_asked_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Comet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"http://127.0.0.1:{server.server_port}/clientlib/")
        online = CometMLLogger("p", folder=tmp_path, mode="online", api_key="x")
        assert online.received("b" * 32, ["train/loss"]) == {("train/loss", 1), ("train/loss", 2)}
        server.shutdown()
    assert repr(online) == f"CometMLLogger(project='p', folder={tmp_path!r}, api_key='...', mode='online')"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[comet_ml\]'"):
        CometMLLogger("digits", mode="offline")


def test_bad_input_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # with no file of Comet's own
    with pytest.raises(pl.ArgumentError, match=r'api_key="\.\.\.".*mode="offline"'):
        CometMLLogger("digits", mode="online")
    with pytest.raises(pl.ArgumentError, match=r"options has 'tags'"):
        logger(tmp_path, options={"tags": ["x"]})
    with pytest.raises(pl.ArgumentTypeError, match="tags"):
        logger(tmp_path, tags="a")
    with pytest.raises(pl.ArgumentError, match="mode"):
        CometMLLogger(mode="of line")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="CometMLLogger can't write to the folder"):
        pl.run(stream([logger(tmp_path / "file" / "runs")]))
