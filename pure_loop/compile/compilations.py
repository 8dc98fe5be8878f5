"""What was compiled, and why: a graph that is made again and again costs more than it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import attrs
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Compilation", "interpret", "interpreted", "is_on", "note", "record"]


@attrs.frozen
class Compilation:
    """One graph that was made.

    Attributes:
        segment: what it does: ``"step"``, ``"gradients"``, ``"microbatch"``, ``"update"``, ``"evaluation"``, ...
        number: how many graphs of this segment there are now.
        reason: why the others don't serve.
        operations: how many operations it has.
        kernels: optimizers' kernels that it calls as they are, because they walk through many tensors.
        seconds: how long it took.
    """

    segment: str
    number: int
    reason: str
    operations: int
    seconds: float
    kernels: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"graph {self.number} of {self.segment!r} ({self.reason}): {self.operations} operations, "
            + "".join(f"of which one is {kernel}, " for kernel in self.kernels)
            + f"compiled in {self.seconds:.1f} s"
        )


_listening: list[list[Compilation]] = []


def note(compilation: Compilation) -> None:
    for listener in _listening:
        listener.append(compilation)


@contextmanager
def record() -> Iterator[list[Compilation]]:
    """Collect what is compiled inside the ``with``, by any stream.

    The same is logged, one line a graph, to the logger ``"pure_loop.compile"`` of :mod:`logging`, at level INFO.

    >>> with record() as made:
    ...     pass
    >>> made
    []
    """
    result: list[Compilation] = []
    _listening.append(result)
    try:
        yield result
    finally:
        # By identity: two lists of the same compilations are equal.
        _listening[:] = [item for item in _listening if item is not result]


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


def interpret(graph: GraphModule) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """A graph as it is, called as compiled ones are: with a list, which it empties."""

    def call(tensors: list[Tensor]) -> Sequence[Tensor]:
        value = tensors.copy()
        tensors.clear()
        results: Sequence[Tensor] = graph(*value)
        return results

    return call
