"""Imports of what torch keeps private, and has had from 2.11 to 2.15."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pure_loop.errors import CompileError

__all__ = ["private_to_torch"]


@contextmanager
def private_to_torch() -> Iterator[None]:
    """Around such imports.

    Raises:
        CompileError: this torch doesn't have what is imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch
            yield
    except ImportError as error:
        raise CompileError(
            f"this version of torch ({torch.__version__}) has no compiler that pure_loop knows: {error}. Leave compile "
            "out."
        ) from error
