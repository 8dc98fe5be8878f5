"""Ranks without a cluster: the simulation gives what gloo gives, says what would hang, and leaves all as it was."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import _get_work_registry_size, _make_nccl_premul_sum
from torch.distributed import distributed_c10d as c10d

import pure_loop as pl
from pure_loop._internal import torch_private
from pure_loop.order import Plan
from pure_loop.testing import Case, laws
from pure_loop.testing.ranks import NoSimulationError, simulation
from pure_loop.testing.ranks._collectives import Collective, CollectiveError, UnsupportedCollectiveError
from pure_loop.testing.ranks.processes import Pool
from pure_loop.testing.ranks.simulation import simulate
from pure_loop.testing.report import LawViolation

RANKS = 3
ones, Op = torch.ones, dist.ReduceOp
INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTERED = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS, timeout=20) as pool:
        yield pool


def results(program, ranks=RANKS):
    return [ran.result for ran in simulate(program, ranks)]


# It gives what gloo gives.


def both(y, gathered, option):
    works = [dist.all_reduce(y, async_op=True), dist.broadcast(gathered[0], 0, async_op=True)]
    for work in reversed(works[:option]):
        work.wait()
    works[-1].wait()
    works[0].get_future().wait()


def by_rows(y, whole, sizes, rank):
    gets = [row[rank] for row in sizes]
    dist.all_to_all_single(whole[: sum(gets)], y.repeat(6)[: sum(sizes[rank])], gets, sizes[rank])


# Of a tensor, one a rank, a tensor as long as six, the same as one a rank, an option and the rank.
CALLS = {
    "all_reduce": lambda y, parts, whole, gathered, op, rank: dist.all_reduce(y, getattr(Op, op)),
    "reduce_scatter": lambda y, parts, whole, gathered, op, rank: dist.reduce_scatter(y, parts, getattr(Op, op)),
    "reduce_scatter_tensor": lambda y, parts, whole, gathered, op, rank: SCATTERED(
        y, torch.cat(parts), getattr(Op, op)
    ),
    "async": lambda y, parts, whole, gathered, option, rank: both(y, gathered, option),
    "broadcast": lambda y, parts, whole, gathered, root, rank: dist.broadcast(y, root),
    "reduce": lambda y, parts, whole, gathered, root, rank: (dist.reduce(y, root), rank == root or y.copy_(parts[0])),
    "gather": lambda y, parts, whole, gathered, root, rank: dist.gather(y, gathered if rank == root else None, root),
    "scatter": lambda y, parts, whole, gathered, root, rank: dist.scatter(y, parts if rank == root else None, root),
    "all_gather": lambda y, parts, whole, gathered, _, rank: dist.all_gather(gathered, y),
    "all_gather_into_tensor": lambda y, parts, whole, gathered, _, rank: INTO(whole[: 3 * len(y)], y),
    "barrier": lambda *_: dist.barrier(),
    "all_to_all": lambda y, parts, whole, gathered, _, rank: dist.all_to_all(gathered, parts),
    "all_to_all_single": lambda y, parts, whole, gathered, sizes, rank: by_rows(y, whole, sizes, rank),
}
OPTIONS = {
    **dict.fromkeys(("all_reduce", "reduce_scatter", "reduce_scatter_tensor"), ("SUM", "MAX", "MIN", "PRODUCT")),
    **dict.fromkeys(("async", "broadcast", "reduce", "gather", "scatter"), range(RANKS)),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "barrier"), (None,)),
    **({"all_to_all": (None,)} if hasattr(dist, "all_gather_single") else {}),  # before, gloo can't send lists around
}


def program_of(steps, dtype, length):
    """A program of a list of collectives, each working on what the one before gave."""

    def program(rank, calls=CALLS):
        x = torch.arange(length).to(dtype) + 10 * rank
        seen = []
        for kind, option in steps:
            y, whole = x.clone(), torch.full((6 * length,), -1).to(dtype)
            gathered = list(whole[: RANKS * length].split(length))
            calls[kind](y, [x + i for i in range(RANKS)], whole, gathered, option, rank)
            seen.append((y.tolist(), whole.tolist()))
            # Small whole numbers again, so that no order of adding matters.
            x = (y + whole[:length]) % 7 + rank
        return seen

    return program


ROW = st.lists(st.integers(0, 2), min_size=RANKS, max_size=RANKS)
STEPS = st.sampled_from([(kind, option) for kind, options in OPTIONS.items() for option in options]) | st.tuples(
    st.just("all_to_all_single"), st.lists(ROW, min_size=RANKS, max_size=RANKS)
)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.int64])


@pytest.mark.slow  # programs on processes with gloo
@given(st.lists(STEPS, min_size=1, max_size=6), DTYPES, st.integers(1, 4))
@settings(max_examples=20)
def test_a_program_gives_what_it_gives_on_gloo(pool, steps, dtype, length):
    program = program_of(steps, dtype, length)
    assert results(program) == pool.run(program)


def others(rank):
    """Bits and booleans, what autograd sees of a collective, what is issued together, and what a program knows."""
    found = []
    for name in ("BAND", "BOR", "BXOR", "SUM", "MAX", "MIN"):
        x = torch.tensor([rank + 1, 6 - rank] if name[0] == "B" else [rank == 0, rank < 3])
        dist.all_reduce(x, getattr(Op, name))
        found.append(x.tolist())
    y, leaf = ones(2, requires_grad=True).exp(), torch.full((2,), rank + 1.0, requires_grad=True)
    dist.all_reduce(y)
    y.sum().backward()
    pair = [torch.tensor([rank + 1.0 + i]) for i in range(2)]
    with c10d._coalescing_manager():
        dist.all_reduce(pair[0])
        dist.broadcast(pair[1], 1)
    dist.broadcast(leaf, 1)
    group, names = (
        dist.group.WORLD,
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
    )
    known = dist.get_rank(), dist.get_world_size(), dist.get_rank(group), group.size(), dist.get_backend()
    ranks = dist.is_initialized(), dist.get_process_group_ranks(group), dist.get_global_rank(group, rank)
    found += [y._version, torch.stack(pair).tolist(), leaf.tolist(), known, ranks]
    return torch.rand(2).tolist(), found, [os.environ[name] for name in names]


def test_every_collective_is_known_and_exact(pool):
    def sent(rank, program=others):  # a function of a module would be imported there
        return program(rank)

    ring = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]
    steps = [(kind, options[-1]) for kind, options in OPTIONS.items()]
    steps = [("all_reduce", "SUM"), ("all_reduce", "AVG"), *steps, ("all_to_all_single", ring)]
    program = program_of(steps, torch.float64, 2)
    ran = simulate(program, RANKS)
    assert [each.result for each in ran] == pool.run(program)
    assert {each.kind for each in ran[0].collectives} == {kind for kind, _ in steps} - {"async"}
    assert ran[2].collectives[0] == Collective("all_reduce", ((2,),), (torch.float64,), "sum")
    assert "broadcast from rank 2 of (2,) float64" in map(str, ran[2].collectives)
    first, *_, last = results(others)
    assert first[2][:4] == ["0", "0", "3", "3"]
    assert first[0] != last[0]
    assert results(others) == pool.run(sent) == pool.run(sent)


def later(name, old):
    return getattr(functional, name, None) or getattr(functional, old)


def test_functional_and_asynchronous_collectives():
    gather = later("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
    scatter = later("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")

    def program(rank):
        pair = [torch.tensor([rank, 2]), torch.tensor([rank + 5, 7])]
        found = [functional.all_reduce(torch.tensor([rank + 1]), "sum", group=dist.group.WORLD)]
        found += [*gather(pair, group=dist.group.WORLD), *scatter(pair, "sum", [0, 0], group=dist.group.WORLD)]
        x = torch.tensor([rank + 1])
        work = dist.all_reduce(x, async_op=True)
        before = x.item()
        assert work.wait()
        return [each.tolist() for each in found], before, x.item()

    waiting = _get_work_registry_size()
    assert results(program, 2) == [
        ([[3], [0, 2, 1, 2], [5, 7, 6, 7], [part], [part + 10]], before, 3) for part, before in ((1, 1), (4, 2))
    ]
    # What a program that was left would have waited for is not kept until the interpreter ends.
    assert _get_work_registry_size() == waiting


# It tells what would hang on real processes, and leaves everything as it was.

WRONG = {
    "number 3.* rank 0: ended after 2 rank 1: all_reduce .sum. of .3,. float32": lambda rank: [
        dist.all_reduce(ones(3)) for _ in range(2 + rank)
    ],
    "number 2.* rank 0: all_reduce .sum. of .3,. float32 rank 1: ended after 1": lambda rank: [
        dist.all_reduce(ones(3)) for _ in range(2 - rank)
    ],
    "number 1.* rank 0: broadcast from rank 0 of.* rank 1: barrier": lambda rank: (
        dist.barrier() if rank else dist.broadcast(ones(3), 0)
    ),
    "rank 0:.* of .2,. float32 rank 1:.* of .3,. float32": lambda rank: dist.all_reduce(ones(2 + rank)),
    "of .2,. float64.* of .2,. int64": lambda rank: dist.all_reduce(ones(2).to((torch.float64, torch.int64)[rank])),
    "all_reduce .max..* all_reduce .avg.": lambda rank: dist.all_reduce(ones(2), (Op.MAX, Op.AVG)[rank]),
    "from rank 0.* from rank 1": lambda rank: dist.broadcast(ones(2), rank),
    "all_to_all of .1,. float32, .2,..* Rank 0 expects something else from rank 0": lambda rank: dist.all_to_all(
        [ones(2), ones(1)], [ones(1 + rank), ones(2)]
    ),
    "rank 0 of 2 calls all_gather,.* 1 tensors for 2 ranks": lambda rank: dist.all_gather([ones(2)], ones(2)),
    "calls all_gather,.* holds .3,. float32, where .2,.": lambda rank: dist.all_gather([ones(2), ones(3)], ones(2)),
    "reduce_scatter_tensor,.* .5,. float32 is not 2 times .2,.": lambda rank: SCATTERED(ones(2), ones(5)),
    "3 rows don't split into .1, 1.": lambda rank: dist.all_to_all_single(ones(3), ones(3)),
    "with strides .4, 2. is not contiguous: .*.contiguous": lambda rank: dist.all_reduce(ones(4, 4)[:, ::2]),
}
UNSUPPORTED = {
    "send": lambda rank: dist.send(ones(1), 1 - rank),
    "recv": lambda rank: dist.irecv(ones(1), 1 - rank),
    "new_group": lambda rank: dist.new_group([0]),
    "destroy_process_group": lambda rank: dist.destroy_process_group(),
    "sparse": lambda rank: dist.all_reduce(torch.eye(2).to_sparse()),
    "PREMUL_SUM": lambda rank: dist.all_reduce(ones(1), _make_nccl_premul_sum(2.0)),
}


def surroundings():
    seeds = torch.get_rng_state().tolist(), random.getstate()
    return dict(os.environ), c10d._world, dist.is_initialized(), torch.is_grad_enabled(), seeds


def raising(rank, error):
    torch.manual_seed(5)
    dist.barrier()
    if rank == 1:
        raise error


def hiding(rank, program):
    try:
        return program(rank)
    except Exception:  # the broadest that programs write, so that no kind of error could be hidden
        return "fine"


def test_what_is_wrong_is_named_can_not_be_hidden_and_all_is_as_before(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    before = surroundings()
    for says, program in WRONG.items():
        with pytest.raises(AssertionError, match="(?s)" + says.replace(" ", r"\s+")) as caught:
            simulate(lambda rank, program=program: hiding(rank, program), 2)
        assert isinstance(caught.value, CollectiveError)
        assert surroundings() == before
    for name, program in UNSUPPORTED.items():
        with pytest.raises(NotImplementedError, match=name) as caught:
            simulate(program, 2)
        assert isinstance(caught.value, UnsupportedCollectiveError)
        assert surroundings() == before
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error) as caught:
            simulate(lambda rank, error=error: raising(rank, error), 2)
        assert error is KeyboardInterrupt or "On rank 1 of 2, simulated, after 1 collectives." in caught.value.__notes__
    assert surroundings() == before


def test_neither_a_clean_up_nor_nan_nor_what_is_overwritten_confuses_it():
    fresh = itertools.count()

    def program(rank):
        x, y = torch.tensor([float("nan"), rank + 1.0]), torch.tensor([next(fresh) if rank else 5])
        try:
            dist.all_reduce(x)
        except BaseException:  # a clean-up like this one sees what the simulation itself raises to leave a program
            dist.barrier()
            raise
        finally:
            dist.all_reduce(x)
        dist.broadcast(y, 0)
        z = torch.tensor([next(fresh)])
        dist.scatter(z, [y, y + 1] if rank == 0 else None, src=0)
        return x[1].item(), y.item(), z.item()

    assert results(program, 2) == [(6.0, 5, 5), (6.0, 5, 6)]


def test_a_program_runs_hardly_more_often_than_it_has_collectives_and_has_the_same_each_time():
    runs = []

    def steady(rank, collectives):
        for _ in range(collectives):
            dist.all_reduce(ones(2))

    def other_numbers(rank, _):
        dist.all_reduce(torch.tensor([float(len(runs))]))

    def other_collectives(rank, _):
        dist.all_reduce(ones(1)) if len(runs) == 3 else dist.barrier()

    def fewer(rank, _):
        if len(runs) < 3:
            dist.barrier()

    def ran(program, ranks, collectives=1):
        runs.clear()
        simulate(lambda rank: (runs.append(rank), program(rank, collectives)), ranks)
        return len(runs)

    for ranks, collectives, expected in ((2, 0, 2), (2, 5, 7), (3, 4, 11), (1, 9, 1)):
        assert ran(steady, ranks, collectives) == expected
    for program, says in (
        (other_numbers, "number 1 was all_reduce .* had other numbers"),
        (other_collectives, "rank 0 of 2 .* number 1 was barrier, and on the next run it was all_reduce"),
        (fewer, "rank 0 of 2 .* number 1 was barrier, and on the next run it ended"),
    ):
        with pytest.raises(CollectiveError, match=says):
            ran(program, 2)


def test_it_runs_inside_a_process_group_and_inside_itself():
    def sums(rank):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        return x.item()

    def outer(rank):
        return sums(rank), results(sums, 2), sums(rank), dist.get_rank(), os.environ["RANK"]

    kept = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert results(outer, 3) == [(6.0, [3.0, 3.0], 6.0, rank, str(rank)) for rank in range(3)]
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()
    simulate(lambda rank: kept.append(dist.group.WORLD), 1)
    with pytest.raises(CollectiveError, match="simulation that is over"):
        dist.all_reduce(ones(1), group=kept[0])


# Where torch keeps its process groups elsewhere.


def test_a_torch_whose_groups_cannot_be_replaced_is_named(monkeypatch):
    monkeypatch.setattr(torch_private, "missing", {})
    for name in ("_World", "_world"):
        with monkeypatch.context() as hidden:
            hidden.delattr(c10d, name)
            with pytest.raises(NoSimulationError, match=r"Pool\(2\)\.run"):
                simulate(ones, 2)
        assert f"torch.distributed.distributed_c10d.{name}" in torch_private.missing


@pl.algorithm(pl.Event.AFTER_TRAIN_BATCH)
def by_rank(state):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return state.replace(grads={name: grad + rank for name, grad in state.grads.items()})


@pytest.mark.slow  # processes
def test_the_law_of_ranks_then_runs_on_processes(monkeypatch):
    monkeypatch.setattr(simulation, "replaceable_world", lambda: None)
    with pytest.raises(LawViolation, match="on 2 processes with gloo, rank 1 differs from rank 0"):
        laws.rank_agreement(lambda: by_rank, Case(plan=Plan(batches=(2,), max_duration="1ba")))


def test_what_is_no_program_and_no_number_of_ranks_is_refused():
    for call in (lambda: simulate(3, 2), lambda: simulate(print, 0), lambda: Pool(0), lambda: Pool(1, timeout=0.0)):
        with pytest.raises(pl.PureLoopError, match=r"simulate\(|Pool\("):
            call()
