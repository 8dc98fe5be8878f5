"""Tables of what is refused: one row a mistake, with the error and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

import pure_loop as pl

__all__ = ["Refusal", "check", "rows"]


@attrs.frozen
class Refusal:
    """A mistake.

    Attributes:
        name: the id of the test.
        call: makes it. A stream that it returns is run.
        error: raised; an error of ours is one of Python's, too.
        says: each is in the message or in a note of it.
        at_once: the call itself raises, and not the stream.
    """

    name: str
    call: Callable[[], Any]
    error: type[BaseException]
    says: tuple[str, ...]
    at_once: bool = True


def rows(refusals: list[Refusal]) -> pytest.MarkDecorator:
    """The parametrisation of a test with one argument, ``refusal``."""
    return pytest.mark.parametrize("refusal", refusals, ids=lambda refusal: refusal.name)


def check(refusal: Refusal) -> BaseException:
    """The mistake is refused, where and as the row says; gives the error."""
    with pytest.raises(refusal.error) as caught:
        _make(refusal)
    error = caught.value
    if isinstance(error, pl.PureLoopError):
        assert isinstance(error, _BUILTIN), f"{type(error)} is none of Python's errors"
    message = " ".join([str(error), *getattr(error, "__notes__", [])])
    for fragment in refusal.says:
        assert fragment in message, f"{fragment!r} is not in: {message}"
    assert " object at 0x" not in message, message
    return error


_BUILTIN = (
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    OSError,
    AssertionError,
    AttributeError,
    EOFError,
    ArithmeticError,
)


def _make(refusal: Refusal) -> None:
    result = refusal.call()
    if refusal.at_once:
        pytest.fail(f"{refusal.name}: the call accepts it, and gives {result!r}")
    for _ in result:
        pass
