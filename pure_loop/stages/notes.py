"""Notes on errors: where they were raised, and on which input."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from pure_loop._internal.tracebacks import RaisedIn
from pure_loop.data.batch import describe
from pure_loop.errors import PureLoopError
from pure_loop.state import raw_outputs


class noting:  # noqa: N801
    """Where what is inside raises, the error is noted to say this of itself.

    >>> try:
    ...     with noting(lambda: "raised by batch 3"):
    ...         raise ValueError("odd")
    ... except ValueError as error:
    ...     print(error.__notes__)
    ['raised by batch 3']
    """

    __slots__ = ("_say",)

    def __init__(self, say: Callable[[], str]) -> None:
        self._say = say

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # not where a generator is closed, or on Ctrl-C
            error.add_note(self._say())


def note_stage(error: Exception, stage: str, state: Any, index: int) -> None:
    """Note of an error that it was raised in this stage of a State's microbatch, which has this number."""
    where = f"batch {state.timestamp.batch}, microbatch {index}"
    error.add_note(f"raised in the {stage} of {where}, which is {describe(state.microbatch)}")


def note_module(error: Exception, *, inner: bool = False) -> None:
    """Note of an error in which module of the model it was raised, and on which inputs.

    ``inner``: not if in none of its submodules, as the outermost module of a loss may be the loss.
    """
    place = None if isinstance(error, PureLoopError) else RaisedIn.of(error)
    if place is None or (inner and not place.path):
        return
    inputs = ""
    if place.inputs is not None:
        args, kwargs = place.inputs
        named = [f"{name}={describe(value)}" for name, value in kwargs.items()]
        inputs = f", of inputs ({', '.join([*map(describe, args), *named])})"
    error.add_note(f"raised in {place}{inputs}")


def note_loss(error: Exception, loss: str, state: Any) -> None:
    """Note of an error of a loss in which module it was raised, if in one, which loss it is, and of what."""
    note_module(error, inner=True)
    if isinstance(error, PureLoopError):
        return
    batch = state.microbatch
    pair = type(batch) in (tuple, list) and len(batch) == 2
    of = f"targets {describe(batch[1])}" if pair else f"microbatch {describe(batch)}"
    error.add_note(f"raised by the loss {loss}, of outputs {describe(raw_outputs(state))} and {of}")
