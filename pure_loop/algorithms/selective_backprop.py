"""Selective backprop: a step trains on the samples of its batch that have the largest losses.

Of N samples, the one with the rank r of its loss (0: the smallest) is kept with a probability in proportion to::

    P(r) = ((r + 1/2) / N)^(1 / keep - 1)            https://arxiv.org/abs/1910.00762

so that ``keep N`` samples are left, drawn without replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor
from torch.nn import functional

from pure_loop._internal.processes import data_rank
from pure_loop._internal.pytree import Batch, Outputs
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._batches import by_part, rows_of
from pure_loop.algorithms._images import image_of
from pure_loop.algorithms._spans import as_span, part_of_span
from pure_loop.data.samples import num_samples, split
from pure_loop.errors import ArgumentError, ArgumentTypeError, DataError
from pure_loop.event import Event
from pure_loop.lens import BatchKey, with_part
from pure_loop.random import generator
from pure_loop.ranges import Above, AtLeast, Index, Within, checked
from pure_loop.ranges.strengths import Strength, strength_at
from pure_loop.state import State
from pure_loop.time import TimeLike

if TYPE_CHECKING:
    from pure_loop.loop.batch import LoopStages

__all__ = ["hardest", "probabilities", "selective_backprop"]

EXPECTED_FAILURES = dict.fromkeys(["rank_agreement", "world_size"], "each rank chooses among its own samples")


def probabilities(losses: Tensor, keep: float) -> Tensor:
    """What the probabilities with which samples are kept are in proportion to.

    Args:
        losses: of the samples, (n,).
        keep: the share of samples that are kept, in (0, 1].

    Returns:
        (n,), of the dtype of ``losses``: by the rank of each loss.

    >>> probabilities(torch.tensor([3.0, 1.0, 4.0, 2.0]), 0.5) / 2
    tensor([0.3125, 0.0625, 0.4375, 0.1875])
    """
    ranks = losses.argsort().argsort().to(losses.dtype)
    return ((ranks + 0.5) / len(losses)) ** (1 / keep - 1)


def hardest(losses: Tensor, keep: float, generator: torch.Generator | None = None) -> Tensor:
    """A draw of samples without replacement, those with large losses oftener.

    Args:
        losses: of the samples, (n,).
        keep: the share of samples that are kept, in (0, 1]; at least one is.
        generator: what draws; None: torch's global generator.

    Returns:
        Their indices in ascending order, (k,), int64.

    >>> hardest(torch.tensor([3.0, 1.0, 4.0, 2.0]), 1.0)
    tensor([0, 1, 2, 3])
    """
    count = max(1, int(keep * len(losses) + 1e-9))
    uniform = torch.rand(
        losses.shape, dtype=torch.float64 if losses.is_cpu else torch.float32, generator=generator, device=losses.device
    )
    # The largest of logarithms with Gumbel noise are a draw without replacement.
    noise = -torch.log(-torch.log(uniform.clamp(min=1e-30)))
    scores = torch.log(probabilities(losses.to(noise.dtype), keep)) + noise
    return scores.topk(count).indices.sort().values


@checked
def selective_backprop(
    keep: Annotated[Strength, Within(0.001, 1, typical=(0.4, 0.9))] = 0.5,
    *,
    start: TimeLike = "0.5dur",
    end: TimeLike = "0.9dur",
    interrupt: Annotated[int, AtLeast(0, typical=(0, 0))] = 2,
    scale: Annotated[float, Above(0, typical=(1.0, 1.0))] = 1.0,
    per_sample_loss: Callable[[Outputs, Batch], Tensor] | None = None,
    input_key: Annotated[BatchKey, Index()] = 0,
    name: str = "selective_backprop",
) -> Algorithm:
    """Selective backprop: from ``start`` to ``end`` a step trains on the samples with the largest losses.

    At AFTER_DATALOADER, before other algorithms change the batch, a forward in evaluation mode gives the loss of each
    sample; BatchNorm and dropout are not touched by it. The timestamp counts all samples that were loaded. Compiled,
    the number of samples that are kept is another graph.

    Args:
        keep: the share of samples that are kept, in (0, 1]; a number, or a schedule.
        start, end: from when to when: ``"0.5dur"``, ``"10ep"``.
        interrupt: each ``interrupt``-th batch of an epoch is trained whole; 0: none.
        scale: images are scaled by it for the forward that gives the losses, 0.5 for a quarter of the time.
        per_sample_loss: ``(outputs, batch) -> losses``, (n,); None: the loss of the task for each sample alone, which
            serves any loss and calls it n times.
        input_key: with ``scale``: where in a batch its images are: an index, a key or a :class:`pure_loop.Lens`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a setting out of range; ``interrupt=1``, with which it would never run.
        ArgumentTypeError: a setting of another type.
        DataError: in training: ``per_sample_loss`` does not give one number for each sample.

    >>> import pure_loop as pl
    >>> data = [(torch.randn(8, 2), torch.randn(8, 1))] * 2
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                 max_duration="2ep", algorithms=[selective_backprop(0.25, interrupt=0)])
    >>> [len(state.batch[0]) for event, state in stream if event is pl.Event.BATCH_START]
    [8, 8, 2, 2]
    """
    first, last = as_span(start, "start", "selective_backprop"), as_span(end, "end", "selective_backprop")
    if interrupt == 1:
        raise ArgumentError(
            "selective_backprop: interrupt=1 trains every batch whole, so that it would never run: interrupt=2 for "
            "each second one, interrupt=0 for none."
        )
    if per_sample_loss is not None and not callable(per_sample_loss):
        raise ArgumentTypeError(
            f"selective_backprop: per_sample_loss={per_sample_loss!r} is not a function of (outputs, batch): "
            "lambda outputs, batch: cross_entropy(outputs, batch[1], reduction='none')."
        )
    if first.unit is last.unit and not first < last:
        raise ArgumentError(f"selective_backprop: end={str(last)!r} does not come after start={str(first)!r}.")

    def losses_of(state: State, stages: LoopStages) -> Tensor:
        losses: list[Tensor] = []
        for index, piece in enumerate(stages.microbatches(state.batch)):
            inputs = piece
            if scale != 1:
                images = image_of(piece, input_key, "selective_backprop")
                inputs = with_part(
                    piece, input_key, functional.interpolate(images, scale_factor=scale, mode="bilinear")
                )
            validation = stages.validate(
                state.replace(microbatch=inputs), label=name, batch=state.timestamp.batch, index=index
            )
            if per_sample_loss is not None:
                with torch.no_grad():
                    values = per_sample_loss(validation.outputs, piece)
                if not isinstance(values, Tensor) or values.shape != (num_samples(piece),):
                    result = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                    raise DataError(
                        f"selective_backprop: per_sample_loss returned {result}, and has to return one number for each "
                        f"of {num_samples(piece)} samples: use reduction='none', and a mean over all dimensions but "
                        "the first."
                    )
                losses.append(values.detach())
                continue
            rows = zip(split(validation.outputs, 1), split(piece, 1), strict=True)
            losses += [
                stages.validation_loss(validation.replace(outputs=outputs, microbatch=sample)).view(1)
                for outputs, sample in rows
            ]
        return torch.cat(losses)

    @by_part
    def select(state: State, stages: LoopStages) -> State:
        timestamp = state.timestamp
        if part_of_span(first, timestamp) < 1 or part_of_span(last, timestamp) >= 1:
            return state
        share = strength_at(keep, timestamp)
        count = num_samples(state.batch)
        if share >= 1 or (interrupt and not (timestamp.batch_in_epoch + 1) % interrupt):
            return state
        random = generator(state.seed, name, timestamp.batch, data_rank(), device=state.device)
        chosen = hardest(losses_of(state, stages), share, random)

        return state.replace(batch=rows_of(state.batch, chosen, count))

    return Algorithm(name, {Event.AFTER_DATALOADER: select})
