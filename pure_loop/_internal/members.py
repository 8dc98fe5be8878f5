"""Numbers of the members of an ensemble as few numbers: of a vector the median and the best."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pure_loop._internal.reprs import cell


def of_float(values: Tensor) -> Tensor:
    """In a dtype in which statistics are computed."""
    values = values.detach()
    return values if values.dtype.itemsize == 8 and values.is_floating_point() else values.float()


def best_of(values: Tensor, mode: Literal["min", "max"]) -> Tensor:
    """The least or the largest of a vector; NaN is neither, unless all are. Shape ().

    >>> import torch
    >>> best_of(torch.tensor([0.5, float("nan"), 0.25]), "min")
    tensor(0.2500)
    """
    return of_float(values).nanquantile(0.0 if mode == "min" else 1.0)


def median_of(values: Tensor) -> Tensor:
    """The median of a vector, between the two in the middle where their number is even; without NaN. Shape ().

    >>> import torch
    >>> median_of(torch.tensor([0.5, 1.0, 0.0, 2.0]))
    tensor(0.7500)
    """
    return of_float(values).nanquantile(0.5)


def in_words(values: Tensor) -> str:
    """Up to four numbers, or the median and between which two all are.

    >>> import torch
    >>> in_words(torch.tensor([0.5, 1.0])), in_words(torch.arange(9.0))
    ('0.5, 1', 'median 4, 0 to 8')
    """
    if values.is_meta or values.is_complex():
        return cell(values)
    if len(values) <= 4:
        return ", ".join(cell(value) for value in values.tolist())
    low, middle, high = (f"{value.item():.6g}" for value in (values.min(), median_of(values), values.max()))
    return f"median {middle}, {low} to {high}"
