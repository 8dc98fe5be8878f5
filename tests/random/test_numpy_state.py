"""NumPy's global state, while the garbage collector closes a stream in the middle of an exchange."""

from __future__ import annotations

import gc
from typing import Any

import numpy
import pytest

from pure_loop.random import numpy_state
from pure_loop.random.numpy_state import put_back, set_aside


class Cycle:
    """Garbage whose finalizer sets the state aside, as a stream's does that is closed."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        put_back(numpy.random, set_aside(numpy.random))


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_runs_in_the_middle_of_an_exchange(collecting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Collecting(numpy_state._Nothing):
        @property
        def state(self) -> Any:
            if gc.isenabled():  # the collector may run at any new object
                gc.collect()
            return self.words

        @state.setter
        def state(self, words: Any) -> None:
            self.words = words

    monkeypatch.setattr(numpy_state, "_Nothing", Collecting)
    numpy.random.seed(3)
    numpy.random.normal()  # one of a pair is left
    before = numpy.random.get_state(legacy=False)
    (gc.enable if collecting else gc.disable)()
    try:
        for _ in range(5):
            Cycle()
            put_back(numpy.random, set_aside(numpy.random))
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    after = numpy.random.get_state(legacy=False)
    assert (before["has_gauss"], before["gauss"]) == (after["has_gauss"], after["gauss"])
    assert (before["state"]["key"] == after["state"]["key"]).all()
