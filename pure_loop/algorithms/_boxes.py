"""Boxes in images, as masks that are computed without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from pure_loop.random import generator
from pure_loop.state import State

__all__ = ["box_mask", "centres"]


def box_mask(height: int, width: int, rows: Tensor, columns: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which pixels of an image lie in a box; what of a box lies outside is cut off.

    Args:
        height, width: of the image, in pixels.
        rows, columns: of the box, in pixels, integers, (...).
        row, column: its centre, integers, (...): of an even number of rows the upper one of the lower half.

    Returns:
        (..., height, width), bool.

    >>> two = torch.tensor(2)
    >>> box_mask(2, 4, two, two, torch.tensor(0), torch.tensor(3)).long()
    tensor([[0, 0, 1, 1],
            [0, 0, 0, 0]])
    """

    def inside(length: int, size: Tensor, centre: Tensor) -> Tensor:
        place = torch.arange(length, device=size.device)
        start = (centre - size // 2).unsqueeze(-1)
        return (place >= start) & (place < start + size.unsqueeze(-1))

    return inside(height, rows, row).unsqueeze(-1) & inside(width, columns, column).unsqueeze(-2)


def centres(
    path: tuple[int | str, ...], state: State, shape: tuple[int, ...], length: int, size: Tensor, uniform: bool
) -> Tensor:
    """Drawn centres of boxes along one dimension, integers, of the shape ``shape``.

    Args:
        path: where they are drawn, for the seed.
        length: of the image, in pixels.
        size: of the box, in pixels.
        uniform: draw from all places at which the box covers a pixel, so that each pixel is covered as often as
            another; else from the pixels, so that those at the edge are covered less often.
    """
    random = generator(state.seed, *path, device=state.device)
    drawn = torch.rand(
        shape, dtype=torch.float64 if state.device.type == "cpu" else None, generator=random, device=state.device
    )
    if not uniform:
        return (drawn * length).long().clamp(max=length - 1)
    first = size // 2 - size + 1
    return first + torch.minimum((drawn * (length + size - 1)).long(), length + size - 2)
