"""Streams that donate, how many of their updates wrote in place, and what is kept of them with copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop._internal.bits import same
from pure_loop.stages.workspace import Workspace
from tests.support import problem
from tests.support import streams as sameness

NAMESPACE = "pure_loop"
DATA = problem.points(batches=5, size=6)
plain: Any = problem.mlp


def assert_same(a: Any, b: Any) -> None:
    sameness.assert_same(a, b, "with donation and without")


def fit(model: Any = None, data: Any = DATA, **changes: Any) -> Any:
    """15 steps of AdamW, not strict."""
    settings = {"optimizer": pl.optim.adamw(lr=0.1), "max_duration": "3ep", "strict": None}
    return problem.fit(model, data, **settings | changes)


class Count:
    """How many updates wrote in place, and how many copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reused = self.copied = 0
        real = Workspace.writable

        def take(this: Any, state: Any) -> Any:
            taken = real(this, state)
            if this.ownership is not None:  # else of a run with donate=False
                self.reused += taken is not None
                self.copied += taken is None
            return taken

        monkeypatch.setattr(Workspace, "writable", take)


def tensors_of(tree: Any) -> list[Any]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]


class Kept:
    """Things that were kept, each with a copy of its numbers."""

    def __init__(self) -> None:
        self.things: list[tuple[str, Any, Callable[[Any], list[Any]], list[Any]]] = []

    def keep(self, what: str, thing: Any, read: Callable[[Any], list[Any]] = tensors_of) -> None:
        numbers = [torch.as_tensor(each).detach().clone() for each in read(thing)]
        self.things.append((what, thing, read, numbers))

    def check(self) -> None:
        for what, thing, read, numbers in self.things:
            now = [torch.as_tensor(each).detach() for each in read(thing)]
            assert len(now) == len(numbers)
            assert all(same(a, b) for a, b in zip(now, numbers, strict=True)), f"{what} changed"


def gradients(state: pl.State) -> Any:
    # What an algorithm reads where there are none yet is an error.
    return state._grads if isinstance(state._grads, dict) else {}


def some_tensor(state: pl.State, which: int) -> Tensor:
    found = tensors_of((state.params, state.opt_state))
    tensor: Tensor = found[which % len(found)]
    return tensor


def _bytes(storage: Any) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage)]


def _copies(arrays: Any) -> list[Tensor]:
    return [torch.tensor(array) for array in arrays]


# What is kept, and how it is read.
_TAKEN: dict[str, tuple[Any, ...]] = {
    "the State": (lambda state, i: state,),
    "the State in a tuple": (lambda state, i: (1, state),),
    "its parameters": (lambda state, i: state.params,),
    "its memory": (lambda state, i: state.opt_state,),
    "a mapping in its memory": (lambda state, i: state.opt_state["exp_avg"],),
    "a tensor": (some_tensor,),
    "a view": (lambda state, i: some_tensor(state, i).view(-1)[:1],),
    "a detached tensor": (lambda state, i: some_tensor(state, i).detach(),),
    "an array": (lambda state, i: some_tensor(state, i).detach().numpy(), lambda array: _copies([array])),
    "a storage": (lambda state, i: some_tensor(state, i).untyped_storage(), _bytes),
    "its gradients": (lambda state, i: gradients(state),),
    "a gradient": (lambda state, i: list(gradients(state).values())[i % 4 :][:1],),
    "views of gradients": (lambda state, i: [each.view(-1)[:1] for each in gradients(state).values()],),
    "arrays of gradients": (lambda s, i: [g.numpy() for g in gradients(s).values()], _copies),
    "a module": (lambda state, i: state.module(), lambda module: list(module.parameters())),
}


def _keeping(name: str, take: Any, *read: Any) -> Callable[[Kept, pl.State, int], None]:
    return lambda kept, state, which: kept.keep(name, take(state, which), *read)


WAYS = {name: _keeping(name, *way) for name, way in _TAKEN.items()}
