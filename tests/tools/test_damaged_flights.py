"""What a FlightRecorder left and a kill, a disk or an editor damaged: named by file and line, and nothing dropped."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop.callbacks import CheckpointSaver, FlightRecorder
from pure_loop.checkpoint.flight import read_flight
from pure_loop.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger

DATA = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.zeros(4, 1)) for i in range(4)]
SETTINGS: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1)}


def model() -> nn.Module:
    net = nn.Linear(3, 1)
    nn.init.constant_(net.weight, 0.5)
    return net


def record(folder: Path, duration: str = "2ep", **options: Any) -> pl.State:
    recorder = FlightRecorder(folder, keep="3ba", digest="1ba")
    return pl.run(pl.fit(model(), DATA, callbacks=[recorder], max_duration=duration, **SETTINGS, **options))


LINE = b'{"batch":5,"epoch":1,"loss":"0x1.0p+0","seconds":0.1}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (LINE.replace(b"epoch", b"ep\xffch"), "UnicodeDecodeError"),
        (b"[" * 100_000 + b"]" * 100_000, "RecursionError"),
        (b'{"batch":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "RecursionError"),
        (b"\0" * 40, "JSONDecodeError"),
        (b"something else", "JSONDecodeError"),
        (b'{"batch":5}', "KeyError"),
        (LINE.replace(b"5", b'"5"', 1), "a count or a time that is none"),
        (LINE.replace(b"5", b"-5", 1), "a count or a time that is none"),
        (LINE.replace(b"5", b"true", 1), "a count or a time that is none"),
        (LINE.replace(b'"0x1.0p+0"', b"3"), "TypeError"),
        (LINE.replace(b"0x1.0p+0", b"0xq"), "ValueError"),
        (b"[1]", "TypeError"),
        (b"null", "TypeError"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_line_that_no_kill_has_cut_is_named(line: bytes, says: str, tmp_path: Path) -> None:
    """A byte that is no UTF-8, deep nesting, holes of a disk, other JSON: in the middle and at the end."""
    record(tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    for number in (4, len(lines)):
        journal.write_bytes(b"".join([*lines[: number - 1], line + b"\n", *lines[number - 1 :]]))
        with pytest.raises(pl.CheckpointError, match=rf"journal\.jsonl, line {number}: .*{says}"):
            read_flight(tmp_path)
        with pytest.raises(pl.CheckpointError, match=r"journal\.jsonl, line"):
            next(pl.rewind(tmp_path, "5ba", "after_loss", model(), DATA, max_duration="2ep", **SETTINGS))


def check_cut(at: int) -> None:
    """A kill cuts the journal anywhere; the same command resumes, and each batch is there once."""
    with tempfile.TemporaryDirectory() as place:
        folder, auto = Path(place, "flight"), CheckpointSaver(Path(place, "auto"), interval="3ba")
        record(folder, "1ep", autoresume=auto)
        journal = folder / "journal.jsonl"
        data = journal.read_bytes()
        journal.write_bytes(data[: len(data) - 1 - at % len(data)])
        before = read_flight(folder).lines
        assert list(before) == list(range(1, len(before) + 1))
        record(folder, "2ep", autoresume=auto)
        lines = read_flight(folder).lines
        assert before.items() <= lines.items()
        assert list(lines)[-4:] == [5, 6, 7, 8]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_a_journal_that_is_cut_anywhere_is_continued(at: int) -> None:
    check_cut(at)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000))
def test_a_journal_that_is_cut_at_each_byte_is_continued(at: int) -> None:
    check_cut(at)


@pytest.mark.parametrize("content", [b"", b'{"seed": 0, "mod', b"\xff{}", b"[" * 100_000, b"[]", b"3"])
def test_facts_that_are_cut_are_named(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where they are read; a run that resumes says so, and writes them anew."""
    auto = CheckpointSaver(tmp_path / "auto")
    record(tmp_path / "f", "1ep", autoresume=auto)
    facts = tmp_path / "f" / "run.json"
    facts.write_bytes(content)
    with pytest.raises(pl.CheckpointError, match=r"run\.json can't be read"):
        next(pl.rewind(tmp_path / "f", "2ba", "after_loss", model(), DATA, max_duration="1ep", **SETTINGS))
    record(tmp_path / "f", autoresume=auto)
    assert "run.json can't be read" in caplog.text
    assert json.loads(facts.read_text())["seed"] == 0


def test_facts_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while they are written leaves those that were there."""
    auto = CheckpointSaver(tmp_path / "auto")
    record(tmp_path / "f", "1ep", autoresume=auto)
    before = (tmp_path / "f" / "run.json").read_bytes()

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "f", autoresume=auto)
    assert (tmp_path / "f" / "run.json").read_bytes() == before
    assert not list((tmp_path / "f").glob(".*"))


def test_the_same_command_on_a_run_that_is_finished(tmp_path: Path) -> None:
    """It trains nothing, and what was recorded is all there: the digest of the first batch, every line, every State."""
    auto = CheckpointSaver(tmp_path / "auto")
    for _ in range(3):
        record(tmp_path / "f", autoresume=auto)
        flight = read_flight(tmp_path / "f")
        assert list(flight.lines) == list(range(1, 9))
        assert flight.has_ended
        assert flight.facts["first_batch"][0] == 1
        assert {0, 3, 6, 8} <= set(flight.files)
    pairs = pl.rewind(tmp_path / "f", "5ba", "after_loss", model(), DATA, max_duration="2ep", **SETTINGS)
    assert next(pairs)[1].timestamp.batch == 5
    with pytest.raises(pl.errors.RewindError):
        next(pl.rewind(tmp_path / "f", "2ba", "after_loss", model(), DATA[::-1], max_duration="2ep", **SETTINGS))


def test_the_journal_of_another_seed(tmp_path: Path) -> None:
    state = record(tmp_path / "f", "1ep")
    for path in (tmp_path / "f").glob("*.safetensors"):
        path.unlink()
    before = (tmp_path / "f" / "journal.jsonl").read_bytes()
    with pytest.raises(pl.errors.RunExistsError, match="with seed 0; this one has 5"):
        pl.run(
            pl.fit(
                state.replace(seed=5),
                DATA,
                callbacks=[FlightRecorder(tmp_path / "f")],
                max_duration="2ep",
                **SETTINGS,
            )
        )
    assert (tmp_path / "f" / "journal.jsonl").read_bytes() == before


LOGGERS: dict[str, Any] = {
    "csv": (lambda folder: CSVLogger(folder / "m.csv"), "m.csv"),
    "json lines": (lambda folder: JSONLinesLogger(folder / "m.jsonl"), "m.jsonl"),
    "tensorboard": (TensorBoardLogger, ""),
}


@pytest.mark.parametrize("name", list(LOGGERS))
@pytest.mark.parametrize("lost", [0, 1, 2, 8])
def test_a_record_that_ends_before_the_checkpoint_is_said(
    name: str, lost: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was cut, or restored from a copy: the batch at which it ends, and that at which the run resumes."""
    if name == "tensorboard":
        pytest.importorskip("tensorboard")
    make, _ = LOGGERS[name]

    def run(duration: str) -> None:
        auto = tmp_path / "auto"
        pl.run(
            pl.fit(model(), DATA, loggers=[make(tmp_path / "m")], autoresume=auto, max_duration=duration, **SETTINGS)
        )

    run("2ep")
    _lose(name, tmp_path / "m", lost)
    run("3ep")
    said = [text for text in caplog.messages if "what was recorded between them is not in it" in text]
    assert len(said) == (lost > 0)
    assert all(f"ends at batch {8 - lost}, and the run resumes at batch 8" in text for text in said)


def _lose(name: str, folder: Path, lost: int) -> None:
    """Remove the last batches of a record."""
    if name == "tensorboard":
        from pure_loop.loggers.tensorboard import _cut, _event_files

        for file in _event_files(folder):
            _cut(file, 8 - lost)
        return
    path = folder / ("m.csv" if name == "csv" else "m.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    if name == "csv":
        path.write_text("".join(lines[:1] + [line for line in lines[1:] if int(line.split(",")[0]) <= 8 - lost]))
    else:
        path.write_text("".join(line for line in lines if json.loads(line)["batch"] <= 8 - lost))


def test_a_record_without_the_loss_may_end_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(duration: str) -> None:
        logger = JSONLinesLogger(tmp_path / "m.jsonl", include="val/*")
        options: dict[str, Any] = {"evaluators": {"val": DATA[:1]}, "eval_interval": "3ba"}
        saver = CheckpointSaver(tmp_path / "auto", interval="1ba")
        pl.run(pl.fit(model(), DATA, loggers=[logger], autoresume=saver, max_duration=duration, **SETTINGS, **options))

    run("5ba")
    run("8ba")
    assert "not in it" not in caplog.text
