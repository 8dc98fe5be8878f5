"""MLPerfCallback, in real training loops."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import pure_loop as pl
from pure_loop.callbacks import MLPerfCallback
from tests.support.problem import fit, mlp, points, run


def lines(folder: Path, number: int = 0) -> list[dict[str, Any]]:
    path = folder / f"result_{number}.txt"
    texts = path.read_text().splitlines()
    assert all(text.startswith(":::MLLOG ") for text in texts)
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in texts]


def without_times(folder: Path, number: int = 0) -> list[tuple[Any, ...]]:
    return [(line["key"], line["value"], line["metadata"]) for line in lines(folder, number)]


def keys(folder: Path, number: int = 0) -> list[str]:
    return [line["key"] for line in lines(folder, number)]


def options(folder: Path, target: float = 0.0, **settings: Any) -> dict[str, Any]:
    callback = MLPerfCallback(folder, "points", target, "val/loss", **settings)
    return {"callbacks": [callback], "evaluators": {"val": points(1, size=5, seed=1), "other": points(1, size=5)}}


HEADER = [
    *("submission_benchmark", "submission_division", "submission_org", "submission_platform", "submission_status"),
    *("seed", "init_start", "init_stop", "run_start"),
]


def test_a_run_has_the_lines_of_the_rules(tmp_path: Path) -> None:
    before = time.time_ns() // 1_000_000
    state = run(
        mlp(), points(size=5), seed=3, **options(tmp_path / "new", organization="us", settings={"eval_samples": 5})
    )
    record = lines(tmp_path / "new")
    epoch = ["epoch_start", "epoch_stop", "eval_start", "eval_accuracy", "eval_stop"]
    expected = [*HEADER[:5], "eval_samples", *HEADER[5:], epoch[0], "global_batch_size", *epoch[1:], *epoch, "run_stop"]
    assert [line["key"] for line in record] == expected
    values = {line["key"]: line["value"] for line in record if line["value"] is not None}
    assert values == {
        "submission_benchmark": "points",
        "submission_division": "open",
        "submission_org": "us",
        "submission_platform": "none",
        "submission_status": "onprem",
        "eval_samples": 5,
        "seed": 3,
        "global_batch_size": 5,
        "eval_accuracy": float(state.metrics["val"]["loss"]),
    }
    kinds = {line["key"].rpartition("_")[2]: line["event_type"] for line in record}
    assert (kinds["start"], kinds["stop"], kinds["accuracy"]) == ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
    assert [line["metadata"] for line in record if line["key"].startswith("epoch")] == [
        {"epoch_num": number} for number in (1, 1, 2, 2)
    ]
    evaluations = [line["metadata"] for line in record if line["key"] == "eval_accuracy"]
    assert evaluations == [{"epoch_num": 1, "samples_count": 15}, {"epoch_num": 2, "samples_count": 30}]
    assert record[-1]["metadata"] == {"status": "aborted", "epoch_num": 2, "samples_count": 30}
    times = [line["time_ms"] for line in record if line["key"] != "init_start"]
    assert before <= next(line["time_ms"] for line in record if line["key"] == "init_start") <= times[0]
    assert times == sorted(times)
    assert all(line.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for line in record)


def test_a_run_stops_at_its_target_and_nothing_follows(tmp_path: Path) -> None:
    state = run(mlp(), points(size=5), eval_interval="1ba", **options(tmp_path, target=1e3))
    record = lines(tmp_path)
    assert state.timestamp.batch == 6
    assert [line["key"] for line in record][-4:] == ["eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert record[-1]["metadata"] == {"status": "success", "epoch_num": 1, "samples_count": 5}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_target_itself_is_enough(mode: Any, tmp_path: Path) -> None:
    run(mlp(), points(size=5), **options(tmp_path, target=-1e3, mode="min"))
    values = [line["value"] for line in lines(tmp_path) if line["key"] == "eval_accuracy"]
    target = values[1]
    first = 0 if (values[0] < target) == (mode == "min") else 1
    run(mlp(), points(size=5), **options(tmp_path, target=target, mode=mode))
    expected = {"status": "success", "epoch_num": first + 1, "samples_count": 15 * (first + 1)}
    assert lines(tmp_path, 1)[-1]["metadata"] == expected


def test_a_run_that_resumes_continues_its_file(tmp_path: Path) -> None:
    whole = list(fit(mlp(), points(size=5), eval_interval="2ba", **options(tmp_path / "whole")))
    expected = without_times(tmp_path / "whole")
    kept = [
        index
        for index, (event, _) in enumerate(whole)
        if event in (pl.Event.BATCH_CHECKPOINT, pl.Event.EPOCH_CHECKPOINT)
    ]
    for index in kept:
        folder = tmp_path / str(index)
        killed = fit(mlp(), points(size=5), eval_interval="2ba", **options(folder))
        # After the State was kept, as far as the next evaluation, or to the end.
        for number, (event, _) in enumerate(killed):
            if number > index and event is pl.Event.EVAL_END:
                break
        killed.close()
        with open(folder / "result_0.txt", "a") as file:
            file.write(':::MLLOG {"namespace": "", "time')
        for _ in range(2):
            pl.run(fit(whole[index][1], points(size=5), eval_interval="2ba", **options(folder)))
            assert without_times(folder) == expected
        assert not (folder / "result_1.txt").exists()


def test_a_new_run_has_a_file_of_its_own_and_a_run_that_is_left_no_end(tmp_path: Path) -> None:
    left = fit(mlp(), points(size=5), **options(tmp_path))
    for event, _ in left:
        if event is pl.Event.BATCH_END:
            break
    left.close()
    run(mlp(), points(size=5), **options(tmp_path))
    assert keys(tmp_path)[-1] == "global_batch_size"
    assert keys(tmp_path, 1)[-1] == "run_stop"
