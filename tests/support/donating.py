"""Streams that donate, how many of their updates wrote in place, and what is kept of them with copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.bits import same
from pure_loop.stages.workspace import Workspace
from tests.support import streams as sameness

NAMESPACE = "pure_loop"
DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(5)]


def assert_same(a: Any, b: Any) -> None:
    sameness.assert_same(a, b, "with donation and without")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def fit(model: Any = None, **arguments: Any) -> Any:
    arguments.setdefault("max_duration", "3ep")
    arguments.setdefault("optimizer", pl.optim.adamw(lr=0.1))
    arguments.setdefault("loss", functional.cross_entropy)
    return pl.fit(plain() if model is None else model, arguments.pop("data", DATA), **arguments)


class Count:
    """How many updates wrote in place, and how many copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reused = self.copied = 0
        real = Workspace.writable

        def take(this: Any, state: Any) -> Any:
            taken = real(this, state)
            if this.ownership is None:  # of a run with donate=False
                return taken
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


CONSUMERS = ["for", "next", "pairs", "list", "deque"]


def consume(stream: Any, how: str, keeps: Callable[[str, Event, pl.State], None], kept: Kept) -> None:
    """Go through a stream in one of the ways in :data:`CONSUMERS`; ``keeps`` is told what the body saw."""
    if how == "for":
        for event, state in stream:
            keeps("body", event, state)
    elif how == "next":
        while (pair := next(stream, None)) is not None:
            keeps("body", *pair)
    elif how == "pairs":
        before = None
        for pair in stream:
            keeps("body", *pair)
            if before is not None:
                kept.keep("the pair before", before[1])
                kept.check()
                kept.things.pop()
            before = pair
    elif how == "list":
        pairs = [(pair, [tensor.clone() for tensor in tensors_of(pair[1])]) for pair in stream]
        for (_, state), numbers in pairs:
            assert all(same(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
    else:
        last: deque[Any] = deque(maxlen=2)
        for pair in stream:
            last.append((pair, [tensor.clone() for tensor in tensors_of(pair[1])]))
            for (_, state), numbers in last:
                assert all(same(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
        keeps("body", *last[-1][0])


def gradients(state: pl.State) -> Any:
    # What an algorithm reads where there are none yet is an error.
    return state._grads if isinstance(state._grads, dict) else {}


def some_tensor(state: pl.State, which: int) -> Tensor:
    found = tensors_of((state.params, state.opt_state))
    tensor: Tensor = found[which % len(found)]
    return tensor


WAYS: dict[str, Callable[[Kept, pl.State, int], None]] = {
    "the State": lambda kept, state, i: kept.keep("a State", state),
    "the State in a tuple": lambda kept, state, i: kept.keep("a State in a tuple", (1, state)),
    "its parameters": lambda kept, state, i: kept.keep("a mapping", state.params),
    "its memory": lambda kept, state, i: kept.keep("a memory", state.opt_state),
    "a mapping in its memory": lambda kept, state, i: kept.keep("an inner mapping", state.opt_state["exp_avg"]),
    "a tensor": lambda kept, state, i: kept.keep("a tensor", some_tensor(state, i)),
    "a view": lambda kept, state, i: kept.keep("a view", some_tensor(state, i).view(-1)[:1]),
    "a detached tensor": lambda kept, state, i: kept.keep("a detached tensor", some_tensor(state, i).detach()),
    "an array": lambda kept, state, i: kept.keep(
        "an array", some_tensor(state, i).detach().numpy(), lambda array: [torch.from_numpy(array.copy())]
    ),
    "a list of views": lambda kept, state, i: kept.keep(
        "views", [tensor.t() if tensor.ndim == 2 else tensor[:1] for tensor in tensors_of(state.params)]
    ),
    "a storage": lambda kept, state, i: kept.keep(
        "a storage",
        some_tensor(state, i).untyped_storage(),
        lambda storage: [torch.empty(0).set_(storage).clone()],
    ),
    "a graph": lambda kept, state, i: kept.keep(
        "a graph",
        (state.params["0.weight"].detach().requires_grad_(), torch.ones(5, 4)),
        lambda pair: list(torch.autograd.grad((pair[0] * pair[0] * pair[1]).sum(), [pair[0]])),
    ),
    "its gradients": lambda kept, state, i: kept.keep("gradients", gradients(state)),
    "a gradient": lambda kept, state, i: kept.keep("a gradient", list(gradients(state).values())[i % 4 :][:1]),
    "a view of a gradient": lambda kept, state, i: kept.keep(
        "a view of a gradient", [each.view(-1)[:1] for each in gradients(state).values()]
    ),
    "an array of a gradient": lambda kept, state, i: kept.keep(
        "an array", [each.numpy() for each in gradients(state).values()], lambda kept: [torch.tensor(a) for a in kept]
    ),
    "a module": lambda kept, state, i: kept.keep("a module", state.module(), lambda module: list(module.parameters())),
}


def own_graph(kept: Kept, state: pl.State, which: int) -> None:
    """A graph saves the very tensor, not one that shares its storage."""
    tensor = some_tensor(state, which)
    factor = torch.ones_like(tensor).requires_grad_()
    product = (factor * tensor).sum()
    kept.keep(
        "a graph through a tensor itself",
        (factor, product),
        lambda pair: list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True)),
    )


def own_capsule(kept: Kept, state: pl.State, which: int) -> None:
    # Only what needs no gradient can be exported as it is.
    tensor = some_tensor(state, which)
    _keep_capsule(kept, tensor.detach() if tensor.requires_grad else tensor)


def capsule(kept: Kept, state: pl.State, which: int) -> None:
    _keep_capsule(kept, some_tensor(state, which).detach())


def _keep_capsule(kept: Kept, tensor: Tensor) -> None:
    held = torch.utils.dlpack.to_dlpack(tensor)
    numbers = tensor.clone()
    seen: list[Tensor] = []

    def read(held: Any) -> list[Any]:
        if not seen:
            seen.append(torch.utils.dlpack.from_dlpack(held))
        return seen

    kept.things.append(("a DLPack capsule", held, read, [numbers]))


WAYS["a capsule"] = capsule
WAYS["a capsule of a tensor itself"] = own_capsule
WAYS["a graph through a tensor itself"] = own_graph
