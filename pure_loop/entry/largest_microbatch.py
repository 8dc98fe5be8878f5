"""``largest_microbatch``: how many samples go through a forward and a backward at once on this device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import attrs
from torch import nn

from pure_loop._internal.closing import closing
from pure_loop._internal.suggestions import arguments_of_call, passing_on, teaching
from pure_loop.entry.assembly import assemble, start
from pure_loop.entry.auto_size import AutoSize, LargestSize
from pure_loop.entry.fit import FitOptions, fit
from pure_loop.entry.parallel import announced
from pure_loop.entry.settings import Settings
from pure_loop.errors import DataError
from pure_loop.event import Event
from pure_loop.members.ensemble import refuse_several
from pure_loop.stages.settings import found_size
from pure_loop.state import State

# Those that change a forward or a backward.
_USED = ("loss", "optimizer", "precision", "seed", "algorithms", "clip_grad", "nonfinite", "device", "parallel")


@announced
@teaching
@passing_on(fit, optional=["max_duration"])
def largest_microbatch(
    model_or_state: nn.Module | State,
    train_dataloader: Iterable[Any],
    **settings: Unpack[FitOptions],
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
        **settings: the other arguments of :func:`pure_loop.fit`. Those that change no forward or backward have no
            effect, and ``max_duration`` may be left out. With several ranks and ``parallel="replicate"`` every rank
            calls this, and the size fits on all of them.

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
    refuse_several(model_or_state, "largest_microbatch")
    begun = model_or_state.replace(stop=False) if isinstance(model_or_state, State) else model_or_state
    changes = {
        "microbatch_size": "auto",
        "max_duration": "1000000000ba",  # which no State has reached
        "watch": {Event.BATCH_START},
        "donate": False,
    }
    used = {name: value for name, value in settings.items() if name in _USED}
    assembly = assemble(Settings.of(arguments_of_call(fit, (begun, train_dataloader), {**used, **changes})))
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
