"""Each way of keeping something of a State, each place that may hold it, and each event: alone, and by its name."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import pytest

import pure_loop as pl
from pure_loop import Event
from tests.ownership.judge import Judge, Violation
from tests.ownership.programs import CONSUMERS, Keep, Program, judge, twin_of
from tests.ownership.ways import HOLDERS, OF_OTHERS, WAYS, WEAK
from tests.ownership.wrong import WRONG, always_in_place, wrong

# By events, in which batch: steps come before it and after it.
PLACES = {
    Event.AFTER_LOAD: 0,
    Event.BATCH_START: 3,
    Event.AFTER_LOSS: 3,
    Event.AFTER_BACKWARD: 3,
    Event.AFTER_TRAIN_BATCH: 3,
    Event.BATCH_END: 3,
    Event.EPOCH_END: 4,
}
# Gradients of the large ones are written in place, and those of the others are not. In the unread ones no code but
# torch's and the library's is given parameters, so that only what is kept keeps a step from writing in place.
RUNS: dict[str, dict[str, Any]] = {
    "small": {"model": "telling", "options": {"strict": False}},
    "large": {"model": "wide", "options": {"strict": False, "microbatch_size": 2, "clip_grad": 0.1}},
    "unread": {"model": "plain", "telling": False, "options": {"strict": False}},
    "large unread": {
        "model": "wide",
        "telling": False,
        "options": {"strict": False, "microbatch_size": 2, "clip_grad": 0.1},
    },
}
WATCHES = {"all": None, "one": True}


def _run(run: str, keep: Keep, watched: bool = False) -> Program:
    watch = frozenset({keep.event, Event.BATCH_END}) if watched else None
    return Program(keeps=(keep,), watch=watch, **RUNS[run])


@cache
def _twin(run: str, who: str) -> Judge:
    """What is kept in all ways at all events by one that copies; numbers depend on no setting but these."""
    if who in OF_OTHERS:
        keeps = [Keep(who=who, way=way, batch=3) for way in OF_OTHERS[who]]
    else:
        keeps = [Keep(who=who, event=event, batch=batch, way=way) for way in WAYS for event, batch in PLACES.items()]
    return twin_of(Program(keeps=tuple(keeps), **RUNS[run]))


def check(run: str, keep: Keep, *, watched: bool = False) -> int:
    """Keep one thing, and compare it at the end; returns how often it was compared."""
    plain = attrs.evolve(keep, holder="a closure", left=None, often=False)
    twin = _twin(run, keep.who)
    judged = Judge(Judge())
    assert judged.truth is not None
    if plain in twin.numbers:
        judged.truth.numbers[keep] = twin.numbers[plain]
    return judge(_run(run, keep, watched), twin=judged.truth).compared


def _named(values: Any, fast: Any = Event) -> Any:
    """By their names; those that are not in the fast tier are in the slow one."""
    return [pytest.param(value, id=value.name, marks=[] if value in fast else pytest.mark.slow) for value in values]


@pytest.mark.parametrize("event", _named(PLACES, fast=(Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", ["small", "unread"])
def test_each_way_of_keeping_keeps(run: str, way: str, event: Event) -> None:
    keep = Keep(event=event, batch=PLACES[event], way=way)
    assert check(run, keep) == (keep in _twin(run, "body").numbers)


def test_each_way_is_one_somewhere() -> None:
    kept = {key.way for key in _twin("small", "body").numbers if isinstance(key, Keep)}
    assert kept == set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("event", _named(PLACES))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("run", "watched"),
    [
        *(("small", True), ("unread", True), ("large", True), ("large unread", True)),
        *(pytest.param(run, False, marks=pytest.mark.thorough) for run in ("large", "large unread")),
    ],
)
def test_each_way_keeps_with_large_gradients_and_some_events(run: str, watched: bool, way: str, event: Event) -> None:
    keep = Keep(event=event, batch=PLACES[event], way=way)
    assert check(run, keep, watched=watched) == (keep in _twin(run, "body").numbers)


@pytest.mark.parametrize("event", _named([Event.AFTER_LOSS, Event.BATCH_END]))
@pytest.mark.parametrize("way", ["the State and no look at it", "params, no look at them", "parameter: a view"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("run", ["small", "unread"])
def test_each_place_keeps(run: str, holder: str, way: str, event: Event) -> None:
    check(run, Keep(event=event, batch=3, way=way, holder=holder))


_STORAGE = "parameter: untyped_storage()"


@pytest.mark.parametrize(
    ("way", "event"),
    [
        pytest.param(
            *(way, event),
            id=f"{way}-{event.name}",
            marks=pytest.mark.xfail(
                way == _STORAGE,
                raises=Violation,
                strict=True,
                reason="a step that writes in place goes on with the same tensors",
            ),
        )
        for way in (
            *("the State", "a leaf", "parameter: itself", "a mapping of moments", "grads", "buffers"),
            *("moment: itself", "gradient: itself", "parameter: detach()", "params", "opt_state", _STORAGE),
        )
        for event in (Event.FIT_START, Event.AFTER_LOSS, Event.BATCH_END)
    ],
)
def test_a_weak_reference_shows_no_other_numbers(way: str, event: Event) -> None:
    """It may lose what it refers to. A tensor can't say that it was overwritten, and a mapping can."""
    keep = Keep(event=event, batch=0 if event is Event.FIT_START else 3, way=way, holder=WEAK, often=True)
    judge(Program(keeps=(keep,), **RUNS["small"]))


@pytest.mark.parametrize("who", ["callback", "algorithm"])
@pytest.mark.parametrize("event", _named(PLACES))
@pytest.mark.parametrize(
    "way", ["the State and no look at it", "params, no look at them", "parameter: a view", "moment: an array", "grads"]
)
def test_others_keep_as_well(who: str, way: str, event: Event) -> None:
    keep = Keep(who=who, event=event, batch=PLACES[event], way=way)
    assert check("small", keep) == (keep in _twin("small", who).numbers)


@pytest.mark.parametrize(("who", "way"), [(who, way) for who, ways in OF_OTHERS.items() for way in ways])
def test_what_is_given_tensors_keeps_them(who: str, way: str) -> None:
    """A forward, a loss, a clip_grad and an optimizer."""
    keep = Keep(who=who, way=way, batch=3)
    options = {"strict": False, **({"clip_grad": "own"} if who == "clip" else {})}
    optimizer = "telling adamw" if who == "update" else "adamw"
    program = Program(keeps=(keep,), model="telling", optimizer=optimizer, options=options)
    assert judge(program).compared == 1


@pytest.mark.parametrize(
    "event",
    _named([Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END]),
)
@pytest.mark.parametrize(
    ("model", "way"),
    [
        *[
            ("aliasing outputs", way)
            for way in ("the outputs", "the outputs, no look at them", "a view of the outputs")
        ],
        *[("aliasing buffers", way) for way in ("buffers", "a buffer", "replace(params)")],
        ("aliasing loss", "the loss"),
        ("aliasing loss", "replace(opt_state)"),
    ],
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_has_the_memory_of_a_parameter_keeps_it(optimizer: str, model: str, way: str, event: Event) -> None:
    """Nothing of the parameters was read: outputs, a loss and a buffer are views of one."""
    keep = Keep(event=event, batch=3, way=way)
    judge(Program(keeps=(keep,), model=model, optimizer=optimizer, options={"strict": False}))


@pytest.mark.parametrize("model", ["aliasing outputs", "aliasing buffers", "aliasing loss"])
def test_states_with_such_views_are_those_of_a_run_that_copies(model: str) -> None:
    compared = frozenset((event, batch) for event in Event for batch in range(8))
    program = Program(model=model, compared=compared, options={"strict": False})
    assert judge(program).compared > 40


@pytest.mark.parametrize("who", ["body", "callback", "algorithm"])
@pytest.mark.parametrize("way", ["the State", "the State and no look at it"])
@pytest.mark.parametrize(
    ("run", "event", "batch", "nth"),
    [("small", Event.AFTER_BACKWARD, 2, 0), ("large", Event.AFTER_LOSS, 3, 1)],
    ids=["parameters", "gradients"],
)
def test_a_state_that_the_script_goes_on_with_stays(
    run: str, event: Event, batch: int, nth: int, way: str, who: str
) -> None:
    """A batch of four has its gradients with its backward, and a loss is followed by its backward: no State between."""
    keep = Keep(who=who, event=event, batch=batch, nth=nth, way=way)
    assert judge(_run(run, keep)).compared == 1


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_last_state_is_whole_however_the_stream_is_read(consumer: str) -> None:
    keep = Keep(event=Event.FIT_END, batch=6)
    assert judge(Program(consumer=consumer, keeps=(keep,))).compared == 1


@pytest.mark.parametrize("way", ["the State", "params", "parameter: a view", "moment: a view", "a penalty alone"])
def test_what_was_let_go_is_written_to_and_what_is_kept_later_stays(way: str) -> None:
    event = Event.AFTER_LOSS if way == "a penalty alone" else Event.BATCH_END
    keeps = tuple(Keep(event=event, batch=batch, way=way, left=14) for batch in (1, 3, 5))
    assert judge(Program(keeps=keeps)).compared == 3


def test_an_update_that_is_always_in_place_is_caught() -> None:
    """In each way that keeps memory of the parameters."""
    missed = []
    for way in WAYS:
        # A copy is none of the State's memory; a loss, outputs, gradients and what has replaced parameters neither.
        if not way.startswith(
            ("parameter: ", "params", "the State", "attrs", "optree.tree_leaves", "a penalty", "gc.")
        ):
            continue
        event = Event.AFTER_LOSS if way.startswith("a penalty") else Event.BATCH_END
        try:
            with always_in_place():
                check("small", Keep(event=event, batch=3, way=way))
        except (Violation, pl.errors.DonatedStateError):
            continue
        missed.append(way)
    assert missed == []


@pytest.mark.parametrize(
    ("name", "way", "event"),
    [
        ("always in place", "the State", Event.BATCH_END),
        ("no look at States", "the State", Event.AFTER_TRAIN_BATCH),
        ("no count of mappings", "the State and no look at it", Event.BATCH_END),
        ("no count of mappings", "params, no look at them", Event.BATCH_END),
        ("no look at tensors", "parameter: itself", Event.BATCH_END),
        ("no look at tensors", "parameter: a view", Event.BATCH_END),
        ("no look at storages", "parameter: detach()", Event.BATCH_END),
        ("no look at storages", "parameter: an array", Event.BATCH_END),
        ("the optimizer state counts as unread", "moment: itself", Event.BATCH_END),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_wrong_decision_is_caught(name: str, way: str, event: Event) -> None:
    assert name in WRONG
    with wrong(name), pytest.raises((Violation, pl.errors.DonatedStateError)):
        check("small", Keep(event=event, batch=3, way=way, holder="a list"))


def test_that_the_script_has_a_state_that_is_kept_is_looked_at() -> None:
    keep = Keep(event=Event.AFTER_BACKWARD, batch=2)
    with wrong("no look at the script's State"), pytest.raises((Violation, pl.errors.DonatedStateError)):
        judge(_run("small", keep))
