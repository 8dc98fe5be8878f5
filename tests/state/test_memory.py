"""What stays alive: what the user keeps, the last State, and nothing else; no graph, no reference cycle."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support import problem

DATA = problem.points(size=(4, 4, 6, 4), seed=1)


def fit(**changes: Any) -> Any:
    options = {"optimizer": pl.optim.adamw(lr=1e-3), "max_duration": "20ba", "microbatch_size": 2, "strict": None}
    return problem.fit(changes.pop("model", None) or problem.noisy(), DATA, **options | changes)


@contextmanager
def without_collector() -> Iterator[None]:
    """With the garbage collector off, only reference counts free memory; what was there before is not looked at."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def live_tensors() -> tuple[int, int]:
    """How many tensors there are since the collector is off, and the bytes of their storages, each counted once."""
    # Asked of its type: some objects of other libraries answer isinstance with a warning.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not each.is_meta]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree, namespace="pure_loop") if isinstance(leaf, Tensor)]


def test_no_step_needs_the_garbage_collector() -> None:
    """No reference cycles: the collector finds nothing after any number of steps."""
    found = []
    with without_collector():
        for event, state in fit(evaluators=DATA[:1], eval_interval="5ba", algorithms=[pl.algorithms.sam(rho=0.1)]):
            if event is Event.BATCH_END and state.timestamp.batch % 5 == 0:
                found.append(gc.collect())
    assert sum(found[1:]) == 0, f"objects in cycles, at every fifth batch: {found}"


INSIDE_A_BATCH = [
    *(Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
    *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
]


def fails(state: pl.State) -> pl.State:
    return state if state.timestamp.batch < 3 else state.replace(loss=state.loss / [][0])


WAYS: list[Any] = [{"donate": "auto"}, {"donate": False}, {"watch": {Event.BATCH_END}}]
WAYS.append({"algorithms": [pl.Algorithm("fails", {Event.AFTER_LOSS: fails})]})


@pytest.mark.parametrize("options", WAYS, ids=["in place", "copies", "one event", "an error"])
def test_a_stream_that_is_left_keeps_nothing(options: Any) -> None:
    """Whoever breaks out of the loop, inside of a batch too, or has an error there, has the memory back at once."""
    pl.run(fit(max_duration="1ep"))  # small tensors that a first step makes, and that every later one uses
    for last in INSIDE_A_BATCH if "watch" not in options else [Event.BATCH_END]:
        with without_collector():
            with suppress(IndexError):  # pytest.raises would keep the error, and with it the frames
                for event, state in fit(**options):
                    if event is last and state.timestamp.batch == 3:
                        break
            assert state.timestamp.batch >= 3
            del event, state
            assert live_tensors()[0] == 0, last


class Marked(torch.autograd.Function):
    """Leaves something in the graph that can be watched."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Marked.alive.add(ctx)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("keep", [False, True], ids=["nothing kept", "every State after the backward kept"])
def test_no_graph_survives_its_microbatch(keep: bool) -> None:
    """From AFTER_BACKWARD on no State holds the graph, and after that event nothing does."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(Marked.apply(outputs), targets)

    after, kept = {Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT}, []
    with without_collector():
        for event, state in fit(loss=loss, algorithms=[pl.algorithms.sam(rho=0.1)]):
            assert event is not Event.AFTER_LOSS or (state.loss.grad_fn is not None and len(Marked.alive) == 1)
            if event in after:
                assert not any(leaf.requires_grad for leaf in tensors_of(state))
                kept += [state] * keep
            assert event in INSIDE_A_BATCH[2:7] or len(Marked.alive) == 0, f"a graph is alive at {event.name}"


def storages(tree: Any) -> dict[int, int]:
    leaves = [leaf.untyped_storage() for leaf in tensors_of(tree) if leaf.numel()]
    return {leaf.data_ptr(): leaf.nbytes() for leaf in leaves}


def test_a_kept_state_holds_its_own_tensors_and_no_others() -> None:
    """Keeping every State at BATCH_END adds, a batch, parameters, optimizer state and that batch's own tensors."""
    kept, totals = [], []
    with without_collector():
        for _, state in fit(watch={Event.BATCH_END}, microbatch_size=None):
            kept.append(state)
            totals.append(live_tensors()[1])
    counters = ("skipped", "nonfinite")
    fields = ("params", "opt_state", "buffers", "loss", "grads", "outputs", "batch", "microbatch", *counters)
    for before, state in itertools.pairwise(kept):
        shared = storages(before).keys() & storages(state).keys()
        assert shared <= storages((DATA, before.skipped, before.nonfinite)).keys(), "a tensor of an earlier State"
        assert storages(state).keys() <= storages([getattr(state, name) for name in fields]).keys()
        assert storages(state.batch).keys() <= storages(DATA).keys()
    growth = [b - a for a, b in itertools.pairwise(totals[4:])]
    wanted = sum(storages([getattr(kept[-1], name) for name in ("params", "opt_state", "buffers", "grads")]).values())
    assert max(growth) <= wanted + 1000, f"{max(growth)} bytes a batch, of which {wanted} are the State's"


def test_between_batches_a_state_holds_no_batch() -> None:
    between = {Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END, Event.EVAL_END}
    for event, state in fit(max_duration="2ep", evaluators=DATA[:1]):
        held = [
            name for name in ("batch", "microbatch", "outputs", "loss", "grads") if getattr(state, name) is not None
        ]
        assert event not in between or not held, f"{held} at {event.name}"


@pytest.mark.parametrize("how", ["to its end", "closed", "dropped"])
def test_after_the_stream_nothing_is_alive_but_the_last_state(how: str) -> None:
    with without_collector():
        model = problem.noisy()
        module = weakref.ref(model)
        stream = fit(model=model, algorithms=[pl.algorithms.sam(rho=0.1)])
        del model
        last, seen = None, list[weakref.ref[Any]]()
        for event, state in stream:
            assert module() is None  # the user's is not held
            seen += map(weakref.ref, tensors_of((state.params, state.opt_state)))
            last = state
            if how != "to its end" and event is Event.AFTER_BACKWARD and state.timestamp.batch == 5:
                break
        if how == "closed":
            stream.close()
        del stream, state
        mine = set(map(id, tensors_of((last.params, last.opt_state))))
        alive = [ref() for ref in seen]
        assert {id(tensor) for tensor in alive if tensor is not None} <= mine
        del alive, last
        assert all(ref() is None for ref in seen), "tensors are alive after the last State is gone"


@pytest.mark.parametrize("order", ["current", "2021"])
def test_what_init_replaces_is_let_go(order: str) -> None:
    """Before training, a script that runs in another one is the only one that has the State."""
    replaced: list[weakref.ref[Tensor]] = []

    @pl.algorithm(Event.INIT)
    def replace(state: pl.State) -> pl.State:
        replaced.extend(map(weakref.ref, state.params.values()))
        return state.replace(params={name: tensor.clone() for name, tensor in state.params.items()})

    for event, _ in fit(order=order, algorithms=[replace]):
        if event is Event.FIT_START:
            assert [tensor() for tensor in replaced] == [None] * 6
            break
