"""The collectives of a step on many ranks, counted on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pure_loop as pl
from pure_loop._internal.torch_private import fake_ranks

LAYERS = 3
DATA = [(torch.ones(16, 64), torch.zeros(16, 64))] * 4
# Of the gradients.
BYTES = 4 * LAYERS * 64 * 65


def counted(parallel: Any, world_size: int = 8, **options: Any) -> Any:
    plain = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "2ep"}
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)])
    report = pl.rehearse(layers, DATA, parallel=parallel, world_size=world_size, **{**plain, **options})
    assert not dist.is_initialized()
    return report


@pytest.mark.parametrize("world_size", [2, 64])
def test_replicated_ranks_average_their_gradients(world_size: int) -> None:
    report = counted(
        "replicate", world_size, evaluators={"val": DATA}, algorithms=[pl.algorithms.early_stopping("val/loss")]
    )
    count, size = report.collectives["all-reduce"]
    assert (count, size) == (2, BYTES + 4)  # the gradients in one bucket, and the loss
    assert list(report.collectives) == ["all-reduce"]
    assert "2 all-reduce of 48.8 KiB in all" in repr(report)


def test_sharded_ranks_gather_parameters_and_scatter_gradients() -> None:
    plain = counted("shard").collectives
    assert plain["reduce-scatter"] == (LAYERS, BYTES)
    gathered, size = plain["all-gather"]
    assert LAYERS <= gathered <= 2 * LAYERS
    assert BYTES <= size <= 2 * BYTES
    assert counted("shard", microbatch_size=1).collectives["all-gather"] == (2 * gathered, 2 * size)
    assert counted("shard", clip_grad=1.0).collectives["all-reduce"][0] == plain["all-reduce"][0] + 1


def test_they_are_counted_for_ranks_that_train_together_alone() -> None:
    assert counted(None).collectives is None
    assert counted("shard", 1).collectives is None
    report = counted("shard", fake=True)
    assert report.collectives is None
    assert "collectives: fake=True." in report.skipped


def test_a_process_group_that_is_there_is_left_alone() -> None:
    with fake_ranks(1):
        group = dist.group.WORLD
        plain = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
        report = pl.rehearse(nn.Linear(64, 64), DATA, parallel="shard", world_size=8, **plain)
        assert dist.group.WORLD is group
    assert "collectives: this process has a process group." in report.skipped


def test_what_can_not_be_counted_is_no_failure() -> None:
    class Odd(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if dist.is_initialized():
                raise LookupError("alone")
            return super().forward(inputs)

    plain = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "2ep"}
    (sentence,) = pl.rehearse(Odd(64, 64), DATA, parallel="shard", world_size=8, **plain).skipped
    assert sentence == "collectives: they could not be counted (LookupError: alone)."
    assert not dist.is_initialized()
