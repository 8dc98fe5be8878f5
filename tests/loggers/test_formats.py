"""One example of each format: what is in the files of a run, read by the format's own reader."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop.loggers import CSVLogger, InMemoryLogger, JSONLinesLogger, TensorBoardLogger
from pure_loop.loggers._entry import Entry, Moment
from pure_loop.loggers._images import write_images
from tests.loggers import records
from tests.loggers.records import BACKENDS, STEPS, lines, rows, stream
from tests.support.extras import needs


def at(batch: int, sample: int = 0) -> pl.State:
    return pl.State.create(torch.nn.Linear(1, 1), timestamp=pl.Timestamp(batch=batch, sample=sample))


def test_csv_has_a_row_a_batch_and_a_column_a_name(tmp_path: Path) -> None:
    path, memory = tmp_path / "new" / "metrics.csv", InMemoryLogger()
    pl.run(stream([CSVLogger(path, flush="2ba"), memory], run_name="first"))
    assert [row["batch"] for row in rows(path)] == list(map(str, range(13)))
    content = json.loads((path.parent / "metrics.run.json").read_text())
    assert (content["run_name"], content["hyperparameters"]) == ("first", memory.hyperparameters)
    assert (path.parent / "metrics.tables" / "ba4-confusion.csv").read_text() == "a,b\n1,2.5\nx,\n"
    logger = CSVLogger(tmp_path / "m.csv")
    for batch, values in ((1, {"a": 0.5}), (1, {"b": 1}), (2, {"a": float("nan")}), (2, {"a": 7.0}), (3, {"batch": 9})):
        logger.log_metrics(values, at(batch))
        logger.flush()  # a name that comes later is a further column
    logger.close()
    assert list(rows(logger.path)[0])[3:] == ["a", "b", "metric/batch"]
    read = [[row["batch"], *list(row.values())[3:]] for row in rows(logger.path)]
    assert read == [["1", "0.5", "1", ""], ["2", "nan", "", ""], ["3", "", "", "9"]]


def test_json_lines_has_a_line_a_thing(tmp_path: Path) -> None:
    from PIL import Image

    path, memory = tmp_path / "new" / "metrics.jsonl", InMemoryLogger()
    pl.run(stream([JSONLinesLogger(path), memory], run_name="first"))
    record = lines(path)
    assert (record[0]["kind"], record[0]["value"]) == ("run", "first")
    found: dict[str, Any] = {}
    for line in record:
        found |= line["value"] if line["kind"] == "hyperparameters" else {}
    assert found == memory.hyperparameters
    first = {kind: next(line for line in record if line["kind"] == kind) for kind in ("table", "text", "images")}
    assert first["table"]["value"] == {"columns": ["a", "b"], "rows": [[1, 2.5], ["x", None]]}
    assert first["text"]["value"] == "text of batch 4"
    loss = next(line for line in record if line["name"] == "train/loss")
    assert list(loss) == ["time", "event", "epoch", "batch", "kind", "name", "value"]
    assert loss["event"] == "BATCH_END"
    # Images and masks are PNG files.
    images = [Image.open(path.parent / each) for each in first["images"]["value"]]
    pixels = [image.tobytes() for image in images]
    assert {image.size for image in images} == {(4, 3)}
    assert pixels[0] == bytes((torch.linspace(0, 1, 72)[:36].double() * 255).round().to(torch.uint8).tolist())
    assert pixels[2][:3] == pixels[0][:3]  # class 0 stays as it is
    assert pixels[2][3:6] != pixels[0][3:6]
    masks = {"": torch.ones(1, 2, 2), "m": torch.ones(1, 2, 2)}  # one without a name takes no image's place
    written = write_images(tmp_path, Entry("images", "x", (torch.zeros(1, 2, 2, 3), masks), Moment(), 0.0))
    assert len({each.name for each in written}) == 3
    # What JSON doesn't have is a text; names are chosen by globs; cells of a table are read with the metrics.
    logger = JSONLinesLogger(tmp_path / "m.jsonl", include=["x", "y/*", "cells"], exclude="*/out")
    logger.log_metrics({"x": torch.tensor([float("nan"), float("-inf"), 1.0]), "y": {"n": 3, "out": 1}}, at(0))
    logger.log_table("cells", ["image"], [[torch.tensor(3)], [torch.tensor(0.5)]], at(0))
    logger.close()
    assert [line["value"] for line in lines(logger.path)] == [3, {"columns": ["image"], "rows": [[3], [0.5]]}]


@needs("tensorboard")
def test_tensorboard_has_texts_tables_images_and_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    pl.run(stream([TensorBoardLogger(tmp_path, flush="2ba")]))
    found = records.accumulator(tmp_path)
    assert [event.step for event in found.Tensors("sample/text_summary")] == [4, 8, 12]
    text = found.Tensors("confusion/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "| a | b |\n| --- | --- |\n| 1 | 2.5 |\n| x | None |"
    assert found.Tags()["images"] == ["inputs/0", "inputs/1", "inputs/targets/0", "inputs/targets/1"]
    image = found.Images("inputs/0")[0]
    assert (image.height, image.width, image.encoded_image_string[:4]) == (3, 4, b"\x89PNG")
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (hparams["batch_size"].number_value, hparams["max_duration"].string_value) == (5, "2ep")


@needs("pandas")
def test_memory_is_a_table_of_which_no_value_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    memory, twice = InMemoryLogger(), InMemoryLogger()
    pl.run(stream([memory]))
    table = memory.to_pandas()
    assert list(table["sample"]) == [5 * batch for batch in range(13)]
    for name, batches in STEPS.items():
        values = table.set_index("batch")[name].dropna()
        assert (list(values.index), list(values)) == (batches, memory.series(name)[1]), name
    memory.to_csv(tmp_path / "new" / "table.csv")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "new" / "table.csv"), table)
    twice.to_csv(tmp_path / "empty.csv")
    assert (tmp_path / "empty.csv").read_text() == "batch,epoch,sample\n"
    twice.log_metrics({"a": 1, "batch": 0.5}, at(1, sample=4))
    twice.log_metrics({"a": float("nan"), "v": torch.tensor([2.0, 3.0])}, at(1, sample=4))
    twice.log_metrics({"a": 7}, at(0))
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    twice.to_csv(tmp_path / "table.csv")
    assert len(reads) == 1, "values are read from the device at once"
    wanted = "batch,epoch,sample,a,metric/batch,v/0,v/1 0,0,0,7,,, 1,0,4,1,0.5,2.0,3.0 1,0,4,nan,,,"
    assert list(csv.reader((tmp_path / "table.csv").read_text().splitlines())) == list(csv.reader(wanted.split()))
    with pytest.raises(pl.errors.ArgumentError, match="RemoteUploader"):
        memory.to_csv("s3://bucket/table.csv")
    with pytest.raises(OSError, match="to_csv can't write to the folder"):
        memory.to_csv(tmp_path / "empty.csv" / "table.csv")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pl.errors.MissingExtraError, match=r"to_pandas needs.*pip install 'pure_loop\[pandas\]'"):
        memory.to_pandas()


@pytest.mark.slow  # importing wandb
@needs("wandb")
def test_wandb_has_media_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pl.run(stream([BACKENDS["WandBLogger"].make(tmp_path, tags=["a"])], run_name="first"))
    found = records.of_wandb(tmp_path)
    assert found["inputs"][0][1] == "images/separated"
    assert found["inputs/all_masks"][0][1][0].keys() == {"targets"}
    media = tmp_path.glob("wandb/offline-run-*/files/media/**/*")
    assert {"sample", "confusion", "inputs"} <= {file.name.split("_")[0] for file in media if file.is_file()}
    named = [(record.WhichOneof("record_type"), record) for record in records.records_of_wandb(tmp_path)]
    assert {record.run.display_name for kind, record in named if kind == "run"} == {"first"}
    updates = [update for kind, record in named if kind == "config" for update in record.config.update]
    config = {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in updates}
    assert (config["batch_size"], config["max_duration"]) == (5, "2ep")
    # W&B writes the end of a file after the run has finished; nothing is sent again, however much of it is there.
    for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"):
        file.write_bytes(file.read_bytes()[:7])
    pl.run(stream([BACKENDS["WandBLogger"].make(tmp_path)], run_name="first"))
    assert "train/loss" not in records.of_wandb(tmp_path)


@pytest.mark.slow  # importing Comet
@needs("comet_ml")
def test_comet_has_uploads_and_settings(tmp_path: Path) -> None:
    pl.run(stream([BACKENDS["CometMLLogger"].make(tmp_path, tags=["a"])], run_name="first"))
    parameters = [message["param"] for message in records.messages_of_comet(tmp_path, "parameter_msg")]
    found = {each["paramName"]: each["paramValue"] for each in parameters}
    assert (found["batch_size"], found["max_duration"]) == (5, "2ep")
    uploads = list(records.messages_of_comet(tmp_path, "file_upload"))
    named = [(each["additional_params"]["step"], each["upload_type"], each["additional_params"]) for each in uploads]
    assert [step for step, kind, _ in named if kind == "text-sample"] == [4, 8, 12]
    assert [each["fileName"] for step, kind, each in named if kind == "asset" and step == 4] == ["ba4-confusion.csv"]
    figures = [each["figName"] for step, kind, each in named if kind == "visualization" and step == 4]
    assert figures == ["inputs/0", "inputs/1", "inputs/targets/0", "inputs/targets/1"]
    others = {each["key"]: each["value"] for each in records.messages_of_comet(tmp_path, "log_other")}
    assert (others["Name"], others["failed"]) == ("first", False)


@pytest.mark.slow  # importing MLflow, and its database
@needs("mlflow", "sqlalchemy")
def test_mlflow_has_artifacts_parameters_and_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, and raises: it is marked so, and a parameter that changes is a tag."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of a database
    memory, make = InMemoryLogger(), BACKENDS["MLFlowLogger"].make
    pl.run(stream([make(tmp_path, tags={"team": "a"}), memory], tmp_path / "c", run_name="first", max_duration="1ep"))
    _, (run,) = records.runs_of_mlflow(tmp_path)
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "a")
    assert run.data.params == {name: str(value) for name, value in memory.hyperparameters.items()}
    artifacts = Path(run.info.artifact_uri)
    assert json.loads((artifacts / "tables" / "ba4-confusion.json").read_text())["columns"] == ["a", "b"]
    assert (artifacts / "texts" / "ba4-sample.txt").read_text() == "text of batch 4"
    assert (artifacts / "images" / "ba4-inputs-1-targets.png").read_bytes()[:4] == b"\x89PNG"
    saver = pl.callbacks.CheckpointSaver(tmp_path / "c", interval="4ba", background=False)
    with pytest.raises(RuntimeError, match="http"):
        pl.run(stream([make(tmp_path)], tmp_path / "c", callbacks=[saver, records.failing(8)]))
    _, (run,) = records.runs_of_mlflow(tmp_path)
    assert run.info.status == "FAILED"
    assert (run.data.params["max_duration"], run.data.tags["changed/max_duration"]) == ("1ep", "2ep")
