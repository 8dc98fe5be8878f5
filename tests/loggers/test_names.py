"""Names that are recorded: two stay two, one stays the same, and none ends training or leads out of a folder."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop._internal.names import printable
from pure_loop.callback import LoggerGroup
from pure_loop.loggers import ConsoleLogger, CSVLogger, InMemoryLogger, JSONLinesLogger, SlackLogger, TensorBoardLogger
from pure_loop.loggers._files import file_part, mlflow_key
from tests.loggers import records
from tests.support import problem
from tests.support.extras import needs

AWKWARD = ["val/images", "val images", "损失", "精度", "a\nb", "a b", "a\u2028b", "\ud800", "x" * 400, "x" * 399]
AWKWARD += ["a-0", "a", "a-0-b", "../up", "/root", "a//b", "a/", ".", "..", "batch", "metric/batch", "é", "e\u0301"]
NAMES = st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1), st.text("ab-/~ 01", min_size=1, max_size=4))
IMAGES = st.tuples(NAMES, st.integers(0, 12), st.none() | NAMES)


def image_file(name: str, index: int, mask: str | None) -> str:
    return f"{file_part(name)}-{index}{'' if mask is None else '-' + file_part(mask)}"


@given(IMAGES, IMAGES)
@example(("val/images", 0, None), ("val images", 0, None))
@example(("a-1~~0", 0, None), ("a-1", 0, None))
@example(("a", 0, "b-2"), ("a-0-b", 2, None))
@example(("a-0", 1, None), ("a", 0, "1"))
def test_two_names_are_two_files_two_keys_and_two_lines(one: Any, other: Any) -> None:
    assert (image_file(*one) == image_file(*other)) is (one == other)
    for change in (file_part, mlflow_key, printable):
        assert (change(one[0]) == change(other[0])) is (one[0] == other[0])
    assert re.fullmatch(r"[A-Za-z0-9._~-]{1,120}", file_part(one[0]))
    assert printable(one[0]).isprintable()
    printable(one[0]).encode()


@needs("mlflow")
@given(NAMES)
def test_mlflow_takes_each_key(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_key(name))


class Records(pl.Callback):
    """Records each of the names once, as a number, a table and an image."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({name: float(index) for index, name in enumerate(self.names)}, state)
        for index, name in enumerate(self.names):
            logger.log_table(f"t{name}", ["a"], [[index]], state)
            logger.log_images(f"i{name}", torch.full((1, 2, 2, 1), index / 100), state)


def run(loggers: list[Any], start: Any = None, names: list[Any] = AWKWARD, **options: Any) -> pl.State:
    given = {"max_duration": "2ba", "run_name": "one", "strict": False, **options}
    return problem.run(start, callbacks=[Records(names)], loggers=loggers, **given)


@needs("tensorboard")
def test_no_name_ends_training_or_breaks_a_record_that_is_read_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    others = [ConsoleLogger("1ba", include="*"), InMemoryLogger(), TensorBoardLogger(tmp_path / "t")]
    state = run([JSONLinesLogger(path), CSVLogger(table), *others])
    run([JSONLinesLogger(path), CSVLogger(table)], state, max_duration="3ba")
    record = records.lines(path)
    numbers = {line["name"]: line["value"] for line in record if line["kind"] == "metric"}
    assert {printable(name): float(index) for index, name in enumerate(AWKWARD)}.items() <= numbers.items()
    images = [line["value"][0] for line in record if line["kind"] == "images"]
    assert len(set(images)) == len(images) == 3 * len(AWKWARD)
    for folder in ("metrics.images", "metrics.tables"):
        assert len(list((tmp_path / folder).iterdir())) == 3 * len(AWKWARD)
    found = list(csv.reader(table.read_text(encoding="utf-8").splitlines()))
    assert (len(found), len(set(found[0]))) == (4, len(found[0]))
    assert {len(row) for row in found} == {len(found[0])}
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
    assert {printable(name) for name in AWKWARD} <= set(records.accumulator(tmp_path / "t").Tags()["scalars"])


OUTSIDE = ["../../x", "/etc/x", "a/../x", "a\\..\\x", "C:\\x", "C:x", "", "a//b", "a/", ".", "a\nb", "s3://b/x"]


def test_what_is_no_name_or_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    """At the call, by the group that callbacks are given and by each kind of logger, before anything is stored."""
    for name, words in (("", "is not empty"), (3, "a name is a text")):
        with pytest.raises(pl.PureLoopError, match=f"callback Records records something under the name .*{words}"):
            run([InMemoryLogger()], names=[name])
    for name in ["", " ", "a/b", "a\\b", ".hidden", "x" * 200, "tab\t", "a:b", 3]:
        with pytest.raises((pl.errors.ArgumentError, pl.errors.ArgumentTypeError), match="run_name"):
            run([], run_name=name)
    memory = InMemoryLogger()
    others: list[Any] = [JSONLinesLogger(tmp_path / "m.jsonl"), pl.loggers.RemoteUploader("memory://a/b/c")]
    for logger in [LoggerGroup([memory]), memory, *others]:
        for name in OUTSIDE:
            with pytest.raises(pl.errors.ArgumentError, match="no name of a file inside a folder"):
                logger.log_file(name, "/tmp/x")
    LoggerGroup([memory]).log_file("samples/final..txt", "/tmp/x")
    assert memory.files == {"samples/final..txt": "/tmp/x"}
    with pytest.raises(pl.errors.ArgumentTypeError, match="a text"):
        LoggerGroup([memory]).log_file(3, "/tmp/x")  # type: ignore[arg-type]


RUN = {"time": 1.0, "event": None, "epoch": 0, "batch": 0, "kind": "run", "name": "run_name"}
# Files of a record: the line or the text that names the run, and beside it; and the logger that reads it.
RECORDED: dict[str, tuple[str, Any]] = {
    "metrics.jsonl": ("", lambda folder: JSONLinesLogger(folder / "metrics.jsonl")),
    "metrics.run.json": ("metrics.csv", lambda folder: CSVLogger(folder / "metrics.csv")),
    "tensorboard_run.json": ("events.out.tfevents.1700000000.host.1.0", TensorBoardLogger),
    "slack_run.json": (
        "",
        lambda folder: SlackLogger("#runs", token="t", folder=folder, base_url="http://127.0.0.1:9/"),
    ),
}


@needs("tensorboard", "slack_sdk")
@pytest.mark.parametrize("file", RECORDED)
def test_a_recorded_name_of_a_run_is_checked_as_one_that_is_passed(tmp_path: Path, file: str) -> None:
    """It named folders to which records were moved, and uploads."""
    beside, make = RECORDED[file]
    for number, name in enumerate(["../../escaped", "..", "a\nb", "\x1b[31m", "x" * 300]):
        place = tmp_path / str(number)
        folder = place / "a" / "b" / "c"
        folder.mkdir(parents=True)
        content = RUN | {"value": name} if file.endswith("jsonl") else {"run_name": name}
        (folder / file).write_text(json.dumps(content) + "\n")
        if beside:
            (folder / beside).write_text("batch,epoch,time\n" if beside.endswith("csv") else "")
        logger, before = make(folder), sorted(place.rglob("*"))
        with pytest.raises(pl.errors.ArgumentError, match="was changed, or is not of this library") as caught:
            run([logger], autoresume=place / "checkpoints", run_name=None)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000
        assert [path for path in sorted(place.rglob("*")) if "checkpoints" not in path.parts] == before
