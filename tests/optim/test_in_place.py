"""``overwrite`` gives bit for bit what ``update`` gives, in the tensors that it is given; ``update`` writes to none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import attrs
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pure_loop.errors import ArgumentError, ResumeError
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer, adam, adamw, from_torch, lamb, lion, master_weights, muon, partition, sgd
from pure_loop.schedules import linear
from pure_loop.time import Timestamp
from tests.support.optimizing import ELEMENTWISE, RULES, assert_same

FALLING = linear(0.5, 0.1, "4ba")
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: sgd(FALLING, weight_decay=0.1),
    "momentum": lambda: sgd(0.1, momentum=linear(0.0, 0.9, "4ba"), nesterov=True),
    "dampening": lambda: sgd(0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": lambda: adam(FALLING, amsgrad=True, weight_decay=0.1, maximize=True),
    "adamw": lambda: adamw(0.1, betas=(linear(0.5, 0.9, "4ba"), 0.99), independent_decay=True),
    "lion": lambda: lion(0.1, weight_decay=0.1),
    "lamb": lambda: lamb(0.1, weight_decay=0.1),
    "muon": lambda: muon(0.1),
    "partition": lambda: partition(
        {"a": adamw(), "b": sgd(momentum=0.9)}, label=lambda name, tensor: "a" if tensor.ndim > 1 else "b"
    ),
    "master_weights": lambda: master_weights(adamw(0.1)),
    "ASGD": lambda: from_torch(torch.optim.ASGD, lr=0.1),
    "Adagrad": lambda: from_torch(torch.optim.Adagrad, lr=0.1),
}
OPTIMIZERS = {**ELEMENTWISE, **OPTIMIZERS}
CLASSES = ("ASGD", "Adagrad")


@attrs.frozen
class Drawn:
    """A parameter: how it and its gradients lie in memory, and in which steps it has one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    kind_of_gradient: str
    used: tuple[bool, ...]
    is_leaf: bool

    def tensor(self, generator: torch.Generator, kind: str) -> Tensor:
        """Random numbers: contiguous, transposed, every other element of a tensor, or lazily negative."""
        numbers = torch.randn((2, *self.shape), generator=generator, dtype=torch.float64)
        dense = torch.complex(*numbers).to(self.dtype) if self.dtype.is_complex else numbers[0].to(self.dtype)
        if kind == "transposed":
            return dense.mT.contiguous().mT if dense.ndim > 1 else dense
        if kind == "spread":
            wide = torch.zeros(*self.shape, 2, dtype=self.dtype)
            wide[..., 0] = dense
            return wide[..., 0]
        return torch._neg_view(dense) if kind == "negative" else dense


def drawn(*, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> st.SearchStrategy[list[Drawn]]:
    kinds = ["contiguous", "transposed", "spread"]
    one = st.builds(
        Drawn,
        st.sampled_from(shapes),
        st.sampled_from(dtypes),
        st.sampled_from(kinds),
        st.sampled_from([*kinds, "negative"]),
        st.tuples(*[st.booleans()] * STEPS),
        st.booleans(),
    )
    return st.lists(one, max_size=5)


STEPS = 3
SHAPES = [(), (3,), (2, 5), (37,), (3, 4, 2), (0,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def cloned(tree: Any) -> Any:
    """With other tensors, which lie in memory as these do."""

    def clone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        size = leaf.untyped_storage().nbytes() // leaf.itemsize
        other = torch.empty(size, dtype=leaf.dtype).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return other.copy_(leaf.detach()).requires_grad_(leaf.requires_grad)

    return optree.tree_map(clone, tree, namespace="pure_loop")


def tensors_of(*trees: Any) -> list[Tensor]:
    tree: Any = trees
    leaves: list[Any] = optree.tree_leaves(tree, namespace="pure_loop")
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def storages(*trees: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(*trees) if tensor.numel()}


def check(optimizer: Optimizer, params: Sequence[Drawn], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [each.tensor(generator, each.kind).requires_grad_(each.is_leaf) for each in params]
    pure = FrozenDict({f"p{i}": value for i, value in enumerate(values)})
    pure_state = optimizer.init(pure)
    mine, my_state = cloned((pure, pure_state))
    for batch in range(STEPS):
        timestamp = Timestamp(batch=batch)
        grads = FrozenDict(
            {
                f"p{i}": each.tensor(generator, each.kind_of_gradient) if each.used[batch] else None
                for i, each in enumerate(params)
            }
        )
        arguments = grads, pure_state, pure
        before = [tensor.detach().clone() for tensor in tensors_of(arguments)]
        result = optimizer.update(*arguments, timestamp)
        assert_same([tensor.detach() for tensor in tensors_of(arguments)], before)
        assert not storages(result) & storages(arguments)
        assert not any(tensor.requires_grad for tensor in tensors_of(result))

        assert optimizer.overwrite is not None
        tensors, kept, notes = tensors_of(mine, my_state), my_state, notes_of(my_state)
        given_grads = [tensor.clone() for tensor in tensors_of(grads)]
        new, my_state = optimizer.overwrite(grads, my_state, mine, timestamp)
        assert new is mine
        assert (my_state is kept) == (notes_of(my_state) == notes)
        assert all(map(is_, tensors_of(mine, my_state), tensors))
        assert_same(tensors_of(grads), given_grads)
        pure, pure_state = result
        assert_same(numbers(mine), numbers(pure))
        assert_same(my_state, pure_state)


def notes_of(opt_state: Any) -> list[Any]:
    """What an optimizer state holds besides tensors."""
    return [leaf for leaf in optree.tree_leaves(opt_state, namespace="pure_loop") if not isinstance(leaf, Tensor)]


def numbers(params: FrozenDict[str, Tensor]) -> list[Tensor]:
    return [param.detach() for param in params.values()]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"muon", *CLASSES}))
@settings(max_examples=25, deadline=None)
@given(params=drawn(shapes=SHAPES, dtypes=[*DTYPES, torch.complex64]), seed=st.integers(0, 9))
def test_a_step_in_place_is_the_same(name: str, params: list[Drawn], seed: int) -> None:
    if name == "lamb":  # a norm of half of the real numbers
        params = [each for each in params if not each.dtype.is_complex]
    check(OPTIMIZERS[name](), params, seed)


@settings(max_examples=25, deadline=None)
@given(params=drawn(shapes=[(2, 5), (5, 2), (3, 3), (0, 2)], dtypes=DTYPES), seed=st.integers(0, 9))
def test_a_step_of_muon_in_place_is_the_same(params: list[Drawn], seed: int) -> None:
    check(muon(0.1), params, seed)


@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=25, deadline=None)
@given(params=drawn(shapes=SHAPES, dtypes=DTYPES), seed=st.integers(0, 9))
def test_a_step_of_a_class_in_place_is_the_same(name: str, params: list[Drawn], seed: int) -> None:
    check(OPTIMIZERS[name](), params, seed)


NAMES = sorted(OPTIMIZERS.keys() - {"partition", "master_weights", *CLASSES})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda grads, state, params: (FrozenDict(w=grads["w"]), state, params), ArgumentError),
        (lambda grads, state, params: (grads | {"v": torch.ones(3, 2)}, state, params), ArgumentError),
        (lambda grads, state, params: (grads | {"v": torch.ones(2, 3).double()}, state, params), ArgumentError),
        (lambda grads, state, params: (grads | {"v": torch.ones(2, 3).to_sparse()}, state, params), ArgumentError),
        (lambda grads, state, params: (grads, FrozenDict(other=params), params), ResumeError),
        (lambda grads, state, params: (grads, None, params), ResumeError),
    ],
    ids=["names", "shape", "dtype", "sparse", "another optimizer", "none"],
)
def test_what_is_refused_is_refused_before_anything_is_written(name: str, wrong: Any, error: type[Exception]) -> None:
    optimizer = OPTIMIZERS[name]()
    assert optimizer.overwrite is not None
    params, grads = (FrozenDict(w=torch.ones(2, 2), v=torch.ones(2, 3)) for _ in range(2))
    opt_state = optimizer.init(params)
    before = cloned((opt_state, params))
    with pytest.raises(error):
        optimizer.overwrite(*wrong(grads, opt_state, params), Timestamp())
    assert_same((opt_state, params), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_rate_that_is_not_finite_is_refused_before_anything_is_written(name: str) -> None:
    make = {**RULES, "momentum": sgd, "dampening": sgd}[name]
    optimizer = make(lambda timestamp: math.nan)
    assert optimizer.overwrite is not None
    params = FrozenDict(w=torch.ones(2, 2))
    opt_state = optimizer.init(params)
    before = cloned((opt_state, params))
    with pytest.raises(ArgumentError, match="finite"):
        optimizer.overwrite(FrozenDict(w=torch.ones(2, 2)), opt_state, params, Timestamp())
    assert_same((opt_state, params), before)


def test_a_kernel_that_can_not_skip_a_step_refuses_to() -> None:
    optimizer, params = lion(), FrozenDict(w=torch.ones(2))
    assert optimizer.overwrite is not None
    with pytest.raises(ArgumentError, match="lion with these options takes no found_inf"):
        optimizer.overwrite(params, optimizer.init(params), params, Timestamp(), found_inf=torch.ones(1))
