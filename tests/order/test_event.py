"""The vocabulary: names, values, halves of pairs."""

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
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop.event import Event
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
CANONICAL = {
    Event.INIT: "init",
    Event.EPOCH_END: "epoch",
    Event.EVAL_BEFORE_ALL: "eval_all",
    Event.EVAL_AFTER_FORWARD: "eval_forward",
    Event.BEFORE_TRAIN_BATCH: "train_batch",
    Event.BATCH_CHECKPOINT: "batch_checkpoint",
    Event.PREDICT_BATCH_START: "predict_batch",
}


def test_members_are_those_of_the_specification_and_each_is_its_text() -> None:
    assert [event.name for event in Event] == IN_ORDER.split()
    for event in Event:
        assert event == event.value == event.name.lower() == str(event) == f"{event}"
        assert {event: 1}[event.value] == 1  # type: ignore[index]
        assert pickle.loads(pickle.dumps(event)) is copy.deepcopy(event) is event
        assert eval(repr(event)) is event
    assert {event for event in Event if event.is_eval} == {event for event in Event if event.name.startswith("EVAL_")}
    assert {event for event in Event if event.is_predict} == {event for event in Event if event.name[:7] == "PREDICT"}


def test_halves_of_a_pair_share_their_canonical_name() -> None:
    halves: dict[str, list[Event]] = {}
    for event in Event:
        starts = "BEFORE" in event.name or event.name.endswith("_START")
        assert event.is_before_event == starts
        assert event.is_after_event == (not starts and event.name not in NEITHER)
        if event.name not in NEITHER:
            halves.setdefault(event.canonical_name, []).append(event)
    for name, (before, after) in halves.items():
        assert before.is_before_event, name
        assert after.is_after_event, name
    assert {event: event.canonical_name for event in CANONICAL} == CANONICAL


def test_an_event_is_found_by_its_name_and_older_names_are_aliases() -> None:
    assert Event["TRAINING_START"] is Event.FIT_START
    assert Event["TRAINING_END"] is Event("training_end") is Event.FIT_END
    for name in ("epoch_end", "EPOCH_END", " epoch_end "):
        assert Event(name) is Event.EPOCH_END
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

    asks: list[tuple[Callable[[], bool], bool]] = [
        (lambda: event == other, True),
        (lambda: event != other, False),
        (matched, True),
    ]
    if not own:
        asks += [
            (lambda: other == event, True),
            (lambda: other != event, False),
            (lambda: event in (other, other), True),
            (lambda: event in [other, other], True),
        ]
    for ask, if_equal in asks:
        if text in VALUES:
            assert ask() is (if_equal if text == event.value else not if_equal)
        else:
            with pytest.raises(pl.EventNameError, match="is no event and never comes"):
                ask()


def test_what_is_no_text_is_compared_as_usual_and_events_are_keys_beside_texts() -> None:
    event = Event.BATCH_END
    for other in (None, 3, b"batch_end", ("batch_end",), object(), float("nan"), Event, mock.ANY):
        assert (event == other) is (other == event) is (other is mock.ANY)
        assert (event != other) is (other is not mock.ANY)
    table = {event: 1, "batch_ends": 2, "loss": 3, "epoch_end": 4}
    assert [table[each] for each in (event, Event.EPOCH_END)] == [1, 4]
    assert Event.FIT_END not in table
    assert hash(event) == hash("batch_end")
    leaves, structure = optree.tree_flatten(table)  # type: ignore[arg-type]
    assert optree.tree_unflatten(structure, leaves) == table
    assert json.dumps({"event": event}) == '{"event": "batch_end"}'


MEANT = {
    "batch_ends": "BATCH_END",
    "BATCH_END": "BATCH_END",
    "epoch_checkpt": "EPOCH_CHECKPOINT",
    " epoch_end": "EPOCH_END",
    "training_start": "FIT_START",
    "on_train_batch_end": "BATCH_END",
    "on_validation_end": "EVAL_END",
    "BatchEnd": "BATCH_END",
}


def test_the_error_names_the_event_that_was_meant() -> None:
    for text, near in MEANT.items():
        with pytest.raises(pl.EventNameError, match=rf"did you mean '{near.lower()}' \(Event\.{near}\)\?"):
            _ = text == Event.INIT
        with pytest.raises(AttributeError, match=rf"Event\.{near}S is not an event; did you mean Event\.{near}\?"):
            getattr(Event, f"{near}S")
        with pytest.raises(KeyError, match=rf"did you mean Event\.{near}\?"):
            Event[f"{near}S"]
        assert not hasattr(Event, f"{near}S")


def training() -> tuple[nn.Module, list[Any]]:
    return nn.Linear(2, 1), [(torch.ones(4, 2), torch.zeros(4, 1))] * 3


def options() -> dict[str, Any]:
    return {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}


WRONG: Any = "batch_ends"
DOORS: dict[str, Callable[[], Any]] = {
    "algorithm": lambda: pl.algorithm(WRONG)(lambda state: state),
    "Algorithm": lambda: pl.Algorithm("own", {WRONG: lambda state: state}),
    "Algorithm of two": lambda: pl.Algorithm("own", {("fit_start", WRONG): lambda state: state}),
    "check": lambda: pl.order.check([WRONG]),
    "successors": lambda: pl.order.successors(WRONG),
    "nearest_boundary": lambda: pl.order.nearest_boundary(WRONG),
    "states": lambda: pl.testing.states(at=WRONG),
    "fit": lambda: pl.fit(*training(), **options(), watch={WRONG}),
    "evaluate": lambda: pl.evaluate(*training(), watch={WRONG}),
    "predict": lambda: pl.predict(*training(), watch={WRONG}),
    "drive": lambda: pl.drive((pair for pair in ()), watch={WRONG}),
    "rewind": lambda: pl.rewind("nowhere", "1ba", WRONG, *training(), **options()),
}


def test_every_door_names_the_event_that_was_meant() -> None:
    for door, call in DOORS.items():
        with pytest.raises(pl.ArgumentError, match=r"'batch_ends' is not an event; did you mean Event\.BATCH_END\?"):
            pytest.fail(f"{door} accepts it: {call()}")


@pytest.mark.parametrize("compile", [False, True])
def test_a_body_that_waits_for_no_event_ends_at_its_first_one(compile: bool) -> None:
    """The body, a callback and an algorithm; eager and compiled."""
    text = "batch_ends"

    def body(event: Event, state: pl.State) -> None:
        assert event in ("batch_end", text) or event != text

    @pl.algorithm(*Event)
    def handler(state: pl.State) -> pl.State:
        return state.replace(loss=None) if state.event == text else state

    def loop() -> None:
        with contextlib.closing(pl.fit(*training(), **options(), compile=compile)) as stream:
            for event, state in stream:
                body(event, state)

    with pytest.raises(pl.EventNameError, match=rf"is compared with '{text}'"):
        loop()
    for attached in ({"callbacks": [body]}, {"algorithms": [handler]}):
        with pytest.raises(pl.EventNameError, match=rf"is compared with '{text}'"):
            pl.run(pl.fit(*training(), **options(), **attached))


def callback_with(name: str, method: Any) -> pl.Callback:
    return type("Own", (pl.Callback,), {"fit_start": lambda self, state, logger: None, name: method})()


NO_EVENTS = [
    "batch_ends",
    "BATCH_END",
    "BatchEnd",
    "on_epoch_end",
    "on_train_batch_end",
    "training_start",
    "eval_ended",
]
METHODS = [
    lambda self, state, logger: None,
    lambda self, state: None,
    classmethod(lambda cls, state, logger: None),
    staticmethod(lambda state, logger: None),
    functools.partialmethod(lambda self, state, logger: None),
]


def test_a_method_of_a_callback_that_is_named_after_no_event_is_refused() -> None:
    for name, method in [*((name, METHODS[0]) for name in NO_EVENTS), *(("batch_ends", each) for each in METHODS)]:
        with pytest.raises(pl.ArgumentError, match=rf"a method '{name}', which is no event .* did you mean \w+\(self"):
            pl.fit(*training(), **options(), callbacks=[callback_with(name, method)])


def test_an_attribute_of_a_callback_counts_as_its_methods_do_and_helpers_may_have_any_name() -> None:
    callback: Any = callback_with("_batch_ends", METHODS[0])
    callback.batch_starts = []
    callback.summary = lambda state, logger: None
    callback.epoch_ended = lambda: True
    pl.run(pl.fit(*training(), **options(), callbacks=[callback]))
    callback.batch_ends = lambda state, logger: None
    with pytest.raises(pl.ArgumentError, match=r"did you mean batch_end\("):
        pl.fit(*training(), **options(), callbacks=[callback])
