"""What stays alive: what the user keeps, the last State, and nothing else; no graph, no reference cycle."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.models import batches, mlp

DATA = batches((4, 4, 6, 4), seed=1)


def fit(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.adamw(lr=1e-3),
        "max_duration": "20ba",
        "microbatch_size": 3,
        **changes,
    }
    if "model" not in changes:
        arguments["model"] = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        arguments["microbatch_size"] = 2
    return pl.fit(arguments.pop("model"), DATA, **arguments)


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


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "steps"), [("fp32", 2000), ("amp_bf16", 200), ("amp_fp16", 200)])
def test_memory_stays_flat_while_losses_and_metrics_are_kept(precision: str, steps: int) -> None:
    """What grows over a long run is what the user keeps, every loss and metric, and nothing else."""
    kept: list[Any] = []
    tensors, blocks = [], []
    with without_collector():
        stream = fit(
            max_duration=f"{steps}ba",
            precision=precision,
            microbatch_size=None,
            evaluators={"val": DATA[:1]},
            eval_interval=f"{steps // 20}ba",
            algorithms=[pl.algorithms.ema(half_life="10ba")],
            watch={Event.BATCH_END, Event.EVAL_END},
        )
        for event, state in stream:
            kept.append(state.loss if event is Event.BATCH_END else state.metrics)
            if event is Event.BATCH_END and state.timestamp.batch % (steps // 10) == 0:
                tensors.append(live_tensors()[0] - len(set(map(id, optree.tree_leaves(kept, namespace="pure_loop")))))
                gc.collect()  # empties the free lists of tuples, which autograd fills
                blocks.append(sys.getallocatedblocks())
    assert len(kept) >= steps
    # Fewer where a step was skipped: two States then share their tensors.
    assert max(tensors[5:]) <= max(tensors[:5]) + 2, f"tensors besides those that were kept: {tensors}"
    # In the first stretch caches fill. A kept loss is a tensor in a list; kept metrics are some mappings more.
    growth = [b - a for a, b in itertools.pairwise(blocks[2:])]
    assert max(growth) <= steps // 10 + 250, f"Python objects a stretch: {growth}"


def test_no_step_needs_the_garbage_collector() -> None:
    """No reference cycles: the collector finds nothing after any number of steps."""
    found = []
    with without_collector():
        for event, state in fit(evaluators=DATA[:1], eval_interval="5ba", algorithms=[pl.algorithms.sam(rho=0.1)]):
            if event is Event.BATCH_END and state.timestamp.batch % 5 == 0:
                found.append(gc.collect())
    assert sum(found[1:]) == 0, f"objects in cycles, at every fifth batch: {found}"


def constants_are_made() -> None:
    """Small tensors that a first step makes, and that every later one uses."""
    for _ in fit(max_duration="1ep"):
        pass


INSIDE_A_BATCH = [
    *(Event.AFTER_DATALOADER, Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
    *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
]


@pytest.mark.parametrize("donate", ["auto", False])
@pytest.mark.parametrize("last", INSIDE_A_BATCH, ids=lambda event: event.name)
def test_a_stream_that_is_left_keeps_nothing(last: Event, donate: Any) -> None:
    """Whoever breaks out of the loop, inside of a batch too, has the memory back at once."""
    constants_are_made()
    with without_collector():
        for event, state in fit(donate=donate):
            if event is last and state.timestamp.batch == 3:
                break
        del event, state
        assert live_tensors()[0] == 0


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
def test_a_stream_that_an_error_ends_keeps_nothing(watch: Any) -> None:
    constants_are_made()
    calls: list[None] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 7:
            raise ArithmeticError
        return functional.cross_entropy(outputs, batch)

    with without_collector():
        last = None
        try:  # pytest.raises would keep the error, and with it the frames
            for last in fit(loss=loss, watch=watch):  # noqa: B007 - the State is let go of afterwards
                pass
        except ArithmeticError:
            del last
        assert len(calls) == 7
        assert live_tensors()[0] == 0


WITH_A_GRAPH = {
    *(Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD)
}


def graph_nodes(tree: Any) -> list[Any]:
    return [leaf.grad_fn for leaf in optree.tree_leaves(tree, namespace="pure_loop") if getattr(leaf, "grad_fn", None)]


@pytest.mark.parametrize("keep", [False, True], ids=["nothing kept", "every State after the backward kept"])
def test_no_graph_survives_its_microbatch(keep: bool) -> None:
    """From AFTER_BACKWARD on no State holds the graph, and after that event nothing does."""

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

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(Marked.apply(outputs), targets)

    kept = []
    with without_collector():
        for event, state in fit(loss=loss, algorithms=[pl.algorithms.sam(rho=0.1)]):
            if event is Event.AFTER_LOSS:
                assert graph_nodes(state.loss)
                assert len(Marked.alive) == 1
            if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT):
                assert not graph_nodes(state)
                assert not any(leaf.requires_grad for leaf in state.params.values())
                if keep:
                    kept.append(state)
            if event not in WITH_A_GRAPH:
                assert len(Marked.alive) == 0, f"a graph is alive at {event.name}"
    assert bool(kept) is keep


def storages(tree: Any) -> set[int]:
    leaves = [leaf for leaf in optree.tree_leaves(tree, namespace="pure_loop") if isinstance(leaf, Tensor)]
    return {leaf.untyped_storage().data_ptr() for leaf in leaves if leaf.numel()}


def nbytes(tree: Any) -> int:
    leaves = optree.tree_leaves(tree, namespace="pure_loop")
    return sum(leaf.untyped_storage().nbytes() for leaf in leaves if isinstance(leaf, Tensor))


def test_a_kept_state_holds_its_own_tensors_and_no_others() -> None:
    """Keeping every State at BATCH_END adds, a batch, parameters, optimizer state and that batch's own tensors."""
    kept, totals = [], []
    with without_collector():
        for _, state in fit(watch={Event.BATCH_END}, microbatch_size=None):
            kept.append(state)
            totals.append(live_tensors()[1])
    durable = ("params", "opt_state", "buffers", "skipped", "loss")
    for before, state in itertools.pairwise(kept):
        shared = storages(before) & storages(state)
        of_the_data = storages(DATA)
        assert shared <= of_the_data | storages(before.skipped) | storages(before.nonfinite), (
            "a tensor of an earlier State"
        )
        step = {name: storages(getattr(state, name)) for name in (*durable, "grads", "outputs", "batch", "microbatch")}
        assert storages(state) <= set().union(*step.values()) | storages((state.skipped, state.nonfinite))
        assert step["batch"] <= of_the_data
    growth = [b - a for a, b in itertools.pairwise(totals[4:])]
    names = ("params", "opt_state", "buffers", "grads")
    wanted = sum(nbytes(getattr(kept[-1], name)) for name in names)
    assert max(growth) <= wanted + 1000, f"{max(growth)} bytes a batch, of which {wanted} are the State's"


def test_between_batches_a_state_holds_no_batch() -> None:
    for event, state in fit(max_duration="2ep", evaluators=DATA[:1]):
        if event in (Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT, Event.FIT_END, Event.EVAL_END):
            held = [
                name for name in ("batch", "microbatch", "outputs", "loss", "grads") if getattr(state, name) is not None
            ]
            assert event is Event.BATCH_CHECKPOINT or not held, f"{held} at {event.name}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["to its end", "closed", "dropped"])
def test_after_the_stream_nothing_is_alive_but_the_last_state(how: str) -> None:
    model: Any = mlp()
    with without_collector():
        stream = fit(model=model, microbatch_size=2, algorithms=[pl.algorithms.sam(rho=0.1)])
        seen: list[weakref.ref[Any]] = []
        last = None
        for event, state in stream:
            seen += [weakref.ref(tensor) for tensor in state.params.values()]
            seen += [
                weakref.ref(tensor) for tensor in optree.tree_leaves(state.opt_state) if isinstance(tensor, Tensor)
            ]
            last = state
            if how != "to its end" and event is Event.AFTER_BACKWARD and state.timestamp.batch == 5:
                break
        if how == "closed":
            stream.close()
        del stream, state
        assert last is not None
        mine = {id(leaf) for leaf in optree.tree_leaves((last.params, last.opt_state), namespace="pure_loop")}
        alive = [ref() for ref in seen]
        assert {id(tensor) for tensor in alive if tensor is not None} <= mine
        del alive, last
        assert all(ref() is None for ref in seen), "tensors are alive after the last State is gone"


def test_the_users_module_is_not_held() -> None:
    model = mlp()
    alive = weakref.ref(model)
    with without_collector():
        stream = fit(model=model)
        next(stream)
        del model
        assert alive() is None
        stream.close()


def test_peak_memory_of_a_step_is_one_update() -> None:
    """While a step runs, there are the old and the new parameters and optimizer states, gradients, and no more."""
    model = nn.Linear(300, 300)
    size = sum(p.numel() * 4 for p in model.parameters())
    data = [(torch.zeros(2, 300), torch.zeros(2, dtype=torch.int64))]
    at: dict[Event, int] = {}
    with without_collector():
        stream = pl.fit(
            model, data, loss=functional.cross_entropy, optimizer=pl.optim.adamw(lr=0.1), max_duration="3ba"
        )
        for event, _state in stream:  # as in any loop, the variable keeps the last State
            if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END):
                at[event] = live_tensors()[1]
    # Parameters and two moments twice, gradients once, and a little.
    assert at[Event.BATCH_END] <= 7.2 * size, f"{at[Event.BATCH_END] / size:.1f} times the parameters"


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
            assert replaced
            assert [tensor() for tensor in replaced] == [None] * len(replaced)
            break


def test_a_batch_that_is_tried_first_keeps_nothing() -> None:
    """With ``microbatch_size="auto"``, and no collector: what was computed for the trial is gone with it."""
    first: list[weakref.ref[Tensor]] = []

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def note(state: pl.State) -> pl.State:
        if not first:
            assert state.grads is not None
            first.extend(weakref.ref(gradient) for gradient in state.grads.values() if gradient is not None)
        return state

    gc.collect()
    gc.disable()
    try:
        for event, _ in fit(microbatch_size="auto", model=mlp(), algorithms=[note], max_duration="2ba"):
            if event is Event.BATCH_START:
                assert first  # of the trial, which comes before
                assert [gradient() for gradient in first] == [None] * len(first)
                break
    finally:
        gc.enable()
