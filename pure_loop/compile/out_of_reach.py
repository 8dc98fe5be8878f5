"""What code may not do while it is traced, because a graph would hold what came of it, and nobody would be told.

Python's and NumPy's global generators give numbers, which a graph has for ever. torch's can be seeded, and its state
taken and put back: that moves what eager code draws next, and no draw of a graph. The default dtype is no part of an
operation: it is another one when a graph runs. Distributions look at their parameters, which is to read numbers out of
tensors, so inside a trace they don't.
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
from torch.overrides import TorchFunctionMode

from pure_loop._replaced import replaced
from pure_loop.random import seeds_hosts, tracer

__all__ = ["DefaultDtypeError", "OutOfReachError", "out_of_reach"]

_OF_TORCH = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state", "fork_rng")


class OutOfReachError(RuntimeError):
    """A call of this name, which draws from, seeds or reads a global generator."""


class DefaultDtypeError(RuntimeError):
    """An operation under another default dtype than that of the loop."""


@contextmanager
def out_of_reach() -> Iterator[None]:
    """Inside, such calls of a thread that traces are errors; other threads notice nothing."""
    with ExitStack() as stack:
        stack.enter_context(_OneDefaultDtype())
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


class _OneDefaultDtype(TorchFunctionMode):
    """Operations are of the default dtype under which this was made."""

    def __init__(self) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.get_default_dtype() is not self._dtype:
            raise DefaultDtypeError
        return function(*args, **(kwargs or {}))


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
