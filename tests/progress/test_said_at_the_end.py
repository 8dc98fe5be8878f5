"""What is said at the end of a run: why it stopped, that nothing was left, where it resumed, how to resume."""

from __future__ import annotations

import io
import logging
import signal
import sys
import traceback
from typing import Any

import pytest

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import early_stopping, threshold_stopping
from pure_loop.loggers import ConsoleLogger
from pure_loop.loop import stream as streams
from tests.progress.terminals import DATA, VAL, fit, shown
from tests.support.problem import mlp

BEST = "early_stopping: val/score has not become better for {}: the best is 0.5, after epoch 2 (batch 12)"


def scored(values: list[float], algorithm: pl.Algorithm, **changes: Any) -> Any:
    """A stream whose evaluations give these values, one after the other, in so many epochs."""
    following = iter([*values, *values[-1:] * 20])
    score = pl.metrics.Metric("score", lambda: 0, lambda acc, outputs, batch: acc, lambda acc: next(following))
    evaluators = {"val": pl.Evaluator(DATA[:1], metrics=[score])}
    options = {"evaluators": evaluators, "algorithms": [algorithm], "max_duration": f"{len(values)}ep"}
    return fit(**{**options, **changes})


NOT_STOPPED = "max_duration='2ep' is reached"
REASONS: dict[str, tuple[Any, str]] = {
    "patience": (lambda: scored([0.6, 0.5, 0.7, 0.6, 0.1], early(patience=2)), BEST.format("2 evaluations")),
    "a time": (lambda: scored([0.6, 0.5, 0.7, 0.6, 0.1], early(patience="2ep")), BEST.format("2ep")),
    "never finite": (
        lambda: scored([float("nan")] * 3, early(patience=2)),
        "early_stopping: val/score has not become better for 2 evaluations: it was never finite",
    ),
    "a threshold": (
        lambda: scored([0.6, 0.5], threshold_stopping("val/score", 0.6, mode="min")),
        "threshold_stopping: val/score is 0.6, and threshold=0.6 is reached",
    ),
    "a threshold of batches": (
        lambda: fit(algorithms=[threshold_stopping("train/loss", 99.0, at="batch")]),
        "and threshold=99 is reached",
    ),
    "an algorithm": (
        lambda: fit(algorithms=[pl.Algorithm("mine", {Event.EPOCH_END: lambda s: s.replace(stop=True)})]),
        "an algorithm set state.stop",
    ),
}


def early(**changes: Any) -> pl.Algorithm:
    return early_stopping("val/score", mode="min", **changes)


@pytest.mark.parametrize("name", REASONS)
def test_why_a_run_stopped_is_in_its_state_and_said(name: str, tmp_path: Any, terminal: Any) -> None:
    make, reason = REASONS[name]
    lines = io.StringIO()
    state = pl.run(pl.progress(make(), file=lines))
    assert reason in state.why_ended()
    pl.save(state, tmp_path / "end.safetensors")
    assert pl.load(tmp_path / "end.safetensors", model=mlp()).why_ended() == state.why_ended()
    *_, ending, remark = lines.getvalue().splitlines()
    assert "done: stopped early, 0:0" in ending
    assert remark.startswith("train  ")
    assert reason in remark
    seen = shown(make())
    assert "done: stopped early, 0:0" in "".join(seen)
    assert reason in " ".join(line.strip() for line in seen[-2:])


def test_a_run_that_ended_by_its_duration_says_no_more() -> None:
    lines, console = io.StringIO(), io.StringIO()
    state = pl.run(pl.progress(scored([0.5, 0.6], early(), loggers=[ConsoleLogger(stream=console)]), file=lines))
    assert (state.why_ended(), state.replace(stop=False).has_ended()) == (NOT_STOPPED, True)
    assert "done, 0:0" in lines.getvalue().splitlines()[-1]
    assert " end " not in console.getvalue()
    kept = [state for _, state in scored([0.5, 0.6], early())]
    assert {state.why_ended() for state in kept[:-20]} == {""}


def test_a_new_value_takes_back_why_a_run_stopped() -> None:
    """A State that trains on after it has stopped, and ends in another way."""
    stopped = pl.run(scored([0.5, 0.6, 0.6], early(patience=1)))
    assert "val/score" in stopped.why_ended()
    later = pl.run(scored([0.4] * 3, early(patience=9), model=stopped.replace(stop=False), max_duration="3ep"))
    assert later.replace(stop=True).why_ended() == "an algorithm set state.stop"


@pytest.mark.parametrize("order", ["current", "2021"])
def test_that_nothing_was_left_to_train_is_said(order: Any, caplog: pytest.LogCaptureFixture, terminal: Any) -> None:
    state = pl.run(fit(max_duration="1ep", order=order))
    stopped = pl.run(scored([0.5, 0.6], early(patience=1), max_duration="9ep", order=order))
    assert not caplog.records
    for start, why, further in ((state, "'1ep' is", "a longer max_duration"), (stopped, "val/score", "stop=False")):
        caplog.clear()
        console, lines = io.StringIO(), io.StringIO()
        options = {"max_duration": "1ep", "order": order, "loggers": [ConsoleLogger(stream=console)], "model": start}
        assert pl.run(pl.progress(fit(**options), file=lines)) is not None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"nothing to train: training had ended before this call, at batch {start.timestamp.batch}" in record.msg
        assert why in record.msg
        assert further in record.msg
        assert "done: nothing to train, 0:0" in lines.getvalue()
        assert f"end      nothing to train: {start.why_ended()}" in console.getvalue()
        assert "done: nothing to train, 0:0" in shown(fit(**options))[-1]


def test_from_which_file_it_resumed_is_said_and_where_a_finished_run_is_started_again(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for duration, resumed, says in (("1ep", None, ()), ("2ep", "ep1-ba6", ()), ("2ep", "ep2-ba12", ("nothing",))):
        console, lines = io.StringIO(), io.StringIO()
        caplog.clear()
        loggers = [ConsoleLogger(stream=console)]
        pl.run(pl.progress(fit(max_duration=duration, autoresume=tmp_path, loggers=loggers), file=lines))
        for text in (console.getvalue(), lines.getvalue()):
            assert [line for line in text.splitlines() if "resumed from" in line] == (
                [text.splitlines()[-1]] if resumed else []
            )
            assert str(tmp_path / f"{resumed}.safetensors") in text or resumed is None
        assert tuple(record.msg.split()[0] for record in caplog.records) == says


RESUMES = "interrupted after batch {}: the same command resumes from {!r}"
NOTHING_SAVED = 'interrupted after batch {}, and nothing is saved: with fit(..., autoresume="runs/1") Ctrl-C saves'


@pytest.mark.parametrize("at", [Event.BATCH_START, Event.AFTER_LOSS, Event.BATCH_END, Event.EVAL_BATCH_END])
def test_ctrl_c_in_a_stream_says_how_to_resume(at: Event, tmp_path: Any) -> None:
    """Without a saver, and with one that holds no signal back."""

    def interrupt(event: Event, state: pl.State) -> None:
        if event is at and state.timestamp.batch >= 3:
            signal.raise_signal(signal.SIGINT)

    saver = pl.callbacks.CheckpointSaver(tmp_path, signals=[])
    for options, says in (
        ({"callbacks": [interrupt]}, NOTHING_SAVED),
        ({"callbacks": [saver, interrupt], "autoresume": tmp_path}, RESUMES),
    ):
        for through in (pl.run, lambda stream: list(pl.progress(stream, file=io.StringIO()))):
            with pytest.raises(KeyboardInterrupt) as caught:
                through(fit(evaluators=VAL, **options))
            batch = 6 if at is Event.EVAL_BATCH_END else 3
            assert caught.value.__notes__[0].startswith(says.format(batch, str(tmp_path)))


def test_ctrl_c_in_a_drawing_says_how_to_resume(terminal: Any) -> None:
    for point in (2, 5, 8):

        class Interrupting(type(terminal)):  # type: ignore[misc]
            writes = 0

            def write(self, text: str, point: int = point) -> int:
                self.writes += 1
                if self.writes == point:
                    signal.raise_signal(signal.SIGINT)
                return int(super().write(text))

        screen = Interrupting()
        with pytest.raises(KeyboardInterrupt) as caught:
            pl.run(pl.progress(fit(), file=screen, refresh_seconds=0))
        assert len(caught.value.__notes__) == 1
        assert caught.value.__notes__[0].startswith("interrupted after batch")
        assert not [frame for frame in traceback.extract_tb(caught.value.__traceback__) if "rich" in frame.filename]


def test_ctrl_c_in_the_body_is_said_at_exit(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    error = KeyboardInterrupt()
    stream = iter(fit())
    for event, _ in stream:
        if event is Event.BATCH_END:
            break
    monkeypatch.setattr(streams, "_open", [stream])
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    streams._close_all()
    assert NOTHING_SAVED.format(1) in capsys.readouterr().err
    assert next(stream, None) is None
