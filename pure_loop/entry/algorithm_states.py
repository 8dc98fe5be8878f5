"""Whether the algorithm states of a State are those of the algorithms that it is to be trained with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NoReturn

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.reprs import shape_and_dtype
from pure_loop.algorithm import Algorithm
from pure_loop.data.batch import leaves
from pure_loop.errors import AlgorithmStructureError, ResumeError
from pure_loop.random.guards import guard
from pure_loop.state import State

Path = tuple[Any, ...]


def refuse_other_algorithm_states(state: State, algorithms: Iterable[Algorithm]) -> None:
    """Refuse a State with an algorithm state of another structure than the algorithms' ``init`` returns for it.

    Of a State with members it is that of all for an algorithm that compares them, and that of the first for others.
    Tensors at the same place of both are compared. Numbers may differ; a tree may have further entries; a dtype may be
    wider, of the same kind; a dimension of size 0 in the result of ``init``, by which an algorithm declares that it
    grows, may have any size; so may values for a buffer of a shape that changes. If ``init`` makes a tensor under the
    name of a parameter, the State must have one, and its mapping may have no names that are not in the State. Of an
    algorithm of the library all that ``init`` makes has to be there, but for buffers; one of the user's may know how to
    go on without.

    ``init`` is called with tensors on the meta device, so it computes nothing; where it reads their numbers, nothing
    is compared.

    Raises:
        ResumeError: names the leaf, its value, and that of ``init``.
    """
    listed = list(algorithms)
    one = state if state.ensemble is None else state.member(0)
    _refuse_others(one, [item for item in listed if not item.across_members])
    if state.ensemble is not None:
        _refuse_others(state, [item for item in listed if item.across_members])


def _refuse_others(state: State, algorithms: Iterable[Algorithm]) -> None:
    requested = [item for item in algorithms if item.init is not None and item.name in state.algorithm_state]
    if not requested:
        return
    meta, names = _without_numbers(state), frozenset({*state.params, *state.buffers, *state.model.altered})
    for algorithm in requested:
        expected = _asked(algorithm, meta)
        if expected is not None:
            comparison = _Comparison(state, bool(algorithm.factory), names)
            comparison.refuse_other((algorithm.name,), state.algorithm_state[algorithm.name], expected[0])


def _without_numbers(state: State) -> State:
    durable = state.replace(batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    return map_tensors(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), durable)


def _asked(algorithm: Algorithm, state: State) -> tuple[object] | None:
    """The result of ``init`` for a State without numbers; None if it reads them."""
    assert algorithm.init is not None
    try:
        with guard(state, ("init", algorithm.name)):
            return (algorithm.init(state),)
    except Exception:
        # Reading numbers of the meta device has no error of its own, and an error of `init` itself is none of resuming,
        # which doesn't call it.
        return None


_MISSING = object()


@attrs.frozen
class _Comparison:
    """Compares the algorithm state in a State with what ``init`` makes.

    Attributes:
        whole: all of it has to be there, and not only tensors under names of parameters.
        names: of parameters, and of buffers, with those that are gone.
    """

    state: State
    whole: bool
    names: frozenset[str]

    def refuse_other(self, path: Path, value: PyTree, expected: PyTree) -> None:
        """
        Raises:
            ResumeError: the value, at this path of ``algorithm_state``, has another structure.
        """
        if not self._matches(path, value, expected):
            _refuse(path, f"{_described(value)}, and init makes {_described(expected)}")
        children, wanted = _children(value) or {}, _children(expected) or {}
        by_name = bool(wanted) and wanted.keys() <= self.names
        for key, child in wanted.items():
            # Buffers come and go.
            if key in children or not (by_name and key in self.state.buffers):
                self.refuse_other((*path, key), children.get(key, _MISSING), child)
        for key, child in children.items() if by_name else ():
            if (self.whole or isinstance(child, Tensor)) and key not in self.names:
                _refuse((*path, key), f"{_described(child)}, and the model has no parameter or buffer of that name")

    def _matches(self, path: Path, value: PyTree, expected: PyTree) -> bool:
        if isinstance(expected, Tensor):
            keys = path[1:]
            if isinstance(value, Tensor):
                return _fits(value, expected) or any(key in self.state.model.altered for key in keys)
            return not self.whole and not any(key in self.state.params for key in keys)
        if not self.whole:
            return True
        if isinstance(expected, Real):
            return isinstance(value, Real) or (isinstance(value, Tensor) and not value.ndim)
        return _children(expected) is None or isinstance(value, Mapping) is isinstance(expected, Mapping)


def _described(value: PyTree) -> str:
    kind = "missing" if value is _MISSING else type(value).__name__
    return shape_and_dtype(value) if isinstance(value, Tensor) else kind


def _refuse(path: Path, what: str) -> NoReturn:
    from pure_loop.checkpoint.validation import shortened  # only on the way to an error

    raise ResumeError(
        f"algorithm_state{''.join(f'[{shortened(key)}]' for key in path)} is {what}: it is of another model or "
        "algorithm, or was altered. Give the State that was trained with this one, or let it begin anew: pl.load(path, "
        f"model=model, exclude=[{f'algorithm_state/{path[0]}'!r}]), or state.replace(algorithm_state={{...}}) without "
        f"{path[0]!r}. (A tensor that grows begins with a dimension of size 0.)"
    )


def _children(tree: PyTree) -> Mapping[Any, PyTree] | None:
    """The items of a container by key or number; None: it is none."""
    if tree is None or optree.tree_is_leaf(tree, namespace=NAMESPACE):
        return None
    level: Any = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    return dict(zip(level.entries, level.children, strict=True))


def _fits(tensor: Tensor, expected: Tensor) -> bool:
    sizes = zip(tensor.shape, expected.shape, strict=False)
    if tensor.ndim != expected.ndim or any(size != init_size != 0 for size, init_size in sizes):
        return False
    # An average of float16 is kept in float32.
    same_kind = tensor.is_floating_point() == expected.is_floating_point()
    return same_kind and torch.promote_types(tensor.dtype, expected.dtype) is tensor.dtype


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The State with a function of each of its tensors."""
    tree: PyTree = state  # a node by its registration
    result = optree.tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree, namespace=NAMESPACE)
    assert isinstance(result, State)
    return result


def refuse_tensors_without_members(algorithm: str, place: str, value: PyTree, members: int) -> None:
    """
    Raises:
        AlgorithmStructureError: a tensor in the value, an algorithm's state, has no leading dimension of members.
    """
    for path, leaf in leaves(value, f"algorithm_state[{algorithm!r}]"):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != (members,):
            raise AlgorithmStructureError(
                f"algorithm {algorithm!r} {place}: {path} is a tensor of shape {tuple(leaf.shape)}, and each tensor of "
                f"a State with members has a leading dimension of members, here {members}: expand it, "
                "or keep a number of Python's."
            )
