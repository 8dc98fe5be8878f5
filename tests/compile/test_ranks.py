"""Compiled steps on several ranks: what each does alone is graphs, and together they are one rank on the whole."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop._internal.tree_ops import full_tensor
from pure_loop.compile import interpreted, record
from pure_loop.distributed import Parallel
from pure_loop.distributed.multi_rank import MultiRankEngine
from pure_loop.distributed.parameters import UnshardedParameters, _Bucket
from pure_loop.distributed.replicate import ReplicateEngine
from pure_loop.order import EvaluatorPlan, Plan
from pure_loop.testing import LawViolation
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import RankError
from tests.support.tiers import examples, pairwise, tiers
from tests.support.worlds import ALGORITHMS, KINDS, an_epoch, pool, two_halves

EPOCHS = {Event.EPOCH_END, Event.FIT_END}
BATCHES = {Event.BATCH_END, Event.EVAL_END, Event.FIT_END}
WATCHES = [EPOCHS, BATCHES, {Event.AFTER_TRAIN_BATCH, *BATCHES}, {Event.AFTER_LOSS, Event.BATCH_END}, None]


def compiled(case, make=lambda: (), ranks=2, wrong=nullcontext, kind="replicate", **options):
    """What every rank saw of a run in graphs, operation by operation."""

    def program(rank):
        with interpreted(), wrong():
            return witness(case.stream(make(), fit=partial(pl.fit, compile=True, parallel=kind, **options)))

    return pool(ranks, kind).run(program)


@pytest.mark.slow
@given(
    testing.cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=["fp32"]),
    st.sampled_from(WATCHES),
    st.sampled_from([2, 2, 3]),
    st.sampled_from(KINDS),
)
@examples(4, 300)
def test_ranks_are_one_rank(case, watch, ranks, kind):
    alone = witness(whole(case, ranks).stream(watch=watch))
    for rank, seen in enumerate(compiled(case, ranks=ranks, watch=watch, kind=kind)):
        compare(seen, alone, f"rank {rank} of {ranks}", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", tiers(ALGORITHMS, ["asam", "composed"]))
def test_algorithms_of_the_library_keep_the_law(name, kind):
    plan = Plan(batches=(7, 4), max_duration="5ba", microbatch_size=2, evaluators={"val": EvaluatorPlan((3,))})
    case = testing.Case(plan=plan, problem="tied")
    alone = witness(whole(case, 2).stream(ALGORITHMS[name](), watch=BATCHES))
    for rank, seen in enumerate(compiled(case, ALGORITHMS[name], watch=BATCHES, kind=kind)):
        compare(seen, alone, f"rank {rank}", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watch", [{Event.BATCH_END}, {Event.EPOCH_END}], ids=["batches", "epochs"])
def test_states_that_were_kept_stay_what_they_were(watch, kind):
    """With statistics, which the graph of the gradients writes to, before that of the update."""
    data = [(torch.randn(8, 3, generator=torch.Generator().manual_seed(i)), torch.ones(8, 1)) for i in range(3)]

    def program(rank):
        keeper = Keeper()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        with interpreted():
            options = {"compile": True, "watch": watch, "max_duration": "3ep", "parallel": kind}
            for _, state in an_epoch(model, data, **options):
                keeper.keep(state)
        found = keeper.changed()
        return None if found is None else str(found[1])

    assert pool(kind=kind).run(program) == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("uneven", "precision", "kind"), pairwise(["stop", "pad"], ["fp32", "amp_bf16"], KINDS))
def test_dropout_running_statistics_and_padding_are_those_of_eager_ranks(uneven, precision, kind):
    def stream(rank, **options):
        generator = torch.Generator().manual_seed(rank)
        data = [(torch.randn(8, 3, generator=generator), torch.ones(8, 1)) for _ in range(3 + rank)]
        torch.manual_seed(0)
        # No bias before the BatchNorm: its gradient is rounding error.
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
        parallel = Parallel(kind=kind, data="own", uneven=uneven)
        settings = {"microbatch_size": 4, "max_duration": "2ep", "precision": precision, "watch": BATCHES}
        return an_epoch(model, data, parallel=parallel, nonfinite="skip", **settings, **options)

    def program(rank):
        eager = witness(stream(rank))
        with interpreted():
            return witness(stream(rank, compile=True)), eager

    for rank, (found, eager) in enumerate(pool(kind=kind).run(program)):
        compare(found, eager, f"rank {rank}", 1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_scale_backs_off_on_all_ranks_together(kind):
    # One sample overflows, and stands on one rank only.
    data = [(torch.ones(4, 3), torch.zeros(4, 1)) for _ in range(3)]
    data[1][0][3] = 6e4

    def program(rank):
        torch.manual_seed(0)
        settings = {"precision": "amp_fp16", "nonfinite": "skip", "parallel": kind, "watch": BATCHES}
        with interpreted():
            stream = an_epoch(nn.Linear(3, 1), data, optimizer=pl.optim.sgd(lr=1e-3), compile=True, **settings)
            return [(float(state.loss_scale), int(state.skipped)) for event, state in stream]

    one, other = pool(kind=kind).run(program)
    assert one == other
    assert [skipped for _, skipped in one] == [0, 1, 1, 1]
    assert one[1][0] == one[0][0] / 2


class Sometimes(nn.Module):
    """Of which a batch of three reaches one half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.one(x) + (self.two(x) if len(x) != 3 else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("unused", [None, True])
@pytest.mark.parametrize("samples", [(6, 8), (7, 8), (6, 6)])
def test_parameters_that_a_batch_leaves_out_on_some_ranks_or_all(samples, unused):
    data = [(torch.ones(n, 1) * (1 + i), torch.zeros(n, 1)) for i, n in enumerate(samples)]

    def program(rank):
        eager = an_epoch(Sometimes(), data, parallel=Parallel(find_unused_parameters=True), watch=BATCHES)
        parallel = Parallel(find_unused_parameters=unused)
        with interpreted():
            graphs = an_epoch(Sometimes(), data, parallel=parallel, compile=True, watch=BATCHES)
            return witness(graphs), witness(eager)

    for rank, (found, eager) in enumerate(pool().run(program)):
        compare(found, eager, f"rank {rank}", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [(6, 8), (8, 6)])
def test_parameters_that_a_batch_leaves_out_on_all_sharded_ranks(samples):
    data = [(torch.ones(n, 1) * (1 + i), torch.zeros(n, 1)) for i, n in enumerate(samples)]
    options = {"parallel": "shard", "watch": BATCHES}

    def stream(**compile):
        return an_epoch(Sometimes(), data, optimizer=pl.optim.adamw(lr=0.1), **options, **compile)

    def program(rank):
        with interpreted():
            return witness(stream(compile=True)), witness(stream())

    for rank, (found, eager) in enumerate(pool(kind="shard").run(program)):
        compare(found, eager, f"rank {rank}", 1e-6)


def test_parameters_that_other_ranks_reach():
    """In eager steps they are an error, with parallel="shard"."""
    data = [(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.zeros(4, 1))] * 2
    alone = witness(an_epoch(two_halves(), data, watch=BATCHES))

    def program(rank):
        return witness(an_epoch(two_halves(), data, parallel="shard", compile="where possible", watch=BATCHES))

    for rank, found in enumerate(pool(kind="shard").run(program)):
        compare(found, alone, f"rank {rank}", 1e-6)


class Idle(nn.Module):
    """With a layer that no loss reaches."""

    def __init__(self, width=1):
        super().__init__()
        torch.manual_seed(0)
        self.idle, self.used = nn.Linear(2, 2), nn.Linear(2, width)

    def forward(self, x):
        return self.used(x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("samples", "size"), [(5, 1), (1, None), (4, 3)])
def test_parameters_that_no_loss_reaches_and_microbatches_of_padding(kind, samples, size):
    data = [
        (torch.randn(samples, 2, generator=torch.Generator().manual_seed(i)), torch.ones(samples, 1)) for i in (0, 1)
    ]
    options = {"optimizer": pl.optim.adamw(lr=0.1, weight_decay=0.5), "microbatch_size": size, "watch": BATCHES}
    alone = witness(an_epoch(Idle(), data, **options))

    def program(rank):
        with interpreted():
            return witness(an_epoch(Idle(), data, compile=True, parallel=kind, **options))

    for rank, found in enumerate(pool(kind=kind).run(program)):
        compare(found, alone, f"rank {rank}", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_first_batch_of_no_weight_says_nothing_of_parameters_that_no_loss_reaches(compile):
    inputs = [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    data = [*zip(inputs, [torch.full((4,), -100), torch.arange(4) % 3], strict=True)]
    options = {"optimizer": pl.optim.sgd(lr=0.1), "microbatch_size": 2, "loss": nn.functional.cross_entropy}
    options |= {"nonfinite": "skip", "max_duration": "2ba"}
    alone = witness(an_epoch(Idle(3), data, watch={Event.BATCH_END}, **options))

    def program(rank):
        with interpreted():
            stream = an_epoch(Idle(3), data, compile=compile, parallel="replicate", watch=WATCHES[3], **options)
            return witness(pair for pair in stream if pair[0] is Event.BATCH_END)

    for rank, found in enumerate(pool().run(program)):
        compare(found, alone, f"rank {rank}", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.AFTER_BACKWARD, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD])
def test_a_rank_that_makes_the_mapping_of_parameters_anew_lets_no_rank_wait(event):
    data = [(torch.randn(5, 3, generator=torch.Generator().manual_seed(i)), torch.ones(5, 1)) for i in range(2)]

    def stream(rank, **options):
        @pl.algorithm(event)
        def anew(state):
            if event is Event.EVAL_AFTER_FORWARD:
                # Not observed on a rank whose batch has weight 0.
                others = {name: 1 * tensor for name, tensor in state.params.items()}
                return state.replace(params=others, outputs=1 * state.outputs)
            return state if rank else state.replace(params=dict(state.params))

        torch.manual_seed(0)
        options |= {"microbatch_size": 1, "eval_interval": "1ba", "watch": BATCHES, "algorithms": anew}
        return an_epoch(nn.Linear(3, 1), data, evaluators={"val": pl.Evaluator(data, microbatch_size=1)}, **options)

    def program(rank):
        with interpreted():
            return witness(stream(rank, parallel="shard", compile=True))

    alone = witness(stream(0))
    for rank, found in enumerate(pool(kind="shard").run(program)):
        compare(found, alone, f"rank {rank}", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("event", [Event.AFTER_BACKWARD, Event.EVAL_START])
def test_whole_parameters_and_gradients_that_an_algorithm_puts_in_count_as_in_eager_ranks(event):
    data = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)), torch.ones(4, 1)) for i in range(2)]

    @pl.algorithm(event)
    def puts_in(state):
        if event is Event.AFTER_BACKWARD:
            return state.replace(grads=state.params)
        return state.replace(params={name: 0.5 * full_tensor(tensor) for name, tensor in state.params.items()})

    def program(rank):
        torch.manual_seed(0)
        # Between the microbatches of a batch they are refused.
        options = {"microbatch_size": None if event is Event.AFTER_BACKWARD else 1}
        options |= {"evaluators": {"val": data}, "watch": BATCHES, "algorithms": puts_in}
        model = nn.Linear(3, 2)
        eager = witness(an_epoch(model, data, parallel="shard", **options))
        with interpreted():
            return eager, witness(an_epoch(model, data, parallel="shard", compile=True, **options))

    for rank, (eager, found) in enumerate(pool(kind="shard").run(program)):
        compare(found, eager, f"rank {rank}", 1e-6)


def test_what_the_first_batch_reached_the_others_have_to():
    data = [(torch.ones(n, 1), torch.zeros(n, 1)) for n in (8, 7)]

    def program(rank):
        with interpreted():
            pl.run(an_epoch(Sometimes(), data, parallel="replicate", compile=True, watch=EPOCHS))

    with pytest.raises(RankError, match=r"does not reach the parameters \['two.weight', 'two.bias'\]"):
        pool().run(program)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_where_it_is_possible(kind, microbatch_size):
    data = [(torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]), torch.zeros(4, 1)) for _ in range(3)]
    options = {"parallel": kind, "watch": BATCHES, "microbatch_size": microbatch_size, "evaluators": {"val": data}}
    alone = witness(an_epoch(two_halves(), data, **{**options, "parallel": None}))

    def program(rank):
        with interpreted(), record() as graphs:
            found = witness(an_epoch(two_halves(), data, compile="where possible", **options))
        return found, [graph.segment for graph in graphs]

    for rank, (found, graphs) in enumerate(pool(kind=kind).run(program)):
        compare(found, alone, f"rank {rank}", 1e-6)
        assert graphs == (["update"] if kind == "replicate" else [])

    def refused(rank):
        pl.run(an_epoch(two_halves(), data, compile=True, **options))

    with pytest.raises(RankError, match="the forward of Halves can't be compiled"):
        pool(kind=kind).run(refused)


class OfThree(nn.Module):
    """Which decides by the data where there are three samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.two(self.one(x).tanh()) if len(x) != 3 or bool((x > 0).any()) else 0 * self.two(self.one(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("watch", [BATCHES, {Event.AFTER_FORWARD, *BATCHES}])
def test_where_it_is_possible_on_the_other_rank_only(kind, watch):
    data = [(torch.randn(n, 2, generator=torch.Generator().manual_seed(n)), torch.ones(n, 1)) for n in (4, 5, 4, 5)]
    options = {"evaluators": {"val": data}, "watch": watch}
    alone = witness(an_epoch(OfThree(), data, **options))

    def program(rank):
        with interpreted(), record() as graphs:
            found = witness(an_epoch(OfThree(), data, compile="where possible", parallel=kind, **options))
        return found, {graph.segment for graph in graphs}

    one, other = pool(kind=kind).run(program)
    assert "evaluation" in one[1] & other[1]
    for rank, (found, _) in enumerate((one, other)):
        compare(found, alone, f"rank {rank}", 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_by_torch_s_compiler(kind):
    case = testing.Case(plan=Plan(batches=(4, 4), max_duration="2ep", evaluators={"val": EvaluatorPlan((4,))}))
    alone = witness(case.stream(watch=EPOCHS))

    def program(rank):
        with record() as graphs:
            seen = witness(case.stream(parallel=kind, compile=True, watch=EPOCHS))
        return seen, sorted(graph.segment for graph in graphs)

    for rank, (seen, graphs) in enumerate(pool(kind=kind).run(program)):
        compare(seen, alone, f"rank {rank}", 1e-5)
        assert graphs == ["evaluation", "microbatch", *(["update"] if kind == "replicate" else [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_prediction_by_themselves(kind):
    data = [(torch.randn(n, 3, generator=torch.Generator().manual_seed(n)), torch.zeros(n, 2)) for n in (6, 5)]

    def looks(**options):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options |= {"parallel": kind}
        evaluated = pl.run(pl.evaluate(model, {"test": data}, loss=nn.functional.mse_loss, **options))
        predicted = pl.predict(model, data, watch={Event.PREDICT_BATCH_END}, **options)
        return evaluated.metrics["test"]["loss"], [state.outputs for _, state in predicted]

    def program(rank):
        with interpreted(), record() as graphs:
            found = looks(compile=True)
        return found, looks(), {graph.segment for graph in graphs}

    for found, eager, graphs in pool(kind=kind).run(program):
        torch.testing.assert_close(found, eager)
        assert graphs == {"evaluation", "prediction"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_an_algorithm_takes_meanwhile_changes_nothing(kind):
    data = [(torch.randn(8, 3, generator=torch.Generator().manual_seed(i)), torch.ones(8, 1)) for i in range(2)]

    def meanwhile(event):
        def changes_nothing(state, stages):
            stages.backward(stages.loss(stages.forward(state.replace(grads=None))))
            return state

        return pl.algorithm(event)(changes_nothing)

    def run(*algorithms):
        torch.manual_seed(0)
        options = {"microbatch_size": 2, "compile": True, "watch": EPOCHS, "parallel": kind}
        state = pl.run(an_epoch(nn.Linear(3, 1), data, algorithms=algorithms, **options))
        return [full_tensor(tensor) for tensor in state.params.values()]

    def program(rank):
        with interpreted():
            plain = run()
            events = (Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH)
            return [event for event in events if not all(map(torch.equal, run(meanwhile(event)), plain))]

    assert pool(kind=kind).run(program) == [[], []]


def _adds_nothing_up():
    return patch.object(ReplicateEngine, "accumulate", lambda self, state, before, last: state)


def _draws_as_rank_0():
    real = MultiRankEngine.single_rank

    def alone(self):
        engine = real(self)
        engine.rank = 0
        return engine

    return patch.object(MultiRankEngine, "single_rank", alone)


def _forgets_microbatches():
    return patch.object(UnshardedParameters, "add", lambda self, gradients: None)


def _counts_a_rank_twice():
    def parts(self, sums, group, copies):
        return real(self, sums, group, copies) if dist.get_rank() else real(self, 2 * sums, group, copies)

    real = _Bucket.parts
    return patch.object(_Bucket, "parts", parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        *(("replicate", _adds_nothing_up), ("replicate", _draws_as_rank_0), ("shard", _draws_as_rank_0)),
        *(("shard", _forgets_microbatches), ("shard", _counts_a_rank_twice)),
    ],
)
def test_a_wrong_engine_is_found(kind, wrong):
    problem = "mlp" if wrong is _draws_as_rank_0 else "linear"
    case = testing.Case(plan=Plan(batches=(5, 3), max_duration="3ba", microbatch_size=2), problem=problem)

    def eagerly(rank):
        return witness(case.stream(parallel=kind, watch=BATCHES))

    eager = pool(kind=kind).run(eagerly)
    found = compiled(case, wrong=wrong, watch=BATCHES, kind=kind)

    def hold():
        for one, other in zip(found, eager, strict=True):
            compare(one, other, "a rank", 1e-5)

    with pytest.raises(LawViolation):
        hold()
