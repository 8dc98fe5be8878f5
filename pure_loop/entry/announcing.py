"""A call that fails on one of several ranks tells the others, which would wait for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pure_loop.distributed.parallel import Parallel, rank, world_size
from pure_loop.errors import DistributedError

__all__ = ["announced"]

P = ParamSpec("P")
T = TypeVar("T")

# Seconds for which a failing call looks for the others, where its own ``parallel=`` can't be read.
_DEFAULT = 300.0


def announced(function: Callable[P, T]) -> Callable[P, T]:
    """The same function with ``parallel=``; where it raises on one of several ranks, the others are told why."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _announce(kwargs.get("parallel"), function.__name__, error)
            raise

    return called


def _announce(parallel: Any, name: str, error: Exception) -> None:
    if not parallel or isinstance(error, DistributedError) or world_size() == 1:
        return  # what a launcher says can't be read, so no other rank can be found
    from pure_loop.distributed._rendezvous import Rendezvous, first_line  # with it comes torch.distributed

    seconds = parallel.seconds if isinstance(parallel, Parallel) else _DEFAULT
    text = f"raised {type(error).__name__} in its call of pl.{name}: {first_line(error)}"
    Rendezvous(rank(), world_size(), seconds).announce(text)
