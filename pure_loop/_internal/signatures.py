"""Whether a function that a user gave can be called as the loop will call it: asked at the door, before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pure_loop.errors import ArgumentTypeError

__all__ = ["accepts", "is_scheduler", "name_of", "refuse_no_schedule"]


def accepts(function: Callable[..., Any], count: int) -> bool:
    """Whether a function takes ``count`` positional arguments; True where Python can't tell (some builtins).

    >>> accepts(lambda state: True, 1), accepts(lambda event, state: True, 1), accepts(print, 3)
    (True, False, True)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def name_of(function: object) -> str:
    """What to call a function in a message.

    >>> name_of(len), name_of(lambda x: x)
    ('len', '<lambda>')
    """
    return getattr(function, "__name__", type(function).__name__)


def is_scheduler(value: object) -> bool:
    """Whether this is a scheduler of torch's, or its class."""
    cls = value if isinstance(value, type) else type(value)
    return any(base.__module__ == "torch.optim.lr_scheduler" for base in cls.__mro__)


def refuse_no_schedule(where: str, value: Any) -> None:
    """
    Raises:
        ArgumentTypeError: what was given can't be called with a timestamp, or is a class of schedules.
    """
    name = name_of(value)
    if is_scheduler(value):
        plateau = name == "ReduceLROnPlateau"
        advice = (
            'for one that looks at a metric, docs/optimizers.md has a recipe, "A schedule that looks at a metric"'
            if plateau
            else 'such as pl.schedules.cosine("3ep", peak=3e-4), or a function of your own'
        )
        raise ArgumentTypeError(
            f"{where} is torch's scheduler {name}, which changes a torch optimizer step by step. Here a schedule is a "
            f"function of the timestamp: {advice}."
        )
    if isinstance(value, type):
        raise ArgumentTypeError(f"{where} is the class {name}; give a schedule: {name}(...).")
    if not accepts(value, 1):
        raise ArgumentTypeError(
            f"{where} is the function {name}, which can't be called with one argument: it is called as "
            f"{name}(timestamp), and returns a number."
        )
