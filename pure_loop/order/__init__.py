"""The order of events as data: grammars, a checker of streams, the events that a plan must yield, views for docs.

May import: ``errors``, ``event``, ``frozendict``, ``time``. Begin with ``checker.py``; ``oracle.py`` is written from
the specification, shares no code with the grammar or the loop, and must stay so.

>>> import pure_loop as pl
>>> pl.order.check([pl.Event.FIT_START, pl.Event.EPOCH_START])
"""

from pure_loop.order.checker import (
    BOUNDARIES,
    GRAMMARS,
    NOTES,
    Checker,
    Order,
    check,
    going_on,
    mermaid,
    nearest_boundary,
    outline,
    successors,
    table,
)
from pure_loop.order.grammar import Rule
from pure_loop.order.oracle import EvaluatorPlan, Plan, expected, expected_evaluate, expected_predict

__all__ = [
    "BOUNDARIES",
    "GRAMMARS",
    "NOTES",
    "Checker",
    "EvaluatorPlan",
    "Order",
    "Plan",
    "Rule",
    "check",
    "expected",
    "expected_evaluate",
    "expected_predict",
    "going_on",
    "mermaid",
    "nearest_boundary",
    "outline",
    "successors",
    "table",
]


def __dir__() -> list[str]:
    return list(__all__)
