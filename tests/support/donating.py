"""Streams that donate, how many of their updates wrote in place, and what is kept of them with copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.donation import donation
from pure_loop.loop.bits import same
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


def partition() -> pl.optim.Optimizer:
    return pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9)},
        label=lambda name, tensor: "a" if tensor.ndim > 1 else "b",
    )


# What a count of references may come out as: on this interpreter, on one that counts the caller's own reference too, on
# one that borrows those on the stack, and on one whose counts can't be trusted.
COUNTERS: dict[str, Callable[[Any], int] | None] = {
    "as here": getrefcount,
    "one more": lambda value: getrefcount(value) + 1,
    "borrowed": lambda value: getrefcount(value) - 3,
    "none": None,
}


class Count:
    """How many updates wrote in place, and how many copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reused = self.copied = 0
        real = donation.Donation.donate

        def take(this: Any, state: Any, *, shared: bool) -> Any:
            taken = real(this, state, shared=shared)
            self.reused += taken is not None
            self.copied += taken is None
            return taken

        monkeypatch.setattr(donation.Donation, "donate", take)


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
