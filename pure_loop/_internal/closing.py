"""What is closed when a block ends: all of it, and the error that ended the block is the one that arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

__all__ = ["Closing", "call_all", "closing"]


def call_all(functions: Iterable[Callable[[], object]], error: BaseException | None = None, doing: str = "") -> None:
    """Call all of these functions, whichever of them raise.

    Args:
        functions: called in this order.
        error: that which is about to arrive: the errors of the functions become its notes. None, and GeneratorExit,
            which says that a loop was left: the first error of a function arrives, with the others as its notes.
        doing: the words before an error in a note, such as ``"while closing: "``.

    Raises:
        BaseException: the first error of a function where there was none before; an interrupt or an exit that a
            function raised where there was an error before, which is its context then.
    """
    first = None if isinstance(error, GeneratorExit) else error
    raised: BaseException | None = None
    for function in functions:
        try:
            function()
        except BaseException as another:
            if first is None or (isinstance(first, Exception) and not isinstance(another, Exception)):
                first = raised = another
            elif not _repeats(another, first):
                first.add_note(f"{doing}{type(another).__name__}: {another}")
    try:
        if raised is not None:
            raise raised
    finally:
        del first, raised  # else the traceback refers to this frame, and the frame to the error


def _repeats(error: BaseException, first: BaseException) -> bool:
    """Whether it is the first interrupt or exit once more, which a signal's handler raises where all is closed."""
    return error is first or (
        type(error) is type(first) and error.args == first.args and not isinstance(first, Exception)
    )


class Closing:
    """A context that calls functions when it is left, by an error too.

    Python lets an error of a clean-up replace the one that made it necessary. Here the first error arrives, and those
    of the functions are its notes.

    >>> def close():
    ...     raise OSError("no space left")
    >>> try:
    ...     with Closing(close):
    ...         raise ValueError("a target of -1")
    ... except ValueError as error:
    ...     print(error, *error.__notes__, sep="; ")
    a target of -1; while closing: OSError: no space left
    """

    __slots__ = ("functions",)

    def __init__(self, *functions: Callable[[], object]) -> None:
        self.functions = list(functions)

    def __enter__(self) -> Closing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        functions, self.functions = self.functions, []
        call_all(functions, error, "while closing: ")


class _Closable(Protocol):
    def close(self) -> object: ...


T = TypeVar("T", bound=_Closable)


@contextmanager
def closing(value: T) -> Iterator[T]:
    """``contextlib.closing``, after which the error that ended the block arrives, and not that of ``close``."""
    with Closing(value.close):
        yield value
