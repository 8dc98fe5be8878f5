"""Loggers: where recorded values go, one destination a file.

A logger overrides the ``log_*`` methods that its destination has. Values may be tensors on a device: a logger keeps
them and reads many at once, late, as ``_destination.py`` does for those that write files or send. A package that a
destination needs is an extra, imported when the logger is constructed (``_internal/lazy.py``).

May import ``progress`` and what is below. Begin with ``in_memory.py``; ``make new-logger NAME=...`` writes the
skeletons of a module and its test, and lists it here.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.loggers.comet_ml import CometMLLogger
    from pure_loop.loggers.console import ConsoleLogger
    from pure_loop.loggers.csv_file import CSVLogger
    from pure_loop.loggers.in_memory import InMemoryLogger
    from pure_loop.loggers.json_lines import JSONLinesLogger
    from pure_loop.loggers.mlflow import MLFlowLogger
    from pure_loop.loggers.neptune import NeptuneLogger
    from pure_loop.loggers.remote_uploader import RemoteUploader
    from pure_loop.loggers.slack import SlackLogger
    from pure_loop.loggers.tensorboard import TensorBoardLogger
    from pure_loop.loggers.wandb import WandBLogger

__all__ = [
    "CSVLogger",
    "CometMLLogger",
    "ConsoleLogger",
    "InMemoryLogger",
    "JSONLinesLogger",
    "MLFlowLogger",
    "NeptuneLogger",
    "RemoteUploader",
    "SlackLogger",
    "TensorBoardLogger",
    "WandBLogger",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "comet_ml": ("CometMLLogger",),
            "console": ("ConsoleLogger",),
            "csv_file": ("CSVLogger",),
            "in_memory": ("InMemoryLogger",),
            "json_lines": ("JSONLinesLogger",),
            "mlflow": ("MLFlowLogger",),
            "neptune": ("NeptuneLogger",),
            "remote_uploader": ("RemoteUploader",),
            "slack": ("SlackLogger",),
            "tensorboard": ("TensorBoardLogger",),
            "wandb": ("WandBLogger",),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
