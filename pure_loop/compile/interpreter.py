"""Graphs without a compiler: run as they are, operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

__all__ = ["interpret", "interpreted", "is_on"]

_on: ContextVar[bool] = ContextVar("interpreted", default=False)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside the ``with``, a graph that is made is not compiled: its operations run one after the other.

    It needs no C++ compiler and takes no time to compile. What is different from eager steps then is what is in the
    graph; what differs in compiled steps alone is torch's compiler.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 3
    >>> with interpreted():
    ...     state = pl.run(pl.fit(torch.nn.Linear(2, 1), data, loss=torch.nn.functional.mse_loss, compile=True,
    ...                           optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep", watch={pl.Event.EPOCH_END}))
    >>> state.timestamp.batch
    3
    """
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_on() -> bool:
    """Whether graphs that are made now are not compiled."""
    return _on.get()


def interpret(graph: GraphModule) -> Callable[[list[Tensor]], Sequence[Any]]:
    """A graph as it is, called as compiled ones are: with a list, which it empties."""

    def call(tensors: list[Tensor]) -> Sequence[Any]:
        value = tensors.copy()
        tensors.clear()
        return graph(*value)  # type: ignore[no-any-return]

    return call
