"""Sparse gradients, of ``nn.Embedding(sparse=True)``: as dense ones where they are clipped, added up and checked."""

from __future__ import annotations

import itertools
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

ROWS = "rows.weight"


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


WAYS: dict[str, dict[str, Any]] = {
    "one watched": {"watch": {Event.BATCH_END}},
    "no donation": {"donate": False},
    "strict microbatches": {"microbatch_size": 1, "strict": True},
    "unsplit skip": {"nonfinite": "skip"},
}
WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clipping": {"clip_grad": 0.05},
    "clipping of values": {"clip_grad": lambda grads, params: pl.gradients.clip_by_value(grads, 0.01)},
    # Row by row, of the rows that occur.
    "adaptive clipping": {"clip_grad": lambda g, p: pl.gradients.clip_adaptively(g, p, 0.05)},
    "adaptive clipping by an algorithm": {"algorithms": [pl.algorithms.gradient_clipping("adaptive", 0.05)]},
    "an algorithm that clips": {"algorithms": [pl.algorithms.gradient_clipping("value", 0.01)]},
    "sam and ema": {"algorithms": [pl.algorithms.sam(rho=0.1), pl.algorithms.ema(half_life="2ba")], "strict": True},
}


@pytest.mark.usefixtures("gradients_of_each_size")
@pytest.mark.parametrize("name", WITH)
def test_trains_with_sparse_gradients_what_dense_ones_train(name: str) -> None:
    """Large dense ones are added up and clipped where they are."""
    wanted = dict(fit(Bag(sparse=False), **WITH[name]).params)
    for both, way in itertools.product(("", "in turn"), WAYS.values() if name in ("nothing", "clipping") else [{}]):
        # Of a dense one all rows occur.
        if both != "in turn" or "adaptive" not in name:
            problem.close(dict(fit(Bag(both=both), **WITH[name] | way).params), wanted)


PARTS = pl.optim.partition(
    {"rows": pl.optim.from_torch(torch.optim.SparseAdam, lr=0.1), "head": pl.optim.adamw(lr=0.1)},
    label=lambda name, tensor: name.partition(".")[0],
)


@pytest.mark.parametrize("options", [{"strict": True}, {"clip_grad": 0.05}, {"precision": "amp_fp16"}], ids=str)
def test_sparse_adam_in_a_partition(options: dict[str, Any]) -> None:
    """Rows of a batch differ, so that each class of torch adds up nothing. And training resumes."""
    module, data = Bag(), batches(repeated=False)
    theirs = torch.optim.SparseAdam(module.rows.parameters(), lr=0.1), torch.optim.AdamW(module.head.parameters(), 0.1)
    for inputs, targets in data:
        mse(module(inputs), targets).backward()
        grads = [param.grad.to_dense() for param in module.parameters()]  # type: ignore[union-attr]
        factor = min(1.0, options.get("clip_grad", 1e9) / float(torch.cat([grad.flatten() for grad in grads]).norm()))
        for param in module.parameters():
            param.grad = param.grad * factor  # type: ignore[operator]
        for each in theirs:
            each.step()
        module.zero_grad()
    settings = {"loss": mse, "optimizer": PARTS, "max_duration": "1ep", "strict": None, **options}
    kept = [state for event, state in problem.fit(Bag(), data, **settings) if event is Event.BATCH_END]
    wanted = {name: param.detach() for name, param in module.named_parameters()}
    problem.close(dict(kept[-1].params), wanted, 0.02 if "precision" in options else 1e-4)
    end = problem.run(kept[1], data, **settings)
    assert all(torch.equal(end.params[name], param) for name, param in kept[-1].params.items())


def test_a_gradient_that_is_not_finite_or_is_written_to_is_named() -> None:
    def spoil(grads: Any, params: Any) -> Any:
        return {**grads, ROWS: grads[ROWS] * float("inf")}

    with pytest.raises(pl.errors.NonFiniteError, match=r"gradient of 'rows\.weight'"):
        fit(Bag(), clip_grad=spoil)
    assert int(fit(Bag(), clip_grad=spoil, nonfinite="skip").skipped) == 4

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def writes(state: pl.State) -> pl.State:
        state.grads[ROWS].mul_(2.0)  # type: ignore[index]
        return state

    with pytest.raises(ImpurityError, match=r"algorithm 'writes' changed state\.grads.*rows\.weight"):
        fit(Bag(), algorithms=[writes], strict=True)
    for options in ({}, {"microbatch_size": 2, "clip_grad": 0.1}, {"strict": True}):
        with pytest.raises(ArgumentError, match=r"the gradient of 'rows\.weight' is sparse.*SparseAdam"):
            fit(Bag(), optimizer=pl.optim.adamw(lr=0.1), **options)


def test_compiled_steps_hold_dense_tensors(interpreted: None) -> None:
    wanted = dict(fit(Bag()).params)
    for watch in (None, {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}):
        with pytest.raises(CompileError, match=r"sparse.*sparse=False.*where possible"):
            fit(Bag(), compile=True, watch=watch)
        problem.close(dict(fit(Bag(), compile="where possible", watch=watch).params), wanted)
    wanted = dict(fit(Bag(both="in one")).params)
    problem.close(dict(fit(Bag(both="in one"), compile="where possible").params), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_exchange_dense_gradients(kind: str) -> None:
    """Two processes."""
    with pytest.raises(RankError, match=r"ModelError: the gradient of 'rows\.weight' is sparse.*sparse=False"):
        pool(kind=kind).run(lambda rank: fit(Bag(), parallel=kind) and None)
