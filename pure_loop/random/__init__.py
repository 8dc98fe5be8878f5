"""Seeds derived by position: which random numbers a batch, a forward or an epoch draws.

May import: ``errors``, ``_internal``. Begin with ``seeds.py``; ``guards.py`` says for which code the global
generators are seeded, and ``numpy_state.py`` sets NumPy's aside and puts it back.
"""

from pure_loop.random.seeds import derive, generator, seeded, seeded_all

__all__ = ["derive", "generator", "seeded", "seeded_all"]


def __dir__() -> list[str]:
    return list(__all__)
