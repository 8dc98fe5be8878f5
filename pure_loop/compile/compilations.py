"""What was compiled, and why: a graph that is made again and again costs more than it saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

__all__ = ["Compilation", "note", "record"]


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
