"""``pl.inspect``: a batch by samples, modules and parameters, to find what made a loss jump."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import attrs
import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag
from pure_loop._internal.pytree import NAMESPACE, Batch, Outputs
from pure_loop._internal.reprs import columns, table
from pure_loop._internal.suggestions import passing_on, teaching
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.data.group import Batches
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.settings import read_batches_per_step, read_clip, read_microbatch_size, read_optimizer
from pure_loop.entry.start import refuse_other_optimizer
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.gradients.samples import seeding
from pure_loop.loop.batch import LoopStages
from pure_loop.members.ensemble import refuse_several
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.stages.notes import noting
from pure_loop.stages.search import search
from pure_loop.stages.settings import found_size
from pure_loop.stages.update import in_order
from pure_loop.state import State
from pure_loop.task import make_task
from pure_loop.tools.samples import Measured, OneByOne, indices_of_batch, norm_of

_SHOWN = 8


@attrs.frozen
class Sample:
    """A sample of a batch.

    Attributes:
        row: in the batch, from 0.
        index: in the dataset; None: not known.
        loss: its own, of its row of the outputs of its microbatch, or of a forward of its own; None: it has no target
            that counts (its weight is 0).
        gradient_norm: the L2 norm of the gradient of that loss. None: not computed; or it is not finite while the loss
            is, after a backward through the whole microbatch (see ``gradients`` of :func:`inspect`), which multiplies
            with the NaN of another sample. Of a loss that is a mean over samples, the mean of these gradients is the
            batch's; of one with ``reduction="sum"`` their sum is; of a mean over tokens or over targets that are not
            ignored, their mean weighted by how many each sample has (``pl.Task(weight=)``). This doesn't hold of
            another loss, nor of samples that have forwards of their own.
    """

    row: int
    index: int | None
    loss: float | None
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
        gradient: of the gradient of the whole batch, as the optimizer gets it: clipped by ``clip_grad``; 0: there is
            none, as of a parameter in ``state.frozen``.
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
        samples: by their losses, the highest first. Before them are those with inputs, outputs or a loss that are not
            finite; after them those without a loss, or with one that is NaN in a batch in which all else is finite.
        modules: those without submodules, in the order of their calls.
        parameters: by the norms of their updates relative to their own, the largest first.
        origin: what was first not finite, in words; None: all is finite.
        alone: whether samples had forwards of their own, because the outputs can't be split by samples.
    """

    batch: int
    samples: tuple[Sample, ...]
    modules: tuple[ModuleRow, ...]
    parameters: tuple[ParameterRow, ...]
    origin: str | None
    alone: bool = False

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
        alone = ", each in a forward of its own" if self.alone else ""
        return (
            (
                f"batch {self.batch}: {len(samples)} of {len(self.samples)} samples, by loss{alone}",
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
            names = [column for column in range(len(head)) if any(map(_is_name, (row[column] for row in rows)))]
            lines += [caption, *(f"  {line}" for line in columns([head, *rows], left=names))]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html  # notebooks alone need it

        first = "" if self.origin is None else f"<p>not finite: {html.escape(self.origin)}</p>"
        return first + "".join(table(rows, head=head, caption=caption) for caption, head, rows in self.tables())


def _is_name(cell: str) -> bool:
    return cell[:1].isalpha() and cell not in ("nan", "inf")


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _relative(row: ParameterRow) -> float | None:
    return None if row.update is None or not row.norm else row.update / row.norm


@teaching
@passing_on(fit, optional=["optimizer", "max_duration"])
def inspect(state: State, data: Batch = None, *, gradients: bool = True, **settings: Unpack[FitOptions]) -> Inspection:
    """A batch in numbers: its samples by loss, what each module returns, and the update of each parameter.

    The batch goes through a copy of the model again: with the parameters, microbatches, precision and random numbers
    (dropout) of its step, and without the algorithms from BEFORE_FORWARD on. Nothing is trained.

    The loss of a sample is that of its row of the outputs. Row i of the outputs is taken to be that of sample i. Where
    a tensor in the outputs has no row for each sample (a loss of shape (), a time dimension that is the first), or the
    outputs are of a class that is no pytree, each sample has a forward of its own, with other dropout masks than
    the step; ``Inspection.alone`` says so.

    Args:
        state: from inside a batch, up to its AFTER_TRAIN_BATCH, such as the first of :func:`pure_loop.rewind` at
            ``"batch_start"``. Gradients of parameters are those of the State at AFTER_TRAIN_BATCH, and computed at
            other events.
        data: the ``train_dataloader`` of the run, for the indices of samples in its dataset; they are known where it
            is a ``DataLoader`` of a sampler that gives indices of a batch, and no algorithm moved its rows. Or, of a
            State of a boundary, a batch.
        gradients: compute the norm of the gradient of each sample, of all at once, as
            :func:`pure_loop.gradients.per_sample` does. Where samples by themselves have other losses than in their
            microbatch (BatchNorm in train mode, dropout that torch draws in another order), and where torch can't map
            the model, it is one backward through the whole microbatch for each, a time that grows with the square of
            its samples; False leaves it out.
        **settings: the other arguments of :func:`pure_loop.fit`, as the run had them; used are ``loss``,
            ``optimizer``, ``precision``, ``microbatch_size``, ``batches_per_step`` and ``clip_grad``.

    Raises:
        ArgumentTypeError: ``state`` is no State; an argument that ``fit`` doesn't have, or of another type.
        ArgumentError: there is no batch; the State is of BATCH_END, after the step; parameters in shards; a loss that
            can't take one sample; outputs that can't be split, of a model with a BatchNorm in train mode or one that
            can't take one sample.
        ResumeError: the State has the optimizer state of another optimizer.

    >>> import torch, pure_loop as pl
    >>> inputs = torch.ones(4, 2)
    >>> inputs[3] = 100.0
    >>> recipe = pl.Recipe([(inputs, torch.zeros(4, 1))], loss=torch.nn.functional.mse_loss,
    ...                    optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep")
    >>> stream = recipe.fit(torch.nn.Linear(2, 1), watch={"batch_start"})
    >>> recipe.inspect(next(stream)[1]).samples[0].row
    3
    """
    refuse_several(state, "inspect")
    if not isinstance(state, State):
        raise ArgumentTypeError(
            f"inspect({type(state).__name__}): give a State from inside a batch, event, state = next(pl.rewind(folder, "
            '"3417ba", "batch_start", ...)).'
        )
    gradients = check_flag("gradients", gradients, where="inspect")
    batch = data if state.batch is None else state.batch
    if batch is None:
        raise ArgumentError(
            "inspect: the State is of a boundary, and has no batch: give one from inside a batch, as that of "
            "BATCH_START, or a batch, pl.inspect(state, batch, ...)."
        )
    if state.event is Event.BATCH_END:
        raise ArgumentError(
            "inspect: the State is of BATCH_END, and its parameters are those after the step of its batch: give one "
            'from before the step, of the stream or of pl.rewind(folder, "3417ba", "batch_start", ...), or '
            '"after_train_batch".'
        )
    if settings.get("optimizer") is not None:
        refuse_other_optimizer(state, read_optimizer(settings["optimizer"]))
    replay = _Replay(state, batch, settings)
    indices = None if state.batch is None or data is None else indices_of_batch(data, state, settings)
    given = "second argument, which is one batch and not the data" if state.batch is None else "batch of the State"
    with noting(lambda: f"raised by inspect, of its {given}"):
        origin = search(replay.state, replay.stages)
    measured = list(enumerate(replay.samples(gradients=gradients)))
    measured.sort(key=lambda item: item[1].order(finite=origin is None))
    samples = [
        Sample(
            row,
            None if indices is None or row >= len(indices) else indices[row],
            item.loss,
            item.norm(finite=origin is None),
        )
        for row, item in measured
    ]
    parameters = replay.parameters(settings.get("optimizer"))
    parameters.sort(key=lambda item: -(_relative(item) or 0.0))
    words = None if origin is None else origin.words
    return Inspection(
        state.timestamp.batch, tuple(samples), tuple(replay.modules), tuple(parameters), words, replay.alone
    )


class _Replay:
    """A batch of a State, computed again on copies of the model.

    Attributes:
        state: with the batch.
        stages: as the run had them, without its algorithms.
        pieces: the microbatches of the batch.
        modules: statistics of the outputs of modules in the first of them, once :meth:`samples` was called.
        alone: whether each sample had a forward of its own.
    """

    def __init__(self, state: State, batch: Batch, settings: Mapping[str, Any]) -> None:
        if are_sharded(state.params):
            raise ArgumentError(
                "inspect: the parameters are in shards; read the checkpoint with pl.load(path, model=...) in one "
                "process, which makes them whole, and inspect a batch there."
            )
        several = read_batches_per_step(settings.get("batches_per_step", 1)) > 1
        if type(batch) is Batches and not several:
            raise ArgumentError(
                f"inspect: the batch of the State is {len(batch)} batches of the dataloader; pass batches_per_step= as "
                "the run had it."
            )
        task = make_task(state.model.skeleton, settings.get("loss"))
        size = read_microbatch_size(settings.get("microbatch_size"))
        self.stages = LoopStages(
            task=task.of_groups() if several else task,
            precision=Precision.parse(settings.get("precision", "fp32")),
            microbatch_size=found_size(state) if size == "auto" else size,
            clip_grad=read_clip(settings.get("clip_grad")),
            nonfinite="skip",  # a batch that weighs nothing has gradients that are NaN, and is no error
            handlers={},
        )
        self.state = state.replace(batch=batch)
        self.pieces = self.stages.microbatches(batch)
        self.modules: list[ModuleRow] = []
        self.alone = False

    def samples(self, *, gradients: bool) -> list[Measured]:
        """The loss of each sample, and the norm of its gradient."""
        state, task = self.state, self.stages.task
        module = state.module()
        trained = set(state.model.differentiated(state.frozen))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)
        handles = [
            submodule.register_forward_hook(partial(self._note, name))
            for name, submodule in module.named_modules()
            if next(submodule.children(), None) is None
        ]
        one_by_one = OneByOne(state, task, self.stages.precision, gradients)
        results: list[Measured] = []
        for index, piece in enumerate(self.pieces):
            with torch.set_grad_enabled(gradients), seeding(state, self.stages.precision, "forward", index):
                outputs = task.forward(module, piece)
            for handle in handles:
                handle.remove()
            results += one_by_one.measured(index, piece, outputs, module)
        self.alone = one_by_one.has_rows is False
        return results

    def _note(self, name: str, module: nn.Module, inputs: object, outputs: Outputs) -> None:
        for leaf in optree.tree_leaves(outputs, namespace=NAMESPACE):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                numbers = leaf.detach().double()
                zeros = (numbers == 0).double().mean()
                statistics = (numbers.mean(), numbers.std(correction=0), numbers.abs().max(), zeros)
                self.modules.append(ModuleRow(name, type(module).__name__, *map(float, statistics)))

    def parameters(self, optimizer: Optimizer | None) -> list[ParameterRow]:
        """Norms of all parameters that are trained, of their gradients and of their updates."""
        state = self.state
        trained = state.model.trained(state.params)
        # Before AFTER_TRAIN_BATCH gradients are sums of some microbatches, and scaled.
        complete = state.event is Event.AFTER_TRAIN_BATCH and isinstance(state._grads, Mapping)
        grads: Mapping[str, Any] = state._grads if complete else self._gradients()
        after: Mapping[str, Tensor] | None = None
        if optimizer is not None and state.opt_state is not None:
            served = state.model.served_by(optimizer)
            drawing = self.stages.seeding(state, "update", code="users" if served.draws else None)
            with torch.no_grad(), drawing:
                updated = self.stages.engine.update(served, state.replace(grads=grads), trained)
            after, _ = in_order(served, updated, trained)
        return [
            ParameterRow(
                name,
                norm_of(tensor),
                0.0 if grads.get(name) is None else norm_of(grads[name]),
                None if after is None else norm_of(after[name].detach().double() - tensor.detach().double()),
            )
            for name, tensor in trained.items()
        ]

    def _gradients(self) -> Mapping[str, Any]:
        """Of the loss of the batch, as the loop computes them: weighted, unscaled and clipped."""
        # On a copy of the model, so that the run's own is not bound to what is computed here.
        state = self.state.with_module(self.state.module())
        state = state.replace(event=None, microbatch=None, outputs=None, loss=None)
        grads: Mapping[str, object] = self.stages.gradients(state)._grads
        return grads
