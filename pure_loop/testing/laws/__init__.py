"""The laws; each can be called by itself, and raises a LawViolation if it doesn't hold.

>>> import pure_loop as pl
>>> from pure_loop.testing import laws
>>> laws.microbatch_invariance(lambda: pl.algorithms.gradient_clipping("norm", 1.0), max_examples=2)
"""

from __future__ import annotations

from pure_loop.testing.law import Law
from pure_loop.testing.laws import of_callbacks, of_scripts, of_services
from pure_loop.testing.laws.calls import memory, purity, structure
from pure_loop.testing.laws.composition import algorithm_order, composition
from pure_loop.testing.laws.invariance import evaluation_invariance, microbatch_invariance, observer_invariance
from pure_loop.testing.laws.ranks import rank_agreement, world_size
from pure_loop.testing.laws.runs import (
    checkpoint,
    closing,
    compile_equality,
    determinism,
    donate_equality,
    order,
    resumption,
    value,
    watch_equality,
)
from pure_loop.testing.laws.writes import discipline, visibility

__all__ = [
    "OF_ALGORITHMS",
    "OF_CALLBACKS",
    "OF_LOOPS",
    "OF_SCRIPTS",
    "OF_SERVICES",
    "UNAVAILABLE",
    "Law",
    "algorithm_order",
    "checkpoint",
    "closing",
    "compile_equality",
    "composition",
    "determinism",
    "discipline",
    "donate_equality",
    "evaluation_invariance",
    "memory",
    "microbatch_invariance",
    "observer_invariance",
    "of_callbacks",
    "of_scripts",
    "of_services",
    "order",
    "purity",
    "rank_agreement",
    "resumption",
    "structure",
    "value",
    "visibility",
    "watch_equality",
    "world_size",
]

_ABOUT_CALLS = (structure, discipline, purity, memory)
_IN_ORDER: tuple[Law, ...] = (
    *(structure, discipline, order, purity, memory, value, determinism, visibility, algorithm_order),
    *(microbatch_invariance, evaluation_invariance, observer_invariance, composition, resumption, checkpoint),
    *(watch_equality, donate_equality, closing, rank_agreement, world_size, compile_equality),
)

OF_ALGORITHMS = tuple(law for law in _IN_ORDER if law is not algorithm_order)
"""The laws of algorithms; each comes after those that it rests on."""

OF_LOOPS = tuple(law for law in _IN_ORDER if law not in _ABOUT_CALLS)
"""The laws of loops."""

OF_CALLBACKS: tuple[Law, ...] = (
    of_callbacks.completion,
    of_callbacks.purity,
    of_callbacks.observer_invariance,
    of_callbacks.joining,
    of_callbacks.closing,
)
"""The laws of callbacks and loggers."""

OF_SCRIPTS: tuple[Law, ...] = (
    of_scripts.completion,
    of_scripts.value,
    of_scripts.determinism,
    of_scripts.sending_back,
    of_scripts.identity,
    of_scripts.observer_invariance,
    of_scripts.resumption,
)
"""The laws of scripts."""

OF_SERVICES: tuple[Law, ...] = (
    of_services.determinism,
    of_services.accumulation,
    of_services.empty_step,
    of_services.microbatches,
    of_services.observation,
    of_services.isolation,
    of_services.retries,
    of_services.resumption,
    of_services.resumption_between,
)
"""The laws of training services."""

UNAVAILABLE: dict[str, str] = {}
"""Laws that can't be tried yet, each with the feature that is missing."""


def __dir__() -> list[str]:
    return list(__all__)
