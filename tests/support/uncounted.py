"""An interpreter on which references are not counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pure_loop.stages.references import counting_doubt

__all__ = ["without_counts"]


@contextmanager
def without_counts() -> Iterator[None]:
    """As on an interpreter that does not count references."""
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.delattr(sys, "getrefcount")
            counting_doubt.cache_clear()
            yield
    finally:
        counting_doubt.cache_clear()
