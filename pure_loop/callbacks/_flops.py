"""Counts the floating-point operations of a step, by computing one beside training."""

from __future__ import annotations

from typing import Any

import attrs
import optree
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pure_loop.callback import Run
from pure_loop.precision import Precision
from pure_loop.stages import Stages
from pure_loop.stages.sizes import found_size
from pure_loop.state import State

__all__ = ["FlopCounter"]


@attrs.define
class FlopCounter:
    """Forward, loss and backward of a batch, once for each combination of shapes.

    Args:
        run: whose task, precision and microbatches.
    """

    run: Run
    _known: dict[tuple[Any, ...], int] = attrs.field(init=False, factory=dict)

    def __call__(self, state: State) -> int:
        """The floating-point operations of ``state.batch``: multiplications and additions of matrix products,
        convolutions and attention, as ``torch.utils.flop_counter`` counts them.
        """
        key = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in optree.tree_leaves(state.batch, namespace="pure_loop")
        )
        if key not in self._known:
            self._known[key] = self._count(state)
        return self._known[key]

    def _count(self, state: State) -> int:
        assert self.run.task is not None
        stages = Stages(
            task=self.run.task,
            precision=Precision.parse(self.run.precision),
            microbatch_size=self.run.microbatch_size or found_size(state),
        )
        fresh = state.replace(grads=None, loss=None, outputs=None, grad_norm=None, loss_scale=None)
        with FlopCounterMode(display=False) as counter:
            for index, microbatch in enumerate(stages.microbatches(state.batch)):
                step = stages.forward(fresh.replace(microbatch=microbatch), index=index)
                stages.backward(stages.loss(step, index=index))
        return int(counter.get_total_flops())
