"""The entry point through which Hypothesis hears of pure_loop: in a module of its own, which imports nothing.

Hypothesis loads it in every process that it is used in, where pure_loop is installed. If it stood inside the package,
all of these would import the package and torch, seconds each, whether they have a use for it or not.
"""

from __future__ import annotations

import sys

__all__ = ["introduce"]


def introduce() -> None:
    """Tell Hypothesis of pure_loop, if that is imported already; if it comes later, it tells Hypothesis itself."""
    # While pure_loop is half imported, it has no version yet, and will look for Hypothesis when it has.
    if hasattr(sys.modules.get("pure_loop"), "__version__"):
        from pure_loop.entry import hypothesis as introduction

        introduction.register()
