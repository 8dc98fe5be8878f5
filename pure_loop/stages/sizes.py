"""The microbatch size that ``microbatch_size="auto"`` has found."""

from __future__ import annotations

from typing import Any

import attrs

# Under which a State keeps the size, as algorithm state, so that training resumes with it.
NAME = "microbatch_size"


@attrs.define
class FoundSize:
    """The microbatch size of the batch under way.

    Attributes:
        size: the samples of a forward, at most; None: the whole batch.
    """

    size: int | None = None


def found_size(state: Any) -> int | None:
    """The size that a State keeps; None: whole batches, or ``microbatch_size`` is not ``"auto"``."""
    size = state.algorithm_state.get(NAME)
    return size if type(size) is int else None  # it may be the memory of an algorithm of this name
