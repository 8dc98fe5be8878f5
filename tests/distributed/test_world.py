"""Law 8, on real processes with gloo: n ranks on their parts of each batch are one rank on the whole."""

from __future__ import annotations

import math
from contextlib import nullcontext
from unittest.mock import patch

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.compile import interpreted
from pure_loop.distributed import Parallel
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.order import EvaluatorPlan, Plan, expected
from pure_loop.testing import LawViolation, laws
from pure_loop.testing.laws.ranks import compare, on_ranks, whole, witness
from tests.conftest import THOROUGH
from tests.support.tiers import examples, tiers
from tests.support.worlds import ALGORITHMS, KINDS, an_epoch, pool

KIND, RANKS = st.sampled_from(KINDS), st.sampled_from((2, 2, 3))
# The sums of a gradient in bfloat16 are rounded to 8 bits, here and there in another place, and steps add up.
TOLERANCES = {"fp32": 1e-5, "amp_bf16": 2e-2}


@given(testing.cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=list(TOLERANCES)), KIND, RANKS)
@examples(fast=8, thorough=1500)
def test_ranks_are_one_rank(case, kind, ranks):
    """Their events are those of the specification."""
    if case.precision != "fp32":
        case = attrs.evolve(case, problem="linear", plan=attrs.evolve(case.plan, max_duration="2ba"))
    alone = witness(whole(case, ranks).stream())
    for rank, seen in enumerate(on_ranks(case, lambda: (), pl.fit, ranks, kind)):
        assert [each.event for each in seen] == expected(whole(case, ranks).plan)
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", TOLERANCES[case.precision])


@given(testing.cases(problems="exact", optimizers=["sgd"], precisions=["fp32"], clip_grads=[None]), KIND, RANKS)
@examples(fast=5, thorough=500)
def test_gradients_are_bitwise_those_of_one_rank_where_sums_are_exact(case, kind, ranks):
    def gradients(case, **more):
        stream = case.stream(optimizer=pl.optim.sgd(lr=0.0), **more)
        return [each.values["grads"] for each in witness(stream) if each.event is Event.AFTER_TRAIN_BATCH]

    alone = gradients(whole(case, ranks))
    for found in pool(ranks, kind).run(lambda rank: gradients(case, parallel=Parallel(kind=kind))):
        for one, other in zip(found, alone, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@given(testing.cases(), KIND, RANKS)
@examples(fast=5, thorough=500)
def test_all_ranks_yield_the_same_events_counts_and_values(case, kind, ranks):
    first, *others = pool(ranks, kind).run(lambda rank: witness(case.stream(parallel=kind), counts_time=True))
    assert [each.event for each in first] == expected(whole(case, ranks).plan)
    for other in others:
        compare(other, first, f"{kind}: a rank of {ranks}", 0.0)


@pytest.mark.parametrize("name", tiers(ALGORITHMS, ["composed"]))
def test_algorithms_of_the_library_keep_the_law(name):
    laws.world_size(ALGORITHMS[name], max_examples=60 if THOROUGH else 4)


OPTIMIZERS = {
    "partition": lambda: pl.optim.partition(
        {"matrices": pl.optim.adamw(lr=0.05), "vectors": pl.optim.sgd(lr=0.1, momentum=0.5)},
        lambda name, tensor: "matrices" if tensor.ndim > 1 else "vectors",
    ),
    "from_torch": lambda: pl.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.3),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_optimizers_step_as_on_one_rank(make):
    case = testing.Case(plan=Plan(batches=(7, 4), max_duration="3ba", microbatch_size=2), problem="tied")
    alone = witness(whole(case, 2).stream(optimizer=make()))
    for kind in KINDS:
        for seen in pool(kind=kind).run(lambda rank, kind=kind: witness(case.stream(optimizer=make(), parallel=kind))):
            compare(seen, alone, kind, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_is_the_same_on_all_ranks_and_backs_off_together(kind):
    # One sample overflows, and stands on one rank only.
    data = [(torch.ones(4, 3), torch.zeros(4, 1)) for _ in range(3)]
    data[1][0][3] = 6e4

    def program(rank):
        torch.manual_seed(0)
        options = {"optimizer": pl.optim.sgd(lr=1e-3), "precision": "amp_fp16", "nonfinite": "skip", "parallel": kind}
        options["loss"] = lambda outputs, targets: (outputs - targets).square().mean()
        stream = an_epoch(torch.nn.Linear(3, 1), data, **options)
        ends = [state for event, state in stream if event is Event.BATCH_END]
        return [(float(state.loss_scale), int(state.skipped), state.timestamp.sample) for state in ends]

    one, other = pool(kind=kind).run(program)
    assert one == other
    assert one[-1][1] >= 1
    assert one[1][0] < one[0][0]


@pytest.mark.parametrize("compile", [False, True])
def test_sharded_ranks_leave_a_step_out_together(compile):
    """Whatever an algorithm does to the part of one rank, of which the others know nothing."""

    def program(rank):
        @pl.algorithm(Event.AFTER_TRAIN_BATCH)
        def spoils_its_part(state):
            factor = math.inf if rank and state.timestamp.batch == 1 else 1.0
            return state.replace(grads={name: factor * each for name, each in state.grads.items()})

        torch.manual_seed(0)
        settings = {"algorithms": [spoils_its_part], "nonfinite": "skip", "parallel": "shard", "compile": compile}
        with interpreted():
            stream = an_epoch(torch.nn.Linear(3, 4), [(torch.ones(4, 3), torch.zeros(4, 4))] * 3, **settings)
            return [int(state.skipped) for event, state in stream if event is Event.BATCH_END]

    assert pool(kind="shard").run(program) == [[0, 1, 1]] * 2


@pytest.mark.slow
def test_an_update_that_overflows_by_itself_is_an_error():
    """Slow: eager and compiled, on ranks of each kind."""

    def program(rank):
        for kind in KINDS:
            for options in ({}, {"compile": True, "watch": {Event.BATCH_END}}):
                options |= {"optimizer": pl.optim.sgd(lr=1e39), "nonfinite": "skip", "parallel": kind}
                torch.manual_seed(0)
                stream = an_epoch(torch.nn.Linear(3, 4), [(torch.ones(4, 3), torch.zeros(4, 4))] * 3, **options)
                with interpreted(), pytest.raises(pl.NonFiniteError, match=r"batch 0 .*the optimizer's step made"):
                    pl.run(stream)

    pool().run(program)


# Every law can fail.


def _weighs_ranks_alike(real=MultiRankEngine.divisor):
    """Each rank's gradient is a mean over its own samples, and the mean over ranks weighs them alike."""

    def divisor(self, weights):
        real(self, weights)
        return (self._weights[self.rank] or 1) * self.ranks / self._power

    return {"divisor": divisor}


WRONG_ENGINES = {
    "weighs ranks alike": _weighs_ranks_alike(),
    "keeps its own loss": {"reduce_loss": lambda self, state, loss: loss},
    "counts its own samples": {"counts": lambda self, samples, tokens, seconds: (samples, tokens, seconds())},
    "measures its own part": {"merge_metrics": lambda self, metrics, accumulated, state: accumulated},
}


@pytest.mark.parametrize("wrong", WRONG_ENGINES)
def test_a_wrong_engine_fails_the_law(wrong):
    plan = Plan(batches=(5, 3), max_duration="3ba", evaluators={"val": EvaluatorPlan((3,), interval="1ba")})
    case = testing.Case(plan=plan)
    ((name, function),) = WRONG_ENGINES[wrong].items()

    def fit(*arguments, **options):
        several = options.get("parallel") is not None
        with patch.object(MultiRankEngine, name, function) if several else nullcontext():
            yield from pl.fit(*arguments, **options)

    alone = witness(whole(case, 2).stream())
    for kind in KINDS:
        by_rank = on_ranks(case, lambda: (), fit, 2, kind)
        with pytest.raises(LawViolation):
            [compare(seen, alone, kind, 1e-5) for seen in by_rank]
