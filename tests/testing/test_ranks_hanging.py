"""The simulation tells what would hang on real processes, and what it does not simulate."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from pure_loop.testing.ranks._collectives import CollectiveError, UnsupportedCollectiveError
from pure_loop.testing.ranks.simulation import simulate
from tests.support.simulating import UNSUPPORTED, WRONG, ones, results


@pytest.mark.parametrize("name", WRONG)
def test_ranks_that_disagree_are_named(name):
    program, words = WRONG[name]
    with pytest.raises(CollectiveError) as caught:
        simulate(program, 2)
    for word in words:
        assert word in str(caught.value)
    with pytest.raises(AssertionError):
        simulate(program, 2)


def test_of_many_ranks_each_is_named():
    def program(rank):
        dist.barrier()
        if rank != 2:
            dist.all_reduce(ones(1))

    with pytest.raises(CollectiveError, match=r"(?s)4 ranks.*number 2.*rank 2: ended after 1\n  rank 3: all_reduce"):
        simulate(program, 4)


@pytest.mark.parametrize("name", ["uneven", "shapes", "splits"])
def test_a_program_can_not_hide_a_disagreement(name):
    def program(rank):
        try:
            WRONG[name][0](rank)
        except Exception:  # the broadest that programs write, so that no kind of error could be hidden
            return "fine"

    with pytest.raises(CollectiveError):
        simulate(program, 2)


def test_cleaning_up_does_not_confuse_it():
    def program(rank):
        x = torch.tensor([rank + 1.0])
        try:
            dist.all_reduce(x)
        except BaseException:  # a clean-up like this one sees what the simulation itself raises to leave a program
            dist.barrier()
            raise
        finally:
            dist.all_reduce(x)
        return x.item()

    assert results(program, 2) == [6.0, 6.0]


def test_an_interrupt_comes_through():
    def program(rank):
        try:
            dist.barrier()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(program, 2)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_simulated_says_so(name):
    with pytest.raises(UnsupportedCollectiveError, match=name) as caught:
        simulate(UNSUPPORTED[name], 2)
    assert isinstance(caught.value, NotImplementedError)
    assert not dist.is_initialized()


def test_a_nan_does_not_look_like_a_change():
    def program(rank):
        x = torch.tensor([float("nan"), rank])
        for _ in range(2):
            dist.all_reduce(x)
        return x[1].item()

    assert results(program, 2) == [2.0, 2.0]


def test_a_program_that_changes_between_its_runs_is_caught():
    runs = []

    def other_numbers(rank):
        runs.append(rank)
        dist.all_reduce(torch.tensor([float(len(runs))]))

    def other_collectives(rank):
        runs.append(rank)
        dist.all_reduce(ones(1)) if len(runs) == 3 else dist.barrier()

    def fewer(rank):
        runs.append(rank)
        if len(runs) < 3:
            dist.barrier()

    for program, words in (
        (other_numbers, "number 1 was all_reduce .* had other numbers"),
        (other_collectives, "rank 0 of 2 .* number 1 was barrier, and on the next run it was all_reduce"),
        (fewer, "rank 0 of 2 .* number 1 was barrier, and on the next run it ended"),
    ):
        runs.clear()
        with pytest.raises(CollectiveError, match=words):
            simulate(program, 2)


def test_what_a_collective_overwrites_may_hold_anything():
    fresh = itertools.count()

    def program(rank):
        x = torch.tensor([next(fresh) if rank else 5])
        dist.broadcast(x, 0)
        y = torch.tensor([next(fresh)])
        dist.scatter(y, [x, x + 1] if rank == 0 else None, src=0)
        return x.item(), y.item()

    assert results(program, 2) == [(5, 5), (5, 6)]
