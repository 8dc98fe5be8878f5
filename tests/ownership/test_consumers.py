"""Ownership: what becomes of the State in the loop variable, and of those that the loop puts elsewhere."""

from __future__ import annotations

import sys
import threading
import weakref
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.frames import rebinds_loop_variable
from pure_loop.stages.references import can_count
from tests.support.donating import DATA, Count, Kept, assert_same, fit, tensors_of

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


@pytest.mark.parametrize("watch", [{Event.BATCH_START}, {Event.AFTER_TRAIN_BATCH}, {Event.EPOCH_END}], ids=str)
def test_the_loop_variable_can_be_read_after_the_loop_and_after_an_interrupt(watch: Any) -> None:
    """Where the next State doesn't follow at once, it may never come."""
    state: Any = None
    for _, state in fit(watch=watch):  # noqa: B007
        pass
    assert torch.isfinite(state.params["0.weight"]).all()
    assert torch.isfinite(pl.run(fit(watch=watch)).params["0.weight"]).all()
    batches = 0

    class Interrupting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal batches
            batches += 1
            if batches == 9:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        for _, state in fit(Interrupting(4, 3), watch=watch):  # noqa: B007
            pass
    assert torch.isfinite(state.params["weight"]).all()


@pytest.mark.parametrize(
    "pick",
    [
        lambda stream: islice(stream, 6, None, 5),
        lambda stream: filter(lambda pair: pair[0] is Event.BATCH_END, stream),
    ],
    ids=["islice", "filter ends"],
)
def test_what_picks_events_out_keeps_the_last_one(pick: Any) -> None:
    state: Any = None
    for _, state in pick(fit()):  # noqa: B007
        pass
    assert torch.isfinite(state.params["0.weight"]).all()


def test_what_leaves_out_most_events_keeps_the_last_one() -> None:
    """In the first batch the variable doesn't have what was yielded last."""
    state: Any = None
    for _, state in filter(lambda pair: pair[0] is Event.AFTER_TRAIN_BATCH, fit()):  # noqa: B007
        pass
    assert torch.isfinite(state.params["0.weight"]).all()


def test_what_leaves_out_the_state_after_a_step_keeps_the_one_before() -> None:
    """The end of the first batch shows that the State which takes its place is not passed on."""
    state: Any = None
    for _, state in filter(
        lambda pair: pair[0] is Event.AFTER_TRAIN_BATCH, fit(watch={Event.AFTER_TRAIN_BATCH, Event.BATCH_END})
    ):
        assert torch.isfinite(state.params["0.weight"]).all()
    assert torch.isfinite(state.params["0.weight"]).all()


def test_a_function_that_closes_over_the_loop_variable_reads_it_while_the_step_runs(count: Count) -> None:
    state: Any = None

    def penalty(now: pl.State) -> pl.State:
        if state is None or now.timestamp.batch == 0:
            return now
        return now.replace(loss=now.loss + 0 * state.params["0.weight"].sum())

    def look(event: Event, now: pl.State) -> None:
        if state is not None:
            assert torch.isfinite(state.params["0.weight"]).all()

    algorithms = [pl.algorithm(Event.AFTER_LOSS, name="penalty")(penalty)]
    for _, state in fit(algorithms=algorithms, callbacks=[look]):  # noqa: B007
        pass
    assert count.reused == 0


def test_locals_of_the_function_around_the_loop_stay() -> None:
    rate = 0.1
    settings_ = locals()
    for _event, _state in fit(optimizer=pl.optim.sgd(lr=rate)):
        pass
    assert settings_["rate"] == 0.1


def test_states_taken_one_by_one_are_kept() -> None:
    """``before`` looks like a loop variable to a count of references, and is none."""
    stream = fit(watch={Event.BATCH_END})
    first, second, third = (next(stream)[1] for _ in range(3))
    stream = fit(watch={Event.BATCH_END})
    _, a = next(stream)
    weights = a.params["0.weight"].clone()
    _, b = next(stream)
    _, c = next(stream)
    assert torch.equal(a.params["0.weight"], weights)
    for one, other in ((a, first), (b, second), (c, third)):
        assert_same(one, other)
    states = [state for _, state in islice(fit(watch={Event.BATCH_END}), 3)]
    for one, other in zip(states, (a, b, c), strict=True):
        assert_same(one, other)


def test_a_variable_that_takes_the_state_over_keeps_it() -> None:
    held, numbers = None, None
    for event, state in fit():
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 7:
            numbers = [tensor.clone() for tensor in tensors_of(state)]
            held, state = state, None
    assert numbers is not None
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(held), numbers, strict=True))


def test_a_thread_keeps_what_it_is_given() -> None:
    kept = Kept()
    threads = []
    go = threading.Event()

    def hold(state: pl.State) -> None:
        numbers = [tensor.clone() for tensor in tensors_of(state)]
        started.set()
        go.wait(30)
        kept.things.append(("a thread's State", state, tensors_of, numbers))

    for event, state in fit():
        if event is Event.BATCH_END:
            started = threading.Event()
            threads.append(threading.Thread(target=hold, args=(state,)))
            threads[-1].start()
            started.wait(30)
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(kept.things) == 15
    kept.check()


def test_two_streams_from_one_state_leave_it_and_each_other_alone(count: Count) -> None:
    state = next(state for event, state in fit() if event is Event.BATCH_END and state.timestamp.batch == 4)
    numbers = [tensor.clone() for tensor in tensors_of(state)]
    streams = [fit(state), fit(state)]
    ends: list[Any] = [None, None]
    live = [0, 1]
    while live:
        for i in list(live):
            pair = next(streams[i], None)
            if pair is None:
                live.remove(i)
            else:
                ends[i] = pair[1]
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], pl.run(fit()))


def test_a_live_state_given_to_another_stream_stays() -> None:
    branch = None
    for event, state in fit():
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            branch = fit(state)
            next(branch)
        if branch is not None and next(branch, None) is None:
            branch = None
    assert_same(state, pl.run(fit()))


def test_evaluating_the_live_state_costs_nothing_but_its_time(count: Count) -> None:
    for event, state in fit():
        if event is Event.BATCH_END:
            results = pl.run(pl.evaluate(state, DATA, loss=functional.cross_entropy)).metrics["eval"]
            assert torch.isfinite(results["loss"])
    assert_same(state, pl.run(fit(donate=False)))


def test_a_traced_loop_copies(count: Count) -> None:
    """A debugger reads the loop's variables, and may write them back."""
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        pl.run(fit())
    finally:
        sys.settrace(before)
    assert count.reused == 0


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="sys.monitoring is of Python 3.12 and later")
@pytest.mark.parametrize(
    ("tool", "copies"), [("DEBUGGER_ID", True), ("OPTIMIZER_ID", True), ("PROFILER_ID", False), ("COVERAGE_ID", False)]
)
def test_a_loop_in_a_debugger_copies_and_one_in_a_profiler_does_not(count: Count, tool: str, copies: bool) -> None:
    monitoring: Any = getattr(sys, "monitoring", None)
    number = getattr(monitoring, tool)
    if monitoring.get_tool(number) is not None:
        pytest.skip("such a tool is in use")
    monitoring.use_tool_id(number, "test")
    try:
        pl.run(fit())
    finally:
        monitoring.free_tool_id(number)
    assert (count.reused == 0) is copies


def test_the_variables_of_the_loop_are_not_kept_by_looking_at_them() -> None:
    """Reading a frame's variables makes a copy of them, which must not outlive the look."""
    big = [torch.zeros(10)]
    alive = weakref.ref(big[0])
    for event, state in fit():
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 3:
            big.clear()
        if state.timestamp.batch == 4:
            assert alive() is None
    assert rebinds_loop_variable(None, 1) is False
