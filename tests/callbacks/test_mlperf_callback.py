"""MLPerfCallback, in real training loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pure_loop as pl
from pure_loop.callbacks import MLPerfCallback
from tests.support.problem import fit, mlp, points


def lines(folder: Path, number: int = 0) -> list[dict[str, Any]]:
    texts = (folder / f"result_{number}.txt").read_text().splitlines()
    assert all(text.startswith(":::MLLOG ") for text in texts)
    return [json.loads(text.removeprefix(":::MLLOG ")) for text in texts]


def without_times(folder: Path) -> list[tuple[Any, ...]]:
    return [(line["key"], line["value"], line["metadata"]) for line in lines(folder)]


def training(folder: Path, target: float = 0.0, start: Any = None, mode: Any = "min", **settings: Any) -> pl.Stream:
    callback = MLPerfCallback(folder, "points", target, "val/loss", mode=mode, organization="us", **settings)
    evaluators = {"val": points(1, size=5, seed=1), "other": points(1, size=5)}
    options: dict[str, Any] = {"callbacks": [callback], "evaluators": evaluators, "seed": 3, "eval_interval": "2ba"}
    return fit(start or mlp(), points(size=5), **options)


def test_a_run_has_the_lines_of_the_rules(tmp_path: Path) -> None:
    state = pl.run(training(tmp_path / "new", settings={"eval_samples": 5}))
    record = lines(tmp_path / "new")
    keys = [line["key"] for line in record]
    of = ("benchmark", "division", "org", "platform", "status")
    header = [f"submission_{name}" for name in of]
    evaluation = ["eval_start", "eval_accuracy", "eval_stop"]
    assert keys == [
        *(*header, "eval_samples", "seed", "init_start", "init_stop", "run_start", "epoch_start", "global_batch_size"),
        *(*evaluation, "epoch_stop", "epoch_start", *evaluation, *evaluation, "epoch_stop", "run_stop"),
    ]
    values = {line["key"]: line["value"] for line in record if line["value"] is not None}
    assert [values[name] for name in header] == ["points", "open", "us", "none", "onprem"]
    assert (values["eval_samples"], values["seed"], values["global_batch_size"]) == (5, 3, 5)
    assert values["eval_accuracy"] == float(state.metrics["val"]["loss"])
    kinds = {line["key"].rpartition("_")[2]: line["event_type"] for line in record}
    assert (kinds["start"], kinds["stop"], kinds["accuracy"]) == ("INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME")
    assert [line["metadata"] for line in record if line["key"].startswith("epoch")] == [
        {"epoch_num": number} for number in (1, 1, 2, 2)
    ]
    evaluations = [line["metadata"] for line in record if line["key"] == "eval_accuracy"]
    assert evaluations == [{"epoch_num": e, "samples_count": n} for e, n in ((1, 10), (2, 20), (2, 30))]
    assert record[-1]["metadata"] == {"status": "aborted", "epoch_num": 2, "samples_count": 30}
    times = [line["time_ms"] for line in record if line["key"] != "init_start"]
    assert times == sorted(times)
    assert all(line.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for line in record)


def test_a_run_stops_at_its_target_which_itself_is_enough_and_nothing_follows(tmp_path: Path) -> None:
    """The first that is reached ends the record, and not the run."""
    pl.run(training(tmp_path, target=-1e3))
    values = [line["value"] for line in lines(tmp_path) if line["key"] == "eval_accuracy"]
    for number, mode in enumerate(("min", "max"), 1):
        target = values[1]
        first = next(i for i, value in enumerate(values) if (value <= target if mode == "min" else value >= target))
        assert pl.run(training(tmp_path, target=target, mode=mode)).timestamp.batch == 6
        record = lines(tmp_path, number)
        assert [line["key"] for line in record][-4:] == ["eval_start", "eval_accuracy", "eval_stop", "run_stop"]
        counts = {"epoch_num": (1, 2, 2)[first], "samples_count": (10, 20, 30)[first]}
        assert record[-1]["metadata"] == {"status": "success", **counts}


def test_a_run_that_resumes_continues_its_file(tmp_path: Path) -> None:
    whole = list(training(tmp_path / "whole"))
    expected, checkpoints = without_times(tmp_path / "whole"), (pl.Event.BATCH_CHECKPOINT, pl.Event.EPOCH_CHECKPOINT)
    for index in [index for index, (event, _) in enumerate(whole) if event in checkpoints][::3]:
        folder = tmp_path / str(index)
        killed = training(folder)
        # After the State was kept, as far as the next evaluation, or to the end.
        for number, (event, _) in enumerate(killed):
            if number > index and event is pl.Event.EVAL_END:
                break
        killed.close()
        with open(folder / "result_0.txt", "a") as file:
            file.write(':::MLLOG {"namespace": "", "time')
        for _ in range(2):
            pl.run(training(folder, start=whole[index][1]))
            assert without_times(folder) == expected
        assert not (folder / "result_1.txt").exists()


def test_a_new_run_has_a_file_of_its_own_and_a_run_that_is_left_no_end(tmp_path: Path) -> None:
    left = training(tmp_path)
    assert any(event is pl.Event.BATCH_END for event, _ in left)
    left.close()
    pl.run(training(tmp_path))
    assert [lines(tmp_path, number)[-1]["key"] for number in (0, 1)] == ["global_batch_size", "run_stop"]
