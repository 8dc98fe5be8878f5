"""An interpreter on which references are not counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pure_loop.stages import ownership, references
from pure_loop.stages.references import counting_doubt

__all__ = ["without_counts"]


@contextmanager
def without_counts() -> Iterator[None]:
    """As on an interpreter that does not count references."""
    try:
        with pytest.MonkeyPatch.context() as patched:
            for module in ownership, references:
                patched.setattr(module, "count", id)
            counting_doubt.cache_clear()
            yield
    finally:
        counting_doubt.cache_clear()
