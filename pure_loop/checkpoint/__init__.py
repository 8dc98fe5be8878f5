"""Checkpoints: a State is the checkpoint, and these are its files.

>>> import pure_loop as pl
>>> pl.save is pl.checkpoint.save
True

May import ``state``, ``model`` and what is below, and ``distributed``. Begin with ``files.py`` (save, load);
``finding.py`` finds the newest, ``composer.py`` reads files of Composer, ``container.py`` is the file format,
``document.py`` the description of a State in it, ``storage.py`` writes and reads local and remote files.
"""

from pure_loop._internal.registry import register
from pure_loop.checkpoint.coordination import REQUEUE
from pure_loop.checkpoint.files import describe, load, save
from pure_loop.checkpoint.finding import best as best
from pure_loop.checkpoint.finding import best_path, latest_path
from pure_loop.checkpoint.finding import latest as latest

__all__ = ["REQUEUE", "best_path", "describe", "latest_path", "load", "register", "save"]


def __dir__() -> list[str]:
    return list(__all__)
