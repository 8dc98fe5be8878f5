"""The fast text of a script: a run by it is, bit for bit, a run of the script by the driver, event by event."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.entry import assembly
from pure_loop.errors import DonatedStateError, PureLoopError
from pure_loop.loop import driver
from pure_loop.loop import training as loop
from pure_loop.loop.fast import Observed, fast_text
from pure_loop.testing import strategies
from pure_loop.testing.case import Case
from tests.support.streams import assert_same, assert_same_stream
from tests.support.tiers import examples

OF_A_BATCH = (
    *(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
    *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT),
)


@contextmanager
def one_by_one() -> Iterator[None]:
    """No script has a fast text: the driver runs each, event by event."""
    with (
        patch.object(assembly, "fast_text", lambda *_, **__: None),
        patch.object(driver, "fast_text", lambda *_, **__: None),
    ):
        yield


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many runs went by a fast text."""
    counted = [0]
    real = driver.Run.close

    def close(self: Any, state: pl.State) -> None:
        counted[0] += 1
        real(self, state)

    with patch.object(driver.Run, "close", close):
        yield counted


@examples(60, 1500)
@given(
    trial=strategies.cases().flatmap(
        lambda case: st.tuples(st.just(case), strategies.algorithms(problem=case.problem, max_size=2))
    ),
    watch=st.none() | st.frozensets(st.sampled_from(list(Event)), max_size=3),
    nonfinite=st.sampled_from(["error", "skip"]),
)
def test_a_run_is_the_same_both_ways(trial: tuple[Case, Any], watch: Any, nonfinite: Any) -> None:
    case, algorithms = trial
    given = list(case.stream(algorithms, watch=watch, nonfinite=nonfinite))
    with one_by_one():
        wanted = list(case.stream(algorithms, watch=watch, nonfinite=nonfinite))
    assert_same_stream(given, wanted, "in one and one by one")


DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(4)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def fit(**arguments: Any) -> Any:
    settings = {"loss": functional.cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
    return pl.fit(arguments.pop("model", None) or model(), DATA, **{**settings, **arguments})


def seen_and_changed(events: Any, log: list[Any]) -> dict[str, Any]:
    """Somebody at each of these events: an algorithm that counts in its memory, and a callback that writes down."""

    @pl.algorithm(*events, name="counter")
    def counter(state: pl.State) -> pl.State:
        log.append(("algorithm", state.event, state.timestamp.batch, state.loss))
        return state.replace(algorithm_state={**state.algorithm_state, "counter": state.timestamp.batch})

    def look(event: Event, state: pl.State) -> None:
        log.append(("callback", event, state.timestamp.batch, state.loss))

    return {"algorithms": [counter], "callbacks": [look]}


@pytest.mark.parametrize(
    "watch", [None, {Event.BATCH_END}, {Event.BATCH_CHECKPOINT, Event.EPOCH_END}], ids=["all", "one", "two"]
)
@pytest.mark.parametrize("event", OF_A_BATCH, ids=lambda event: event.name)
@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_algorithms_and_callbacks_come_where_they_came(event: Event, watch: Any, microbatch_size: Any) -> None:
    options = {"watch": watch, "microbatch_size": microbatch_size}
    logs: list[list[Any]] = [[], []]
    given = list(fit(**seen_and_changed([event], logs[0]), **options))
    with one_by_one():
        wanted = list(fit(**seen_and_changed([event], logs[1]), **options))
    assert_same_stream(given, wanted, f"with an observer at {event.name}")
    assert [each[:3] for each in logs[0]] == [each[:3] for each in logs[1]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"watch": {Event.AFTER_LOSS}},
        {"evaluators": {"val": DATA[:1]}},
        {"donate": False},
        {"iteration_length": "1ep"},
        {"order": "2021"},
        {"microbatch_size": 4},
    ],
    ids=lambda options: next(iter(options), "default"),
)
def test_a_run_on_one_rank_goes_by_a_fast_text(options: dict[str, Any]) -> None:
    with counting() as counted:
        list(fit(**options))
    assert counted == [1]


def test_a_strict_run_goes_event_by_event() -> None:
    with counting() as counted:
        list(fit(strict=True))
    assert counted == [0]


def test_the_fast_text_has_the_lines_of_the_script() -> None:
    """A traceback, a debugger and a coverage report show the script itself."""

    class Odd(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as caught:
        pl.run(pl.fit(Odd(4, 3), DATA, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration=1))
    lines = {entry.lineno + 1 for entry in caught.traceback if str(entry.path).endswith("training.py")}
    source, first = inspect.getsourcelines(loop.gradients)
    forward = next(index for index, line in enumerate(source) if "stages.forward(" in line)
    assert first + forward in lines


def test_a_script_without_source_has_no_fast_text() -> None:
    scope: dict[str, Any] = {"Event": Event}
    exec("def script(state):\n    state = yield Event.BATCH_START, state\n    return state", scope)
    assert fast_text(scope["script"], Observed(None, frozenset())) is None


def test_a_script_that_yields_otherwise_has_no_fast_text() -> None:
    def script(first: pl.State) -> Any:
        second = yield Event.BATCH_START, first
        return second

    assert fast_text(script, Observed(None, frozenset())) is None


def test_a_script_of_a_function_around_it_has_no_fast_text() -> None:
    event = Event.BATCH_START

    def script(state: pl.State) -> Any:
        state = yield event, state
        return state

    assert fast_text(script, Observed(None, frozenset())) is None


@pytest.mark.parametrize("stage", ["data", "forward", "loss", "algorithm", "callback"])
@pytest.mark.parametrize("batch", [0, 5])
def test_an_error_says_the_same_both_ways(stage: str, batch: int) -> None:
    def message() -> tuple[list[Any], str, list[str]]:
        calls = {"forward": 0, "loss": 0}

        def counted(name: str) -> None:
            calls[name] += 1
            if name == stage and calls[name] == batch + 1:
                raise ValueError(f"odd {name}")

        class Model(nn.Linear):
            def forward(self, x: Any) -> Any:
                counted("forward")
                return super().forward(x)

        def loss(outputs: Any, targets: Any) -> Any:
            counted("loss")
            return functional.cross_entropy(outputs, targets)

        @pl.algorithm(Event.AFTER_BACKWARD, name="odd")
        def algorithm(state: pl.State) -> pl.State:
            if stage == "algorithm" and state.timestamp.batch == batch:
                raise ValueError("odd algorithm")
            return state

        def callback(event: Event, state: pl.State) -> None:
            if stage == "callback" and event is Event.BEFORE_LOSS and state.timestamp.batch == batch:
                raise ValueError("odd callback")

        torch.manual_seed(0)
        data = list(DATA)
        if stage == "data":
            data[batch % 4] = (DATA[0][0], DATA[0][1][:2])
        stream = pl.fit(
            Model(4, 3),
            data,
            loss=loss,
            optimizer=pl.optim.adamw(),
            max_duration="2ep",
            algorithms=[algorithm],
            callbacks=[callback],
        )
        events: list[Event] = []
        with pytest.raises((ValueError, PureLoopError)) as caught:
            events.extend(event for event, _ in stream)
        return events, str(caught.value), getattr(caught.value, "__notes__", [])

    given = message()
    with one_by_one():
        assert given == message()


@pytest.mark.parametrize("at", OF_A_BATCH, ids=lambda event: event.name)
def test_a_stream_that_is_left_lets_go(at: Event) -> None:
    """Of the State and of the loader, at each event, without a collection."""
    closed = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            try:
                yield from DATA
            finally:
                closed.append(True)

    gc.disable()
    try:
        stream = pl.fit(
            model(), Loader(), loss=functional.cross_entropy, optimizer=pl.optim.adamw(), max_duration="1ep"
        )
        last: Any = None
        for event, state in stream:
            if event is at and state.timestamp.batch >= 2:
                last = weakref.ref(state.params["0.weight"])
                break
        stream.close()
        del state, stream
        assert closed == [True]
        assert last() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_an_error_between_plain_batches_is_the_one_that_is_raised(batch: int) -> None:
    def interval(state: pl.State) -> bool:
        if state.timestamp.batch == batch:
            raise ValueError("odd interval")
        return False

    stream = fit(evaluators={"val": pl.Evaluator(DATA[:1], interval=interval)})
    with pytest.raises(ValueError, match="odd interval"):
        list(stream)


def test_a_state_that_was_kept_resumes_from_plain_batches() -> None:
    pairs = list(fit(max_duration="8ba"))
    kept = [state for event, state in pairs if event in (Event.BATCH_END, Event.BATCH_CHECKPOINT)]
    for state in kept[3:9]:
        assert_same(pl.run(fit(model=state, max_duration="8ba")), pairs[-1][1], "going on")


def test_an_algorithm_may_put_in_another_batch_and_another_microbatch() -> None:
    """What is counted is what was loaded; what is weighed is what is trained on."""

    @pl.algorithm(Event.BATCH_START, name="half")
    def half(state: pl.State) -> pl.State:
        return state.replace(batch=tuple(each[:3] for each in state.batch))

    given = list(fit(algorithms=[half]))
    with one_by_one():
        wanted = list(fit(algorithms=[half]))
    assert_same_stream(given, wanted, "with half of each batch")
    assert given[-1][1].timestamp.sample == 48


def test_plain_batches_that_take_any_reference_for_the_loop_variable_are_caught() -> None:
    def kept_change() -> bool:
        kept = []
        for event, state in fit():
            if event is Event.AFTER_TRAIN_BATCH:
                kept.append((state, {name: each.clone() for name, each in state.params.items()}))
                del state
        try:
            return any(not torch.equal(state.params[name], was[name]) for state, was in kept for name in was)
        except DonatedStateError:
            return True

    assert not kept_change()
    with patch.object(driver, "rebinds_loop_variable", lambda *_: True):
        assert kept_change()
