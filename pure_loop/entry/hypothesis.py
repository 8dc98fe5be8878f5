"""What Hypothesis is told of this library: strategies for its types, and that torch has random numbers too.

Neither package imports the other. Whichever is imported second introduces them: the end of ``pure_loop/__init__.py``,
or the entry point that Hypothesis calls at the end of its own import (``_hypothesis_pure_loop.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_origin

import attrs
import torch
from torch import Tensor

from pure_loop.algorithm import Algorithm, Composition
from pure_loop.evaluator import Evaluator
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.random.seeds import _initialized_accelerators, state_of
from pure_loop.state import State
from pure_loop.task import Task
from pure_loop.time import Time, Timestamp

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


class TorchRandom:
    """torch's default generators, in the words in which Hypothesis speaks to Python's ``random``.

    Before every example Hypothesis seeds it, and afterwards puts it back as it was. An accelerator takes part from its
    first use on.

    >>> generators = TorchRandom()
    >>> before = generators.getstate()
    >>> generators.seed(0)
    >>> first = torch.rand(2)
    >>> generators.seed(0)
    >>> torch.equal(first, torch.rand(2))
    True
    >>> generators.setstate(before)
    """

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        # Not torch.manual_seed: for unused accelerators it records the call stack, in milliseconds.
        for generator in (torch.default_generator, *_initialized_accelerators()):
            generator.manual_seed(seed)

    def getstate(self) -> dict[torch.Generator, Tensor]:
        """Their states."""
        return {generator: state_of(generator) for generator in (torch.default_generator, *_initialized_accelerators())}

    def setstate(self, state: dict[torch.Generator, Tensor]) -> None:
        """Put them back; that of an accelerator not in use then starts from torch's seed, as it would have."""
        torch.default_generator.set_state(state[torch.default_generator])
        for generator in _initialized_accelerators():
            if generator in state:
                generator.set_state(state[generator])
            else:
                generator.manual_seed(torch.initial_seed())


# Hypothesis keeps a weak reference only.
_generators = TorchRandom()
_told: set[type] = set()


def register() -> None:
    """Tell Hypothesis of the library's types and of torch's generators; a second call does nothing."""
    from hypothesis import register_random

    # Here, since the package imports it only when it is asked for.
    from pure_loop.order.oracle import EvaluatorPlan, Plan

    if State in _told:
        return
    register_types(State, Timestamp, Time, Plan, EvaluatorPlan, FrozenDict)
    register_types(Algorithm, Composition, Evaluator, Optimizer, Task, Metric)
    show(Timestamp, Time, Plan, EvaluatorPlan)
    register_random(_generators)


def register_types(*types: type) -> None:
    """Tell Hypothesis of types for which :mod:`pure_loop.testing` has strategies."""
    from hypothesis.strategies import register_type_strategy

    for cls in types:
        if cls not in _told:
            register_type_strategy(cls, _later(cls))
            _told.add(cls)


def _later(registered: type) -> Callable[[Any], SearchStrategy[Any]]:
    """A strategy that is made when it is first asked for."""

    def resolve(requested: Any) -> Any:
        if registered not in (requested, get_origin(requested)):
            # Something of a base class is wanted, such as Hashable: this library has nothing to do with that.
            return NotImplemented
        # By its name: the kit imports this module.
        return import_module("pure_loop.testing.strategies").BY_TYPE[registered](requested)

    return resolve


def show(*types: type) -> None:
    """Have Hypothesis show values of these types as the code that makes them."""
    for cls in types:
        cls._repr_pretty_ = _print  # type: ignore[attr-defined]


def _print(value: Any, printer: Any, cycle: bool) -> None:
    """Hypothesis shows records field by field, whatever their repr is, and a plan has many fields."""
    if isinstance(value, Time):
        printer.text(repr(value))
    elif isinstance(value, Timestamp):
        values = {field.name: getattr(value, field.name) for field in attrs.fields(Timestamp)}
        first = Timestamp()
        argument = (f"{name}={it!r}" for name, it in values.items() if it != getattr(first, name))
        printer.text(f"Timestamp({', '.join(argument)})")
    else:
        printer.text(import_module("pure_loop.testing.case").code(value))
