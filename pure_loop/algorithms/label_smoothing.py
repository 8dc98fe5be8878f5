"""Label smoothing: soft targets for the loss.

With C classes and the one-hot (or any other) distribution ``y`` of a sample's target::

    y' = (1 - smoothing) y + smoothing / C
    y' = (1 - smoothing) y + smoothing u         with a prior u over the classes

https://arxiv.org/abs/1512.00567, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from pure_loop._internal.arguments import check_number
from pure_loop._internal.pytree import Batch
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._mixed import IGNORED, Mixed, soft_targets
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, part_of, with_part
from pure_loop.ranges import Between, Index, Number, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State

__all__ = ["label_smoothing", "smooth_labels"]

SERVES = "classes"


@checked
def smooth_labels(
    outputs: Tensor,
    targets: Tensor,
    smoothing: Annotated[float, Between(0, 1, example="smooth_labels(outputs, targets, 0.1)")] = 0.1,
    *,
    ignore_index: int = IGNORED,
    prior: Sequence[float] | None = None,
) -> Tensor:
    """Targets as smoothed probabilities, as ``torch.nn.functional.cross_entropy`` takes them.

    Args:
        outputs: scores of C classes, (n, C, ...) or (C,); only their shape, dtype and device are used.
        targets: class indices, (n, ...) or (), of an integer dtype; or probabilities, of the shape of ``outputs``.
        smoothing: the part of the probability that is spread over all classes, in [0, 1).
        ignore_index: the class index of positions without a target. Their probabilities are all 0, and the others
            are scaled up so that a mean over all positions is the mean over those that have a target, as it is
            for indices. (``cross_entropy`` itself ignores nothing where it is given probabilities.)
        prior: the probability of each class over which ``smoothing`` is spread, C numbers with the sum 1; None: all
            classes alike.

    Returns:
        Probabilities of the shape of ``outputs``; float32, or float64 for float64 outputs. Targets that are
        probabilities keep their dtype.

    Raises:
        ArgumentError: targets of another shape or dtype, a single class, smoothing out of range, or a prior that is
            none of C classes.
        ArgumentTypeError: outputs or targets that are no tensor.

    >>> import torch
    >>> smooth_labels(torch.zeros(2, 4), torch.tensor([1, 3]), 0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500],
            [0.0500, 0.0500, 0.0500, 0.8500]])
    """
    return soft_targets(
        outputs, targets, smoothing, ignore_index, _prior(prior, "smooth_labels"), where="smooth_labels"
    )


@checked
def label_smoothing(
    smoothing: Annotated[Strength, Between(0, 1, typical=(0.0, 0.5))] = 0.1,
    *,
    target_key: Annotated[BatchKey, Index()] = 1,
    ignore_index: Annotated[int, Number(typical=())] = IGNORED,
    prior: Sequence[float] | None = None,
    name: str = "label_smoothing",
) -> Algorithm:
    """Label smoothing: the loss sees smoothed targets; nothing else does, and evaluation does not.

    It gives what ``cross_entropy(..., label_smoothing=smoothing)`` does, for any loss that takes probabilities, and
    together with algorithms that change targets. Targets are smoothed at BEFORE_LOSS and put back at AFTER_LOSS.
    They take the memory of the outputs for that long. A loss with class weights averages probabilities over the
    samples, and indices over the samples' weights: there use the loss's own ``label_smoothing``. With microbatches or
    ranks, class weights of a loss of torch are refused.

    Args:
        smoothing: the part of the probability that is spread over all classes, in [0, 1); a number, or a schedule.
        target_key: where in a batch its targets are: an index, a key or a :class:`pure_loop.Lens`.
        ignore_index: the class index of positions without a target, which stay without (:func:`smooth_labels`).
        prior: the probability of each class over which ``smoothing`` is spread, such as their frequencies: as many
            numbers as there are classes, with the sum 1; None: all classes alike.
        name: another one, if there are several.

    Raises:
        ArgumentError: smoothing out of range; in training: targets that are neither class indices nor probabilities,
            or a mixer with ``interpolate="loss"`` before it.
        ArgumentTypeError: a setting of another type; in training: outputs that are no tensor.
        DataError: in training: a batch without ``target_key``.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.eye(3), torch.tensor([0, 1, 2]))]
    >>> stream = pl.fit(torch.nn.Linear(3, 3), data, loss=torch.nn.functional.cross_entropy,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="1ba", algorithms=[label_smoothing(0.3)])
    >>> for event, state in stream:
    ...     if event in (pl.Event.BEFORE_LOSS, pl.Event.AFTER_LOSS):
    ...         print(state.microbatch[1][0])
    tensor([0.8000, 0.1000, 0.1000])
    tensor(0)
    """

    probabilities = _prior(prior, "label_smoothing")

    def smooth(state: State) -> State:
        targets = part_of(state.microbatch, target_key, "label_smoothing", "target_key")
        spread = strength_at(smoothing, state.timestamp)

        def smoothed_of(targets: Batch) -> Tensor:
            return soft_targets(state.outputs, targets, spread, ignore_index, probabilities, where="label_smoothing")

        _refuse_one_of_both(targets, state)
        if isinstance(targets, Mixed):
            # Smoothing is affine, so that the mean of both is smoothed as well.
            smoothed: Batch = Mixed(smoothed_of(targets.first), smoothed_of(targets.second), targets.weight)
        else:
            smoothed = smoothed_of(targets)
        return state.replace(microbatch=with_part(state.microbatch, target_key, smoothed)).remember(name, targets)

    def put_back(state: State) -> State:
        targets = state.algorithm_state[name]
        return state.replace(microbatch=with_part(state.microbatch, target_key, targets)).remember(name, None)

    return Algorithm(name, {Event.BEFORE_LOSS: smooth, Event.AFTER_LOSS: put_back}, init=lambda state: None)


def _refuse_one_of_both(targets: Batch, state: State) -> None:
    """
    Raises:
        ArgumentError: the targets are one half of mixed ones, and a mixer keeps the other half for its own loss.
    """
    for mixer, memory in state.algorithm_state.items():
        if isinstance(memory, Mixed) and memory.first is targets:
            raise ArgumentError(
                f'label_smoothing: {mixer!r}, which has interpolate="loss", comes before it and takes the loss for two '
                "targets, of which only the first would be smoothed. Write label_smoothing before it in algorithms=, "
                'or interpolate="targets".'
            )


def _prior(prior: Sequence[float] | Tensor | None, where: str) -> tuple[float, ...] | None:
    """
    Raises:
        ArgumentError, ArgumentTypeError: it is no probabilities of two classes or more.
    """
    if prior is None:
        return None
    numbers = prior.tolist() if isinstance(prior, Tensor) else prior
    if not isinstance(numbers, list | tuple):
        raise ArgumentTypeError(f"{where}: prior={prior!r} is not one number for each class: prior=[0.9, 0.1].")
    checked_numbers = tuple(
        check_number("prior", number, where=where, least=0.0, example=f"{where}(0.1, prior=[0.9, 0.1])")
        for number in numbers
    )
    if len(checked_numbers) < 2 or abs(sum(checked_numbers) - 1) > 1e-4:
        raise ArgumentError(
            f"{where}: prior={numbers!r} are no probabilities of two classes or more: their sum is "
            f"{sum(checked_numbers):g}, and has to be 1."
        )
    return checked_numbers
