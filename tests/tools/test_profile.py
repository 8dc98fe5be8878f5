"""``pl.profile``: rows that are the run's own, training bitwise the same, and nothing left of it."""

from __future__ import annotations

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
from pure_loop.loop.call import Fit
from pure_loop.tools.profile_report import Profile
from tests.support.runs import cross_entropy, equal, mlp, points
from tests.support.worlds import pool


def fit(model: Any = None, data: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
    return pl.fit(model or mlp(), data or points(6), **{**defaults, "clock": lambda: 0.0, **options})


def noop(event: Event, state: pl.State) -> None:
    """A callback."""


OPTIONS: dict[str, Any] = {
    "plain": {},
    "watched": {"watch": {Event.BATCH_END}},
    "rarely watched": {"watch": {Event.EPOCH_END}},
    "strict": {"strict": True},
    "copied": {"donate": False},
    "order of 2021": {"order": "2021"},
    "sam": {"algorithms": [pl.algorithms.sam(rho=0.1), pl.algorithms.ema(smoothing=0.5)]},
    "observed": {"callbacks": [noop]},
    "evaluated": {"evaluators": {"val": points(2)}, "eval_interval": "2ba"},
    "clipped": {"microbatch_size": 2, "clip_grad": 0.1},
    "scaled": {"precision": "amp_fp16"},
    "largest": {"microbatch_size": "auto"},
}


def same(one: pl.State, other: pl.State) -> None:
    """Of which the stream may have yielded the last event to the profile."""
    for name in ("params", "buffers", "opt_state", "algorithm_state", "timestamp", "metrics"):
        equal(getattr(one, name), getattr(other, name))


@settings(max_examples=15)
@given(name=st.sampled_from(sorted(OPTIONS)), warmup=st.integers(0, 3), batches=st.integers(1, 5) | st.none())
def test_training_is_bitwise_the_same_and_goes_on(name: str, warmup: int, batches: int | None) -> None:
    stream = fit(**OPTIONS[name])
    report = pl.profile(stream, warmup=warmup, batches=batches)
    if batches is not None:
        same(pl.run(stream), pl.run(fit(**OPTIONS[name])))
    assert report.batches == (12 - warmup if batches is None else batches)
    assert sum(row.seconds for row in report.rows) + report.unattributed == pytest.approx(report.seconds)
    assert sum(row.share for row in report.rows) + report.unattributed / report.seconds == pytest.approx(1)
    assert all(row.seconds >= 0 and row.calls >= 0 for row in report.rows)


def pointers(stream: Any, advance: Any) -> list[int]:
    """Where the parameters are after each batch."""
    found = []

    @pl.algorithm(Event.BATCH_END)
    def look(state: pl.State) -> pl.State:
        found.append(next(iter(state.params.values())).data_ptr())
        return state

    advance(stream([look]))
    return found


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}, {Event.EPOCH_END}])
def test_steps_write_in_place_as_in_a_run_that_is_not_profiled(watch: Any) -> None:
    def stream(algorithms: Any) -> Any:
        return fit(algorithms=algorithms, watch=watch)

    def places(found: list[int]) -> list[bool]:
        return [one == other for one, other in zip(found[1:], found, strict=False)]

    alone = places(pointers(stream, pl.run))
    assert any(alone)
    assert places(pointers(stream, lambda it: pl.profile(it, warmup=1, batches=None))) == alone


def rows(report: Profile) -> dict[tuple[str, str, str], int]:
    return {(row.kind, row.name, row.event): row.calls for row in report.rows}


class Note(pl.Callback):
    """Records at each batch."""

    def batch_end(self, state: pl.State, logger: Any) -> None:
        logger.log_metrics({"noted": 1.0}, state)


def test_a_row_for_everything_that_was_called() -> None:
    report = pl.profile(
        fit(
            algorithms=[pl.algorithms.sam(rho=0.1), pl.algorithms.ema(smoothing=0.5)],
            callbacks=[Note()],
            loggers=[InMemoryLogger()],
            evaluators={"val": pl.Evaluator(points(3), metrics=[pl.metrics.accuracy()])},
            microbatch_size=2,
        ),
        warmup=0,
        batches=None,
    )
    found = rows(report)
    steps, pieces = 12, 3  # of 5 samples by 2
    evaluated = 2 * 3
    assert {key: count for key, count in found.items() if key[1] not in ("InMemoryLogger", "Recorder")} == {
        ("stage", "forward", ""): 2 * steps * pieces,  # the second gradient is that of SAM
        ("stage", "loss", ""): 2 * steps * pieces,
        ("stage", "backward", ""): 2 * steps * pieces,
        ("stage", "gradients: scale, clip", ""): 2 * steps,
        ("stage", "split into microbatches", ""): 2 * steps,
        ("stage", "optimizer", ""): steps,
        ("stage", "val forward", ""): evaluated + 1,  # one before training, to see whether the metrics fit
        ("stage", "val metrics", ""): evaluated + 2 + 2,  # two before training, which have to be equal
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


def test_only_the_batches_after_the_warmup_count() -> None:
    found = rows(pl.profile(fit(), warmup=3, batches=4))
    assert (found["stage", "forward", ""], found["stage", "optimizer", ""]) == (4, 4)


@pytest.mark.parametrize("name", ["plain", "strict"])
def test_nothing_is_left_of_it(name: str) -> None:
    logger = InMemoryLogger()
    seen: list[Any] = []

    @pl.algorithm(Event.BATCH_START)
    def spy(state: pl.State, stages: Any) -> pl.State:
        seen.append(type(stages))
        return state

    # Checking by value what an evaluation's forward draws takes seconds, once.
    evaluators = None if name == "strict" else {"val": pl.Evaluator(points(1), metrics=[pl.metrics.accuracy()])}
    stream = fit(algorithms=[spy], loggers=[logger], evaluators=evaluators, **OPTIONS[name])
    script = stream.gi_frame.f_locals["script"]
    parts: Fit = script.gi_frame.f_locals["fit"]
    before, methods = [evaluator.metrics for evaluator in parts.evaluators], {**vars(logger)}
    pl.profile(stream, warmup=1, batches=2)
    assert type(parts.stages) is LoopStages
    assert [evaluator.metrics for evaluator in parts.evaluators] == before
    assert "epoch" not in vars(parts.source)
    assert vars(logger).keys() == methods.keys()
    next(event for event, _ in stream if event is Event.BATCH_END)
    assert seen[0] is not LoopStages
    assert seen[-1] is LoopStages
    stream.close()


def test_an_error_of_the_run_is_raised_and_leaves_nothing() -> None:
    @pl.algorithm(Event.BATCH_END)
    def fail(state: pl.State) -> pl.State:
        raise ValueError("in the middle")

    stream = fit(algorithms=[fail])
    parts: Fit = stream.gi_frame.f_locals["script"].gi_frame.f_locals["fit"]
    with pytest.raises(ValueError, match="in the middle"):
        pl.profile(stream, warmup=0)
    assert type(parts.stages) is LoopStages


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("watch", [{Event.EPOCH_END}, {Event.AFTER_LOSS, Event.BATCH_END}])
def test_compiled_steps_are_one_row(watch: Any, steps: int, interpreted: None) -> None:
    options: dict[str, Any] = {"compile": True, "watch": watch, "steps_per_call": steps}
    options["algorithms"] = [pl.algorithms.ema(smoothing=0.5)]
    stream = fit(**options)
    report = pl.profile(stream, warmup=4, batches=4)
    assert report.batches >= 4
    assert rows(report)["stage", "compiled step", ""] > 0
    assert "Steps are compiled" in repr(report)
    same(pl.run(stream), pl.run(fit(**options)))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_each_rank_profiles_its_own_work(parallel: str) -> None:
    def program(rank: int) -> Any:
        stream = pl.fit(
            mlp(),
            points(6, size=4),
            loss=cross_entropy,
            optimizer=pl.optim.adamw(lr=0.1),
            max_duration="2ep",
            parallel=parallel,
        )
        report = pl.profile(stream, warmup=1, batches=3)
        return rows(report)["stage", "backward", ""], {
            name: tensor.tolist() for name, tensor in pl.run(stream).module().state_dict().items()
        }

    alone = pl.run(fit(mlp(), points(6, size=4))).module().state_dict()
    for backwards, weights in pool().run(program):
        assert backwards == 3
        for name, tensor in alone.items():
            torch.testing.assert_close(torch.tensor(weights[name]), tensor, rtol=1e-3, atol=1e-4)


def test_a_trace_nests_and_covers_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    report = pl.profile(fit(**OPTIONS["sam"]), warmup=1, batches=5, trace=path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert all(event.keys() >= {"name", "cat", "ts", "dur", "pid", "tid"} for event in events)
    ends: list[float] = []
    inside: Counter[str] = Counter()
    exclusive: Counter[str] = Counter()
    names: list[str] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while ends and start >= ends[-1] - 1e-6:
            ends.pop()
            names.pop()
        assert not ends or end <= ends[-1] + 1e-6
        if names:
            inside[names[-1]] += event["dur"]
        exclusive[event["name"]] += event["dur"]
        ends.append(end)
        names.append(event["name"])
    for row in report.rows:
        name = f"{row.name} at {row.event}" if row.event else row.name
        assert exclusive[name] - inside[name] == pytest.approx(1e6 * row.seconds, abs=1)


@pytest.mark.slow
def test_the_profiler_of_torch_sees_the_rows(tmp_path: Path) -> None:
    report = pl.profile(fit(), warmup=2, batches=3, torch_profiler=True, trace=tmp_path / "trace.json")
    found = {average.key: average.count for average in report.torch.key_averages()}
    assert found["optimizer"] == found["backward"] == 3
    assert any(name.startswith("aten::") for name in found)
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


def test_the_report_in_words() -> None:
    report = pl.profile(fit(**OPTIONS["sam"]), warmup=1, batches=5)
    text, html = repr(report), report._repr_html_()
    assert text.startswith("profile: 5 batches in ")
    assert "on cpu" in text.splitlines()[0]
    assert "algorithm sam" in text
    assert text.splitlines()[-1].lstrip().startswith("unattributed")
    assert html.startswith("<table><caption>profile: 5 batches")
    assert "synchronize" not in text
    with pytest.raises(pl.ArgumentError, match="what must be"):
        report.by("kinds")  # type: ignore[arg-type]


def begun() -> Any:
    stream = fit()
    next(stream)
    return stream


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (begun, {}, pl.ArgumentError, r"has begun: give a new one, .*pl.profile\(pl.fit\(state, "),
        (lambda: list(fit()), {}, pl.ArgumentTypeError, r"profile\(list\): give the stream of fit itself"),
        (lambda: pl.progress(fit()), {}, pl.ArgumentTypeError, "of pl.progress"),
        (lambda: pl.evaluate(pl.State.create(mlp()), points(), loss=cross_entropy), {}, pl.ArgumentTypeError, "fit"),
        (fit, {"warmup": 12}, pl.ArgumentError, "ended after 12 batches, within the warmup of 12"),
        (fit, {"warmup": 20}, pl.ArgumentError, "ended after 12 batches"),
        (fit, {"warmup": -1}, pl.ArgumentError, "warmup"),
        (fit, {"batches": 0}, pl.ArgumentError, "batches"),
        (fit, {"batches": 1.5}, pl.ArgumentTypeError, "batches"),
        (fit, {"synchronize": 1}, pl.ArgumentTypeError, "synchronize"),
        (fit, {"trace": "."}, pl.ArgumentError, "is a folder"),
        (fit, {"trace": 3}, pl.ArgumentTypeError, "3 is no path"),
        (fit, {"trace": "memory://t.json", "torch_profiler": True}, pl.ArgumentError, "is a URL"),
        (fit, {"steps": 3}, pl.ArgumentTypeError, "profile has no argument 'steps'"),
    ],
)
def test_bad_input_is_refused(make: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        pl.profile(make(), **options)


@pytest.mark.gpu
def test_on_a_device_times_are_those_of_launches_unless_it_is_waited_for() -> None:
    model = mlp().cuda()
    assert "synchronize=True" in repr(pl.profile(fit(model), warmup=2, batches=3))
    report = pl.profile(fit(model), warmup=2, batches=3, synchronize=True, torch_profiler=True)
    assert report.synchronized
    assert "synchronize" not in repr(report)
    assert torch.device(report.device).type == "cuda"
