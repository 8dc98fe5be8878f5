"""Ghost batch normalization, against batch normalization of the chunks, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import apply_ghost_batchnorm, ghost_batchnorm
from tests.support.runs import close, noise, train


def test_four_samples_in_two_chunks() -> None:
    layer = apply_ghost_batchnorm(nn.BatchNorm1d(1), 2)
    normalized = layer(torch.tensor([[1.0], [3.0], [5.0], [9.0]]))
    torch.testing.assert_close(normalized.flatten(), torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(layer.running_mean, torch.tensor([0.45]))
    torch.testing.assert_close(layer.running_var, torch.tensor([1.4]))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize(("count", "chunks"), [(8, [4, 4]), (10, [4, 4, 2]), (9, [4, 5]), (5, [5]), (4, [4]), (3, [3])])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_batch_normalization_of_each_chunk(count: int, chunks: list[int], momentum: Any, affine: bool) -> None:
    plain = nn.BatchNorm2d(3, momentum=momentum, affine=affine)
    layer = apply_ghost_batchnorm(plain, 4)
    x = torch.randn(count, 3, 2, 5, generator=noise(), requires_grad=True)
    twins = [nn.BatchNorm2d(3, momentum=1.0, affine=affine) for _ in chunks]
    wanted = torch.cat([twin(part) for twin, part in zip(twins, x.split(chunks), strict=True)])
    result = layer(x)
    torch.testing.assert_close(result, wanted)
    seed = torch.randn(result.shape, generator=noise(1))
    (gradient,), (wanted_gradient,) = torch.autograd.grad(result, x, seed), torch.autograd.grad(wanted, x, seed)
    torch.testing.assert_close(gradient, wanted_gradient)
    rate = 1.0 if momentum is None else momentum
    mean = torch.stack([twin.running_mean for twin in twins]).mean(0)
    torch.testing.assert_close(layer.running_mean, rate * mean)
    variance = torch.stack([twin.running_var for twin in twins]).mean(0)
    torch.testing.assert_close(layer.running_var, (1 - rate) + rate * variance)
    torch.testing.assert_close(layer.eval()(x), plain.eval()(x) if count < 0 else layer(x))


def test_microbatches_of_whole_chunks_do_not_change_the_gradient() -> None:
    """They do with batch normalization."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    g = noise()
    data = [(torch.randn(8, 4, generator=g).double(), torch.randint(3, (8,), generator=g))]

    def gradients(algorithms: Any, size: int | None) -> dict[str, torch.Tensor]:
        """The parameters of one step of gradient descent."""
        return train(model, data, algorithms, microbatch_size=size, max_duration="1ba").params

    close(gradients([ghost_batchnorm(4)], 4), gradients([ghost_batchnorm(4)], None))
    for algorithms, size in (([ghost_batchnorm(4)], 2), ([], 4)):
        with pytest.raises(AssertionError):
            close(gradients(algorithms, size), gradients(algorithms, None))


def test_synchronized_ones_are_refused() -> None:
    with pytest.raises(pl.ModelError, match="is a SyncBatchNorm, which has one statistic of all ranks"):
        apply_ghost_batchnorm(nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(pl.ArgumentError, match="size"):
        ghost_batchnorm(1)
