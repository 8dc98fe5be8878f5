"""Property-test your own algorithms, callbacks, scripts and loops: ``pip install 'pure_loop[testing]'``.

>>> import pure_loop as pl
>>> from pure_loop import testing
>>> report = testing.check_algorithm(lambda: pl.algorithms.gradient_clipping("norm", 1.0), max_examples=2)
>>> report["purity"].result
'passed'

Strategies draw plans, problems, States and more (:mod:`pure_loop.testing.strategies`), laws are tried on them
(:mod:`pure_loop.testing.laws`), and checks try all the laws that apply.

May import everything, and nothing imports it. Begin with ``check.py``; a law is a function in ``laws/``.
"""

from __future__ import annotations

import importlib.util

from pure_loop.errors import MissingExtraError

if importlib.util.find_spec("hypothesis") is None:
    raise MissingExtraError(
        "pure_loop.testing draws its examples with Hypothesis, which is not installed: pip install 'pure_loop[testing]'"
    )

from pure_loop.testing import laws, ranks, wrong_algorithms, wrong_loops, wrong_services
from pure_loop.testing.case import Case
from pure_loop.testing.check import check_algorithm, check_callback, check_loop, check_script
from pure_loop.testing.check_services import check_service
from pure_loop.testing.comparison import Difference, differences
from pure_loop.testing.law import Law, law
from pure_loop.testing.laws.composition import Commutation, CommutationMatrix, commutation, commutation_matrix
from pure_loop.testing.laws.of_scripts import Scripted, Seed
from pure_loop.testing.parametrize import parametrize_with_checks
from pure_loop.testing.positions import check_positions
from pure_loop.testing.problems import PROBLEMS, Problem
from pure_loop.testing.report import CheckFailed, LawViolation, Outcome, Report
from pure_loop.testing.service import Calls, Served, Service, Session
from pure_loop.testing.strategies import (
    algorithms,
    batches,
    cases,
    event_streams,
    plans,
    problems,
    state_at,
    states,
    times,
    timestamps,
)

__all__ = [
    "PROBLEMS",
    "Calls",
    "Case",
    "CheckFailed",
    "Commutation",
    "CommutationMatrix",
    "Difference",
    "Law",
    "LawViolation",
    "Outcome",
    "Problem",
    "Report",
    "Scripted",
    "Seed",
    "Served",
    "Service",
    "Session",
    "algorithms",
    "batches",
    "cases",
    "check_algorithm",
    "check_callback",
    "check_loop",
    "check_positions",
    "check_script",
    "check_service",
    "commutation",
    "commutation_matrix",
    "differences",
    "event_streams",
    "law",
    "laws",
    "parametrize_with_checks",
    "plans",
    "problems",
    "ranks",
    "state_at",
    "states",
    "strategies",
    "times",
    "timestamps",
    "wrong_algorithms",
    "wrong_loops",
    "wrong_services",
]


def __dir__() -> list[str]:
    return list(__all__)
