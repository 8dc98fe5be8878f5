"""TensorBoardLogger, read back by TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import InMemoryLogger, TensorBoardLogger
from tests.loggers.records import expected_steps, killed, stream

pytest.importorskip("tensorboard")


def accumulator(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Without the removal of what a restart repeats: there must be nothing to remove.
    return EventAccumulator(str(folder), purge_orphaned_data=False, size_guidance={"scalars": 0, "images": 0}).Reload()


def steps(folder: Path) -> dict[str, list[int]]:
    found = accumulator(folder)
    return {tag: [event.step for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_what_the_run_had(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    pl.run(stream([TensorBoardLogger(tmp_path / "new"), memory], run_name="first"))
    found = accumulator(tmp_path / "new")
    assert steps(tmp_path / "new") == expected_steps()
    for name in expected_steps():
        values = torch.tensor([event.value for event in found.Scalars(name)])
        assert torch.equal(values, torch.tensor(memory.series(name)[1], dtype=torch.float32))
    assert [event.step for event in found.Tensors("sample/text_summary")] == [4, 8, 12]
    text = found.Tensors("confusion/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "| a | b |\n| --- | --- |\n| 1 | 2.5 |\n| x | None |"
    assert found.Tags()["images"] == ["inputs/0", "inputs/1", "inputs/targets/0", "inputs/targets/1"]
    image = found.Images("inputs/0")[0]
    assert (image.height, image.width, image.encoded_image_string[:4]) == (3, 4, b"\x89PNG")


def test_hyperparameters_are_in_the_same_file(tmp_path: Path) -> None:
    pl.run(stream([TensorBoardLogger(tmp_path, flush="2ba")]))
    (_,) = tmp_path.glob("events.out.tfevents.*")
    content = accumulator(tmp_path).summary_metadata["_hparams_/session_start_info"].plugin_data.content
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["batch_size"].number_value == 5
    assert settings["max_duration"].string_value == "2ep"
    assert settings["optimizer/momentum"].number_value == 0


@pytest.mark.parametrize("at", [6, 9])
@pytest.mark.parametrize("event", [Event.BATCH_START, Event.EPOCH_END])
@pytest.mark.parametrize("flush", ["1ba", "50ba"])
def test_a_run_that_is_killed_and_resumes_has_one_record(tmp_path: Path, at: int, event: Event, flush: str) -> None:
    folder = tmp_path / "tensorboard"
    killed([TensorBoardLogger(folder, flush=flush)], tmp_path / "checkpoints", at=at, event=event)
    for file in folder.glob("events*"):
        with file.open("ab") as open_file:
            open_file.write(b"\x20\0\0\0\0\0\0\0torn")
    pl.run(stream([TensorBoardLogger(folder, flush=flush)], tmp_path / "checkpoints"))
    assert steps(folder) == expected_steps()
    assert [event.step for event in accumulator(folder).Images("inputs/0")] == [4, 8, 12]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[tensorboard\]'"):
        TensorBoardLogger("runs")


def test_a_folder_that_cant_be_written_is_an_error_at_fit_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="TensorBoardLogger can't write to the folder"):
        pl.run(stream([TensorBoardLogger(tmp_path / "file" / "board")]))
