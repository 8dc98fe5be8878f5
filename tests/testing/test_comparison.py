"""What laws call equal: bits, and NaN with NaN."""

from __future__ import annotations

import time

import attrs
import torch

import pure_loop as pl
from pure_loop.testing.comparison import Comparer, Keeper, Snapshot, apart, close, differences


def state(*numbers: float) -> pl.State:
    with pl.random.seeded(0):
        return pl.State.create(torch.nn.BatchNorm1d(len(numbers))).replace(
            buffers={
                "running_mean": torch.tensor(numbers),
                "running_var": torch.ones(len(numbers)),
                "num_batches_tracked": torch.tensor(0),
            }
        )


def test_zero_is_not_minus_zero() -> None:
    plus, minus = state(1.0, 0.0), state(1.0, -0.0)
    (difference,) = differences(minus, plus)
    assert difference.leaf == "state.buffers['running_mean']"
    assert str(difference).endswith("should be tensor([1., 0.]) float32 (2,)")
    assert not Comparer().equal(minus, plus)
    assert close(minus, plus, tolerance=0.0) is None
    kept, written = Keeper(), state(0.0)
    kept.keep(written)
    for watcher in (Snapshot(written), kept):
        assert watcher.changed() is None
    snapshot = Snapshot(written)
    written.buffers["running_mean"].data.neg_()
    assert snapshot.changed() is not None
    assert kept.changed() is not None


@attrs.frozen
class Noted(pl.State):
    note: int = 0


def test_containers_none_and_fields_of_a_class_of_the_users_are_compared() -> None:
    noted = Noted.create(torch.nn.Linear(1, 1))
    assert Comparer().equal(noted, noted.replace())
    assert not Comparer().equal(noted, noted.replace(note=1))
    assert differences({"a": None}, {}, name="tree")
    assert not differences({"a": None}, {"a": None}, name="tree")


def test_nan_is_nan_and_a_tensor_and_its_conjugate_in_one_memory_differ() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        nan, one = (torch.tensor([number, 1.0]).to(dtype) for number in (float("nan"), 1.0))
        assert differences({"nan": nan}, {"nan": nan.clone()}) == []
        assert len(differences({"nan": nan}, {"nan": one})) == 1
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert differences({"a": tensor}, {"a": tensor.conj()})
    assert not differences({"a": tensor.conj()}, {"a": tensor.conj().clone()})
    assert differences({"a": tensor.imag}, {"a": tensor.conj().imag})


def test_the_first_number_that_differs_is_named_and_found_at_once() -> None:
    """Where it is shown as the other; and by halves: one by one it would take minutes for the parameters of a model."""
    one, other = torch.zeros(9), torch.zeros(9).index_fill(0, torch.tensor([8]), 1e-9)
    (difference,) = differences({"x": one}, {"x": other}, name="tree")
    assert str(difference).endswith("number 8 is 0.0, and should be 9.999999717180685e-10")
    value = torch.arange(300_000.0)
    changed = value.clone()
    changed[299_990:] += 1
    begin = time.process_time()
    assert apart(changed, value) == "number 299990 is 299991.0, and should be 299990.0"
    assert time.process_time() - begin < 1
