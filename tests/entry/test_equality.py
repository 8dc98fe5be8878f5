"""Settings that are equal, and that are not."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import attrs
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import pure_loop as pl
from pure_loop._internal.equality import equal
from tests.support.tiers import examples

A, S = pl.algorithms, pl.schedules


def scaled(factor: Any, default: Any = None, *, keyword: Any = None) -> Callable[[Any], Any]:
    def function(value: Any, default: Any = default, *, keyword: Any = keyword) -> Any:
        return value * factor

    return function


def read_elsewhere(weight: int) -> FunctionType:
    """A function of equal code that reads another global."""

    def code() -> Any:
        return WEIGHT  # type: ignore[name-defined]  # noqa: F821

    return FunctionType(code.__code__, {"WEIGHT": weight})


def noted(note: int) -> Callable[[], None]:
    def function() -> None: ...

    function.note = note  # type: ignore[attr-defined]
    return function


@attrs.frozen
class Record:
    value: Any


class Noted(pl.Task):
    """A class that is not decorated, so that its attribute is no field."""


def task(note: int) -> pl.Task:
    result = Noted()
    object.__setattr__(result, "note", note)
    return result


class Method:
    def __init__(self, value: int) -> None:
        self.value = value

    def loss(self, outputs: Any, targets: Any) -> Any: ...


class Listed(list[Any]):
    """A list with an attribute."""


class Opaque:
    """An object of which nothing is known."""


def loader(seed: int = 0, size: int = 2) -> Any:
    data = Subset(TensorDataset(torch.arange(9.0)), list(range(6)))
    return DataLoader(data, batch_size=size, generator=torch.Generator().manual_seed(seed))


def deep_of(value: int) -> Any:
    nested: Any = value
    for _ in range(5000):
        nested = [nested]
    return nested


def circle(value: int) -> Any:
    items: list[Any] = [value]
    items.append(items)
    return items


def shared(value: int) -> Any:
    """Lists that hold the list below twice: 2 ** 40 ways to the number."""
    items: Any = [value]
    for _ in range(40):
        items = [items, items]
    return items


METHOD = Method(1)
# A function that makes a value of a number: alike where the numbers are.
ALIKE: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "float": lambda n: n / 3,
    "text": lambda n: f"text {n}",
    "list": lambda n: [n, "a", None],
    "plain list": lambda n: [*range(n + 3)],
    "tuple": lambda n: (n, {"a": n}),
    "set": lambda n: {n, -1},
    "mapping": lambda n: {"a": n, "b": 0},
    "keys": lambda n: {str(n): 0},
    "ordered": lambda n: OrderedDict(a=n),
    "FrozenDict": lambda n: pl.FrozenDict(a=n),
    "tensor": lambda n: torch.tensor([n, float("nan")]),
    "shape": lambda n: torch.zeros(n + 1, 1),
    "complex": lambda n: torch.tensor([n + 1j]),
    "bfloat16": lambda n: torch.tensor([n], dtype=torch.bfloat16),
    "array": lambda n: numpy.arange(n + 2),
    "scalar": lambda n: numpy.float32(n),
    "path": lambda n: Path(str(n)),
    "range": lambda n: range(n),
    "fraction": lambda n: Fraction(n, 7),
    "timedelta": timedelta,
    "closure": scaled,
    "default": lambda n: scaled(1, n),
    "keyword default": lambda n: scaled(1, keyword=n),
    "global": read_elsewhere,
    "attribute of a function": noted,
    "method": lambda n: Method.loss if n else METHOD.loss,
    "partial": lambda n: partial(scaled, n),
    "keyword of a partial": lambda n: partial(scaled, factor=n),
    "record": Record,
    "record of a tensor": lambda n: Record(torch.tensor(n)),
    "undecorated": task,
    "loss": lambda n: nn.CrossEntropyLoss(weight=torch.tensor([1.0, n])),
    "task": lambda n: pl.Task(loss=nn.functional.mse_loss, weight=lambda batch: n),
    "algorithm": lambda n: A.sam(rho=n + 0.5),
    "user's algorithm": lambda n: pl.Algorithm("own", {"batch_end": lambda state: state.replace(seed=n)}),
    "optimizer": lambda n: pl.optim.adamw(lr=S.cosine("3ep", peak=n + 1)),
    "partition": lambda n: pl.optim.partition({"a": pl.optim.sgd(lr=n + 1.0)}, lambda name, tensor: "a"),
    "foreign optimizer": lambda n: pl.optim.from_torch(torch.optim.Adagrad, lr=n + 1.0),
    "schedule": lambda n: S.linear(n + 1.0, 0.0, "4ba"),
    "cadence": lambda n: pl.every(f"{n + 1}ba"),
    "evaluator": lambda n: pl.Evaluator([n], metrics=[pl.metrics.top_k(n + 1)]),
    "callback": lambda n: pl.callbacks.SpeedMonitor(window=n + 1),
    "saver": lambda n: pl.callbacks.CheckpointSaver(Path(str(n))),
    "logger": lambda n: pl.loggers.CSVLogger(f"{n}.csv"),
    "loader": loader,
    "batch size": lambda n: loader(size=n + 1),
    "deep": deep_of,
    "circle": circle,
    "shared": shared,
}


@examples(10, 100)
@given(a=st.integers(0, 3), b=st.integers(0, 3))
@pytest.mark.parametrize("name", ALIKE)
def test_values_are_equal_where_they_were_built_alike(name: str, a: int, b: int) -> None:
    make = ALIKE[name]
    two = (a > 0, b > 0) if name == "method" else (a, b)
    assert equal(make(a), make(b)) is (two[0] == two[1])


DIFFERENT: list[tuple[Any, Any]] = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    ([1], (1,)),
    ([1], [True]),
    (["a"], ["a", "b"]),
    (None, 0),
    (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    (torch.zeros(2), torch.zeros(2, device="meta")),
    (Opaque(), Opaque()),
    (deque([1]), deque([2])),
    (Listed([1]), Listed([1])),  # its attributes are not looked at
    (Method(1).loss, Method(1).loss),
    (lambda: 1, lambda: 2),
    (pl.FrozenDict(a=1, b=2), pl.FrozenDict(b=2, a=1)),  # the order in which evaluators run
    (A.sam(), A.mixup()),
    (nn.functional.mse_loss, nn.functional.l1_loss),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_values_of_which_a_part_is_another_differ(a: Any, b: Any) -> None:
    assert not equal(a, b)
    assert not equal([a], [b])
    assert equal(a, a)


def test_mappings_of_one_content_and_what_is_copied() -> None:
    assert equal({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert equal(partial(scaled, factor=1, default=2), partial(scaled, default=2, factor=1))
    recipe = pl.Recipe([torch.ones(2)], optimizer=pl.optim.sgd(lr=0.1), seed=3)
    assert copy.deepcopy(recipe) == copy.copy(recipe) == attrs.evolve(recipe, seed=3) == recipe
    assert attrs.evolve(recipe, seed=4) == recipe.replace(seed=4)
