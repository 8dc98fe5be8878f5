"""Whether what algorithms have remembered fits them: a State may come from a file that is not theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._pytree import NAMESPACE
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ResumeError
from pure_loop.state import State

__all__ = ["refuse_other_memories"]

Path = tuple[Any, ...]


def refuse_other_memories(state: State, algorithms: Iterable[Algorithm]) -> None:
    """Refuse a State whose algorithms' memory has other shapes or dtypes than their ``init`` gives for it.

    Compared are tensors at the same place of both. What may differ: numbers; further entries of a tree; a wider dtype
    of the same kind; a dimension that has size 0 in what ``init`` gives, by which an algorithm declares that it grows;
    what is kept of a buffer whose shape changes. Where ``init`` makes a tensor under the name of a parameter there has
    to be one, and its mapping may have no names that the State has not.

    ``init`` is called with tensors on the meta device, so it computes nothing; one that reads their numbers can't be
    asked, and its memory is taken as it is.

    Raises:
        ResumeError: names the leaf, what it is, and what ``init`` gives.
    """
    asked = [each for each in algorithms if each.init is not None and each.name in state.algorithm_state]
    if not asked:
        return
    meta = _without_numbers(state)
    changing = set(state.model.altered)
    for algorithm in asked:
        expected = _asked(algorithm, meta)
        if expected is not None:
            _compare(algorithm.name, state, _tensors(expected[0]), changing)


def _without_numbers(state: State) -> State:
    def of(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    durable: Any = state.replace(batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    made: Any = optree.tree_map(of, durable, namespace=NAMESPACE)
    return made  # type: ignore[no-any-return]


def _asked(algorithm: Algorithm, state: State) -> tuple[Any] | None:
    """What ``init`` gives for a State without numbers; None if it needs them."""
    assert algorithm.init is not None
    try:
        with torch.random.fork_rng(devices=[]):
            return (algorithm.init(state),)
    except Exception:
        # Reading numbers of the meta device has no error of its own, and an error of `init` itself is none of resuming,
        # which doesn't call it.
        return None


def _compare(name: str, state: State, wanted: Mapping[Path, Tensor], changing: set[str]) -> None:
    found = _tensors(state.algorithm_state[name])
    names = {*state.params, *state.buffers}

    def refuse(path: Path, what: str, instead: str) -> None:
        leaf = "".join(f"[{key!r}]" for key in (name, *path))
        raise ResumeError(
            f"algorithm_state{leaf} is {what}, and {instead}: the memory is of another model or algorithm, or was "
            "altered. Give the State that was trained with this one, or let it start afresh: state.replace("
            f"algorithm_state={{...}}) without {name!r}. (A memory that grows begins with a dimension of size 0.)"
        )

    for path, tensor in wanted.items():
        if path not in found:
            if any(key in state.params for key in _texts(path)):
                refuse(path, "no tensor", f"init makes one of {_kind(tensor)}")
        elif changing.isdisjoint(_texts(path)) and not _fits(found[path], tensor):
            refuse(path, _kind(found[path]), f"init makes {_kind(tensor)}")
    by_name = {path[:-1] for path in wanted if path and path[-1] in names}
    for path, tensor in found.items():
        if path not in wanted and path and path[:-1] in by_name and path[-1] not in names:
            refuse(path, _kind(tensor), "the model has no parameter or buffer of that name")


def _fits(tensor: Tensor, expected: Tensor) -> bool:
    sizes = zip(tensor.shape, expected.shape, strict=False)
    if tensor.ndim != expected.ndim or any(size != other != 0 for size, other in sizes):
        return False
    # An average of float16 is kept in float32.
    same_kind = tensor.is_floating_point() == expected.is_floating_point()
    return same_kind and torch.promote_types(tensor.dtype, expected.dtype) is tensor.dtype


def _tensors(tree: Any) -> Mapping[Path, Tensor]:
    paths, leaves, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    return {path: leaf for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)}


def _texts(path: Path) -> Iterable[str]:
    return (key for key in path if isinstance(key, str))


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
