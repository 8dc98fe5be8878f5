"""How a State is handed to another function for good: no reference to it stays with the caller."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Owned"]

T = TypeVar("T")


class Owned(Generic[T]):
    """A State that is handed to another script: :meth:`take` gives it, and no reference to it stays here.

    >>> owned = Owned("state")
    >>> owned.take()
    'state'
    """

    __slots__ = ("_state",)

    def __init__(self, state: T) -> None:
        self._state: T | None = state

    def take(self) -> T:
        """The State; once."""
        state, self._state = self._state, None
        return state  # type: ignore[return-value]
