"""What is refused: to compute beside training what ranks compute together, and members where one model is needed."""

from __future__ import annotations

from torch import nn

from pure_loop._internal.tree_ops import are_sharded
from pure_loop.callback import Run
from pure_loop.errors import ArgumentError
from pure_loop.state import State


def refuse_collectives(state: State, ranks: int, where: str, instead: str = "") -> None:
    """
    Args:
        state: its model would be computed on this rank alone.
        ranks: how many train together.
        where: the callback, for the error.
        instead: what to write instead, if there is anything.

    Raises:
        ArgumentError: its forward is a collective: parameters are sharded, or a module is a ``SyncBatchNorm``.
    """
    sharded = are_sharded(state.params)
    if sharded or (
        ranks > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in state.model.skeleton.modules())
    ):
        what = "sharded parameters" if sharded else "SyncBatchNorm on several ranks"
        raise ArgumentError(
            f"{where} computes a forward beside training on one rank, and a model with {what} can't be computed on one"
            f"{': ' if instead else '.'}{instead}"
        )


def refuse_members(run: Run, where: str, instead: str) -> None:
    """
    Args:
        run: what the callback is bound to.
        where: the callback, for the error.
        instead: what to write instead.

    Raises:
        ArgumentError: it is the run of an ensemble.
    """
    if run.members:
        raise ArgumentError(f"{where} needs one model, and this run has {run.members} members: {instead}")
