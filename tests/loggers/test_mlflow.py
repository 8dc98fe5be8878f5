"""MLFlowLogger with a database of its own, read back by MLflow's client."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.loggers import InMemoryLogger, MLFlowLogger
from tests.loggers.records import expected_steps, kill_process, killed, stream
from tests.support.extras import needs

pytestmark = needs("mlflow", "sqlalchemy")


@pytest.fixture(scope="module")
def _tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with MLflow's tables, which take seconds to make."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    shutil.copy(_tables, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def runs(uri: str) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return client.search_runs([client.get_experiment_by_name("digits").experiment_id])


def history(uri: str) -> dict[str, list[tuple[int, float]]]:
    from mlflow.tracking import MlflowClient

    client, (run,) = MlflowClient(tracking_uri=uri), runs(uri)
    found = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted((metric.step, metric.value) for metric in metrics) for name, metrics in found.items()}


def steps(uri: str) -> dict[str, list[int]]:
    return {name: [step for step, _ in values] for name, values in history(uri).items()}


@pytest.mark.slow
def test_mlflow_has_what_the_run_had(uri: str, tmp_path: Path) -> None:
    memory = InMemoryLogger()
    pl.run(stream([MLFlowLogger("digits", tracking_uri=uri, tags={"team": "a"}), memory], run_name="first"))
    assert steps(uri) == expected_steps()
    for name, values in history(uri).items():
        assert [value for _, value in values] == memory.series(name)[1]
    (run,) = runs(uri)
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("first", "FINISHED", "a")
    assert run.data.params == {name: str(value) for name, value in memory.hyperparameters.items()}
    artifacts = Path(run.info.artifact_uri)
    assert json.loads((artifacts / "tables" / "ba4-confusion.json").read_text())["columns"] == ["a", "b"]
    assert (artifacts / "texts" / "ba8-sample.txt").read_text() == "text of batch 8"
    assert (artifacts / "images" / "ba4-inputs-1-targets.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_run_that_resumes_is_one_run_and_sends_no_step_twice(uri: str, tmp_path: Path) -> None:
    logger = MLFlowLogger("digits", tracking_uri=uri, flush="1ba")
    logger.end = lambda: None  # type: ignore[method-assign]
    killed([logger], tmp_path / "checkpoints", at=6)
    pl.run(stream([MLFlowLogger("digits", tracking_uri=uri)], tmp_path / "checkpoints"))
    assert steps(uri) == expected_steps()


@pytest.mark.slow
def test_a_run_killed_by_a_signal_has_one_record(uri: str, tmp_path: Path) -> None:
    for at in (5, 9):
        logger = f'pl.loggers.MLFlowLogger("digits", tracking_uri={uri!r}, folder=folder, flush="3ba")'
        kill_process(logger, tmp_path, at=at)
    pl.run(stream([MLFlowLogger("digits", tracking_uri=uri, folder=tmp_path)], tmp_path / "checkpoints"))
    assert steps(uri) == expected_steps()


@pytest.mark.slow
def test_a_parameter_that_changes_is_a_tag(uri: str, tmp_path: Path) -> None:
    pl.run(stream([MLFlowLogger("digits", tracking_uri=uri)], tmp_path / "checkpoints", max_duration="1ep"))
    pl.run(stream([MLFlowLogger("digits", tracking_uri=uri)], tmp_path / "checkpoints", max_duration="2ep"))
    (run,) = runs(uri)
    assert run.data.params["max_duration"] == "1ep"
    assert run.data.tags["changed/max_duration"] == "2ep"


@pytest.mark.slow
def test_a_run_that_raises_is_marked_so(uri: str) -> None:
    def fail(event: pl.Event, state: pl.State) -> None:
        if event is pl.Event.EPOCH_END:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        pl.run(stream([MLFlowLogger("digits", tracking_uri=uri)], callbacks=[fail]))
    (run,) = runs(uri)
    assert run.info.status == "FAILED"
    assert steps(uri)["train/loss"] == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    with pytest.raises(pl.MissingExtraError, match=r"pip install 'pure_loop\[mlflow\]'"):
        MLFlowLogger("digits")
