"""ColOut: rows and columns of images are left out at random, so that a step costs less.

With images of H rows and W columns, for each batch a random choice of ``int((1 - rows) H)`` rows and
``int((1 - columns) W)`` columns is kept, in their order. A method of MosaicML, without a paper.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from pure_loop._internal.processes import data_rank
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.algorithms._images import image_of
from pure_loop.errors import DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.random import generator
from pure_loop.ranges import Between, Flag, Index, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["colout", "with_lines"]

SERVES = "images of any size"


def with_lines(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Images with some of their rows and columns.

    Args:
        images: (n, ..., height, width), of any dtype.
        rows, columns: indices of what stays, (k,), or (n, k) for the images one by one; of an integer dtype.

    Returns:
        (n, ..., k of rows, k of columns), of the dtype of ``images``.

    >>> with_lines(torch.arange(9).view(1, 3, 3), torch.tensor([0, 2]), torch.tensor([1, 2]))
    tensor([[[1, 2],
             [7, 8]]])
    """
    for dim, index in ((-2, rows), (-1, columns)):
        if index.ndim == 1:
            images = images.index_select(dim, index)
            continue
        shape = [len(index), *(1,) * (images.ndim - 1)]
        shape[dim] = index.shape[1]
        wanted = list(images.shape)
        wanted[dim] = index.shape[1]
        images = images.gather(dim, index.view(shape).expand(wanted))
    return images


@checked
def colout(
    rows: Annotated[Strength, Between(0, 1, typical=(0.1, 0.6))] = 0.15,
    columns: Annotated[Strength, Between(0, 1, typical=(0.1, 0.6))] = 0.15,
    *,
    targets: Literal["auto", "never"] = "auto",
    per_sample: Annotated[bool, Flag(typical=())] = False,
    input_key: Annotated[BatchKey, Index()] = 0,
    target_key: Annotated[BatchKey, Index()] = 1,
    name: str = "colout",
) -> Algorithm:
    """ColOut: training images lose rows and columns, at AFTER_DATALOADER; evaluation sees whole images.

    Images become smaller, and steps cheaper. Compiled, each size is another graph: with numbers there is one.

    Args:
        rows, columns: the share of rows and of columns that is left out, in [0, 1); 0: none; numbers, or schedules.
        targets: ``"auto"``: maps of the height and width of the images (segmentation) lose the same ones; ``"never"``:
            targets stay.
        per_sample: draw for each image, and not for the batch.
        input_key, target_key: where in a batch its images, (n, channels, height, width), and targets are: an index, a
            key or a :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a share out of range.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without images there, or no row or column would be left.

    >>> import pure_loop as pl
    >>> images, maps = torch.ones(2, 3, 8, 8), torch.zeros(2, 8, 8)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, maps))
    >>> [tuple(tensor.shape) for tensor in colout(0.5, 0.25)(state).batch]
    [(2, 3, 4, 6), (2, 4, 6)]
    """

    @by_part
    def leave_out(state: State) -> State:
        images = image_of(state.batch, input_key, "colout")
        shares = {"rows": strength_at(rows, state.timestamp), "columns": strength_at(columns, state.timestamp)}
        if not any(shares.values()):
            return state
        lines: list[Tensor] = []
        for (line, share), length in zip(shares.items(), images.shape[-2:], strict=True):
            # Of 0.7 * 10 and the like the nearest float is a little less than the whole number.
            count = int((1 - share) * length + 1e-9)
            if not count:
                raise DataError(
                    f"colout: {line}={share:g} leaves none of the {length} {line} of images of shape "
                    f"{tuple(images.shape)}. Give a smaller share, or leave colout out."
                )
            path = (line, state.timestamp.batch, *((data_rank(),) if per_sample else ()))
            random = generator(state.seed, name, *path, device=images.device)
            shape = (len(images), length) if per_sample else (length,)
            drawn = torch.rand(shape, generator=random, device=images.device)
            lines.append(drawn.argsort(-1)[..., :count].sort(-1).values)
        batch = with_part(state.batch, input_key, with_lines(images, *lines))
        maps: Any = part_of(state.batch, target_key, "colout", "target_key") if targets == "auto" else None
        if isinstance(maps, Tensor) and maps.ndim > 2 and maps.shape[-2:] == images.shape[-2:]:
            batch = with_part(batch, target_key, with_lines(maps, *lines))
        return state.replace(batch=batch)

    return Algorithm(name, {Event.AFTER_DATALOADER: leave_out})
