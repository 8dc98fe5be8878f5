"""The error that ended a stream is the one that arrives, whatever raises while the stream is closed.

Tried: ``close`` of callbacks, loggers, loaders and the loaders of evaluators; errors of algorithms, callbacks, loggers,
the forward and the loop's body, at every event; streams of fit (all events, some, strict, compiled), evaluate, predict
and drive; a loop that is left; an interrupt while a stream is closed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.closing import Closing
from tests.support.runs import cross_entropy, mlp, points

OF_FIT = [event for event in Event if not event.is_predict and "standalone" not in event and "iteration" not in event]


class FirstError(Exception):
    """What ends training."""


class ClosesBadly(pl.Callback):
    def fit_start(self, state: pl.State, logger: Any) -> None:
        pass

    def close(self) -> None:
        raise OSError("the callback can't be closed")


class LoggerThatClosesBadly(pl.Logger):
    def close(self) -> None:
        raise OSError("the logger can't be closed")


class LoaderThatClosesBadly:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            yield from points(3)
        except GeneratorExit:
            raise OSError("the loader can't be closed") from None


NOTES = ["while closing: OSError: the callback can't be closed", "while closing: OSError: the logger can't be closed"]


def fit(**options: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1),
        "max_duration": "2ep",
        "evaluators": {"val": points(1)},
        "callbacks": [ClosesBadly()],
        "loggers": [LoggerThatClosesBadly()],
        "seed": 0,
    }
    return pl.fit(mlp(), options.pop("data", points(3)), **{**arguments, **options})


def raising_algorithm(event: Event) -> dict[str, Any]:
    def raise_it(state: pl.State) -> pl.State:
        raise FirstError(event.value)

    return {"algorithms": [pl.algorithm(event)(raise_it)]}


def raising_callback(event: Event) -> dict[str, Any]:
    def raise_it(now: Event, state: pl.State) -> None:
        if now is event:
            raise FirstError(event.value)

    return {"callbacks": [raise_it, ClosesBadly()]}


def raising_logger(event: Event) -> dict[str, Any]:
    class Raises(LoggerThatClosesBadly):
        def run_event(self, now: Event, state: pl.State, logger: Any) -> None:
            if now is event:
                raise FirstError(event.value)

    return {"loggers": [Raises()]}


WAYS: dict[str, dict[str, Any]] = {"every event": {}, "few events": {"watch": ["fit_end"]}, "strict": {"strict": True}}


RAISING = [raising_algorithm, raising_callback, raising_logger]


@pytest.mark.parametrize(
    ("event", "raising", "way"),
    [
        # Each event with one of the nine, in turn; all of them in the slow tier.
        pytest.param(event, raising, way, marks=() if (place + index) % 9 == 0 else pytest.mark.slow)
        for place, event in enumerate(OF_FIT)
        for index, (raising, way) in enumerate(product(RAISING, WAYS))
    ],
)
def test_the_error_that_ended_training_arrives(
    event: Event, raising: Callable[[Event], dict[str, Any]], way: str
) -> None:
    with pytest.raises(FirstError, match=event.value) as caught:
        pl.run(fit(**WAYS[way], **raising(event)))
    assert [note for note in caught.value.__notes__ if note.startswith("while closing")] == NOTES


@pytest.mark.parametrize("way", WAYS)
def test_a_loader_that_can_not_be_closed_is_a_note(way: str) -> None:
    """In the forward the script itself is left by the error, with the loader open in it."""

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise FirstError("forward")

    for options in ({"model": Fails(4, 3)}, raising_algorithm(Event.BATCH_END), raising_callback(Event.AFTER_LOSS)):
        settings = {**WAYS[way], "callbacks": [], "loggers": [], "evaluators": None, **options}
        model = settings.pop("model", mlp())
        stream = pl.fit(
            model,
            LoaderThatClosesBadly(),
            loss=cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ep",
            **{key: value for key, value in settings.items() if key != "evaluators"},
        )
        with pytest.raises(FirstError) as caught:
            pl.run(stream)
        assert "while closing: OSError: the loader can't be closed" in caught.value.__notes__


def test_a_loader_of_an_evaluator_that_can_not_be_closed_is_a_note() -> None:
    with pytest.raises(FirstError) as caught:
        pl.run(fit(evaluators={"val": LoaderThatClosesBadly()}, **raising_algorithm(Event.EVAL_BATCH_END)))
    assert "while closing: OSError: the loader can't be closed" in caught.value.__notes__


@pytest.mark.slow
def test_the_error_that_ended_compiled_training_arrives() -> None:
    for event in (Event.FIT_START, Event.BATCH_END, Event.EVAL_END, Event.EPOCH_END):
        with pytest.raises(FirstError) as caught:
            pl.run(fit(compile=True, watch=["epoch_end"], **raising_callback(event)))
        assert [note for note in caught.value.__notes__ if note.startswith("while closing")] == NOTES


def test_evaluate_predict_and_drive_too() -> None:
    state = pl.State.create(mlp())
    options: dict[str, Any] = {"loggers": [LoggerThatClosesBadly()]}

    def script(state: pl.State) -> Any:
        state = yield Event.BATCH_END, state
        return state

    def raising(event: Event) -> dict[str, Any]:
        return {**options, **raising_callback(event)}

    for stream in (
        pl.evaluate(state, {"val": points(1)}, loss=cross_entropy, **raising(Event.EVAL_END)),
        pl.predict(state, points(1), **raising(Event.PREDICT_BATCH_END)),
        pl.drive(script(state), **raising(Event.BATCH_END)),
    ):
        with pytest.raises(FirstError) as caught:
            pl.run(stream)
        assert [note for note in caught.value.__notes__ if note.startswith("while closing")] == NOTES


def test_an_error_of_closing_alone_arrives() -> None:
    """At the end of a run and where the loop was left: nothing else says that the record is incomplete."""
    with pytest.raises(OSError, match="the callback can't be closed") as caught:
        pl.run(fit())
    assert caught.value.__notes__ == NOTES[1:]
    stream = fit()
    next(stream)
    with pytest.raises(OSError, match="the callback can't be closed"):
        stream.close()


def test_progress_passes_on_the_first_error() -> None:
    with pytest.raises(FirstError) as caught:
        pl.run(pl.progress(fit(**raising_callback(Event.BATCH_END))))
    assert [note for note in caught.value.__notes__ if note.startswith("while closing")] == NOTES


def test_an_error_keeps_no_state_alive() -> None:
    """The driver's frame is not in a cycle with the error: what it refers to goes with the error."""
    for way in WAYS.values():
        module = None
        gc.collect()
        gc.disable()
        try:
            try:
                stream = fit(**way, callbacks=[], loggers=[], **raising_algorithm(Event.BATCH_END))
                pl.run(stream)
            except FirstError:
                pass
            module = weakref.ref(stream)
            del stream
            assert module() is None
        finally:
            gc.enable()


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@given(st.lists(st.booleans(), max_size=5), st.sampled_from(["returns", "raises", "is left"]))
def test_all_are_called_and_the_first_error_arrives(closers: list[bool], how: str) -> None:
    called: list[int] = []

    def closer(index: int, fails: bool) -> Callable[[], None]:
        def close() -> None:
            called.append(index)
            if fails:
                raise OSError(str(index))

        return close

    first = {"returns": None, "raises": FirstError("body"), "is left": GeneratorExit()}[how]
    failing = [index for index, fails in enumerate(closers) if fails]

    def run() -> None:
        with Closing(*(closer(*item) for item in enumerate(closers))):
            if first is not None:
                raise first

    if first is None and not failing:
        run()
    else:
        with pytest.raises(FirstError if how == "raises" else OSError if failing else GeneratorExit) as caught:
            run()
        notes = failing if how == "raises" else failing[1:]
        assert getattr(caught.value, "__notes__", []) == [f"while closing: OSError: {index}" for index in notes]
    assert called == list(range(len(closers)))


def test_an_interrupt_is_no_note() -> None:
    """Control-C while a stream is closed still ends the program, after everything is closed."""
    called: list[int] = []

    def run() -> None:
        with Closing(raises(KeyboardInterrupt()), lambda: called.append(1), raises(OSError("disk"))):
            raise FirstError("body")

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert called == [1]
    assert isinstance(caught.value.__context__, FirstError)
    assert caught.value.__notes__ == ["while closing: OSError: disk"]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, OSError])
def test_an_exit_that_is_raised_again_is_no_note_and_another_error_is(kind: type[BaseException]) -> None:
    def again() -> None:
        raise kind(143)

    with pytest.raises(kind) as caught, Closing(again):
        raise kind(143)
    expected = ["while closing: OSError: 143"] if kind is OSError else []
    assert getattr(caught.value, "__notes__", []) == expected
