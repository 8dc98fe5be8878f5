"""``pl.lr_find``: the losses of a loop by hand at the same rates, on a fork; and what it suggests."""

from __future__ import annotations

import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop.tools.range_test import RangeTest
from tests.support import problem
from tests.support.problem import cross_entropy, mlp, points
from tests.support.refused import Refusal, check
from tests.support.streams import assert_same
from tests.support.worlds import pool

SETTINGS: dict[str, Any] = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}


def find(model: Any = None, data: Any = None, **options: Any) -> RangeTest:
    return pl.lr_find(model or mlp(), points() if data is None else data, **{**SETTINGS, **options})


def by_hand(data: Any, rates: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> list[float]:
    """The losses of a plain loop, that of the first batch included."""
    losses = []
    for (inputs, targets), rate in zip(islice(cycle(data), len(rates) + 1), [*rates, 0.0], strict=True):
        loss = cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("ratio", 1.0)
        optimizer.step()
    return losses


def halves(model: nn.Module) -> torch.optim.Optimizer:
    matrices, biases = ([p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False))
    groups: Any = [{"params": matrices}, {"params": biases, "ratio": 0.5}]
    return torch.optim.SGD(groups)


def parts(lr: Any, other: Any) -> pl.Optimizer:
    optimizers = {"weights": pl.optim.sgd(lr=lr), "biases": pl.optim.sgd(lr=other)}
    return pl.optim.partition(optimizers, label=lambda name, tensor: "weights" if tensor.ndim == 2 else "biases")


warm = pl.schedules.cosine("1dur", peak=1e-3, warmup="10ba")  # 0 at first
halving = pl.schedules.constant(0.2) * pl.schedules.linear(1.0, 0.5, "4ba")
OPTIMIZERS: list[tuple[pl.Optimizer, Any]] = [
    (pl.optim.sgd(lr=warm, momentum=0.9), lambda model: torch.optim.SGD(model.parameters(), momentum=0.9)),
    (pl.optim.adamw(lr=warm), lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.01)),
    (pl.optim.from_torch(torch.optim.RMSprop, lr=warm), lambda model: torch.optim.RMSprop(model.parameters())),
    (parts(0.2, 0.1), halves),
    (parts(halving, pl.schedules.linear(0.1, 0.05, "4ba")), halves),
]


@settings(max_examples=10)
@given(st.sampled_from(OPTIMIZERS), st.floats(1e-6, 1e-3), st.floats(0.5, 3), st.integers(10, 14))
def test_losses_are_those_of_a_loop_by_hand(optimizers: Any, lowest: float, decades: float, steps: int) -> None:
    ours, theirs = optimizers
    found = find(optimizer=ours, lowest=lowest, highest=lowest * 10**decades, steps=steps)
    rates = [lowest * 10 ** (decades * number / (steps - 1)) for number in range(len(found.learning_rates))]
    assert list(found.learning_rates) == pytest.approx(rates)
    module = mlp()
    expected = by_hand(points(), found.learning_rates, theirs(module), module)
    assert [found.initial_loss, *found.losses] == pytest.approx(expected, rel=1e-4)
    assert len(found.losses) == steps or found.diverged


def loader() -> DataLoader[Any]:
    ((inputs, targets),) = points(1, size=32)
    return DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True, generator=problem.noise(3))


def test_nothing_is_trained_and_nothing_moves() -> None:
    model, data, numbers = nn.Sequential(nn.Dropout(0.5), mlp()), loader(), torch.random.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find(model, data, algorithms=[pl.algorithms.ema(half_life="4ba")], highest=100.0, steps=20)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert_same(dict(model.state_dict()), before, "the model")
    assert_same(problem.run(model, data), problem.run(model, loader()), "a run after it")
    for optimizer in (pl.optim.adamw(lr=0.01), pl.optim.from_torch(torch.optim.Adam, lr=0.01)):
        half = problem.run(optimizer=optimizer, max_duration="4ba")
        expected = problem.run(half, optimizer=optimizer)
        found = find(half, steps=20, lowest=1e-5, optimizer=optimizer, max_duration="2ep")
        assert_same(problem.run(half, optimizer=optimizer), expected, "from a State")
        inputs, targets = points()[1]
        assert found.initial_loss == pytest.approx(cross_entropy(half.module()(inputs), targets).item())
    ended = problem.run().replace(stop=True)  # of a State that has ended, too
    assert len(find(ended, steps=20, highest=1e-5, max_duration="2ep").losses) == 20


class Untouched(pl.Callback):
    def run_event(self, event: pl.Event, state: pl.State, logger: Any) -> None:
        raise AssertionError("called")

    def __iter__(self) -> Any:
        raise AssertionError("read")

    def __len__(self) -> int:
        return 3


def test_observers_and_evaluations_are_left_out_and_a_dict_of_losses_counts_by_its_total(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"total": (total := cross_entropy(outputs, targets)), "twice": 2 * total}

    observers: dict[str, Any] = {"callbacks": [Untouched()], "evaluators": {"val": Untouched()}, "eval_interval": "1ba"}
    stopping = [pl.algorithms.early_stopping("val/loss")]
    found = find(algorithms=stopping, autoresume=tmp_path / "runs", loss=loss, steps=10, **observers)
    assert found.losses == find(steps=10).losses
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=5)
@given(largest=st.floats(0.1, 100))
def test_the_suggestion_converges_and_what_diverges_stops_the_test(largest: float) -> None:
    """A least-squares problem whose gradient descent diverges above ``2 / largest``."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    data = [(torch.eye(3, dtype=torch.float64) * (largest * 3 / 2) ** 0.5, torch.ones(3, 1, dtype=torch.float64))]
    rates = {"lowest": 1e-4 / largest, "highest": 1e3 / largest}
    found = find(model, data, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=1), **rates)
    assert found.diverged
    assert 2 / largest < found.learning_rates[-1] < 20 / largest
    assert 0.01 / largest < found.suggestion < 2 / largest
    assert found.tenth_of_minimum < 2 / largest


def test_a_loss_that_is_not_finite_ends_the_test() -> None:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, 1e-3)
    loss = lambda outputs, targets: (torch.exp(-1e3 * outputs) + torch.exp(1e3 * outputs)).mean()  # noqa: E731
    found = find(model, [(torch.ones(4, 1), torch.zeros(4, 1))], loss=loss, lowest=1e-9)
    assert found.diverged
    assert all(each < float("inf") for each in found.losses)
    with pytest.raises(pl.errors.NonFiniteError, match="before any learning rate has had an effect"):
        find(data=[(torch.full((4, 4), float("nan")), torch.zeros(4, dtype=torch.int64))])


def test_the_report_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [10 ** (power / 20) for power in range(-80, 1)]
    falling = RangeTest(rates, [1 / (1 + 100 * rate) for rate in rates], 1.0, diverged=False)
    assert 0.005 < falling.suggestion < 0.02
    assert falling.tenth_of_minimum == rates[-1] / 10
    assert "suggestion        0.01 " in repr(falling)
    axes = falling.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    assert falling.plot(axes=axes) is axes
    assert str(falling._repr_png_()).startswith(r"b'\x89PNG")
    assert RangeTest((), (), 1.0, diverged=True)._repr_png_() is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert falling._repr_png_() is None
    # A curve that explodes at its end falls where it fell before.
    exploding = RangeTest([*rates, 1.2, 1.4], [*falling.losses, 1e6, 1e9], 1.0, diverged=True)
    assert exploding.suggestion == falling.suggestion
    assert "where the loss diverged" in repr(exploding)
    for losses in ([1 + 0.1 * (-1) ** index for index in range(len(rates))], [1 + rate for rate in rates]):
        found = RangeTest(rates, losses, 1.0, diverged=False)
        assert all(len(line) <= 80 for line in repr(found).splitlines())
        for name in ("suggestion", "tenth_of_minimum"):
            with pytest.raises(pl.errors.ArgumentError, match="does not fall by more than it fluctuates"):
                getattr(found, name)
    with pytest.raises(pl.errors.ArgumentError, match="begin lower"):
        _ = RangeTest((), (), 1.0, diverged=True).suggestion


@pytest.mark.slow  # processes
def test_all_ranks_find_what_one_finds() -> None:
    results = pool().run(lambda rank: find(parallel="replicate").losses)
    assert results[0] == results[1]
    assert results[0] == pytest.approx(find().losses, rel=1e-4)


def test_what_has_no_rates_to_find_is_refused() -> None:
    own: Any = {"init": lambda params: pl.FrozenDict(), "update": lambda *given: (given[2], given[1])}
    mine = pl.Optimizer(name="mine", lr=lambda t: 0.1, **own)
    for says, options in (
        ("lowest=1 must be below highest=1", {"lowest": 1.0}),
        ("steps must be a whole number of at least 10", {"steps": 9}),
        ("list_iterator, an iterator", {"data": iter(points())}),
        ("the learning rate of optimizer 'mine' can't be set", {"optimizer": mine}),
        ("give constant rates", {"optimizer": parts(warm, 0.1)}),
        ("lr_find has no argument 'min_lr'", {"min_lr": 1e-3}),
    ):
        check(Refusal(says, lambda options=options: find(**options), pl.PureLoopError, (says,)))
