"""Generators of random numbers in a traced step: what is drawn from one is drawn under its seed, in each call anew.

A graph would hold a generator, and its seed, for ever. So what is drawn from ``pl.random.generator(...)``, or inside of
``pl.random.seeded(...)``, is traced as a draw from torch's global generator, and noted together with how its seed is
derived from the numbers of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from pure_loop.compile.draws import Group
from pure_loop.compile.numbers import Host, Number
from pure_loop.random import tracer

__all__ = ["DrawnFromDataError", "Generators", "StrayGeneratorError"]


class StrayGeneratorError(RuntimeError):
    """A draw from a generator whose state no graph knows."""


class DrawnFromDataError(RuntimeError):
    """A draw that depends on the data; of the operation of that name."""


class _Generator(torch.Generator):
    """One of the trace: whatever it is asked for is another thing in each call."""

    group: Group

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise StrayGeneratorError

    manual_seed = seed = initial_seed = get_state = set_state = clone_state = _refuse
    graphsafe_get_state = graphsafe_set_state = _refuse


class Generators(TorchFunctionMode):
    """Inside, on this thread, generators are those of a trace.

    Args:
        host: whose numbers seeds are derived from.
        drawing: notes for what is drawn inside of it where its seed comes from.
    """

    def __init__(self, host: Host, drawing: Callable[[Group], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._host = host
        self._drawing = drawing

    def __enter__(self) -> Generators:
        self._token = tracer.set(self)
        # To look at its parameters a distribution reads numbers out of tensors.
        self._checks = Distribution._validate_args
        Distribution.set_default_validate_args(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        Distribution.set_default_validate_args(self._checks)
        tracer.reset(self._token)

    def computed(self, function: Callable[..., int], *given: Any) -> int:
        return Number.of(self._host, function, *given)  # type: ignore[return-value]

    def generator(self, seed: int, device: torch.device | str) -> torch.Generator:
        made = _Generator(device)
        made.group = _group(seed)
        return made

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        return self._drawing(_group(seed))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generators = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        if not generators:
            return function(*args, **kwargs)
        (generator,) = generators
        if type(generator) is not _Generator:
            raise StrayGeneratorError
        with self._drawing(generator.group):
            return function(
                *(None if each is generator else each for each in args),
                # None would be a generator, too: another overload.
                **{name: each for name, each in kwargs.items() if each is not generator},
            )


def _group(seed: Any) -> Group:
    if isinstance(seed, Number):
        evaluate = seed.evaluate
        return Group("a generator", lambda call: evaluate(call.env))
    return Group("a generator", lambda call: seed)
