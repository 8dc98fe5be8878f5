"""The variable of the loop keeps its State as well: after an error, and for whoever reads it while a step runs.

A State in it is whole, or says that it has no numbers; where the next State never takes its place, it is whole.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.frames import rebinds_loop_variable
from tests.ownership.programs import DATA
from tests.ownership.ways import of_tree, same
from tests.support import problem

ONE = frozenset({Event.BATCH_END})
WATCHES: list[Any] = [None, ONE, {Event.BATCH_START}, {Event.AFTER_TRAIN_BATCH}, {Event.EPOCH_END}]


def _raises(*given: Any) -> Any:
    raise ArithmeticError


def _fit(watch: Any, donate: Any = "auto", fails: str = "", **options: Any) -> Any:
    """With a forward or a backward that fails in the fifth batch."""
    calls = itertools.count(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if next(calls) == 5:
            if fails == "a root of 0":
                return problem.cross_entropy(outputs, targets) + (0 * outputs.sum()).sqrt()
            outputs.register_hook(_raises) if fails == "a backward" else fails and _raises()  # type: ignore[no-untyped-call]
        return problem.cross_entropy(outputs, targets)

    settings = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "8ba", "strict": None, **options}
    return problem.fit(None, DATA, loss=loss, watch=watch, donate=donate, **settings)


def _infinite(state: pl.State) -> pl.State:
    return state.replace(grads={name: each * torch.inf for name, each in state.grads.items()})


def _at_4(event: Event, change: Any) -> dict[str, Any]:
    handler = lambda state: change(state) if state.timestamp.batch in (4, 5) else state  # noqa: E731
    return {"algorithms": [pl.algorithm(event, name="ends")(handler)]}


def _interrupts(event: Event, state: pl.State) -> None:
    if event is Event.BATCH_END and state.timestamp.batch == 5:
        raise KeyboardInterrupt


def _failing_half_way() -> Any:
    """An optimizer of one's own raises after it has written to the first parameter, where it writes in place."""
    adamw: Any = pl.optim.adamw(lr=0.1)

    def failing(grads: Any, memory: Any, params: Any, timestamp: Any, in_place: bool = True) -> Any:
        if timestamp.batch == 4:
            params["0.weight"].zero_() if in_place else None
            raise ArithmeticError
        return (adamw.overwrite if in_place else adamw.update)(grads, memory, params, timestamp)

    return attrs.evolve(adamw, overwrite=failing, update=partial(failing, in_place=False))


def _doubled(grads: Any) -> Any:
    return {name: each.double() for name, each in grads.items()}


# What ends a run, and whether the variable may have lost its State where the end of a batch is watched.
ENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "a forward": ({"fails": "a forward"}, False),
    "a backward": ({"fails": "a backward"}, False),
    "infinite": (_at_4(Event.AFTER_TRAIN_BATCH, _infinite), True),
    "before the step": (_at_4(Event.AFTER_TRAIN_BATCH, _raises), False),
    "after the step": (_at_4(Event.BATCH_END, _raises), True),
    "an interrupt": ({"callbacks": [_interrupts]}, True),
    # The kernel has written NaN to the parameters, and the loss isn't.
    "a step to NaN": ({"fails": "a root of 0", "strict": False}, True),
    "half a step": ({"optimizer": _failing_half_way()}, True),
    # They are refused before the optimizer has what it would have overwritten.
    "gradients of another dtype": (_at_4(Event.AFTER_TRAIN_BATCH, lambda s: s.replace(grads=_doubled(s.grads))), False),
    "clipped to another dtype": ({"clip_grad": lambda grads, _: _doubled(grads)}, False),
}


ERRORS = (ArithmeticError, KeyboardInterrupt, pl.errors.ArgumentError, pl.errors.AlgorithmStructureError)


def _whole(one: Any, other: Any, lost: bool = False) -> bool:
    """Whether two States have the same numbers; ``lost``: or the first says that it has none."""
    try:
        found, expected = of_tree(one), of_tree(other)
    except pl.errors.DonatedStateError:
        return lost
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.mark.parametrize("end", ENDS)
def test_after_an_error_what_variables_have_is_whole(end: str) -> None:
    options, lost = ENDS[end]
    for watch in (None, ONE, {Event.AFTER_TRAIN_BATCH}):
        last: list[Any] = []
        for donate, keeps in itertools.product(("auto", False), (True, False)):
            kept = state = None
            with pytest.raises(ERRORS):  # noqa: PT012 - the loop fails
                for _, state in _fit(watch, donate, **options):
                    kept = state if keeps else None
            last += [kept, state]
        assert _whole(last[0], last[4])
        assert _whole(last[3], last[7], lost=lost and (watch is None or Event.BATCH_END in watch))


def _until_5(stream: Any) -> Iterator[Any]:
    for event, state in stream:
        if state.timestamp.batch == 5:
            return
        yield event, state


def _before_5(pair: Any) -> bool:
    return pair[1].timestamp.batch < 5  # type: ignore[no-any-return]


def _in_between(pair: Any) -> bool:
    return pair[0] in (Event.BATCH_START, Event.AFTER_TRAIN_BATCH)


# What passes some of the pairs on, and whether the last State may be lost so.
PICKS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "takewhile": (lambda stream: itertools.takewhile(_before_5, stream), True),
    "islice in steps": (lambda stream: itertools.islice(stream, 6, None, 5), False),
    "filter no ends": (lambda stream: filter(_in_between, stream), False),
    "filter later": (lambda stream: filter(_before_5, stream), True),
    "a generator that ends": (_until_5, False),
}


@pytest.mark.parametrize("pick", PICKS)
def test_the_last_state_that_is_passed_on_is_whole(pick: str) -> None:
    passes, lost = PICKS[pick]
    for watch in (*WATCHES, {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}):
        last: list[Any] = []
        for donate in ("auto", False):
            state: Any = None
            for _, state in passes(_fit(watch, donate, strict=False)):  # noqa: B007
                pass
            last.append(state)
        assert _whole(*last, lost=lost and (watch is None or Event.BATCH_END in watch)), watch


def test_a_function_that_reads_the_variable_while_a_step_runs_finds_it_whole() -> None:
    """One that closes over it; of a global variable it may find that its State has no numbers."""
    scope: dict[str, Any] = {}
    read: list[bool] = []

    def look(now: pl.State) -> pl.State:
        for held, lost in ((state, False), (scope.get("state"), True)):
            if held is not None:
                read.append(_whole(held, held, lost))
        return now

    algorithm = pl.algorithm(Event.AFTER_LOSS, Event.BATCH_END, name="look")(look)
    by: tuple[Any, ...] = ({"callbacks": [lambda event, now: look(now) and None]}, {"algorithms": [algorithm]})
    for watch, options in itertools.product((None, ONE), by):
        state: Any = None
        for _, state in _fit(watch, **options):  # noqa: B007
            pass
        state = None
        scope["stream"] = _fit(watch, **options)
        exec("for event, state in stream:\n    pass\n", scope)
        scope.clear()
    assert len(read) > 40
    assert all(read)


def _advance(stream: Any, event: Any, *, state: Any) -> Any:
    for event, state in stream:
        if event is Event.BATCH_END:
            return event, state
    return None, None


@pytest.mark.parametrize("watch", [None, ONE], ids=["all", "one"])
def test_what_a_caller_or_a_snapshot_of_variables_has_is_whole(watch: Any) -> None:
    """A parameter is rebound (from Python 3.14 on an argument has no reference of its own); a debugger has frames."""
    stream, twin, frame = _fit(watch), _fit(watch, False), sys._getframe()
    (event, state), (_, other) = _advance(stream, None, state=None), _advance(twin, None, state=None)
    for _ in range(5):
        later, snapshot = _advance(stream, event, state=state), dict(frame.f_locals)["state"]
        assert _whole(state, other)
        assert _whole(snapshot, other)
        (event, state), (_, other) = later, _advance(twin, None, state=None)
    kept: list[Any] = []
    for event, state in _fit(watch, strict=False):
        if event is Event.BATCH_END:
            kept.append((dict(sys._getframe().f_locals)["state"], [each.clone() for each in of_tree(state)]))
    assert all(all(map(same, of_tree(state), numbers)) for state, numbers in kept)


def test_the_variables_of_the_loop_are_neither_lost_nor_kept_by_looking_at_them() -> None:
    """Reading a frame's variables makes a copy of them, which must not outlive the look."""
    rate, big = 0.1, [torch.zeros(10)]
    settings, alive = locals(), weakref.ref(big[0])
    for event, state in _fit(None):
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 3:
            big.clear()
        if state.timestamp.batch == 4:
            assert alive() is None
    assert settings["rate"] == rate
    assert rebinds_loop_variable(None, 1) is False
