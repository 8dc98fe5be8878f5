"""Steps that may be left out: they write in place as others do, and one that is left out writes nothing."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages import ownership
from pure_loop.stages.nonfinite import gradients_nonfinite
from pure_loop.stages.references import can_count
from pure_loop.stages.workspace import Workspace
from tests.state.test_memory import live_tensors, without_collector
from tests.support.donating import DATA, Count, assert_same, fit, partition

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]

BAD = (0, 4, 9)
SETTINGS: list[dict[str, Any]] = [
    {"nonfinite": "skip"},
    {"precision": "amp_fp16"},
    {"precision": "amp_fp16", "nonfinite": "skip"},
]
OPTIMIZERS = {
    "adamw": pl.optim.adamw(lr=0.1),
    "adam": pl.optim.adam(lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd": pl.optim.sgd(lr=0.1),
    "momentum": pl.optim.sgd(lr=0.1, momentum=0.9, nesterov=True),
    "dampening": pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1),
    "partition": partition(),
    "partition with dampening": pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1)},
        label=lambda name, tensor: "a" if tensor.ndim > 1 else "b",
    ),
}
ON_A_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def infinite_gradients(state: pl.State) -> pl.State:
    if state.timestamp.batch not in BAD:
        return state
    assert state.grads is not None
    return state.replace(grads={name: torch.full_like(each, math.inf) for name, each in state.grads.items()})


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_it_writes_in_place_and_trains_as_if_it_copied(
    count: Count, options: dict[str, Any], optimizer: str, device: str
) -> None:
    def last(**more: Any) -> pl.State:
        return pl.run(
            fit(
                with_batch_norm(),
                algorithms=[infinite_gradients],
                optimizer=OPTIMIZERS[optimizer],
                device=device,
                **options,
                **more,
            )
        )

    expected = last(donate=False)
    assert count.reused + count.copied == 0
    assert int(expected.skipped) >= len(BAD)
    assert_same(last(), expected)
    # On a CPU a step that is left out asks for no memory; on a device the host doesn't know that it is.
    steps = 15 - int(expected.skipped) if device == "cpu" else 15
    if device != "cpu" and "dampening" in optimizer:
        steps = 0
    assert (count.copied, count.reused) == (0, steps)


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
def test_who_kept_a_state_keeps_its_numbers(device: str) -> None:
    kept = []
    for event, state in fit(algorithms=[infinite_gradients], nonfinite="skip", device=device):
        if event is Event.BATCH_END:
            kept.append(
                (state, [each.clone() for each in (*state.params.values(), *state.opt_state["exp_avg"].values())])
            )
    for state, numbers in kept:
        now = [*state.params.values(), *state.opt_state["exp_avg"].values()]
        assert all(map(torch.equal, now, numbers))
    left_out = [number for number, (state, _) in enumerate(kept) if int(state.skipped)]
    assert left_out[0] == BAD[0]


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
@pytest.mark.parametrize("donate", ["auto", False])
def test_what_the_forward_of_a_step_that_is_left_out_counted_is_undone(donate: Any, device: str) -> None:
    state = pl.run(
        fit(with_batch_norm(), algorithms=[infinite_gradients], nonfinite="skip", donate=donate, device=device)
    )
    assert int(state.buffers["1.num_batches_tracked"]) == 15 - len(BAD)


def test_what_was_noted_for_a_step_that_is_left_out_holds_for_no_later_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small ones, whose references are not counted anew."""
    monkeypatch.setattr(ownership, "LARGE", 2**18)
    kept = []
    for event, state in fit(algorithms=[infinite_gradients], nonfinite="skip", clip_grad=1.0):
        if event is Event.AFTER_BACKWARD:  # clipping comes next
            assert state.grads is not None
            kept.append((state, [each.clone() for each in state.grads.values()]))
    for state, numbers in kept:
        assert state.grads is not None
        assert all(map(torch.equal, state.grads.values(), numbers))


class HalfUsed(nn.Module):
    """One of its parameters has no gradient, of which the optimizer keeps count on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def some_infinite_gradients(state: pl.State) -> pl.State:
    if state.timestamp.batch not in BAD:
        return state
    assert state.grads is not None
    grads = {name: None if each is None else each * math.inf for name, each in state.grads.items()}
    return state.replace(grads=grads)


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "partition"])
def test_a_parameter_without_a_gradient(optimizer: str, device: str) -> None:
    def last(**more: Any) -> pl.State:
        torch.manual_seed(0)
        return pl.run(
            fit(
                HalfUsed(),
                algorithms=[some_infinite_gradients],
                optimizer=OPTIMIZERS[optimizer],
                nonfinite="skip",
                device=device,
                **more,
            )
        )

    expected = last(donate=False)
    assert_same(last(), expected)
    assert int(expected.skipped) == len(BAD)
    if optimizer == "adamw":
        # One that is left out counts nothing, of those without a gradient neither.
        assert expected.opt_state["skipped"]["unused.weight"] == 15 - len(BAD)
        assert float(expected.opt_state["step"]) == 15 - len(BAD)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), pl.optim.from_torch(torch.optim.RAdam, lr=0.1)], ids=repr)
def test_a_loss_on_the_host(optimizer: pl.optim.Optimizer, precision: str) -> None:
    """Where what the optimizer counts on the host differs, too, whichever batch it is."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.cpu(), targets.cpu())

    def last(model: nn.Module) -> pl.State:
        return pl.run(
            fit(
                model,
                loss=loss,
                algorithms=[some_infinite_gradients],
                optimizer=optimizer,
                nonfinite="skip",
                precision=precision,
                device="cuda",
            )
        )

    state = last(with_batch_norm())
    assert int(state.skipped) >= len(BAD)
    assert int(state.buffers["1.num_batches_tracked"]) == 15 - int(state.skipped)
    assert int(last(HalfUsed()).skipped) >= len(BAD)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "dampening"])
def test_where_steps_copy_nothing_of_the_start_is_kept(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = Workspace.made

    def made(this: Workspace, state: pl.State, *, lent: bool = False) -> None:
        real(this, state, lent=lent)
        assert this.ownership is not None
        kept.append((this.ownership._granted(), this.ownership._last()))

    monkeypatch.setattr(Workspace, "made", made)
    pl.run(fit(HalfUsed(), optimizer=OPTIMIZERS[optimizer], nonfinite="skip", device="cuda"))
    assert kept == [(None, None)] * 16  # at the start, and after 15 steps


@pytest.mark.parametrize("options", SETTINGS[:2], ids=str)
def test_memory_stays_that_of_one_update(options: dict[str, Any]) -> None:
    model = nn.Linear(300, 300)
    size = sum(p.numel() * 4 for p in model.parameters())
    data = [(torch.zeros(2, 300), torch.zeros(2, dtype=torch.int64))] * 2
    most = 0
    with without_collector():
        for event, state in fit(model, data=data, max_duration="4ep", **options):
            if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END) and state.timestamp.batch > 3:
                most = max(most, live_tensors()[1])
    # Parameters, two moments and the gradients, and a little.
    assert most <= 4.2 * size, f"{most / size:.2f} times the parameters"


HOW = [{}, {"donate": False}, {"compile": True}, {"compile": True, "watch": {"epoch_end"}}]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("options", [{}, *SETTINGS], ids=str)
def test_an_update_that_overflows_by_itself_is_an_error(options: dict[str, Any], how: dict[str, Any]) -> None:
    """Loss and gradients are finite, so no batch is to blame: left out, every later one would be, too."""
    with pytest.raises(pl.NonFiniteError, match=r"batch \d+ .*the optimizer's step made"):
        pl.run(fit(optimizer=pl.optim.sgd(lr=1e39), **options, **how))


@pytest.mark.gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("options", [{}, *SETTINGS], ids=str)
def test_on_a_device_it_is_noted(options: dict[str, Any], how: dict[str, Any]) -> None:
    with pytest.raises(pl.NonFiniteError, match=r"of batch \d+ was NaN or infinite"):
        pl.run(fit(optimizer=pl.optim.sgd(lr=1e39), device="cuda", **options, **how))


def test_a_sparse_gradient_that_is_not_finite_is_named() -> None:
    torch.manual_seed(0)
    data = [(torch.tensor([1, 1]), torch.zeros(2))] * 2
    options: dict[str, Any] = {
        "loss": lambda outputs, _: (outputs * 2e38).sum(),
        "optimizer": pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1),
        "data": data,
    }

    def embedding() -> nn.Module:
        return nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))

    assert int(pl.run(fit(embedding(), nonfinite="skip", max_duration="1ep", **options)).skipped) == 2
    with pytest.raises(pl.NonFiniteError, match="gradient of 'weight'"):
        pl.run(fit(embedding(), max_duration="1ep", **options))


class Complex(nn.Module):
    """Its gradient has the conjugate bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight.conj()).abs()


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
@pytest.mark.parametrize("optimizer", [pl.optim.adamw(lr=0.1), pl.optim.from_torch(torch.optim.Adam, lr=0.1)], ids=repr)
def test_complex_gradients(optimizer: pl.optim.Optimizer, nonfinite: str) -> None:
    data = [(x[:4], torch.ones(4, 3)) for x, _ in DATA]
    loss = torch.nn.functional.mse_loss
    state = pl.run(fit(Complex(), data=data, loss=loss, optimizer=optimizer, nonfinite=nonfinite))
    assert int(state.skipped) == 0


# What an optimizer does with `found_inf`. -----------------------------------------------------------------------------


def trained(optimizer: pl.optim.Optimizer) -> tuple[Any, Any, Any, pl.Timestamp]:
    """Gradients, memory and parameters of a run, not aliased."""
    state = pl.run(fit(optimizer=optimizer))
    grads = pl.FrozenDict({name: torch.ones_like(each) for name, each in state.params.items()})
    return grads, state.opt_state, state.params, state.timestamp


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overwrite_with_found_inf(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    if not optimizer.takes_found_inf:
        assert "dampening" in name
        return
    assert optimizer.overwrite is not None
    expected = optimizer.update(*trained(optimizer))
    before = trained(optimizer)
    assert_same(optimizer.overwrite(*trained(optimizer), found_inf=torch.ones(1)), (before[2], before[1]))
    given = trained(optimizer)
    done = optimizer.overwrite(*given, found_inf=torch.zeros(1))
    assert done[0] is given[2], "in place"
    assert_same(done, expected)


# What is looked at. ---------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
NUMBERS = [0.0, -1.5, 6e4, math.inf, -math.inf, math.nan]


def tensor_of(numbers: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


@given(
    grads=st.lists(
        st.builds(tensor_of, st.lists(st.sampled_from(NUMBERS), max_size=4), st.sampled_from(DTYPES)), max_size=4
    ),
    loss=st.sampled_from([0.5, math.nan, -math.inf]),
)
def test_it_finds_what_is_not_finite(grads: list[torch.Tensor], loss: float) -> None:
    before = [each.clone() for each in grads]
    versions = [each._version for each in grads]
    found = gradients_nonfinite(torch.tensor(loss), grads)
    assert (found.dtype, found.shape) == (torch.float32, (1,))
    finite = math.isfinite(loss) and all(bool(torch.isfinite(each).all()) for each in grads)
    assert found.item() == (not finite)
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(grads, before, strict=True))
    assert [each._version for each in grads] == versions


def test_large_numbers_and_sparse_ones() -> None:
    large = torch.tensor([1.5e308, 1.5e308], dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([math.nan]), (3,), check_invariants=True)
    look = partial(gradients_nonfinite, torch.tensor(1.0))
    assert not look([large, torch.ones(2)]).item()
    conjugate, both = torch.tensor([1j, complex(0, math.inf)]).conj(), sparse.to(torch.complex64)
    assert look([conjugate]).item()
    assert not look([conjugate[:1]]).item()
    assert look([both]).item()
    assert not look([torch.tensor([2**40]), torch.tensor([True])]).item()
    # Twice the same place: each is finite, and what they add up to is not.
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([3e38, 3e38]), (3,), check_invariants=True)
    assert look([twice]).item()
    assert look([torch.ones(2), sparse]).item()
