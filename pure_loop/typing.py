"""Types for the annotations of user code: of arguments, and of the values that its functions receive or tools return.

>>> from pure_loop.typing import EvaluatorsLike, PrecisionName
>>> def settings(precision: PrecisionName = "fp32", evaluators: EvaluatorsLike = None): ...
"""

from __future__ import annotations

from pure_loop.algorithm import AlgorithmLike
from pure_loop.cadence import CadenceLike
from pure_loop.callback import CallbackLike, LoggerGroup, Run
from pure_loop.checkpoint.composer import ComposerCheckpoint
from pure_loop.entry.arguments import RecipeOptions, SettingsDifference
from pure_loop.entry.fit import FitOptions
from pure_loop.evaluator import EvaluatorsLike
from pure_loop.event import EventName
from pure_loop.loop.batch import LoopStages
from pure_loop.metrics._base import MetricsLike
from pure_loop.precision import PrecisionName
from pure_loop.rehearsal.report import Rehearsal
from pure_loop.state import Loss, MetricValue, StateFields
from pure_loop.time import TimestampFields
from pure_loop.tools.profile_report import Profile
from pure_loop.tools.range_test import RangeTest

__all__ = [
    "AlgorithmLike",
    "CadenceLike",
    "CallbackLike",
    "ComposerCheckpoint",
    "EvaluatorsLike",
    "EventName",
    "FitOptions",
    "LoggerGroup",
    "LoopStages",
    "Loss",
    "MetricValue",
    "MetricsLike",
    "PrecisionName",
    "Profile",
    "RangeTest",
    "RecipeOptions",
    "Rehearsal",
    "Run",
    "SettingsDifference",
    "StateFields",
    "TimestampFields",
]


def __dir__() -> list[str]:
    return list(__all__)
