"""The gradients of the samples of a batch, each of its own loss, by ``vmap(grad)`` of torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag, positive_or_none
from pure_loop._internal.pytree import Batch
from pure_loop._internal.suggestions import teaching
from pure_loop._internal.tracebacks import RaisedIn
from pure_loop._internal.tree_ops import are_sharded
from pure_loop.data.batch import describe, leaves, map_tensors, to_device
from pure_loop.data.group import parts_of
from pure_loop.errors import ArgumentError, DataError, LossError, ModelError, PureLoopError
from pure_loop.frozendict import FrozenDict
from pure_loop.model.instance import Instance
from pure_loop.precision import Precision, PrecisionName
from pure_loop.random.seeds import derive, seeded_all
from pure_loop.state import Loss, State, refuse_no_state
from pure_loop.task import Task, loss_problem, make_task


@teaching
def per_sample(
    state: State,
    batch: Batch = None,
    *,
    loss: Callable[[Any, Any], Loss] | Task | None = None,
    training: bool = True,
    microbatch_size: int | None = None,
    precision: PrecisionName = "fp32",
) -> FrozenDict[str, Tensor]:
    """The gradient of the loss of each sample of a batch by itself, by ``vmap(grad)`` of torch.func.

    Their mean over the samples is the gradient of the batch where its loss is a mean over samples, and their sum where
    it is a sum. Of a mean over tokens, over targets that are not ignored or with class weights it is their mean
    weighted by ``pl.Task(loss=loss).weigh`` of each sample. The gradients of a sample that weighs 0 are 0.

    Args:
        state: the point: its parameters and buffers, and the seed and the time that dropout is drawn by.
        batch: of which each tensor has the samples along one dimension, or belongs to them all; None: that of the
            State.
        loss: as in :func:`pure_loop.fit`: a function of ``(outputs, targets)``, a Task, or None for the model's own. It
            is given batches of one sample.
        training: the mode of the model: True: as ``fit`` trains it, each sample with dropout masks of its own; False:
            eval mode.
        microbatch_size: how many samples are mapped at once; None: all. As that of ``fit`` it is part of what dropout
            is drawn by. With 1 nothing is mapped, and each sample has a forward and a backward as any module can take.
        precision: as in :func:`pure_loop.fit`.

    Returns:
        By the name of each parameter that is trained and not in ``state.frozen`` a tensor of shape
        ``(samples, *parameter.shape)``, in its dtype; 0 where the loss doesn't reach the parameter.

    Raises:
        ArgumentTypeError: ``state`` is no State, or an argument is of another type.
        ArgumentError: there is no batch, no loss, or no parameter that is trained; parameters in shards, or of members.
        DataError: the samples of the batch can't be counted, or it holds more than tensors of them.
        LossError: the loss is not a scalar tensor that depends on the parameters.
        ModelError: a module normalises over samples, as BatchNorm does in train mode; or torch can't map it: an ``if``
            on a tensor's value, an ``autograd.Function`` without ``setup_context``, an ``nn.GRU``.

    >>> state = State.create(torch.nn.Linear(2, 1, bias=False))
    >>> inputs, targets = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
    >>> grads = per_sample(state, (inputs, targets), loss=lambda outputs, targets: (outputs - targets).sum())
    >>> grads["weight"]
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[0., 2.]]])
    """
    call = "pl.gradients.per_sample(state, batch, loss=...)"
    refuse_no_state(state, call, "pl.State.create(module)")
    if state.ensemble is not None:
        raise ArgumentError(
            f"pl.gradients.per_sample takes one model, and the State has {len(state.ensemble)} members: give it one, "
            "state.member(0)."
        )
    batch = state.batch if batch is None else batch
    if batch is None:
        raise ArgumentError(f"pl.gradients.per_sample: the State has no batch, and none was passed: write {call}.")
    if are_sharded(state.params):
        raise ArgumentError(
            "pl.gradients.per_sample: the parameters are in shards; make them whole with "
            "pl.State.create(state.module()), which all ranks call together."
        )
    training = check_flag("training", training, where="pl.gradients.per_sample")
    size = positive_or_none("microbatch_size", microbatch_size, where="pl.gradients.per_sample")
    task = make_task(state.model.skeleton, loss).of_groups()
    batch = to_device(batch, state.device)
    pieces = list(parts_of(batch)) if size is None else task.split(batch, size)
    results = [grads for grads, _ in of_samples(state, task, enumerate(pieces), Precision.parse(precision), training)]
    return FrozenDict((name, torch.cat([grads[name] for grads in results])) for name in results[0])


def seeding(state: State, precision: Precision, stage: str, index: int) -> AbstractContextManager[object]:
    """The random numbers and the precision of a stage of the microbatch of this number, as in training on one rank."""
    t, stack = state.timestamp, ExitStack()
    stack.enter_context(seeded_all(derive(state.seed, stage, t.epoch, t.batch, index, 0)))
    stack.enter_context(precision.autocast(state.device) or nullcontext())
    return stack


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def coupling(module: nn.Module) -> str | None:
    """The submodule that normalises over samples, in words; None where none is known to."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, _NORMS) and (submodule.training or submodule.running_mean is None):
            return f"{name!r} ({type(submodule).__name__}) normalises over the microbatch"
    return None


def of_samples(
    state: State, task: Task, pieces: Iterable[tuple[int, Batch]], precision: Precision, training: bool = True
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """For each microbatch and its number the gradients of its samples, (n, *shape) by name, and their losses, (n,).

    Raises:
        ArgumentError: no parameter is trained.
        DataError, LossError, ModelError: as of :func:`per_sample`.
    """
    params = {name: tensor.detach() for name, tensor in state.params.items()}
    trained = {name: params[name] for name in state.model.differentiated(state.frozen)}
    if not trained:
        raise ArgumentError("pl.gradients.per_sample: no parameter is trained; all are in state.frozen, or need none.")
    instance = Instance(state.model)  # one of its own: those of a run would keep tensors of the transform

    def loss_of(trained: Mapping[str, Tensor], sample: Batch, index: int) -> tuple[Tensor, Tensor]:
        instance.bind(FrozenDict({**params, **trained}), state.buffers, training)
        module: Any = instance.module
        with seeding(state, precision, "forward", index):
            outputs = task.forward(module, sample)
        with seeding(state, precision, "loss", index):
            loss = task.totalled((module.loss if task.loss is None else task.loss)(outputs, sample))
        problem = loss_problem(loss)
        total = loss["total"] if problem is None and isinstance(loss, dict) else loss
        if problem is None and not total.requires_grad:
            problem = "depends on no parameter that is trained: was it detached, or computed without gradients?"
        if problem is not None:
            raise LossError(f"the loss of one sample, which {task.loss_in_words} returned, {problem}")
        return total, total.detach()

    for index, piece in pieces:
        instance.bind(FrozenDict(params), state.buffers, training)
        couples = coupling(instance.module)
        if couples is not None:
            raise ModelError(
                f"pl.gradients.per_sample: {couples}, so that no sample has a gradient of its own: pass "
                "training=False, with which it normalises by its running statistics, or use GroupNorm."
            )
        if task.samples(piece) == 1:
            inputs = {name: tensor.clone().requires_grad_() for name, tensor in trained.items()}
            with torch.enable_grad():
                value, losses = loss_of(inputs, piece, index)
            results = torch.autograd.grad(value, list(inputs.values()), allow_unused=True, materialize_grads=True)
            grads, losses = {name: grad[None] for name, grad in zip(inputs, results, strict=True)}, losses[None]
        else:
            grads, losses = _mapped(task, piece, trained, partial(loss_of, index=index))
        if not task.by_shape:  # a mean over nothing has gradients that are NaN
            weights = [float(weight) for weight in task.weigh_parts(piece, task.split(piece, 1))]
            for row in [row for row, weight in enumerate(weights) if not weight]:
                for grad in grads.values():
                    grad[row] = 0
        yield grads, losses


def _mapped(
    task: Task,
    piece: Batch,
    trained: Mapping[str, Tensor],
    loss_of: Callable[[Mapping[str, Tensor], Batch], tuple[Tensor, Tensor]],
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and losses of the samples of a microbatch by ``vmap(grad)``.

    Raises:
        DataError: more than tensors is split by samples.
        ModelError: torch can't map the model or the loss.
    """
    cuts = _cuts(piece, task.split(piece, 1))
    # A sample is a batch of one: its dimension stays, of size 1.
    tensors = [tensor.detach().unsqueeze(axis + 1) for tensor, axis in cuts]

    def of_parts(trained: Mapping[str, Tensor], parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        of_sample = {id(tensor): part for (tensor, _), part in zip(cuts, parts, strict=True)}
        return loss_of(trained, map_tensors(lambda tensor: of_sample.get(id(tensor), tensor), piece))

    axes = [axis for _, axis in cuts]
    function = torch.func.vmap(torch.func.grad(of_parts, has_aux=True), in_dims=(None, axes), randomness="different")
    try:
        with warnings.catch_warnings():  # an operation that has no rule runs for one sample after another
            warnings.filterwarnings("ignore", message="There is a performance drop")
            result: tuple[dict[str, Tensor], Tensor] = function(dict(trained), tensors)
    except PureLoopError:
        raise
    except Exception as error:
        place = RaisedIn.of(error)
        raise ModelError(
            f"pl.gradients.per_sample maps samples by torch.func.vmap, and {place or 'the forward or the loss'} failed "
            f"under it: {type(error).__name__}: {str(error).partition('. ')[0]}. Pass microbatch_size=1, with which "
            "each sample has a backward of its own and nothing is mapped."
        ) from error
    return result


def _cuts(piece: Batch, samples: Sequence[Batch]) -> list[tuple[Tensor, int]]:
    """The tensors of a microbatch that are split into its samples, and along which dimension.

    Raises:
        DataError: something else is split, or a tensor in another way.
    """
    cuts = []
    for (path, leaf), (_, part) in zip_longest(
        leaves(piece), leaves(samples[0]), fillvalue=("the list in it", object())
    ):
        if leaf is part:
            continue
        if isinstance(leaf, Tensor) and isinstance(part, Tensor) and leaf.ndim == part.ndim:
            axes = [axis for axis, (a, b) in enumerate(zip(leaf.shape, part.shape, strict=True)) if a != b]
            if [(leaf.shape[axis], part.shape[axis]) for axis in axes] == [(len(samples), 1)]:
                cuts.append((leaf, axes[0]))
                continue
            if not axes:
                continue
        raise DataError(
            f"pl.gradients.per_sample maps the samples of {describe(piece)}, and {path} is no tensor that has them "
            "along one dimension: make it one, or pass microbatch_size=1, with which nothing is mapped."
        )
    return cuts
