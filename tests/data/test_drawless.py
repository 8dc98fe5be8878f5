"""Code that is proved to draw from neither Python's nor NumPy's global generator."""

from __future__ import annotations

import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import rand as uniform
from numpy.random import seed as reseed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from pure_loop._internal import torch_private
from pure_loop.data import drawless as _drawless
from pure_loop.data.drawless import cannot_draw
from pure_loop.data.open import source
from pure_loop.data.source import Source
from pure_loop.random import seeded_all
from tests.support.loaders import LAW


@pytest.fixture(autouse=True)
def torchs_own_collate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without collate functions of other libraries (tensordict), which an earlier test may have imported."""
    functions: Any = torch_private.default_collate_functions
    for kind, function in list(functions.items()):
        if not function.__module__.startswith("torch."):
            monkeypatch.delitem(functions, kind)


bound, normal = random.random, random.gauss
DRAWS: dict[str, Callable[[], Any]] = {
    "bound": lambda: bound(),
    "attribute": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
    "function of numpy": uniform,
    "seeds": lambda: reseed(3),
    "method": vars(random)["_inst"].random,
    "looked up": lambda: getattr(random, "random")(),  # noqa: B009
    "from the table of modules": lambda: sys.modules["random"].random(),
}


def _imports() -> Any:
    import random as other

    return other.random()


DRAWS["imported inside"] = _imports
_variable: ContextVar[Any] = ContextVar("_variable")


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self) -> Any:
        return self.inner()


class Weak(Slotted):
    __slots__ = ("kept",)

    def __init__(self, inner: Any) -> None:
        self.kept = inner
        super().__init__(weakref.ref(inner) if isinstance(inner, Slotted) else lambda: inner)

    def __call__(self) -> Any:
        return self.inner()()


class Hooked(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: inner())

    def forward(self) -> None: ...


class Property:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def drawn(self) -> Any:
        return self._inner()

    def __call__(self) -> Any:
        return self.drawn


def _tensor(inner: Any) -> Any:
    tensor: Any = torch.zeros(1)
    tensor.inner = inner
    return lambda: tensor.inner()


def _call(inner: Any) -> Any:
    return inner()


def _array(inner: Any) -> Any:
    cells = np.array([inner], dtype=object)
    return lambda: cells[0]()


def _wrapped(inner: Any) -> Any:
    @functools.wraps(torch.stack)
    def wrapper() -> Any:
        return inner()

    return wrapper


def _generator(inner: Any) -> Any:
    def generate() -> Iterator[Any]:
        while True:
            yield inner()

    return functools.partial(next, generate())


HIDING: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda inner: inner,
    "closure": lambda inner: lambda: inner(),
    "default": lambda inner: lambda call=inner: call(),
    "partial": lambda inner: functools.partial(inner),
    "slot": Slotted,
    "weak reference": Weak,
    "hook": Hooked,
    "property": Property,
    "tensor": _tensor,
    "wrapper": _wrapped,
    "containers": lambda inner: lambda: [{"call": (inner,)}][0]["call"][0](),
    "generator": _generator,
    "map": lambda inner: functools.partial(next, map(_call, [inner] * 99)),
    "chain": lambda inner: functools.partial(next, chain(map(_call, [inner] * 99))),
    "array": _array,
    "method": lambda inner: Slotted(inner).__call__,
    "cache": lambda inner: functools.lru_cache(maxsize=0)(lambda: inner()),
    "class": lambda inner: type("Made", (), {"__call__": lambda self: inner(), "__module__": "elsewhere"})(),
}


class Drawing(Dataset[Tensor]):
    """Each sample is what a function makes of its index."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        self.change()
        return torch.rand(2) + index


@LAW
@given(st.sampled_from(sorted(DRAWS)), st.lists(st.sampled_from(sorted(HIDING)), max_size=3))
def test_code_that_draws_is_never_proved_not_to(draw: str, hidden: list[str]) -> None:
    code = DRAWS[draw]
    for name in hidden:
        code = HIDING[name](code)
    assert not cannot_draw([Drawing(code)])


@LAW
@given(st.lists(st.sampled_from(sorted({*HIDING} - {"array"})), max_size=3))
def test_hiding_alone_proves_nothing(hidden: list[str]) -> None:
    """Without which the law above would hold of a function that always says no."""
    code: Any = _drawless_code
    for name in hidden:
        code = HIDING[name](code)
    # A generator and what makes classes say how they are called by names that any code may go by.
    assert cannot_draw([Drawing(code)]) or {"class", "cache"} & {*hidden}


def _drawless_code() -> Tensor:
    return torch.stack([torch.rand(1)])


def test_torchs_datasets_and_collate_are_read_through() -> None:
    loader = DataLoader(Subset(Drawing(_drawless_code), [0, 1]), batch_size=2, shuffle=True)
    assert cannot_draw([loader.dataset, loader.collate_fn, loader.batch_sampler])
    assert not cannot_draw([loader.dataset, lambda samples: default_collate(samples) + normal(0, 1)])


def test_what_cannot_be_read_may_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    @attrs.define
    class Many:
        held: list[Any]

    assert cannot_draw([Many([object() for _ in range(100)])])
    assert not cannot_draw([Many([object() for _ in range(_drawless._MOST)])])
    extension = types.ModuleType("an_extension")
    assert not cannot_draw([lambda: extension])
    assert not cannot_draw([functools.partial(_variable.get)])
    monkeypatch.setitem(torch_private.default_collate_functions or {}, Many, lambda *_, **__: bound())
    assert not cannot_draw([default_collate])
    monkeypatch.setattr(_drawless, "default_collate_functions", None)
    assert not cannot_draw([default_collate])


def test_a_function_that_is_exchanged_is_read_again_in_the_next_epoch() -> None:
    dataset = Drawing(_drawless_code)
    batches = source(DataLoader(dataset, batch_size=2), seed=0, stream="train")
    first = list(batches.epoch(0))
    drawn: list[float] = []
    dataset.change = lambda: drawn.append(bound())
    for _ in range(2):
        random.random()
        list(batches.epoch(1))
    assert drawn[:6] == drawn[6:]
    dataset.change = _drawless_code
    assert all(map(torch.equal, first, batches.epoch(0)))


@pytest.mark.parametrize("kind", ["loader", "sequence", "iterable", "iterator"])
def test_what_is_drawn_from_torch_is_the_same_as_if_all_were_seeded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Iterable:
        def __iter__(self) -> Iterator[Tensor]:
            yield from (torch.rand(2) for _ in range(4))

    class Listed:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(2)

    def batches() -> list[Tensor]:
        data = {
            "loader": lambda: DataLoader(Drawing(_drawless_code), batch_size=2),
            "sequence": Listed,
            "iterable": Iterable,
            "iterator": lambda: iter(Iterable()),
        }[kind]()
        torch.manual_seed(5)
        drawn = list(source(data, seed=0, stream="train").epoch(0))
        assert torch.initial_seed() == 5
        return drawn

    alone = batches()
    guards: list[Any] = []
    monkeypatch.setattr(Source, "_guard_of", lambda self, code: guards.append(cannot_draw(code)) or seeded_all)
    assert all(map(torch.equal, alone, batches()))
    assert guards == [True]
