"""States compared bit by bit: which leaf differs, and what it is on either side."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

import attrs
import optree
import torch
from torch import Tensor

from pure_loop._internal.bits import same
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop.state import State
from pure_loop.time import Timestamp
from pure_loop.verify.leaves import map_leaves

_WALL_CLOCK = frozenset({"total_seconds", "epoch_seconds", "batch_seconds"})
_TIMESTAMPS = frozenset({"timestamp", "previous_timestamp"})
_MISSING = "(no such leaf)"
_COUNTS = tuple(field.name for field in attrs.fields(Timestamp) if field.name not in _WALL_CLOCK)

Path: TypeAlias = tuple[object, ...]


def shown(value: object) -> str:
    """A value in one line: a tensor by its first numbers, dtype and shape.

    >>> import torch
    >>> shown(torch.zeros(2, 3))
    'tensor([0., 0., 0., ...]) float32 (2, 3)'
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if len(text) <= 100 else f"{text[:97]}..."
    flat = value.detach().flatten()
    numbers = [f"{number:.6g}" if isinstance(number, float) else str(number) for number in flat[:3].tolist()]
    numbers = [f"{n}." if value.is_floating_point() and n.lstrip("-").isdigit() else n for n in numbers]
    more = ", ..." if flat.numel() > 3 else ""
    shape = f" {tuple(value.shape)}" if value.ndim else ""
    dtype = str(value.dtype).removeprefix("torch.")
    listed = ", ".join(numbers) + more
    return f"tensor({f'[{listed}]' if value.ndim else listed}) {dtype}{shape}"


def apart(value: object, wanted: object) -> str:
    """Where two values differ that are shown alike: the first number of tensors, in full."""
    if not (isinstance(value, Tensor) and isinstance(wanted, Tensor)) or _kind(value) != _kind(wanted):
        return f"{value!r} and {wanted!r}"
    a, b = value.detach().flatten(), wanted.detach().flatten()
    index = bisect_left(range(a.numel()), True, key=lambda last: not same(a[: last + 1], b[: last + 1]))
    return f"number {index} is {a[index].item()!r}, and should be {b[index].item()!r}"


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


@attrs.frozen(eq=False)
class Difference:
    """A leaf that two trees have differently.

    Attributes:
        leaf: where it is, as code: ``state.params['weight']``.
        given: what it is in the first tree.
        wanted: what it is in the second one.
    """

    leaf: str
    given: object
    wanted: object

    def __str__(self) -> str:
        value, wanted = shown(self.given), shown(self.wanted)
        if value == wanted:
            wanted += f": {apart(self.given, self.wanted)}"
        return f"{self.leaf} is {value}, and should be {wanted}"


def is_wall_clock(path: Path) -> bool:
    """Whether the leaf of a State at this path says what a clock said, which no two runs have in common.

    >>> is_wall_clock(("timestamp", "total_seconds")), is_wall_clock(("algorithm_state", "mine", "total_seconds"))
    (True, False)
    """
    return len(path) > 1 and path[0] in _TIMESTAMPS and path[-1] in _WALL_CLOCK


def _leaves(tree: PyTree) -> dict[Path, object]:
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE, none_is_leaf=True)
    return dict(zip(paths, values, strict=True))


def _code(tree: PyTree, path: Path, name: str) -> str:
    """Where a leaf is, as code that reads it."""
    for result, accessor in zip(
        optree.tree_paths(tree, namespace=NAMESPACE, none_is_leaf=True),
        optree.tree_accessors(tree, namespace=NAMESPACE, none_is_leaf=True),
        strict=True,
    ):
        if result == path:
            return accessor.codify(name)
    return name + "".join(f"[{key!r}]" for key in path)


def differences(
    argument: object, wanted: object, *, name: str = "state", without: frozenset[str] = frozenset()
) -> list[Difference]:
    """The leaves in which two States, or other trees, are not equal; wall-clock times don't count.

    Tensors are equal where all their bits are: 0.0 is not -0.0, and no rounding is allowed for. NaN equals NaN.

    Args:
        argument, wanted: the trees.
        name: what to call the tree.
        without: fields of the State to leave out.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(1, 1, bias=False))
    >>> other = state.replace(params={"weight": torch.tensor([[2.0]])})
    >>> [difference.leaf for difference in differences(state, other)]
    ["state.params['weight']"]
    """
    # Mostly there are none, and paths of leaves take longer than all else.
    try:
        equal = argument is wanted or _same_trees(argument, wanted)
    except (RuntimeError, ValueError):  # == of an object that holds tensors or arrays
        equal = False
    return [] if equal else list(_differences(argument, wanted, name, without))


def _differences(value: object, wanted: object, name: str, without: frozenset[str]) -> Iterator[Difference]:
    leaves, wanted_leaves = _leaves(value), _leaves(wanted)
    for path in dict.fromkeys([*leaves, *wanted_leaves]):
        if path and (path[0] in without or is_wall_clock(path)):
            continue
        a, b = leaves.get(path, _MISSING), wanted_leaves.get(path, _MISSING)
        if not same(a, b):
            yield Difference(_code(value if path in leaves else wanted, path, name), a, b)


def close(value: object, wanted: object, *, tolerance: float, name: str = "state") -> Difference | None:
    """The first leaf in which two trees differ by more than rounding.

    Args:
        value, wanted: the trees.
        tolerance: how far numbers may be apart, relative to the greatest of their tensor.
        name: what to call the tree.
    """
    for result in _differences(value, wanted, name, frozenset()):
        a, b = result.given, result.wanted
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or _kind(a) != _kind(b):
            if isinstance(a, float) and isinstance(b, float) and abs(a - b) <= tolerance * max(abs(a), abs(b), 1.0):
                continue
            return result
        a, b = a.detach().double(), b.detach().double()
        if not bool(((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1.0)).item()):
            return result
    return None


def _copied(leaf: object) -> object:
    """A leaf that can be written to in place, by value."""
    return copy.deepcopy(leaf) if isinstance(leaf, set | bytearray) or hasattr(leaf, "__array__") else leaf


def _values(state: State) -> list[object]:
    tree: PyTree = state
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def _name(state: State, index: int) -> str:
    """A leaf of a State as code, by its place among :func:`_values`."""
    tree: PyTree = state
    return optree.tree_accessors(tree, namespace=NAMESPACE)[index].codify("state")


class Comparer:
    """Compares the States of two streams that are kept, quickly: what they share with earlier ones is known already.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(1, 1))
    >>> Comparer().equal(state, state.replace(loss=torch.tensor(1.0)))
    False
    """

    def __init__(self) -> None:
        self._equal: set[tuple[int, int]] = set()

    def equal(self, value: State, wanted: State) -> bool:
        """Whether they are bitwise equal, wall-clock times excepted; True is sure, :func:`differences` looks again."""
        if type(value) is not type(wanted):
            return False
        for name in (field.name for field in attrs.fields(type(value))):  # a class of the user's has more
            a, b = getattr(value, name), getattr(wanted, name)
            if a is b or name == "model":
                continue
            if isinstance(a, Timestamp) and isinstance(b, Timestamp):
                if _counts(a) != _counts(b):
                    return False
                continue
            pair = id(a), id(b)
            if pair in self._equal:
                continue
            if not _same_trees(a, b):
                return False
            if isinstance(a, Tensor | dict) and isinstance(b, Tensor | dict):
                # Kept alive by their streams, so that no others can have these ids.
                self._equal.add(pair)
        return True


def _counts(timestamp: Timestamp) -> list[object]:
    return [getattr(timestamp, name) for name in _COUNTS]


def _same_trees(a: PyTree, b: PyTree) -> bool:
    leaves_a, spec_a = optree.tree_flatten(a, namespace=NAMESPACE)
    leaves_b, spec_b = optree.tree_flatten(b, namespace=NAMESPACE)
    return spec_a == spec_b and all(a is b or same(a, b) for a, b in zip(leaves_a, leaves_b, strict=True))


class Snapshot:
    """A State by value, to see later whether it was written to.

    >>> import torch, pure_loop as pl
    >>> state = pl.State.create(torch.nn.Linear(1, 1, bias=False))
    >>> snapshot = Snapshot(state)
    >>> _ = state.params["weight"].data.add_(1)
    >>> snapshot.changed().leaf
    "state.params['weight']"
    """

    __slots__ = ("_leaves", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self._leaves = [
            (leaf, leaf.detach().clone(), leaf.requires_grad, len(leaf._backward_hooks or ()))
            if isinstance(leaf, Tensor)
            else (_copied(leaf), None, False, 0)
            for leaf in _values(state)
        ]

    def changed(self) -> Difference | None:
        """The first leaf that is not what it was; ``given`` is what it is now, ``wanted`` what it was."""
        leaves = _values(self.state)
        if len(leaves) != len(self._leaves):
            return Difference("the number of leaves of the state", len(leaves), len(self._leaves))
        for index, (leaf, (before, value, required, hooks)) in enumerate(zip(leaves, self._leaves, strict=True)):
            if value is None:
                if leaf is not before and not same(leaf, before):
                    return Difference(_name(self.state, index), leaf, before)
                continue
            if not isinstance(leaf, Tensor) or not same(leaf, value):
                return Difference(_name(self.state, index), leaf, value)
            if leaf.requires_grad != required:
                return Difference(f"{_name(self.state, index)}.requires_grad", leaf.requires_grad, required)
            if leaf.is_leaf and leaf.grad is not None:
                return Difference(f"{_name(self.state, index)}.grad", leaf.grad, None)
            if len(leaf._backward_hooks or ()) != hooks:
                return Difference(f"the hooks of {_name(self.state, index)}", len(leaf._backward_hooks or ()), hooks)
        return None


def _without_tensors(state: State) -> State:
    """A State with the same leaves by name, in which one without numbers stands for each tensor."""
    absent = torch.empty((), device="meta")
    return map_leaves(lambda leaf: absent if isinstance(leaf, Tensor) else leaf, state)


class Keeper:
    """Many States by value; a tensor that several of them share is copied once.

    Args:
        states: whether it keeps the States themselves, and not only each of their tensors.

    >>> import torch, pure_loop as pl
    >>> state, keeper = pl.State.create(torch.nn.Linear(1, 1, bias=False)), Keeper()
    >>> keeper.keep(state)
    >>> _ = state.params["weight"].data.add_(1)
    >>> keeper.changed()[1].leaf
    "state.params['weight']"
    """

    def __init__(self, *, states: bool = True) -> None:
        self._states = states
        self._tensors: dict[int, tuple[Tensor, Tensor, State, int]] = {}

    def keep(self, state: State) -> None:
        """Remember what it is now."""
        holder = state if self._states else _without_tensors(state)
        for index, leaf in enumerate(_values(state)):
            if isinstance(leaf, Tensor) and id(leaf) not in self._tensors:
                # Held, so that no other tensor gets its id.
                self._tensors[id(leaf)] = leaf, leaf.detach().clone(), holder, index

    def changed(self) -> tuple[State, Difference] | None:
        """The first State that has a tensor which is not what it was, and the leaf."""
        for leaf, value, state, index in self._tensors.values():
            if not same(leaf, value):
                return state, Difference(_name(state, index), leaf, value)
        return None
