"""Donation: what anybody has kept never changes, and where nobody has kept anything the memory is reused.

Law 2 decides: whatever is kept (States, mappings, tensors, views, NumPy arrays, DLPack capsules, graphs), by whomever
(the loop's body, algorithms, callbacks, the model's own forward, other threads), however the loop is written, has the
bits of a copy made when it was kept.
"""

from __future__ import annotations

import copy
import io
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import attrs
import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event, donation
from pure_loop._consumer import gives_up
from pure_loop.frozendict import FrozenDict
from tests import sameness
from tests.test_memory import live_tensors, without_collector

NAMESPACE = "pure_loop"
DATA = [(torch.randn(6, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3) for i in range(5)]

pytestmark = pytest.mark.skipif(not donation.CAN_COUNT, reason="references can't be counted in this interpreter")


def assert_same(a: Any, b: Any) -> None:
    sameness.assert_same(a, b, "with donation and without")


class Net(nn.Module):
    """Layers of most kinds: norm with buffers, tied and frozen parameters, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.seen_by is not None:
            self.seen_by(self)
        out: Tensor = self.head(self.frozen(self.second(torch.relu(self.norm(self.first(x))))))
        return out

    seen_by: Callable[[nn.Module], None] | None = None


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def fit(model: Any = None, **arguments: Any) -> Any:
    arguments.setdefault("max_duration", "3ep")
    arguments.setdefault("optimizer", pl.optim.adamw(lr=0.1))
    arguments.setdefault("loss", functional.cross_entropy)
    return pl.fit(plain() if model is None else model, arguments.pop("data", DATA), **arguments)


def partition() -> pl.optim.Optimizer:
    return pl.optim.partition(
        {"a": pl.optim.adamw(lr=0.1), "b": pl.optim.sgd(lr=0.1, momentum=0.9)},
        label=lambda name, tensor: "a" if tensor.ndim > 1 else "b",
    )


class Count:
    """How many updates wrote in place, and how many copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reused = self.copied = 0
        real = donation.Donation.take

        def take(this: Any, state: Any) -> Any:
            taken = real(this, state)
            self.reused += taken is not None
            self.copied += taken is None
            return taken

        monkeypatch.setattr(donation.Donation, "take", take)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


# Where nobody keeps anything: every step but the first writes in place, in whatever way the stream is read.


def a_for_loop(stream: Any) -> None:
    for _event, _state in stream:
        pass


def a_while_loop(stream: Any) -> None:
    while True:
        try:
            _event, _state = next(stream)
        except StopIteration:
            return


def a_comprehension(stream: Any) -> None:
    assert [1 for _event, _state in stream]


def through_a_generator(stream: Any) -> None:
    def again() -> Iterator[Any]:
        yield from stream

    for _event, _state in again():
        pass


def with_progress(stream: Any) -> None:
    for _event, _state in pl.progress(stream, file=io.StringIO()):
        pass


def reading(stream: Any) -> None:
    for event, state in stream:
        if event is Event.BATCH_END:
            assert state.loss.item() > 0
            norm = state.params["0.weight"].norm().item() + float(state.opt_state["step"])
            assert norm > 0


@pytest.mark.parametrize(
    "consumer",
    [a_for_loop, a_while_loop, a_comprehension, through_a_generator, with_progress, pl.run, reading],
)
@pytest.mark.parametrize(
    "watch", [None, {Event.BATCH_END}, {Event.BATCH_END, Event.EPOCH_END}], ids=["all", "one", "two"]
)
def test_memory_is_reused_where_nobody_has_kept_it(count: Count, consumer: Callable[[Any], Any], watch: Any) -> None:
    consumer(fit(watch=watch))
    assert (count.copied, count.reused) == (0, 15)


@pytest.mark.parametrize("model", [plain, net], ids=["plain", "net"])
@pytest.mark.parametrize(
    "optimizer",
    [
        pl.optim.adamw(lr=0.1),
        pl.optim.adam(lr=0.1, amsgrad=True, weight_decay=0.1),
        pl.optim.sgd(lr=0.1),
        pl.optim.sgd(lr=0.1, momentum=0.9),
        partition(),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_every_optimizer_of_ours_writes_in_place_and_trains_as_without(
    count: Count, model: Any, optimizer: Any
) -> None:
    last = pl.run(fit(model(), optimizer=optimizer, microbatch_size=4))
    assert (count.copied, count.reused) == (0, 15)
    assert_same(last, pl.run(fit(model(), optimizer=optimizer, microbatch_size=4, donate=False)))
    assert_same(last, pl.run(fit(model(), optimizer=optimizer, microbatch_size=4, donate=True)))


@pytest.mark.parametrize("order", ["current", "2021"])
def test_the_first_step_of_a_fresh_start_writes_in_place_in_either_order(count: Count, order: Any) -> None:
    last = pl.run(fit(order=order))
    assert (count.copied, count.reused) == (0, 15)
    assert_same(last, pl.run(fit(order=order, donate=False)))


def test_evaluation_and_algorithms_between_the_steps_cost_no_copies(count: Count) -> None:
    """EMA and label smoothing read and keep nothing of the loop's; evaluation binds other weights in between."""
    algorithms = [pl.algorithms.ema(half_life="3ba"), pl.algorithms.label_smoothing(0.1)]
    pl.run(fit(evaluators={"val": DATA}, eval_interval="2ba", algorithms=algorithms, clip_grad=1.0))
    assert count.reused >= 14 - 1


# Where somebody keeps something: it has the bits of a copy made when it was kept.


def tensors_of(tree: Any) -> list[Any]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]


class Kept:
    """Things that were kept, each with a copy of its numbers."""

    def __init__(self) -> None:
        self.things: list[tuple[str, Any, Callable[[Any], list[Any]], list[Any]]] = []

    def keep(self, what: str, thing: Any, read: Callable[[Any], list[Any]] = tensors_of) -> None:
        numbers = [torch.as_tensor(each).detach().clone() for each in read(thing)]
        self.things.append((what, thing, read, numbers))

    def check(self) -> None:
        for what, thing, read, numbers in self.things:
            now = [torch.as_tensor(each).detach() for each in read(thing)]
            assert len(now) == len(numbers)
            assert all(torch.equal(a, b) for a, b in zip(now, numbers, strict=True)), f"{what} changed"


def some_tensor(state: pl.State, which: int) -> Tensor:
    found = tensors_of((state.params, state.opt_state["exp_avg"], state.opt_state["exp_avg_sq"]))
    tensor: Tensor = found[which % len(found)]
    return tensor


WAYS: dict[str, Callable[[Kept, pl.State, int], None]] = {
    "the State": lambda kept, state, i: kept.keep("a State", state),
    "the State in a tuple": lambda kept, state, i: kept.keep("a State in a tuple", (1, state)),
    "its parameters": lambda kept, state, i: kept.keep("a mapping", state.params),
    "its memory": lambda kept, state, i: kept.keep("a memory", state.opt_state),
    "a mapping in its memory": lambda kept, state, i: kept.keep("an inner mapping", state.opt_state["exp_avg"]),
    "a tensor": lambda kept, state, i: kept.keep("a tensor", some_tensor(state, i)),
    "a view": lambda kept, state, i: kept.keep("a view", some_tensor(state, i).view(-1)[:1]),
    "a detached tensor": lambda kept, state, i: kept.keep("a detached tensor", some_tensor(state, i).detach()),
    "an array": lambda kept, state, i: kept.keep(
        "an array", some_tensor(state, i).detach().numpy(), lambda array: [torch.from_numpy(array.copy())]
    ),
    "a list of views": lambda kept, state, i: kept.keep(
        "views", [tensor.t() if tensor.ndim == 2 else tensor[:1] for tensor in tensors_of(state.params)]
    ),
    "a storage": lambda kept, state, i: kept.keep(
        "a storage",
        some_tensor(state, i).untyped_storage(),
        lambda storage: [torch.empty(0).set_(storage).clone()],
    ),
    "a graph": lambda kept, state, i: kept.keep(
        "a graph",
        (state.params["0.weight"].detach().requires_grad_(), torch.ones(5, 4)),
        lambda pair: list(torch.autograd.grad((pair[0] * pair[0] * pair[1]).sum(), [pair[0]])),
    ),
    "a module": lambda kept, state, i: kept.keep("a module", state.module(), lambda module: list(module.parameters())),
}


def own_graph(kept: Kept, state: pl.State, which: int) -> None:
    """A graph saves the very tensor, not one that shares its storage."""
    tensor = some_tensor(state, which)
    factor = torch.ones_like(tensor).requires_grad_()
    product = (factor * tensor).sum()
    kept.keep(
        "a graph through a tensor itself",
        (factor, product),
        lambda pair: list(torch.autograd.grad(pair[1], [pair[0]], retain_graph=True)),
    )


def own_capsule(kept: Kept, state: pl.State, which: int) -> None:
    # Only what needs no gradient can be exported as it is.
    tensor = some_tensor(state, which)
    _keep_capsule(kept, tensor.detach() if tensor.requires_grad else tensor)


def capsule(kept: Kept, state: pl.State, which: int) -> None:
    _keep_capsule(kept, some_tensor(state, which).detach())


def _keep_capsule(kept: Kept, tensor: Tensor) -> None:
    held = torch.utils.dlpack.to_dlpack(tensor)
    numbers = tensor.clone()
    seen: list[Tensor] = []

    def read(held: Any) -> list[Any]:
        if not seen:
            seen.append(torch.utils.dlpack.from_dlpack(held))
        return seen

    kept.things.append(("a DLPack capsule", held, read, [numbers]))


WAYS["a capsule"] = capsule
WAYS["a capsule of a tensor itself"] = own_capsule
WAYS["a graph through a tensor itself"] = own_graph

EVENTS = [
    *(Event.FIT_START, Event.EPOCH_START, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_FORWARD),
    *(Event.AFTER_FORWARD, Event.AFTER_LOSS, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END),
    *(Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EVAL_START, Event.EVAL_END),
]
WHO = ["body", "callback", "algorithm", "forward"]


@st.composite
def keepings(draw: Any) -> tuple[str, str, Event, int, int]:
    return (
        draw(st.sampled_from(WHO)),
        draw(st.sampled_from(sorted(WAYS))),
        draw(st.sampled_from(EVENTS)),
        draw(st.integers(0, 14)),
        draw(st.integers(0, 11)),
    )


@settings(max_examples=60, deadline=None)
@given(
    keepings=st.lists(keepings(), min_size=1, max_size=4),
    watch=st.sampled_from([None, {Event.BATCH_END}, {Event.AFTER_TRAIN_BATCH}, {Event.EPOCH_END}, set(EVENTS)]),
    microbatch_size=st.sampled_from([None, 4]),
    consumer=st.sampled_from(["for", "next", "list", "pairs", "deque"]),
    evaluators=st.booleans(),
)
def test_what_was_kept_never_changes(
    keepings: list[Any], watch: Any, microbatch_size: Any, consumer: str, evaluators: bool
) -> None:
    kept = Kept()
    first_forward: list[Any] = [None]

    def keeps(who: str, event: Event, state: pl.State) -> None:
        for someone, way, when, batch, which in keepings:
            if someone == who and when is event and state.timestamp.batch == batch:
                WAYS[way](kept, state, which)

    def callback(event: Event, state: pl.State) -> None:
        keeps("callback", event, state)

    def handler(state: pl.State) -> pl.State:
        assert state.event is not None
        keeps("algorithm", state.event, state)
        return state

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first_forward[0] = (first_forward[0] or 0) + 1
            for someone, way, _, batch, which in keepings:
                if someone == "forward" and first_forward[0] == batch + 1:
                    weights = list(self.parameters())
                    weight = weights[which % len(weights)]
                    kept.keep(f"{way} in the forward", weight if "State" in way else weight.detach())
            out: Tensor = super().forward(x)
            return out

    torch.manual_seed(0)
    stream = fit(
        Model(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        watch=watch,
        microbatch_size=microbatch_size,
        callbacks=[callback],
        algorithms=[pl.algorithm(*EVENTS, name="keeper")(handler)],
        evaluators={"val": DATA[:1]} if evaluators else None,
        eval_interval="4ba",
    )
    if consumer == "for":
        for event, state in stream:
            keeps("body", event, state)
    elif consumer == "next":
        while (pair := next(stream, None)) is not None:
            keeps("body", *pair)
    elif consumer == "pairs":
        before = None
        for pair in stream:
            keeps("body", *pair)
            if before is not None:
                kept.keep("the pair before", before[1])
                kept.check()
                kept.things.pop()
            before = pair
    elif consumer == "list":
        pairs = [(pair, [tensor.clone() for tensor in tensors_of(pair[1])]) for pair in stream]
        for (_, state), numbers in pairs:
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
    else:
        last: deque[Any] = deque(maxlen=2)
        for pair in stream:
            last.append((pair, [tensor.clone() for tensor in tensors_of(pair[1])]))
            for (_, state), numbers in last:
                assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
        keeps("body", *last[-1][0])
    kept.check()


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize(
    "event",
    [Event.BATCH_END, Event.AFTER_TRAIN_BATCH, Event.BATCH_START, Event.AFTER_LOSS],
    ids=lambda e: e.value,
)
def test_each_way_of_keeping_keeps(way: str, event: Event) -> None:
    kept = Kept()
    for now, state in fit():
        if now is event and state.timestamp.batch in (3, 8):
            WAYS[way](kept, state, 0)
    kept.check()


@pytest.mark.parametrize("order", ["current", "2021"])
@pytest.mark.parametrize("event", [Event.INIT, Event.FIT_START], ids=lambda e: e.value)
def test_what_was_kept_before_the_first_step_stays(order: Any, event: Event) -> None:
    kept = Kept()
    for now, state in fit(order=order):
        if now is event:
            kept.keep("the parameters", dict(state.params))
    assert kept.things
    kept.check()


@pytest.mark.parametrize("watch", [{Event.BATCH_START}, {Event.AFTER_TRAIN_BATCH}, {Event.EPOCH_END}], ids=str)
def test_the_loop_variable_can_be_read_after_the_loop_and_after_an_interrupt(watch: Any) -> None:
    """Where the next State doesn't follow at once, it may never come."""
    state: Any = None
    for _, state in fit(watch=watch):  # noqa: B007
        pass
    assert torch.isfinite(state.params["0.weight"]).all()
    assert torch.isfinite(pl.run(fit(watch=watch)).params["0.weight"]).all()
    batches = 0

    class Interrupting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal batches
            batches += 1
            if batches == 9:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        for _, state in fit(Interrupting(4, 3), watch=watch):  # noqa: B007
            pass
    assert torch.isfinite(state.params["weight"]).all()


@pytest.mark.parametrize(
    "pick",
    [
        lambda stream: filter(lambda pair: pair[0] is Event.AFTER_TRAIN_BATCH, stream),
        lambda stream: islice(stream, 6, None, 5),
        lambda stream: filter(lambda pair: pair[0] is Event.BATCH_END, stream),
    ],
    ids=["filter", "islice", "filter ends"],
)
def test_what_picks_events_out_keeps_the_last_one(pick: Any) -> None:
    state: Any = None
    for _, state in pick(fit()):  # noqa: B007
        pass
    assert torch.isfinite(state.params["0.weight"]).all()


def test_a_function_that_closes_over_the_loop_variable_reads_it_while_the_step_runs(count: Count) -> None:
    state: Any = None

    def penalty(now: pl.State) -> pl.State:
        if state is None or now.timestamp.batch == 0:
            return now
        return now.replace(loss=now.loss + 0 * state.params["0.weight"].sum())

    def look(event: Event, now: pl.State) -> None:
        if state is not None:
            assert torch.isfinite(state.params["0.weight"]).all()

    algorithms = [pl.algorithm(Event.AFTER_LOSS, name="penalty")(penalty)]
    for _, state in fit(algorithms=algorithms, callbacks=[look]):  # noqa: B007
        pass
    assert count.reused == 0


def test_a_tensor_handed_to_another_process_stays() -> None:
    kept = Kept()
    for event, state in fit():
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            # What a multiprocessing queue does: it hands over a file, and keeps no reference here.
            file, size = state.params["0.weight"].untyped_storage()._share_fd_cpu_()
            received = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            kept.keep("what the other process sees", received)
    assert kept.things
    kept.check()


def test_a_part_of_a_partitions_memory_stays() -> None:
    optimizer = partition()
    kept = Kept()
    for event, state in fit(optimizer=optimizer):
        if event is Event.BATCH_END and state.timestamp.batch == 4:
            kept.keep("the memory of a part", state.opt_state["a"])
    assert kept.things
    kept.check()


@pytest.mark.parametrize("returned", ["parameters", "memory"])
def test_what_an_optimizer_of_ones_own_remembers_stays(count: Count, returned: str) -> None:
    """Where not all parameters are trained, the mapping of those that are is the optimizer's own."""
    kept = Kept()
    inner = pl.optim.sgd(lr=0.1, momentum=0.9)

    def remembering(update: Any) -> Any:
        def wrapped(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
            new, memory = update(grads, memory, params, timestamp)
            if timestamp.batch == 4:
                kept.keep(returned, new if returned == "parameters" else memory)
            return new, memory

        return wrapped

    optimizer = attrs.evolve(inner, update=remembering(inner.update), overwrite=remembering(inner.overwrite))
    model = plain()
    model[0].bias.requires_grad_(False)
    pl.run(fit(model, optimizer=optimizer))
    assert (count.copied, count.reused) == (1, 14)
    kept.check()


def test_leaves_that_were_kept_stay_where_the_module_has_others_by_then(count: Count) -> None:
    """What keeps the leaves is as much as the module has given up, so that the counts alone show nothing."""
    kept = Kept()

    @pl.algorithm(Event.AFTER_FORWARD)
    def keep(state: pl.State) -> pl.State:
        if state.timestamp.batch == 4 and not kept.things:
            kept.keep("leaves", (state.params, list(state.params.values())))
        return state

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def elsewhere(state: pl.State, stages: Any) -> pl.State:
        if state.timestamp.batch == 4:
            stages.gradients(state.replace(params={name: tensor / 2 for name, tensor in state.params.items()}))
        return state

    pl.run(fit(algorithms=[keep, elsewhere]))
    assert kept.things
    kept.check()
    assert (count.copied, count.reused) == (1, 14)


@pytest.mark.parametrize("batch", [0, 4])
def test_leaves_of_a_forward_that_failed_are_in_no_module(batch: int) -> None:
    """An algorithm goes on after the failure, with other parameters until the step."""
    fails = False
    before: list[Any] = []

    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise ZeroDivisionError
            return super().forward(x)

    @pl.algorithm(Event.BATCH_START)
    def fail(state: pl.State, stages: Any) -> pl.State:
        nonlocal fails
        if state.timestamp.batch != batch:
            return state
        fails = True
        with pytest.raises(ZeroDivisionError):
            stages.gradients(state)
        fails = False
        before.append(state.params)
        return state.replace(params={name: tensor / 2 for name, tensor in state.params.items()})

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def put_back(state: pl.State) -> pl.State:
        return state.replace(params=before.pop()) if before else state

    torch.manual_seed(0)
    model = Failing(4, 3)
    last = pl.run(fit(model, algorithms=[fail, put_back]))
    assert_same(last, pl.run(fit(model, algorithms=[fail, put_back], donate=False)))


@pytest.mark.parametrize("donate", ["auto", True])
def test_a_memory_that_an_algorithm_put_in_is_its_own(donate: Any) -> None:
    """It keeps mappings of the old memory, which would make up for what the State gave up."""
    kept = Kept()
    old = []

    @pl.algorithm(Event.BATCH_START)
    def replace(state: pl.State) -> pl.State:
        if state.timestamp.batch != 4:
            return state
        memory = optree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state.opt_state, namespace=NAMESPACE
        )
        old.extend(each for each in state.opt_state.values() if isinstance(each, FrozenDict))
        kept.keep("its tensors", tensors_of(memory))
        return state.replace(opt_state=memory)

    pl.run(fit(algorithms=[replace], donate=donate))
    assert kept.things
    kept.check()


@pytest.mark.parametrize("donate", ["auto", True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("batch", [0, 4])
def test_parameters_that_an_algorithm_put_in_are_its_own(donate: Any, frozen: bool, batch: int) -> None:
    kept = Kept()

    @pl.algorithm(Event.BATCH_START)
    def replace(state: pl.State) -> pl.State:
        if state.timestamp.batch != batch:
            return state
        params = {name: tensor / 2 for name, tensor in state.params.items()}
        kept.keep("its tensors", list(params.values()))
        return state.replace(params=params)

    model = plain()
    model[0].bias.requires_grad_(not frozen)
    last = pl.run(fit(model, algorithms=[replace], donate=donate))
    assert kept.things
    kept.check()
    assert_same(last, pl.run(fit(model, algorithms=[replace], donate=False)))


def test_locals_of_the_function_around_the_loop_stay() -> None:
    rate = 0.1
    settings_ = locals()
    for _event, _state in fit(optimizer=pl.optim.sgd(lr=rate)):
        pass
    assert settings_["rate"] == 0.1


def test_states_taken_one_by_one_are_kept() -> None:
    """``before`` looks like a loop variable to a count of references, and is none."""
    stream = fit(watch={Event.BATCH_END})
    first, second, third = (next(stream)[1] for _ in range(3))
    stream = fit(watch={Event.BATCH_END})
    _, a = next(stream)
    weights = a.params["0.weight"].clone()
    _, b = next(stream)
    _, c = next(stream)
    assert torch.equal(a.params["0.weight"], weights)
    for one, other in ((a, first), (b, second), (c, third)):
        assert_same(one, other)
    states = [state for _, state in islice(fit(watch={Event.BATCH_END}), 3)]
    for one, other in zip(states, (a, b, c), strict=True):
        assert_same(one, other)


def test_a_variable_that_takes_the_state_over_keeps_it() -> None:
    held, numbers = None, None
    for event, state in fit():
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 7:
            numbers = [tensor.clone() for tensor in tensors_of(state)]
            held, state = state, None
    assert numbers is not None
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(held), numbers, strict=True))


def test_a_thread_keeps_what_it_is_given() -> None:
    kept = Kept()
    threads = []
    go = threading.Event()

    def hold(state: pl.State) -> None:
        numbers = [tensor.clone() for tensor in tensors_of(state)]
        started.set()
        go.wait(30)
        kept.things.append(("a thread's State", state, tensors_of, numbers))

    for event, state in fit():
        if event is Event.BATCH_END:
            started = threading.Event()
            threads.append(threading.Thread(target=hold, args=(state,)))
            threads[-1].start()
            started.wait(30)
    go.set()
    for thread in threads:
        thread.join(30)
    assert len(kept.things) == 15
    kept.check()


def test_two_streams_from_one_state_leave_it_and_each_other_alone(count: Count) -> None:
    state = next(state for event, state in fit() if event is Event.BATCH_END and state.timestamp.batch == 4)
    numbers = [tensor.clone() for tensor in tensors_of(state)]
    streams = [fit(state), fit(state)]
    ends: list[Any] = [None, None]
    live = [0, 1]
    while live:
        for i in list(live):
            pair = next(streams[i], None)
            if pair is None:
                live.remove(i)
            else:
                ends[i] = pair[1]
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(state), numbers, strict=True))
    assert_same(ends[0], ends[1])
    assert_same(ends[0], pl.run(fit()))


def test_a_live_state_given_to_another_stream_stays() -> None:
    branch = None
    for event, state in fit():
        if event is Event.BATCH_END and state.timestamp.batch == 3:
            branch = fit(state)
            next(branch)
        if branch is not None and next(branch, None) is None:
            branch = None
    assert_same(state, pl.run(fit()))


def test_evaluating_the_live_state_costs_nothing_but_its_time(count: Count) -> None:
    for event, state in fit():
        if event is Event.BATCH_END:
            results = pl.run(pl.evaluate(state, DATA, loss=functional.cross_entropy)).metrics["eval"]
            assert torch.isfinite(results["loss"])
    assert_same(state, pl.run(fit(donate=False)))


# donate=True, and a step that fails half-way.


def test_donate_true_takes_the_memory_of_kept_states_and_they_say_so() -> None:
    kept = {}
    for event, state in fit(donate=True):
        if event is Event.BATCH_END:
            kept[state.timestamp.batch] = state
    assert_same(state.params, pl.run(fit()).params)
    for name in ("params", "opt_state"):
        with pytest.raises(pl.errors.DonatedStateError, match="donate=") as caught:
            getattr(kept[3], name)["0.weight"]
        assert isinstance(caught.value, RuntimeError)
    for touch in (
        lambda: kept[3].module(),
        lambda: kept[3].device,
        lambda: {**kept[3].params},
        lambda: list(kept[3].params),
        lambda: copy.deepcopy(kept[3]),
        lambda: fit(kept[3]),
        lambda: pl.run(pl.evaluate(kept[3], DATA, loss=functional.cross_entropy)),
        lambda: kept[3].params | {},
        lambda: kept[3].params.get("0.weight"),
        lambda: kept[3].params == {},
    ):
        with pytest.raises(pl.errors.DonatedStateError):
            touch()
    assert "overwritten" in repr(kept[3])
    assert kept[3].loss.item() > 0
    assert kept[3].timestamp.batch == 3


def test_donate_true_leaves_the_state_that_training_goes_on_from(count: Count) -> None:
    first = next(state for event, state in fit(donate=False) if event is Event.EPOCH_CHECKPOINT)
    expected = pl.run(fit(first, donate=False))
    assert_same(pl.run(fit(first, donate=True)), expected)
    assert_same(pl.run(fit(first, donate=True)), expected)


def test_donate_true_leaves_tensors_that_somebody_has_kept_and_what_algorithms_remember() -> None:
    """It takes the memory of States, not what others keep of it: an average that starts as the parameters."""

    @pl.algorithm(Event.BATCH_END, when="4ba", init=lambda state: state.params)
    def remember(state: pl.State) -> pl.State:
        return state.remember("remember", state.params)

    kept = Kept()
    for event, state in fit(donate=True, algorithms=[pl.algorithms.ema(half_life="3ba"), remember]):
        if event is Event.BATCH_END and state.timestamp.batch % 3 == 0:
            kept.keep("a tensor", state.params["0.weight"])
    kept.check()
    again = pl.run(fit(donate=False, algorithms=[pl.algorithms.ema(half_life="3ba"), remember]))
    assert_same(state, again)


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=str)
def test_a_step_that_fails_half_way_leaves_no_wrong_numbers(watch: Any) -> None:
    """The kernel has overwritten the parameters when the NaN is found: the loop variable's State says so."""

    def poison(state: pl.State) -> pl.State:
        if state.timestamp.batch != 6:
            return state
        return state.replace(grads={name: g * float("nan") for name, g in state.grads.items()})

    kept: Any = None
    numbers: list[Tensor] = []
    failed: Any = None
    poisoned = pl.algorithm(Event.AFTER_TRAIN_BATCH, name="poison")(poison)
    try:
        for event, state in fit(algorithms=[poisoned], watch=watch):
            if event is Event.BATCH_END and state.timestamp.batch == 4:
                kept = state
                numbers = [tensor.clone() for tensor in tensors_of(state)]
    except pl.NonFiniteError as error:
        failed = error
    assert "batch 6" in str(failed)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(kept), numbers, strict=True))
    with pytest.raises(pl.errors.DonatedStateError):
        state.params["0.weight"]
    assert "overwritten" in repr(state)


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"precision": "amp_fp16"}], ids=str)
def test_a_step_that_may_be_left_out_copies(count: Count, options: Any) -> None:
    pl.run(fit(**options))
    assert count.reused == 0


@pytest.mark.parametrize("donate", ["yes", None, 1, "True"])
def test_other_values_are_refused(donate: Any) -> None:
    with pytest.raises(pl.ArgumentError, match="donate="):
        fit(donate=donate)


# Reading the consumer.


def test_an_optimizer_of_ones_own_copies_and_trains(count: Count) -> None:
    optimizer = pl.optim.from_torch(torch.optim.Adagrad, lr=0.1)
    assert_same(pl.run(fit(optimizer=optimizer)), pl.run(fit(optimizer=optimizer, donate=False)))
    assert count.reused == 0


def test_a_traced_loop_copies(count: Count) -> None:
    """A debugger reads the loop's variables, and may write them back."""
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        pl.run(fit())
    finally:
        sys.settrace(before)
    assert count.reused == 0


def test_the_variables_of_the_loop_are_not_kept_by_looking_at_them() -> None:
    """Reading a frame's variables makes a copy of them, which must not outlive the look."""
    big = [torch.zeros(10)]
    alive = weakref.ref(big[0])
    for event, state in fit():
        if event is Event.AFTER_TRAIN_BATCH and state.timestamp.batch == 3:
            big.clear()
        if state.timestamp.batch == 4:
            assert alive() is None
    assert gives_up(None, 1) is False


def test_memory_stays_that_of_one_update() -> None:
    """With donation there is one set of parameters and moments, not two."""
    model = nn.Linear(300, 300)
    size = sum(p.numel() * 4 for p in model.parameters())
    data = [(torch.zeros(2, 300), torch.zeros(2, dtype=torch.int64))] * 2
    most = 0
    with without_collector():
        for event, state in fit(model, data=data, max_duration="4ep"):
            if event in (Event.AFTER_TRAIN_BATCH, Event.BATCH_END) and state.timestamp.batch > 3:
                most = max(most, live_tensors()[1])
    # Parameters, two moments and the gradients, and a little.
    assert most <= 4.2 * size, f"{most / size:.2f} times the parameters"


def test_mappings_that_were_overwritten_are_frozen_dicts_still() -> None:
    assert isinstance(pl.frozendict.OVERWRITTEN, FrozenDict)
    assert "overwritten" in repr(pl.frozendict.OVERWRITTEN)
