"""Parts of batches: by index, key, attribute and lens."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

import pure_loop as pl
from pure_loop.lens import part_of, with_part

Named = namedtuple("Named", ["x", "y"])
Data = dataclasses.make_dataclass("Data", ["x", "y"])
Record = attrs.make_class("Record", ["x", "y"], frozen=True)
FLIPPED = pl.Lens(lambda batch: batch[1][0], lambda batch, value: (batch[0], [value, *batch[1][1:]]))
BATCHES: list[tuple[Any, Any]] = [
    *(((1, 2), 0), ([1, 2], 0), ((2, 1), -1), ({"x": 1, "y": 2}, "x"), (UserDict(x=1, y=2), "x")),
    *((pl.FrozenDict(x=1, y=2), "x"), (Named(1, 2), "x"), (Named(1, 2), 0), (Data(1, 2), "x"), (Record(1, 2), "x")),
    *((SimpleNamespace(x=1, y=2), "x"), ((2, [1, 3]), FLIPPED)),
]


def test_a_part_and_another_batch_with_it() -> None:
    for batch, key in BATCHES:
        before = repr(batch)
        assert part_of(batch, key, "f", "input_key") == 1
        changed = with_part(batch, key, 9)
        assert type(changed) is type(batch)
        assert part_of(changed, key, "f", "input_key") == 9
        assert repr(batch) == before
        assert repr(with_part(changed, key, 1)) == before


def test_a_tensor_is_its_own_inputs() -> None:
    batch, other = torch.ones(3, 2), torch.zeros(3, 2)
    assert part_of(batch, 0, "f", "input_key") is batch
    assert with_part(batch, 0, other) is other
    with pytest.raises(pl.errors.DataError, match=r"a batch is a Tensor and has no batch\[1\]"):
        part_of(batch, 1, "f", "target_key")


X: Any = {"x": 1}
WITHOUT = ((X, "y"), (X, "items"), ((1,), 1), ((1,), "count"), (Data(1, 2), "z"), (torch.ones(2), "shape"))


def test_what_is_no_part_and_no_lens() -> None:
    says = r'^mixup: a batch is a .* and has no batch.*mixup\(target_key="labels"\)'
    for batch, key in WITHOUT:
        with pytest.raises(pl.errors.DataError, match=says):
            part_of(batch, key, "mixup", "target_key")
    with pytest.raises(pl.errors.ArgumentTypeError, match="Lens: put=3 is not a function"):
        pl.Lens(len, 3)  # type: ignore[arg-type]
