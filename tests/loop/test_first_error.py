"""The error that ended a stream is the one that arrives, whatever raises while the stream is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.closing import Closing
from pure_loop.compile import interpreted
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

OF_FIT = [event for event in Event if not event.is_predict and "standalone" not in event and "iteration" not in event]
NOTES = ["while closing: OSError: the callback can't be closed", "while closing: OSError: the logger can't be closed"]
LOADER = "while closing: OSError: the loader can't be closed"


class FirstError(Exception):
    """What ends training."""


class ClosesBadly(pl.Callback):
    def fit_start(self, state: pl.State, logger: Any) -> None: ...

    def close(self) -> None:
        raise OSError("the callback can't be closed")


class LoggerThatClosesBadly(pl.Logger):
    def close(self) -> None:
        raise OSError("the logger can't be closed")


class LoaderThatClosesBadly:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            yield from points()
        except GeneratorExit:
            raise OSError("the loader can't be closed") from None


def fit(**options: Any) -> Any:
    badly = {"callbacks": [ClosesBadly()], "loggers": [LoggerThatClosesBadly()], "evaluators": {"val": points(1)}}
    return problem.fit(**{**badly, "strict": None, **options})


def raising(author: str, event: Event) -> dict[str, Any]:
    """What raises at an event, beside a callback and a logger that can't be closed."""

    def raise_it(now: Event, state: pl.State) -> None:
        if now is event:
            raise FirstError(event.value)

    class Raises(LoggerThatClosesBadly):
        def run_event(self, now: Event, state: pl.State, logger: Any) -> None:
            raise_it(now, state)

    if author == "algorithm":
        return {"algorithms": [pl.algorithm(event)(lambda state: raise_it(event, state))]}
    return {"callbacks": [raise_it, ClosesBadly()]} if author == "callback" else {"loggers": [Raises()]}


def arrives(stream: Any, notes: list[str], says: str | None = None) -> None:
    with pytest.raises(FirstError, match=says) as caught:
        pl.run(stream)
    assert [note for note in getattr(caught.value, "__notes__", []) if note.startswith("while closing")] == notes


WAYS: list[dict[str, Any]] = [{}, {"watch": ["fit_end"]}, {"strict": True}]


@examples(40, 500)
@given(st.sampled_from(OF_FIT), st.sampled_from(["algorithm", "callback", "logger"]), st.sampled_from(WAYS))
def test_the_error_that_ended_training_arrives(event: Event, author: str, way: dict[str, Any]) -> None:
    arrives(fit(**way, **raising(author, event)), NOTES, event.value)


@pytest.mark.slow  # graphs
def test_the_error_that_ended_compiled_training_arrives() -> None:
    for event in (Event.FIT_START, Event.BATCH_END, Event.EVAL_END, Event.EPOCH_END):
        with interpreted():
            arrives(fit(compile=True, watch=["epoch_end"], **raising("callback", event)), NOTES)


def test_a_loader_that_can_not_be_closed_is_a_note() -> None:
    """In the forward the script itself is left by the error, with the loader open in it."""

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise FirstError("forward")

    for way in WAYS:
        at_end, in_callback = raising("algorithm", Event.BATCH_END), raising("callback", Event.AFTER_LOSS)
        plain = {"callbacks": [], "loggers": [], "evaluators": None, "data": LoaderThatClosesBadly(), **way}
        in_callback["callbacks"].pop()
        for options in ({"model": Fails(4, 3)}, at_end, in_callback):
            arrives(fit(**{**plain, **options}), [LOADER])
        evaluated = {"evaluators": {"val": LoaderThatClosesBadly()}, **raising("algorithm", Event.EVAL_BATCH_END)}
        with pytest.raises(FirstError) as caught:
            pl.run(fit(**evaluated, **way))
        assert LOADER in caught.value.__notes__


def test_other_streams_too() -> None:
    def script(state: pl.State) -> Any:
        return (yield Event.BATCH_END, state)

    def options(event: Event) -> dict[str, Any]:
        return {"loggers": [LoggerThatClosesBadly()], **raising("callback", event)}

    for stream in (
        pl.evaluate(mlp(), {"val": points(1)}, loss=cross_entropy, **options(Event.EVAL_END)),
        pl.predict(mlp(), points(1), **options(Event.PREDICT_BATCH_END)),
        pl.drive(script(pl.State.create(mlp())), **options(Event.BATCH_END)),
        pl.progress(fit(**options(Event.BATCH_END))),
    ):
        arrives(stream, NOTES)


def test_an_error_of_closing_alone_arrives() -> None:
    """At the end of a run and where the loop was left: nothing else says that the record is incomplete."""
    with pytest.raises(OSError, match="the callback can't be closed") as caught:
        pl.run(fit())
    assert caught.value.__notes__ == NOTES[1:]
    stream = fit()
    next(stream)
    with pytest.raises(OSError, match="the callback can't be closed"):
        stream.close()


def test_an_error_keeps_no_state_alive() -> None:
    """The driver's frame is not in a cycle with the error: what it refers to goes with the error."""
    gc.collect()
    gc.disable()
    try:
        for way in WAYS:
            stream = fit(callbacks=[], loggers=[], **way, **raising("algorithm", Event.BATCH_END))
            with suppress(FirstError):
                pl.run(stream)
            alive = weakref.ref(stream)
            del stream
            assert alive() is None
    finally:
        gc.enable()


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
    failing, caught = [index for index, fails in enumerate(closers) if fails], None
    try:
        with Closing(*(closer(*item) for item in enumerate(closers))):
            if first is not None:
                raise first
    except BaseException as error:
        caught = error
    notes = failing if how == "raises" else failing[1:]
    kind = FirstError if how == "raises" else OSError if failing else type(first)
    assert type(caught) is kind
    assert getattr(caught, "__notes__", []) == [f"while closing: OSError: {index}" for index in notes]
    assert called == list(range(len(closers)))


def raises(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_an_interrupt_is_no_note() -> None:
    """Control-C while a stream is closed still ends the program, after everything is closed."""
    called: list[int] = []
    closing = Closing(raises(KeyboardInterrupt()), lambda: called.append(1), raises(OSError("disk")))
    with pytest.raises(KeyboardInterrupt) as caught, closing:
        raise FirstError("body")
    assert called == [1]
    assert isinstance(caught.value.__context__, FirstError)
    assert caught.value.__notes__ == ["while closing: OSError: disk"]
    for kind, notes in ((KeyboardInterrupt, []), (SystemExit, []), (OSError, ["while closing: OSError: 143"])):
        with pytest.raises(kind) as again, Closing(raises(kind(143))):  # an exit that is raised again
            raise kind(143)
        assert getattr(again.value, "__notes__", []) == notes
