"""What ranks say to each other in a step, counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from tests.support.worlds import an_epoch

WORLD, LAYERS = 8, 5


class Counting(TorchDispatchMode):
    """Counts collectives as they come to torch's dispatcher, C++ ones included."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = str(function)
        if name.startswith("c10d"):
            self.counts[name.split(".")[1].rstrip("_")] += 1
        return function(*arguments, **(keywords or {}))


@pytest.fixture
def many_ranks():
    """Eight ranks, of which this process is the first and the others answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def counted_steps(parallel, **options):
    """For each batch, the collectives between its BATCH_START and its BATCH_END."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])
    data = [(torch.ones(2 * WORLD, 8), torch.zeros(2 * WORLD, 8)) for _ in range(3)]
    steps, before = [], Counter()
    with Counting() as counting:
        for event, _ in an_epoch(model, data, optimizer=pl.optim.adamw(lr=0.1), parallel=parallel, **options):
            if event is Event.BATCH_START:
                before = Counter(counting.counts)
            if event is Event.BATCH_END:
                steps.append(counting.counts - before)
    return steps


def test_ranks_exchange_once_a_batch_and_gather_once_a_group_of_layers(many_ranks):
    size = 8 * 9 * 4 / 2**20
    for microbatches, options in ((1, {}), (2, {"microbatch_size": 1})):
        # Of the loss, one exchange; of the gradients, one for each bucket, of which two layers fill one.
        steps = counted_steps(Parallel(bucket_cap_mb=2 * size), **options)
        assert steps[-1] == steps[-2] == {"allreduce": 1 + -(-LAYERS // 2)}
        steps = counted_steps(Parallel(kind="shard"), **options)
        step = steps[-1]
        assert steps == [step] * 3  # in the first batches, too, which are checked: a check reads no whole parameter
        # Gathered for a forward and, but for the last layer (the backward comes at once), for its backward.
        gathered = step["_allgather_base"] + step["allgather_into_tensor_coalesced"]
        assert LAYERS * microbatches <= gathered <= 2 * LAYERS * microbatches
        assert step["_reduce_scatter_base"] == LAYERS
        # The loss, and whether any part of the parameters is not finite; a norm of parts costs one exchange.
        assert step["allreduce"] == 2
        assert counted_steps(Parallel(kind="shard"), clip_grad=1.0, **options)[-1] - step == {"allreduce": 1}
