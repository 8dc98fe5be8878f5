"""Learning rates, and other numbers, as pure functions of the timestamp.

A schedule is a callable ``Timestamp -> float``. There is no scheduler to step and nothing to save: the
batch that starts at timestamp ``t`` uses ``schedule(t)``, so ``linear(1, 0, "4ba")`` gives four batches
1, 0.75, 0.5 and 0.25. A function of one's own is a schedule too; the ones here also print, compare and multiply.

The words: ``now`` is how much is finished in the unit of a time, and ``tau = clip(now / time, 0, 1)``.
Times may be in any unit. A fraction of the duration (``"0.5dur"``) is that many of the units of ``max_duration``.
Epochs pass batch by batch where the timestamp knows how many batches an epoch has, and else all at once at their end.

May import ``time`` and ``ranges``. Begin with ``_base.py``; ``make new-schedule NAME=...`` writes a skeleton.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.schedules._base import Schedule, constant, product
    from pure_loop.schedules.chain import chain
    from pure_loop.schedules.cosine import cosine
    from pure_loop.schedules.cosine_restarts import cosine_restarts
    from pure_loop.schedules.cyclic import cyclic
    from pure_loop.schedules.exponential import exponential
    from pure_loop.schedules.inverse_sqrt import inverse_sqrt
    from pure_loop.schedules.linear import linear
    from pure_loop.schedules.multistep import multistep
    from pure_loop.schedules.one_cycle import one_cycle
    from pure_loop.schedules.piecewise import piecewise
    from pure_loop.schedules.plot import plot, sparkline
    from pure_loop.schedules.polynomial import polynomial
    from pure_loop.schedules.scaled import scaled
    from pure_loop.schedules.step import step
    from pure_loop.schedules.warmup import warmup
    from pure_loop.schedules.warmup_stable_decay import warmup_stable_decay

__all__ = [
    "Schedule",
    "chain",
    "constant",
    "cosine",
    "cosine_restarts",
    "cyclic",
    "exponential",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
    "piecewise",
    "plot",
    "polynomial",
    "product",
    "scaled",
    "sparkline",
    "step",
    "warmup",
    "warmup_stable_decay",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "_base": ("Schedule", "constant", "product"),
            "plot": ("sparkline",),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
