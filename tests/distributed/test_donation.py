"""Steps of ranks write to the memory of States that nothing refers to: numbers as of copies, and what is kept stays."""

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
from pure_loop.stages import engine, ownership
from pure_loop.stages.workspace import Workspace
from pure_loop.testing import differences
from tests.support.problem import fit, points
from tests.support.streams import leaves
from tests.support.tiers import examples
from tests.support.worlds import ALGORITHMS, KINDS, pool

BATCHES = {Event.BATCH_END}
KEPT = [*[*Event][9:11], *[*Event][12:17]]  # BEFORE_FORWARD to BATCH_END
OPTIMIZERS = {
    "adamw": lambda: pl.optim.adamw(lr=0.1),
    "sgd": lambda: pl.optim.sgd(lr=0.1, momentum=0.9),
    "partition": lambda: pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1)}, lambda name, _: "a" if "weight" in name else "b"
    ),
}
WHAT = {
    "the State": lambda state: state,
    "a part": lambda state: {"part": local_tensor([*state.params.values()][-1])},
    "a view of one": lambda state: {"view": local_tensor([*state.params.values()][-1])[:1]},
    "its gradients": lambda state: {"gradients": state.grads},
    "memory of the optimizer": lambda state: {"memory": list(leaves(state.opt_state).values())[-1]},
}


class Unused(nn.Linear):
    """With a layer that nothing reaches."""

    def __init__(self):
        super().__init__(4, 3)
        self.extra = nn.Linear(4, 3)


def stream(kind="replicate", model="noisy", algorithm=None, optimizer="adamw", **options):
    algorithms = () if algorithm is None else ALGORITHMS[algorithm]()
    options = {"optimizer": OPTIMIZERS[optimizer](), "parallel": kind, "strict": None, **options}
    return fit(model, points(size=8), algorithms, **options)


def numbers_of(tree):
    """Copies of what this rank has of every leaf, by path."""
    found = leaves(tree).items()
    return {path: local_tensor(leaf).clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in found}


def seen(keeps=(), what="the State", wrong=None, keeps_until=6, large=True, **options):
    """On this rank: copies of what was yielded, which steps wrote in place, and what of the things kept changed.

    ``large`` says that gradients are treated as large ones; ``wrong`` is the arguments of ``patch.object``.
    """
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
            copies.append((event, numbers_of(state)))
            batch = state.timestamp.batch
            if event in keeps and batch % 2 and batch < keeps_until:
                thing = WHAT[what](state)
                kept.append((thing, numbers_of(thing)))
                del thing
    changed = [each for thing, numbers in kept for each in differences(numbers_of(thing), numbers, name="")]
    return copies, taken, list(map(str, changed))


def differing(one, other):
    """Leaves that differ between two streams of copies."""
    assert [event for event, _ in one] == [event for event, _ in other]
    return [str(each) for (_, a), (_, b) in zip(one, other, strict=True) for each in differences(a, b, name="")]


@pytest.mark.slow  # each example is four runs, and some are compiled
@given(
    keeps=st.sets(st.sampled_from(KEPT)),
    ranks=st.sampled_from([(0,), (1,), (0, 1)]),
    what=st.sampled_from(sorted(WHAT)),
    options=st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "watch": st.sampled_from([None, None, BATCHES, {*KEPT}]),
            "large": st.booleans(),
            "microbatch_size": st.sampled_from([None, 2]),
            "algorithm": st.sampled_from([None, "ema", "sam", "composed"]),
            "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
            "model": st.sampled_from(["noisy", "tied"]),
            "compile": st.booleans(),
        }
    ),
)
@examples(3, 400)
def test_states_are_those_of_ranks_that_copy_and_what_was_kept_stays(keeps, ranks, what, options):
    def program(rank):
        copied, _, _ = seen(donate=False, **options)
        found, _, changed = seen(keeps if rank in ranks else (), what, **options)
        return differing(found, copied), changed

    assert pool().run(program) == [([], [])] * 2


@pytest.mark.slow  # with the compiler
def test_every_step_writes_in_place_where_nothing_was_kept():
    """And a rank that keeps a State copies alone; a parameter without a gradient is copied once."""
    ways = [
        {"microbatch_size": 2},
        {"model": "tied", "watch": BATCHES},
        {"compile": True},
        {"kind": "shard", "watch": BATCHES, "optimizer": "sgd"},
        {"kind": "shard", "model": "tied", "microbatch_size": 2, "optimizer": "partition"},
        {"kind": "shard", "compile": True, "watch": BATCHES, "microbatch_size": 2},
    ]

    def program(rank):
        for options in ways:
            addresses = set()
            with interpreted():
                for event, state in stream(**options):
                    if event is Event.BATCH_END:
                        addresses.add(tuple(local_tensor(tensor).data_ptr() for tensor in state.params.values()))
            # Replicated, the first step may copy: what rank 0 broadcast is one piece of memory.
            assert len(addresses) <= (1 if "kind" in options else 2), options
        copying = []
        for kind in KINDS:
            _, taken, changed = seen(BATCHES, kind=kind, model=Unused(), keeps_until=2, watch=BATCHES)
            assert taken.count(False) <= 2
            assert taken[-3:] == [True] * 3
            assert not changed
            copying.append(seen(() if rank else BATCHES, kind=kind)[1])
        return copying

    one, other = pool().run(program)
    for copying, writing in zip(one, other, strict=True):
        assert copying.count(False) > writing.count(False)
        assert all(writing[1:])


def test_what_was_taken_raises_when_it_is_touched():
    def program(rank):
        for kind in KINDS:
            kept = [state for event, state in stream(kind, donate=True) if event is Event.BATCH_END]
            with pytest.raises(DonatedStateError):
                kept[0].params["0.weight"]
            wanted = numbers_of(pl.run(stream(kind, donate=False)).params)
            assert not differences(numbers_of(kept[-1].params), wanted, name="")

    pool().run(program)


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


def _counts_nothing():
    return ownership, "_lent", lambda *mappings: []


@pytest.mark.slow  # once for each mistake
def test_a_wrong_engine_or_loop_is_caught():
    def program(rank):
        for kind, donate, wrong in (("replicate", False, _stays_behind), ("shard", "auto", _module_stays_behind)):
            assert differing(seen(kind=kind, donate=donate, wrong=wrong)[0], seen(kind=kind, donate=False)[0]), (
                wrong.__doc__
            )
        for kind, wrong, what in (
            ("replicate", _counts_nothing, "a view of one"),
            ("shard", _counts_nothing, "memory of the optimizer"),
        ):
            _, taken, changed = seen(BATCHES, what=what, kind=kind, wrong=wrong)
            assert any(taken)
            assert changed, (kind, wrong, what)

    pool().run(program)
