"""Checks that algorithm state fits the algorithms: a State may come from a file of another run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE
from pure_loop.algorithm import Algorithm
from pure_loop.errors import ResumeError
from pure_loop.state import State

__all__ = ["refuse_other_memories"]

Path = tuple[Any, ...]


def refuse_other_memories(state: State, algorithms: Iterable[Algorithm]) -> None:
    """Refuse a State whose algorithm state has other shapes or dtypes than the algorithms' ``init`` returns for it.

    Tensors at the same place of both are compared. Numbers may differ; a tree may have further entries; a dtype may be
    wider, of the same kind; a dimension of size 0 in the result of ``init``, by which an algorithm declares that it
    grows, may have any size; so may values for a buffer whose shape changes. If ``init`` makes a tensor under the name
    of a parameter, the State must have one, and its mapping may have no names that are not in the State.

    ``init`` is called with tensors on the meta device, so it computes nothing; where it reads their numbers, nothing
    is compared.

    Raises:
        ResumeError: names the leaf, its value, and that of ``init``.
    """
    requested = [item for item in algorithms if item.init is not None and item.name in state.algorithm_state]
    if not requested:
        return
    meta = _without_numbers(state)
    changing = set(state.model.altered)
    for algorithm in requested:
        expected = _asked(algorithm, meta)
        if expected is not None:
            _compare(algorithm.name, state, _tensors(expected[0]), changing)


def _without_numbers(state: State) -> State:
    def of(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf

    durable: Any = state.replace(batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    result: Any = optree.tree_map(of, durable, namespace=NAMESPACE)
    return result  # type: ignore[no-any-return]


def _asked(algorithm: Algorithm, state: State) -> tuple[Any] | None:
    """The result of ``init`` for a State without numbers; None if it reads them."""
    assert algorithm.init is not None
    try:
        with torch.random.fork_rng(devices=[]):
            return (algorithm.init(state),)
    except Exception:
        # Reading numbers of the meta device has no error of its own, and an error of `init` itself is none of resuming,
        # which doesn't call it.
        return None


def _compare(name: str, state: State, wanted: Mapping[Path, Tensor], changing: set[str]) -> None:
    result = _tensors(state.algorithm_state[name])
    names = {*state.params, *state.buffers}

    def refuse(path: Path, what: str, instead: str) -> None:
        leaf = "".join(f"[{key!r}]" for key in (name, *path))
        raise ResumeError(
            f"algorithm_state{leaf} is {what}, and {instead}: the memory is of another model or algorithm, or was "
            "altered. Give the State that was trained with this one, or let it start afresh: state.replace("
            f"algorithm_state={{...}}) without {name!r}. (A memory that grows begins with a dimension of size 0.)"
        )

    for path, tensor in wanted.items():
        if path not in result:
            if any(key in state.params for key in _texts(path)):
                refuse(path, "no tensor", f"init makes one of {_kind(tensor)}")
        elif changing.isdisjoint(_texts(path)) and not _fits(result[path], tensor):
            refuse(path, _kind(result[path]), f"init makes {_kind(tensor)}")
    by_name = {path[:-1] for path in wanted if path and path[-1] in names}
    for path, tensor in result.items():
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
