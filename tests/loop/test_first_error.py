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
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.tiers import examples

OF_FIT = [event for event in Event if not event.is_predict and "standalone" not in event and "iteration" not in event]
NOTES = ["while closing: OSError: the callback can't be closed", "while closing: OSError: the logger can't be closed"]
LOADER = "while closing: OSError: the loader can't be closed"
WAYS: list[dict[str, Any]] = [{}, {"watch": ["fit_end"]}, {"strict": True}]


class FirstError(Exception):
    """What ends training."""


def closes_badly(base: type, name: str, **methods: Any) -> Any:
    def close(self: Any) -> None:
        raise OSError(f"the {name} can't be closed")

    return type("ClosesBadly", (base,), {"fit_start": lambda *_: None, "close": close, **methods})()


class LoaderThatClosesBadly:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        try:
            yield from points()
        except GeneratorExit:
            raise OSError("the loader can't be closed") from None


def raising(author: str, event: Event) -> dict[str, Any]:
    """What raises at an event, beside a callback and a logger that can't be closed."""

    def raise_it(now: Event, state: pl.State) -> None:
        if now is event:
            raise FirstError(event.value)

    def handler(state: pl.State) -> pl.State:
        raise FirstError(event.value)

    callback, logger = closes_badly(pl.Callback, "callback"), closes_badly(pl.Logger, "logger")
    if author == "logger":
        logger = closes_badly(pl.Logger, "logger", run_event=lambda self, now, state, logger: raise_it(now, state))
    return {
        "callbacks": [raise_it, callback] if author == "callback" else [callback],
        "loggers": [logger],
        "algorithms": [pl.algorithm(event)(handler)] if author == "algorithm" else [],
    }


def fit(**options: Any) -> Any:
    return problem.fit(**{"evaluators": {"val": points(1)}, "strict": None, **options})


def arrives(stream: Any, notes: list[str], says: str | None = None) -> None:
    with pytest.raises(FirstError, match=says) as caught:
        pl.run(stream)
    assert [note for note in getattr(caught.value, "__notes__", []) if note.startswith("while closing")] == notes


@examples(30, 500)
@given(st.sampled_from(OF_FIT), st.sampled_from(["algorithm", "callback", "logger"]), st.sampled_from(WAYS))
def test_the_error_that_ended_training_arrives(event: Event, author: str, way: dict[str, Any]) -> None:
    arrives(fit(**way, **raising(author, event)), NOTES, event.value)


def test_a_loader_that_can_not_be_closed_is_a_note() -> None:
    """In the forward the script itself is left by the error, with the loader open in it."""

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise FirstError("forward")

    badly = LoaderThatClosesBadly()
    for way in WAYS:
        in_algorithm = raising("algorithm", Event.BATCH_END)["algorithms"]
        for options in ({"model": Fails(4, 3)}, {"algorithms": in_algorithm}):
            arrives(fit(data=badly, evaluators=None, **options, **way), [LOADER])
        evaluated = fit(evaluators={"val": badly}, **raising("algorithm", Event.EVAL_BATCH_END), **way)
        with pytest.raises(FirstError) as caught:
            pl.run(evaluated)
        assert LOADER in caught.value.__notes__


def test_other_streams_too() -> None:
    def script(state: pl.State) -> Any:
        return (yield Event.BATCH_END, state)

    for stream in (
        pl.evaluate(mlp(), {"val": points(1)}, loss=cross_entropy, **raising("callback", Event.EVAL_END)),
        pl.predict(mlp(), points(1), **raising("callback", Event.PREDICT_BATCH_END)),
        pl.drive(script(pl.State.create(mlp())), **raising("callback", Event.BATCH_END)),
        pl.progress(fit(**raising("callback", Event.BATCH_END))),
    ):
        arrives(stream, NOTES)


def test_an_error_of_closing_alone_arrives() -> None:
    """At the end of a run and where the loop was left: nothing else says that the record is incomplete."""
    nowhere = raising("callback", Event.PREDICT_START)
    with pytest.raises(OSError, match="the callback can't be closed") as caught:
        pl.run(fit(**nowhere))
    assert caught.value.__notes__ == NOTES[1:]
    stream = fit(**nowhere)
    next(stream)
    with pytest.raises(OSError, match="the callback can't be closed"):
        stream.close()


def test_an_error_keeps_no_state_alive() -> None:
    """The driver's frame is not in a cycle with the error: what it refers to goes with the error."""
    gc.collect()
    gc.disable()
    try:
        for way in WAYS:
            stream = fit(**way, algorithms=raising("algorithm", Event.BATCH_END)["algorithms"])
            with suppress(FirstError):
                pl.run(stream)
            alive = weakref.ref(stream)
            del stream
            assert alive() is None
    finally:
        gc.enable()


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
