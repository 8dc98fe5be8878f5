"""The vocabulary: names, values, halves of pairs."""

from __future__ import annotations

import copy
import pickle

import pytest

from pure_loop.event import Event

IN_ORDER = [
    "INIT",
    "BEFORE_LOAD",
    "AFTER_LOAD",
    "FIT_START",
    "EPOCH_START",
    "BEFORE_DATALOADER",
    "AFTER_DATALOADER",
    "BATCH_START",
    "BEFORE_TRAIN_BATCH",
    "BEFORE_FORWARD",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "BEFORE_BACKWARD",
    "AFTER_BACKWARD",
    "AFTER_TRAIN_BATCH",
    "BATCH_END",
    "BATCH_CHECKPOINT",
    "EPOCH_END",
    "EPOCH_CHECKPOINT",
    "FIT_END",
    "EVAL_BEFORE_ALL",
    "EVAL_START",
    "EVAL_BATCH_START",
    "EVAL_BEFORE_FORWARD",
    "EVAL_AFTER_FORWARD",
    "EVAL_BATCH_END",
    "EVAL_END",
    "EVAL_AFTER_ALL",
    "EVAL_STANDALONE_START",
    "EVAL_STANDALONE_END",
    "PREDICT_START",
    "PREDICT_BATCH_START",
    "PREDICT_BEFORE_FORWARD",
    "PREDICT_AFTER_FORWARD",
    "PREDICT_BATCH_END",
    "PREDICT_END",
    "ITERATION_START",
    "ITERATION_END",
    "ITERATION_CHECKPOINT",
]

BEFORE = [
    "BEFORE_LOAD",
    "FIT_START",
    "EPOCH_START",
    "BEFORE_DATALOADER",
    "BATCH_START",
    "BEFORE_TRAIN_BATCH",
    "BEFORE_FORWARD",
    "BEFORE_LOSS",
    "BEFORE_BACKWARD",
    "EVAL_BEFORE_ALL",
    "EVAL_START",
    "EVAL_BATCH_START",
    "EVAL_BEFORE_FORWARD",
    "EVAL_STANDALONE_START",
    "PREDICT_START",
    "PREDICT_BATCH_START",
    "PREDICT_BEFORE_FORWARD",
    "ITERATION_START",
]

NEITHER = ["INIT", "BATCH_CHECKPOINT", "EPOCH_CHECKPOINT", "ITERATION_CHECKPOINT"]


def test_members_stand_in_the_order_of_the_specification() -> None:
    assert [event.name for event in Event] == IN_ORDER


def test_a_value_is_the_name_in_lower_case_and_a_str() -> None:
    for event in Event:
        assert event == event.value == event.name.lower() == str(event) == f"{event}"
        assert {event: 1}[event.value] == 1  # type: ignore[index]


def test_older_names_are_aliases() -> None:
    assert Event["TRAINING_START"] is Event.FIT_START
    assert Event["TRAINING_END"] is Event.FIT_END


def test_every_event_is_before_or_after_or_neither() -> None:
    assert [event.name for event in Event if event.is_before_event] == BEFORE
    assert [event.name for event in Event if not event.is_before_event and not event.is_after_event] == NEITHER
    assert not any(event.is_before_event and event.is_after_event for event in Event)


def test_halves_of_a_pair_share_their_canonical_name() -> None:
    halves: dict[str, list[Event]] = {}
    for event in Event:
        if event.name not in NEITHER:
            halves.setdefault(event.canonical_name, []).append(event)
    for name, (before, after) in halves.items():
        assert before.is_before_event, name
        assert after.is_after_event, name


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (Event.INIT, "init"),
        (Event.EPOCH_END, "epoch"),
        (Event.EVAL_BEFORE_ALL, "eval_all"),
        (Event.EVAL_AFTER_FORWARD, "eval_forward"),
        (Event.BEFORE_TRAIN_BATCH, "train_batch"),
        (Event.BATCH_CHECKPOINT, "batch_checkpoint"),
        (Event.PREDICT_BATCH_START, "predict_batch"),
    ],
)
def test_canonical_name(event: Event, name: str) -> None:
    assert event.canonical_name == name


def test_evaluation_and_prediction_are_told_apart() -> None:
    assert {event for event in Event if event.is_eval} == {event for event in Event if event.name.startswith("EVAL_")}
    assert {event for event in Event if event.is_predict} == {event for event in Event if event.name[:7] == "PREDICT"}


def test_an_event_stays_itself_when_it_travels() -> None:
    for event in Event:
        assert pickle.loads(pickle.dumps(event)) is copy.deepcopy(event) is event
        assert eval(repr(event)) is event


@pytest.mark.parametrize("name", ["epoch_end", "EPOCH_END", " epoch_end "])
def test_an_event_is_found_by_its_name(name: str) -> None:
    assert Event(name) is Event.EPOCH_END


def test_an_older_name_is_found_in_lower_case_too() -> None:
    assert Event("training_end") is Event.FIT_END


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"'epoch_strat' is not an event; did you mean Event\.EPOCH_START\?"):
        Event("epoch_strat")
    with pytest.raises(ValueError, match="3 is not an event; the events are INIT, "):
        Event(3)  # type: ignore[arg-type]
