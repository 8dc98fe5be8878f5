"""Law 8, on real processes with gloo: n ranks on their parts of each batch are one rank on the whole."""

from __future__ import annotations

import math
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
from tests.support.worlds import ALGORITHMS, KINDS, A, an_epoch, pool


def rank_of_world():
    return st.tuples(st.sampled_from(KINDS), st.sampled_from((2, 2, 3)))


# The law.


@given(testing.cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=["fp32"]), rank_of_world())
@examples(fast=6, thorough=1500)
def test_ranks_are_one_rank(case, chosen):
    kind, ranks = chosen
    alone = witness(whole(case, ranks).stream())
    by_rank = on_ranks(case, lambda: (), pl.fit, ranks, kind)
    for rank, seen in enumerate(by_rank):
        assert [each.event for each in seen] == expected(whole(case, ranks).plan)
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", 1e-5)


@given(testing.cases(problems="linear", optimizers=["sgd"], precisions=["amp_bf16"]), rank_of_world())
@examples(fast=4, thorough=300)
def test_ranks_are_one_rank_in_bfloat16(case, chosen):
    kind, ranks = chosen
    # The sums of a gradient are rounded to 8 bits, here and there in another place, and steps add up.
    case = attrs.evolve(case, plan=attrs.evolve(case.plan, max_duration="2ba"))
    alone = witness(whole(case, ranks).stream())
    for rank, seen in enumerate(on_ranks(case, lambda: (), pl.fit, ranks, kind)):
        compare(seen, alone, f"{kind}: rank {rank} of {ranks}", 2e-2)


@given(testing.cases(problems="exact", optimizers=["sgd"], precisions=["fp32"], clip_grads=[None]), rank_of_world())
@examples(fast=5, thorough=500)
def test_gradients_are_bitwise_those_of_one_rank_where_sums_are_exact(case, chosen):
    kind, ranks = chosen

    def gradients(case, **more):
        still = pl.optim.sgd(lr=0.0)
        stream = case.stream(optimizer=still, **more)
        return [each.values["grads"] for each in witness(stream) if each.event is Event.AFTER_TRAIN_BATCH]

    alone = gradients(whole(case, ranks))
    for found in pool(ranks, kind).run(lambda rank: gradients(case, parallel=Parallel(kind=kind))):
        assert len(found) == len(alone)
        for one, other in zip(found, alone, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@given(testing.cases(), rank_of_world())
@examples(fast=5, thorough=500)
def test_all_ranks_yield_the_same_events_counts_and_values(case, chosen):
    kind, ranks = chosen

    def program(rank):
        return witness(case.stream(parallel=kind), counts_time=True)

    first, *others = pool(ranks, kind).run(program)
    assert [each.event for each in first] == expected(whole(case, ranks).plan)
    for other in others:
        compare(other, first, f"{kind}: a rank of {ranks}", 0.0)


@pytest.mark.parametrize("name", tiers(ALGORITHMS, ["label_smoothing", "asam", "composed"]))
def test_algorithms_of_the_library_keep_the_law(name):
    laws.world_size(ALGORITHMS[name], max_examples=60 if THOROUGH else 4)


@pytest.mark.parametrize("kind", KINDS)
def test_blurpool_agrees_on_all_ranks(kind):
    # Its models have BatchNorm, of which every rank sees another batch, so the law has no equality to ask for.
    case = testing.Case(plan=Plan(batches=(5, 4), max_duration="4ba"), problem="convolution")

    def program(rank):
        return witness(case.stream([A.blurpool()], parallel=kind))

    first, other = pool(kind=kind).run(program)
    compare(other, first, f"{kind}: rank 1", 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", ["adamw", "partition", "from_torch"])
def test_optimizers_step_as_on_one_rank(kind, optimizer):
    def make():
        return {
            "adamw": lambda: pl.optim.adamw(lr=0.05, amsgrad=True),
            "partition": lambda: pl.optim.partition(
                {"matrices": pl.optim.adamw(lr=0.05), "vectors": pl.optim.sgd(lr=0.1, momentum=0.5)},
                lambda name, tensor: "matrices" if tensor.ndim > 1 else "vectors",
            ),
            "from_torch": lambda: pl.optim.from_torch(torch.optim.RMSprop, lr=0.01, momentum=0.3),
        }[optimizer]()

    case = testing.Case(plan=Plan(batches=(7, 4), max_duration="5ba", microbatch_size=2), problem="tied")
    alone = witness(whole(case, 2).stream(optimizer=make()))
    for seen in pool(kind=kind).run(lambda rank: witness(case.stream(optimizer=make(), parallel=kind))):
        compare(seen, alone, kind, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_is_the_same_on_all_ranks_and_backs_off_together(kind):
    # One sample overflows, and stands on one rank only.
    data = [(torch.ones(4, 3), torch.zeros(4, 1)) for _ in range(3)]
    data[1][0][3] = 6e4

    def program(rank):
        torch.manual_seed(0)
        stream = pl.fit(
            torch.nn.Linear(3, 1),
            data,
            loss=lambda outputs, targets: (outputs - targets).square().mean(),
            optimizer=pl.optim.sgd(lr=1e-3),
            max_duration="3ba",
            precision="amp_fp16",
            nonfinite="skip",
            parallel=kind,
        )
        return [
            (float(state.loss_scale), int(state.skipped), state.timestamp.sample)
            for event, state in stream
            if event is Event.BATCH_END
        ]

    one, other = pool(kind=kind).run(program)
    assert one == other
    assert one[-1][1] >= 1
    assert one[1][0] < one[0][0]


@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_sharded_ranks_leave_a_step_out_together(options):
    """Whatever an algorithm does to the part of one rank, of which the others know nothing."""
    data = [(torch.ones(4, 3), torch.zeros(4, 4))] * 3

    def program(rank):
        @pl.algorithm(Event.AFTER_TRAIN_BATCH)
        def spoils_its_part(state):
            factor = math.inf if rank and state.timestamp.batch == 1 else 1.0
            return state.replace(grads={name: factor * each for name, each in state.grads.items()})

        torch.manual_seed(0)
        settings = {"algorithms": [spoils_its_part], "nonfinite": "skip", "parallel": "shard"}
        with interpreted():
            stream = an_epoch(torch.nn.Linear(3, 4), data, **settings, **options)
            return [int(state.skipped) for event, state in stream if event is Event.BATCH_END]

    assert pool(kind="shard").run(program) == [[0, 1, 1]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"compile": True, "watch": {Event.BATCH_END}}], ids=["eager", "compiled"])
def test_an_update_that_overflows_by_itself_is_an_error(kind, options):
    data = [(torch.ones(4, 3), torch.zeros(4, 4))] * 3

    def program(rank):
        torch.manual_seed(0)
        settings = {"optimizer": pl.optim.sgd(lr=1e39), "nonfinite": "skip", "parallel": kind}
        stream = an_epoch(torch.nn.Linear(3, 4), data, **settings, **options)
        with interpreted(), pytest.raises(pl.NonFiniteError, match=r"batch 0 .*the optimizer's step made"):
            pl.run(stream)

    pool(kind=kind).run(program)


# Every law can fail.


def _weighs_ranks_alike():
    """Each rank's gradient is a mean over its own samples, and the mean over ranks weighs them alike."""
    real = MultiRankEngine.divisor

    def divisor(self, weights):
        real(self, weights)
        mine = self._weights[self.rank] or 1
        return mine * self.ranks / self._power

    return patch.object(MultiRankEngine, "divisor", divisor)


def _keeps_its_own_loss():
    return patch.object(MultiRankEngine, "reduce_loss", lambda self, state, loss: loss)


def _counts_its_own_samples():
    def counts(self, samples, tokens, seconds):
        return samples, tokens, seconds()

    return patch.object(MultiRankEngine, "counts", counts)


def _measures_its_own_part():
    return patch.object(MultiRankEngine, "merge_metrics", lambda self, metrics, accumulated, state: accumulated)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong", [_weighs_ranks_alike, _keeps_its_own_loss, _counts_its_own_samples, _measures_its_own_part]
)
def test_a_wrong_engine_fails_the_law(wrong, kind):
    plan = Plan(batches=(5, 3), max_duration="3ba", evaluators={"val": EvaluatorPlan((3,), interval="1ba")})
    case = testing.Case(plan=plan)

    def fit(*arguments, **options):
        with wrong() if options.get("parallel") is not None else patch.object(pl, "__version__", "0"):
            yield from pl.fit(*arguments, **options)

    alone = witness(whole(case, 2).stream())
    by_rank = on_ranks(case, lambda: (), fit, 2, kind)

    def hold():
        for seen in by_rank:
            compare(seen, alone, kind, 1e-5)

    with pytest.raises(LawViolation):
        hold()


def test_an_algorithm_that_counts_its_own_samples_fails_the_law():
    def make():
        @pl.algorithm(Event.AFTER_TRAIN_BATCH)
        def by_size(state):
            n = len(state.batch[0])
            return state.replace(grads={name: g * n for name, g in state.grads.items()})

        return by_size

    with pytest.raises(LawViolation, match="differs from a single rank"):
        laws.world_size(make)
