"""``largest_microbatch``: how many samples go through a forward and a backward at once on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import attrs
import torch
from torch import nn

from pure_loop._internal.closing import closing
from pure_loop._internal.suggestions import arguments_of_call, refuse_misfit, teaching
from pure_loop.algorithm import AlgorithmLike
from pure_loop.distributed.parallel import Parallel
from pure_loop.entry.assembly import assemble, start
from pure_loop.entry.auto_size import AutoSize, LargestSize
from pure_loop.entry.fit import fit
from pure_loop.entry.parallel import announced
from pure_loop.entry.settings import Settings
from pure_loop.errors import DataError
from pure_loop.event import Event
from pure_loop.gradients import ClipFunction
from pure_loop.optim import Optimizer
from pure_loop.precision import PrecisionName
from pure_loop.stages.settings import found_size
from pure_loop.state import Loss, State
from pure_loop.task import Task


@announced
@teaching
def largest_microbatch(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Any],
    *,
    loss: Callable[[Any, Any], Loss] | Task | None = None,
    optimizer: Optimizer,
    task: Task | None = None,
    precision: PrecisionName = "fp32",
    seed: int = 0,
    algorithms: Iterable[AlgorithmLike] = (),
    clip_grad: float | ClipFunction | None = None,
    nonfinite: Literal["error", "skip"] = "error",
    device: torch.device | str | None = None,
    parallel: Literal["replicate"] | Parallel | None = None,
    **others: Any,
) -> int:
    """The largest ``microbatch_size`` with which the first batch of the data fits into memory.

    Forwards, losses and backwards of the whole batch are computed on branches of the State, with the algorithms, and
    their results dropped: nothing is trained, and ``model_or_state`` stays as it was. The optimizer state is there, as
    in training; the update, for which memory depends on no microbatch, is not computed. Sizes are bisected: a batch of
    n samples is computed about log2(n) times.

    Args:
        model_or_state: a module, or a State of a boundary.
        train_dataloader: the data; only its first batch is loaded (of a State: the next one). For one batch write
            ``[batch]``.
        loss, optimizer, task, precision, seed, algorithms, clip_grad, nonfinite, device: those of
            :func:`pure_loop.fit`.
        parallel: with several ranks, ``"replicate"``: the size that fits on all of them. Every rank calls this.
        **others: the other arguments of :func:`pure_loop.fit`, so that one dict of settings serves both. They change
            no forward or backward, and have no effect.

    Returns:
        The size, from 1 to the number of samples of the batch.

    Raises:
        torch.OutOfMemoryError, RuntimeError: one sample is too much.
        ArgumentError, ArgumentTypeError, ModelError, DataError: as the call of ``fit``.

    >>> import torch, pure_loop as pl
    >>> class Limited(torch.nn.Linear):
    ...     def forward(self, x):
    ...         if len(x) > 5:
    ...             raise torch.OutOfMemoryError(f"CUDA out of memory: {len(x)} rows")
    ...         return super().forward(x)
    >>> batch = torch.ones(64, 2), torch.zeros(64, 1)
    >>> pl.largest_microbatch(
    ...     Limited(2, 1), [batch], loss=torch.nn.functional.mse_loss, optimizer=pl.optim.adamw(lr=0.1)
    ... )
    5
    """
    arguments = {**locals()}
    del arguments["others"]
    refuse_misfit(fit, (model_or_state, train_dataloader), {"optimizer": optimizer, "max_duration": "1ep", **others})
    if isinstance(model_or_state, State):
        arguments["model_or_state"] = model_or_state.replace(stop=False)
    changes = {
        "microbatch_size": "auto",
        "max_duration": "1000000000ba",  # which no State has reached
        "watch": {Event.BATCH_START},
        "donate": False,
    }
    assembly = assemble(Settings.of(arguments_of_call(fit, (), {**arguments, **changes})))
    auto_size = assembly.fit.strategy
    assert isinstance(auto_size, AutoSize)
    # In place of the strategy that halves: around it, both would try each batch.
    strategy = LargestSize(assembly.fit.stages, auto_size.strategy.uncompiled)
    searching = attrs.evolve(assembly.fit, strategy=strategy)
    with closing(start(attrs.evolve(assembly, fit=searching))) as stream:
        size = next((found_size(state) for _, state in stream), None)
    if size is None:
        raise DataError("train_dataloader gave no batch after those that the State has seen: give [batch].")
    return size
