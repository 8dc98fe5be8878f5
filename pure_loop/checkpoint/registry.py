"""The classes of the library that a checkpoint can name; others join by ``pl.checkpoint.register``."""

from __future__ import annotations

from pure_loop._internal.registry import named, register, register_subclasses, registered
from pure_loop.event import Event
from pure_loop.precision import LossScale
from pure_loop.state import State
from pure_loop.time import Time, Timestamp, TimeUnit

__all__ = ["named", "register", "registered"]

for _cls in (State, Timestamp, Time, TimeUnit, Event, LossScale):
    register(_cls, name=f"pure_loop.{_cls.__name__}")
register_subclasses(State)
