"""Replicated ranks write in place where nobody on this rank can see it: each by itself, and with the same numbers."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop._ownership import Held
from pure_loop.compile import interpreted
from pure_loop.distributed.replicate import ReplicateEngine
from pure_loop.donation import Donation
from pure_loop.errors import DonatedStateError
from tests.sameness import frozen_copy, leaves
from tests.tiers import examples
from tests.worlds import ALGORITHMS, pool

BATCHES = {Event.BATCH_END}
KEPT = [Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END]
OPTIMIZERS = {"adamw": lambda: pl.optim.adamw(lr=0.1), "sgd": lambda: pl.optim.sgd(lr=0.1, momentum=0.9)}


def network(frozen=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    module[0].weight.requires_grad_(not frozen)
    return module


def stream(frozen=False, algorithm=None, optimizer="adamw", **options):
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(3)]
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS[optimizer](), "max_duration": "2ep"}
    algorithms = () if algorithm is None else [ALGORITHMS[algorithm]()]
    return pl.fit(network(frozen), data, algorithms=algorithms, parallel="replicate", **settings, **options)


WHAT = {
    "the State": lambda state: state,
    "its parameters": lambda state: state.params,
    "a view of one": lambda state: {"view": state.params["3.weight"][1:]},
    "memory of the optimizer": lambda state: {"memory": list(leaves(state.opt_state).values())[-1]},
}


def seen(keeps=(), ranks=(0, 1), what="the State", wrong=nullcontext, **options):
    """On each rank: copies of what was yielded, which steps wrote in place, and what of the things kept changed."""

    def program(rank):
        copies, kept, taken = [], [], []
        real = Donation.take

        def take(self, state, *, shared):
            found = real(self, state, shared=shared)
            taken.append(found is not None)
            return found

        with wrong(), interpreted(), patch.object(Donation, "take", take):
            for event, state in stream(**options):
                numbers = frozen_copy(state)
                copies.append((event, numbers))
                if event in keeps and rank in ranks and state.timestamp.batch % 2:
                    thing = WHAT[what](state)
                    kept.append((thing, frozen_copy(thing)))
                    del thing
        changed = [
            path
            for thing, numbers in kept
            for path, value in leaves(thing).items()
            if isinstance(value, torch.Tensor) and not torch.equal(value, numbers[path])
        ]
        return copies, taken, changed

    return pool().run(program)


def differing(one, other):
    """Leaves that differ between two streams of copies."""
    assert [event for event, _ in one] == [event for event, _ in other]
    return [
        path
        for (_, a), (_, b) in zip(one, other, strict=True)
        for path in a
        if not (torch.equal(a[path], b[path]) if isinstance(a[path], torch.Tensor) else a[path] == b[path])
    ]


@given(
    keeps=st.sets(st.sampled_from(KEPT)),
    ranks=st.sampled_from([(0,), (1,), (0, 1)]),
    what=st.sampled_from(sorted(WHAT)),
    watch=st.sampled_from([None, None, BATCHES]),
    microbatch_size=st.sampled_from([None, 2]),
    algorithm=st.sampled_from([None, "ema", "sam", "composed"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    frozen=st.booleans(),
    compile=st.booleans(),
)
@examples(4, 400)
def test_states_are_those_of_ranks_that_copy_and_what_was_kept_stays(keeps, ranks, what, **options):
    copying = seen(donate=False, **options)
    for (found, _, changed), (wanted, _, _) in zip(seen(keeps, ranks, what, **options), copying, strict=True):
        assert not changed
        assert not differing(found, wanted)


@pytest.mark.parametrize("watch", [None, BATCHES])
@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"compile": True}], ids=["eager", "frozen", "compiled"])
def test_every_step_writes_in_place_where_nothing_was_kept(watch, microbatch_size, options):
    def program(rank):
        addresses = set()
        with interpreted():
            for event, state in stream(watch=watch, microbatch_size=microbatch_size, **options):
                if event is Event.BATCH_END:
                    addresses.add(tuple(tensor.data_ptr() for tensor in state.params.values()))
        return len(addresses)

    # The first step may copy: what rank 0 broadcast is one piece of memory.
    assert max(pool().run(program)) <= 2


def test_a_rank_that_keeps_a_state_copies_and_the_others_do_not():
    (_, one, _), (_, other, _) = seen({Event.BATCH_END}, ranks=(0,))
    assert one.count(False) > other.count(False)
    assert all(other[1:])


def test_what_was_taken_on_all_ranks_raises_when_it_is_touched():
    def program(rank):
        kept = [state for event, state in stream(donate=True) if event is Event.BATCH_END]
        with pytest.raises(DonatedStateError):
            kept[0].params["0.weight"]
        return {name: tensor.clone() for name, tensor in kept[-1].params.items()}

    (copies, _, _), _ = seen(donate=False)
    wanted = copies[-1][1]
    for found in pool().run(program):
        assert all(torch.equal(tensor, wanted[f"params.{name}"]) for name, tensor in found.items())


def test_an_engine_whose_parameters_stay_behind_is_caught():
    """It believes that its module has the State's memory still, where the State has gone elsewhere."""

    def wrong():
        return patch.object(ReplicateEngine, "shares", lambda self, params: self._averaging is not None)

    assert differing(seen(donate=False, wrong=wrong)[0][0], seen(donate=False)[0][0])


@pytest.mark.parametrize("what", ["a view of one", "memory of the optimizer"])
def test_a_loop_that_does_not_count_is_caught(what):
    def wrong():
        return patch.object(Held, "tensors_alone", lambda *_, **__: True)

    (_, _, changed), _ = seen({Event.BATCH_END}, what=what, wrong=wrong)
    assert changed
