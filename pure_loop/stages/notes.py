"""Notes on errors: where they were raised, and on which input."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from pure_loop.data.batch import describe


class noting:  # noqa: N801
    """Where what is inside raises, the error is noted to say this of itself.

    >>> try:
    ...     with noting(lambda: "raised by batch 3"):
    ...         raise ValueError("odd")
    ... except ValueError as error:
    ...     print(error.__notes__)
    ['raised by batch 3']
    """

    __slots__ = ("_say",)

    def __init__(self, say: Callable[[], str]) -> None:
        self._say = say

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # not where a generator is closed, or on Ctrl-C
            error.add_note(self._say())


def note_stage(error: Exception, stage: str, state: Any, index: int) -> None:
    """Note of an error that it was raised in this stage of a State's microbatch, which has this number."""
    where = f"batch {state.timestamp.batch}, microbatch {index}"
    error.add_note(f"raised in the {stage} of {where}, which is {describe(state.microbatch)}")
