"""Donation where references can't be counted, and where they are counted otherwise than here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.donation import references
from pure_loop.errors import DonatedStateError
from tests.support.donating import COUNTERS, Count, Kept, assert_same, fit


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MEASURED", references.measure(None))


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}])
@pytest.mark.parametrize("name", [name for name, counter in COUNTERS.items() if counter is not None])
def test_what_is_kept_stays_whatever_counting_adds(name: str, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MEASURED", references.measure(COUNTERS[name]))
    count, kept = Count(monkeypatch), Kept()
    for event, state in fit(watch=watch):
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            kept.keep("a State", state)
        if event is Event.BATCH_END and state.timestamp.batch == 8:
            kept.keep("a tensor", state.params["0.weight"])
    kept.check()
    assert count.copied == 2
    assert count.reused == 13
    assert_same(state.params, pl.run(fit(donate=False)).params)


@pytest.mark.usefixtures("uncounted")
def test_auto_copies(count: Count) -> None:
    kept = Kept()
    for event, state in fit():
        if event in (Event.BATCH_END, Event.AFTER_FORWARD):
            kept.keep("a State", state)
    kept.check()
    assert count.reused == 0
    assert_same(state.params, pl.run(fit(donate=False)).params)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("inside", [False, True])
def test_true_donates_and_a_donated_state_says_so(count: Count, inside: bool) -> None:
    """A graph that is kept inside a batch shows in torch's counts, and its step copies."""
    events = {Event.BATCH_END, Event.AFTER_FORWARD, Event.AFTER_LOSS} if inside else {Event.BATCH_END}
    kept = [
        (state, {name: tensor.detach().clone() for name, tensor in state.params.items()})
        for _, state in fit(donate=True, watch=events)
    ]
    assert_same(kept[-1][1], dict(pl.run(fit(donate=False)).params))
    donated = 0
    for state, numbers in kept:
        try:
            params = dict(state.params)
        except DonatedStateError:
            donated += 1
        else:
            assert_same({name: tensor.detach() for name, tensor in params.items()}, numbers)
    if not inside:
        assert (count.copied, count.reused, donated) == (0, 15, 14)


@pytest.mark.usefixtures("uncounted")
@pytest.mark.parametrize("take", [lambda tensor: tensor.view(-1)[:1], Tensor.detach, lambda tensor: tensor.numpy()])
def test_what_torch_counts_is_seen_all_the_same(take: Callable[[Tensor], Any]) -> None:
    kept = Kept()
    for event, state in fit(donate=True):
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            kept.keep("a view", take(state.params["0.weight"]), lambda tensor: [tensor])
    kept.check()
    assert_same(state.params, pl.run(fit(donate=False)).params)
