"""Each way of keeping something of a State, each place that may hold it, and each event: in runs that keep one a batch.

The step after a batch is the one that may write to what was kept in it, and what was kept before lies elsewhere by
then: a run of a hundred batches asks for a hundred ways, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from pure_loop import Event
from tests.ownership.judge import Judge, Keep
from tests.ownership.programs import Program, judge
from tests.ownership.ways import HOLDERS, WAYS, WEAK, Way
from tests.ownership.wrong import WRONG, wrong

# In the unread ones no code but torch's and the library's is given parameters, so that only what is kept keeps a step
# from writing in place. Gradients of the large ones are written in place.
PIECES = {"strict": False, "microbatch_size": 3, "clip_grad": 0.1}
RUNS: dict[str, dict[str, Any]] = {
    "small": {"model": "own", "options": {"strict": False}},
    "unread": {"own_loss": False, "options": {"strict": False}},
    "large": {"model": "own", "large": True, "options": PIECES},
    "large unread": {"own_loss": False, "large": True, "options": PIECES},
}
WITH_GRADIENTS = (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END)


def series(keeps: Iterable[dict[str, Any]], every: int = 1, **settings: Any) -> Program:
    """A run with one of these a batch."""
    kept = tuple(Keep(**{"batch": 4 + every * number, **keep}) for number, keep in enumerate(keeps))
    return Program(keeps=kept, batches=kept[-1].batch + 2, **settings)


_OF_GRAPHS = {"a tensor that the graph has saved", "a loss of one's own", "a penalty"}
_OF_GRAPHS |= {way for way in WAYS if way.startswith("a leaf")}
_OF_GRADIENTS = {way for way in WAYS if way.startswith(("gradient", "grads", "iter(grads"))}


@pytest.mark.parametrize("run", RUNS)
def test_each_way_of_keeping_keeps(run: str) -> None:
    """But for those of gradients and leaves, which some events are without."""
    for event in (Event.AFTER_LOSS, *WITH_GRADIENTS):
        watch = None if run in ("small", "unread") else frozenset({event, Event.BATCH_END})
        judged = judge(series([{"event": event, "way": way} for way in WAYS], watch=watch, **RUNS[run]))
        assert judged.truth is not None
        kept = {keep.way for keep in judged.truth.numbers if keep.who != "last"}
        assert judged.compared == len(kept) + 1
        without = _OF_GRAPHS if event in WITH_GRADIENTS else _OF_GRADIENTS
        assert set(WAYS) - kept == without


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.BATCH_START, Event.BEFORE_BACKWARD, Event.BATCH_CHECKPOINT, Event.EPOCH_END])
@pytest.mark.parametrize("run", RUNS)
def test_each_way_keeps_at_events_like_these_and_other_tensors(run: str, event: Event) -> None:
    """Rooms of the table that hardly differ from those of the fast tier."""
    keeps: list[dict[str, Any]] = [{"event": event, "way": way} for way in WAYS]
    judge(series(keeps, every=4 if event is Event.EPOCH_END else 1, **RUNS[run]))
    judge(series([{**keep, "which": 2, "nth": run.startswith("large")} for keep in keeps], **RUNS[run]))


UNSEEN = ("the State and no look at it", "params, no look at them", "parameter: a view")


@pytest.mark.parametrize("run", ["small", "unread"])
def test_each_place_keeps(run: str) -> None:
    for event in (Event.AFTER_LOSS, Event.BATCH_END):
        keeps = [{"event": event, "way": way, "holder": holder} for way in UNSEEN for holder in HOLDERS]
        assert judge(series(keeps, **RUNS[run])).compared > 3 * (len(HOLDERS) - 2)


def test_a_weak_reference_shows_no_other_numbers() -> None:
    """It may lose what it refers to. A tensor can't say that it was overwritten, and a mapping can.

    One to a storage does show them: a step that writes in place goes on with the same tensors.
    """
    ways = ("the State", "a leaf", "parameter: itself", "a mapping of moments", "grads", "buffers", "moment: itself")
    ways += ("gradient: itself", "parameter: detach()", "params", "opt_state", "parameter: untyped_storage()")
    keeps: list[dict[str, Any]] = [{"way": way, "holder": WEAK, "often": True} for way in ways]
    for event, more in ((Event.FIT_START, {"batch": 0}), (Event.AFTER_LOSS, {}), (Event.BATCH_END, {})):
        program = series([{**keep, **more, "event": event} for keep in keeps], **RUNS["small"])
        violations = judge(program, allowed=True).violations
        assert {keep.way for keep in violations} <= {ways[-1]}, violations


@pytest.mark.parametrize("run", ["small", "large"])
def test_others_keep_as_well(run: str) -> None:
    """A callback and an algorithm; the State that a script goes on with, too, without a State between.

    A batch of four has its gradients with its backward, and a loss is followed by its backward.
    """
    events = (Event.BATCH_START, Event.AFTER_LOSS, *WITH_GRADIENTS)
    for who in ("body", "callback", "algorithm"):
        keeps = [
            {"who": who, "event": event, "way": way}
            for way in (*UNSEEN, "moment: an array", "grads")
            for event in events
        ]
        assert judge(series(keeps, **RUNS[run])).compared > 4 * len(events)
        event, more = (Event.AFTER_BACKWARD, {}) if run == "small" else (Event.AFTER_LOSS, {"batch": 3, "nth": 1})
        for way in ("the State", "the State and no look at it"):
            assert judge(Program(keeps=(Keep(who=who, event=event, way=way, **more),), **RUNS[run])).compared == 2


@pytest.mark.parametrize("model", ["aliasing outputs", "aliasing buffers", "aliasing loss"])
def test_what_has_the_memory_of_a_parameter_keeps_it(model: str) -> None:
    """Nothing of the parameters was read: outputs, a loss and a buffer are views of one."""
    ways = ("the outputs", "the graph of the outputs", "buffers")
    ways += ("replace(params)", "the loss", "replace(opt_state)")
    events = (Event.AFTER_FORWARD, Event.AFTER_LOSS, *WITH_GRADIENTS)
    common = {"model": model, "options": {"strict": False}}
    for optimizer in ("adamw", "sgd"):
        keeps = [{"event": event, "way": way} for event in events for way in ways]
        judge(series([{"batch": 2}, *keeps], optimizer=optimizer, **common))
        passing = tuple(Keep(event=event, batch=batch, left=0) for event in Event for batch in range(8))
        assert judge(Program(keeps=passing, optimizer=optimizer, **common)).compared > 40  # type: ignore[arg-type]


# Programs of which each keep is lost by a wrong decision: the run, the event, and the ways of keeping.
_OF_PARAMETERS = tuple(way for way in WAYS if way.startswith(("parameter", "params")))
CAUGHT: dict[str, tuple[str, Event, tuple[str, ...]]] = {
    "always in place": ("small", Event.BATCH_END, _OF_PARAMETERS),
    "no look at States": ("small", Event.AFTER_TRAIN_BATCH, ("the State",)),
    "no look at the script's State": ("small", Event.AFTER_BACKWARD, ("the State",)),
    "no count of mappings": ("small", Event.BATCH_END, UNSEEN[:2]),
    "no look at tensors": ("small", Event.BATCH_END, ("parameter: itself", "parameter: a view")),
    "no look at storages": ("small", Event.BATCH_END, ("parameter: detach()", "parameter: an array")),
    "the optimizer state counts as unread": ("small", Event.BATCH_END, ("moment: itself",)),
    "gradients are never kept": ("large", Event.AFTER_BACKWARD, ("gradient: itself", "grads")),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_decision_is_caught(name: str) -> None:
    program = Program(keeps=(Keep(batch=2), Keep(batch=3)), consumer="a deque", watch=frozenset({Event.BATCH_END}))
    if name in CAUGHT:
        run, event, ways = CAUGHT[name]
        batch = {"batch": 6} if "script" in name else {}  # of four samples
        program = series([{"event": event, "way": way, **batch} for way in ways], **RUNS[run])
    with wrong(name):
        violations = judge(program, allowed=True).violations
    assert set(program.keeps) - violations.keys() == set()


def test_the_judge_of_donate_true_still_finds_other_numbers() -> None:
    twin, way = Judge(), Way(lambda given, which: given)
    twin.keep(Keep(), way, torch.ones(2))
    judged = Judge(twin, lenient=True)
    judged.keep(Keep(), way, torch.zeros(2))
    judged.finish()
    assert judged.violations == {Keep(): "changed"}
