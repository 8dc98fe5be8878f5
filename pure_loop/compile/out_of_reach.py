"""What code may not do while it is traced, because a graph would hold what came of it, and nobody would be told.

Python's and NumPy's global generators give numbers, which a graph has for ever. torch's can be seeded, and its state
taken and put back: that moves what eager code draws next, and no draw of a graph. Distributions look at their
parameters, which is to read numbers out of tensors, so inside a trace they don't.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributions import Distribution

from pure_loop.compile.replaced import replaced
from pure_loop.random import seeds_hosts, tracer

__all__ = ["OutOfReachError", "out_of_reach"]

_OF_TORCH = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng")


class OutOfReachError(RuntimeError):
    """A call of this name, which draws from, seeds or reads a global generator."""


@contextmanager
def out_of_reach() -> Iterator[None]:
    """Inside, such calls of a thread that traces are errors; other threads notice nothing."""
    with ExitStack() as stack:
        for name in _OF_TORCH:
            refusing = _refusing(f"torch.{name}", getattr(torch.random, name), _called_by_torch)
            for module in (torch.random, torch):
                if hasattr(module, name):
                    stack.enter_context(replaced(module, name, refusing))
        for module, state in _hosts():
            for name, function in list(vars(module).items()):
                if callable(function) and getattr(function, "__self__", None) is state:
                    refusing = _refusing(f"{module.__name__}.{name}", function, seeds_hosts.get)
                    stack.enter_context(replaced(module, name, refusing))
        stack.enter_context(replaced(Distribution, "_validate_args", _WhereNothingIsTraced(Distribution)))
        yield


def _hosts() -> Iterator[tuple[Any, Any]]:
    """Python's and NumPy's module, and the generator whose methods its functions are."""
    yield random, vars(random)["_inst"]
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy, numpy.mtrand._rand


def _called_by_torch() -> bool:
    """Whether it is torch's own that calls: a checkpointed segment goes on with the state that it began with."""
    return sys._getframe(2).f_globals.get("__name__") in ("torch.random", "torch.utils.checkpoint")


def _refusing(name: str, function: Callable[..., Any], allowed: Callable[[], bool]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if tracer.get() is not None and not allowed():
            raise OutOfReachError(name)
        return function(*args, **kwargs)

    return call


class _WhereNothingIsTraced:
    """An attribute of a class: what it was, and False on a thread that traces."""

    def __init__(self, owner: Any) -> None:
        self._before = owner._validate_args

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self._before if tracer.get() is None else False
