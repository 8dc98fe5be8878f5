"""Law 8, on real processes with gloo: n ranks on their parts of each batch are one rank on the whole."""

from __future__ import annotations

import math
from unittest.mock import patch

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.compile import interpreted
from pure_loop.distributed import Parallel
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.testing import LawViolation, cases, laws
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import Pool
from tests.conftest import THOROUGH
from tests.support.tiers import examples, tiers
from tests.support.worlds import ALGORITHMS, KINDS, NUMBERS, an_epoch, pool

# The sums of a gradient in bfloat16 are rounded to 8 bits, here and there in another place, and steps add up.
TOLERANCES = {"fp32": 1e-5, "amp_bf16": 2e-2}
LINEAR = cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=list(TOLERANCES))
EXACT = cases(problems="exact", optimizers=["sgd"], precisions=["fp32"], clip_grads=[None])


def gradients(case, **more):
    stream = case.stream(optimizer=pl.optim.sgd(lr=0.0), **more)
    return [each.values["grads"] for each in witness(stream) if each.event is Event.AFTER_TRAIN_BATCH]


@given(LINEAR, EXACT, cases(), st.sampled_from(KINDS), st.sampled_from(NUMBERS))
@examples(fast=6, thorough=1500)
def test_ranks_are_one_rank(case, exact, any_case, kind, ranks):
    """Bitwise where sums are exact; and of any case all ranks yield the same events, counts, times and values."""
    if case.precision != "fp32":
        case = attrs.evolve(case, problem="linear", plan=attrs.evolve(case.plan, max_duration="2ba"))

    def program(rank):
        return (
            witness(case.stream(parallel=kind)),
            gradients(exact, parallel=kind),
            witness(any_case.stream(parallel=kind), counts_time=True),
        )

    alone, exactly = witness(whole(case, ranks).stream()), gradients(whole(exact, ranks))
    found = pool(ranks, kind).run(program)
    assert [each.event for each in found[0][0]] == expected(whole(case, ranks).plan)
    assert [each.event for each in found[0][2]] == expected(whole(any_case, ranks).plan)
    for rank, (seen, grads, agreeing) in enumerate(found):
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", TOLERANCES[case.precision])
        compare(agreeing, found[0][2], f"{kind}: rank {rank} of {ranks}", 0.0)
        for one, other in zip(grads, exactly, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("name", tiers(ALGORITHMS, ["composed"]))
def test_algorithms_of_the_library_keep_the_law(name):
    laws.world_size(ALGORITHMS[name], max_examples=60 if THOROUGH else 2)


OPTIMIZERS = {
    "partition": lambda: pl.optim.partition(
        {"matrices": pl.optim.adamw(lr=0.05), "vectors": pl.optim.sgd(lr=0.1, momentum=0.5)},
        lambda name, tensor: "matrices" if tensor.ndim > 1 else "vectors",
    ),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.3),
}


def test_optimizers_step_as_on_one_rank():
    case = testing.Case(plan=Plan(batches=(7, 4), max_duration="3ba", microbatch_size=2), problem="tied")
    ways = [(make, kind) for make in OPTIMIZERS.values() for kind in KINDS]
    alone = [witness(whole(case, 2).stream(optimizer=make())) for make, _ in ways]
    for found in pool().run(
        lambda rank: [witness(case.stream(optimizer=make(), parallel=kind)) for make, kind in ways]
    ):
        for seen, wanted, (_, kind) in zip(found, alone, ways, strict=True):
            compare(seen, wanted, kind, 1e-5)


def test_ranks_leave_a_step_out_together():
    """Where one sample overflows, on one rank; whatever an algorithm does to the part of one rank, of which the others
    know nothing; and an update that overflows by itself is an error on all."""
    large = [(torch.ones(4, 3), torch.zeros(4, 4)) for _ in range(3)]
    large[1][0][3] = 6e4
    ones = [(torch.ones(4, 3), torch.zeros(4, 4))] * 3

    def square(outputs, targets):
        return (outputs - targets).square().mean()

    def program(rank):
        @pl.algorithm(Event.AFTER_TRAIN_BATCH)
        def spoils_its_part(state):
            factor = math.inf if rank and state.timestamp.batch == 1 else 1.0
            return state.replace(grads={name: factor * each for name, each in state.grads.items()})

        def ends(data=ones, **options):
            torch.manual_seed(0)
            stream = an_epoch(torch.nn.Linear(3, 4), data, nonfinite="skip", **options)
            return [state for event, state in stream if event is Event.BATCH_END]

        found = []
        for kind in KINDS:
            scaled = {"precision": "amp_fp16", "loss": square, "optimizer": pl.optim.sgd(lr=1e-3)}
            states = ends(large, parallel=kind, **scaled)
            found.append([(float(each.loss_scale), int(each.skipped), each.timestamp.sample) for each in states])
            with pytest.raises(pl.errors.NonFiniteError, match=r"batch 0 .*the optimizer's step made"):
                ends(parallel=kind, optimizer=pl.optim.sgd(lr=1e39))
        with interpreted():
            for compiled in ({}, {"compile": True}):
                states = ends(algorithms=[spoils_its_part], parallel="shard", **compiled)
                assert [int(state.skipped) for state in states] == [0, 1, 1]
            with pytest.raises(pl.errors.NonFiniteError, match="the optimizer's step made"):
                ends(parallel="shard", optimizer=pl.optim.sgd(lr=1e39), compile=True, watch={Event.BATCH_END})
        return found

    one, other = pool().run(program)
    assert one == other
    for (first, _, _), (second, _, _), (_, skipped, samples) in one:
        assert second < first
        assert skipped >= 1
        assert samples == 12


@pytest.mark.slow
def test_sharding_within_and_replicating_across_groups_of_ranks():
    """Slow: four processes of its own."""
    case = testing.Case(plan=Plan(batches=(8, 5), max_duration="2ep"), problem="tied", optimizer="adamw")

    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return witness(case.stream(parallel=Parallel(kind="shard", mesh=mesh)))

    alone = witness(whole(case, 4).stream())
    with Pool(4, checked=False) as four:
        for seen in four.run(program):
            compare(seen, alone, "two by two", 1e-5)


# Every law can fail.


def _weighs_ranks_alike(real=MultiRankEngine.divisor):
    """Each rank's gradient is a mean over its own samples, and the mean over ranks weighs them alike."""

    def divisor(self, weights):
        real(self, weights)
        return (self._weights[self.rank] or 1) * self.ranks / self._power

    return divisor


WRONG_ENGINES = {
    "divisor": _weighs_ranks_alike(),
    "reduce_loss": lambda self, state, loss: loss,
    "counts": lambda self, samples, tokens, seconds: (samples, tokens, seconds()),
    "merge_metrics": lambda self, metrics, accumulated, state: accumulated,
}


def test_a_wrong_engine_fails_the_law():
    """One that weighs ranks alike, keeps its own loss, counts its own samples, or measures its own part."""
    plan = Plan(batches=(5, 3), max_duration="3ba", evaluators={"val": EvaluatorPlan((3,), interval="1ba")})
    case = testing.Case(plan=plan)

    def program(rank):
        found = {}
        for name, function in WRONG_ENGINES.items():
            for kind in KINDS:
                with patch.object(MultiRankEngine, name, function):
                    found[name, kind] = witness(case.stream(parallel=kind))
        return found

    alone = witness(whole(case, 2).stream())
    one, other = pool().run(program)
    for way in one:
        with pytest.raises(LawViolation):
            [compare(seen, alone, str(way), 1e-5) for seen in (one[way], other[way])]
