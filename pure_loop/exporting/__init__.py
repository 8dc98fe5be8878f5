"""Exported models: a State's module as a file that loads without pure_loop.

>>> import pure_loop as pl
>>> pl.export.__module__
'pure_loop.exporting.export'

May import ``checkpoint``, ``algorithms`` and what is below. Begin with ``export.py``, the public function; ``files.py``
writes a module to a file, reads it back and compares, ``graphs.py`` traces it.
"""

from pure_loop.exporting.export import export

__all__ = ["export"]


def __dir__() -> list[str]:
    return list(__all__)
