"""Packages of others, which some methods need and which come with extras."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from pure_loop.errors import MissingExtraError

__all__ = ["require"]


def require(package: str, extra: str, method: str) -> Any:
    """The package.

    Args:
        package: as it is imported.
        extra: the extra of pure_loop that brings it.
        method: what needs it, for the error.

    Raises:
        MissingExtraError: it, or a package that it needs, is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        missing = error.name or package
        raise MissingExtraError(
            f"{method} needs the package {missing!r}, which is not installed: pip install 'pure_loop[{extra}]'."
        ) from error
