"""Names of what has no type of its own: a loop takes the batches, outputs and memories that others make."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Batch", "Outputs", "PyTree"]

Batch: TypeAlias = Any
"""What a dataloader gives: a tensor, a tuple, a mapping, any object."""

Outputs: TypeAlias = Any
"""What a model's forward returns."""

PyTree: TypeAlias = Any
"""Nested containers of leaves, such as an optimizer state, the memory of an algorithm or an accumulator."""
