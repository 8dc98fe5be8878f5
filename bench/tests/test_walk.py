"""How many functions of how many files a step of training calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from bench.walk import GENERATED, Walk, exceeded, place_of, walk

PACKAGE = Path(pl.__file__).parent

pytestmark = pytest.mark.slow


@pytest.mark.xfail(strict=True, reason="194 calls in 33 files, and not yet 110 in 12: see docs/performance.md")
def test_a_step_is_short() -> None:
    assert exceeded(walk()) == []


def test_a_step_does_not_grow() -> None:
    found = walk()
    assert found.total - found.resumptions <= 137
    assert found.total <= 194
    assert len(found.files) <= 33


def test_a_step_is_walked_from_one_end_to_the_next() -> None:
    """The script goes on once for each event, and what a step has to do is among the calls."""
    found = walk()
    assert found.calls == walk().calls
    assert any(count >= 13 for (place, _), count in found.calls.items() if place.startswith("loop/"))
    assert {"loop", "stages", "optim"} <= {place.partition("/")[0] for place in found.files}


def test_a_callback_costs_calls() -> None:
    class Looks(pl.Callback):
        def batch_end(self, state: pl.State, logger: pl.Logger) -> None:
            pass

    assert walk(callbacks=[Looks()]).total > walk().total


def test_what_is_above_its_limit_is_named() -> None:
    def made(files: int, calls: int) -> Walk:
        places = [f"file{number % files}" for number in range(calls)]
        return Walk(Counter((place, "function") for place in places))

    assert exceeded(made(12, 110)) == []
    assert exceeded(made(13, 110)) == ["13 files, the limit is 12"]
    assert exceeded(made(12, 111)) == ["111 calls, the limit is 110"]


def test_what_counts() -> None:
    def code(filename: str, module: str | None = None) -> str | None:
        scope: dict[str, Any] = {}
        exec(compile("def function(): pass", filename, "exec"), scope)
        return place_of(scope["function"].__code__, module)

    assert code(f"{PACKAGE}/loop/driver.py") == "loop/driver.py"
    assert code("<string>") == code("<attrs generated methods State>") == GENERATED
    assert code("<string>", "pure_loop.state") == GENERATED
    assert code("<string>", "torch.fx") is None
    assert code("<frozen abc>") is None
    assert code(str(torch.__file__)) is None
    assert code(str(PACKAGE.parent / "elsewhere.py")) is None
