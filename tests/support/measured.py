"""A plugin of pytest for ``make coverage``: steps write in place while lines are counted.

A step copies where a trace function is set, because a debugger reads the variables of the loop and may write them back.
coverage's trace function does neither. Without this plugin most of what decides on that would not run, and its tests
would fail.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

__all__ = ["pytest_configure"]


def _debugger() -> Any:
    """The trace function of this thread; None if it is coverage's."""
    tracer = sys.gettrace()
    return None if type(tracer).__module__.partition(".")[0] == "coverage" else tracer


def pytest_configure(config: pytest.Config) -> None:
    from pure_loop._internal import frames

    frames.gettrace = _debugger
