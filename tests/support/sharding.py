"""What tests of States in parts on disk share: their runs on a pool, and parts of ranks that are not there."""

from __future__ import annotations

import os
import pickle

import optree
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import pure_loop as pl
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.checkpoint.index import INDEX
from pure_loop.checkpoint.sharded import write
from pure_loop.frozendict import FrozenDict
from pure_loop.testing.ranks import shared_pool, simulate
from tests.support.streams import leaves
from tests.support.worlds import Ranks

torch.set_num_threads(1)


def pool(ranks=2):
    # torch's DistributedDataParallel crashes where gloo's collectives are checked, and one pool is enough.
    return Ranks(shared_pool(ranks, checked=False))


def network(dropout=0.0, width=5):
    torch.manual_seed(0)
    layers = nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 2)
    return nn.Sequential(*(layers if dropout else layers[::3])).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, generator=generator).double(), torch.randint(0, 2, (6,), generator=generator))
        for _ in range(4)
    ]


def train(given, **options):
    options = {"optimizer": pl.optim.sgd(lr=0.1, momentum=0.9), "max_duration": "2ep", **options}
    return pl.fit(given, batches(), loss=nn.functional.cross_entropy, **options)


def with_everything(**options):
    """Dropout, BatchNorm, AdamW, EMA, SAM and a loss scale: what the next step reads, in parts and not."""
    algorithms = [pl.algorithms.ema(half_life="3ba"), pl.algorithms.sam(rho=0.1)]
    model = options.pop("model", None) or network(dropout=0.2)
    return train(model, optimizer=pl.optim.adamw(lr=0.05, amsgrad=True), algorithms=algorithms, **options)


def whole(state):
    """Every leaf that is on disk; all ranks have to ask."""
    state = state.replace(event=None, batch=None, microbatch=None, outputs=None, loss=None, grads=None)
    return {
        path: full_tensor(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves(state).items()
    }


def last(stream):
    return whole(pl.run(stream))


def differ_in_position(state):
    """Where it was saved is the only thing that a State of the loader says besides."""
    return {path: leaf for path, leaf in state.items() if path not in ("event", "position")}


class Here:
    """A meeting of simulated ranks, which run again from their start at each barrier."""

    def __init__(self, table):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._table, self._round = table, 0

    def round(self, path, make, decide):
        self._round += 1
        made = self._table.setdefault((self._round, "made"), {})
        if self.rank not in made:
            made[self.rank] = pickle.dumps(make())
        else:
            make()
        dist.barrier()
        given = self._table.setdefault((self._round, "given"), {})
        if self.rank == 0 and not given:
            given |= enumerate(decide([pickle.loads(made[rank]) for rank in range(self.ranks)]))
        dist.barrier()
        return given[self.rank]


def in_parts(state, mesh):
    """Parameters, and what is remembered of them, by their first dimension."""

    def split(tensor):
        if tensor.ndim == 0:
            return tensor
        placements = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
        size, place = mesh.size(mesh.ndim - 1), mesh.get_coordinate()[-1]
        chunks = tensor.chunk(size, 0)
        part = chunks[place] if place < len(chunks) else tensor[:0]
        stride = torch.empty(tensor.shape, device="meta").stride()
        return DTensor.from_local(part.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=stride)

    fields = {
        field: optree.tree_map(split, getattr(state, field), namespace="pure_loop") for field in ("params", "opt_state")
    }
    return state.replace(**fields)


def small(path, ranks=2, weight=1.0, batch=0):
    """A checkpoint of a small State, in parts of so many ranks that are not there."""
    torch.manual_seed(0)
    module = network()
    state = pl.State.create(module, seed=3)
    # Not the module's own: how torch initializes it may change.
    numbers = {name: torch.arange(tensor.numel()).reshape(tensor.shape) / 7 for name, tensor in state.params.items()}
    params = FrozenDict((name, weight * numbers[name].to(tensor)) for name, tensor in state.params.items())
    state = state.replace(params=params, opt_state=FrozenDict(memory=FrozenDict(params), count=torch.tensor(2)))
    for _ in range(batch):
        state = state.count_batch(samples=4)
    table = {}

    def program(rank):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        write(Here(table), in_parts(state, mesh), path)

    simulate(program, ranks)
    return state


def parts(path):
    return sorted(name for name in os.listdir(path) if name != INDEX)
