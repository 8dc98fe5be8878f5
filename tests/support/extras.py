"""Tests of extras: packages that need not be installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

__all__ = ["needs"]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips where a package is not installed, without importing any: each takes seconds in each process of pytest."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
