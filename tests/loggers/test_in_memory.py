"""InMemoryLogger as a table: no value is dropped, and what pandas reads is what the CSV file has."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

import pure_loop as pl
from pure_loop.loggers import CSVLogger, InMemoryLogger
from tests.loggers.records import expected_steps, stream


def test_the_table_has_each_value_of_a_run(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    memory = InMemoryLogger()
    pl.run(stream([memory, CSVLogger(tmp_path / "written.csv")]))
    table = memory.to_pandas()
    assert list(table["batch"]) == list(range(13))
    assert list(table["sample"]) == [5 * batch for batch in range(13)]
    for name, batches in expected_steps().items():
        values = table.set_index("batch")[name].dropna()
        assert (list(values.index), list(values)) == (batches, memory.series(name)[1]), name
    written = pandas.read_csv(tmp_path / "written.csv")
    assert set(written) - {"time"} == set(table) - {"sample"}
    assert all(written[name].dropna().tolist() == table[name].dropna().tolist() for name in expected_steps())
    memory.to_csv(tmp_path / "new" / "table.csv")
    pandas.testing.assert_frame_equal(pandas.read_csv(tmp_path / "new" / "table.csv"), table)


def test_a_name_that_is_recorded_twice_at_a_batch_adds_a_row(tmp_path: Path) -> None:
    memory, state = InMemoryLogger(), pl.State.create(torch.nn.Linear(1, 1))
    later = state.replace(timestamp=pl.Timestamp(batch=1, sample=4))
    memory.log_metrics({"a": 1, "batch": 0.5}, later)
    memory.log_metrics({"a": float("nan"), "v": torch.tensor([2.0, 3.0])}, later)
    memory.log_metrics({"a": 7}, state)
    memory.to_csv(tmp_path / "table.csv")
    with open(tmp_path / "table.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["batch", "epoch", "sample", "a", "metric/batch", "v/0", "v/1"],
        ["0", "0", "0", "7", "", "", ""],
        ["1", "0", "4", "1", "0.5", "2.0", "3.0"],
        ["1", "0", "4", "nan", "", "", ""],
    ]


def test_values_are_read_from_the_device_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = InMemoryLogger()
    pl.run(stream([memory], callbacks=[], evaluators=None))
    reads: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or tolist(self))
    memory.to_csv(tmp_path / "table.csv")
    assert reads == [12]


def test_nothing_recorded_is_an_empty_table(tmp_path: Path) -> None:
    InMemoryLogger().to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == "batch,epoch,sample\n"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(pl.MissingExtraError, match=r"to_pandas needs.*pip install 'pure_loop\[pandas\]'"):
        InMemoryLogger().to_pandas()


def test_bad_paths_are_refused_with_what_to_write(tmp_path: Path) -> None:
    memory = InMemoryLogger()
    with pytest.raises(pl.ArgumentError, match="RemoteUploader"):
        memory.to_csv("s3://bucket/table.csv")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="to_csv can't write to the folder"):
        memory.to_csv(tmp_path / "file" / "table.csv")
