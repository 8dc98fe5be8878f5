"""The mean loss of an epoch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pure_loop.progress.estimate import MeanLoss


def mean_of(pairs):
    mean = MeanLoss()
    for loss, samples in pairs:
        mean.add(loss, samples)
    assert mean.count == sum(samples for _, samples in pairs)
    return mean.take()


@pytest.mark.parametrize("sizes", [[4] * 5, [4] * 200, [4, 4, 2], [1, 2, 3, 4], [4, 2] * 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_weighed_by_samples(sizes, dtype):
    losses = torch.rand(len(sizes), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = sum(float(loss) * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    assert float(mean_of(list(zip(losses, sizes, strict=True)))) == pytest.approx(expected, rel=1e-6)


def test_it_begins_anew():
    mean = MeanLoss()
    mean.add(torch.tensor(1.0), 4)
    assert float(mean.take()) == 1.0
    assert mean.count == 0
    assert mean.take() is None
    mean.add(torch.tensor(3.0), 2)
    assert float(mean.take()) == 3.0


class NoReading(TorchDispatchMode):
    """Refuses what waits for a device, and counts the rest."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten._to_copy.default)
        self.operations += 1
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_from_a_device():
    loss, mean = torch.tensor(2.0), MeanLoss()
    with NoReading() as mode:
        for _ in range(640):
            mean.add(loss, 4)
        result = mean.take()
    assert float(result) == 2.0
    assert mode.operations < 60


def test_reading_would_be_noticed():
    with pytest.raises(AssertionError), NoReading():
        float(torch.tensor(2.0))


def test_it_keeps_no_graph_and_few_losses():
    mean, weight = MeanLoss(), torch.ones(1, requires_grad=True)
    for _ in range(1000):
        mean.add((weight * 2).sum(), 4)
    assert len(mean._losses) <= 64
    assert not mean.take().requires_grad


def test_what_is_no_number_is_left_out():
    assert mean_of([]) is None
    mean = MeanLoss()
    mean.add(None, 4)
    mean.add(torch.ones(3), 4)
    mean.add(torch.full((1,), 2.0), 4)
    mean.add(4.0, 4)
    assert float(mean.take()) == 3.0


def test_nan_is_not_hidden():
    assert torch.isnan(mean_of([(torch.tensor(1.0), 4), (torch.tensor(torch.nan), 4)]))


def test_losses_that_training_skips_are_left_out():
    mean = MeanLoss(skips=True)
    for loss, samples in ((1.0, 4), (float("nan"), 4), (float("inf"), 2), (4.0, 2)):
        mean.add(torch.tensor(loss), samples)
    assert float(mean.take()) == pytest.approx((4 * 1.0 + 2 * 4.0) / 6)
    mean.add(torch.tensor(3.0), 2)
    assert float(mean.take()) == 3.0
    plain = MeanLoss()
    plain.add(torch.tensor(float("nan")), 4)
    assert float(plain.take()) != float(plain.take() or 0.0)
