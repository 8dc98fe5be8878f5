"""What laws call equal: bits, and NaN with NaN; and what they say of numbers that differ."""

from __future__ import annotations

from typing import Any

import attrs
import torch

import pure_loop as pl
from pure_loop.testing.comparison import Comparer, Keeper, Snapshot, apart, close, differences
from tests.support.cpu_time import within


@attrs.frozen
class Noted(pl.State):
    note: int = 0


def state(*numbers: float) -> Noted:
    with pl.random.seeded(0):
        made = Noted.create(torch.nn.BatchNorm1d(len(numbers)))
    return made.replace(buffers={**made.buffers, "running_mean": torch.tensor(numbers)})


def test_zero_is_not_minus_zero() -> None:
    plus, minus = state(1.0, 0.0), state(1.0, -0.0)
    (difference,) = differences(minus, plus)
    assert difference.leaf == "state.buffers['running_mean']"
    assert str(difference).endswith("should be tensor([1., 0.]) float32 (2,)")
    assert not Comparer().equal(minus, plus)
    assert close(minus, plus, tolerance=0.0) is None
    kept, snapshot = Keeper(), Snapshot(plus)
    kept.keep(plus)
    assert (kept.changed(), snapshot.changed()) == (None, None)
    plus.buffers["running_mean"].data.neg_()
    assert None not in (kept.changed(), snapshot.changed())


def test_all_that_a_state_holds_is_compared_and_nan_is_nan() -> None:
    noted: Any = state(1.0)
    assert Comparer().equal(noted, noted.replace())
    assert not Comparer().equal(noted, noted.replace(note=1))  # a field of a class of the user's
    assert differences({"a": None}, {}, name="tree")
    assert not differences({"a": None}, {"a": None}, name="tree")
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        nan, one = (torch.tensor([number, 1.0]).to(dtype) for number in (float("nan"), 1.0))
        assert differences({"nan": nan}, {"nan": nan.clone()}) == []
        assert len(differences({"nan": nan}, {"nan": one})) == 1
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert differences({"a": tensor}, {"a": tensor.conj()})  # in one memory
    assert not differences({"a": tensor.conj()}, {"a": tensor.conj().clone()})
    assert differences({"a": tensor.imag}, {"a": tensor.conj().imag})


def test_the_first_number_that_differs_is_named_and_found_at_once() -> None:
    """Where it is shown as the other; and by halves: one by one it would take minutes for the parameters of a model."""
    one, other = torch.zeros(9), torch.zeros(9).index_fill(0, torch.tensor([8]), 1e-9)
    (difference,) = differences({"x": one}, {"x": other}, name="tree")
    assert str(difference).endswith("number 8 is 0.0, and should be 9.999999717180685e-10")
    value = torch.arange(300_000.0)
    changed = torch.cat([value[:-10], value[-10:] + 1])
    assert within(1.0, lambda: apart(changed, value)) == "number 299990 is 299991.0, and should be 299990.0"
