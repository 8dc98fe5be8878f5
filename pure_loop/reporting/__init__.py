"""Reports: what a run has recorded, as one HTML file that needs no server and no network.

>>> import pure_loop as pl
>>> pl.report.__module__
'pure_loop.reporting.report'

May import ``loggers``, ``checkpoint``, ``progress`` and what is below. Begin with ``report.py``, the public function;
``reading.py`` reads files and loggers into the one record of ``record.py``, ``curves.py`` draws its numbers as SVG, and
``page.py`` writes the HTML.
"""

from pure_loop.reporting.report import report

__all__ = ["report"]


def __dir__() -> list[str]:
    return list(__all__)
