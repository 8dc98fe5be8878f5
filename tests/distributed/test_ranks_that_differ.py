"""Ranks of which one does something else: an error on every rank that names it and the difference.

On real processes: a program takes a tenth of a second there, and ranks that fail can be told from ranks that wait.
"""

from __future__ import annotations

import re
from collections import UserList

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import pure_loop as pl
from pure_loop import Event
from pure_loop.distributed import Parallel
from tests.support.tiers import examples
from tests.support.worlds import KINDS, NUMBERS, an_epoch, pool

SIZES = (6, 5, 6, 1)
mse = torch.nn.functional.mse_loss
# Between what is built of a batch's graph a rank with nothing to do may be left; those that meet before it are named.
BEFORE_BATCHES = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START, Event.EPOCH_START)
A_BATCH = [*Event][5:18]  # BEFORE_DATALOADER to BATCH_CHECKPOINT


def batches(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]


def model(width=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2))


def frozen():
    made = model()
    made[0].requires_grad_(False)
    return made


def table(samples=13, **options):
    return DataLoader(TensorDataset(*batches([samples])[0]), **{"batch_size": 4, "shuffle": True, **options})


def evaluator(sizes=(4, 2), due=None, **options):
    interval = {} if due is None else {"eval_interval": lambda state: due}
    return {"evaluators": {"val": pl.Evaluator(batches(sizes, seed=1), **options)}, **interval}


def smoothed(by):
    return {"algorithms": [pl.algorithms.label_smoothing(by)], "loss": torch.nn.functional.cross_entropy}


def streamed(*sizes):
    return {"data": lambda: iter(batches(sizes))}


def tables(*samples, **options):
    return {"data": lambda: table(*samples, **options)}


def ordered(start):
    """The same class of sampler on both ranks, which is no list, and another order."""
    return {"data": lambda: table(12, shuffle=False, sampler=UserList((i + start) % 12 for i in range(12)))}


def stopping(last):
    stop = {Event.BATCH_CHECKPOINT: lambda state: state.replace(stop=state.timestamp.batch == last)}
    return {"algorithms": [pl.Algorithm("stops", stop)]}


def fit(kind, *, model=model, data=lambda: batches(SIZES), timeout=30, **options):
    return an_epoch(model(), data(), **{"parallel": Parallel(kind=kind, timeout=timeout), **options})


def kept(by=0.0):
    """A State to go on from."""

    def start():
        state = pl.run(fit("replicate", parallel=False, max_duration="1ba"))
        return state.replace(params={name: tensor + by for name, tensor in state.params.items()})

    return {"model": start}


def rated(by):
    return {"optimizer": pl.optim.sgd(lr=lambda timestamp: by)}


# What all ranks have, what the differing one has, and what every error says.
SETTINGS = [
    ({}, {"seed": 3}, "seed is"),
    ({}, {"optimizer": pl.optim.sgd(lr=0.2)}, r"optimizer is .*0\.2"),
    (rated(0.1), rated(0.2), r"learning rate is 0\.\d on rank \d and 0\.\d on rank 0"),
    ({}, {"max_duration": "2ep"}, "max_duration is"),
    ({}, {"microbatch_size": 1}, "microbatch_size is"),
    ({}, {"precision": "amp_bf16"}, "precision is"),
    ({}, {"clip_grad": 1.0}, "clip_grad is"),
    ({}, {"nonfinite": "skip"}, "nonfinite is"),
    ({}, {"loss": torch.nn.functional.l1_loss}, "loss is l1_loss|loss is mse_loss"),
    ({}, {"algorithms": [pl.algorithms.ema(half_life="3ba")]}, "algorithms is .*ema"),
    (smoothed(0.1), smoothed(0.2), r"algorithms is .*0\.2"),
    ({}, evaluator(), "evaluators is .*val|eval_interval is .*1ep"),
    (evaluator(), evaluator((4, 2, 2)), "evaluators is .*'batches': 3"),
    (evaluator(), evaluator(metrics=[pl.metrics.accuracy()]), "evaluators is .*accuracy"),
    (evaluator(), evaluator(interval="1ba"), "eval_interval is .*1ba"),
    (evaluator(due=False), evaluator(due=True), r"at different events.*rank \d is about to come to EVAL_END"),
    ({}, {"model": lambda: model().double()}, r"params\['0.weight'\] is .*float64"),
    ({}, {"model": lambda: model(5)}, r"params\['0.weight'\] is .*\(5, 3\)"),
    ({}, {"model": frozen}, "trained is"),
    ({}, {"data": lambda: batches(SIZES[:3])}, r"{'batches': 3}.*Parallel\(data='own'\)"),
    (stopping(9), stopping(1), "different events"),
    (kept(), kept(1.0), r"another State than rank 0"),
    ({}, kept(), r"the start is (afresh|.* kept) on rank \d and (afresh|.* kept) on rank 0"),
    (tables(), tables(15), "'samples': 15"),
    (tables(), tables(13, batch_size=5), "'batch_size': 5"),
    (tables(), tables(shuffle=False), "SequentialSampler"),
]
# Parts that are equally many though the wholes are not; data without a length; another order of one dataset.
DATA = [
    (streamed(6, 5), streamed(6, 6), r"in batch 1 .* given 5 samples"),
    ({"data": lambda: batches((12,))}, {"data": lambda: batches((13,))}, r"in batch 0 .* given 12 .* given 13 samples"),
    (streamed(6, 6), streamed(6), "different events: rank 0 is about"),
    (ordered(0), ordered(1), "in batch 0 .*rank 1 took other samples than rank 0"),
]


def outcome(rank, kind, mine, differing, who, act=None):
    """What becomes of a rank: the text of its error, or its parameters. ``act`` is done in the loop of ``who``."""
    # Sharded ranks that wait for one that left wake up when the timeout is over.
    timeout = 5 if act is not None and kind == "shard" else 30
    try:
        stream = fit(kind, timeout=timeout, **(differing if rank == who else mine))
        for event, state in stream:
            if act is not None and rank == who and act(event, state):
                stream.close()
                return "left"
        return dict(state.module().named_parameters())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def check_all_told(found, ways):
    for texts in found:
        for text, (_, _, words) in zip(texts, ways, strict=True):
            assert isinstance(text, str), f"a rank trained on: {words}"
            assert re.match(r"\w+Error: .*rank 1", text), text
            assert re.search(words, text), f"{words!r} is not in {text!r}"


def test_another_setting_is_named_with_both_values():
    check_all_told(pool().run(lambda rank: [outcome(rank, "replicate", *way[:2], 1) for way in SETTINGS]), SETTINGS)


def test_other_data_is_named_with_both_numbers():
    """In training, and in an evaluation."""

    def program(rank):
        texts = []
        for sizes in ((4, 3), (4, 4, 1)):
            data = batches(sizes if rank else (4, 4), seed=1)
            with pytest.raises(pl.errors.DistributedError) as caught:
                pl.run(pl.evaluate(model(), iter(data), loss=mse, parallel="replicate"))
            texts.append(str(caught.value))
        return texts, [outcome(rank, kind, mine, other, 1) for kind in KINDS for mine, other, _ in DATA]

    for (fewer, more), texts in pool().run(program):
        assert re.search("given 8 samples; rank 1 was given 7 samples", fewer)
        assert re.search("given 2 batches; .* given 3 batches", more)
        check_all_told([texts], DATA * 2)


def test_sharded_ranks_that_would_wait_for_each_other_are_told():
    """One that stops alone, and one with another batch in an evaluator without a length."""

    def program(rank):
        evaluators = {"evaluators": iter(batches((4,) * (2 + rank), seed=1))}
        stops = outcome(rank, "shard", stopping(9), stopping(1), 1, lambda *_: False)
        return stops, outcome(rank, "shard", evaluators, evaluators, 1)

    for stops, uneven in pool(kind="shard").run(program):
        assert "DistributedError: " in stops
        assert re.search("at different events.*EVAL", uneven), uneven


@st.composite
def differences(draw):
    """What all ranks have, what one rank has, what it does in its loop, and what the errors of all the others say."""
    what = draw(st.sampled_from(["setting", "size", "raises", "leaves"]))
    if what == "setting":
        mine, differing, words = draw(st.sampled_from(SETTINGS))
        return what, mine, differing, None, words
    if what == "size":
        at, by = draw(st.integers(0, len(SIZES) - 1)), draw(st.integers(1, 7))
        sizes = [size + by * (index == at) for index, size in enumerate(SIZES)]
        words = rf"in batch {at} .*({SIZES[at]}|{sizes[at]}) samples"
        return what, {}, {"data": lambda: batches(sizes)}, None, words
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


@given(differences(), st.sampled_from(KINDS), st.sampled_from(NUMBERS), st.data())
@examples(fast=8, thorough=400)
def test_ranks_that_differ(difference, kind, ranks, data):
    what, mine, differing, act, words = difference
    who = data.draw(st.integers(0, ranks - 1), "who")
    results = pool(ranks, kind).run(lambda rank: outcome(rank, kind, mine, differing, who, act))
    for rank, text in enumerate(results):
        assert isinstance(text, str), f"rank {rank} trained on"
        if rank == who and what in ("raises", "leaves"):
            assert text in ("left", "ValueError: no more")
            continue
        assert re.match("(Distributed|Resume)Error: ", text), text
        named = rf"rank {who} " if what in ("raises", "leaves") or who else r"rank [12] |ranks 1, 2 "
        assert re.search(named, text), text
        assert re.search(words, text), f"{words!r} is not in {text!r}"
