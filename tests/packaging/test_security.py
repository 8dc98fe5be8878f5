"""What SECURITY.md says that reading a checkpoint calls of registered classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pure_loop as pl
from pure_loop._internal import registry

called: list[str] = []


def make_default() -> int:
    called.append("default factory")
    return 7


@dataclasses.dataclass(eq=False)
class Key:
    number: int
    later: int = dataclasses.field(default_factory=make_default)

    def __post_init__(self) -> None:
        called.append("__post_init__")

    def __setattr__(self, name: str, value: Any) -> None:
        called.append("__setattr__")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        called.append("__hash__")
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        called.append("__eq__")
        return isinstance(other, Key) and self.number == other.number


@pytest.fixture
def registered() -> Iterator[None]:
    register = pl.checkpoint.register  # which registers the library's own
    named, classes = dict(registry._by_name), dict(registry._by_class)
    register(Key)
    yield
    for table, before in ((registry._by_name, named), (registry._by_class, classes)):
        table.clear()
        table.update(before)


def called_by_loading(value: Any, path: Path) -> set[str]:
    model = torch.nn.Linear(2, 1)
    pl.save(pl.State.create(model).remember("mine", value), path)
    called.clear()
    loaded = pl.load(path, model=model).algorithm_state["mine"]
    result = set(called)
    assert type(loaded) is type(value)
    return result


@pytest.mark.usefixtures("registered")
def test_a_value_is_made_without_a_call(tmp_path: Path) -> None:
    assert called_by_loading([Key(1)], tmp_path / "x.safetensors") == set()


@pytest.mark.usefixtures("registered")
def test_keys_are_hashed(tmp_path: Path) -> None:
    assert "__hash__" in called_by_loading({Key(1): 2, Key(3): 4}, tmp_path / "x.safetensors") <= {"__hash__", "__eq__"}


@pytest.mark.usefixtures("registered")
def test_a_field_that_the_file_lacks_gets_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry._by_class[Key]
    monkeypatch.setitem(registry._by_class, Key, registry.Kind(Key, kind.name, ("number",)))
    assert called_by_loading([Key(1)], tmp_path / "x.safetensors") == {"default factory"}
