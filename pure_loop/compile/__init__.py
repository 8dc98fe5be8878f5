"""Compiled training: what runs between two events that are observed, as one graph.

Used through ``fit(..., compile=True)``; imported only then, because torch's compiler takes seconds to import.

May import ``loop`` and what is below. Begin with ``compiler.py``, which is made of segments
(``segment.py``); ``lowering.py`` makes machine code of Python code, and ``_torch.py`` is the one file that names what
torch's compiler keeps private.
"""

from pure_loop.compile.compilations import Compilation, interpreted, record

__all__ = ["Compilation", "interpreted", "record"]


def __dir__() -> list[str]:
    return list(__all__)
