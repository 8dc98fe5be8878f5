"""What tests of the examples and of killed runs share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.example_scripts import EXAMPLES
from tests.support.killed_runs import Killer


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import an example by name, as a script sees it: with its own folder first."""
    monkeypatch.syspath_prepend(EXAMPLES)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    with Killer() as process:
        yield process


@pytest.fixture(scope="module")
def uninterrupted(killer: Killer) -> dict[str, str]:
    """The last State of the run that nothing is saved of."""
    told = killer()
    assert told["how"] == "end"
    return told["state"]  # type: ignore[no-any-return]
