"""Several ranks or one: what is logged and drawn where, what is left behind, and what ``parallel`` can be."""

from __future__ import annotations

import io

import pytest
import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.distributed import Parallel
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError
from pure_loop.order import Plan
from tests.support.problem import fit
from tests.support.worlds import KINDS, an_epoch, pool, told

CASE = testing.Case(plan=Plan(batches=(4, 3), max_duration="1ep"))


class Calls(pl.Callback):
    """Counts batches, or reads something of each, on all ranks or on the first one."""

    def __init__(self, all_ranks, read=lambda state: 0.0):
        self.all_ranks, self.read, self.found = all_ranks, read, []

    def batch_end(self, state, logger):
        self.found.append(float(self.read(state)))


def test_rank_0_alone_logs_and_draws_unless_a_callback_asks_for_all():
    """A stream leaves no process group of its own, at its end or where the loop is left."""

    def program(rank):
        everywhere, once, memory, screen = Calls(True), Calls(False), pl.loggers.InMemoryLogger(), io.StringIO()
        stream = CASE.stream(parallel="replicate", callbacks=[everywhere, once], loggers=[memory])
        pl.run(pl.progress(stream, file=screen))
        for kind in KINDS:
            CASE.run(parallel=kind)  # sharded, the first one leaves a mesh for the States that it made
            before = set(c10d._world.pg_map)
            CASE.run(parallel=kind)
            assert set(c10d._world.pg_map) == before
            next(event for event, _ in CASE.stream(parallel=kind) if event is Event.BATCH_END)
            assert set(c10d._world.pg_map) == before
        return len(everywhere.found), len(once.found), "train/loss" in memory.metrics, screen.getvalue()

    (*one, drawn), other = pool().run(program)
    assert one == [2, 2, True]
    assert "done" in drawn
    assert other == (2, 0, False, "")


def test_a_callback_on_the_first_rank_alone_does_not_begin_what_all_ranks_do_together():
    """That is an error, and no wait for ever; replicas are read alone."""
    reads = {
        "norm": lambda state: pl.gradients.global_norm(state.params),
        "module": lambda state: state.module().weight.sum(),
    }

    def program(rank):
        found = []
        for name, all_ranks, kind in (("norm", False, "shard"), ("module", False, "shard"), ("module", True, "shard")):
            callback = Calls(all_ranks, reads[name])
            data = [(torch.ones(4, 6), torch.zeros(4, 4))] * 2
            text = told(an_epoch(torch.nn.Linear(6, 4), data, callbacks=[callback], parallel=kind))
            found.append(text if text != "nothing" else callback.found)
        callback = Calls(False, reads["norm"])
        CASE.run(callbacks=[callback], parallel="replicate")
        return *found, callback.found

    one, other = pool().run(program)
    for first, second in zip(one[:2], other[:2], strict=True):
        assert "callback Calls runs on the first rank alone, and reads shards that all ranks read" in first
        assert "all_ranks = True" in first
        assert "rank 0" in second
    assert one[2] == other[2]
    assert [len(found) for found in (one[2], one[3], other[3])] == [2, 2, 0]


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
        with pytest.raises(ModelError, match=r"Scaled can't be sharded: the parameters \['scale'\] are scalars"):
            next(stream)

    pool(kind="shard").run(program)


def test_layers_and_tensors_that_ranks_can_not_train_are_refused_before_training():
    def program(rank):
        nets = [torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.SyncBatchNorm(2)) for _ in range(2)]
        nets[1][1].eval()  # which exchanges nothing
        nets.append(parallelize_module(torch.nn.Linear(1, 2), init_device_mesh("cpu", (2,)), ColwiseParallel()))
        data = [(torch.ones(4, 1), torch.ones(4, 2))]
        return [told(lambda net=net: an_epoch(net, data, parallel="replicate")) for net in nets]

    for sync, fixed, parallel in pool().run(program):
        assert "model.1 is a SyncBatchNorm" in sync
        assert fixed == "nothing"
        assert "parameter 'weight' is a DTensor" in parallel
        assert 'parallel="shard"' in parallel


WRONG = [
    *({"kind": "ddp"}, {"data": "mine"}, {"uneven": 1}, {"timeout": "3ep"}, {"timeout": 0}, {"timeout": "soon"}),
    *({"find_unused_parameters": 1}, {"bucket_cap_mb": -1}, {"groups": 3}, {"mesh": 3}),
]
UNUSED = [
    {"groups": lambda name, module: True, "kind": "replicate"},
    {"bucket_cap_mb": 1.0, "kind": "shard"},
    {"find_unused_parameters": True, "kind": "shard"},
]


def test_what_parallel_and_its_settings_can_be():
    calls = [(lambda wrong=wrong: Parallel(**wrong), next(iter(wrong))) for wrong in WRONG]
    calls += [(lambda wrong=wrong: Parallel(**wrong), "has no use for") for wrong in UNUSED]
    for given, message in (
        ("ddp", 'parallel=\'ddp\': write "replicate", "shard"'),
        (2, "parallel=2 of type int"),
        (True, r'parallel=True .* "replicate".*False'),
    ):
        calls.append((lambda given=given: fit(parallel=given), message))
    for call, message in calls:
        with pytest.raises((ArgumentTypeError, ArgumentError), match=message):
            call()
