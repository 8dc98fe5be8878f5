"""What ranks say to each other in a step, counted; and gradients held against DTensors that torch redistributes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import interpreted
from pure_loop.distributed import Parallel
from pure_loop.testing.ranks import Pool, shared_pool

torch.set_num_threads(1)

WORLD = 64
LAYERS = 5


class _Counting(TorchDispatchMode):
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
    """64 ranks, of which this process is the first and the others answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.ModuleDict({"first": torch.nn.Linear(64, 64)})["first"],
        *[torch.nn.Linear(64, 64) for _ in range(LAYERS - 1)],
    )


def counted_steps(parallel, **options):
    """For each batch, the collectives between its BATCH_START and its BATCH_END."""
    data = [(torch.ones(2 * WORLD, 64), torch.zeros(2 * WORLD, 64)) for _ in range(4)]
    stream = pl.fit(
        layers(),
        data,
        loss=torch.nn.functional.mse_loss,
        optimizer=pl.optim.adamw(lr=0.1),
        max_duration="1ep",
        parallel=parallel,
        **options,
    )
    steps, before = [], Counter()
    with _Counting() as counting:
        for event, _ in stream:
            if event is Event.BATCH_START:
                before = Counter(counting.counts)
            if event is Event.BATCH_END:
                steps.append(counting.counts - before)
    return steps


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_replicated_ranks_exchange_one_bucket_at_a_time_once_a_batch(many_ranks, microbatch_size):
    size = 64 * 65 * 4 / 2**20
    # Of the loss, one exchange; of the gradients, one for each bucket, of which two layers fill one.
    parallel = Parallel(bucket_cap_mb=2 * size)
    steps = counted_steps(parallel, microbatch_size=microbatch_size)
    buckets = -(-LAYERS // 2)
    assert steps[-1] == {"allreduce": 1 + buckets}
    assert steps[-1] == steps[-2]


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_sharded_ranks_gather_and_scatter_once_for_each_group_of_layers(many_ranks, microbatch_size):
    steps = counted_steps(Parallel(kind="shard"), microbatch_size=microbatch_size)
    microbatches = 1 if microbatch_size is None else 2
    step = steps[-1]
    assert steps == [step] * 4  # in the first batches, too, which are checked: a check reads no whole parameter
    # Gathered for a forward and, but for the last layer (the backward comes at once), for its backward.
    gathered = step["_allgather_base"] + step["allgather_into_tensor_coalesced"]
    assert LAYERS * microbatches <= gathered <= 2 * LAYERS * microbatches
    assert step["_reduce_scatter_base"] == LAYERS
    # The loss, and whether any part of the parameters is not finite.
    assert step["allreduce"] == 2


def test_a_norm_of_parts_costs_one_exchange(many_ranks):
    plain = counted_steps(Parallel(kind="shard"))[-1]
    clipped = counted_steps(Parallel(kind="shard"), clip_grad=1.0)[-1]
    assert clipped - plain == {"allreduce": 1}


# Against torch's own redistribution of DTensors, which is exact, pure and slow.


def oracle(rank, placements, mesh, model, whole_batch):
    """Loss and gradients of one rank's part, with parameters gathered in the forward by ``redistribute``."""
    inputs, targets = (part.chunk(dist.get_world_size())[rank] for part in whole_batch)
    leaves = {}
    for name, tensor in model.named_parameters():
        wrapped = DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
        leaves[name] = wrapped.redistribute(placements=placements).detach().requires_grad_()
    gathered = {
        name: leaf.redistribute(placements=[Replicate()] * mesh.ndim).to_local(
            grad_placements=[Partial("avg")] * mesh.ndim
        )
        for name, leaf in leaves.items()
    }
    outputs = torch.func.functional_call(model, gathered, inputs)
    loss = torch.nn.functional.mse_loss(outputs, targets)
    found = torch.autograd.grad(loss, list(leaves.values()))
    return {name: grad.full_tensor() for name, grad in zip(leaves, found, strict=True)}


def compared_with_the_oracle(parallel, placements, mesh_shape, compile=False):
    def program(rank):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
        batch = (torch.randn(8, 5).double(), torch.randn(8, 2).double())
        if mesh_shape == (dist.get_world_size(),):
            mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
        else:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        options = {"kind": parallel} | ({"mesh": mesh} if len(mesh_shape) == 2 else {})
        wanted = oracle(rank, placements, mesh, model, batch)
        stream = pl.fit(
            model,
            [batch],
            loss=torch.nn.functional.mse_loss,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            parallel=Parallel(**options),
            compile=compile,
            watch={Event.AFTER_TRAIN_BATCH},
        )
        with interpreted():
            state = next(state for event, state in stream if event is Event.AFTER_TRAIN_BATCH)
        given = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in state.grads.items()}
        stream.close()
        return max(float((given[name] - wanted[name]).abs().max()) for name in wanted)

    return program


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_gradients_are_those_of_redistributed_dtensors(kind, compile):
    placements = [Replicate()] if kind == "replicate" else [Shard(0)]
    for apart in shared_pool(2, checked=False).run(compared_with_the_oracle(kind, placements, (2,), compile)):
        assert apart < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("compile", [False, True])
def test_sharding_within_and_replicating_across_groups_of_ranks(compile):
    with Pool(4, checked=False) as pool:
        program = compared_with_the_oracle("shard", [Replicate(), Shard(0)], (2, 2), compile)
        for apart in pool.run(program):
            assert apart < 1e-12
