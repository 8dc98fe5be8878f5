"""Stochastic weight averaging: evaluation uses the mean of the weights of the last part of training.

With the weights ``w`` at the update with the number ``n``, counted from 0::

    a' = a + (w - a) / (n + 1)                       https://arxiv.org/abs/1803.05407

The paper averages weights of a learning rate that is constant or cyclic, which is a schedule of the optimizer::

    lr = pl.schedules.chain(pl.schedules.cosine("0.75dur", peak=0.1), ("0.75dur", pl.schedules.constant(0.05)))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated

import torch
from torch import Tensor, nn

from pure_loop._internal.pytree import Batch, PyTree
from pure_loop._internal.tree_ops import map_local
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._averages import (
    AveragedBuffers,
    averageable,
    begun,
    finite_or,
    resuming,
    updated_at,
    widened,
    with_average,
)
from pure_loop.algorithms._spans import as_span, is_past, part_of_span
from pure_loop.cadence import every
from pure_loop.data.batch import to_device
from pure_loop.errors import ArgumentError, ModelError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.loop.batch import LoopStages
from pure_loop.random import derive, seeded
from pure_loop.random.authors import is_users
from pure_loop.ranges import Duration, checked
from pure_loop.state import State, refuse_no_state
from pure_loop.task import Task
from pure_loop.time import Time, TimeLike

__all__ = ["running_mean", "swa", "update_batchnorm"]

_NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def running_mean(mean: Mapping[str, Tensor], tensors: Mapping[str, Tensor], count: Tensor) -> FrozenDict[str, Tensor]:
    """``mean + (tensors - mean) / (count + 1)``, name by name.

    Args:
        mean: names to the mean of ``count`` tensors, floating point or complex; those in half precision or less are
            averaged in float32 (complex64), in which the result is.
        tensors: what joins the mean.
        count: 0-d, int64: how many the mean is of; with 0 the result is ``tensors``.

    >>> running_mean({"w": torch.tensor([1.5])}, {"w": torch.tensor([3.0])}, torch.tensor(2))["w"]
    tensor([2.])
    """

    def moved(before: list[Tensor], latest: list[Tensor]) -> list[Tensor]:
        pairs = ((widened(a), widened(b)) for a, b in zip(before, latest, strict=True))
        return [torch.where(count == 0, b, a + (b - a) / (count + 1)) for a, b in pairs]

    names = list(mean)
    results = map_local(moved, [mean[name] for name in names], [tensors[name] for name in names])
    return FrozenDict(zip(names, results, strict=True))


def update_batchnorm(
    state: State, dataloader: Iterable[Batch], batches: int | None = None, *, task: Task | None = None
) -> State:
    """The State with BatchNorm's running statistics of its own parameters: the mean over the data.

    Statistics of a mean of weights are not the mean of their statistics. The forwards are those of training, with its
    dropout, on a copy of the module; layers that a model keeps in eval mode keep their statistics. Random numbers are
    of the State's seed, and the global generators stay as they were.

    Args:
        state: such as ``averaged(state, "swa")``.
        dataloader: batches, as ``fit`` takes them.
        batches: how many of them; None: all.
        task: its ``forward(module, batch)`` is called; None: the module is called with the inputs of a batch.

    Raises:
        ModelError: the model has no BatchNorm in train mode that keeps running statistics.
        ArgumentError: there is no batch.
        ArgumentTypeError: the first argument is no State.

    >>> state = State.create(nn.Sequential(nn.BatchNorm1d(1)))
    >>> data = [(torch.tensor([[0.0], [2.0]]), None), (torch.tensor([[4.0], [6.0]]), None)]
    >>> update_batchnorm(state, data).buffers["0.running_mean"]
    tensor([3.])
    """
    refuse_no_state(state, 'update_batchnorm(averaged(state, "swa"), data)')
    module = state.module()
    normalizations = (layer for layer in module.modules() if isinstance(layer, _NORMALIZATIONS))
    layers = [layer for layer in normalizations if layer.running_mean is not None and layer.training]
    if not layers:
        raise ModelError(
            f"update_batchnorm: {type(module).__name__} has no BatchNorm that keeps running statistics, so that there "
            "is nothing to update: leave it out."
        )
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all forwards
    forward, count = (task or Task()).forward, 0
    with torch.no_grad(), seeded(derive(state.seed, "update_batchnorm"), state.device):
        for batch in itertools.islice(dataloader, batches):
            forward(module, to_device(batch, state.device))
            count += 1
    if not count:
        raise ArgumentError("update_batchnorm: the dataloader gave no batch, so that there are no statistics.")
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    ids = {id(buffer) for layer in layers for buffer in layer.buffers()}
    changed = {name: buffer for name, buffer in module.named_buffers() if id(buffer) in ids}
    return state.replace(buffers={**state.buffers, **changed})


@checked
def swa(
    start: TimeLike = "0.75dur",
    end: TimeLike | None = None,
    *,
    interval: Annotated[Time | str, Duration(typical=("1ba", "2ba", "1ep"))] = "1ep",
    replace: bool = False,
    evaluate: bool = True,
    reset_optimizer: bool = False,
    batchnorm_data: Iterable[Batch] | None = None,
    buffers: str | Iterable[str] = (),
    name: str = "swa",
) -> Algorithm:
    """Stochastic weight averaging: evaluation and prediction use the mean of weights, training the weights.

    From ``start`` on the mean is updated at BATCH_END, or at EPOCH_END for an interval in epochs. Parameters are
    averaged, and of the buffers running means and variances (a module's ``running_mean`` and ``running_var``, as
    BatchNorm has them) and those that ``buffers`` names; evaluation uses the latest values of all others. Where a mean
    would not be finite it is the latest value. :func:`averaged` gives a State with the mean in place of the
    weights, and :func:`update_batchnorm` one with BatchNorm's statistics of it; the mean of the statistics, which
    evaluations during training use, is an approximation. Nothing in training reads the mean, unless ``replace``.

    Args:
        start: when the first weights join the mean: ``"0.75dur"``, ``"10ep"``.
        end: when the last ones do; None: at the end of training.
        interval: how often: ``"1ep"``, ``"100ba"``.
        replace: train on from the mean when ``end`` is reached. The state of the optimizer stays, unless
            ``reset_optimizer``.
        evaluate: evaluation and prediction use the mean, as soon as there is one.
        reset_optimizer: with ``replace``, the optimizer begins anew from the mean.
        batchnorm_data: batches, as ``fit`` takes them, of which evaluation and prediction take BatchNorm's statistics
            of the mean (:func:`update_batchnorm`): a list or a DataLoader, which each of them goes through.
        buffers: globs of names of further buffers that are averaged, ``"*.center"``; ``"*"``: all of floating point.
            When a run resumes with others than before, means begin or end there.
        name: another one, if there are several; with several, evaluation uses the last one in the list.

    Raises:
        ArgumentError: a time by the clock, an end before the start, ``replace`` without an end, ``reset_optimizer``
            without ``replace``, or ``batchnorm_data`` that is an iterator or without ``evaluate``; by ``fit``: a glob
            that matches no floating point buffer.
        ArgumentTypeError: a setting of another type.

    >>> import pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> state = pl.run(pl.fit(nn.Linear(2, 1), data, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="4ep", algorithms=[swa("0.5dur")]))
    >>> int(state.algorithm_state["swa"]["count"])
    3
    >>> pl.algorithms.averaged(state, "swa").module()
    Linear(in_features=2, out_features=1, bias=True)
    """
    first = as_span(start, "start", "swa")
    last = None if end is None else as_span(end, "end", "swa")
    _refuse_misfits(first, last, replace, reset_optimizer, evaluate, batchnorm_data)
    period = Time.parse(interval)
    cadence = every(period)
    chosen_buffers = AveragedBuffers.read("swa", buffers)

    def begin(state: State) -> FrozenDict[str, PyTree]:
        count = torch.zeros((), dtype=torch.int64, device=state.device)
        of_buffers = chosen_buffers.of(state.buffers)
        memory = {"params": averageable(state.params), "buffers": of_buffers, "count": count}
        # Whether there is a mean, without a look at a tensor, which a compiled step can't have.
        return FrozenDict({**memory, "began": False, "replaced": False} if replace else memory)

    def update(state: State) -> State:
        assert state.event is not None
        memory, timestamp = state.algorithm_state[name], state.timestamp
        joins = part_of_span(first, timestamp) >= 1 and not (last is not None and is_past(last, timestamp))
        if joins and cadence.at(state, state.event):
            count = memory["count"]
            params = finite_or(running_mean(memory["params"], state.params, count), state.params)
            # Buffers may come, go and change their shapes.
            latest = chosen_buffers.of(state.buffers)
            of_buffers = finite_or(running_mean(begun(memory["buffers"], latest), latest, count), latest)
            began = {"began": True} if replace else {}
            memory = FrozenDict({**memory, "params": params, "buffers": of_buffers, "count": count + 1, **began})
            state = state.remember(name, memory)
        if not replace or memory["replaced"] or (last is not None and part_of_span(last, timestamp) < 1):
            return state
        state = with_average(state, name, chosen_buffers, waits=False) if memory["began"] else state
        return state.remember(name, FrozenDict({**memory, "replaced": True}))

    def update_and_reset(state: State, stages: LoopStages) -> State:
        before = state.algorithm_state[name]["replaced"]
        state = update(state)
        memory = state.algorithm_state[name]
        if before or not (memory["replaced"] and memory["began"]):
            return state
        return _with_new_optimizer_state(state, stages)

    def mean(state: State) -> State:
        # Until the first update it is no mean, but the weights at the start. An evaluation may wait for the device.
        return with_average(state, name, chosen_buffers) if int(state.algorithm_state[name]["count"]) else state

    def show_with_statistics(state: State, stages: LoopStages) -> State:
        result = mean(state)
        assert batchnorm_data is not None
        return result if result is state else update_batchnorm(result, batchnorm_data, task=stages.task)

    handlers: dict[object, Callable[..., State]] = {
        Event.FIT_START: resuming(name, lambda state: chosen_buffers.of(state.buffers)),
        updated_at(period): update_and_reset if reset_optimizer else update,
    }
    if evaluate:
        handlers[Event.EVAL_START, Event.PREDICT_START] = mean if batchnorm_data is None else show_with_statistics
    return Algorithm(name, handlers, init=begin)


def _refuse_misfits(
    start: Time,
    end: Time | None,
    replace: bool,
    reset_optimizer: bool,
    evaluate: bool,
    batchnorm_data: Iterable[Batch] | None,
) -> None:
    """
    Raises:
        ArgumentError: settings of :func:`swa` that do not go together.
    """
    if end is not None and end.unit is start.unit and end < start:
        raise ArgumentError(f"swa: end={str(end)!r} comes before start={str(start)!r}, so that nothing is averaged.")
    if replace and end is None:
        raise ArgumentError(
            'swa: replace=True needs an end, when the weights become their mean: end="1dur" for the last batch.'
        )
    if reset_optimizer and not replace:
        raise ArgumentError("swa: reset_optimizer=True without replace=True: the weights never become the mean.")
    if batchnorm_data is not None and (isinstance(batchnorm_data, Iterator) or not evaluate):
        reason = "it is an iterator, which the first evaluation would use up" if evaluate else "evaluate is False"
        raise ArgumentError(f"swa: batchnorm_data is for evaluations, and {reason}: give a list or a DataLoader.")


def _with_new_optimizer_state(state: State, stages: LoopStages) -> State:
    """The State with an optimizer that begins anew, from its parameters."""
    assert stages.optimizer is not None
    optimizer = state.model.served_by(stages.optimizer)
    guarded = stages.guard(state, ("init", "optimizer")) if is_users(optimizer.init) else nullcontext()
    with guarded:
        return state.replace(opt_state=stages.engine.init_opt_state(optimizer, state.model.trained(state.params)))
