"""Ranges of the settings that optimizers alone have: learning rates, and pairs of decay rates."""

from __future__ import annotations

import math
from typing import Any

import attrs

from pure_loop.errors import ArgumentTypeError
from pure_loop.optim.optimizer import RateFunction, as_schedule
from pure_loop.ranges import Between, Range, Setting
from pure_loop.ranges.strengths import Strength


class Rate(Range):
    """A learning rate: a finite number of at least 0, or a schedule."""

    typical = (1e-3, 1e-2, 0.1)
    reads_schedules = True

    def read(self, setting: Setting, value: Any) -> RateFunction:
        return as_schedule(setting.where, value)

    def in_words(self, setting: Setting) -> str:
        return "number at least 0, or a schedule"

    def outside(self, setting: Setting) -> tuple[Any, ...]:
        return -1.0, math.nan, math.inf, "1", True, [1]


class DecayRates(Range):
    """Two numbers in [0, 1), each of which may be a schedule."""

    typical = ((0.9, 0.999), (0.8, 0.95), (0.0, 0.5))

    def read(self, setting: Setting, value: Any) -> tuple[Strength, Strength]:
        example = f"{setting.name}=(0.9, 0.999)"
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ArgumentTypeError(
                f"{setting.where}: {setting.name} must be two numbers, such as {example}, got {value!r}"
            )
        bounds = Between(0, 1, example=f"{setting.where}({example})")
        first, second = (
            attrs.evolve(setting, name=f"{setting.name}[{index}]", range=bounds, scheduled=True).read(item)
            for index, item in enumerate(value)
        )
        return first, second

    def in_words(self, setting: Setting) -> str:
        return "two numbers at least 0 and less than 1, or schedules"

    def outside(self, setting: Setting) -> tuple[Any, ...]:
        return (0.9, 1.0), (-0.1, 0.9), (0.9,), 0.9, "ab"
