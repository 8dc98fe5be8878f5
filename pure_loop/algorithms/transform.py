"""Transform: any random function of samples, or of a batch, with random numbers that are of the run.

At AFTER_DATALOADER a function is called; its draws from the generators of torch, NumPy and Python are seeded by the
run's seed, the name, the number of the batch and the rank: augmentations of torchvision, kornia or timm, the same when
training resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.processes import data_rank
from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part
from pure_loop.errors import ArgumentTypeError, DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.random import derive, seeded_all
from pure_loop.ranges import Index, checked
from pure_loop.state import State

__all__ = ["transform"]

EXPECTED_FAILURES = dict.fromkeys(["rank_agreement", "world_size"], "each rank draws for its own samples")


@checked
def transform(
    function: Callable[[Batch], Batch],
    per_sample: bool = True,
    *,
    whole_batch: bool = False,
    input_key: Annotated[BatchKey, Index()] = 0,
    name: str = "transform",
) -> Algorithm:
    """A random function, applied to the inputs of each training batch at AFTER_DATALOADER; evaluation has none.

    Draws are a function of the seed, the name, the number of the batch and the rank. What the function keeps in an
    object from call to call is not in the State, and is lost when training resumes.

    Args:
        function: ``input -> input``, of one sample: a tensor without the dimension of the batch. With
            ``per_sample=False``: ``inputs -> inputs``, of all samples of a batch.
        per_sample: call it for each sample, as transforms that draw once a call (torchvision's) need it, and stack what
            they return, which has to have one shape.
        whole_batch: call it as ``batch -> batch``, with the targets: ``lambda batch: mixup(*batch)``.
        input_key: where in a batch the inputs are: an index, a key or a :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentTypeError: a setting of another type.
        DataError: in training: inputs that are no tensor, or results that are none of one shape.

    >>> import pure_loop as pl
    >>> def flipped(image):
    ...     return image.flip(-1) if torch.rand(()) < 0.5 else image
    >>> images = torch.tensor([[[[0.0, 1.0]]]]).expand(6, 1, 1, 2)
    >>> state = pl.State.create(torch.nn.Linear(2, 1)).replace(batch=(images, torch.zeros(6)))
    >>> transform(flipped)(state).batch[0][:, 0, 0, 0]
    tensor([0., 1., 1., 0., 1., 0.])
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"transform: function={function!r} is not a function of an input: transform(v2.RandomHorizontalFlip())."
        )

    @by_part
    def apply(state: State) -> State:
        seed = derive(state.seed, name, state.timestamp.batch, data_rank())
        if whole_batch:
            with seeded_all(seed):
                return state.replace(batch=function(state.batch))
        inputs = part_of(state.batch, input_key, "transform", "input_key")
        if per_sample and not isinstance(inputs, Tensor):
            raise DataError(
                f"transform: the inputs are {type(inputs).__name__}, not a tensor of samples. Say where they are, "
                'transform(function, input_key="pixel_values"), or that the function takes all of them, '
                "per_sample=False."
            )
        with seeded_all(seed):
            changed = [function(sample) for sample in inputs] if per_sample else function(inputs)
        if per_sample:
            shapes = {
                tuple(sample.shape) if isinstance(sample, Tensor) else type(sample).__name__ for sample in changed
            }
            if len(shapes) > 1 or not all(isinstance(sample, Tensor) for sample in changed):
                raise DataError(
                    f"transform: the function returned {', '.join(map(str, sorted(shapes, key=str)))}, which are no "
                    "samples of one batch: return tensors of one shape. A function of a whole batch, (inputs, "
                    "targets), takes whole_batch=True."
                )
            changed = torch.stack(changed)
        return state.replace(batch=with_part(state.batch, input_key, changed))

    return Algorithm(name, {Event.AFTER_DATALOADER: apply})
