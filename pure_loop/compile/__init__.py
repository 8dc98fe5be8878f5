"""Compiled training: what runs between two events that are observed, as one graph.

Used through ``fit(..., compile=True)``; imported only then, because torch's compiler takes seconds to import.

May import ``loop`` and what is below. Begin with ``compiler.py``; ``trace.py`` makes a graph of Python code,
``segment.py`` calls it. ``_torch.py`` is the one file that names what torch's compiler keeps private.
"""

from pure_loop.compile.compilations import Compilation, record
from pure_loop.compile.interpreter import interpreted

__all__ = ["Compilation", "interpreted", "record"]


def __dir__() -> list[str]:
    return list(__all__)
