"""``pl.inspect``: a batch by samples, modules and parameters, to find what made a loss jump."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.pytree import NAMESPACE
from pure_loop._internal.reprs import table
from pure_loop._internal.suggestions import refuse_misfit, teaching
from pure_loop.data.group import parts_of
from pure_loop.entry.fit import fit
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.optim.optimizer import time_of_step
from pure_loop.precision import Precision
from pure_loop.random.seeds import derive, seeded_all
from pure_loop.stages.nonfinite import total_loss
from pure_loop.stages.search import search
from pure_loop.state import State
from pure_loop.task import Task, make_task
from pure_loop.tools.indices import indices_of_batch

__all__ = ["Inspection", "ModuleRow", "ParameterRow", "Sample", "inspect"]

_SHOWN = 8


@attrs.frozen
class Sample:
    """A sample of a batch.

    Attributes:
        row: in the batch, from 0.
        index: in the dataset; None: not known.
        loss: its own, of its part of the outputs of its microbatch.
        gradient_norm: the L2 norm of the gradient of that loss; None: not computed. The mean of these gradients over
            the batch is the batch's.
    """

    row: int
    index: int | None
    loss: float
    gradient_norm: float | None


@attrs.frozen
class ModuleRow:
    """What a module returned for the first microbatch of a batch: numbers over all elements.

    Attributes:
        name: of the module.
        kind: its class.
        mean, std, largest: of its output; ``largest`` by absolute value.
        zeros: the part of elements that are 0.
    """

    name: str
    kind: str
    mean: float
    std: float
    largest: float
    zeros: float


@attrs.frozen
class ParameterRow:
    """A parameter in the step of a batch: L2 norms.

    Attributes:
        name: of the parameter.
        norm: before the step.
        gradient: of the gradient of the whole batch.
        update: of what the optimizer adds; None: no optimizer was passed.
    """

    name: str
    norm: float
    gradient: float
    update: float | None


@attrs.frozen(repr=False)
class Inspection:
    """What :func:`inspect` found; a terminal or a notebook shows it as tables.

    Attributes:
        batch: its number, from 0.
        samples: by their losses, the highest first.
        modules: those without submodules, in the order of their calls.
        parameters: by the norms of their updates relative to their own, the largest first.
        origin: what was first not finite, in words; None: all is finite.
    """

    batch: int
    samples: tuple[Sample, ...]
    modules: tuple[ModuleRow, ...]
    parameters: tuple[ParameterRow, ...]
    origin: str | None

    def tables(self) -> tuple[tuple[str, list[str], list[list[str]]], ...]:
        """A caption, titles and rows of each table."""
        samples = [
            [str(item.row), _text(item.index), _number(item.loss), _number(item.gradient_norm)]
            for item in self.samples[:_SHOWN]
        ]
        modules = [
            [item.name, item.kind, *map(_number, (item.mean, item.std, item.largest)), f"{item.zeros:.0%}"]
            for item in self.modules
        ]
        parameters = [
            [item.name, *map(_number, (item.norm, item.gradient, item.update, _relative(item)))]
            for item in self.parameters[:_SHOWN]
        ]
        return (
            (
                f"batch {self.batch}: {len(samples)} of {len(self.samples)} samples, by loss",
                ["row", "index", "loss", "gradient norm"],
                samples,
            ),
            ("outputs of modules", ["module", "class", "mean", "std", "largest", "zeros"], modules),
            (
                f"{len(parameters)} of {len(self.parameters)} parameters, by relative update",
                ["parameter", "norm", "gradient", "update", "update / norm"],
                parameters,
            ),
        )

    def __str__(self) -> str:
        lines = [] if self.origin is None else [f"not finite: {self.origin}"]
        for caption, head, rows in self.tables():
            widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
            lines.append(caption)
            lines += ["  " + _aligned(row, widths, rows) for row in [head, *rows]]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        first = "" if self.origin is None else f"<p>not finite: {self.origin}</p>"
        return first + "".join(table(rows, head=head, caption=caption) for caption, head, rows in self.tables())


def _aligned(row: Sequence[str], widths: Sequence[int], rows: Sequence[Sequence[str]]) -> str:
    """Names to the left, numbers to the right."""
    cells = []
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        is_name = any(line[column][:1].isalpha() and line[column] not in ("nan", "inf") for line in rows)
        cells.append(cell.ljust(width) if is_name else cell.rjust(width))
    return "  ".join(cells).rstrip()


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _relative(row: ParameterRow) -> float | None:
    return None if row.update is None or not row.norm else row.update / row.norm


@teaching
def inspect(state: State, data: Any = None, *, gradients: bool = True, **settings: Any) -> Inspection:
    """A batch in numbers: its samples by loss, what each module returns, and the update of each parameter.

    The batch goes through a copy of the model again: with the parameters, microbatches, precision and random numbers
    (dropout) of its step, and without the algorithms from BEFORE_FORWARD on. Nothing is trained.

    Args:
        state: from inside a batch, such as the first of :func:`pure_loop.rewind` at ``"batch_start"``.
        data: the ``train_dataloader`` of the run, for the indices of samples in its dataset; they are known where it
            is a ``DataLoader`` whose sampler gives the indices of a batch, and no algorithm moved its rows. Or, of a
            State of a boundary, a batch.
        gradients: compute the norm of the gradient of each sample: one backward each.
        **settings: the other arguments of :func:`pure_loop.fit`, as the run had them; used are ``loss``, ``task``,
            ``optimizer``, ``precision`` and ``microbatch_size``.

    Raises:
        ArgumentTypeError: ``state`` is no State; an argument that ``fit`` doesn't have.
        ArgumentError: there is no batch; parameters in shards.

    >>> import torch, pure_loop as pl
    >>> inputs = torch.ones(4, 2)
    >>> inputs[3] = 100.0
    >>> settings = dict(loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    >>> stream = pl.fit(torch.nn.Linear(2, 1), [(inputs, torch.zeros(4, 1))], **settings)
    >>> state = next(state for event, state in stream if event is pl.Event.BATCH_START)
    >>> inspect(state, **settings).samples[0].row
    3
    """
    if not isinstance(state, State):
        raise ArgumentTypeError(
            f"inspect({type(state).__name__}): give a State from inside a batch, event, state = next(pl.rewind(folder, "
            '"3417ba", "batch_start", ...)).'
        )
    gradients = check_flag("gradients", gradients, where="inspect")
    refuse_misfit(fit, (state, data), {**_NEEDED, **settings})
    batch = data if state.batch is None else state.batch
    if batch is None:
        raise ArgumentError(
            "inspect: the State is of a boundary, and has no batch: give one from inside a batch, as that of "
            "BATCH_START, or a batch, pl.inspect(state, batch, ...)."
        )
    task = make_task(state.model.skeleton, settings.get("loss"), settings.get("task"))
    replay = _Replay(state, batch, task, Precision.parse(settings.get("precision", "fp32")), _size(settings))
    indices = None if state.batch is None or data is None else indices_of_batch(data, state, settings)
    origin = search(replay.state, task, replay.pieces, replay.seeding)
    samples = [
        Sample(row, None if indices is None or row >= len(indices) else indices[row], loss, norm)
        for row, (loss, norm) in enumerate(replay.samples(gradients=gradients))
    ]
    samples.sort(key=lambda item: (math.isfinite(item.loss), -item.loss if math.isfinite(item.loss) else 0.0))
    parameters = replay.parameters(settings.get("optimizer"))
    parameters.sort(key=lambda item: -(_relative(item) or 0.0))
    number = state.timestamp.batch - (state.event is Event.BATCH_END)
    words = None if origin is None else origin.words
    return Inspection(number, tuple(samples), tuple(replay.modules), tuple(parameters), words)


_NEEDED: dict[str, Any] = {"optimizer": None, "max_duration": None}


def _size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("microbatch_size")
    return size if type(size) is int else None


class _Replay:
    """A batch of a State, computed again on copies of the model.

    Attributes:
        state: with the batch.
        pieces: its microbatches.
        modules: statistics of the outputs of modules in the first of them, once :meth:`samples` was called.
    """

    def __init__(self, state: State, batch: Any, task: Task, precision: Precision, size: int | None) -> None:
        if any(type(tensor).__name__ == "DTensor" for tensor in state.params.values()):
            raise ArgumentError(
                "inspect: the parameters are in shards; read the checkpoint with pl.load(path, model=...) in one "
                "process, which makes them whole, and inspect a batch there."
            )
        self.state = state.replace(batch=batch)
        self.pieces = list(parts_of(batch)) if size is None else task.split(batch, size)
        self.modules: list[ModuleRow] = []
        self._task, self._precision = task, precision

    def seeding(self, stage: str, index: int) -> AbstractContextManager[Any]:
        """The random numbers and the precision of a stage of a microbatch, as in training."""
        t = self.state.previous_timestamp if self.state.event is Event.BATCH_END else self.state.timestamp
        stack = ExitStack()
        stack.enter_context(seeded_all(derive(self.state.seed, stage, t.epoch, t.batch, index, 0)))
        stack.enter_context(self._precision.autocast(self.state.device) or nullcontext())
        return stack

    def samples(self, *, gradients: bool) -> list[tuple[float, float | None]]:
        """The loss of each sample, of its part of the outputs of its microbatch, and the norm of its gradient."""
        module = self.state.module()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        handles = [
            submodule.register_forward_hook(partial(self._note, name))
            for name, submodule in module.named_modules()
            if next(submodule.children(), None) is None
        ]
        results: list[tuple[float, float | None]] = []
        for index, piece in enumerate(self.pieces):
            with torch.set_grad_enabled(gradients), self.seeding("forward", index):
                outputs = self._task.forward(module, piece)
            for handle in handles:
                handle.remove()
            count = self._task.samples(piece)
            for row, sample in enumerate(self._task.split(piece, 1)):
                part: Any = optree.tree_map(partial(_row, row, count), outputs, namespace=NAMESPACE)
                with torch.set_grad_enabled(gradients), self.seeding("loss", index):
                    loss = _loss(self._task, module, part, sample)
                results.append((float(loss.detach()), _gradient_norm(loss, trained) if gradients else None))
        return results

    def _note(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for leaf in optree.tree_leaves(outputs, namespace=NAMESPACE):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                numbers = leaf.detach().double()
                zeros = (numbers == 0).double().mean()
                statistics = (numbers.mean(), numbers.std(correction=0), numbers.abs().max(), zeros)
                self.modules.append(ModuleRow(name, type(module).__name__, *map(float, statistics)))

    def parameters(self, optimizer: Any) -> list[ParameterRow]:
        """Norms of all parameters that are trained, of their gradients and of their updates."""
        state = self.state
        trained = state.model.trained(state.params)
        grads = state._grads if isinstance(state._grads, Mapping) else self._gradients()
        new: Mapping[str, Tensor] | None = None
        if optimizer is not None and state.opt_state is not None:
            t = state.previous_timestamp if state.event is Event.BATCH_END else state.timestamp
            served = state.model.served_by(optimizer)
            with torch.no_grad():
                new, _ = served.update(grads, state.opt_state, trained, time_of_step(served, t, state.lr_scale))
        return [
            ParameterRow(
                name,
                _norm(tensor),
                0.0 if grads.get(name) is None else _norm(grads[name]),
                None if new is None else _norm(new[name].detach().double() - tensor.detach().double()),
            )
            for name, tensor in trained.items()
        ]

    def _gradients(self) -> dict[str, Any]:
        """Of the mean loss of the batch, each microbatch weighted by its samples."""
        module = self.state.module()
        counts = [self._task.samples(piece) for piece in self.pieces]
        for index, (piece, count) in enumerate(zip(self.pieces, counts, strict=True)):
            with self.seeding("forward", index):
                outputs = self._task.forward(module, piece)
            with self.seeding("loss", index):
                loss = _loss(self._task, module, outputs, piece)
            weighted: Any = loss * (1.0 if self._task.summed else count / sum(counts))
            weighted.backward()
        return {name: tensor.grad for name, tensor in module.named_parameters()}


def _gradient_norm(loss: Tensor, trained: Sequence[Tensor]) -> float:
    """The norm of the gradient through the graph of a whole microbatch, which stays."""
    if not loss.requires_grad:
        return 0.0
    grads = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
    return math.hypot(*(_norm(gradient) for gradient in grads if gradient is not None))


def _loss(task: Task, module: Any, outputs: Any, batch: Any) -> Tensor:
    return total_loss(module.loss(outputs, batch) if task.loss is None else task.loss(outputs, batch))


def _row(row: int, samples: int, leaf: Any) -> Any:
    """A sample's part of an output; what has no dimension of samples belongs to all."""
    return leaf[row : row + 1] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == samples else leaf


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().to_dense().double()))
