"""Random numbers of a compiled step: drawn outside the graph, by the seeds and kernels that eager steps use.

A draw that depends on no data (a dropout mask) needs nothing of the graph, so it becomes an input, drawn before each
call under the seed of the stage in which it stood, in the order in which it stood there: the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop.random import derive, seeded
from pure_loop.time import Timestamp

__all__ = ["DRAWS", "DROPOUT", "Draw", "Group", "draw_all", "is_draw"]

_aten: Any = torch.ops.aten
# In place, with parameters that are numbers: what was in the tensor doesn't matter.
_FILLING = frozenset(
    {
        *(_aten.bernoulli_.float, _aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default),
        *(_aten.random_.default, _aten.random_.to, _aten.cauchy_.default),
        *(_aten.log_normal_.default, _aten.geometric_.default),
    }
)
# New tensors of a size.
_MAKING = frozenset(
    {
        *(_aten.rand.default, _aten.randn.default, _aten.randint.default, _aten.randint.low, _aten.randperm.default),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default),
        *(_aten.randint_like.low_dtype,),
    }
)
# What a dropout layer is traced as; in eager it is this only on accelerators.
DROPOUT = _aten.native_dropout.default
DRAWS = _FILLING | _MAKING | {DROPOUT}


def is_draw(node: torch.fx.Node) -> bool:
    """Whether this operation of a graph draws random numbers, liftable or not."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    # Attention may drop out, and mostly doesn't.
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p", 0.0))


@attrs.frozen(eq=False)
class Group:
    """A stage of a microbatch: everything drawn in it comes from one seed, however often it is gone through."""

    stage: str
    index: int
    slot: int


@attrs.frozen
class Draw:
    """One input of a graph that is drawn before each call.

    Attributes:
        group: whose seed it is drawn by.
        make: draws it.
    """

    group: Group
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, group: Group, target: Any, args: Sequence[Any], kwargs: dict[str, Any], like: Tensor) -> Draw:
        """
        Args:
            like: a tensor (a fake one will do) of the shape, strides, dtype and device of what is drawn.
        """
        if target is DROPOUT:
            return cls(group, _mask(args[1], like))
        size, stride, dtype, device = tuple(like.shape), tuple(like.stride()), like.dtype, like.device
        if target in _FILLING:
            rest = tuple(args[1:])

            def fill() -> Tensor:
                empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
                return target(empty, *rest, **kwargs)  # type: ignore[no-any-return]

            return cls(group, fill)
        takes_tensor = bool(args) and isinstance(args[0], torch.fx.Node)

        def make() -> Tensor:
            first = (torch.empty_strided(size, stride, dtype=dtype, device=device),) if takes_tensor else ()
            return target(*first, *args[len(first) :], **kwargs)  # type: ignore[no-any-return]

        return cls(group, make)


def _mask(p: float, like: Tensor) -> Callable[[], Tensor]:
    """1 where dropout keeps an element, else 0, as the layer draws it in eager."""
    size, stride, dtype, device = tuple(like.shape), tuple(like.stride()), like.dtype, like.device

    def make() -> Tensor:
        empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if device.type == "cpu":
            return empty.bernoulli_(1 - p)
        return _aten.native_dropout(empty.fill_(1), p, True)[1].to(dtype)  # type: ignore[no-any-return]

    return make


def draw_all(
    draws: Sequence[Draw], seed: int, timestamps: Sequence[Timestamp], rank: int, device: torch.device, first: int = 0
) -> list[Tensor]:
    """The draws of one call, each group under its seed; ``first`` is the number of the first microbatch in it."""
    found: list[Tensor] = []
    index = 0
    while index < len(draws):
        group = draws[index].group
        t = timestamps[group.slot]
        with seeded(derive(seed, group.stage, t.epoch, t.batch, first + group.index, rank), device):
            while index < len(draws) and draws[index].group is group:
                found.append(draws[index].make())
                index += 1
    return found
