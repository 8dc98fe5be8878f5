"""Ranks without a cluster: the simulation gives what gloo gives."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from pure_loop.testing.ranks._collectives import Collective
from pure_loop.testing.ranks.processes import Pool, RankError, shared_pool
from pure_loop.testing.ranks.simulation import simulate
from tests.support.simulating import RANKS, program_of, results

# Before, gloo can't send lists around.
LISTS = hasattr(dist, "all_gather_single")


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS, timeout=20) as pool:
        yield pool


def steps(ranks):
    rank, op = st.integers(0, ranks - 1), st.sampled_from(["SUM", "MAX", "MIN", "PRODUCT"])
    sizes = st.lists(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)
    options = {
        "all_reduce": op,
        "async": st.integers(0, 2),
        "broadcast": rank,
        "reduce": rank,
        "all_gather": st.none(),
        "all_gather_into_tensor": st.none(),
        "reduce_scatter": op,
        "reduce_scatter_tensor": op,
        "all_to_all": st.none(),
        "all_to_all_single": sizes,
        "gather": rank,
        "scatter": rank,
        "objects": st.none(),
        "barrier": st.none(),
    }
    if not LISTS:
        del options["all_to_all"]
    return st.sampled_from(sorted(options)).flatmap(lambda kind: st.tuples(st.just(kind), options[kind]))


@pytest.mark.slow
@given(
    steps=st.lists(steps(RANKS), min_size=1, max_size=6),
    dtype=st.sampled_from(["float64", "float32", "int64"]),
    length=st.integers(1, 4),
)
@settings(max_examples=20)
def test_a_program_gives_what_it_gives_on_gloo(pool, steps, dtype, length):
    program = program_of(steps, dtype, length)
    assert results(program) == pool.run(program)


def test_every_collective_is_known_and_exact(pool):
    ring = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]
    program = program_of(
        [
            *[("all_reduce", op) for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")],
            *[(kind, 1) for kind in ("async", "broadcast", "reduce", "gather", "scatter")],
            *[(kind, None) for kind in ("all_gather", "all_gather_into_tensor", "barrier")],
            *[("all_to_all", None)] * LISTS,
            *[(kind, "SUM") for kind in ("reduce_scatter", "reduce_scatter_tensor")],
            ("all_to_all_single", ring),
        ],
        "float64",
        2,
    )
    ran = simulate(program, RANKS)
    assert [each.result for each in ran] == pool.run(program)
    assert {each.kind for each in ran[0].collectives} == {
        *("all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_gather_into_tensor"),
        *("all_to_all_single", "barrier", "reduce_scatter", "reduce_scatter_tensor", *["all_to_all"] * LISTS),
    }
    assert ran[2].collectives[0] == Collective("all_reduce", ((2,),), (torch.float64,), "sum")
    assert str(ran[2].collectives[7]) == "broadcast from rank 1 of (2,) float64"


def test_bits_and_booleans(pool):
    def program(rank):
        found = []
        for op in ("BAND", "BOR", "BXOR"):
            x = torch.tensor([rank + 1, 6 - rank])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        for op in ("SUM", "MAX", "MIN"):
            x = torch.tensor([rank == 0, rank < 3])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        return found

    assert results(program) == pool.run(program)


def test_autograd_sees_of_a_collective_what_it_sees_with_gloo(pool):
    def program(rank):
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        dist.all_reduce(y)
        version = y._version
        y.sum().backward()
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        dist.broadcast(leaf, 1)
        return version, y.tolist(), x.grad.tolist(), leaf.tolist()

    assert results(program) == pool.run(program)


def test_functional_collectives():
    import torch.distributed._functional_collectives as functional

    def program(rank):
        total = functional.all_reduce(torch.tensor([rank + 1.0]), "sum", group=dist.group.WORLD)
        later = functional.all_reduce(torch.tensor([1.0]), "sum", group=dist.group.WORLD)
        dist.barrier()
        gather, scatter = (
            getattr(functional, f"{name}_single_coalesced", None) or getattr(functional, old)
            for name, old in (
                ("all_gather", "all_gather_into_tensor_coalesced"),
                ("reduce_scatter", "reduce_scatter_tensor_coalesced"),
            )
        )
        pair = [torch.tensor([rank, 2]), torch.tensor([rank + 5, 7])]
        gathered = [each.tolist() for each in gather(pair, group=dist.group.WORLD)]
        scattered = [each.tolist() for each in scatter(pair, "sum", [0, 0], group=dist.group.WORLD)]
        return total.tolist(), later.tolist(), gathered, scattered

    waiting = torch._C._distributed_c10d._get_work_registry_size()
    everything = [[0, 2, 1, 2], [5, 7, 6, 7]]
    assert results(program, 2) == [
        ([3.0], [2.0], everything, [[1], [11]]),
        ([3.0], [2.0], everything, [[4], [14]]),
    ]
    # What a program that was left would have waited for is not kept until the interpreter ends.
    assert torch._C._distributed_c10d._get_work_registry_size() == waiting


@pytest.mark.thorough
def test_distributed_data_parallel():
    def program(rank):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(2):
            x = torch.arange(12.0).view(4, 3) + rank + step
            model(x).square().sum().backward()
        return [p.grad.tolist() for p in model.parameters()], [b.tolist() for b in model.buffers()]

    simulated = results(program, 2)
    assert simulated[0][0] == simulated[1][0]
    assert shared_pool(2, checked=False).run(program) == simulated
    with pytest.raises(RankError, match=r"SIGSEGV .* use Pool\(checked=False\)"):
        shared_pool(2).run(program)
    assert shared_pool(2).run(lambda rank: rank) == [0, 1]


def test_collectives_that_are_issued_together(pool):
    def program(rank):
        x, y, z = (torch.tensor([rank + 1.0 + i]) for i in range(3))
        with c10d._coalescing_manager():
            dist.all_reduce(x)
            dist.broadcast(y, 1)
            dist.all_reduce(z)
        return x.item(), y.item(), z.item()

    assert results(program) == pool.run(program) == [(6.0, 3.0, 12.0)] * 3


def test_an_asynchronous_result_arrives_when_it_is_waited_for():
    def program(rank):
        x = torch.tensor([rank + 1.0])
        work = dist.all_reduce(x, async_op=True)
        before = x.item()
        assert work.wait()
        return before, x.item()

    assert results(program, 2) == [(1.0, 3.0), (2.0, 3.0)]


def test_a_program_knows_its_place(pool):
    def program(rank):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        drawn = torch.rand(2).tolist()
        group = dist.group.WORLD
        return (
            [os.environ[name] for name in names],
            (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_rank(group), group.size()),
            (dist.get_backend(), dist.get_process_group_ranks(group), dist.get_global_rank(group, rank)),
            drawn,
        )

    first, *_, last = results(program)
    assert first[0][:4] == ["0", "0", "3", "3"]
    assert last[1] == (True, 2, 3, 2, 3)
    assert first[3] != last[3]
    assert results(program) == pool.run(program) == pool.run(program)
