"""The vocabulary: names, values, halves of pairs; and that a text which is no event is never waited for."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pickle
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop.errors import ArgumentError, EventNameError
from pure_loop.event import Event
from tests.support.problem import cross_entropy, fit, mlp, points, run
from tests.support.tiers import examples

IN_ORDER = """
    INIT BEFORE_LOAD AFTER_LOAD FIT_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER BATCH_START BEFORE_TRAIN_BATCH
    BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD AFTER_TRAIN_BATCH BATCH_END
    BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT FIT_END EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD
    EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END EVAL_AFTER_ALL EVAL_STANDALONE_START EVAL_STANDALONE_END PREDICT_START
    PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END ITERATION_START
    ITERATION_END ITERATION_CHECKPOINT
"""
NEITHER = ["INIT", "BATCH_CHECKPOINT", "EPOCH_CHECKPOINT", "ITERATION_CHECKPOINT"]
CANONICAL = {Event.INIT: "init", Event.EPOCH_END: "epoch", Event.EVAL_BEFORE_ALL: "eval_all"}
CANONICAL |= {Event.EVAL_AFTER_FORWARD: "eval_forward", Event.PREDICT_BATCH_START: "predict_batch"}


def test_members_are_those_of_the_specification_and_each_is_its_text() -> None:
    assert [event.name for event in Event] == IN_ORDER.split()
    halves: dict[str, list[Event]] = {}
    for event in Event:
        assert event == event.value == event.name.lower() == str(event) == f"{event}"
        assert {event: 1}[event.value] == 1  # type: ignore[index]
        assert pickle.loads(pickle.dumps(event)) is copy.deepcopy(event) is eval(repr(event)) is event
        starts = "BEFORE" in event.name or event.name.endswith("_START")
        assert event.is_before_event == starts
        assert event.is_after_event == (not starts and event.name not in NEITHER)
        assert event.is_eval == event.name.startswith("EVAL_")
        assert event.is_predict == event.name.startswith("PREDICT")
        if event.name not in NEITHER:
            halves.setdefault(event.canonical_name, []).append(event)
    for before, after in halves.values():
        assert (before.is_before_event, after.is_after_event) == (True, True)
    assert {event: event.canonical_name for event in CANONICAL} == CANONICAL


def test_an_event_is_found_by_its_name_and_older_names_are_aliases() -> None:
    assert Event["TRAINING_START"] is Event.FIT_START
    assert Event["TRAINING_END"] is Event("training_end") is Event.FIT_END
    assert Event("EPOCH_END") is Event(" epoch_end ") is Event.EPOCH_END
    with pytest.raises(ValueError, match=r"'epoch_strat' is not an event; did you mean Event\.EPOCH_START\?"):
        Event("epoch_strat")
    with pytest.raises(ValueError, match="3 is not an event; the events are INIT, "):
        Event(3)  # type: ignore[arg-type]


VALUES = [event.value for event in Event]


class Own(str):
    """A text of a class of its own, as NumPy and enums have them."""


def spellings() -> st.SearchStrategy[str]:
    """Values of events, with at most one letter too many, and any other text."""
    values = st.sampled_from(VALUES)
    places = st.tuples(values, st.integers(0, 30), st.sampled_from(["", "s", "_", " ", "E"]))
    damaged = places.map(lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :])
    return st.one_of(values, damaged, values.map(str.upper), st.text(max_size=20))


@examples(50, 3000)
@given(event=st.sampled_from(list(Event)), text=spellings(), own=st.booleans())
def test_a_text_is_an_event_or_can_not_be_compared_with_one(event: Event, text: str, own: bool) -> None:
    """Every way in which a body asks for an event: equal and unequal, from both sides, in a tuple and in a list, by
    ``match``; texts of a class of their own, too, which Python asks first where they stand on the left."""
    other = Own(text) if own else text
    wanted = types.SimpleNamespace(text=other)

    def matched() -> bool:
        match event:
            case wanted.text:
                return True
        return False

    asks: list[Callable[[], bool]] = [lambda: event == other, lambda: not event != other, matched]  # noqa: SIM202
    if not own:
        asks += [lambda: other == event, lambda: not other != event]  # noqa: SIM202
        asks += [lambda: event in (other, other), lambda: event in [other, other]]
    for ask in asks:
        if text in VALUES:
            assert ask() is (text == event.value)
        else:
            with pytest.raises(EventNameError, match="is no event and never comes"):
                ask()


def test_what_is_no_text_is_compared_as_usual_and_events_are_keys_beside_texts() -> None:
    event = Event.BATCH_END
    for other in (None, 3, b"batch_end", ("batch_end",), object(), float("nan"), Event, mock.ANY):
        assert (event == other) is (other == event) is (other is mock.ANY)
        assert (event != other) is (other is not mock.ANY)
    table = {event: 1, "batch_ends": 2, "loss": 3, "epoch_end": 4}
    assert [table[each] for each in (event, Event.EPOCH_END)] == [1, 4]
    assert Event.FIT_END not in table
    leaves, structure = optree.tree_flatten(table)  # type: ignore[arg-type]
    assert optree.tree_unflatten(structure, leaves) == table
    assert json.dumps({"event": event}) == '{"event": "batch_end"}'


MEANT = {"batch_ends": "BATCH_END", "epoch_checkpt": "EPOCH_CHECKPOINT", " epoch_end": "EPOCH_END"}
MEANT |= {"training_start": "FIT_START", "on_train_batch_end": "BATCH_END", "on_validation_end": "EVAL_END"}
MEANT |= {"BATCH_END": "BATCH_END", "BatchEnd": "BATCH_END"}
WRONG: Any = "batch_ends"
SETTINGS = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
DOORS: list[Callable[[], Any]] = [
    lambda: pl.algorithm(WRONG)(lambda state: state),
    lambda: pl.Algorithm("own", {("fit_start", WRONG): lambda state: state}),
    lambda: pl.order.check([WRONG]),
    lambda: pl.order.successors(WRONG),
    lambda: pl.order.nearest_boundary(WRONG),
    lambda: pl.testing.states(at=WRONG),
    lambda: fit(watch={WRONG}),
    lambda: pl.evaluate(mlp(), points(), watch={WRONG}),
    lambda: pl.predict(mlp(), points(), watch={WRONG}),
    lambda: pl.drive((pair for pair in ()), watch={WRONG}),
    lambda: pl.rewind("nowhere", "1ba", WRONG, mlp(), points(), **SETTINGS),
]


def test_errors_name_the_event_that_was_meant_at_every_door() -> None:
    for text, near in MEANT.items():
        with pytest.raises(EventNameError, match=rf"did you mean '{near.lower()}' \(Event\.{near}\)\?"):
            _ = text == Event.INIT
        with pytest.raises(AttributeError, match=rf"Event\.{near}S is not an event; did you mean Event\.{near}\?"):
            getattr(Event, f"{near}S")
        with pytest.raises(KeyError, match=rf"did you mean Event\.{near}\?"):
            Event[f"{near}S"]
    for call in DOORS:
        with pytest.raises(ArgumentError, match=r"'batch_ends' is not an event; did you mean Event\.BATCH_END\?"):
            pytest.fail(f"accepted: {call()}")


def test_a_body_that_waits_for_no_event_ends_at_its_first_one() -> None:
    """The body, eager and compiled; a callback and an algorithm."""
    text = "batch_ends"

    def body(event: Event, state: pl.State) -> None:
        assert event in ("batch_end", text) or event != text

    @pl.algorithm(*Event)
    def handler(state: pl.State) -> pl.State:
        return state.replace(loss=None) if state.event == text else state

    def loop(compile: bool) -> None:
        with contextlib.closing(fit(compile=compile, strict=None)) as stream:
            for event, state in stream:
                body(event, state)

    for call in (
        *(lambda: loop(compile=False), lambda: loop(compile=True)),
        *(lambda: run(callbacks=[body]), lambda: run(algorithms=[handler])),
    ):
        with pytest.raises(EventNameError, match=rf"is compared with '{text}'"):
            call()


NAMES = ("batch_ends", "BATCH_END", "BatchEnd", "on_epoch_end", "on_train_batch_end", "training_start", "eval_ended")


def observe(self: Any, state: Any, logger: Any = None) -> None: ...


def test_a_method_of_a_callback_that_is_named_after_no_event_is_refused_and_helpers_may_have_any_name() -> None:
    def callback(**methods: Any) -> Any:
        return type("Own", (pl.Callback,), {"fit_start": observe, **methods})()

    kinds = (lambda self, state: None, classmethod(observe), staticmethod(observe), functools.partialmethod(observe))
    for name, method in [*((name, observe) for name in NAMES), *(("batch_ends", kind) for kind in kinds)]:
        with pytest.raises(ArgumentError, match=rf"a method '{name}', which is no event .* did you mean \w+\(self"):
            fit(callbacks=[callback(**{name: method})])
    own = callback(_batch_ends=observe, summary=observe, epochs=lambda self: 3, eval_start_time=lambda self, state: 0.0)
    own.batch_starts, own.epoch_ended = [], lambda: True
    run(callbacks=[own])
    own.batch_ends = lambda state, logger: None
    with pytest.raises(ArgumentError, match=r"did you mean batch_end\("):
        fit(callbacks=[own])
