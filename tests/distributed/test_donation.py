"""Ranks write in place where the memory is not aliased on the rank: each by itself, and with the same numbers."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.compile import interpreted
from pure_loop.distributed.replicate import ReplicateEngine
from pure_loop.distributed.shard import ShardEngine
from pure_loop.errors import DonatedStateError
from pure_loop.stages import engine, ownership, references
from pure_loop.stages.workspace import Workspace
from tests.support.streams import leaves
from tests.support.tiers import examples, pairwise
from tests.support.worlds import ALGORITHMS, KINDS
from tests.support.worlds import pool as pool_of

BATCHES = {Event.BATCH_END}
KEPT = [
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD),
    *(Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
]
OPTIMIZERS = {
    "adamw": lambda: pl.optim.adamw(lr=0.1),
    "sgd": lambda: pl.optim.sgd(lr=0.1, momentum=0.9),
    "partition": lambda: pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1)}, label=lambda name, _: "a" if "weight" in name else "b"
    ),
}


def pool():
    return pool_of(2, "replicate")  # of which there is one, for both kinds


def numbers_of(tree):
    """Copies of what this rank has of every leaf, by path."""
    return {
        path: local_tensor(leaf).clone() if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in leaves(tree).items()
    }


def network(frozen=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    module[0].weight.requires_grad_(not frozen)
    return module


def stream(kind="replicate", frozen=False, algorithm=None, optimizer="adamw", model=None, **options):
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=generator), torch.arange(8) % 3) for _ in range(3)]
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS[optimizer](), "max_duration": "2ep"}
    algorithms = () if algorithm is None else [ALGORITHMS[algorithm]()]
    module = network(frozen) if model is None else model()
    return pl.fit(module, data, algorithms=algorithms, parallel=kind, **settings, **options)


WHAT = {
    "the State": lambda state: state,
    "its parameters": lambda state: state.params,
    "a tensor": lambda state: {"tensor": state.params["3.weight"]},
    "a part": lambda state: {"part": local_tensor(state.params["3.weight"])},
    "a view of one": lambda state: {"view": local_tensor(state.params["3.weight"])[:1]},
    "its gradients": lambda state: {"gradients": state.grads},
    "memory of the optimizer": lambda state: {"memory": list(leaves(state.opt_state).values())[-1]},
}


def seen(keeps=(), ranks=(0, 1), what="the State", wrong=nullcontext, keeps_until=6, large=True, **options):
    """On each rank: copies of what was yielded, which steps wrote in place, and what of the things kept changed.

    ``large`` says that gradients are treated as large ones.
    """

    def program(rank):
        copies, kept, taken = [], [], []
        real = Workspace.writable

        def take(self, state):
            found = real(self, state)
            taken.append(found is not None)
            return found

        with wrong(), interpreted(), ExitStack() as patches:
            patches.enter_context(patch.object(Workspace, "writable", take))
            for user in (engine, ownership) if large else ():
                patches.enter_context(patch.object(user, "LARGE", 0))
            for event, state in stream(**options):
                numbers = numbers_of(state)
                copies.append((event, numbers))
                if (
                    event in keeps
                    and rank in ranks
                    and state.timestamp.batch % 2
                    and state.timestamp.batch < keeps_until
                ):
                    thing = WHAT[what](state)
                    kept.append((thing, numbers_of(thing)))
                    del thing
        changed = [
            path
            for thing, numbers in kept
            for path, now in numbers_of(thing).items()
            if not (torch.equal(now, numbers[path]) if isinstance(now, torch.Tensor) else path in numbers)
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


@pytest.mark.slow
@given(
    kind=st.sampled_from(KINDS),
    keeps=st.sets(st.sampled_from(KEPT)),
    ranks=st.sampled_from([(0,), (1,), (0, 1)]),
    what=st.sampled_from(sorted(WHAT)),
    watch=st.sampled_from([None, None, BATCHES, {*KEPT}]),
    large=st.booleans(),
    microbatch_size=st.sampled_from([None, 2]),
    algorithm=st.sampled_from([None, "ema", "sam", "composed"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    frozen=st.booleans(),
    compile=st.booleans(),
)
@examples(2, 400)
def test_states_are_those_of_ranks_that_copy_and_what_was_kept_stays(keeps, ranks, what, **options):
    copying = seen(donate=False, **options)
    for (found, _, changed), (wanted, _, _) in zip(seen(keeps, ranks, what, **options), copying, strict=True):
        assert not changed
        assert not differing(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "watch", "microbatch_size"),
    pairwise(
        {
            "eager": {},
            "frozen": {"frozen": True},
            "compiled": {"compile": True},
            "sharded": {"kind": "shard"},
            "sharded and frozen": {"kind": "shard", "frozen": True},
            "sharded and compiled": {"kind": "shard", "compile": True},
        },
        {"all": None, "batches": BATCHES},
        [None, 2],
    ),
)
def test_every_step_writes_in_place_where_nothing_was_kept(watch, microbatch_size, options):
    def program(rank):
        addresses = set()
        with interpreted():
            for event, state in stream(watch=watch, microbatch_size=microbatch_size, **options):
                if event is Event.BATCH_END:
                    addresses.add(tuple(local_tensor(tensor).data_ptr() for tensor in state.params.values()))
        return len(addresses)

    # Replicated, the first step may copy: what rank 0 broadcast is one piece of memory.
    assert max(pool().run(program)) <= (1 if "kind" in options else 2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_parts_are_written_in_place_by_every_optimizer_that_can(optimizer):
    for _, taken, _ in seen(kind="shard", optimizer=optimizer):
        assert taken
        assert all(taken)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_is_copied_once_where_it_was_kept(kind):
    (_, taken, changed), _ = seen({Event.BATCH_END}, kind=kind, model=Unused, keeps_until=2, watch=BATCHES)
    assert taken.count(False) <= 2
    assert taken[-3:] == [True] * 3
    assert not changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_keeps_a_state_copies_and_the_others_do_not(kind):
    (_, one, _), (_, other, _) = seen({Event.BATCH_END}, ranks=(0,), kind=kind)
    assert one.count(False) > other.count(False)
    assert all(other[1:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_taken_on_all_ranks_raises_when_it_is_touched(kind):
    def program(rank):
        kept = [state for event, state in stream(kind, donate=True) if event is Event.BATCH_END]
        with pytest.raises(DonatedStateError):
            kept[0].params["0.weight"]
        return numbers_of(kept[-1].params)

    for found, (copies, _, _) in zip(pool().run(program), seen(kind=kind, donate=False), strict=True):
        wanted = copies[-1][1]
        assert all(torch.equal(tensor, wanted[f"params.{name}"]) for name, tensor in found.items())


@pytest.mark.slow
def test_an_engine_whose_parameters_stay_behind_is_caught():
    """It believes that its module has the State's memory still, where the State has gone elsewhere."""

    def wrong():
        return patch.object(ReplicateEngine, "shares_storage", lambda self, params: self._averaging is not None)

    assert differing(seen(donate=False, wrong=wrong)[0][0], seen(donate=False)[0][0])


@pytest.mark.slow
def test_a_sharded_engine_whose_module_stays_behind_is_caught():
    """It believes that its module has the numbers of a State still, which a step has written over."""
    real = ShardEngine.overwrite

    def overwrite(self, *arguments, **options):
        copied = self._copied
        found = real(self, *arguments, **options)
        self._copied = copied
        return found

    def wrong():
        return patch.object(ShardEngine, "overwrite", overwrite)

    assert differing(seen(kind="shard", wrong=wrong)[0][0], seen(kind="shard", donate=False)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a part", "a view of one"])
def test_a_loop_that_counts_wholes_and_not_their_parts_is_caught(what):
    real = references.Tensors.have_uses

    def have_uses(self, *expected, **more):
        if not self._wrappers:
            return real(self, *expected, **more)
        return set(map(references.count, self._wrappers)) <= {use[0] for use in expected}

    def wrong():
        return patch.object(references.Tensors, "have_uses", have_uses)

    (_, taken, changed), _ = seen({Event.BATCH_END}, what=what, kind="shard", wrong=wrong)
    assert all(taken)
    assert changed


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["a view of one", "memory of the optimizer"])
def test_a_loop_that_does_not_count_is_caught(what, kind):
    def wrong():
        return patch.object(ownership, "_lent", lambda *mappings: [])

    (_, _, changed), _ = seen({Event.BATCH_END}, what=what, kind=kind, wrong=wrong)
    assert changed
