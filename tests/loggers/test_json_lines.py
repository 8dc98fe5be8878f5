"""JSONLinesLogger: what it writes, and that a run that is killed and resumes has one record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import InMemoryLogger, JSONLinesLogger
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._images import write_images
from pure_loop.loggers._tracker import image_files
from tests.loggers.records import DATA, expected_steps, killed, stream


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path: Path) -> list[dict[str, Any]]:
    """What can be compared between two runs."""
    kept = []
    for line in lines(path):
        if line["kind"] == "hyperparameters":
            for name in ("autoresume", "callbacks", "loggers", "run_name"):
                line["value"].pop(name, None)
        kept.append({key: value for key, value in line.items() if key != "time"})
    return kept


def steps(path: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in lines(path):
        if line["kind"] == "metric":
            found.setdefault(line["name"], []).append(line["batch"])
    return found


def test_each_line_has_what_the_run_had(tmp_path: Path) -> None:
    path, memory = tmp_path / "new" / "metrics.jsonl", InMemoryLogger()
    pl.run(stream([JSONLinesLogger(path), memory], run_name="first"))
    record = lines(path)
    assert record[0]["kind"] == "run"
    assert record[0]["value"] == "first"
    assert steps(path) == expected_steps()
    for name in expected_steps():
        values = [line["value"] for line in record if line["name"] == name]
        assert values == memory.series(name)[1]
    settings: dict[str, Any] = {}
    for line in record:
        if line["kind"] == "hyperparameters":
            settings |= line["value"]
    assert settings == memory.hyperparameters
    table = next(line for line in record if line["kind"] == "table")
    assert table["value"] == {"columns": ["a", "b"], "rows": [[1, 2.5], ["x", None]]}
    assert next(line["value"] for line in record if line["kind"] == "text") == "text of batch 4"
    loss = next(line for line in record if line["name"] == "train/loss")
    assert list(loss) == ["time", "event", "epoch", "batch", "kind", "name", "value"]
    assert loss["event"] == "BATCH_END"


def test_cells_of_a_table_are_read_with_the_metrics(tmp_path: Path) -> None:
    class Tables(pl.Callback):
        def fit_end(self, state: pl.State, logger: pl.LoggerGroup) -> None:
            logger.log_metrics({"whole": torch.tensor(7)}, state)
            logger.log_table("cells", ["image", "class"], [[0, torch.tensor(3)], [1, torch.tensor(0.5)]], state)

    path = tmp_path / "metrics.jsonl"
    logger = JSONLinesLogger(path, include=["cells", "whole"])
    pl.run(stream([logger], callbacks=[Tables()]))
    assert [line["value"] for line in lines(path) if line["kind"] in ("metric", "table")] == [
        7,
        {"columns": ["image", "class"], "rows": [[0, 3], [1, 0.5]]},
    ]


def test_images_and_masks_are_png_files(tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "metrics.jsonl"
    pl.run(stream([JSONLinesLogger(path)], max_duration="4ba"))
    (paths,) = (line["value"] for line in lines(path) if line["kind"] == "images")
    assert len(paths) == 4
    pixels = torch.frombuffer(bytearray(Image.open(path.parent / paths[0]).tobytes()), dtype=torch.uint8)
    expected = (torch.linspace(0, 1, 72)[:36].double() * 255).round().to(torch.uint8)
    assert torch.equal(pixels, expected)
    coloured = Image.open(path.parent / paths[2])
    assert coloured.size == (4, 3)
    assert coloured.getpixel((0, 0)) == tuple(expected[:3].tolist())  # class 0 stays as it is
    assert coloured.getpixel((1, 0)) != tuple(expected[3:6].tolist())


def test_a_mask_without_a_name_does_not_take_the_place_of_the_images(tmp_path: Path) -> None:
    masks = {"": torch.ones(1, 2, 2), "m": torch.ones(1, 2, 2)}
    entry = Entry("images", "x", (torch.zeros(1, 2, 2, 3), masks), Moment(), 0.0)
    assert [suffix for suffix, _ in image_files(entry)] == ["/0", "//0", "/m/0"]
    assert len({path.name for path in write_images(tmp_path, entry)}) == 3


@pytest.mark.parametrize(
    ("at", "event"),
    [
        (4, Event.BATCH_CHECKPOINT),
        (4, Event.BATCH_START),
        (5, Event.BATCH_END),
        (6, Event.EPOCH_END),
        (6, Event.EPOCH_CHECKPOINT),
        (6, Event.BATCH_START),
        (9, Event.EVAL_END),
        (12, Event.EPOCH_END),
    ],
)
@pytest.mark.parametrize("flush", ["1ba", "50ba"])
def test_a_run_that_is_killed_and_resumes_has_the_record_of_one_that_is_not(
    tmp_path: Path, at: int, event: Event, flush: str
) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    pl.run(stream([JSONLinesLogger(whole, flush=flush)], tmp_path / "others", run_name="one"))
    killed([JSONLinesLogger(path, flush=flush)], tmp_path / "checkpoints", at=at, event=event)
    name = JSONLinesLogger(path).recorded_run_name
    with path.open("ab") as file:
        file.write(b'{"time": 17, "event": "BATCH_END", "epo')  # torn
    pl.run(stream([JSONLinesLogger(path, flush=flush)], tmp_path / "checkpoints"))
    assert JSONLinesLogger(path).recorded_run_name == name
    record, expected = without_times(path), without_times(whole)
    paths = [line.pop("value") for lines in (record, expected) for line in lines if line["kind"] == "images"]
    assert all((tmp_path / image).exists() for some in paths for image in some)
    assert record[1:] == expected[1:]  # but for the name of the run


@pytest.mark.parametrize("kept", [Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.EPOCH_START])
def test_each_boundary_of_a_batch_is_resumed_with_what_was_recorded_before_it(tmp_path: Path, kept: Event) -> None:
    """Also the rate of LRMonitor under a name of its own, which is read when the batch starts."""
    monitor = [pl.callbacks.LRMonitor(name="rate")]
    whole, path = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    pl.run(stream([JSONLinesLogger(whole)], run_name="one", callbacks=monitor))
    state = None
    for event, reached in stream([JSONLinesLogger(path)], run_name="one", callbacks=monitor):
        if event is kept and reached.timestamp.batch == 6:
            state = reached
    settings = {"loss": torch.nn.functional.cross_entropy, "max_duration": "2ep", "callbacks": monitor}
    settings |= {"optimizer": pl.optim.sgd(lr=pl.schedules.linear(1.0, 0.0, "12ba"))}
    settings |= {"evaluators": {"val": DATA[:2]}, "eval_interval": "3ba"}
    assert state is not None
    pl.run(pl.fit(state, DATA, loggers=[JSONLinesLogger(path)], **settings))  # type: ignore[arg-type]
    metrics = [[line for line in without_times(each) if line["kind"] == "metric"] for each in (path, whole)]
    assert metrics[0] == metrics[1]


def test_names_are_chosen_by_globs(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path / "m.jsonl", include=["train/*", "val/*"], exclude="*/learning_rate")
    pl.run(stream([logger]))
    assert steps(logger.path).keys() == {"train/loss", "val/loss", "val/accuracy"}


def test_values_are_read_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    pl.run(stream([JSONLinesLogger(tmp_path / "m.jsonl", flush="5ba", include="train/loss")], callbacks=[]))
    assert reads == [5, 5, 2]


def test_values_that_json_does_not_have_are_texts(tmp_path: Path) -> None:
    logger, state = JSONLinesLogger(tmp_path / "m.jsonl"), pl.State.create(torch.nn.Linear(1, 1))
    logger.log_metrics({"x": torch.tensor([float("nan"), float("-inf"), 1.0]), "y": {"n": 3}}, state)
    logger.close()
    assert [(line["name"], line["value"]) for line in lines(logger.path)] == [
        ("x/0", "NaN"),
        ("x/1", "-Infinity"),
        ("x/2", 1.0),
        ("y/n", 3),
    ]


def test_evaluation_appends_to_a_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    state = pl.run(stream([JSONLinesLogger(path)], run_name="one"))
    before = path.read_bytes()
    loss = torch.nn.functional.cross_entropy
    pl.run(pl.evaluate(state, {"test": DATA}, loss=loss, loggers=[JSONLinesLogger(path)]))
    assert path.read_bytes().startswith(before)
    assert steps(path)["test/loss"] == [12]


def test_what_was_recorded_is_written_where_training_raises(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"

    def fail(event: Event, state: pl.State) -> None:
        if event is Event.BATCH_START and state.timestamp.batch == 3:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        pl.run(stream([JSONLinesLogger(path)], callbacks=[fail]))
    assert steps(path)["train/loss"] == [1, 2, 3]


def test_a_folder_that_cant_be_written_is_an_error_at_fit_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    seen: list[Event] = []
    run = stream([JSONLinesLogger(tmp_path / "file" / "m.jsonl")], callbacks=[lambda event, _: seen.append(event)])
    with pytest.raises(OSError, match=r"JSONLinesLogger can't write to the folder.*file"):
        pl.run(run)
    assert seen == [Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"path": ""}, "path"),
        ({"path": 3}, "path"),
        ({"path": "s3://bucket/m.jsonl"}, "RemoteUploader"),
        ({"path": "m", "include": 3}, "include"),
        ({"path": "m", "include": []}, "nothing would be recorded"),
        ({"path": "m", "include": ["a", 3]}, "include"),
        ({"path": "m", "exclude": ""}, "empty glob"),
        ({"path": "m", "flush": None}, "flush"),
        ({"path": "m", "flush": "often"}, "flush"),
    ],
)
def test_bad_input_is_refused_at_once(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=match):
        JSONLinesLogger(**arguments)
