"""Where references can't be counted ``"auto"`` copies at every step, and ``True`` goes on by what torch counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import DonatedStateError
from pure_loop.stages import ownership, references
from pure_loop.stages.ownership import Ownership
from tests.support.donating import Count, Kept, assert_same, fit


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


@pytest.fixture(params=["in doubt", "no getrefcount", "no counts of torch", "threads without a lock"])
def uncounted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """References can't be counted, for one of the reasons."""
    if request.param == "in doubt":
        for module in ownership, references:
            monkeypatch.setattr(module, "counting_doubt", lambda: "a reason")
        yield request.param
        return
    if request.param == "no getrefcount":
        for module in ownership, references:
            monkeypatch.setattr(module, "count", id)
    elif request.param == "no counts of torch":
        for module in ownership, references:
            monkeypatch.setattr(module, "tensor_uses", None)
    else:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(Ownership, "expected", None)
    measured: list[Any] = [references.counting_doubt, references.expected_uses]
    for each in measured:
        each.cache_clear()
    assert references.counting_doubt()
    assert not references.can_count()
    yield request.param
    for each in measured:
        each.cache_clear()


@pytest.mark.usefixtures("uncounted")
def test_auto_copies(count: Count) -> None:
    kept = Kept()
    for event, state in fit():
        if event in (Event.BATCH_END, Event.AFTER_FORWARD):
            kept.keep("a State", state)
    kept.check()
    assert count.reused == 0
    assert_same(state.params, pl.run(fit(donate=False)).params)


@pytest.mark.parametrize("inside", [False, True])
def test_true_donates_and_a_donated_state_says_so(uncounted: str, count: Count, inside: bool) -> None:
    """Where no look finds who has them, a step copies tensors that were read."""
    events = {Event.BATCH_END, Event.AFTER_FORWARD, Event.AFTER_LOSS} if inside else {Event.BATCH_END}
    kept = [
        (state, {name: tensor.detach().clone() for name, tensor in state.params.items()})
        for _, state in fit(donate=True, watch=events)
    ]
    reused, donated = count.reused, 0
    assert_same(kept[-1][1], dict(pl.run(fit(donate=False)).params))
    for state, numbers in kept:
        try:
            params = dict(state.params)
        except DonatedStateError:
            donated += 1
        else:
            assert_same({name: tensor.detach() for name, tensor in params.items()}, numbers)
    if not inside:
        sees = uncounted in ("in doubt", "threads without a lock")
        assert (reused, donated) == ((15, 14) if sees else (0, 0))


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("take", [lambda tensor: tensor.view(-1)[:1], Tensor.detach, lambda tensor: tensor.numpy()])
def test_what_torch_counts_is_seen_all_the_same(take: Callable[[Tensor], Any]) -> None:
    kept = Kept()
    for event, state in fit(donate=True):
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            kept.keep("a view", take(state.params["0.weight"]), lambda tensor: [tensor])
    kept.check()
    assert_same(state.params, pl.run(fit(donate=False)).params)
