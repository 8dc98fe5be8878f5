"""Compiled training: what runs between two events that somebody attends to, as one graph.

Used through ``fit(..., compile=True)``; imported only then, because torch's compiler takes seconds to import.
"""

from pure_loop.compile.compilations import Compilation, record
from pure_loop.compile.interpreter import interpreted

__all__ = ["Compilation", "interpreted", "record"]
