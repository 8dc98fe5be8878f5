"""Mixup: samples are mixed with partners of their batch, and so are their targets.

With inputs ``x``, targets ``y``, a permutation ``p`` of the samples and a share ``w``, both drawn for each batch::

    lambda ~ Beta(alpha, alpha),   w = min(lambda, 1 - lambda)
    x' = (1 - w) x + w x[p]
    y' = (1 - w) y + w y[p]                          https://arxiv.org/abs/1710.09412

As ``w`` is at most 1/2, the targets ``y`` of a sample keep the larger share.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._images import image_of
from pure_loop.algorithms._mixed import IGNORED, Interpolation, by_sample, mixing, with_partners
from pure_loop.errors import ArgumentError, DataError
from pure_loop.lens import BatchKey
from pure_loop.ranges import AtLeast, Index, Number, Within, checked
from pure_loop.ranges.strengths import Strength
from pure_loop.state import State

__all__ = ["mix", "mixup"]

SERVES = "classes"

CLAIMS = frozenset({"mixes targets"})

EXPECTED_FAILURES = dict.fromkeys(
    ["rank_agreement", "world_size"], "the partner of a sample is drawn from those of its rank"
)


def mix(inputs: Tensor, partner: Tensor, weight: Tensor | float) -> Tensor:
    """Inputs, mixed with those of their partners.

    Args:
        inputs: (n, ...), of a dtype with a floating point.
        partner: the index of each sample's partner, (n,), of an integer dtype.
        weight: the share of the partner, from 0 to 1: a number, 0-d, or (n,) for the samples one by one.

    Returns:
        ``(1 - weight) * inputs + weight * inputs[partner]``, of the shape and dtype of ``inputs``.

    Raises:
        ArgumentError: inputs of integers, which have no mean.

    >>> mix(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]), 0.3)
    tensor([[1.6000, 2.6000],
            [2.4000, 3.4000]])
    """
    if not inputs.is_floating_point():
        raise ArgumentError(
            f"mix: inputs of dtype {inputs.dtype} have no mean. Give images as floats; the tokens of texts can't be "
            "mixed, only their embeddings, in the model."
        )
    if isinstance(weight, Tensor):
        weight = by_sample(weight.to(inputs.dtype), inputs)
    return (1 - weight) * inputs + weight * inputs[partner]


@checked
def mixup(
    alpha: Annotated[Strength, AtLeast(0, typical=(0.1, 2.0))] = 0.2,
    *,
    interpolate: Interpolation = "targets",
    probability: Annotated[Strength, Within(0, 1)] = 1.0,
    per_sample: bool = False,
    input_key: Annotated[BatchKey, Index()] = 0,
    target_key: Annotated[BatchKey, Index()] = 1,
    ignore_index: Annotated[int, Number(typical=())] = IGNORED,
    name: str = "mixup",
) -> Algorithm:
    """Mixup: each batch is mixed with itself in another order; evaluation sees no mixed samples.

    Samples are mixed at BEFORE_TRAIN_BATCH, once for a batch, whatever the microbatches are. The loss sees mixed
    targets; metrics of training see the sample's own, which have the larger share. Put ``label_smoothing`` before or
    after it; with ``interpolate="loss"`` before it.

    Args:
        alpha: of the distribution of shares: 0 mixes nothing, 1 draws them uniformly; a number, or a schedule.
        interpolate: ``"targets"``: the loss takes the mean of both targets, as probabilities where they are class
            indices; ``"loss"``: the mean of the loss for one and for the other, which serves any loss and has the same
            value for cross entropy.
        probability: that of a batch to be mixed, or of a sample with ``per_sample``; a number, or a schedule.
        per_sample: draw a share for each sample, and not one for the batch.
        input_key, target_key: where in a batch its inputs and targets are: an index, a key or a
            :class:`pure_loop.Lens`.
        ignore_index: the class index of positions without a target, which stay without.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range, or ``per_sample`` with ``interpolate="loss"``; in training: targets that
            are neither class indices nor floats of the shape of the outputs.
        ArgumentTypeError: a setting of another type.
        DataError: in training: a batch without inputs or targets there, or inputs that are no tensor of floats.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.eye(3), torch.tensor([0, 1, 2]))]
    >>> stream = pl.fit(torch.nn.Linear(3, 3), data, loss=torch.nn.functional.cross_entropy,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba", algorithms=[mixup(1.0)])
    >>> for event, state in stream:
    ...     if event is pl.Event.BEFORE_LOSS:
    ...         inputs, targets = state.microbatch
    >>> torch.allclose(inputs, targets)
    True
    """

    def inputs_of(batch: Batch) -> Tensor:
        inputs = image_of(batch, input_key, "mixup", "target_key", dims=None)
        if not inputs.is_floating_point():
            raise DataError(
                f"mixup: the inputs have dtype {inputs.dtype}, which has no mean. Give images as floats; the tokens of "
                "texts can't be mixed, only their embeddings, in the model."
            )
        return inputs

    def mixed(state: State, inputs: Tensor, targets: Batch, partner: Tensor, shares: Tensor) -> tuple[Tensor, Batch]:
        # In the inputs' dtype for both, so that the targets have the share that the inputs have.
        weight = torch.minimum(shares, 1 - shares).to(inputs.dtype)
        return mix(inputs, partner, weight), with_partners(targets, partner, weight, "mixup")

    return mixing(
        name,
        "mixup",
        mixed,
        inputs_of=inputs_of,
        alpha=alpha,
        probability=probability,
        interpolate=interpolate,
        per_sample=per_sample,
        input_key=input_key,
        target_key=target_key,
        ignore_index=ignore_index,
    )
