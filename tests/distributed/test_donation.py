"""Ranks write in place where the memory is not aliased on the rank: each by itself, and with the same numbers.

Slow, but for one: a property of ranks, how often they copy, and wrong engines that are caught.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.tree_ops import local_tensor
from pure_loop.compile import interpreted
from pure_loop.distributed.replicate import ReplicateEngine
from pure_loop.distributed.shard import ShardEngine
from pure_loop.errors import DonatedStateError
from pure_loop.stages import engine, ownership, references
from pure_loop.stages.workspace import Workspace
from pure_loop.testing import differences
from tests.support.problem import points
from tests.support.streams import leaves
from tests.support.tiers import examples
from tests.support.worlds import ALGORITHMS, KINDS, an_epoch, pool

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
WHAT = {
    "the State": lambda state: state,
    "its parameters": lambda state: state.params,
    "a tensor": lambda state: {"tensor": state.params["3.weight"]},
    "a part": lambda state: {"part": local_tensor(state.params["3.weight"])},
    "a view of one": lambda state: {"view": local_tensor(state.params["3.weight"])[:1]},
    "its gradients": lambda state: {"gradients": state.grads},
    "memory of the optimizer": lambda state: {"memory": list(leaves(state.opt_state).values())[-1]},
}


def numbers_of(tree):
    """Copies of what this rank has of every leaf, by path."""
    found = leaves(tree).items()
    return {path: local_tensor(leaf).clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in found}


def network(frozen=False):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    module[0].weight.requires_grad_(not frozen)
    return module


def stream(kind="replicate", frozen=False, algorithm=None, optimizer="adamw", model=None, **options):
    algorithms = () if algorithm is None else [ALGORITHMS[algorithm]()]
    module = network(frozen) if model is None else model()
    settings = {"loss": nn.functional.cross_entropy, "optimizer": OPTIMIZERS[optimizer](), "max_duration": "2ep"}
    return an_epoch(module, points(size=8), algorithms=algorithms, parallel=kind, **settings, **options)


def seen(keeps=(), ranks=(0, 1), what="the State", wrong=None, keeps_until=6, large=True, **options):
    """On each rank: copies of what was yielded, which steps wrote in place, and what of the things kept changed.

    ``large`` says that gradients are treated as large ones; ``wrong`` is the arguments of ``patch.object``.
    """

    def program(rank):
        copies, kept, taken = [], [], []
        real = Workspace.writable

        def take(self, state):
            found = real(self, state)
            taken.append(found is not None)
            return found

        with interpreted(), ExitStack() as patches:
            patches.enter_context(nullcontext() if wrong is None else patch.object(*wrong()))
            patches.enter_context(patch.object(Workspace, "writable", take))
            for user in (engine, ownership) if large else ():
                patches.enter_context(patch.object(user, "LARGE", 0))
            for event, state in stream(**options):
                numbers = numbers_of(state)
                copies.append((event, numbers))
                batch = state.timestamp.batch
                if event in keeps and rank in ranks and batch % 2 and batch < keeps_until:
                    thing = WHAT[what](state)
                    kept.append((thing, numbers_of(thing)))
                    del thing
        changed = [each for thing, numbers in kept for each in differences(numbers_of(thing), numbers, name="")]
        return copies, taken, list(map(str, changed))

    return pool().run(program)  # of which there is one, for both kinds


def differing(one, other):
    """Leaves that differ between two streams of copies."""
    assert [event for event, _ in one] == [event for event, _ in other]
    return [each for (_, a), (_, b) in zip(one, other, strict=True) for each in differences(a, b, name="")]


@pytest.mark.slow  # real ranks
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
@examples(3, 400)
def test_states_are_those_of_ranks_that_copy_and_what_was_kept_stays(keeps, ranks, what, **options):
    copying = seen(donate=False, **options)
    for (found, _, changed), (wanted, _, _) in zip(seen(keeps, ranks, what, **options), copying, strict=True):
        assert not changed
        assert not differing(found, wanted)


@pytest.mark.slow  # real ranks
def test_every_step_writes_in_place_where_nothing_was_kept():
    ways = [
        {"microbatch_size": 2},
        {"frozen": True, "watch": BATCHES},
        {"compile": True},
        {"kind": "shard", "watch": BATCHES, "optimizer": "sgd"},
        {"kind": "shard", "frozen": True, "microbatch_size": 2, "optimizer": "partition"},
        {"kind": "shard", "compile": True, "watch": BATCHES, "microbatch_size": 2},
    ]

    def program(rank):
        counts = []
        for options in ways:
            addresses = set()
            with interpreted():
                for event, state in stream(**options):
                    if event is Event.BATCH_END:
                        addresses.add(tuple(local_tensor(tensor).data_ptr() for tensor in state.params.values()))
            counts.append(len(addresses))
        return counts

    for counts in pool().run(program):
        for options, count in zip(ways, counts, strict=True):
            # Replicated, the first step may copy: what rank 0 broadcast is one piece of memory.
            assert count <= (1 if "kind" in options else 2), options


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_a_gradient_is_copied_once_where_it_was_kept(kind):
    (_, taken, changed), _ = seen(BATCHES, kind=kind, model=Unused, keeps_until=2, watch=BATCHES)
    assert taken.count(False) <= 2
    assert taken[-3:] == [True] * 3
    assert not changed


@pytest.mark.slow  # real ranks
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_keeps_a_state_copies_alone_and_what_was_taken_raises_when_it_is_touched(kind):
    (_, one, _), (_, other, _) = seen(BATCHES, ranks=(0,), kind=kind)
    assert one.count(False) > other.count(False)
    assert all(other[1:])

    def program(rank):
        kept = [state for event, state in stream(kind, donate=True) if event is Event.BATCH_END]
        with pytest.raises(DonatedStateError):
            kept[0].params["0.weight"]
        return numbers_of(kept[-1].params)

    for found, (copies, _, _) in zip(pool().run(program), seen(kind=kind, donate=False), strict=True):
        assert all(torch.equal(tensor, copies[-1][1][f"params.{name}"]) for name, tensor in found.items())


def _stays_behind():
    """The engine believes that its module has the State's memory still, where the State has gone elsewhere."""
    return ReplicateEngine, "shares_storage", lambda self, params: self._averaging is not None


def _module_stays_behind():
    """A sharded engine believes that its module has the numbers of a State still, which a step has written over."""
    real = ShardEngine.overwrite

    def overwrite(self, *arguments, **options):
        copied = self._copied
        found = real(self, *arguments, **options)
        self._copied = copied
        return found

    return ShardEngine, "overwrite", overwrite


def _counts_wholes():
    """The loop counts wholes, and not their parts."""
    real = references.Tensors.have_uses

    def have_uses(self, *expected, **more):
        if not self._wrappers:
            return real(self, *expected, **more)
        return set(map(references.count, self._wrappers)) <= {use[0] for use in expected}

    return references.Tensors, "have_uses", have_uses


def _counts_nothing():
    return ownership, "_lent", lambda *mappings: []


@pytest.mark.slow  # real ranks, once for each mistake
def test_a_wrong_engine_or_loop_is_caught():
    for kind, donate, wrong in (("replicate", False, _stays_behind), ("shard", "auto", _module_stays_behind)):
        (found, *_), (wanted, *_) = seen(kind=kind, donate=donate, wrong=wrong)[0], seen(kind=kind, donate=False)[0]
        assert differing(found, wanted), wrong
    for kind, wrong, what in (
        ("shard", _counts_wholes, "a part"),
        ("shard", _counts_wholes, "a view of one"),
        ("replicate", _counts_nothing, "a view of one"),
        ("shard", _counts_nothing, "memory of the optimizer"),
    ):
        (_, taken, changed), _ = seen(BATCHES, what=what, kind=kind, wrong=wrong)
        assert any(taken)
        assert changed, (kind, wrong, what)
