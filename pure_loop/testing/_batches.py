"""Batches of every shape that counting and splitting take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pure_loop._internal.arguments import check_flag, check_integer
from pure_loop.testing._arguments import check_choices, check_range

__all__ = ["DTYPES", "batches"]

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
"""Of the tensors in batches, the commonest first."""

_ALL_DTYPES = (*DTYPES, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8)

_LEAVES = ("tensor", "texts", "whole")
_CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "tuple": tuple,
    "dict": lambda items: dict(zip(("inputs", "targets", "mask"), items, strict=False)),
    "list": list,
}
_WHOLE: tuple[Callable[[], Any], ...] = (lambda: None, lambda: 0.5, lambda: "text", lambda: torch.tensor(1.0))


def batches(
    *, min_samples: int = 1, max_samples: int = 6, dtypes: Sequence[torch.dtype] = DTYPES, nested: bool = True
) -> st.SearchStrategy[Any]:
    """Batches of the shapes that a task counts and splits.

    Pairs of tensors, ``(inputs, targets)``; tensors alone; tuples, lists and dicts, nested too, of tensors and of what
    may stand beside them: a text for each sample, and numbers, strings, None and 0-d tensors, which belong to a batch
    as a whole. They shrink to ``(tensor([0.]), tensor([0.]))``.

    Args:
        min_samples, max_samples: how many samples a batch holds.
        dtypes: of the tensors.
        nested: whether there are others than pairs of tensors.

    Raises:
        ArgumentError: a number out of range, a range without a number in it, or no dtype.
        ArgumentTypeError: an argument of another type.

    >>> from hypothesis import find
    >>> from pure_loop.data.samples import num_samples
    >>> find(batches(), lambda batch: num_samples(batch) == 2)
    (tensor([0., 0.]), tensor([0., 0.]))
    """
    least = check_integer("min_samples", min_samples, where="batches", least=1, example="batches(min_samples=1)")
    most = check_integer("max_samples", max_samples, where="batches", least=1, example="batches(max_samples=6)")
    check_range("batches", "min_samples", least, "max_samples", most)
    chosen = check_choices("batches", "dtypes", dtypes, _ALL_DTYPES)
    return _batches(least, most, chosen, check_flag("nested", nested, where="batches"))


@st.composite
def _batches(draw: st.DrawFn, least: int, most: int, dtypes: Sequence[torch.dtype], nested: bool) -> Any:
    samples = draw(st.integers(least, most))

    def tensor() -> Tensor:
        shape = (samples, *draw(st.lists(st.integers(1, 3), max_size=2)))
        return _filled(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)))

    def container(kind: str, depth: int, first: Callable[[], object]) -> Any:
        more = draw(st.sampled_from((1, 2, 0)))
        return _CONTAINERS[kind]([first(), *(node(depth) for _ in range(more))])

    def node(depth: int) -> Any:
        kind = draw(st.sampled_from((*_LEAVES, *_CONTAINERS) if depth else _LEAVES))
        if kind == "tensor":
            return tensor()
        if kind == "texts":
            return [f"text {number}" for number in range(samples)]
        if kind == "whole":
            return draw(st.sampled_from(_WHOLE))()
        return container(kind, depth - 1, lambda: node(depth - 1))

    kind = draw(st.sampled_from(("pair", *_CONTAINERS, "tensor"))) if nested else "pair"
    # Drawn in any case: what takes fewer draws is simpler, and nothing is to be simpler than a pair.
    pair = tensor(), tensor()
    if kind == "pair":
        return pair
    # A tensor at the head, so that there are samples to count.
    return pair[0] if kind == "tensor" else container(kind, 2, lambda: pair[0])


def _filled(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Zeros for seed 0; else numbers of this seed, none of them negative where they may be indices."""
    if not seed:
        return torch.zeros(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(2 if dtype is torch.bool else 5, shape, generator=generator).to(dtype)
