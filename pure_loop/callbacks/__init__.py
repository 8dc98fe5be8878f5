"""Callbacks of the library: observers, one a file.

A callback reads States and passes values to the logger. It returns nothing, and never writes to a tensor of a State:
``pl.testing.check_callback`` tries this. Two things it can't see on one CPU. At events of a batch a callback reads no
numbers from a device (``.item()``, ``float(tensor)``), which would wait: loggers take tensors, and read them in groups.
And it runs on the first rank alone, where reading a sharded tensor would wait for the other ranks for ever: what reads
parameters, gradients or optimizer state has ``all_ranks = True``.

May import ``checkpoint`` and what is below. Begin with ``lr_monitor.py``; ``make new-callback NAME=...`` writes the
skeletons of a module and its test, and lists it here.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.callbacks.activation_monitor import ActivationMonitor
    from pure_loop.callbacks.checkpoint_saver import CheckpointSaver
    from pure_loop.callbacks.export_for_inference_callback import ExportForInferenceCallback
    from pure_loop.callbacks.flight_recorder import FlightRecorder
    from pure_loop.callbacks.generate import Generate
    from pure_loop.callbacks.grad_monitor import GradMonitor
    from pure_loop.callbacks.image_visualizer import ImageVisualizer
    from pure_loop.callbacks.lr_monitor import LRMonitor
    from pure_loop.callbacks.memory_monitor import MemoryMonitor
    from pure_loop.callbacks.memory_snapshot import MemorySnapshot
    from pure_loop.callbacks.mlperf_callback import MLPerfCallback
    from pure_loop.callbacks.speed_monitor import SpeedMonitor
    from pure_loop.callbacks.system_monitor import SystemMonitor
    from pure_loop.callbacks.time_left import TimeLeft

__all__ = [
    "ActivationMonitor",
    "CheckpointSaver",
    "ExportForInferenceCallback",
    "FlightRecorder",
    "Generate",
    "GradMonitor",
    "ImageVisualizer",
    "LRMonitor",
    "MLPerfCallback",
    "MemoryMonitor",
    "MemorySnapshot",
    "SpeedMonitor",
    "SystemMonitor",
    "TimeLeft",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "activation_monitor": ("ActivationMonitor",),
            "checkpoint_saver": ("CheckpointSaver",),
            "export_for_inference_callback": ("ExportForInferenceCallback",),
            "flight_recorder": ("FlightRecorder",),
            "generate": ("Generate",),
            "grad_monitor": ("GradMonitor",),
            "image_visualizer": ("ImageVisualizer",),
            "lr_monitor": ("LRMonitor",),
            "memory_monitor": ("MemoryMonitor",),
            "memory_snapshot": ("MemorySnapshot",),
            "mlperf_callback": ("MLPerfCallback",),
            "speed_monitor": ("SpeedMonitor",),
            "system_monitor": ("SystemMonitor",),
            "time_left": ("TimeLeft",),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
