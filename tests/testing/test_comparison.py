"""What laws call equal: bits, and NaN with NaN."""

from __future__ import annotations

import time

import attrs
import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop.testing.comparison import Comparer, Keeper, Snapshot, apart, close, differences

BUFFER = "state.buffers['running_mean']"


def state(*numbers: float) -> pl.State:
    return pl.State.create(torch.nn.BatchNorm1d(len(numbers))).replace(
        buffers={
            "running_mean": torch.tensor(numbers),
            "running_var": torch.ones(len(numbers)),
            "num_batches_tracked": torch.tensor(0),
        }
    )


def test_zero_is_not_minus_zero() -> None:
    plus, minus = state(1.0, 0.0), state(1.0, -0.0)
    minus = minus.replace(params=plus.params)
    (difference,) = differences(minus, plus)
    assert difference.leaf == BUFFER
    assert str(difference).endswith("should be tensor([1., 0.]) float32 (2,)")
    assert not Comparer().equal(minus, plus)
    assert close(minus, plus, tolerance=0.0) is None


@attrs.frozen
class Noted(pl.State):
    note: int = 0


def test_fields_of_a_class_of_the_users_are_compared_too() -> None:
    noted = Noted.create(torch.nn.Linear(1, 1))
    assert Comparer().equal(noted, noted.replace())
    assert not Comparer().equal(noted, noted.replace(note=1))


@pytest.mark.parametrize("kind", [Snapshot, Keeper])
def test_a_sign_that_is_written_to_a_zero_is_a_change(kind: type) -> None:
    written = state(0.0)
    watcher = kind(written) if kind is Snapshot else kind()
    if kind is Keeper:
        watcher.keep(written)
    assert watcher.changed() is None
    written.buffers["running_mean"].data.neg_()
    assert watcher.changed() is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_nan_is_nan(dtype: torch.dtype) -> None:
    nan: Tensor = torch.tensor([float("nan"), 1.0]).to(dtype)
    assert differences({"nan": nan}, {"nan": nan.clone()}) == []
    assert len(differences({"nan": nan}, {"nan": torch.tensor([1.0, 1.0]).to(dtype)})) == 1


def test_a_tensor_and_its_conjugate_in_one_memory_differ() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert pl.testing.differences({"a": tensor}, {"a": tensor.conj()})
    assert not pl.testing.differences({"a": tensor.conj()}, {"a": tensor.conj().clone()})
    assert pl.testing.differences({"a": tensor.imag}, {"a": tensor.conj().imag})


def test_the_first_number_that_differs_of_many_is_found_at_once() -> None:
    """By halves: one by one it would take seconds here, and minutes for the parameters of a model."""
    value = torch.arange(300_000.0)
    other = value.clone()
    other[299_990:] += 1
    begin = time.process_time()
    assert apart(other, value) == "number 299990 is 299991.0, and should be 299990.0"
    assert time.process_time() - begin < 1
