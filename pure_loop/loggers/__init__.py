"""Loggers: where recorded values go, one destination a file."""

from __future__ import annotations

from pure_loop.loggers.console import ConsoleLogger
from pure_loop.loggers.in_memory import InMemoryLogger

__all__ = ["ConsoleLogger", "InMemoryLogger"]
