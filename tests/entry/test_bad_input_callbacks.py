"""What users write by mistake in callbacks and loggers."""

from __future__ import annotations

from typing import Any

import pytest

import pure_loop as pl
from tests.support.refusals import TYPE, VALUE, breaks, fit, named, refused


def callback(**methods: Any) -> pl.Callback:
    made: pl.Callback = type("Mine", (pl.Callback,), methods)()
    return made


def returns_three(*_: Any) -> int:
    return 3


def test_callbacks_return_nothing() -> None:
    says = ("callback Mine returned int at BATCH_END", "observe and return nothing", "@pl.algorithm")
    breaks(fit(callbacks=[callback(batch_end=returns_three)]), pl.CallbackReturnError, TypeError, *says)
    breaks(fit(callbacks=[callback(run_event=returns_three)]), pl.CallbackReturnError, TypeError, "at INIT")
    says = ("callback returns_three returned int at INIT", "@pl.algorithm")
    assert breaks(fit(callbacks=[returns_three]), pl.CallbackReturnError, TypeError, *says) == []


def observe(self: Any, state: Any, logger: Any) -> None:
    pass


CALLBACKS = [
    (
        [callback(epoch_ends=observe, batch_end=observe)],
        VALUE,
        ["'epoch_ends', which is no event", "did you mean epoch_end("],
    ),
    ([callback(epoch_ends=observe)], VALUE, ["did you mean epoch_end(self, state, logger)"]),
    ([callback(on_batch_end=observe)], VALUE, ["'on_batch_end'", "did you mean batch_end("]),
    ([callback(on_train_batch_end=observe)], VALUE, ["Mine"]),
    ([callback(training_start=observe)], VALUE, ["'training_start'", "did you mean fit_start("]),
    ([callback()], VALUE, ["Mine observes no event", "epoch_end(self, state, logger)"]),
    ([callback(batch_end=lambda self, state: None)], TYPE, ["batch_end(state)", "def batch_end(self, state, logger)"]),
    ([lambda state: None], TYPE, ["two arguments", "<lambda>(event, state)"]),
    ([pl.Callback], TYPE, ["the class Callback", "Callback()"]),
    ([named("a")], TYPE, ["the algorithm Algorithm('a', batch_end)", "algorithms="]),
    ([3], TYPE, ["holds 3 of type int", "function of (event, state)"]),
    (3, TYPE, ["callbacks=3", "give a list"]),
    (None, TYPE, ["callbacks=None", "give a list"]),
]


@pytest.mark.parametrize(("callbacks", "kind", "says"), CALLBACKS)
def test_what_is_no_callback_is_refused(callbacks: Any, kind: tuple[Any, Any], says: list[str]) -> None:
    refused(lambda: fit(callbacks=callbacks), *kind, *says)


@pytest.mark.parametrize("loggers", [[print], [callback(batch_end=observe)], [pl.Logger]])
def test_what_is_no_logger_is_refused(loggers: Any) -> None:
    refused(lambda: fit(loggers=loggers), *TYPE, "loggers= holds")


def test_helpers_of_a_callback_may_have_any_other_name() -> None:
    pl.run(fit(callbacks=[callback(batch_end=observe, summary=observe, epochs=lambda self: 3, _epoch_ends=observe)]))


def test_helpers_may_be_called_after_the_event_that_they_serve() -> None:
    helpers: dict[str, Any] = {
        "epoch_checkpoint_path": lambda self, state: f"ep{state.timestamp.epoch}",
        "eval_start_time": lambda self, state, unit: 0.0,
    }
    pl.run(fit(callbacks=[callback(batch_end=observe, **helpers)]))
    refused(lambda: fit(callbacks=[callback(batch_end=observe, eval_start_all=observe)]), *VALUE, "'eval_start_all'")


def test_exceptions_of_callbacks_say_whose_they_are() -> None:
    def broken(self: Any, state: Any, logger: Any) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError) as caught:
        pl.run(fit(callbacks=[callback(batch_start=broken)]))
    assert caught.value.__notes__ == ["raised by callback Mine at BATCH_START, batch 0"]
