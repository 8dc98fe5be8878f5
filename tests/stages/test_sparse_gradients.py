"""Sparse gradients, of ``nn.Embedding(sparse=True)``: as dense ones where they are clipped, added up and checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss as mse

import pure_loop as pl
from pure_loop import Event
from pure_loop.errors import ArgumentError, CompileError, ImpurityError
from pure_loop.random import seeded
from pure_loop.testing.ranks import RankError
from tests.support import problem
from tests.support.worlds import KINDS, pool

NORMS, ROWS = pl.gradients, "rows.weight"


class Bag(nn.Module):
    """With ``both``, the gradient of a microbatch is sparse or dense, as its targets are, or the sum of both."""

    def __init__(self, sparse: bool = True, both: str = "") -> None:
        super().__init__()
        with seeded(0):
            self.rows, self.both, self.head = nn.Embedding(9, 4, sparse=sparse), both, nn.Linear(4, 3)

    def forward(self, indices: Tensor) -> Any:
        hidden = self.rows(indices).mean(1)
        if self.both == "in turn" and indices[0, 0] % 2:
            hidden = nn.functional.embedding(indices, self.rows.weight).mean(1)
        return self.head(hidden + 0.1 * self.rows.weight.mean(0) if self.both == "in one" else hidden)


def batches(repeated: bool = True) -> list[tuple[Tensor, Tensor]]:
    """With and without rows that occur several times."""
    g = torch.Generator().manual_seed(0)
    indices = [torch.randint(9, (4, 5), generator=g) for _ in range(4)]
    if not repeated:
        indices = [torch.randperm(9, generator=g)[:8].reshape(4, 2) for _ in range(4)]
    return [(each, torch.randn(4, 3, generator=g)) for each in indices]


def fit(model: nn.Module, data: Any = None, **options: Any) -> pl.State:
    sgd = pl.optim.from_torch(torch.optim.SGD, lr=0.5)
    options = {"loss": mse, "optimizer": sgd, "max_duration": "1ep", "strict": None, **options}
    return problem.run(model, data or batches(), **options)


def by_hand(change: Callable[[list[Tensor]], None]) -> dict[str, Tensor]:
    """A plain loop on dense gradients."""
    module = Bag(sparse=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for inputs, targets in batches():
        optimizer.zero_grad()
        mse(module(inputs), targets).backward()
        change([param.grad for param in module.parameters()])  # type: ignore[misc]
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def clip_by_norm(grads: list[Tensor]) -> None:
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    for grad in grads:
        grad *= min(1.0, 0.05 / float(norm))


def clip_by_value(grads: list[Tensor]) -> None:
    for grad in grads:
        grad.clamp_(-0.01, 0.01)


WAYS: dict[str, dict[str, Any]] = {
    "one watched": {"watch": {Event.BATCH_END}},
    "no donation": {"donate": False},
    "microbatches": {"microbatch_size": 2},
    "strict microbatches": {"microbatch_size": 1, "strict": True},
    "unsplit skip": {"nonfinite": "skip"},
}
CLIPPINGS: dict[str, tuple[Any, Any]] = {
    "none": ({}, lambda grads: None),
    "norm": ({"clip_grad": 0.05}, clip_by_norm),
    "value": ({"clip_grad": lambda grads, params: NORMS.clip_by_value(grads, 0.01)}, clip_by_value),
    "algorithm": ({"algorithms": [pl.algorithms.gradient_clipping("value", 0.01)]}, clip_by_value),
}


@pytest.mark.usefixtures("gradients_of_each_size")
def test_trains_with_sparse_gradients_what_dense_ones_train() -> None:
    """Large dense ones are added up and clipped where they are."""
    for options, change in CLIPPINGS.values():
        wanted = by_hand(change)
        for both, way in itertools.product(("", "in turn"), WAYS if change is not clip_by_value else ["microbatches"]):
            problem.close(dict(fit(Bag(both=both), **options, **WAYS[way]).params), wanted)


WITH: dict[str, dict[str, Any]] = {
    # Row by row, of the rows that occur.
    "adaptive clipping": {"clip_grad": lambda g, p: NORMS.clip_adaptively(g, p, 0.05)},
    "an algorithm that clips": {"algorithms": [pl.algorithms.gradient_clipping("adaptive", 0.05)]},
    "sam": {"algorithms": [pl.algorithms.sam(rho=0.1)], "strict": True},
    "ema": {"algorithms": [pl.algorithms.ema(half_life="2ba")], "strict": True},
}


@pytest.mark.parametrize("name", WITH)
def test_so_does_what_reads_gradients_and_weights(name: str) -> None:
    problem.close(*(dict(fit(Bag(sparse), **WITH[name]).params) for sparse in (True, False)))


PARTS = pl.optim.partition(
    {"rows": pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1), "head": pl.optim.adamw(lr=0.1)},
    label=lambda name, tensor: name.partition(".")[0],
)


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"clip_grad": 0.05}, {"precision": "amp_fp16"}], ids=str)
def test_sparse_adam_in_a_partition(options: dict[str, Any]) -> None:
    """Rows of a batch differ, so that each class of torch adds up nothing."""
    module = Bag()
    theirs = torch.optim.SparseAdam(module.rows.parameters(), lr=0.1), torch.optim.AdamW(module.head.parameters(), 0.1)
    for inputs, targets in batches(repeated=False):
        mse(module(inputs), targets).backward()
        grads = [param.grad.to_dense() for param in module.parameters()]  # type: ignore[union-attr]
        factor = min(1.0, options.get("clip_grad", 1e9) / float(torch.cat([grad.flatten() for grad in grads]).norm()))
        for param in module.parameters():
            param.grad = param.grad * factor  # type: ignore[operator]
        for each in theirs:
            each.step()
        module.zero_grad()
    state = fit(Bag(), batches(repeated=False), optimizer=PARTS, **options)
    wanted = {name: param.detach() for name, param in module.named_parameters()}
    problem.close(dict(state.params), wanted, 0.02 if "precision" in options else 1e-4)


def test_sparse_adam_resumes() -> None:
    settings = {"loss": mse, "optimizer": PARTS, "max_duration": "1ep"}
    kept = [state for event, state in problem.fit(Bag(), batches(), **settings) if event is Event.BATCH_END]
    end = problem.run(kept[1], batches(), **settings)
    assert all(torch.equal(end.params[name], param) for name, param in kept[-1].params.items())


def test_a_gradient_that_is_not_finite_is_named_or_skipped() -> None:
    def spoil(grads: Any, params: Any) -> Any:
        return {**grads, ROWS: grads[ROWS] * float("inf")}

    with pytest.raises(pl.NonFiniteError, match=r"gradient of 'rows\.weight'"):
        fit(Bag(), clip_grad=spoil)
    assert int(fit(Bag(), clip_grad=spoil, nonfinite="skip").skipped) == 4


def test_strictness_names_who_writes_to_a_sparse_gradient() -> None:
    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def spoil(state: pl.State) -> pl.State:
        state.grads[ROWS].mul_(2.0)  # type: ignore[index]
        return state

    with pytest.raises(ImpurityError, match=r"algorithm 'spoil' changed state\.grads.*rows\.weight"):
        fit(Bag(), algorithms=[spoil], strict=True)


def test_optimizers_for_dense_gradients_say_so() -> None:
    optimizers = (pl.optim.adamw(lr=0.1), pl.optim.adam(), pl.optim.sgd(lr=0.1))
    runs: tuple[Any, ...] = ({}, {"microbatch_size": 2, "clip_grad": 0.1}, {"strict": True})
    for optimizer, options in itertools.product(optimizers, runs):
        with pytest.raises(ArgumentError, match=r"the gradient of 'rows\.weight' is sparse.*SparseAdam"):
            fit(Bag(), optimizer=optimizer, **options)


@pytest.mark.parametrize("both", ["", "in one"])
def test_graphs_hold_dense_tensors(both: str, interpreted: None) -> None:
    wanted = dict(fit(Bag(both=both)).params)
    for watch in (None, {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}):
        if watch is not None or not both:
            with pytest.raises(CompileError, match=r"sparse.*sparse=False.*where possible"):
                fit(Bag(both=both), compile=True, watch=watch)
        problem.close(dict(fit(Bag(both=both), compile="where possible", watch=watch).params), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_exchange_dense_gradients(kind: str) -> None:
    """Two processes."""
    with pytest.raises(RankError, match=r"ModelError: the gradient of 'rows\.weight' is sparse.*sparse=False"):
        pool(kind=kind).run(lambda rank: fit(Bag(), parallel=kind) and None)
