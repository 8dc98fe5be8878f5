"""Ranks without a cluster: the simulation gives what gloo gives, says what would hang, and leaves all as it was."""

from __future__ import annotations

import itertools
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

import pure_loop as pl
from pure_loop._internal import torch_private
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.testing import Case, laws
from pure_loop.testing.ranks import NoSimulationError, simulation
from pure_loop.testing.ranks._collectives import Collective, CollectiveError, UnsupportedCollectiveError
from pure_loop.testing.ranks.processes import Pool
from pure_loop.testing.ranks.simulation import simulate
from pure_loop.testing.report import LawViolation
from tests.support.refused import Refusal, check, rows
from tests.support.simulating import RANKS, UNSUPPORTED, WRONG, ones, program_of, results

# Before, gloo can't send lists around.
LISTS = hasattr(dist, "all_gather_single")


@pytest.fixture(scope="module")
def pool():
    with Pool(RANKS, timeout=20) as pool:
        yield pool


# It gives what gloo gives.

ROW = st.lists(st.integers(0, 2), min_size=RANKS, max_size=RANKS)
OPTIONS = {
    **dict.fromkeys(("all_reduce", "reduce_scatter", "reduce_scatter_tensor"), ("SUM", "MAX", "MIN", "PRODUCT")),
    **dict.fromkeys(("async", "broadcast", "reduce", "gather", "scatter"), range(RANKS)),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "objects", "barrier", *["all_to_all"] * LISTS), (None,)),
}
STEPS = st.sampled_from([(kind, option) for kind, options in OPTIONS.items() for option in options]) | st.tuples(
    st.just("all_to_all_single"), st.lists(ROW, min_size=RANKS, max_size=RANKS)
)


@pytest.mark.slow  # programs on processes with gloo
@given(st.lists(STEPS, min_size=1, max_size=6), st.sampled_from(["float64", "float32", "int64"]), st.integers(1, 4))
@settings(max_examples=20)
def test_a_program_gives_what_it_gives_on_gloo(pool, steps, dtype, length):
    program = program_of(steps, dtype, length)
    assert results(program) == pool.run(program)


def test_every_collective_is_known_and_exact(pool):
    ring = [[1, 2, 0], [0, 1, 2], [2, 0, 1]]
    steps = [(kind, options[-1]) for kind, options in OPTIONS.items() if kind != "objects"]
    program = program_of(
        [*[("all_reduce", op) for op in ("SUM", "AVG")], *steps, ("all_to_all_single", ring)], "float64", 2
    )
    ran = simulate(program, RANKS)
    assert [each.result for each in ran] == pool.run(program)
    assert {each.kind for each in ran[0].collectives} == {kind for kind, _ in steps} - {"async"} | {"all_to_all_single"}
    assert ran[2].collectives[0] == Collective("all_reduce", ((2,),), (torch.float64,), "sum")
    assert "broadcast from rank 2 of (2,) float64" in map(str, ran[2].collectives)

    def all_others(rank):
        """Bits and booleans, what autograd sees of a collective, what is issued together, and what a program knows."""
        found = []
        for op in ("BAND", "BOR", "BXOR"):
            x = torch.tensor([rank + 1, 6 - rank])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        for op in ("SUM", "MAX", "MIN"):
            x = torch.tensor([rank == 0, rank < 3])
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            found.append(x.tolist())
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        dist.all_reduce(y)
        found.append(y._version)
        y.sum().backward()
        leaf = torch.full((2,), rank + 1.0, requires_grad=True)
        dist.broadcast(leaf, 1)
        x, y, z = (torch.tensor([rank + 1.0 + i]) for i in range(3))
        with c10d._coalescing_manager():
            dist.all_reduce(x)
            dist.broadcast(y, 1)
            dist.all_reduce(z)
        found += [x.item(), y.item(), z.item(), leaf.tolist()]
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        group = dist.group.WORLD
        return (
            torch.rand(2).tolist(),
            *found,
            [os.environ[name] for name in names],
            (dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_rank(group), group.size()),
            (dist.get_backend(), dist.get_process_group_ranks(group), dist.get_global_rank(group, rank)),
        )

    first, *_, last = results(all_others)
    assert (first[-3][:4], last[-2]) == (["0", "0", "3", "3"], (True, 2, 3, 2, 3))
    assert first[0] != last[0]
    assert results(all_others) == pool.run(all_others) == pool.run(all_others)


def later(name, *old):
    return next(getattr(functional, each) for each in (name, *old) if hasattr(functional, each))


def test_functional_and_asynchronous_collectives():
    def program(rank):
        world = dist.group.WORLD
        total = functional.all_reduce(torch.tensor([rank + 1.0]), "sum", group=world)
        more = functional.all_reduce(torch.tensor([1.0]), "sum", group=world)
        gather = later("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
        scatter = later("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
        pair = [torch.tensor([rank, 2]), torch.tensor([rank + 5, 7])]
        gathered = [each.tolist() for each in gather(pair, group=world)]
        scattered = [each.tolist() for each in scatter(pair, "sum", [0, 0], group=world)]
        x = torch.tensor([rank + 1.0])
        work = dist.all_reduce(x, async_op=True)
        before = x.item()
        assert work.wait()
        return total.tolist() + more.tolist(), gathered, scattered, before, x.item()

    waiting = torch._C._distributed_c10d._get_work_registry_size()
    everything = [[0, 2, 1, 2], [5, 7, 6, 7]]
    assert results(program, 2) == [
        ([3.0, 2.0], everything, [[1], [11]], 1.0, 3.0),
        ([3.0, 2.0], everything, [[4], [14]], 2.0, 3.0),
    ]
    # What a program that was left would have waited for is not kept until the interpreter ends.
    assert torch._C._distributed_c10d._get_work_registry_size() == waiting


# It tells what would hang on real processes, and leaves everything as it was.


def surroundings():
    seeds = torch.get_rng_state().tolist(), random.getstate()
    return dict(os.environ), c10d._world, dist.is_initialized(), torch.is_grad_enabled(), seeds


def raising(rank):
    torch.manual_seed(5)
    dist.barrier()
    if rank == 1:
        raise KeyError("gone")


def interrupted(rank):
    try:
        dist.barrier()
    finally:
        raise KeyboardInterrupt


def test_what_is_wrong_is_named_and_all_is_as_before(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    before = surroundings()
    for name, (program, words) in WRONG.items():
        with pytest.raises(CollectiveError) as caught:
            simulate(program, 2)
        assert isinstance(caught.value, AssertionError)
        assert not [word for word in words if word not in str(caught.value)], name
        assert surroundings() == before
    for name, program in UNSUPPORTED.items():
        with pytest.raises(UnsupportedCollectiveError, match=name) as caught:
            simulate(program, 2)
        assert isinstance(caught.value, NotImplementedError)
        assert surroundings() == before
    with pytest.raises(KeyError, match="gone") as caught:
        simulate(raising, 2)
    assert caught.value.__notes__ == ["On rank 1 of 2, simulated, after 1 collectives."]
    with pytest.raises(KeyboardInterrupt):
        simulate(interrupted, 2)
    simulate(lambda rank: torch.rand(rank), 2)
    assert surroundings() == before


def test_a_program_can_not_hide_a_disagreement():
    def hiding(rank, name):
        try:
            WRONG[name][0](rank)
        except Exception:  # the broadest that programs write, so that no kind of error could be hidden
            return "fine"

    for name in ("uneven", "shapes", "splits"):
        with pytest.raises(CollectiveError):
            simulate(lambda rank, name=name: hiding(rank, name), 2)

    def third(rank):
        dist.barrier()
        if rank != 2:
            dist.all_reduce(ones(1))

    with pytest.raises(CollectiveError, match=r"(?s)4 ranks.*number 2.*rank 2: ended after 1\n  rank 3: all_reduce"):
        simulate(third, 4)


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


def test_a_program_that_changes_between_its_runs_is_caught():
    runs = []

    def other_numbers(rank):
        dist.all_reduce(torch.tensor([float(len(runs))]))

    def other_collectives(rank):
        dist.all_reduce(ones(1)) if len(runs) == 3 else dist.barrier()

    def fewer(rank):
        if len(runs) < 3:
            dist.barrier()

    for program, words in (
        (other_numbers, "number 1 was all_reduce .* had other numbers"),
        (other_collectives, "rank 0 of 2 .* number 1 was barrier, and on the next run it was all_reduce"),
        (fewer, "rank 0 of 2 .* number 1 was barrier, and on the next run it ended"),
    ):
        runs.clear()
        with pytest.raises(CollectiveError, match=words):
            simulate(lambda rank, program=program: (runs.append(rank), program(rank)), 2)


def test_it_runs_inside_a_process_group_and_inside_itself():
    def inner(rank):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        return x.item()

    def outer(rank):
        x = torch.tensor([10.0 * rank])
        dist.all_reduce(x)
        nested = results(inner, 2)
        dist.all_reduce(x)
        return x.item(), nested, dist.get_rank(), os.environ["RANK"]

    kept = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert results(outer, 3) == [(90.0, [3.0, 3.0], rank, str(rank)) for rank in range(3)]
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()
    simulate(lambda rank: kept.append(dist.group.WORLD), 1)
    with pytest.raises(CollectiveError, match="simulation that is over"):
        dist.all_reduce(ones(1), group=kept[0])


def test_a_program_runs_hardly_more_often_than_it_has_collectives():
    runs = []

    def program(rank, collectives):
        runs.append(rank)
        for _ in range(collectives):
            dist.all_reduce(ones(2))

    for ranks, collectives, expected in ((2, 0, 2), (2, 5, 7), (3, 4, 11), (1, 9, 1)):
        runs.clear()
        simulate(lambda rank, c=collectives: program(rank, c), ranks)
        assert len(runs) == expected

    def timed():
        begun = time.process_time()
        simulate(lambda rank: program(rank, 2), 2)
        return time.process_time() - begun

    assert min(timed() for _ in range(30)) < 0.005


# Where torch keeps its process groups elsewhere.

CASE = Case(plan=Plan(batches=(2,), max_duration="1ba"))


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
    laws.rank_agreement(lambda: pl.algorithms.gradient_clipping("norm", 1.0), CASE)
    with pytest.raises(LawViolation, match="on 2 processes with gloo, rank 1 differs from rank 0"):
        laws.rank_agreement(lambda: by_rank, CASE)


@rows(
    [
        Refusal("program", lambda: simulate(3, 2), ArgumentTypeError, ("simulate(",)),
        Refusal("ranks", lambda: simulate(print, True), ArgumentTypeError, ("simulate(",)),
        Refusal("no rank", lambda: simulate(print, 0), ArgumentError, ("simulate(",)),
        Refusal("ranks of a pool", lambda: Pool("2"), ArgumentTypeError, ("Pool(",)),
        Refusal("no rank of a pool", lambda: Pool(0), ArgumentError, ("Pool(",)),
        Refusal("timeout", lambda: Pool(1, timeout=float("nan")), ArgumentError, ("Pool(",)),
    ]
)
def test_it_is_refused(refusal):
    check(refusal)
