"""Exported models: a State's module as a file that loads without pure_loop.

>>> import pure_loop as pl
>>> pl.export.__module__
'pure_loop.exporting.export'

May import ``checkpoint``, ``algorithms`` and what is below. Begin with ``export.py``: the public function, and how the
module is written to a file, read back and compared. ``graphs.py`` traces it.
"""

from pure_loop.exporting.export import export

__all__ = ["export"]


def __dir__() -> list[str]:
    return list(__all__)
