"""Several ranks or one: what is logged and drawn where, and what ``parallel`` can be."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, witness
from tests.support.worlds import KINDS, an_epoch, pool

# Observers.


def test_rank_0_alone_logs_unless_a_callback_asks_for_all(capsys):
    def program(rank):
        class Everywhere(pl.Callback):
            all_ranks = True

            def __init__(self):
                self.calls = 0

            def batch_end(self, state, logger):
                self.calls += 1

        class Once(pl.Callback):
            calls = 0

            def batch_end(self, state, logger):
                self.calls += 1

        everywhere, once, memory = Everywhere(), Once(), pl.loggers.InMemoryLogger()
        case = testing.Case(plan=Plan(batches=(4,), max_duration="2ba"))
        case.run(parallel="replicate", callbacks=[everywhere, once], loggers=[memory])
        return everywhere.calls, once.calls, sorted(memory.metrics)

    one, other = pool().run(program)
    assert one[:2] == (2, 2)
    assert other[:2] == (2, 0)
    assert "train/loss" in one[2]
    assert other[2] == []


def test_progress_draws_on_rank_0_alone():
    import io

    def program(rank):
        screen = io.StringIO()
        case = testing.Case(plan=Plan(batches=(4,), max_duration="2ba"))
        pl.run(pl.progress(case.stream(parallel="replicate"), file=screen))
        return screen.getvalue()

    one, other = pool().run(program)
    assert "done" in one
    assert other == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_leaves_no_process_group_of_its_own(kind):
    case = testing.Case(plan=Plan(batches=(4, 4), max_duration="1ep"))

    def program(rank):
        case.run(parallel=kind)  # sharded, the first one leaves a mesh for the States that it made
        before = set(c10d._world.pg_map)
        case.run(parallel=kind)
        after_end = set(c10d._world.pg_map)
        for event, _ in case.stream(parallel=kind):
            if event is Event.BATCH_END:
                break
        return before == after_end, set(c10d._world.pg_map) == before

    assert pool(kind=kind).run(program) == [(True, True), (True, True)]


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = torch.nn.Parameter(torch.ones(())), torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.scale * self.linear(x)


def test_a_parameter_without_a_dimension_is_refused_before_training():
    data = [(torch.ones(2, 1), torch.ones(2, 1))]

    def program(rank):
        stream = an_epoch(Scaled(), data, parallel="shard")
        begun = next(stream)[0]
        with pytest.raises(pl.ModelError, match=r"Scaled can't be sharded: the parameters \['scale'\] are scalars"):
            next(stream)
        return begun

    assert pool(kind="shard").run(program) == [Event.INIT] * 2


# One rank.


def test_without_torchrun_there_is_one_rank():
    case = testing.Case(plan=Plan(batches=(4, 3), max_duration="1ep"))
    for kind in KINDS:
        alone, same = witness(case.stream()), witness(case.stream(parallel=kind))
        compare(same, alone, kind, 0.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ddp", 'parallel=\'ddp\': write "replicate", "shard"'),
        (2, "parallel=2 of type int"),
    ],
)
def test_what_parallel_can_be(given, message):
    case = testing.Case(plan=Plan(batches=(4,), max_duration="1ba"))
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=message):
        case.stream(parallel=given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "ddp"},
        {"data": "mine"},
        {"uneven": 1},
        {"timeout": "3ep"},
        {"timeout": 0},
        {"timeout": "soon"},
        {"find_unused_parameters": 1},
        {"bucket_cap_mb": -1},
        {"groups": 3},
        {"mesh": 3},
    ],
    ids=str,
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError), match=next(iter(wrong))):
        Parallel(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "replicate", "groups": lambda name, module: True},
        {"kind": "shard", "bucket_cap_mb": 1.0},
        {"kind": "shard", "find_unused_parameters": True},
    ],
    ids=["groups", "bucket_cap_mb", "find_unused_parameters"],
)
def test_settings_of_the_other_kind_are_refused(wrong):
    with pytest.raises(pl.ArgumentError, match="has no use for"):
        Parallel(**wrong)
