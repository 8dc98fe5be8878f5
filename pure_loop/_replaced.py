"""Another value under a name of a module or a class, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner)[name] is value:  # nobody else has replaced it meanwhile
            setattr(owner, name, before)
