"""A warmup inside of a schedule."""

from __future__ import annotations

from typing import Any

from pure_loop.errors import ArgumentError
from pure_loop.time import Time, read_time

__all__ = ["as_warmup", "leaves_room"]


def as_warmup(value: str | int | Time | None) -> Time | None:
    return None if value is None else read_time(value, "warmup")


def leaves_room(instance: Any, attribute: Any, warmup: Time | None) -> None:
    time: Time = instance.time
    if warmup is not None and warmup.unit is time.unit and warmup.value >= time.value:
        raise ArgumentError(f"a warmup of {str(warmup)!r} leaves nothing of {str(time)!r}; time counts the warmup too")
