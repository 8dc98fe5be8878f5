"""Sparse gradients, of ``nn.Embedding(sparse=True)``: as dense ones where they are clipped, added up and checked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, CompileError, ImpurityError
from pure_loop.testing.ranks import RankError
from tests.support.worlds import KINDS, pool

mse = nn.functional.mse_loss


class Bag(nn.Module):
    """With ``both``, the gradient of a microbatch is sparse or dense, as its targets are."""

    def __init__(self, sparse: bool, both: bool = False, rows: int = 9) -> None:
        super().__init__()
        self.rows, self.both = nn.Embedding(rows, 4, sparse=sparse), both
        self.head = nn.Linear(4, 3)

    def forward(self, indices: Tensor) -> Tensor:
        hidden = self.rows(indices).mean(1)
        if self.both and indices[0, 0] % 2:
            hidden = nn.functional.embedding(indices, self.rows.weight).mean(1)
        return self.head(hidden)


def made(sparse: bool = True, both: bool = False, rows: int = 9) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Bag(sparse, both, rows)


def batches(repeated: bool = True) -> list[tuple[Tensor, Tensor]]:
    """With and without rows that occur several times."""
    g = torch.Generator().manual_seed(0)
    indices = [torch.randint(9, (4, 5), generator=g) for _ in range(4)]
    if not repeated:
        indices = [torch.randperm(9, generator=g)[:8].reshape(4, 2) for _ in range(4)]
    return [(each, torch.randn(4, 3, generator=g)) for each in indices]


def sgd() -> pl.optim.Optimizer:
    return pl.optim.from_torch(torch.optim.SGD, lr=0.5)


def fit(model: nn.Module, optimizer: Any = None, data: Any = None, **options: Any) -> pl.State:
    settings = {"loss": mse, "optimizer": optimizer or sgd(), "max_duration": "1ep", **options}
    return pl.run(pl.fit(model, data or batches(), **settings))


def by_hand(change: Callable[[list[Tensor]], None] = lambda grads: None, rows: int = 9) -> nn.Module:
    """A plain loop on dense gradients."""
    module = copy.deepcopy(made(sparse=False, rows=rows))
    for inputs, targets in batches():
        mse(module(inputs), targets).backward()
        change([param.grad for param in module.parameters()])  # type: ignore[misc]
        with torch.no_grad():
            for param in module.parameters():
                param -= 0.5 * param.grad  # type: ignore[operator]
        module.zero_grad()
    return module


def clip_by_norm(grads: list[Tensor]) -> None:
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    for grad in grads:
        grad *= min(1.0, 0.05 / float(norm))


def clip_by_value(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.clamp_(-0.01, 0.01)


def assert_close(state: pl.State, module: nn.Module) -> None:
    for name, param in module.named_parameters():
        torch.testing.assert_close(state.params[name], param.detach())


WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "strict": {"strict": True},
    "no donation": {"donate": False},
    "microbatches": {"microbatch_size": 2},
    "strict microbatches": {"microbatch_size": 1, "strict": True},
    "unsplit skip": {"nonfinite": "skip"},
}
CLIPPINGS: dict[str, tuple[Any, Any]] = {
    "none": ({}, lambda grads: None),
    "norm": ({"clip_grad": 0.05}, clip_by_norm),
    "value": ({"clip_grad": lambda grads, params: pl.gradients.clip_by_value(grads, 0.01)}, clip_by_value),
    "algorithm": ({"algorithms": [pl.algorithms.gradient_clipping("value", 0.01)]}, clip_by_value),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("both", [False, True])
def test_trains_as_with_dense_gradients(way: str, clipping: str, both: bool) -> None:
    """Strictly, in microbatches of which some give dense gradients, clipped by norm and by value."""
    options, change = CLIPPINGS[clipping]
    assert_close(fit(made(both=both), **options, **WAYS[way]), by_hand(change))


def test_large_sparse_gradients() -> None:
    """Large dense ones are added up and clipped where they are."""
    for options, change in (CLIPPINGS["none"], CLIPPINGS["norm"]):
        for way in ("one watched", "microbatches"):
            expected = by_hand(change, rows=2**17)
            assert_close(fit(made(rows=2**17), **options, **WAYS[way]), expected)


def test_adaptive_clipping() -> None:
    """Row by row, of the rows that occur."""
    sparse, dense = ({"clip_grad": lambda g, p: pl.gradients.clip_adaptively(g, p, 0.05)} for _ in range(2))
    state = fit(made(), **sparse)
    assert_close(fit(made(sparse=False), **dense), state.module())
    assert_close(fit(made(), algorithms=[pl.algorithms.gradient_clipping("adaptive", 0.05)]), state.module())


def test_with_algorithms_of_weights() -> None:
    for make in (lambda: pl.algorithms.sam(rho=0.1), lambda: pl.algorithms.ema(half_life="2ba")):
        found, wanted = (fit(made(sparse), algorithms=[make()], strict=True) for sparse in (True, False))
        assert_close(found, wanted.module())


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"clip_grad": 0.05}, {"precision": "amp_fp16"}], ids=str)
def test_sparse_adam_in_a_partition(options: dict[str, Any]) -> None:
    """Rows of a batch differ, so that each class of torch adds up nothing."""
    parts = {"rows": pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1), "head": pl.optim.adamw(lr=0.1)}
    optimizer = pl.optim.partition(parts, label=lambda name, tensor: name.partition(".")[0])
    module = made()
    theirs = torch.optim.SparseAdam(module.rows.parameters(), lr=0.1), torch.optim.AdamW(module.head.parameters(), 0.1)
    for inputs, targets in batches(repeated=False):
        mse(module(inputs), targets).backward()
        if "clip_grad" in options:
            grads = [param.grad.to_dense() for param in module.parameters()]
            factor = min(1.0, 0.05 / float(torch.cat([grad.flatten() for grad in grads]).norm()))
            for param in module.parameters():
                param.grad = param.grad * factor
        for each in theirs:
            each.step()
        module.zero_grad()
    state = fit(made(), optimizer, batches(repeated=False), **options)
    for name, param in module.named_parameters():
        tolerance = {"rtol": 0.02, "atol": 0.02} if "precision" in options else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(state.params[name], param.detach(), **tolerance)


def test_sparse_adam_resumes() -> None:
    optimizer = pl.optim.partition(
        {"rows": pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1), "head": pl.optim.adamw(lr=0.1)},
        label=lambda name, tensor: name.partition(".")[0],
    )
    settings = {"loss": mse, "optimizer": optimizer, "max_duration": "1ep"}
    kept = [state for event, state in pl.fit(made(), batches(), **settings) if event is Event.BATCH_END]
    end = pl.run(pl.fit(kept[1], batches(), **settings))
    assert all(torch.equal(end.params[name], param) for name, param in kept[-1].params.items())


def test_a_gradient_that_is_not_finite_is_named() -> None:
    def spoil(grads: Any, params: Any) -> Any:
        return {**grads, "rows.weight": grads["rows.weight"] * float("inf")}

    with pytest.raises(pl.NonFiniteError, match="rows"):
        fit(made(), clip_grad=spoil)


def test_strictness_names_who_writes_to_a_sparse_gradient() -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def spoil(state: pl.State) -> pl.State:
        state.grads["rows.weight"].mul_(2.0)  # type: ignore[index]
        return state

    with pytest.raises(ImpurityError, match=r"algorithm 'spoil' changed state\.grads.*rows\.weight"):
        fit(made(), algorithms=[spoil], strict=True)


@pytest.mark.parametrize("optimizer", [pl.optim.adamw(lr=0.1), pl.optim.adam(), pl.optim.sgd(lr=0.1)], ids=repr)
def test_optimizers_for_dense_gradients_say_so(optimizer: pl.optim.Optimizer) -> None:
    for options in ({}, {"microbatch_size": 2, "clip_grad": 0.1}, {"strict": True}):
        with pytest.raises(ArgumentError, match=r"the gradient of 'rows\.weight' is sparse.*SparseAdam"):
            fit(made(), optimizer, **options)


def len_of(watch: Any) -> str:
    return "all" if watch is None else str(len(watch))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}, {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}], ids=len_of)
def test_graphs_hold_dense_tensors(both: bool, watch: Any, interpreted: None) -> None:
    model = Both() if both else made()
    if watch is not None or not both:
        with pytest.raises(CompileError, match=r"sparse.*sparse=False.*where possible"):
            fit(model, compile=True, watch=watch)
    assert_close(fit(model, compile="where possible", watch=watch), fit(model).module())


class Both(nn.Module):
    """Its gradient is dense, of a sparse and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.rows, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.rows(indices).mean(1) + 0.1 * self.rows.weight.mean(0))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_exchange_dense_gradients(kind: str) -> None:
    def program(rank: int) -> None:
        fit(made(), parallel=kind)

    with pytest.raises(RankError, match=r"ModelError: the gradient of 'rows\.weight' is sparse.*sparse=False"):
        pool(kind=kind).run(program)
