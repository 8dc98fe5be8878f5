"""Each way of keeping something of a State, each place that may hold it, and each event: in runs that keep one a batch.

The step after a batch is the one that may write to what was kept in it, and what was kept before lies elsewhere by
then: a run of a hundred batches asks for a hundred ways, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pure_loop import Event
from tests.ownership.programs import Keep, Program, judge
from tests.ownership.ways import HOLDERS, OF_OTHERS, WAYS, WEAK
from tests.ownership.wrong import WRONG, wrong

# In the unread ones no code but torch's and the library's is given parameters, so that only what is kept keeps a step
# from writing in place. Gradients of the large ones are written in place.
SMALL: dict[str, Any] = {"model": "telling", "options": {"strict": False}}
RUNS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "unread": {"model": "plain", "telling": False, "options": {"strict": False}},
    "large": {
        "model": "telling",
        "large": True,
        "options": {"strict": False, "microbatch_size": 3, "clip_grad": 0.1},
    },
    "large unread": {
        "model": "plain",
        "telling": False,
        "large": True,
        "options": {"strict": False, "microbatch_size": 3, "clip_grad": 0.1},
    },
}
WITH_GRADIENTS = (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


def series(keeps: Iterable[dict[str, Any]], every: int = 1, **settings: Any) -> Program:
    """A run with one of these a batch."""
    kept = tuple(Keep(**{"batch": 4 + every * number, **keep}) for number, keep in enumerate(keeps))
    return Program(keeps=kept, batches=kept[-1].batch + 2, **settings)


@pytest.mark.parametrize("run", RUNS)
def test_each_way_of_keeping_keeps(run: str) -> None:
    """But for those of gradients and leaves, which some events are without."""
    for event in (Event.BATCH_START, Event.AFTER_LOSS, *WITH_GRADIENTS):
        watch = None if run in ("small", "unread") else frozenset({event, Event.BATCH_END})
        judged = judge(series([{"event": event, "way": way} for way in WAYS], watch=watch, **RUNS[run]))
        assert judged.truth is not None
        kept = {key.way for key in judged.truth.numbers if isinstance(key, Keep)}
        assert judged.compared == len(kept) + 1
        without = {"unread": {"a buffer"}, "large unread": {"a buffer"}}.get(run, set())
        without |= _OF_GRAPHS if event in WITH_GRADIENTS else _OF_GRADIENTS
        assert event is Event.BATCH_START or set(WAYS) - kept == without


_OF_GRAPHS = {"a tensor that the graph has saved", "a loss of one's own", "a penalty and its leaf", "a penalty alone"}
_OF_GRAPHS |= {way for way in WAYS if way.startswith("a leaf")}
_OF_GRADIENTS = {way for way in WAYS if way.startswith(("gradient", "grads", "iter(grads"))}


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.AFTER_FORWARD, Event.BEFORE_BACKWARD, Event.BATCH_CHECKPOINT, Event.EPOCH_END])
@pytest.mark.parametrize("run", RUNS)
def test_each_way_keeps_at_events_like_these_and_other_tensors(run: str, event: Event) -> None:
    """Rooms of the table that hardly differ from those of the fast tier."""
    keeps: list[dict[str, Any]] = [{"event": event, "way": way} for way in WAYS]
    judge(series(keeps, every=4 if event is Event.EPOCH_END else 1, **RUNS[run]))
    judge(series([{**keep, "which": 2, "nth": run.startswith("large")} for keep in keeps], **RUNS[run]))


@pytest.mark.parametrize("event", [Event.AFTER_LOSS, Event.BATCH_END])
@pytest.mark.parametrize("run", ["small", "unread"])
def test_each_place_keeps(run: str, event: Event) -> None:
    ways = ("the State and no look at it", "params, no look at them", "parameter: a view")
    keeps = [{"event": event, "way": way, "holder": holder} for way in ways for holder in HOLDERS]
    assert judge(series(keeps, **RUNS[run])).compared > 3 * (len(HOLDERS) - 2)


_STORAGE = "parameter: untyped_storage()"
_REFERRED = ("the State", "a leaf", "parameter: itself", "a mapping of moments", "grads", "buffers", "moment: itself")
_REFERRED += ("gradient: itself", "parameter: detach()", "params", "opt_state")


def test_a_weak_reference_shows_no_other_numbers() -> None:
    """It may lose what it refers to. A tensor can't say that it was overwritten, and a mapping can.

    One to a storage does show them: a step that writes in place goes on with the same tensors.
    """
    for event in (Event.FIT_START, Event.AFTER_LOSS, Event.BATCH_END):
        for way in (*_REFERRED, _STORAGE):
            keep = Keep(event=event, batch=0 if event is Event.FIT_START else 3, way=way, holder=WEAK, often=True)
            violations = judge(Program(keeps=(keep,), **SMALL), allowed=True).violations
            assert not violations or way == _STORAGE, violations


@pytest.mark.parametrize("who", ["callback", "algorithm"])
@pytest.mark.parametrize("run", ["small", "large"])
def test_others_keep_as_well(run: str, who: str) -> None:
    ways = ("the State and no look at it", "params, no look at them", "parameter: a view", "moment: an array", "grads")
    events = (Event.BATCH_START, Event.AFTER_LOSS, *WITH_GRADIENTS)
    keeps = [{"who": who, "event": event, "way": way} for way in ways for event in events]
    assert judge(series(keeps, **RUNS[run])).compared > 4 * len(events)


@pytest.mark.parametrize("who", OF_OTHERS)
def test_what_is_given_tensors_keeps_them(who: str) -> None:
    """A forward, a loss, a clip_grad and an optimizer."""
    options = {"strict": False, **({"clip_grad": "own"} if who == "clip" else {})}
    optimizer = "telling adamw" if who == "update" else "adamw"
    # Nobody else is given what this one keeps.
    settings: dict[str, Any] = {
        "model": "telling",
        "optimizer": optimizer,
        "options": options,
        "telling": who == "loss",
    }
    keeps = [{"who": who, "way": way, "which": which} for way in OF_OTHERS[who] for which in (0, 3)]
    for large in (False, True):
        program = series(keeps, large=large, **settings)
        assert judge(program).compared == len(keeps) + 1


@pytest.mark.parametrize("model", ["aliasing outputs", "aliasing buffers", "aliasing loss"])
def test_what_has_the_memory_of_a_parameter_keeps_it(model: str) -> None:
    """Nothing of the parameters was read: outputs, a loss and a buffer are views of one."""
    ways = ("the outputs", "the graph of the outputs", "a view of the outputs", "buffers", "a buffer")
    ways += ("replace(params)", "the loss", "replace(opt_state)")
    events = (Event.AFTER_FORWARD, Event.AFTER_LOSS, *WITH_GRADIENTS)
    for optimizer in ("adamw", "sgd"):
        keeps = [{"event": event, "way": way} for event in events for way in ways]
        judge(series([{"batch": 2}, *keeps], model=model, optimizer=optimizer, options={"strict": False}))
        compared = frozenset((event, batch) for event in Event for batch in range(8))
        program = Program(model=model, optimizer=optimizer, compared=compared, options={"strict": False})
        assert judge(program).compared > 40


def test_a_state_that_the_script_goes_on_with_stays() -> None:
    """A batch of four has its gradients with its backward, and a loss is followed by its backward: no State between."""
    for who in ("body", "callback", "algorithm"):
        for way in ("the State", "the State and no look at it"):
            parameters = Keep(who=who, event=Event.AFTER_BACKWARD, way=way)
            gradients = Keep(who=who, event=Event.AFTER_LOSS, batch=3, nth=1, way=way)
            for keep, run in ((parameters, "small"), (gradients, "large")):
                assert judge(Program(keeps=(keep,), **RUNS[run])).compared == 2


def test_what_was_let_go_is_written_to_and_what_is_kept_later_stays() -> None:
    for way in ("the State", "params", "parameter: a view", "moment: a view", "a penalty alone"):
        event = Event.AFTER_LOSS if way == "a penalty alone" else Event.BATCH_END
        keeps = tuple(Keep(event=event, batch=batch, way=way, left=14) for batch in (1, 3, 5))
        assert judge(Program(keeps=keeps)).compared == 4


def _lost(run: str, event: Event, *ways: str, **more: Any) -> Program:
    return series([{"event": event, "way": way, **more} for way in ways], **RUNS[run])


# Programs of which each keep is lost by a wrong decision.
CAUGHT: dict[str, Program] = {
    "always in place": _lost(
        "small", Event.BATCH_END, *[way for way in WAYS if way.startswith(("parameter", "params"))]
    ),
    "no look at States": _lost("small", Event.AFTER_TRAIN_BATCH, "the State"),
    "no look at the script's State": _lost("small", Event.AFTER_BACKWARD, "the State", batch=6),
    "no count of mappings": _lost("small", Event.BATCH_END, "the State and no look at it", "params, no look at them"),
    "no look at tensors": _lost("small", Event.BATCH_END, "parameter: itself", "parameter: a view"),
    "no look at storages": _lost("small", Event.BATCH_END, "parameter: detach()", "parameter: an array"),
    "the optimizer state counts as unread": _lost("small", Event.BATCH_END, "moment: itself"),
    "gradients are never kept": _lost("large", Event.AFTER_BACKWARD, "gradient: itself", "grads"),
    "each variable is replaced": Program(
        keeps=(Keep(batch=2), Keep(batch=3)), consumer="a deque", watch=frozenset({Event.BATCH_END})
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_decision_is_caught(name: str) -> None:
    with wrong(name):
        violations = judge(CAUGHT[name], allowed=True).violations
    assert set(CAUGHT[name].keeps) - violations.keys() == set()
