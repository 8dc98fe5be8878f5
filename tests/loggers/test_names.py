"""Names that are recorded: two stay two, one stays the same, and none ends training or leads out of a folder.

Tried: names of metrics, tables, images, masks, texts and files in every local logger; other scripts, spaces, slashes,
line ends, lone surrogates, U+2028, control characters, names of 400 characters, names that end like the number of an
image; columns of CSV that have the name of another one; names of runs in files that a stranger wrote.
"""

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
from pure_loop.loggers import (
    ConsoleLogger,
    CSVLogger,
    InMemoryLogger,
    JSONLinesLogger,
    MLFlowLogger,
    SlackLogger,
    TensorBoardLogger,
)
from pure_loop.loggers._files import file_part, mlflow_key
from tests.support.extras import needs
from tests.support.runs import cross_entropy, mlp, points

AWKWARD = ["val/images", "val images", "val-images", "损失", "精度", "a\nb", "a b", "a\u2028b", "\ud800", "x" * 400]
AWKWARD += [
    "x" * 399,
    "a-0",
    "a",
    "a-0-b",
    "../up",
    "/root",
    "a//b",
    "a/",
    ".",
    "..",
    "batch",
    "metric/batch",
    "é",
    "e\u0301",
]
NAMES = st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1), st.text("ab-/~ 01", min_size=1, max_size=4))


@given(NAMES, NAMES)
@example("val/images", "val images")
@example("损失", "精度")
@example("a-1~~0", "a-1")
def test_two_names_are_two_files_two_keys_and_two_lines(one: str, other: str) -> None:
    for change in (file_part, mlflow_key, printable):
        assert change(one) == change(one)
        assert (change(one) == change(other)) is (one == other)
    assert re.fullmatch(r"[A-Za-z0-9._~-]{1,120}", file_part(one))
    assert printable(one).isprintable()
    printable(one).encode()


def image_file(name: str, index: int, mask: str | None) -> str:
    return f"{file_part(name)}-{index}{'' if mask is None else '-' + file_part(mask)}"


IMAGES = st.tuples(NAMES, st.integers(0, 12), st.none() | NAMES)


@given(IMAGES, IMAGES)
@example(("a", 0, "b-2"), ("a-0-b", 2, None))
@example(("a-0", 1, None), ("a", 0, "1"))
def test_two_images_are_two_files(one: tuple[str, int, str | None], other: tuple[str, int, str | None]) -> None:
    assert (image_file(*one) == image_file(*other)) is (one == other)


@needs("mlflow")
@given(NAMES)
def test_mlflow_takes_each_key(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_key(name))


class Records(pl.Callback):
    """Records each of the names once, as a number, a table and an image."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({name: float(index) for index, name in enumerate(self.names)}, state)
        for index, name in enumerate(self.names):
            logger.log_table(f"t{name}", ["a"], [[index]], state)
            logger.log_images(f"i{name}", torch.full((1, 2, 2, 1), index / 100), state)


def run(loggers: list[Any], start: Any = None, names: list[str] = AWKWARD, **options: Any) -> pl.State:
    arguments: dict[str, Any] = {"max_duration": "2ba", "run_name": "one", **options}
    return pl.run(
        pl.fit(
            mlp() if start is None else start,
            points(),
            loss=cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            callbacks=[Records(names)],
            loggers=loggers,
            **arguments,
        )
    )


def test_no_name_ends_training_or_breaks_a_record_that_is_read_line_by_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, table = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    loggers = [JSONLinesLogger(path), CSVLogger(table), ConsoleLogger("1ba", include="*"), InMemoryLogger()]
    state = run(loggers)
    run([JSONLinesLogger(path), CSVLogger(table)], state, max_duration="3ba")
    record = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    numbers = {line["name"]: line["value"] for line in record if line["kind"] == "metric"}
    assert {printable(name): float(index) for index, name in enumerate(AWKWARD)}.items() <= numbers.items()
    images = [line["value"][0] for line in record if line["kind"] == "images"]
    assert len(set(images)) == len(images) == 3 * len(AWKWARD)
    assert len(list((tmp_path / "metrics.images").iterdir())) == 3 * len(AWKWARD)
    assert len(list((tmp_path / "metrics.tables").iterdir())) == 3 * len(AWKWARD)
    rows = list(csv.reader(table.read_text(encoding="utf-8").splitlines()))
    assert len(rows) == 4
    assert len(set(rows[0])) == len(rows[0])
    assert all(len(row) == len(rows[0]) for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)


@needs("tensorboard")
def test_tensorboard_takes_each_name(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run([TensorBoardLogger(tmp_path)])
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert {printable(name) for name in AWKWARD} <= set(accumulator.Tags()["scalars"])


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_has_a_series_for_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts of a database

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run([MLFlowLogger("names", tracking_uri=uri, folder=tmp_path)], names=[*AWKWARD, "val", "val/loss"])
    client = MlflowClient(tracking_uri=uri)
    run_id = json.loads((tmp_path / "mlflow_run.json").read_text())["id"]
    data = client.get_run(run_id).data.metrics
    assert sorted(value for name, value in data.items() if not name.startswith("train/")) == list(
        range(len(AWKWARD) + 2)
    )


@pytest.mark.parametrize(("name", "words"), [("", "is not empty"), (3, "a name is a text"), (None, "a name is a text")])
def test_what_is_no_name_is_refused(name: Any, words: str) -> None:
    with pytest.raises(pl.PureLoopError, match=f"callback Records records something under the name .*{words}"):
        run([InMemoryLogger()], names=[name])


def test_two_values_of_one_call_do_not_take_one_name() -> None:
    class Both(pl.Callback):
        def batch_end(self, state: pl.State, logger: Any) -> None:
            logger.log_metrics({"f1": {"a/b": 1.0}, "f1/a": {"b": 2.0}}, state)

    with pytest.raises(pl.ArgumentError, match="'f1/a/b' would be the name of two values"):
        pl.run(
            pl.fit(
                mlp(),
                points(),
                loss=cross_entropy,
                optimizer=pl.optim.sgd(lr=0.1),
                max_duration="1ba",
                callbacks=[Both()],
                loggers=[InMemoryLogger()],
            )
        )


HOSTILE = ["../../escaped", "/etc/escaped", "..", "a/b", "a\nb", "\x1b[31m", "x" * 300]


def of_json_lines(folder: Path, name: str) -> Any:
    content = {"time": 1.0, "event": None, "epoch": 0, "batch": 0, "kind": "run", "name": "run_name", "value": name}
    (folder / "metrics.jsonl").write_text(json.dumps(content) + "\n")
    return JSONLinesLogger(folder / "metrics.jsonl")


def of_csv(folder: Path, name: str) -> Any:
    (folder / "metrics.csv").write_text("batch,epoch,time\n")
    (folder / "metrics.run.json").write_text(json.dumps({"run_name": name}))
    return CSVLogger(folder / "metrics.csv")


def of_tensorboard(folder: Path, name: str) -> Any:
    (folder / "events.out.tfevents.1700000000.host.1.0").write_bytes(b"")
    (folder / "tensorboard_run.json").write_text(json.dumps({"run_name": name}))
    return TensorBoardLogger(folder)


def of_slack(folder: Path, name: str) -> Any:
    (folder / "slack_run.json").write_text(json.dumps({"run_name": name}))
    return SlackLogger("#runs", token="t", folder=folder, base_url="http://127.0.0.1:9/")


def of_mlflow(folder: Path, name: str) -> Any:
    (folder / "mlflow_run.json").write_text(json.dumps({"run_name": name, "id": "0" * 32}))
    return MLFlowLogger("names", tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", folder=folder)


@needs("tensorboard", "slack_sdk", "mlflow")
@pytest.mark.parametrize("name", [*HOSTILE[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in HOSTILE[2:])])
@pytest.mark.parametrize("make", [of_json_lines, of_csv, of_tensorboard, of_slack, of_mlflow])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_recorded_name_of_a_run_is_checked_as_one_that_is_passed(
    tmp_path: Path, make: Any, name: str, resumes: bool
) -> None:
    """It named folders to which records were moved, and uploads."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    logger = make(folder, name)
    if not resumes and make in (of_slack, of_mlflow):
        return  # which have no use for the name of another run
    before = sorted(tmp_path.rglob("*"))
    options: dict[str, Any] = {"autoresume": tmp_path / "checkpoints", "run_name": None} if resumes else {}
    with pytest.raises(pl.ArgumentError, match="was changed, or is not of this library") as caught:
        run([logger], **options)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
    after = [path for path in sorted(tmp_path.rglob("*")) if "checkpoints" not in path.parts]
    assert [path for path in after if path not in before] in ([], [folder / "mlflow.db"])
