"""Seeds derived by position: which random numbers a batch, a forward or an epoch draws.

May import: ``errors``, ``_internal``. Begin with ``seeds.py``; the other files set the states of the generators of
Python and NumPy aside and put them back.
"""

from pure_loop.random.seeds import derive, generator, seeded, seeded_all

__all__ = ["derive", "generator", "seeded", "seeded_all"]


def __dir__() -> list[str]:
    return list(__all__)
