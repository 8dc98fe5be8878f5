"""Lookahead: slow weights take a step towards the trained ones, which start again from there.

With the slow weights ``s``, which start as the first weights, and the weights ``w`` after every k-th batch::

    s' = s + rate (w - s)
    w' = s'                                https://arxiv.org/abs/1907.08610
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from pure_loop._internal.tree_ops import map_local
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._averages import finite_or
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.ranges import Above, AtLeast, checked
from pure_loop.state import State

__all__ = ["lookahead", "step_towards"]


@torch.no_grad()
def step_towards(slow: Mapping[str, Tensor], fast: Mapping[str, Tensor], rate: float = 0.5) -> FrozenDict[str, Tensor]:
    """``slow + rate (fast - slow)``, name by name; ``fast`` where that isn't finite, as between two infinities.

    Args:
        slow: names to tensors. Those that are neither floating point nor complex are taken from ``fast``.
        fast: tensors of the same names, shapes and dtypes.
        rate: how large the step is; 1 gives ``fast``.

    >>> step_towards({"w": torch.tensor([0.0])}, {"w": torch.tensor([1.0])}, 0.25)["w"]
    tensor([0.2500])
    """
    # What isn't trained is the very tensor that it was.
    names = [
        name for name, old in slow.items() if old is not fast[name] and (old.is_floating_point() or old.is_complex())
    ]
    if not names:
        return FrozenDict(fast)

    def lerp(before: list[Tensor], latest: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_lerp(before, latest, rate))

    moved = map_local(lerp, [slow[name] for name in names], [fast[name] for name in names])
    return FrozenDict({**fast, **finite_or(dict(zip(names, moved, strict=True)), fast)})


@checked
def lookahead(
    interval: Annotated[int, AtLeast(1, typical=(1, 3))] = 5,
    rate: Annotated[float, Above(0)] = 0.5,
    *,
    name: str = "lookahead",
) -> Algorithm:
    """Lookahead: after every ``interval`` batches the weights go back to a part of the way that they came.

    At BATCH_END. The optimizer's momentum stays as it is. Buffers, such as BatchNorm's statistics, are those of
    the trained weights; evaluations between two steps see the trained weights, too.

    Args:
        interval: how many batches lie between two steps of the slow weights.
        rate: how much of the way they go; 0.5 and 0.8 are usual.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> stream = pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss,
    ...                 optimizer=pl.optim.sgd(lr=0.1), max_duration="2ep", algorithms=[lookahead(interval=2)])
    >>> state = pl.run(stream)
    >>> bool((state.params["weight"] == state.algorithm_state["lookahead"]["weight"]).all())
    True
    """

    def step(state: State) -> State:
        if state.timestamp.batch % interval:
            return state
        params = step_towards(state.algorithm_state[name], state.params, rate)
        return state.remember(name, params).replace(params=params)

    return Algorithm(name, {Event.BATCH_END: step}, init=lambda state: FrozenDict(state.params))
