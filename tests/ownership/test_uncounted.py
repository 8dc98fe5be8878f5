"""Where references can't be counted ``"auto"`` copies at every step, and ``True`` goes on by what torch counts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import DonatedStateError
from pure_loop.stages import ownership, references
from pure_loop.stages.ownership import Ownership
from tests.support.donating import Count, Kept, assert_same, fit

REASONS: dict[str, tuple[str, Any]] = {
    "in doubt": ("counting_doubt", lambda: "a reason"),
    "no getrefcount": ("count", id),
    "no counts of torch": ("tensor_uses", None),
    "threads without a lock": ("", None),
}


@pytest.fixture(params=REASONS)
def uncounted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """References can't be counted, for one of the reasons."""
    measured: list[Any] = [references.counting_doubt, references.expected_uses]
    name, value = REASONS[request.param]
    for module in (ownership, references) if name else ():
        monkeypatch.setattr(module, name, value)
    if not name:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(Ownership, "expected", None)
    for each in measured:
        each.cache_clear()
    assert not references.can_count()
    yield request.param
    for each in measured:
        each.cache_clear()


def test_auto_copies_and_true_donates(uncounted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no look finds who has them, a step copies tensors that were read; a donated State says so."""
    count, kept, wanted = Count(monkeypatch), Kept(), pl.run(fit(donate=False)).params
    for event, state in fit():
        if event in (Event.BATCH_END, Event.AFTER_FORWARD):
            kept.keep("a State", state)
    # What torch counts is seen with donate=True all the same.
    assert count.reused == 0
    assert_same(state.params, wanted)
    for take in (lambda tensor: tensor.view(-1)[:1], Tensor.detach, lambda tensor: tensor.numpy()):
        for event, state in fit(donate=True):
            if event is Event.BATCH_END and state.timestamp.batch == 4:
                kept.keep("a view", take(state.params["0.weight"]), lambda tensor: [tensor])
    kept.check()
    for watch in ({Event.BATCH_END}, {Event.BATCH_END, Event.AFTER_FORWARD, Event.AFTER_LOSS}):
        count.reused, donated = 0, 0
        stream = fit(donate=True, watch=watch)
        states = [(s, {name: tensor.detach().clone() for name, tensor in s.params.items()}) for _, s in stream]
        assert_same(states[-1][1], dict(wanted))
        for state, numbers in states:
            try:
                assert_same({name: tensor.detach() for name, tensor in state.params.items()}, numbers)
            except DonatedStateError:
                donated += 1
        sees = uncounted in ("in doubt", "threads without a lock")
        assert len(watch) > 1 or (count.reused, donated) == ((15, 14) if sees else (0, 0))
