"""``pl.profile``: rows that are the run's own, training bitwise the same, and nothing left of it."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.loggers import InMemoryLogger
from pure_loop.loop.batch import LoopStages
from pure_loop.tools.profile_report import Profile
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.refused import Refusal, check
from tests.support.streams import assert_same
from tests.support.worlds import pool

A = pl.algorithms


def fit(model: Any = None, data: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"optimizer": pl.optim.adamw(lr=0.1), "strict": False}
    return problem.fit(model, data or points(6, size=5), **{**defaults, **options})


OPTIONS: dict[str, dict[str, Any]] = {
    "rarely watched": {"watch": {Event.EPOCH_END}},
    "strict": {"strict": True},
    "order of 2021": {"order": "2021"},
    "sam": {"algorithms": [A.sam(rho=0.1), A.ema(smoothing=0.5)]},
    "observed": {"callbacks": [lambda event, state: None]},
    "evaluated": {"evaluators": {"val": points(2)}, "eval_interval": "2ba"},
    "clipped": {"microbatch_size": 2, "clip_grad": 0.1},
    "scaled": {"precision": "amp_fp16"},
    "largest": {"microbatch_size": "auto"},
}


@settings(max_examples=8)
@given(st.sampled_from(sorted(OPTIONS)), st.integers(0, 3), st.integers(1, 5) | st.none())
def test_training_is_bitwise_the_same_and_goes_on(name: str, warmup: int, batches: int | None) -> None:
    stream = fit(**OPTIONS[name])
    report = pl.profile(stream, warmup=warmup, batches=batches)
    if batches is not None:
        # The stream may have yielded the last event to the profile.
        fields = ("params", "buffers", "opt_state", "algorithm_state", "metrics")
        for state in (one := pl.run(stream), other := pl.run(fit(**OPTIONS[name]))):
            assert state.timestamp.batch == 12
        assert not [each for each in fields if pl.testing.differences(getattr(one, each), getattr(other, each))]
    assert report.batches == (12 - warmup if batches is None else batches)
    assert sum(row.seconds for row in report.rows) + report.unattributed == pytest.approx(report.seconds)
    assert sum(row.share for row in report.rows) + report.unattributed / report.seconds == pytest.approx(1)
    assert all(row.seconds >= 0 and row.calls >= 0 for row in report.rows)


def test_steps_write_in_place_as_in_a_run_that_is_not_profiled() -> None:
    found: list[int] = []

    @pl.algorithm(Event.BATCH_END)
    def look(state: pl.State) -> pl.State:
        found.append(next(iter(state.params.values())).data_ptr())
        return state

    for watch in ({Event.BATCH_END}, {Event.EPOCH_END}):
        pl.profile(fit(algorithms=[look], watch=watch), warmup=1, batches=None)
    assert len(found) == 24
    assert found[-2] == found[-1]


def calls(report: Profile) -> dict[tuple[str, str, str], int]:
    return {(row.kind, row.name, row.event): row.calls for row in report.rows}


class Note(pl.Callback):
    """Records at each batch."""

    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"noted": 1.0}, state)


def test_a_row_for_everything_that_was_called() -> None:
    evaluator = pl.Evaluator(points(3), metrics=[pl.metrics.accuracy()])
    observers: dict[str, Any] = {"callbacks": [Note()], "loggers": [InMemoryLogger()], "evaluators": {"val": evaluator}}
    report = pl.profile(fit(**OPTIONS["sam"], **observers, microbatch_size=2), warmup=0, batches=None)
    found = calls(report)
    steps, pieces, evaluated = 12, 3, 2 * 3  # of 5 samples by 2
    stages = {
        **dict.fromkeys(("forward", "loss", "backward"), 2 * steps * pieces),  # the second gradient is that of SAM
        **dict.fromkeys(("gradients: scale, clip", "split into microbatches"), 2 * steps),
        "optimizer": steps,
        "val forward": evaluated + 1,  # one before training, to see whether the metrics fit
        "val metrics": evaluated + 2 + 2,  # two before training, which have to be equal
    }
    assert {key: count for key, count in found.items() if key[1] not in ("InMemoryLogger", "Recorder")} == {
        **{("stage", name, ""): count for name, count in stages.items()},
        ("data", "train data", ""): steps + 2,
        ("data", "val data", ""): evaluated + 1 + 2,
        ("algorithm", "sam", "AFTER_TRAIN_BATCH"): steps,
        ("algorithm", "ema", "FIT_START"): 1,
        ("algorithm", "ema", "BATCH_END"): steps,
        ("algorithm", "ema", "EVAL_START"): 3,
        ("callback", "Note", "BATCH_END"): steps,
    }
    # What a callback records is the logger's time.
    assert found["logger", "InMemoryLogger", ""] > 2 * steps
    assert found["logger", "Recorder", "BATCH_END"] == steps
    assert set(report.by("kind")) == {"stage", "data", "algorithm", "callback", "logger"}
    assert list(report.by("name").values()) == sorted(report.by("name").values(), reverse=True)
    assert [row["name"] for row in report.table()] == [row.name for row in report.rows]
    found = calls(pl.profile(fit(), warmup=3, batches=4))
    assert (found["stage", "forward", ""], found["stage", "optimizer", ""]) == (4, 4)
    lines = repr(report).splitlines()
    assert lines[0].startswith("profile: 12 batches in ")
    assert "on cpu" in lines[0]
    assert lines[-1].lstrip().startswith("unattributed")
    assert report._repr_html_().startswith("<table><caption>profile: 12 batches")
    with pytest.raises(pl.errors.ArgumentError, match="what must be"):
        report.by("kinds")  # type: ignore[arg-type]


def test_nothing_is_left_of_it() -> None:
    @pl.algorithm(Event.BATCH_END)
    def fail(state: pl.State) -> pl.State:
        if state.timestamp.batch == 6:
            raise ValueError("in the middle")
        return state

    logger, metrics = InMemoryLogger(), [pl.metrics.accuracy()]
    for batches in (2, 9):  # the second is an error of the run
        stream = fit(algorithms=[fail], loggers=[logger], evaluators={"val": pl.Evaluator(points(1), metrics=metrics)})
        parts = stream.gi_frame.f_locals["script"].gi_frame.f_locals["fit"]
        before, methods = parts.evaluators[0].metrics, {**vars(logger)}
        with contextlib.suppress(ValueError):
            pl.profile(stream, warmup=1, batches=batches)
        assert type(parts.stages) is LoopStages
        assert parts.evaluators[0].metrics == before
        assert "epoch" not in vars(parts.source)
        assert vars(logger).keys() == methods.keys()
        stream.close()


@pytest.mark.slow  # the compiler's tracing, and processes
def test_compiled_steps_are_one_row_and_each_rank_profiles_its_own_work(interpreted: None) -> None:
    for watch, steps in (({Event.EPOCH_END}, 1), ({Event.AFTER_LOSS, Event.BATCH_END}, 3)):
        options: dict[str, Any] = {"compile": True, "watch": watch, "steps_per_call": steps}
        report = pl.profile(stream := fit(**options), warmup=4, batches=4)
        assert report.batches >= 4
        assert calls(report)["stage", "compiled step", ""] > 0
        assert "Steps are compiled" in repr(report)
        assert_same(pl.run(stream).params, pl.run(fit(**options)).params, "compiled")

    def program(rank: int) -> Any:
        report = pl.profile(stream := fit(parallel="shard"), warmup=1, batches=3)
        return calls(report)["stage", "backward", ""], pl.run(stream).module().state_dict()["2.bias"].tolist()

    alone = pl.run(fit()).params["2.bias"].tolist()
    assert pool().run(program) == [(3, pytest.approx(alone, abs=1e-3))] * 2


def test_a_trace_nests_and_covers_the_rows(tmp_path: Path) -> None:
    """Every unit of time belongs to the innermost span that is open."""
    path = tmp_path / "new" / "trace.json"
    report = pl.profile(fit(**OPTIONS["sam"]), warmup=1, batches=5, trace=path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(event.keys() >= {"name", "cat", "ts", "dur", "pid", "tid"} for event in events)
    exclusive: Counter[str] = Counter()
    around: list[tuple[float, str]] = []
    for event in events:
        end = event["ts"] + event["dur"]
        while around and event["ts"] >= around[-1][0] - 1e-6:
            around.pop()
        if around:
            assert end <= around[-1][0] + 1e-6
            exclusive[around[-1][1]] -= event["dur"]
        exclusive[event["name"]] += event["dur"]
        around.append((end, event["name"]))
    for row in report.rows:
        name = f"{row.name} at {row.event}" if row.event else row.name
        assert exclusive[name] == pytest.approx(1e6 * row.seconds, abs=1)


@pytest.mark.slow  # torch's profiler
def test_the_profiler_of_torch_sees_the_rows(tmp_path: Path) -> None:
    report = pl.profile(fit(), warmup=2, batches=3, torch_profiler=True, trace=tmp_path / "trace.json")
    found = {average.key: average.count for average in report.torch.key_averages()}
    assert found["optimizer"] == found["backward"] == 3
    assert any(name.startswith("aten::") for name in found)
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def begun() -> Any:
    next(stream := fit())
    return stream


def test_what_can_not_be_profiled_is_refused() -> None:
    for says, make, options in (
        ("has begun: give a new one", begun, {}),
        ("profile(list): give the stream of fit itself", lambda: list(fit()), {}),
        ("of pl.progress", lambda: pl.progress(fit()), {}),
        ("fit", lambda: pl.evaluate(pl.State.create(mlp()), points(), loss=cross_entropy), {}),
        ("ended after 12 batches, within the warmup of 12", fit, {"warmup": 12}),
        ("is a folder", fit, {"trace": "."}),
        ("3 is no path", fit, {"trace": 3}),
        ("is a URL", fit, {"trace": "memory://t.json", "torch_profiler": True}),
        ("profile has no argument 'steps'", fit, {"steps": 3}),
    ):
        call = lambda make=make, options=options: pl.profile(make(), **options)  # noqa: E731
        check(Refusal(says, call, pl.PureLoopError, (says,)))


@pytest.mark.gpu
def test_on_a_device_times_are_those_of_launches_unless_it_is_waited_for() -> None:
    model = mlp().cuda()
    assert "synchronize=True" in repr(pl.profile(fit(model), warmup=2, batches=3))
    report = pl.profile(fit(model), warmup=2, batches=3, synchronize=True, torch_profiler=True)
    assert report.synchronized
    assert "synchronize" not in repr(report)
    assert torch.device(report.device).type == "cuda"
