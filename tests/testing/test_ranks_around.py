"""The simulation leaves everything around it as it was, says what is wrong with a program, and is cheap."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import pure_loop as pl
from pure_loop._internal import torch_private
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.order import Plan
from pure_loop.testing import Case, laws
from pure_loop.testing.ranks import NoSimulationError, simulation
from pure_loop.testing.ranks._collectives import CollectiveError
from pure_loop.testing.ranks.simulation import simulate
from pure_loop.testing.report import LawViolation
from tests.support.simulating import UNSUPPORTED, WRONG, ones, results

# It leaves all as it was.


def surroundings():
    return (
        dict(os.environ),
        c10d._world,
        dist.is_initialized(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
    )


def raising(rank):
    torch.manual_seed(5)
    dist.barrier()
    if rank == 1:
        raise KeyError("gone")


@pytest.mark.parametrize("program", [raising, *[WRONG[name][0] for name in WRONG], *UNSUPPORTED.values()])
def test_everything_is_restored(program, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = surroundings()
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is
        simulate(program, 2)
    assert surroundings() == before
    simulate(lambda rank: torch.rand(rank), 2)
    assert surroundings() == before


def test_an_exception_names_its_rank():
    with pytest.raises(KeyError, match="gone") as caught:
        simulate(raising, 2)
    assert caught.value.__notes__ == ["On rank 1 of 2, simulated, after 1 collectives."]


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

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert results(outer, 3) == [(90.0, [3.0, 3.0], rank, str(rank)) for rank in range(3)]
        assert dist.group.WORLD is group
        x = ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_the_group_of_a_simulation_that_is_over_says_so():
    kept = []
    simulate(lambda rank: kept.append(dist.group.WORLD), 1)
    with pytest.raises(CollectiveError, match="simulation that is over"):
        dist.all_reduce(ones(1), group=kept[0])


# It is cheap.


def test_a_program_runs_hardly_more_often_than_it_has_collectives():
    runs = []

    def program(rank, collectives):
        runs.append(rank)
        for _ in range(collectives):
            dist.all_reduce(ones(2))

    for ranks, collectives, expected in ((2, 0, 2), (2, 2, 4), (2, 5, 7), (3, 0, 3), (3, 4, 11), (1, 9, 1)):
        runs.clear()
        simulate(lambda rank, c=collectives: program(rank, c), ranks)
        assert len(runs) == expected

    def timed():
        begun = time.perf_counter()
        simulate(lambda rank: program(rank, 2), 2)
        return time.perf_counter() - begun

    assert min(timed() for _ in range(30)) < 0.005


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, 2), ArgumentTypeError),
        ((print, "2"), ArgumentTypeError),
        ((print, True), ArgumentTypeError),
        ((print, 0), ArgumentError),
    ],
)
def test_simulate_with_bad_arguments(arguments, error):
    with pytest.raises(error, match=r"simulate\("):
        simulate(*arguments)


# Where torch keeps its process groups elsewhere.

CASE = Case(plan=Plan(batches=(2,), max_duration="1ba"))


@pytest.mark.parametrize("name", ["_World", "_world"])
def test_a_torch_whose_groups_cannot_be_replaced_is_named(name, monkeypatch):
    monkeypatch.setattr(torch_private, "missing", {})
    hidden = getattr(c10d, name)
    monkeypatch.delattr(c10d, name)
    try:
        with pytest.raises(NoSimulationError, match=r"Pool\(2\)\.run"):
            simulate(ones, 2)
    finally:
        setattr(c10d, name, hidden)
    assert f"torch.distributed.distributed_c10d.{name}" in torch_private.missing


@pytest.mark.slow
def test_the_law_of_ranks_then_runs_on_processes(monkeypatch):
    monkeypatch.setattr(simulation, "replaceable_world", lambda: None)

    @pl.algorithm(pl.Event.AFTER_TRAIN_BATCH)
    def by_rank(state):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return state.replace(grads={name: grad + rank for name, grad in state.grads.items()})

    laws.rank_agreement(lambda: pl.algorithms.gradient_clipping("norm", 1.0), CASE)
    with pytest.raises(LawViolation, match="on 2 processes with gloo, rank 1 differs from rank 0"):
        laws.rank_agreement(lambda: by_rank, CASE)
