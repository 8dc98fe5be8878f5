"""The variable of the loop keeps its State as well: after an error, and for whoever reads it while a step runs."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.ownership.programs import DATA
from tests.ownership.ways import of_tree, same

TODAY = "the variable of the loop is not counted as a reference, if the next State takes its place"
WATCHES = {"all": None, "one": frozenset({Event.BATCH_END})}


def _today(names: Iterable[str], *failing: tuple[str, str | None]) -> list[Any]:
    """Each name with each set of watched events; those in ``failing`` lose the State today, documented in memory.md."""
    mark = pytest.mark.xfail(strict=False, raises=pl.errors.DonatedStateError, reason=TODAY)
    lost = set(failing)
    return [
        pytest.param(name, watch, marks=[mark] if {(name, watch), (name, None)} & lost else [])
        for name in names
        for watch in WATCHES
    ]


class Failing(nn.Linear):
    """Its forward raises in the fifth batch."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if type(self).calls == 5:
            raise ArithmeticError
        return super().forward(x)


class _Exploding(torch.autograd.Function):
    """A backward that raises in the fifth batch."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _Exploding.calls += 1
        if _Exploding.calls == 5:
            raise ArithmeticError
        return grad


class FailingBackward(nn.Linear):
    """Its backward raises in the fifth batch."""

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = _Exploding.apply
        out: Tensor = apply(super().forward(x))
        return out


def _infinite(state: pl.State) -> pl.State:
    if state.timestamp.batch != 4 or state.grads is None:
        return state
    return state.replace(grads={name: each * float("inf") for name, each in state.grads.items() if each is not None})


def _raises(state: pl.State) -> pl.State:
    if state.timestamp.batch in (4, 5):
        raise ArithmeticError
    return state


def _interrupts(event: Event, state: pl.State) -> None:
    if event is Event.BATCH_END and state.timestamp.batch == 5:
        raise KeyboardInterrupt


ENDS: dict[str, Callable[[], tuple[type[nn.Linear], dict[str, Any]]]] = {
    "a forward": lambda: (Failing, {}),
    "a backward": lambda: (FailingBackward, {}),
    "gradients that are infinite": lambda: (
        nn.Linear,
        {"algorithms": [pl.algorithm(Event.AFTER_TRAIN_BATCH, name="infinite")(_infinite)]},
    ),
    "an algorithm before the step": lambda: (
        nn.Linear,
        {"algorithms": [pl.algorithm(Event.AFTER_TRAIN_BATCH, name="raises")(_raises)]},
    ),
    "an algorithm after the step": lambda: (
        nn.Linear,
        {"algorithms": [pl.algorithm(Event.BATCH_END, name="raises")(_raises)]},
    ),
    "an interrupt in a callback": lambda: (nn.Linear, {"callbacks": [_interrupts]}),
}


def _fit(model: type[nn.Linear], watch: Any, donate: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    Failing.calls = _Exploding.calls = 0
    return pl.fit(
        model(4, 3),
        DATA,
        loss=functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=0.1),
        max_duration="8ba",
        watch=watch,
        donate=donate,
        **options,
    )


def _last(end: str, watch: str, donate: Any, keep: bool) -> tuple[list[Any], bool]:
    """What the variable has after the error."""
    model, options = ENDS[end]()
    state: Any = None
    kept: Any = None
    raised = False
    try:
        for event, state in _fit(model, WATCHES[watch], donate, **options):  # noqa: B007
            if keep:
                kept = state
    except (ArithmeticError, pl.errors.NonFiniteError, KeyboardInterrupt):
        raised = True
    return [kept if keep else state], raised


def _whole(one: Any, other: Any) -> bool:
    found, expected = of_tree(one), of_tree(other)
    return len(found) == len(expected) and all(map(same, found, expected))


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("end", ENDS)
def test_what_another_variable_has_is_whole_after_an_error(end: str, watch: str) -> None:
    (judged,), raised = _last(end, watch, "auto", True)
    (twin,), _ = _last(end, watch, False, True)
    assert raised
    assert _whole(judged, twin)


@pytest.mark.parametrize(
    ("end", "watch"),
    _today(
        ENDS,
        ("gradients that are infinite", None),
        ("an algorithm after the step", None),
        ("an interrupt in a callback", None),
    ),
)
def test_the_variable_of_the_loop_is_whole_after_an_error(end: str, watch: str) -> None:
    (judged,), raised = _last(end, watch, "auto", False)
    (twin,), _ = _last(end, watch, False, False)
    assert raised
    assert _whole(judged, twin)


@pytest.mark.xfail(strict=False, raises=pl.errors.DonatedStateError, reason=TODAY)
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("read_by", ["a callback", "an algorithm", "a thread"])
def test_a_global_variable_is_whole_while_a_step_runs(read_by: str, watch: str) -> None:
    names: dict[str, Any] = {}
    errors: list[BaseException] = []
    read = 0

    def look() -> None:
        nonlocal read
        state = names.get("state")
        if state is None:
            return
        try:
            of_tree(state)
            read += 1
        except pl.errors.DonatedStateError as error:
            errors.append(error)

    def callback(event: Event, state: pl.State) -> None:
        if event is not Event.BATCH_END:
            return
        if read_by == "a thread":
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        else:
            look()

    def handler(state: pl.State) -> pl.State:
        look()
        return state

    options: dict[str, Any] = {"callbacks": [callback]}
    if read_by == "an algorithm":
        options = {"algorithms": [pl.algorithm(Event.BATCH_END, name="reads")(handler)]}
    names["stream"] = _fit(nn.Linear, WATCHES[watch], "auto", **options)
    exec("for event, state in stream:\n    pass\n", names)
    if errors:
        raise errors[0]
    assert read >= 6


def _next_of(stream: Any, event: Any, state: Any) -> Any:
    event, state = next(stream)
    return event, state


def _until_end_of_batch(stream: Any, event: Any, *, state: Any) -> Any:
    for event, state in stream:
        if event is Event.BATCH_END:
            return event, state
    return None, None


ADVANCES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "next": lambda stream, event, state: _next_of(stream, event, state),
    "for": lambda stream, event, state: _until_end_of_batch(stream, event, state=state),
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("how", ADVANCES)
def test_what_a_caller_has_is_whole_while_a_parameter_is_rebound(how: str, watch: str) -> None:
    """From Python 3.14 on an argument has no reference of its own, and so that of the caller alone is counted."""
    stream, twin = _fit(nn.Linear, WATCHES[watch], "auto"), _fit(nn.Linear, WATCHES[watch], False)
    event, state = _until_end_of_batch(stream, None, state=None)
    _, other = _until_end_of_batch(twin, None, state=None)
    for _ in range(5):
        later = ADVANCES[how](stream, event, state)
        assert _whole(state, other)
        event, state = later
        _, other = ADVANCES[how](twin, None, None)


PICKS: dict[str, Callable[[Any], Any]] = {
    "takewhile": lambda stream: itertools.takewhile(lambda pair: pair[1].timestamp.batch < 5, stream),
    "takewhile steps": lambda stream: itertools.takewhile(
        lambda pair: pair[0] is not Event.BATCH_END or pair[1].timestamp.batch < 5, stream
    ),
    "islice": lambda stream: itertools.islice(stream, 30),
    "filter from the first on": lambda stream: filter(lambda pair: pair[0] is Event.BATCH_END, stream),
    "filter later": lambda stream: filter(lambda pair: pair[1].timestamp.batch < 5, stream),
    "a generator expression": lambda stream: (pair for pair in stream if pair[1].timestamp.batch < 5),
    "a generator expression of two": lambda stream: (
        (event, state) for event, state in stream if state.timestamp.batch < 5
    ),
    "a generator that ends": lambda stream: _until(stream),
}


def _until(stream: Any) -> Any:
    for event, state in stream:
        if state.timestamp.batch == 5:
            return
        yield event, state


@pytest.mark.parametrize(
    ("pick", "watch"), _today(PICKS, ("takewhile", None), ("takewhile steps", None), ("filter later", None))
)
def test_the_last_state_that_is_passed_on_is_whole(pick: str, watch: str) -> None:
    last: list[Any] = []
    for donate in ("auto", False):
        state: Any = None
        for event, state in PICKS[pick](_fit(nn.Linear, WATCHES[watch], donate, strict=False)):  # noqa: B007
            pass
        last.append(state)
    assert _whole(*last)


@pytest.mark.parametrize("watch", WATCHES)
def test_frames_that_are_kept_keep_the_variable(watch: str) -> None:
    """A frame of the loop, as a traceback or a debugger has it, shows the State that its variable has."""

    def loop() -> Any:
        frame = sys._getframe()
        for event, state in _fit(nn.Linear, WATCHES[watch], "auto", strict=False):  # noqa: B007
            yield frame

    for frame in loop():
        assert len(of_tree(frame.f_locals["state"])) > 2


@pytest.mark.parametrize("watch", WATCHES)
def test_a_snapshot_of_the_variables_keeps_the_state(watch: str) -> None:
    kept: list[tuple[Any, list[Tensor]]] = []

    def look(variables: dict[str, Any]) -> None:
        state = variables["state"]
        if state.event is Event.BATCH_END:
            kept.append((dict(variables), [each.clone() for each in of_tree(state.params)]))

    for event, state in _fit(nn.Linear, WATCHES[watch], "auto", strict=False):  # noqa: B007
        look(sys._getframe().f_locals)
    assert len(kept) == 8
    for variables, numbers in kept:
        assert all(map(same, of_tree(variables["state"].params), numbers))
