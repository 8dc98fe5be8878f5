"""Compiled steps on several ranks: what each does alone is graphs, and together they are one rank on the whole.

All are real processes; those that others contain are slow.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event, testing
from pure_loop.compile import interpreted, record
from pure_loop.distributed import Parallel
from pure_loop.distributed.parameters import UnshardedParameters
from pure_loop.distributed.replicate import ReplicateEngine
from pure_loop.order import Plan
from pure_loop.testing import LawViolation
from pure_loop.testing.comparison import Keeper
from pure_loop.testing.laws.ranks import compare, whole, witness
from pure_loop.testing.ranks import RankError
from tests.support.tiers import examples
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


def inputs(samples, features, batches=2):
    return [torch.randn(samples, features, generator=torch.Generator().manual_seed(i)) for i in range(batches)]


@pytest.mark.slow
@given(
    testing.cases(problems=["linear", "tied"], optimizers=["sgd"], precisions=["fp32"]),
    st.sampled_from([lambda: (), ALGORITHMS["composed"]]),
    st.sampled_from(WATCHES),
    st.sampled_from([2, 2, 3]),
    st.sampled_from(KINDS),
)
@examples(4, 300)
def test_ranks_are_one_rank(case, algorithms, watch, ranks, kind):
    """Of any plan."""
    alone = witness(whole(case, ranks).stream(algorithms(), watch=watch))
    for rank, seen in enumerate(compiled(case, algorithms, ranks=ranks, watch=watch, kind=kind)):
        compare(seen, alone, f"rank {rank} of {ranks}", 1e-5)


class Sometimes(nn.Module):
    """Of which a batch of three reaches one half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return self.one(x) + (self.two(x) if len(x) != 3 else 0.0)


class Idle(nn.Module):
    """With a layer that no loss reaches."""

    def __init__(self, width=1):
        super().__init__()
        torch.manual_seed(0)
        self.idle, self.used = nn.Linear(2, 2), nn.Linear(2, width)

    def forward(self, x):
        return self.used(x)


def linear(*sizes):
    torch.manual_seed(0)
    return nn.Linear(*sizes)


def batch_norm(rank, kind, uneven, **options):
    """And what was kept stays what it was: the graph of the gradients writes statistics before that of the update."""
    data = [(x + rank, torch.ones(8, 1)) for x in inputs(8, 3, 3 + rank)]
    # No bias before the BatchNorm: its gradient is rounding error.
    model = nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    options |= {"parallel": Parallel(kind=kind, data="own", uneven=uneven), "nonfinite": "skip", "microbatch_size": 4}
    keeper = Keeper()
    for event, state in an_epoch(model, data, **options, max_duration="2ep"):
        keeper.keep(state)
        yield event, state
    assert keeper.changed() is None


def left_out(rank, kind, samples, **options):
    data = [(torch.ones(n, 1) * (1 + i), torch.zeros(n, 1)) for i, n in enumerate(samples)]
    parallel = "shard" if kind == "shard" else Parallel(find_unused_parameters=True)
    return an_epoch(Sometimes(), data, parallel=parallel, **options)


def idle(rank, kind, samples, size, **options):
    data = [(x, torch.ones(samples, 1)) for x in inputs(samples, 2)]
    options |= {"optimizer": pl.optim.adamw(lr=0.1, weight_decay=0.5), "microbatch_size": size, "parallel": kind}
    return an_epoch(Idle(), data, **options)


def anew(rank, kind, event, **options):
    """A rank that makes the mapping of parameters anew, where others may not observe a batch of weight 0."""

    @pl.algorithm(event)
    def makes(state):
        if event is Event.EVAL_AFTER_FORWARD:
            others = {name: 1 * tensor for name, tensor in state.params.items()}
            return state.replace(params=others, outputs=1 * state.outputs)
        return state if rank else state.replace(params=dict(state.params))

    data = [(x, torch.ones(5, 1)) for x in inputs(5, 3)]
    options |= {"evaluators": {"val": pl.Evaluator(data, microbatch_size=1)}, "eval_interval": "1ba", "parallel": kind}
    return an_epoch(linear(3, 1), data, algorithms=makes, microbatch_size=1, **options)


def puts_in(rank, kind, **options):
    """Whole parameters in the place of gradients."""
    data = [(x, torch.ones(4, 2)) for x in inputs(4, 3)]
    puts = pl.algorithm(Event.AFTER_BACKWARD, name="puts")(lambda state: state.replace(grads=state.params))
    return an_epoch(linear(3, 2), data, algorithms=puts, parallel=kind, **options)


def meanwhile(rank, kind, **options):
    """An algorithm that takes a gradient of its own, which changes nothing."""

    @pl.algorithm(Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH)
    def takes(state, stages):
        stages.backward(stages.loss(stages.forward(state.replace(grads=None))))
        return state

    data = [(x, torch.ones(8, 1)) for x in inputs(8, 3)]
    algorithms = takes if kind else ()
    return an_epoch(linear(3, 1), data, algorithms=algorithms, microbatch_size=2, parallel=kind, **options)


# Streams that have to be those of eager ranks, or (with True) of one rank alone.
STREAMS = {
    "replicated statistics": (batch_norm, "replicate", {"uneven": "stop", "precision": "amp_bf16"}, False),
    "sharded statistics": (batch_norm, "shard", {"uneven": "pad"}, False),
    "left out on one": (left_out, "replicate", {"samples": (7, 8)}, False),
    "idle, and one sample": (idle, "replicate", {"samples": 1, "size": None}, True),
    "idle, and padding": (idle, "shard", {"samples": 4, "size": 3}, True),
    "anew in evaluations": (anew, "shard", {"event": Event.EVAL_BEFORE_FORWARD}, True),
    "a gradient meanwhile": (meanwhile, "replicate", {}, True),
    "a gradient meanwhile, sharded": (meanwhile, "shard", {}, True),
    "anew for a part of the ranks": (anew, "shard", {"event": Event.EVAL_AFTER_FORWARD}, True),
    "gradients put in": (puts_in, "shard", {}, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_what_ranks_see_in_graphs_is_what_they_see_in_eager_steps(name):
    """Each was a fault of its own, or would be one."""
    make, kind, options, is_alone = STREAMS[name]
    options = {"watch": BATCHES} | options
    alone = witness(make(0, None, **options)) if is_alone else None

    def program(rank):
        with interpreted():
            found = witness(make(rank, kind, compile=True, **options))
        return found, alone or witness(make(rank, kind, **options))

    for rank, (found, wanted) in enumerate(pool(kind=kind).run(program)):
        compare(found, wanted, f"rank {rank}", 2e-2 if "precision" in options else 1e-5)


def test_what_the_first_batch_reached_the_others_have_to():
    data = [(torch.ones(n, 1), torch.zeros(n, 1)) for n in (8, 7)]

    def program(rank):
        with interpreted():
            pl.run(an_epoch(Sometimes(), data, parallel="replicate", compile=True, watch=EPOCHS))

    with pytest.raises(RankError, match=r"does not reach the parameters \['two.weight', 'two.bias'\]"):
        pool().run(program)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "microbatch_size"), [("replicate", 1), ("shard", None)])
def test_where_it_is_possible(kind, microbatch_size):
    """Parameters that other ranks reach are an error in eager steps, with parallel="shard"."""
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
    with pytest.raises(RankError, match="the forward of Halves can't be compiled"):
        pool(kind=kind).run(lambda rank: pl.run(an_epoch(two_halves(), data, compile=True, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_prediction_by_themselves(kind):
    """Compiled and eager."""
    data, evaluator = [(inputs(n, 3)[0], torch.zeros(n, 2)) for n in (6, 5)], {"loss": nn.functional.mse_loss}

    def looks(**options):
        model = linear(3, 2)
        evaluated = pl.run(pl.evaluate(model, data, **evaluator, parallel=kind, **options))
        predicted = pl.predict(model, data, watch={Event.PREDICT_BATCH_END}, parallel=kind, **options)
        return evaluated.metrics["eval"]["loss"], [state.outputs for _, state in predicted]

    def program(rank):
        with interpreted():
            return looks(compile=True), looks()

    for found, eager in pool(kind=kind).run(program):
        torch.testing.assert_close(found, eager)


WRONG = {
    "replicate": lambda: patch.object(ReplicateEngine, "accumulate", lambda self, state, before, last: state),
    "shard": lambda: patch.object(UnshardedParameters, "add", lambda self, gradients: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_forgets_microbatches_is_found(kind):
    """The law compares."""
    case = testing.Case(plan=Plan(batches=(5, 3), max_duration="3ba", microbatch_size=2), problem="linear")
    alone = witness(whole(case, 2).stream(watch=BATCHES))
    found = compiled(case, wrong=WRONG[kind], watch=BATCHES, kind=kind)
    with pytest.raises(LawViolation):
        compare(found[0], alone, "rank 0", 1e-5)
