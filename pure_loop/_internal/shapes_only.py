"""Whether the loop runs for shapes and dtypes alone, on the meta device, as a rehearsal does."""

from __future__ import annotations

from contextvars import ContextVar

__all__ = ["needs_numbers", "shapes_only"]

shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)


def needs_numbers(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is that of code that reads numbers of a tensor on the meta device.

    >>> import torch
    >>> try:
    ...     torch.zeros((), device="meta").item()
    ... except RuntimeError as error:
    ...     needs_numbers(error)
    True
    """
    while error is not None:
        if isinstance(error, RuntimeError) and "meta" in str(error).lower():
            return True
        error = error.__cause__
    return False
