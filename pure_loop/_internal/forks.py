"""Forks of this process: a child has the objects of its parent, and neither its threads nor its place.

What a stream began in the parent is the parent's to end: the child writes nothing, and waits for no thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ParamSpec
from weakref import WeakMethod

__all__ = ["generation", "here", "in_child"]

P = ParamSpec("P")

_generation = 0
_forgetting: list[WeakMethod[Callable[[], None]]] = []


def generation() -> int:
    """How many forks lie between this process and the one that imported this: another number than before in a child."""
    return _generation


def here(function: Callable[P, object]) -> Callable[P, None]:
    """The function in this process; in a child that is forked from now on it does nothing."""
    began = _generation

    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        if began == _generation:
            function(*args, **kwargs)

    return called


def in_child(method: Any) -> None:
    """Call this method of an object, as long as there is one, in every child that is forked from now on.

    Args:
        method: ``object.name``: it forgets threads, what was given to them, and locks that they may have.
    """
    _forgetting[:] = [reference for reference in _forgetting if reference() is not None]
    _forgetting.append(WeakMethod(method))


def _after() -> None:
    global _generation
    _generation += 1
    for reference in _forgetting:
        method = reference()
        if method is not None:
            method()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after)
