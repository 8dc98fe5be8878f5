"""``pl.lr_find``: the losses of a loop by hand at the same rates, on a fork; and what it suggests."""

from __future__ import annotations

import copy
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
from tests.support.runs import cross_entropy, equal, mlp, points, train
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
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("ratio", 1.0)
        optimizer.step()
    return losses


def halves(model: nn.Module, cls: Any, **options: Any) -> torch.optim.Optimizer:
    weights = [param for param in model.parameters() if param.ndim == 2]
    biases = [param for param in model.parameters() if param.ndim < 2]
    return cls([{"params": weights, "ratio": 1.0}, {"params": biases, "ratio": 0.5}], **options)  # type: ignore[no-any-return]


def parts(lr: Any, other: Any) -> pl.Optimizer:
    return pl.optim.partition(
        {"weights": pl.optim.sgd(lr=lr), "biases": pl.optim.sgd(lr=other)},
        label=lambda name, tensor: "weights" if tensor.ndim == 2 else "biases",
    )


warm = pl.schedules.cosine("1dur", peak=1e-3, warmup="10ba")  # 0 at first
OPTIMIZERS: dict[str, tuple[pl.Optimizer, Any]] = {
    "sgd": (pl.optim.sgd(lr=0.3), lambda model: torch.optim.SGD(model.parameters())),
    "momentum": (pl.optim.sgd(lr=warm, momentum=0.9), lambda m: torch.optim.SGD(m.parameters(), momentum=0.9)),
    "adamw": (pl.optim.adamw(lr=warm), lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.01)),
    "from_torch": (
        pl.optim.from_torch(torch.optim.RMSprop, lr=0.2),
        lambda model: torch.optim.RMSprop(model.parameters()),
    ),
    "scheduled": (
        pl.optim.from_torch(torch.optim.RMSprop, lr=warm),
        lambda model: torch.optim.RMSprop(model.parameters()),
    ),
    "partition": (parts(0.2, 0.1), lambda model: halves(model, torch.optim.SGD)),
    "partition of schedules": (
        parts(pl.schedules.constant(0.2) * pl.schedules.linear(1.0, 0.5, "4ba"), pl.schedules.linear(0.1, 0.05, "4ba")),
        lambda model: halves(model, torch.optim.SGD),
    ),
}


@settings(max_examples=20)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    lowest=st.floats(1e-6, 1e-3),
    decades=st.floats(0.5, 3),
    steps=st.integers(10, 14),
)
def test_losses_are_those_of_a_loop_by_hand(name: str, lowest: float, decades: float, steps: int) -> None:
    ours, theirs = OPTIMIZERS[name]
    found = find(data=points(), optimizer=ours, lowest=lowest, highest=lowest * 10**decades, steps=steps)
    ratios = [one / other for one, other in zip(found.learning_rates[1:], found.learning_rates, strict=False)]
    assert found.learning_rates[0] == lowest
    assert ratios == pytest.approx([10 ** (decades / (steps - 1))] * (len(found.learning_rates) - 1))
    module = mlp()
    expected = by_hand(points(), found.learning_rates, theirs(module), module)
    assert [found.initial_loss, *found.losses] == pytest.approx(expected, rel=1e-4)
    assert len(found.losses) == steps or found.diverged


def loader() -> DataLoader[Any]:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*points(8), strict=True))
    return DataLoader(
        TensorDataset(inputs, targets), batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3)
    )


def test_nothing_is_trained_and_nothing_moves() -> None:
    model, data = mlp(), loader()
    before = copy.deepcopy(model.state_dict())
    numbers = torch.random.get_rng_state()
    dropout = nn.Sequential(nn.Dropout(0.5), model)
    find(dropout, data, algorithms=[pl.algorithms.ema(half_life="4ba")], highest=100.0)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    equal(model.state_dict(), before)
    equal(train(dropout, data).params, train(dropout, loader()).params)


@pytest.mark.parametrize("optimizer", [pl.optim.adamw(lr=0.01), pl.optim.from_torch(torch.optim.Adam, lr=0.01)])
def test_it_starts_from_a_state_which_trains_as_before(optimizer: pl.Optimizer) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "max_duration": "3ep"}
    half = train(mlp(), points(), **{**options, "max_duration": "4ba"})
    expected = train(half, points(), **options)
    values = {name: tensor.clone() for name, tensor in half.params.items()}
    found = find(half, steps=20, lowest=1e-5, **options)
    equal(dict(half.params), values)
    equal(train(half, points(), **options).params, expected.params)
    assert found.initial_loss == pytest.approx(cross_entropy(half.module()(points()[1][0]), points()[1][1]).item())
    # Of a State that has ended, too.
    ended = train(mlp(), points(), **options).replace(stop=True)
    assert len(find(ended, steps=20, highest=1e-5, **options).losses) == 20


class Recording(pl.Callback):
    """A callback that must not be called."""

    def run_event(self, event: pl.Event, state: pl.State, logger: Any) -> None:
        raise AssertionError("called")


def test_observers_and_evaluations_are_left_out(tmp_path: Path) -> None:
    class Unread:
        def __iter__(self) -> Any:
            raise AssertionError("read")

        def __len__(self) -> int:
            return 3

    found = find(
        evaluators={"val": Unread()},
        algorithms=[pl.algorithms.early_stopping("val/loss")],
        callbacks=[Recording()],
        loggers=[pl.loggers.InMemoryLogger()],
        autoresume=tmp_path / "runs",
        eval_interval="1ba",
        watch={pl.Event.EPOCH_END},
    )
    assert len(found.losses) > 10
    assert list(tmp_path.iterdir()) == []


def quadratic(largest: float) -> tuple[nn.Module, Any]:
    """A least-squares problem whose gradient descent diverges above ``2 / largest``, by ``mse_loss``."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    inputs = torch.eye(3, dtype=torch.float64) * (largest * 3 / 2) ** 0.5
    return model, [(inputs, torch.ones(3, 1, dtype=torch.float64))]


@settings(max_examples=15)
@given(largest=st.floats(0.1, 100))
def test_the_suggestion_converges_and_what_diverges_stops_the_test(largest: float) -> None:
    model, data = quadratic(largest)
    found = find(
        model,
        data,
        loss=nn.functional.mse_loss,
        lowest=1e-4 / largest,
        highest=1e3 / largest,
        optimizer=pl.optim.sgd(lr=1),
    )
    assert found.diverged
    assert 2 / largest < found.learning_rates[-1] < 20 / largest
    assert 0.01 / largest < found.suggestion < 2 / largest
    assert found.tenth_of_minimum < 2 / largest


def test_a_loss_that_is_not_finite_ends_the_test() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mean() + self.weight

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.exp(-1e3 * outputs) + torch.exp(1e3 * outputs)

    found = find(Growing(), [(torch.full((4, 1), 1e-3), torch.zeros(4, 1))], loss=loss, lowest=1e-9)
    assert found.diverged
    assert all(loss < float("inf") for loss in found.losses)


def test_a_dict_of_losses_counts_by_its_total() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        total = cross_entropy(outputs, targets)
        return {"total": total, "twice": 2 * total}

    assert find(loss=loss).losses == find().losses


def test_the_report_says_what_it_found(tmp_path: Path) -> None:
    rates = [10 ** (power / 20) for power in range(-80, 1)]
    falling = RangeTest(rates, [1 / (1 + 100 * rate) for rate in rates], 1.0, diverged=False)
    assert 0.005 < falling.suggestion < 0.02
    assert falling.tenth_of_minimum == rates[-1] / 10
    assert "suggestion        0.01 " in repr(falling)
    axes = falling.plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "learning rate", "loss")
    assert falling.plot(axes=axes) is axes
    # A curve that explodes at its end falls where it fell before.
    exploding = RangeTest([*rates, 1.2, 1.4], [*falling.losses, 1e6, 1e9], 1.0, diverged=True)
    assert exploding.suggestion == falling.suggestion
    assert "where the loss diverged" in repr(exploding)


def test_without_a_fall_there_is_no_suggestion(tmp_path: Path) -> None:
    rates = [10 ** (power / 20) for power in range(-80, 1)]
    flickering = [1 + 0.1 * (-1) ** index for index in range(len(rates))]
    words = "does not fall by more than it fluctuates"
    for losses in (flickering, [1 + rate for rate in rates]):
        found = RangeTest(rates, losses, 1.0, diverged=False)
        assert all(len(line) <= 80 for line in repr(found).splitlines())
        for name in ("suggestion", "tenth_of_minimum"):
            with pytest.raises(pl.ArgumentError, match=words):
                getattr(found, name)
        assert words in repr(found)
        found.plot(tmp_path / "lr.png")
    at_once = RangeTest((), (), 1.0, diverged=True)
    assert "diverged at the first" in repr(at_once)
    with pytest.raises(pl.ArgumentError, match="begin lower"):
        _ = at_once.suggestion


@pytest.mark.slow
def test_all_ranks_find_what_one_finds() -> None:
    def program(rank: int) -> Any:
        return find(data=points(size=4), parallel="replicate").losses

    results = pool().run(program)
    assert results[0] == results[1]
    assert results[0] == pytest.approx(find(data=points(size=4)).losses, rel=1e-4)


class OfMyOwn:
    """Functions of an optimizer that reads its rate by itself."""

    @staticmethod
    def update(grads: Any, opt_state: Any, params: Any, timestamp: Any) -> Any:
        return params, opt_state


mine = pl.Optimizer(name="mine", init=lambda params: pl.FrozenDict(), update=OfMyOwn.update, lr=lambda t: 0.1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lowest": 0.0}, pl.ArgumentError, "lr_find: lowest must be .* above 0"),
        ({"lowest": 1.0}, pl.ArgumentError, r"lowest=1 must be below highest=1"),
        ({"highest": "1"}, pl.ArgumentTypeError, "highest"),
        ({"steps": 9}, pl.ArgumentError, "steps must be a whole number of at least 10"),
        ({"steps": 1e2}, pl.ArgumentTypeError, "steps"),
        ({"data": iter(points())}, pl.ArgumentError, "list_iterator, an iterator.*give a DataLoader or a list"),
        ({"optimizer": mine}, pl.ArgumentError, "the learning rate of optimizer 'mine' can't be set"),
        ({"optimizer": parts(warm, 0.1)}, pl.ArgumentError, "keep the ratio .* give constant rates"),
        ({"min_lr": 1e-3}, pl.ArgumentTypeError, "lr_find has no argument 'min_lr'"),
        ({"max_duration": "long"}, pl.TimeFormatError, "long"),
        ({"device": "nowhere"}, pl.ArgumentError, "nowhere"),
    ],
)
def test_bad_input_is_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        find(**options)


def test_a_loss_that_is_nan_at_once_is_an_error() -> None:
    data = [(torch.full((4, 4), float("nan")), torch.zeros(4, dtype=torch.int64))]
    with pytest.raises(pl.NonFiniteError, match="before any learning rate has had an effect"):
        find(data=data)
