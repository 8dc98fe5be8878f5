"""How far a run is, the time left with its evaluations, the speed, and the mean loss of an epoch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loop as pl
from pure_loop.progress.estimate import Facts, MeanLoss
from pure_loop.progress.tracker import Tracker
from tests.progress.terminals import DATA, VAL, Clock, E, Recording, Unsized, fit, followed
from tests.support.problem import cross_entropy


def timed(stream, facts=None):
    """What is shown, with the time at which it is, and the time at the end."""
    clock = Clock()
    screen = Recording(clock=clock)
    list(followed(stream, screen, clock, batch=2.0, evaluated=5.0, facts=facts))
    return screen.times, clock.now


def resumed(**options):
    kept = next(state for event, state in fit(**options) if event is E.BATCH_END and state.timestamp >= "9ba")
    return pl.fit(kept, DATA, optimizer=pl.optim.sgd(lr=0.1), loss=cross_entropy, **options)


TEST = {"val": DATA, "test": DATA[:2]}
EVERY_FOURTH = {"val": pl.Evaluator(DATA, interval=lambda state: state.timestamp.batch % 4 == 0)}
FOUR = {"max_duration": "4ep", "evaluators": VAL}
TIMED = [
    (fit, {"max_duration": "3ep"}, 0.06),
    (fit, {"max_duration": "3ep", "evaluators": TEST}, 0.34),
    (fit, {"max_duration": "36ba", "evaluators": VAL, "eval_interval": "4ba"}, 0.12),
    (fit, {"max_duration": "5ep", "evaluators": VAL, "eval_interval": "2ep"}, 0.41),
    (fit, {"max_duration": "32ba", "evaluators": VAL, "eval_interval": "0.25dur"}, 0.26),
    (fit, {"max_duration": "5ep", "evaluators": VAL, "eval_interval": "7ba"}, 0.25),
    (fit, {"data": DATA * 6, "max_duration": "32ba", "evaluators": EVERY_FOURTH}, 0.26),
    (resumed, FOUR, 0.51),
]


def test_the_time_left_is_what_it_takes():
    """From the fraction on at which an evaluation has shown what it takes; of a stream that says nothing, too."""
    streams = [(timed(make(**options)), known, options) for make, options, known in TIMED]
    silent = timed(fit(**FOUR), Facts())
    for (times, end), known, options in [*streams, (silent, 0.51, "silent")]:
        shown = [(now, snapshot) for now, snapshot in times if (snapshot.fraction or 0) > known]
        assert len(shown) > 10
        for now, snapshot in shown:
            assert (snapshot.left or 0.0) == pytest.approx(end - now, abs=0.1), (options, snapshot)
    inside = [snapshot.inside.batches for _, snapshot in silent[0] if snapshot.inside]
    assert set(inside[:7]) == {None}  # it learns how long an evaluation is
    assert set(inside[8:]) == {6}


def test_wall_clock_time_has_its_own_end():
    state = next(s for event, s in fit(max_duration="10m", clock=iter(range(10**6)).__next__) if event is E.BATCH_END)
    estimate = Tracker(Recording(), None, 0.0, Clock())
    estimate._batch_end(state)
    assert estimate._snapshot(1.0).left == pytest.approx(600 - state.timestamp.total_seconds)


def test_inside_an_evaluation_there_are_totals_and_the_time_left():
    """And of an evaluation and a prediction by themselves."""
    inside = [snapshot.inside for _, snapshot in timed(fit(evaluators=TEST))[0] if snapshot.inside]
    assert {(item.label, item.batches) for item in inside} == {("val", 6), ("test", 2)}
    for item in inside:
        assert item.fraction == pytest.approx(item.batch / item.batches)
        assert item.left == (None if item.batch == 0 else pytest.approx(5.0 * (item.batches - item.batch)))
    times, end = timed(fit(max_duration="3ep", evaluators=VAL))
    now, first = next((now, item) for now, item in times if item.inside and item.inside.batch == 3)
    assert first.left == pytest.approx(end - now)  # the first evaluation is in it while it runs
    times, _ = timed(fit(evaluators={"val": Unsized()}))
    assert [item.inside.batches for _, item in times if item.inside] == [None] * 7 + [6] * 7

    state = pl.State.create(torch.nn.Linear(4, 3))
    times, end = timed(pl.evaluate(state, TEST, loss=cross_entropy))
    now, half = next((now, snapshot) for now, snapshot in times if snapshot.batch.endswith("4/8"))
    assert (half.fraction, half.left) == (0.5, pytest.approx(end - now))
    last = timed(pl.predict(state, DATA))[0][-1][1]
    assert (last.batch, last.fraction) == ("batch 6/6", 1.0)


def test_facts_of_a_stream_that_has_not_begun():
    stream = fit(evaluators={"val": pl.Evaluator(DATA, interval="2ep"), "test": Unsized()}, strict=True)
    facts = Facts.of(stream)
    assert facts.optimizer is not None
    found = {label: (item.batches, str(item.interval)) for label, item in facts.evaluators.items()}
    assert list(found.items()) == [("val", (6, "2ep")), ("test", (None, "1ep"))]
    next(stream)
    assert Facts.of(stream) == Facts.of(pair for pair in fit()) == Facts.of([]) == Facts()


def test_the_fraction_grows_with_every_batch_and_the_speed_leaves_evaluations_out():
    """The length of an epoch is learned where data have none."""
    for batches, options in {12: {}, 8: {"max_duration": "8ba"}, 9: {"max_duration": "36sp"}}.items():
        shown = list(dict.fromkeys(snapshot.fraction for _, snapshot in timed(fit(**options))[0]))
        assert shown == pytest.approx([n / batches for n in range(batches + 1)])
    shown = [snapshot for _, snapshot in timed(fit(Unsized()))[0]]
    fractions = {snapshot.batch: snapshot.fraction for snapshot in shown}
    assert fractions["batch 5"] is None
    assert fractions["batch 10/12"] == pytest.approx(10 / 12)
    assert "batch 12/12" in shown[-1].place
    stream = fit(DATA * 4, max_duration="24ba", evaluators=VAL, eval_interval="12ba")
    speeds = [snapshot.speed for _, snapshot in timed(stream)[0] if snapshot.speed is not None]
    assert len(speeds) > 20
    assert speeds == pytest.approx([2.0] * len(speeds))


def test_it_is_drawn_as_often_as_it_may_be_and_a_line_comes_about_every_ten_seconds():
    clock = Clock()
    screen = Recording(clock=clock)
    stream = fit(DATA * 3, evaluators=VAL, eval_interval="2ba")
    list(followed(stream, screen, clock, batch=1.3, evaluated=1.1, refresh=5.0))
    times = [now for now, _ in screen.times]
    assert len(times) > 7
    assert all(b - a >= 5.0 for a, b in itertools.pairwise(times[1:-1]))
    screen = Recording(live=False, seconds=10.0)
    list(followed(fit(DATA * 10, max_duration="60ba"), screen, Clock()))
    assert [snapshot.place.split()[-1] for snapshot, _ in screen.shown][:3] == ["10/60", "20/60", "30/60"]


# The mean loss of an epoch.


LOSS = st.tuples(st.floats(0, 8, width=16), st.integers(1, 4))


@settings(max_examples=30)
@given(st.lists(LOSS, min_size=1, max_size=9), st.integers(1, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_mean_is_weighed_by_samples_and_begins_anew(pairs, times, dtype):
    mean = MeanLoss(skips=True)
    for _ in range(2):
        values = [(torch.tensor(loss, dtype=dtype), size) for loss, size in pairs * times]
        for loss, size in values:
            mean.add(loss, size)
        mean.add(torch.tensor(float("nan")), 3)  # training skips it
        total = sum(size for _, size in values)
        assert mean.count == total + 3
        assert float(mean.take()) == pytest.approx(sum(float(loss) * size for loss, size in values) / total, rel=1e-6)
        assert (mean.count, mean.take()) == (0, None)


class NoReading(TorchDispatchMode):
    """Refuses what waits for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)
        return function(*args, **(kwargs or {}))


def test_a_mean_reads_nothing_from_a_device_and_keeps_no_graph_and_few_losses():
    """What is no number is left out, and NaN is not hidden."""
    weight, mean = torch.full((), 2.0, requires_grad=True), MeanLoss()
    with NoReading():
        for _ in range(640):
            mean.add(weight, 4)
            assert len(mean._losses) <= 64
        result = mean.take()
    with pytest.raises(AssertionError), NoReading():
        float(torch.tensor(2.0))  # as it notices
    assert (float(result.detach()), result.requires_grad) == (2.0, False)
    for loss in (None, torch.ones(3), torch.full((1,), 2.0), 4.0):
        mean.add(loss, 4)
    assert float(mean.take()) == 3.0
    mean.add(torch.tensor(1.0), 4)
    mean.add(torch.tensor(torch.nan), 4)
    assert torch.isnan(mean.take())
