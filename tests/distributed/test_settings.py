"""Several ranks or one: what is logged and drawn where, and what ``parallel`` can be."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.order import Plan
from pure_loop.testing.laws.ranks import compare, witness
from tests.support.problem import fit
from tests.support.worlds import KINDS, an_epoch, pool

CASE = testing.Case(plan=Plan(batches=(4, 3), max_duration="1ep"))
TYPE, VALUE = pl.ArgumentTypeError, pl.ArgumentError


def test_rank_0_alone_logs_and_draws_unless_a_callback_asks_for_all():
    def program(rank):
        class Everywhere(pl.Callback):
            all_ranks, calls = True, 0

            def batch_end(self, state, logger):
                self.calls += 1

        class Once(Everywhere):
            all_ranks = False

        everywhere, once, memory, screen = Everywhere(), Once(), pl.loggers.InMemoryLogger(), io.StringIO()
        stream = CASE.stream(parallel="replicate", callbacks=[everywhere, once], loggers=[memory])
        pl.run(pl.progress(stream, file=screen))
        return everywhere.calls, once.calls, "train/loss" in memory.metrics, screen.getvalue()

    (*one, drawn), other = pool().run(program)
    assert one == [2, 2, True]
    assert "done" in drawn
    assert other == (2, 0, False, "")


def _norm(state):
    return pl.gradients.global_norm(state.params)


def _module(state):
    return state.module().weight.sum()


def test_a_callback_on_the_first_rank_alone_does_not_begin_what_all_ranks_do_together():
    """That is an error, and no wait for ever; replicas are read alone."""

    def read(read, everywhere, parallel):
        """What the callback read, or the error of the first rank."""

        def program(rank):
            norms = []

            class Report(pl.Callback):
                all_ranks = everywhere

                def batch_end(self, state, logger):
                    norms.append(float(read(state)))

            try:
                data = [(torch.ones(4, 6), torch.zeros(4, 4))] * 2
                pl.run(an_epoch(torch.nn.Linear(6, 4), data, callbacks=[Report()], parallel=parallel))
            except pl.DistributedError as error:
                return str(error)
            return norms

        return pool().run(program)

    for what in (_norm, _module):
        first, second = read(what, False, "shard")
        assert first.startswith("callback Report runs on the first rank alone, and reads shards that all ranks read")
        assert "all_ranks = True" in first
        assert "rank 0" in second
    one, other = read(_module, True, "shard")
    assert one == other
    assert len(one) == 2
    first, second = read(_norm, False, "replicate")
    assert (len(first), second) == (2, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_leaves_no_process_group_of_its_own(kind):
    """Slow: three streams of each kind."""

    def program(rank):
        CASE.run(parallel=kind)  # sharded, the first one leaves a mesh for the States that it made
        before = set(c10d._world.pg_map)
        CASE.run(parallel=kind)
        after_end = set(c10d._world.pg_map)
        for event, _ in CASE.stream(parallel=kind):
            if event is Event.BATCH_END:
                break
        return before == after_end, set(c10d._world.pg_map) == before

    assert pool(kind=kind).run(program) == [(True, True)] * 2


class Scaled(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * super().forward(x)


def test_a_parameter_without_a_dimension_is_refused_before_training():
    def program(rank):
        stream = an_epoch(Scaled(), [(torch.ones(2, 1), torch.ones(2, 1))], parallel="shard")
        assert next(stream)[0] is Event.INIT
        with pytest.raises(pl.ModelError, match=r"Scaled can't be sharded: the parameters \['scale'\] are scalars"):
            next(stream)

    pool(kind="shard").run(program)


def test_without_torchrun_there_is_one_rank():
    for kind in KINDS:
        compare(witness(CASE.stream(parallel=kind)), witness(CASE.stream()), kind, 0.0)
    assert not dist.is_initialized()


def test_what_parallel_and_its_settings_can_be():
    for given, message in (
        ("ddp", 'parallel=\'ddp\': write "replicate", "shard"'),
        (2, "parallel=2 of type int"),
        (True, r'parallel=True .* "replicate".*False'),
    ):
        with pytest.raises((TYPE, VALUE), match=message):
            fit(parallel=given)
    for wrong in (
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
    ):
        with pytest.raises((TYPE, VALUE), match=next(iter(wrong))):
            pytest.fail(f"it is accepted: {Parallel(**wrong)}")
    for wrong in (
        {"kind": "replicate", "groups": lambda name, module: True},
        {"kind": "shard", "bucket_cap_mb": 1.0},
        {"kind": "shard", "find_unused_parameters": True},
    ):
        with pytest.raises(VALUE, match="has no use for"):
            pytest.fail(f"it is accepted: {Parallel(**wrong)}")
