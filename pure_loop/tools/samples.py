"""The samples of a batch: their indices in the dataset, their losses, and the norms of their gradients.

A sample's loss is that of its row of the outputs of the microbatch, where all outputs have the samples along their
first dimension; a forward of a few samples shows that they do. Else each sample has a forward of its own. Gradients of
rows are those of samples by themselves, mapped, where the losses of these are those of the rows; else each row has a
backward through the whole microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs
from pure_loop._internal.torch_private import registered_pytrees
from pure_loop.data.batch import describe, map_tensors, tensors_in
from pure_loop.data.dataloaders import source
from pure_loop.errors import ArgumentError, LossError, PureLoopError
from pure_loop.gradients.samples import coupling, of_samples, seeding
from pure_loop.precision import Precision
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.search import is_finite
from pure_loop.state import State
from pure_loop.task import Task, loss_problem


class _Positions(Dataset[int]):
    """A dataset as long as another one, with positions for items."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return int(index)


def indices_of_batch(dataloader: object, state: State, settings: Mapping[str, Any]) -> list[int] | None:
    """The indices in the dataset of the rows of a State's batch; None: the dataloader has none, or several ranks do.

    The sampler is drawn from as in the run, on a dataset of positions: no sample is read.
    """
    if not isinstance(dataloader, DataLoader) or dataloader.batch_sampler is None:
        return None
    if not hasattr(dataloader.dataset, "__len__") or settings.get("parallel") is not None:
        return None
    positions = DataLoader(_Positions(len(dataloader.dataset)), batch_sampler=dataloader.batch_sampler, collate_fn=list)
    per_step = settings.get("batches_per_step", 1)
    batches = source(positions, seed=state.seed, stream="train", batches_per_step=per_step)
    t = state.timestamp
    batch: Batch = next(islice(batches.epoch(t.epoch, start=t.batch_in_epoch, seen=t.batch), 1), None)
    if batch is None:
        return None
    parts = batch if per_step > 1 else [batch]
    return [index for part in parts for index in part]


# So many numbers of gradients of samples are in memory at once, or those of one sample.
_AT_ONCE = 2**26

_BATCH_FIRST = (
    "pass a task with outputs of which each tensor has the samples along its first dimension, such as loss=pl.Task("
    "forward=lambda model, batch: model(**batch).logits, loss=lambda logits, batch: ...)."
)


@attrs.frozen
class Measured:
    """A sample by itself.

    Attributes:
        loss: None: the sample weighs 0.
        gradient_norm: None: not computed.
        finite_inputs: whether all of its part of the batch is.
        finite_outputs: whether all of its outputs are.
        apart: whether the backward of the norm went through no other sample.
    """

    loss: float | None
    gradient_norm: float | None
    finite_inputs: bool
    finite_outputs: bool
    apart: bool = False

    def norm(self, *, finite: bool) -> float | None:
        """The norm of the gradient, if it is the sample's own; ``finite``: as of :meth:`order`."""
        norm, loss = self.gradient_norm, self.loss
        if finite or self.apart or norm is None or loss is None or not math.isfinite(loss) or math.isfinite(norm):
            return norm
        return None

    def order(self, *, finite: bool) -> tuple[int, bool, float]:
        """By which samples are sorted; ``finite``: whether all of the batch and of its forward is.

        First are inputs that are not finite, then outputs or losses that are not, then the losses, the highest first. A
        loss that is NaN in a batch that is finite is a mean over nothing, and last.
        """
        loss = self.loss
        number = loss is not None and math.isfinite(loss)
        if not self.finite_inputs:
            rank = 0
        elif not self.finite_outputs or (loss is not None and not number and (math.isinf(loss) or not finite)):
            rank = 1
        else:
            rank = 2 if number else 3
        return rank, number, -loss if loss is not None and number else 0.0


@attrs.define
class OneByOne:
    """How samples are measured.

    Attributes:
        state: the one with the model and the parameters.
        task: what the model does with a microbatch, and with a sample.
        precision: of the forward and the loss.
        gradients: whether their norms are computed.
        has_rows: whether outputs have the samples along their first dimension; None: unknown, of a single sample.
    """

    state: State
    task: Task
    precision: Precision
    gradients: bool
    has_rows: bool | None = None

    def measured(self, index: int, piece: object, outputs: object, module: nn.Module) -> list[Measured]:
        """The samples of a microbatch.

        Args:
            index: its number.
            piece: the microbatch.
            outputs: of its forward.
            module: that of the forward.

        Raises:
            ArgumentError: the loss fails on one sample; outputs can't be split, and no sample has a forward of its own.
        """
        samples = self.task.samples(piece)
        if samples == 1:
            return [self._measured(piece, outputs, self._loss(index, outputs, piece, module), module)]
        if self.has_rows is None:
            self.has_rows = self._in_rows(index, piece, outputs)
        elif not _have_rows(outputs, samples):
            self.has_rows = False
        by = self._rows if self.has_rows else self._alone
        return list(by(index, piece, outputs, module))

    def _in_rows(self, index: int, piece: object, outputs: object) -> bool:
        """Whether the outputs have the samples along the first dimension; tried with two of them, or with one of two.

        Two, because a BatchNorm takes no single one in train mode. A dimension that is as long as there are samples by
        chance, such as the time of outputs that have it first, stays as long.
        """
        samples = self.task.samples(piece)
        if not _have_rows(outputs, samples):
            return False
        size = min(2, samples - 1)
        module = self.state.module(training=size == 2)
        few = self.task.split(piece, size)[0]
        try:
            with torch.no_grad(), seeding(self.state, self.precision, "forward", index):
                tried = self.task.forward(module, few)
        except Exception as error:
            raise ArgumentError(
                f"inspect tried how outputs follow the samples, and the forward of {size} of the {samples} samples of "
                f"a microbatch failed: {type(error).__name__}: {error}. It has to take any number of samples."
            ) from error
        return len(list(_leaves(tried))) == len(list(_leaves(outputs))) and _have_rows(tried, size)

    def _rows(self, index: int, piece: object, outputs: object, module: nn.Module) -> Iterator[Measured]:
        """Each sample by its row of the outputs of its microbatch; one graph stays for them all."""
        samples = self.task.split(piece, 1)
        rows = [map_tensors(partial(_row, row), outputs) for row in range(len(samples))]
        losses = [self._loss(index, row, sample, module) for row, sample in zip(rows, samples, strict=True)]
        norms = self._norms_apart(index, piece, losses) if self.gradients else None
        for place, (sample, row, loss) in enumerate(zip(samples, rows, losses, strict=True)):
            yield self._measured(sample, row, loss, module, None if norms is None else norms[place])

    def _norms_apart(self, index: int, piece: object, losses: Sequence[Tensor | None]) -> list[float] | None:
        """Norms of the gradients of samples, each by itself; None where these are not the gradients of the rows.

        The losses tell: others are those of a model that computes a row from several samples, or draws other random
        numbers for samples by themselves. Nor are there any of a model that torch can't map.
        """
        state, task = self.state, self.task
        numbers = sum(state.params[name].numel() for name in state.model.differentiated(state.frozen))
        parts = task.split(piece, max(1, _AT_ONCE // max(1, numbers)))
        alone, norms = [], []
        try:
            for grads, own in of_samples(state, task, ((index, part) for part in parts), self.precision):
                flat = [gradient.reshape(len(own), -1) for gradient in grads.values()]
                lengths = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in flat]
                norms += torch.linalg.vector_norm(torch.stack(lengths), dim=0).tolist()
                alone.append(own)
        except Exception:  # the microbatch has been through the model: what fails is to take samples by themselves
            return None
        mapped = torch.cat(alone)
        counted = [row for row, loss in enumerate(losses) if loss is not None]
        if not counted:
            return None
        rows = torch.stack([loss.detach() for loss in losses if loss is not None])
        tolerance = torch.finfo(self.precision.dtype or mapped.dtype).eps ** 0.5
        scale = float(rows.abs().nan_to_num(0.0, 0.0).mean())
        agree = torch.allclose(rows, mapped[counted], rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        return norms if agree else None

    def _alone(self, index: int, piece: object, outputs: object, module: nn.Module) -> Iterator[Measured]:
        """Each sample by a forward of its own.

        Raises:
            ArgumentError: a forward of one sample is another one than that of the microbatch, or fails.
        """
        couples = coupling(module)
        if couples is not None:
            self._refuse_alone(outputs, couples)
        for sample in self.task.split(piece, 1):
            try:
                with torch.set_grad_enabled(self.gradients), seeding(self.state, self.precision, "forward", index):
                    own = self.task.forward(module, sample)
            except Exception as error:
                self._refuse_alone(outputs, f"the forward of one failed: {type(error).__name__}: {error}", error)
            yield self._measured(sample, own, self._loss(index, own, sample, module), module)

    def _refuse_alone(self, outputs: object, why: str, error: Exception | None = None) -> NoReturn:
        raise ArgumentError(
            f"inspect can't split the outputs of the forward, {describe(outputs)}, by samples, nor run a forward of "
            f"each sample alone: {why}. Instead {_BATCH_FIRST}"
        ) from error

    def _measured(
        self, sample: object, outputs: object, loss: Tensor | None, module: nn.Module, norm: float | None = None
    ) -> Measured:
        """A sample with its loss; the norm of its gradient, if it is not known, by a backward."""
        finite_inputs, finite_outputs = (all(map(is_finite, tensors_in(part))) for part in (sample, outputs))
        if loss is None:
            return Measured(None, None, finite_inputs, finite_outputs)
        apart = norm is not None
        if self.gradients and norm is None:
            norm = _gradient_norm(loss, module)
        return Measured(float(loss.detach()), norm, finite_inputs, finite_outputs, apart)

    def _loss(self, index: int, outputs: Outputs, sample: Batch, module: Any) -> Tensor | None:
        """Of one sample; None: it weighs 0.

        Raises:
            ArgumentError: the loss function fails on one sample.
            LossError: it is no number.
        """
        task = self.task
        try:
            if not task.summed and float(task.weigh(sample)) == 0:
                return None
            with torch.set_grad_enabled(self.gradients), seeding(self.state, self.precision, "loss", index):
                loss = module.loss(outputs, sample) if task.loss is None else task.loss(outputs, sample)
        except PureLoopError:
            raise
        except Exception as error:
            raise ArgumentError(
                f"inspect computes the loss of one sample at a time, and {task.loss_in_words} failed on one: "
                f"{type(error).__name__}: {error}. A loss that compares the samples of a batch, such as a contrastive "
                "one, is no mean over samples: pass a loss that takes one sample to rank them by, pl.inspect(state, "
                "data, loss=..., ...). Gradients and updates of parameters are those of the run then in a State of "
                "AFTER_TRAIN_BATCH, and those of this loss in others."
            ) from error
        loss = task.totalled(loss)
        problem = loss_problem(loss, differentiated=False)
        if problem is not None:
            raise LossError(f"the loss of one sample, which {task.loss_in_words} returned, {problem}")
        return total_loss(loss)


def norm_of(tensor: Tensor) -> float:
    """The L2 norm of a tensor."""
    return float(torch.linalg.vector_norm(tensor.detach().to_dense().double()))


def _gradient_norm(loss: Tensor, module: nn.Module) -> float:
    if not loss.requires_grad:
        return 0.0
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    return math.hypot(*(norm_of(gradient) for gradient in grads if gradient is not None))


def _leaves(outputs: Outputs) -> Iterator[object]:
    """The leaves of a pytree, whichever engine knows its classes."""
    for leaf in optree.tree_leaves(outputs, namespace=NAMESPACE):
        pytree = registered_pytrees.get(type(leaf))
        if pytree is None:
            yield leaf
        else:
            for child in pytree.flatten_fn(leaf)[0]:
                yield from _leaves(child)


def _have_rows(outputs: object, samples: int) -> bool:
    """Whether there are tensors, and nothing else that a loss may be computed from, of so many rows."""
    tensors = [leaf for leaf in _leaves(outputs) if not isinstance(leaf, str | bool)]
    return bool(tensors) and all(
        isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.ndim > 0 and leaf.shape[0] == samples
        for leaf in tensors
    )


def _row(row: int, tensor: Tensor) -> Tensor:
    return tensor[row : row + 1]
