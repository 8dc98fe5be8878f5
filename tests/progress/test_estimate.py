"""The time left, evaluations included, and what is known inside of one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.progress.display import _pass_on
from pure_loop.progress.estimate import Facts
from pure_loop.progress.tracker import Tracker
from tests.progress.conftest import Clock
from tests.progress.test_progress import DATA, Recording, fit

E = pl.Event


class Unsized:
    def __init__(self, data=DATA):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def timed(stream, *, batch=2.0, evaluated=5.0, facts=None):
    """What is shown, with the time at which it is, and the time at the end."""
    clock, screen = Clock(), Recording()
    times = []
    screen.show = lambda snapshot, values: times.append((clock.now, snapshot))
    tracker = Tracker(screen, None, 0.0, clock, Facts.of(stream) if facts is None else facts)
    for event, _ in _pass_on(stream, tracker):
        # Between BATCH_START and BATCH_END, where the computation is.
        clock.now += {E.BATCH_START: batch, E.EVAL_BATCH_START: evaluated}.get(event, 0.0)
    return times, clock.now


@pytest.mark.parametrize(
    ("options", "from_fraction"),
    [
        ({"max_duration": "3ep", "evaluators": {"val": DATA}}, 0.34),
        ({"max_duration": "3ep", "evaluators": {"val": DATA, "test": DATA[:2]}}, 0.34),
        ({"max_duration": "36ba", "evaluators": {"val": DATA}, "eval_interval": "4ba"}, 0.12),
        ({"max_duration": "5ep", "evaluators": {"val": DATA}, "eval_interval": "2ep"}, 0.41),
        ({"max_duration": "32ba", "evaluators": {"val": DATA}, "eval_interval": "0.25dur"}, 0.26),
        ({"max_duration": "4ep", "evaluators": {"val": DATA}, "eval_interval": "3ba"}, 0.13),
        ({"max_duration": "5ep", "evaluators": {"val": DATA}, "eval_interval": "7ba"}, 0.25),
        ({"max_duration": "3ep"}, 0.06),
    ],
)
def test_the_time_left_is_what_it_takes(options, from_fraction):
    times, end = timed(fit(**options))
    shown = [(now, snapshot) for now, snapshot in times if (snapshot.fraction or 0) > from_fraction]
    assert len(shown) > 10
    for now, snapshot in shown:
        assert (snapshot.left or 0.0) == pytest.approx(end - now, abs=0.1), snapshot


def test_the_evaluations_that_a_resumed_run_has_left():
    options = {"max_duration": "4ep", "evaluators": {"val": DATA}}
    kept = next(state for event, state in fit(**options) if event is E.BATCH_END and state.timestamp >= "9ba")
    times, end = timed(pl.fit(kept, DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, **options))
    shown = [(now, snapshot) for now, snapshot in times if snapshot.fraction > 0.51]
    assert [snapshot.left or 0.0 for _, snapshot in shown] == pytest.approx([end - now for now, _ in shown], abs=0.1)


def test_the_first_evaluation_is_in_the_estimate_while_it_runs():
    times, end = timed(fit(max_duration="3ep", evaluators={"val": DATA}))
    first = next((now, item) for now, item in times if item.inside and item.inside.batch == 3)
    assert first[1].left == pytest.approx(end - first[0])


def test_of_a_stream_that_says_nothing_it_learns():
    times, end = timed(fit(max_duration="4ep", evaluators={"val": DATA}), facts=Facts())
    for now, snapshot in times:
        if snapshot.fraction > 0.51:
            assert (snapshot.left or 0.0) == pytest.approx(end - now, abs=0.1)
    inside = [snapshot.inside for _, snapshot in times if snapshot.inside]
    assert {item.batches for item in inside[:7]} == {None}
    assert {item.batches for item in inside[8:]} == {6}


def test_a_predicate_has_no_interval_and_is_learned():
    when = lambda state: state.timestamp.batch % 4 == 0  # noqa: E731
    times, end = timed(fit(DATA * 6, max_duration="32ba", evaluators={"val": pl.Evaluator(DATA, interval=when)}))
    for now, snapshot in times:
        if snapshot.fraction > 0.26:
            assert (snapshot.left or 0.0) == pytest.approx(end - now, abs=0.1)


def test_wall_clock_time_has_its_own_end():
    state = next(s for event, s in fit(max_duration="10m", clock=iter(range(10**6)).__next__) if event is E.BATCH_END)
    estimate = Tracker(Recording(), None, 0.0, Clock())
    estimate._batch_end(state)
    assert estimate._snapshot(1.0).left == pytest.approx(600 - state.timestamp.total_seconds)


def test_inside_an_evaluation_there_are_totals_and_the_time_left():
    times, _ = timed(fit(evaluators={"val": DATA, "test": DATA[:2]}))
    inside = [snapshot.inside for _, snapshot in times if snapshot.inside]
    assert {(item.label, item.batches) for item in inside} == {("val", 6), ("test", 2)}
    for item in inside:
        assert item.fraction == pytest.approx(item.batch / item.batches)
        assert item.left == (None if item.batch == 0 else pytest.approx(5.0 * (item.batches - item.batch)))


def test_an_evaluation_without_a_length_learns_it():
    times, _ = timed(fit(evaluators={"val": Unsized()}))
    inside = [snapshot.inside for _, snapshot in times if snapshot.inside]
    assert [item.batches for item in inside] == [None] * 7 + [6] * 7


def test_an_evaluation_by_itself_has_a_total_and_a_time_left():
    state = pl.State.create(torch.nn.Linear(3, 2))
    times, end = timed(pl.evaluate(state, {"val": DATA, "test": DATA[:2]}, loss=cross_entropy))
    parts = [(now, snapshot) for now, snapshot in times if snapshot.batch.endswith("4/8")]
    assert parts[0][1].fraction == 0.5
    assert parts[0][1].left == pytest.approx(end - parts[0][0])
    times, end = timed(pl.predict(state, DATA))
    assert times[-1][1].batch == "batch 6/6"
    assert times[-1][1].fraction == 1.0


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"strict": True}])
def test_facts_of_a_stream(options):
    evaluators = {"val": pl.Evaluator(DATA, interval="2ep"), "test": Unsized()}
    facts = Facts.of(fit(evaluators=evaluators, **options))
    assert facts.optimizer is not None
    assert [(item.batches, str(item.interval)) for item in facts.evaluators.values()] == [(6, "2ep"), (None, "1ep")]
    assert list(facts.evaluators) == ["val", "test"]


def test_a_stream_that_has_begun_says_nothing():
    stream = fit()
    next(stream)
    assert Facts.of(stream) == Facts()
    assert Facts.of(pair for pair in fit()) == Facts()
    assert Facts.of([]) == Facts()
