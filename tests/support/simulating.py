"""Programs for simulated ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from pure_loop.testing.ranks.simulation import simulate

RANKS = 3


def results(program, ranks=RANKS):
    return [ran.result for ran in simulate(program, ranks)]


def program_of(steps, dtype, length):
    """A program of a list of collectives, each working on what the one before gave."""

    def program(rank):
        import torch
        import torch.distributed as dist

        n = dist.get_world_size()
        into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scattered = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        x = torch.arange(length).to(getattr(torch, dtype)) + 10 * rank
        seen = []
        for kind, option in steps:
            several = [x + i for i in range(n)]
            empties = [torch.full_like(x, -1) for _ in range(n)]
            y = x.clone()
            if kind == "all_reduce":
                dist.all_reduce(y, getattr(dist.ReduceOp, option))
            elif kind == "async":
                works = [dist.all_reduce(y, async_op=True), dist.broadcast(empties[0], 0, async_op=True)]
                for work in reversed(works[:option]):
                    work.wait()
                works[-1].wait()
                works[0].get_future().wait()
            elif kind == "broadcast":
                dist.broadcast(y, option)
            elif kind == "reduce":
                dist.reduce(y, option)
                y = y if rank == option else x.clone()
            elif kind == "all_gather":
                dist.all_gather(empties, y)
                y = torch.cat(empties)
            elif kind == "all_gather_into_tensor":
                y = torch.cat(empties)
                into(y, x)
            elif kind == "reduce_scatter":
                dist.reduce_scatter(y, several, getattr(dist.ReduceOp, option))
            elif kind == "reduce_scatter_tensor":
                scattered(y, torch.cat(several), getattr(dist.ReduceOp, option))
            elif kind == "all_to_all":
                dist.all_to_all(empties, several)
                y = torch.cat(empties)
            elif kind == "all_to_all_single":
                rows = torch.cat(several * 2)
                sizes = [option[rank][i] for i in range(n)]
                y = torch.full((sum(row[rank] for row in option),), -1).to(x.dtype)
                dist.all_to_all_single(y, rows[: sum(sizes)], [row[rank] for row in option], sizes)
            elif kind == "gather":
                dist.gather(y, empties if rank == option else None, dst=option)
                y = torch.cat(empties)
            elif kind == "scatter":
                dist.scatter(y, several if rank == option else None, src=option)
            elif kind == "objects":
                objects = [None] * n
                dist.all_gather_object(objects, {"rank": rank})
                seen.append(objects)
            else:
                dist.barrier()
            seen.append(y.tolist())
            # Small whole numbers again, so that no order of adding matters; an empty result doesn't end the program.
            x = torch.cat([y.flatten(), x])[:length] % 7 + rank
        return seen

    return program


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype)


WRONG = {
    "uneven": (
        lambda rank: [dist.all_reduce(ones(3)) for _ in range(2 + (rank == 1))],
        ["number 3", "rank 0: ended after 2", "rank 1: all_reduce (sum) of (3,) float32"],
    ),
    "uneven the other way": (
        lambda rank: [dist.all_reduce(ones(3)) for _ in range(2 - rank)],
        ["number 2", "rank 0: all_reduce (sum) of (3,) float32", "rank 1: ended after 1"],
    ),
    "reordered": (
        lambda rank: [f() for f in [lambda: dist.broadcast(ones(3), 0), dist.barrier][:: 1 - 2 * rank]],
        ["number 1", "rank 0: broadcast from rank 0 of (3,) float32", "rank 1: barrier"],
    ),
    "shapes": (
        lambda rank: dist.all_reduce(ones(2 + rank)),
        ["rank 0: all_reduce (sum) of (2,) float32", "rank 1: all_reduce (sum) of (3,) float32"],
    ),
    "dtypes": (
        lambda rank: dist.all_reduce(ones(2, dtype=(torch.float64, torch.int64)[rank])),
        ["of (2,) float64", "of (2,) int64"],
    ),
    "operations": (
        lambda rank: dist.all_reduce(ones(2), (dist.ReduceOp.MAX, dist.ReduceOp.AVG)[rank]),
        ["rank 0: all_reduce (max)", "rank 1: all_reduce (avg)"],
    ),
    "sources": (lambda rank: dist.broadcast(ones(2), rank), ["from rank 0", "from rank 1"]),
    "parts": (
        lambda rank: dist.all_to_all([ones(2), ones(1)], [ones(1 + rank), ones(2)]),
        ["rank 0: all_to_all of (1,) float32, (2,) float32", "Rank 0 expects something else from rank 0"],
    ),
    "a list that is too short": (
        lambda rank: dist.all_gather([ones(2)], ones(2)),
        ["rank 0 of 2 calls all_gather", "1 tensors for 2 ranks"],
    ),
    "a list of another shape": (
        lambda rank: dist.all_gather([ones(2), ones(3)], ones(2)),
        ["rank 0 of 2 calls all_gather", "(3,) float32", "(2,) float32"],
    ),
    "a whole that doesn't divide": (
        lambda rank: (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(ones(2), ones(5)),
        ["reduce_scatter_tensor", "(5,) float32 is not 2 times (2,) float32"],
    ),
    "splits": (
        lambda rank: dist.all_to_all_single(ones(3), ones(3)),
        ["all_to_all_single", "3 rows don't split into [1, 1]"],
    ),
    "memory": (
        lambda rank: dist.all_reduce(ones(4, 4)[:, ::2]),
        ["all_reduce", "(4, 2) float32 with strides (4, 2) is not contiguous", ".contiguous()"],
    ),
}


UNSUPPORTED = {
    "send": lambda rank: dist.send(ones(1), 1 - rank),
    "recv": lambda rank: dist.irecv(ones(1), 1 - rank),
    "new_group": lambda rank: dist.new_group([0]),
    "destroy_process_group": lambda rank: dist.destroy_process_group(),
    "sparse": lambda rank: dist.all_reduce(torch.eye(2).to_sparse()),
    "PREMUL_SUM": lambda rank: dist.all_reduce(ones(1), _make_nccl_premul_sum(2.0)),
}
