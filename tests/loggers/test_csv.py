"""CSVLogger: a row for each batch, and one record of a run that is killed and resumes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import CSVLogger, InMemoryLogger
from tests.loggers.records import expected_steps, killed, stream


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        found = list(csv.DictReader(file, strict=True))
    assert all(None not in row and None not in row.values() for row in found), "rows as long as the head"
    return found


def steps(path: Path) -> dict[str, list[int]]:
    names = [name for name in rows(path)[0] if name not in ("batch", "epoch", "time")]
    return {name: [int(row["batch"]) for row in rows(path) if row[name]] for name in names}


def without_times(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "time"} for row in rows(path)]


def test_each_batch_has_a_row_and_each_name_a_column(tmp_path: Path) -> None:
    path, memory = tmp_path / "new" / "metrics.csv", InMemoryLogger()
    pl.run(stream([CSVLogger(path, flush="2ba"), memory], run_name="first"))
    assert [row["batch"] for row in rows(path)] == list(map(str, range(13)))
    assert steps(path) == expected_steps()
    for name in expected_steps():
        assert [float(row[name]) for row in rows(path) if row[name]] == memory.series(name)[1]
    content = json.loads((path.parent / "metrics.run.json").read_text())
    assert content["run_name"] == "first"
    assert content["hyperparameters"] == memory.hyperparameters
    assert (path.parent / "metrics.tables" / "ba4-confusion.csv").read_text() == "a,b\n1,2.5\nx,\n"


@pytest.mark.parametrize("at", [1, 4, 5, 6, 9, 11])
@pytest.mark.parametrize("event", [Event.BATCH_START, Event.BATCH_END, Event.EPOCH_CHECKPOINT])
@pytest.mark.parametrize("flush", ["1ba", "50ba"])
def test_a_run_that_is_killed_and_resumes_has_the_record_of_one_that_is_not(
    tmp_path: Path, at: int, event: Event, flush: str
) -> None:
    whole, path = tmp_path / "whole.csv", tmp_path / "metrics.csv"
    pl.run(stream([CSVLogger(whole)], run_name="one"))
    killed([CSVLogger(path, flush=flush)], tmp_path / "checkpoints", at=at, event=event)
    with path.open("ab") as file:
        file.write(b"11,1,17.5,0.2")  # torn
    pl.run(stream([CSVLogger(path, flush=flush)], tmp_path / "checkpoints"))
    # Columns come in the order in which names were flushed.
    assert without_times(path) == without_times(whole)


def test_a_name_that_comes_later_is_a_further_column(tmp_path: Path) -> None:
    logger, state = CSVLogger(tmp_path / "m.csv"), pl.State.create(torch.nn.Linear(1, 1))

    def record(number: int, **values: Any) -> None:
        logger.log_metrics(values, state.replace(timestamp=pl.Timestamp(batch=number)))
        logger.flush()

    record(1, a=0.5)
    record(1, b=1)
    record(2, a=float("nan"))
    record(2, a=7.0)
    record(3, c=2.5, batch=9)
    logger.close()
    read = [list(row.values())[0:1] + list(row.values())[3:] for row in rows(logger.path)]
    assert list(rows(logger.path)[0])[3:] == ["a", "b", "c", "metric/batch"]
    assert read == [["1", "0.5", "1", "", ""], ["2", "nan", "", "", ""], ["3", "", "", "2.5", "9"]]


def test_a_folder_that_cant_be_written_is_an_error_at_fit_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="CSVLogger can't write to the folder"):
        pl.run(stream([CSVLogger(tmp_path / "file" / "m.csv")]))
