"""Checkpoints: a State is the checkpoint, and these are its files.

>>> import pure_loop as pl
>>> pl.save is pl.checkpoint.save
True
"""

from pure_loop.checkpoint.files import describe, latest, load, save
from pure_loop.checkpoint.registry import register

__all__ = ["describe", "latest", "load", "register", "save"]
