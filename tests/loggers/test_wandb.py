"""WandBLogger offline; what W&B wrote is read back from its own files."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger, WandBLogger
from tests.loggers.records import expected_steps, kill_process, stream
from tests.support.extras import needs

pytestmark = needs("wandb")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(folder: Path) -> Iterator[Any]:
    """What all processes wrote, in the order of their starts."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        raw, at, record = file.read_bytes(), 7, b""
        while at + 7 <= len(raw):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
            record += raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield Record.FromString(record)
                record = b""


def values(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = (item.key or "/".join(item.nested_key)).removesuffix("/_type")
                found.setdefault(name, []).append((record.history.step.num, json.loads(item.value_json)))
    return found


def steps(folder: Path) -> dict[str, list[int]]:
    return {name: [step for step, _ in found] for name, found in values(folder).items()}


def ids(folder: Path) -> set[tuple[str, str]]:
    found = [record.run for record in records(folder) if record.WhichOneof("record_type") == "run"]
    return {(run.run_id, run.display_name) for run in found}


def settings(folder: Path) -> dict[str, Any]:
    return {
        update.key or "/".join(update.nested_key): json.loads(update.value_json)
        for record in records(folder)
        if record.WhichOneof("record_type") == "config"
        for update in record.config.update
    }


def pixels(folder: Path) -> dict[str, list[str]]:
    """The digests of images and masks by step."""
    return {name: [value for _, value in found] for name, found in values(folder).items() if name.startswith("inputs/")}


@pytest.mark.slow
def test_wandb_has_what_the_run_had(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    pl.run(stream([WandBLogger("digits", folder=tmp_path, tags=["a"]), memory], run_name="first"))
    found = values(tmp_path)
    for name, batches in expected_steps().items():
        assert found[name] == list(zip(batches, memory.series(name)[1], strict=True)), name
    assert steps(tmp_path)["confusion"] == steps(tmp_path)["inputs"] == [4, 8, 12]
    assert found["inputs"][0][1] == "images/separated"
    sizes = [found[f"inputs/{name}"][0][1] for name in ("count", "height", "width")]
    assert sizes == [2, 3, 4]
    assert found["inputs/all_masks"][0][1][0].keys() == {"targets"}
    files = {
        file.name.split("_")[0] for file in tmp_path.glob("wandb/offline-run-*/files/media/**/*") if file.is_file()
    }
    assert {"sample", "confusion", "inputs"} <= files
    assert {name for _, name in ids(tmp_path)} == {"first"}
    assert settings(tmp_path)["batch_size"] == 5
    assert settings(tmp_path)["max_duration"] == "2ep"


@pytest.mark.slow
def test_what_the_service_had_not_written_is_sent_again(tmp_path: Path) -> None:
    """Its process is gone before it has written anything, images and settings included."""
    logger = 'pl.loggers.WandBLogger("digits", folder=folder, flush="3ba")'
    kill_process(logger, tmp_path, at=9)
    for run in tmp_path.glob("wandb/offline-run-*"):
        shutil.rmtree(run)
    whole = tmp_path / "whole"
    pl.run(stream([WandBLogger("digits", folder=whole)]))
    pl.run(stream([WandBLogger("digits", folder=tmp_path)], tmp_path / "checkpoints"))
    found = steps(tmp_path)
    assert {name: sorted(found[name]) for name in expected_steps()} == expected_steps()
    assert found["inputs"] == found["sample"] == found["confusion"] == [4, 8, 12]
    assert len(ids(tmp_path)) == 1
    assert pixels(tmp_path) == pixels(whole)
    assert settings(tmp_path)["batch_size"] == 5
    assert not (tmp_path / "wandb_journal.jsonl").exists()  # everything is sent


@pytest.mark.slow
def test_a_run_that_was_finished_and_resumes_sends_no_step_twice(tmp_path: Path) -> None:
    """It trained past its last checkpoint, and resumes from there."""
    logger = WandBLogger("digits", folder=tmp_path)
    for event, state in stream([logger], tmp_path / "checkpoints"):
        if event is pl.Event.BATCH_START and state.timestamp.batch == 6:
            break
    pl.run(stream([WandBLogger("digits", folder=tmp_path)], tmp_path / "checkpoints"))
    found = steps(tmp_path)
    assert {name: sorted(found[name]) for name in expected_steps()} == expected_steps()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[wandb\]'"):
        WandBLogger("digits")


def test_bad_input_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(pl.ArgumentError, match=r"options has 'id'"):
        WandBLogger(options={"id": "x"})
    with pytest.raises(pl.ArgumentTypeError, match="tags"):
        WandBLogger(tags="a")
    with pytest.raises(pl.ArgumentError, match="mode"):
        WandBLogger(mode="of line")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="WandBLogger can't write to the folder"):
        pl.run(stream([WandBLogger(folder=tmp_path / "file" / "runs")]))
