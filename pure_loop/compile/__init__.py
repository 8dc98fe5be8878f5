"""Compiled training: what runs between two events that are observed, as one graph.

Used through ``fit(..., compile=True)``; imported only then, because torch's compiler takes seconds to import.

May import ``loop`` and what is below. Begin with ``compiler.py``, which is made of segments
(``segment.py``); ``lowering.py`` makes machine code of Python code, and ``_torch.py`` is the one file that names what
torch's compiler keeps private.
"""

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily
from pure_loop.compile.compilations import Compilation, interpreted, record

__all__ = ["Compilation", "interpreted", "record"]

if not TYPE_CHECKING:
    __getattr__ = _lazily(__name__, {})  # which says what pl.compile(model) shall be


def __dir__() -> list[str]:
    return list(__all__)
