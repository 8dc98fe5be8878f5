"""What is not kept is written to: the addresses of parameters, and ``donate=True``."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop.frozendict import FrozenDict, Overwritten
from pure_loop.stages.references import can_count
from pure_loop.state import raw_opt_state
from tests.ownership.judge import Keep
from tests.ownership.programs import DATA, IN_PLACE, OPTIMIZERS, moves
from tests.ownership.ways import of_tree
from tests.support.donating import Count, assert_same, fit
from tests.support.problem import cross_entropy

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")
ONE = frozenset({Event.BATCH_END})
WATCHES = {"all": None, "one": ONE}
Donated = pl.errors.DonatedStateError


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


# Where parameters lie. ------------------------------------------------------------------------------------------------


READING = ("ema", "reads", "doubles", "began with params", "began with opt_state")


@pytest.mark.parametrize("watch", WATCHES)
def test_parameters_stay_where_they_are_while_nothing_is_kept(watch: str) -> None:
    """What the library reads costs no copy, and neither does a memory that begins as the parameters."""
    found = {name: moves(consumer=name, watch=WATCHES[watch], options={"strict": False}) for name in IN_PLACE}
    found |= {name: moves(optimizer=name, watch=WATCHES[watch]) for name in OPTIMIZERS}
    found |= {name: moves(watch=WATCHES[watch], algorithms=(name,)) for name in READING}
    found["GradMonitor"] = moves(watch=WATCHES[watch], monitors=True)
    assert all(len(moved) <= (n == "RAdam") for n, moved in found.items()), found


def test_a_step_copies_where_something_is_kept_and_the_next_does_not() -> None:
    assert moves(donate=False) == list(range(1, 8))
    assert moves(keeps=(Keep(batch=3),)) == [4]
    assert moves(consumer="closed over") == list(range(1, 8))
    for way in ("the State", "params", "parameter: itself", "parameter: an array", "moment: itself"):
        assert moves(keeps=tuple(Keep(batch=batch, way=way, left=0) for batch in range(1, 9))) == [], way


def test_of_a_run_that_verifies_batches_that_are_not_due_are_written_in_place(count: Count) -> None:
    """A due batch copies by itself. The one after it copies once, because what was before it was not the loop's own."""
    wanted = pl.run(fit(donate=False))
    for every, copied in (("1000ba", 0), ("5ba", 2)):  # of 15 batches three, of which the last has none after it
        for watch, kept_at in itertools.product((None, ONE), (None, Event.BATCH_END)):
            count.reused = count.copied = 0
            for event, state in fit(watch=watch, verify=every):
                if event is kept_at and state.timestamp.batch == 5:
                    kept = state  # noqa: F841
            assert count.reused >= 15 - 1 - (3 if copied else 0) - copied
            assert kept_at is not None or count.copied == copied
    assert_same(pl.run(fit(verify="2ba", donate=True)).params, wanted.params)


# By force. ------------------------------------------------------------------------------------------------------------


def _uses(mapping: Any, name: str) -> list[Callable[[], Any]]:
    """What is kept of a mapping, and a later use of it, or of what it has by this name."""
    values, get, iterator, copied = mapping.values(), mapping.get, iter(mapping.items()), mapping.copy
    return [
        lambda: [value + 1 for value in values],
        lambda: [value + 1 for _, value in iterator],
        lambda: get(name) + 1,
        lambda: copied()[name] + 1,
        lambda: of_tree(mapping),
        lambda: torch.utils._pytree.tree_leaves(mapping),
        lambda: mapping[name],
    ]


@pytest.mark.usefixtures("gradients_of_each_size")
def test_with_donate_true_what_is_kept_says_that_it_was_overwritten() -> None:
    kept, uses, memory, tensors = {}, [], [], []
    for event, state in fit(donate=True):
        if event is Event.BATCH_END:
            batch = state.timestamp.batch
            kept[batch] = state
            if batch in (4, 5):
                uses += _uses(*[(state.params, "0.weight"), (state.opt_state, "exp_avg")][batch - 4])
            if batch == 6:
                tensors += [(each, each.clone()) for each in of_tree((state.params, state.opt_state))]
            if batch == 9:
                memory += [ref(each) for each in of_tree(raw_opt_state(state))]
    assert_same(state, pl.run(fit(donate=False)))
    touches: list[Any] = [lambda s: s.module(), lambda s: s.device, copy.deepcopy, fit, lambda s: len(s.opt_state)]
    touches += [lambda s: {**s.params}, lambda s: list(s.params), lambda s: s.params | {}, lambda s: s.params == {}]
    touches.append(lambda s: pl.run(pl.evaluate(s, DATA, loss=cross_entropy)))
    for use in uses + [partial(touch, kept[3]) for touch in touches]:
        with pytest.raises(Donated, match=r"overwritten by the step of batch \d+"):
            use()
    with pytest.raises(Donated, match=r"state\.params .* overwritten by the step of batch 1.* donate=") as caught:
        kept[1].params["0.weight"]
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(Donated, match=r"state\.opt_state .* overwritten by the step of batch 3"):
        of_tree(kept[3].opt_state)
    assert "overwritten" in repr(kept[3])
    assert "overwritten" in repr(Overwritten.by("params", "overwritten"))
    assert kept[3].loss.item() > 0
    assert all(torch.equal(one, other) for one, other in tensors), "a tensor that was kept by itself changed"
    del state, kept[15]
    assert not any(each() is not None for each in memory), "a State whose memory was taken keeps it"


def test_donate_true_takes_nothing_of_the_state_that_training_starts_from() -> None:
    """Nor of a stream that copies, and began with that State, too: numbers on the host are in both."""
    start = pl.run(fit(max_duration="5ba", donate=False))
    wanted, other = pl.run(fit(start, donate=False)), fit(start, donate=False)
    next(event for event, _ in other if event is Event.BATCH_END)
    for _ in range(2):
        assert_same(pl.run(fit(start, donate=True)), wanted)
    assert set(start.opt_state["skipped"].values()) == {0}
    assert_same(pl.run(other), wanted)
    for donate in (None, 1, "True"):
        with pytest.raises(pl.errors.ArgumentError, match="donate="):
            fit(donate=donate)


# What an optimizer does with what it is given. ------------------------------------------------------------------------


MEMORIES: dict[str, Callable[[Any], Any]] = {
    "flat": lambda params: FrozenDict(params),
    "a list": lambda params: FrozenDict(all=list(params.values())),
    "a number of steps": lambda params: FrozenDict(step=torch.zeros(()), m=FrozenDict(params)),
    "mixed": lambda params: FrozenDict(m=FrozenDict({"count": 0, **params})),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_memory_of_an_optimizer_of_ones_own_stays_what_it_was_when_it_was_kept(name: str) -> None:
    def init(params: Any) -> Any:
        return MEMORIES[name]({key: torch.zeros_like(each) for key, each in params.items()})

    def in_place(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        for tensor in of_tree(memory):
            tensor.add_(1)
        for key, tensor in params.items():
            tensor.sub_(grads[key], alpha=0.1)
        return params, memory

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        return in_place(grads, *copy.deepcopy((memory, params)), timestamp)

    own = pl.Optimizer(name="own", init=init, update=update, lr=lambda t: 0.1, overwrite=in_place)
    kept = [of_tree(state.opt_state)[0] for event, state in fit(optimizer=own) if event is Event.BATCH_END]
    assert [float(each.flatten()[0]) for each in kept] == list(range(1, 16))


def test_what_a_label_of_a_partition_keeps_stays(count: Count) -> None:
    """It is given the parameters before a step writes to them."""
    for begin, donate in itertools.product((0, 2, 4), ("auto", True)):
        kept: list[tuple[Tensor, Tensor]] = []
        asked = itertools.count()

        def label(name: str, tensor: Tensor, kept: Any = kept, asked: Any = asked, begin: int = begin) -> str:
            if next(asked) >= begin:
                kept.append((tensor, tensor.clone()))
            return "all"

        count.copied = 0
        pl.run(fit(optimizer=pl.optim.partition({"all": pl.optim.adamw(lr=0.1)}, label=label), donate=donate))
        assert all(torch.equal(*pair) for pair in kept)
        assert count.copied <= 1
