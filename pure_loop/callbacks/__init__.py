"""Callbacks that come with the library: observers, one a file."""

from __future__ import annotations

from pure_loop.callbacks.checkpoint_saver import CheckpointSaver
from pure_loop.callbacks.lr_monitor import LRMonitor
from pure_loop.callbacks.speed_monitor import SpeedMonitor

__all__ = ["CheckpointSaver", "LRMonitor", "SpeedMonitor"]
