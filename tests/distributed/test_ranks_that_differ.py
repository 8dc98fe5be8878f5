"""Ranks of which one does something else: an error on every rank that names it and the difference; else, one rank.

On real processes: a program takes a tenth of a second there, and ranks that fail can be told from ranks that wait.
"""

from __future__ import annotations

import re
from collections import UserList
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel, replicate
from tests.support.problem import by_hand, close
from tests.support.tiers import examples
from tests.support.worlds import KINDS, an_epoch, pool

SIZES = (6, 5, 6, 1)
mse = torch.nn.functional.mse_loss
# Between what is built of a batch's graph a rank with nothing to do may be left; those that meet before it are named.
BEFORE_BATCHES = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START)
A_BATCH = [*Event][5:18]  # BEFORE_DATALOADER to BATCH_CHECKPOINT


def batches(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


def model(width=4, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def table(samples=13, **options):
    return DataLoader(TensorDataset(*batches([samples])[0]), **{"batch_size": 4, "shuffle": True, **options})


def frozen():
    made = model()
    made[0].requires_grad_(False)
    return made


def evaluator(sizes=(4, 2), **options):
    return {"evaluators": {"val": pl.Evaluator(batches(sizes, seed=1), **options)}}


def evaluates(due):
    return evaluator() | {"eval_interval": lambda state: due}


def fit(kind, *, model=model, data=lambda: batches(SIZES), timeout=30, **options):
    return an_epoch(model(), data(), **{"parallel": Parallel(kind=kind, timeout=timeout), **options})


def outcomes(kind, mine, differing, who, ranks=2, act=None):
    """What became of each rank: the text of its error, or its parameters. ``act`` is done in the loop of ``who``."""
    # Sharded ranks that wait for one that left wake up when the timeout is over.
    timeout = 5 if act is not None and kind == "shard" else 30

    def program(rank):
        try:
            stream = fit(kind, timeout=timeout, **(differing if rank == who else mine))
            for event, state in stream:
                if act is not None and rank == who and act(event, state):
                    stream.close()
                    return "left"
            return dict(state.module().named_parameters())
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return pool(ranks, kind).run(program)


def smoothed(by):
    return {"algorithms": [pl.algorithms.label_smoothing(by)], "loss": torch.nn.functional.cross_entropy}


def streamed(*sizes):
    return lambda: iter(batches(sizes))


def ordered(start):
    """The same class of sampler on both ranks, which is no list, and another order."""
    return lambda: table(12, shuffle=False, sampler=UserList((i + start) % 12 for i in range(12)))


# By name: what all ranks have, what the differing one has, and what every error says.
SETTINGS = {
    "seed": ({}, {"seed": 3}, "seed is"),
    "lr": ({}, {"optimizer": pl.optim.sgd(lr=0.2)}, r"optimizer is .*0\.2"),
    "lr as a function": (
        {"optimizer": pl.optim.sgd(lr=lambda timestamp: 0.1)},
        {"optimizer": pl.optim.sgd(lr=lambda timestamp: 0.2)},
        r"learning rate is 0\.\d on rank \d and 0\.\d on rank 0",
    ),
    "max_duration": ({}, {"max_duration": "2ep"}, "max_duration is"),
    "microbatch_size": ({}, {"microbatch_size": 1}, "microbatch_size is"),
    "precision": ({}, {"precision": "amp_bf16"}, "precision is"),
    "clip_grad": ({}, {"clip_grad": 1.0}, "clip_grad is"),
    "nonfinite": ({}, {"nonfinite": "skip"}, "nonfinite is"),
    "loss": ({}, {"loss": torch.nn.functional.l1_loss}, "loss is l1_loss|loss is mse_loss"),
    "algorithm": ({}, {"algorithms": [pl.algorithms.ema(half_life="3ba")]}, "algorithms is .*ema"),
    "option of an algorithm": (smoothed(0.1), smoothed(0.2), r"algorithms is .*0\.2"),
    "evaluator": ({}, evaluator(), "evaluators is .*val|eval_interval is .*1ep"),
    "batches of an evaluator": (evaluator(), evaluator((4, 2, 2)), "evaluators is .*'batches': 3"),
    "metrics": (evaluator(), evaluator(metrics=[pl.metrics.accuracy()]), "evaluators is .*accuracy"),
    "interval of an evaluator": (evaluator(), evaluator(interval="1ba"), "eval_interval is .*1ba"),
    "evaluation": (evaluates(False), evaluates(True), "at different events.*rank 1 is about to come to EVAL_END"),
    "dtype": ({}, {"model": lambda: model().double()}, r"params\['0.weight'\] is .*float64"),
    "shape": ({}, {"model": lambda: model(5)}, r"params\['0.weight'\] is .*\(5, 3\)"),
    "frozen": ({}, {"model": frozen}, "trained is"),
    "number of batches": ({}, {"data": lambda: batches(SIZES[:3])}, r"{'batches': 3}.*Parallel\(data='own'\)"),
    "number of samples": ({"data": table}, {"data": lambda: table(15)}, "'samples': 15"),
    "batch_size": ({"data": table}, {"data": lambda: table(13, batch_size=5)}, "'batch_size': 5"),
    "shuffle": ({"data": table}, {"data": lambda: table(shuffle=False)}, "SequentialSampler"),
}
# Parts that are equally many though the wholes are not; data without a length; another order of one dataset.
DATA = {
    "a sample more": (streamed(6, 5), streamed(6, 6), r"in batch 1 .* given 5 samples"),
    "parts alike": (lambda: batches((12,)), lambda: batches((13,)), r"in batch 0 .* given 12 .* given 13 samples"),
    "a last batch": (streamed(6, 6), streamed(6), "different events: rank 0 is about"),
    "another order": (ordered(0), ordered(1), "in batch 0 .*rank 1 took other samples than rank 0"),
}


def check_all_told(results, words):
    for text in results:
        assert isinstance(text, str), "a rank trained on"
        assert re.match("DistributedError: .*rank 1", text), text
        assert re.search(words, text), f"{words!r} is not in {text!r}"


@pytest.mark.slow
def test_another_setting_is_named_with_both_values():
    """Slow: each setting is a run of two processes; the property below draws some of them."""
    for mine, differing, words in SETTINGS.values():
        check_all_told(outcomes("replicate", mine, differing, who=1), words)


@pytest.mark.parametrize("kind", KINDS)
def test_other_data_is_named_with_both_numbers(kind):
    for mine, differing, words in DATA.values():
        check_all_told(outcomes(kind, {"data": mine}, {"data": differing}, who=1), words)


def test_other_data_of_an_evaluation_is_named():
    def program(rank):
        texts = []
        for sizes in ((4, 3), (4, 4, 1)):
            data = batches(sizes if rank else (4, 4), seed=1)
            with pytest.raises(pl.DistributedError) as caught:
                pl.run(pl.evaluate(model(), iter(data), loss=mse, parallel="replicate"))
            texts.append(str(caught.value))
        return texts

    for fewer, more in pool().run(program):
        assert re.search("given 8 samples; rank 1 was given 7 samples", fewer)
        assert re.search("given 2 batches; .* given 3 batches", more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_stops_alone_is_an_error_on_every_rank(kind):
    def program(rank):
        stops = pl.Algorithm("stopping", {Event.BATCH_CHECKPOINT: lambda state: state.replace(stop=rank == 1)})
        with pytest.raises(pl.DistributedError):
            pl.run(fit(kind, algorithms=[stops], timeout=5 if kind == "shard" else 30))

    pool(2, kind).run(program)


def test_ranks_of_which_one_resumes_and_the_other_starts_are_told():
    def program(rank):
        kept = pl.run(fit("replicate"))
        with pytest.raises(pl.DistributedError, match=r"the start is .* kept.* on rank 1 and afresh on rank 0"):
            pl.run(fit("replicate", model=lambda: kept if rank else model(), max_duration="2ep"))

    pool().run(program)


@st.composite
def differences(draw):
    """What all ranks have, what one rank has, what it does in its loop, and what the errors of all the others say."""
    what = draw(st.sampled_from(["nothing", "setting", "setting", "size", "raises", "leaves"]))
    if what == "setting":
        mine, differing, words = SETTINGS[draw(st.sampled_from(sorted(SETTINGS)))]
        return what, mine, differing, None, words
    if what == "size":
        at, by = draw(st.integers(0, len(SIZES) - 1)), draw(st.integers(1, 7))
        sizes = [size + by * (index == at) for index, size in enumerate(SIZES)]
        words = rf"in batch {at} .*({SIZES[at]}|{sizes[at]}) samples"
        return what, {}, {"data": lambda: batches(sizes)}, None, words
    if what == "nothing":
        return what, {}, {}, None, None
    event = draw(st.sampled_from((*BEFORE_BATCHES, *A_BATCH)))
    batch = draw(st.integers(0, len(SIZES) - 1)) if event in A_BATCH else 0
    counted = batch + (event in (Event.BATCH_END, Event.BATCH_CHECKPOINT))

    def act(event_now, state):
        return event_now is event and state.timestamp.batch == counted

    if what == "leaves":
        return what, {}, {}, act, f"left the loop at {event.name} of batch {counted}"

    def faulty(state):
        if act(event, state):
            raise ValueError("no more")
        return state

    mine, differing = ({"algorithms": [pl.Algorithm("faulty", {event: each})]} for each in (lambda s: s, faulty))
    return what, mine, differing, None, r"raised ValueError after \w+ of batch \d+: no more"


@given(differences(), st.sampled_from(KINDS), st.sampled_from((2, 2, 3)), st.data())
@examples(fast=8, thorough=400)
def test_ranks_that_differ(difference, kind, ranks, data):
    what, mine, differing, act, words = difference
    who = data.draw(st.integers(0, ranks - 1), "who")
    results = outcomes(kind, mine, differing, who, ranks, act)
    if what == "nothing":

        def gradient(trained, inputs, targets):
            mse(trained(inputs), targets).backward()

        wanted = by_hand(model(), batches(SIZES), gradient, epochs=1)
        for found in results:
            close({name: each.detach() for name, each in found.items()}, wanted, 1e-5)
            assert all(torch.equal(found[name], results[0][name]) for name in found)
        return
    for rank, text in enumerate(results):
        assert isinstance(text, str), f"rank {rank} trained on"
        if rank == who and what in ("raises", "leaves"):
            assert text in ("left", "ValueError: no more")
            continue
        assert text.startswith("DistributedError: "), text
        named = rf"rank {who} " if what in ("raises", "leaves") or who else r"rank [12] |ranks 1, 2 "
        assert re.search(named, text), text
        assert re.search(words, text), f"{words!r} is not in {text!r}"


# What is equal at INIT, and on resumption.


def test_what_each_rank_brings_to_init_is_made_equal():
    """Parameters and buffers that were initialised differently, in the older order, too; and what an algorithm puts in,
    or writes in place."""

    def program(rank):
        found = []
        for order in ("current", "2021"):
            made = torch.nn.Sequential(model(seed=rank), torch.nn.BatchNorm1d(2))
            made[1].running_mean.fill_(rank)
            event, state = next(fit("replicate", model=lambda made=made: made, order=order))
            assert event is Event.INIT
            found.append({**state.params, **state.buffers})
        for in_place in (False, True):

            @pl.algorithm(Event.INIT)
            def noise(state, in_place=in_place):
                torch.manual_seed(rank)
                fresh = {name: torch.randn_like(tensor) for name, tensor in state.params.items()}
                if not in_place:
                    return state.replace(params=fresh)
                for name, tensor in state.params.items():
                    tensor.data.copy_(fresh[name])  # an algorithm that isn't pure
                    tensor.add_(0)
                return state

            # By default a write in place is an error at INIT: without the check, what was written is made equal, too.
            stream = fit("replicate", algorithms=[noise], strict=False if in_place else None)
            next(stream)
            event, state = next(stream)
            assert event is Event.BEFORE_LOAD
            found.append(dict(state.params))
        return found

    first, other = pool().run(program)
    for one, two in zip(first, other, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(first[0]["1.running_mean"], torch.zeros(2))


class Parts(torch.nn.Module):
    """Registered in another order than it is called in, partly frozen, and partly left out."""

    def __init__(self, frozen, unused):
        super().__init__()
        self.head = torch.nn.Linear(17, 3)
        self.body = torch.nn.ModuleList([torch.nn.Linear(17, 17) for _ in range(3)])
        self.first = torch.nn.Linear(7, 17)
        self.extra = torch.nn.Linear(3, 3)
        self.unused = unused
        self.body[1].requires_grad_(not frozen)

    def forward(self, x):
        x = self.first(x)
        for layer in self.body:
            x = torch.tanh(layer(x))
        x = self.head(x)
        return x if self.unused else self.extra(x)


RESUMED = {
    "one bucket": (3, None, False, False, None),
    "buckets": (3, 0.002, False, False, None),
    "frozen": (3, 0.001, True, False, 1),
    "unused": (3, 0.002, False, True, None),
}


def resumed_and_straight(cap, frozen, unused, microbatch_size, path=None):
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(13, 7, generator=generator), torch.randn(13, 3, generator=generator)) for _ in range(3)]
    options = {"optimizer": pl.optim.adamw(lr=0.01), "parallel": Parallel(bucket_cap_mb=cap), "max_duration": "2ep"}
    torch.manual_seed(0)
    for event, state in an_epoch(Parts(frozen, unused), data, microbatch_size=microbatch_size, **options):
        if event is Event.BATCH_END and state.timestamp.batch == 2:
            kept = state
            if path is not None:
                pl.save(state, path)
    kept = kept if path is None else pl.load(path, model=Parts(frozen, unused))
    again = pl.run(an_epoch(kept, data, microbatch_size=microbatch_size, **options))
    return dict(state.params), dict(again.params)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "buckets" else pytest.mark.slow) for name in RESUMED]
)
def test_resumption_is_bitwise_on_any_number_of_ranks(name, tmp_path):
    """On three ranks and more a sum depends on the bucket that it is in; several, frozen and unused parameters. Slow:
    those of the same code, from memory and from a file, and where torch has no way to fix its buckets."""
    ranks, *case = RESUMED[name]
    folder = str(tmp_path)

    def program(rank):
        found = [resumed_and_straight(*case)]
        if name == "one bucket":
            found.append(resumed_and_straight(*case, path=f"{folder}/{rank}.safetensors"))
        if name == "unused":
            plain = resumed_and_straight(0.002, False, False, None)[0]
            with patch.object(replicate, "_fix_buckets", replicate._backward_of_nothing):
                found += [(plain, each) for each in resumed_and_straight(0.002, False, False, None)]
        return found

    for pairs in pool(ranks).run(program):
        for straight, resumed in pairs:
            assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_an_algorithm_that_is_not_linear_resumes_where_batches_are_of_other_sizes():
    def clamped(state):
        grads = {name: None if grad is None else grad.clamp(-0.01, 0.01) for name, grad in state.grads.items()}
        return state.replace(grads=pl.FrozenDict(grads))

    def stream(start):
        algorithm = pl.Algorithm("clamped", {Event.AFTER_BACKWARD: clamped})
        return an_epoch(start, batches((2, 8, 3, 16, 1)), parallel="replicate", algorithms=algorithm)

    def program(rank):
        kept = [state for event, state in stream(model()) if event is Event.BATCH_END]
        return dict(kept[-1].params), [dict(pl.run(stream(state)).params) for state in kept[:-1]]

    for straight, resumed in pool().run(program):
        assert all(torch.equal(straight[name], params[name]) for params in resumed for name in straight)


def test_weights_of_any_size_fit_gradients_of_half_precision():
    """Gradients at AFTER_BACKWARD are of their own order, and neither 0 nor infinite."""

    def program(rank):
        data = [(x.half(), y.half()) for x, y in batches((8, 8, 8))]
        largest = []
        for weight in (1e-6, 1e6):
            task = pl.Task(
                loss=lambda outputs, batch: mse(outputs, batch[1]),
                weight=lambda batch, weight=weight: weight * len(batch[0]),
            )
            for event, state in an_epoch(model().half(), data, loss=None, task=task, parallel="replicate"):
                if event is Event.AFTER_BACKWARD:
                    largest.append(max(float(grad.abs().max()) for grad in state.grads.values()))
        return largest

    for largest in pool().run(program):
        assert len(largest) == 6
        assert all(1e-3 < number < 1e3 for number in largest)
