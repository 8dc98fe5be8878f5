"""Where only the loop variable holds a State, a graph writes where its numbers are; what was kept never changes.

Law 2 decides: what was kept has the bits of a copy that was made when it was kept.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import ema
from pure_loop.compile.trees import Memory
from pure_loop.optim.optimizer import rate_at
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import can_count
from tests.support.compiling import BATCHES, EPOCHS, net
from tests.support.donating import CONSUMERS, DATA, WAYS, Kept, consume, plain, tensors_of
from tests.support.problem import cross_entropy
from tests.support.streams import assert_same, frozen_copy
from tests.support.tiers import examples

pytestmark = [
    pytest.mark.usefixtures("interpreted", "every_gradient_is_large"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

INSIDE: list[Any] = [{Event.AFTER_TRAIN_BATCH, *BATCHES}, {Event.AFTER_BACKWARD, *BATCHES}, None]
# What these write to besides is no mapping: counts that are fields themselves, and a loss scale.
SCALED: dict[str, Any] = {"nonfinite": "skip", "precision": "amp_fp16"}
NAN = [*DATA[:3], (DATA[3][0] * float("nan"), DATA[3][1])]
ONCE = [True] + [False] * 14  # the first step is given the memory of the model


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which of the times that a graph asked for memory it was given copies."""
    asked: list[bool] = []
    real = Ownership.writable_or_copies

    def own(this: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        given = real(this, tensors, alone)
        asked.append(given is not tensors)
        return given

    monkeypatch.setattr(Ownership, "writable_or_copies", own)
    return asked


def norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def fit(model: Any = None, data: Any = DATA, **options: Any) -> Any:
    settings = {"max_duration": "3ep", "optimizer": pl.optim.adamw(lr=0.1), "watch": BATCHES, "compile": True}
    return pl.fit(plain() if model is None else model, data, loss=cross_entropy, **settings | options)


def go_through(stream: Any) -> Any:
    state: Any = None
    for _, state in stream:  # noqa: B007
        pass
    return state


REUSED: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "batches": ({}, ONCE),
    "after train batch": ({"watch": INSIDE[0]}, ONCE),
    "after backward": ({"watch": INSIDE[1]}, ONCE),
    "all events": ({"watch": INSIDE[2]}, ONCE),
    "counts and scales": ({"watch": INSIDE[0], **SCALED}, ONCE),
    "epochs, whose States may be kept": ({"watch": EPOCHS}, ([True] + [False] * 4) * 3),
    "several steps a call": ({"watch": EPOCHS, "steps_per_call": 3}, [True] * 3),  # those that follow do not ask
    "no donation": ({"donate": False}, []),
}


def test_memory_is_reused_where_it_was_not_kept(copied: list[bool]) -> None:
    for name, (settings, wanted) in REUSED.items():
        copied.clear()
        go_through(fit(plain() if "watch" in settings else norm(), **settings))
        assert copied == wanted, name
    for consumer in (pl.run, lambda stream: [1 for _event, _state in stream]):
        copied.clear()
        consumer(fit(norm()))
        assert copied == ONCE


def test_memory_is_copied_where_all_states_are_kept_and_they_stay(copied: list[bool]) -> None:
    kept = [(state, frozen_copy(state)) for _, state in fit(norm(), algorithms=[ema(half_life="2ba")])]
    assert copied == [True] * 15
    for state, before in kept:
        assert_same(state, before, "a State that was kept")


def test_a_step_in_place_trains_as_one_that_copies() -> None:
    for optimizer in (pl.optim.adamw(lr=0.1), pl.optim.sgd(lr=0.1, momentum=0.9)):
        options = {"optimizer": optimizer, "microbatch_size": 4}
        one, other = (pl.run(fit(norm(), donate=donate, **options)) for donate in ("auto", False))
        assert_same(one, other, "with donation and without")


def test_references_are_counted_at_all_events_of_the_first_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Ownership] = []
    real = Ownership.__init__
    monkeypatch.setattr(
        Ownership, "__init__", lambda this, *given, **more: (real(this, *given, **more), made.append(this))[0]
    )
    pl.run(fit(norm(), watch=EPOCHS))
    assert Event.BATCH_END not in made[0].counted


# What is kept.


def numbers_of(scale: Any) -> list[Tensor]:
    return [] if scale is None else [scale.growth_tracker, scale.scale]


def average(state: pl.State) -> Any:
    return state.algorithm_state["ema"]


KEPT: dict[str, Callable[[Kept, pl.State, int], None]] = {
    # Graphs that are kept go through a layer of another shape there.
    **{name: way for name, way in WAYS.items() if not name.startswith("a graph")},
    "an average": lambda kept, state, _: kept.keep("an average", average(state)),
    "all memory of algorithms": lambda kept, state, _: kept.keep("algorithms", state.algorithm_state),
    "a tensor of an average": lambda kept, state, i: kept.keep("a tensor", tensors_of(average(state))[i % 3]),
    "buffers": lambda kept, state, _: kept.keep("buffers", state.buffers),
    "a buffer": lambda kept, state, _: kept.keep("a buffer", state.buffers["1.running_mean"][:1]),
    "a count": lambda kept, state, _: kept.keep("a count", state.skipped),
    "a view of a count": lambda kept, state, _: kept.keep("a view of a count", state.skipped.view(1)),
    "a loss scale": lambda kept, state, _: kept.keep("a loss scale", state.loss_scale, numbers_of),
    "a number of it": lambda kept, state, i: kept.keep("a number", numbers_of(state.loss_scale)[i % 2 :][:1]),
}


@pytest.mark.parametrize("settings", [{}, SCALED], ids=["plain", "scaled"])
def test_each_way_of_keeping_keeps(settings: Any) -> None:
    """One after the other, in one run."""
    kept, ways = Kept(), sorted(KEPT)
    for _, state in fit(norm(), max_duration="12ep", algorithms=[ema(half_life="3ba")], **settings):
        index, which = divmod(state.timestamp.batch - 1, 2)
        if which == 0 and index < len(ways):
            KEPT[ways[index]](kept, state, index)
    assert len(kept.things) == len(ways)
    kept.check()


KEEPING = st.tuples(
    st.sampled_from(["body", "callback", "algorithm"]),
    st.sampled_from(sorted(KEPT)),
    st.sampled_from([Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, *INSIDE[0]]),
    *(st.integers(0, 14), st.integers(0, 11)),
)


@pytest.mark.slow
@examples(10, 300)
@given(
    keepings=st.lists(KEEPING, min_size=1, max_size=4),
    watch=st.sampled_from([BATCHES, EPOCHS, {Event.BATCH_START, *BATCHES}, {Event.EVAL_END, *BATCHES}, *INSIDE]),
    consumer=st.sampled_from(CONSUMERS),
    steps=st.sampled_from([1, 3]),
    settings=st.sampled_from([{}, {"nonfinite": "skip"}, SCALED, {"evaluators": {"val": DATA[:1]}}]),
)
def test_what_was_kept_never_changes(keepings: Any, watch: Any, consumer: str, steps: int, settings: Any) -> None:
    """Whoever keeps it, wherever: seconds an example."""
    kept = Kept()

    def keeps(who: str, event: Event, state: pl.State) -> None:
        for holder, way, when, batch, which in keepings:
            if holder == who and when is event and state.timestamp.batch == batch:
                KEPT[way](kept, state, which)

    class Watching(pl.Callback):
        def epoch_end(self, state: pl.State, _: Any) -> None:
            keeps("callback", Event.EPOCH_END, state)

        def batch_end(self, state: pl.State, _: Any) -> None:
            keeps("callback", Event.BATCH_END, state)

    def handler(state: pl.State) -> pl.State:
        keeps("algorithm", Event.EPOCH_END, state)  # an event that is never inside a graph
        return state

    stream = fit(
        norm(),
        watch=watch,
        callbacks=[Watching()] if any(each[0] == "callback" for each in keepings) else [],
        algorithms=[ema(half_life="3ba"), pl.algorithm(Event.EPOCH_END, name="keeper")(handler)],
        eval_interval="4ba",
        steps_per_call=steps,
        **settings,
    )
    consume(stream, consumer, keeps, kept)
    kept.check()


def test_counting_that_sees_no_reference_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "alone", lambda *_: True)
    kept = Kept()
    for _, state in fit(norm()):
        kept.keep("a tensor", state.params["0.weight"])
    with pytest.raises(AssertionError, match="a tensor changed"):
        kept.check()


def test_weights_that_an_algorithm_puts_in_are_not_the_memory_of_a_graph() -> None:
    """Whoever keeps the old ones, too, may make up for the references that were lost when they were replaced."""
    for old_kept in (1, 2, 3):
        assert_put_in(old_kept)


def assert_put_in(old_kept: int) -> None:
    kept = Kept()
    old: list[Any] = []

    @pl.algorithm(Event.BATCH_START)
    def puts_in(state: pl.State) -> pl.State:
        new = state.replace(params={name: tensor.clone() for name, tensor in state.params.items()})
        old.extend(list(state.params.values()) for _ in range(old_kept))
        kept.keep("new ones", new.params)
        return new

    go_through(fit(watch={Event.BATCH_START, *BATCHES}, algorithms=[puts_in], optimizer=pl.optim.sgd(lr=0.1)))
    kept.check()


NUMBERS: tuple[Callable[[Any], Tensor], ...] = (
    lambda t: rate_at("a rate", lambda t: float(t.batch), t),
    lambda t: rate_at("a rate", lambda t: float(t.batch), t).expand(2),
    lambda t: torch.zeros(()) + t.batch,
    lambda t: torch.where(torch.tensor(True), t.batch, 0),
    lambda t: torch.zeros(2).fill_(t.batch),
)


@pytest.mark.parametrize("where", [Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH], ids=lambda event: event.name)
def test_a_number_of_the_step_as_an_output_stays_what_it_was(where: Event) -> None:
    """The graph takes numbers from memory that is written anew for the next step."""

    def shows(state: pl.State) -> pl.State:
        return state.replace(outputs=(state.outputs[0], *(way(state.timestamp) for way in NUMBERS)))

    model = net(lambda self, x: (self.one(x),))()
    options = {"watch": {Event.BEFORE_LOSS, *BATCHES} if where is Event.AFTER_FORWARD else BATCHES}
    loss = lambda outputs, targets: cross_entropy(outputs[0], targets)  # noqa: E731
    stream = pl.fit(
        *(model, DATA),
        loss=loss,
        optimizer=pl.optim.sgd(lr=0.1),
        max_duration="2ep",
        algorithms=[pl.Algorithm("shows", {where: shows})],
        compile=True,
        **options,
    )
    kept = [(state.timestamp.batch - (event is Event.BATCH_END), state.outputs[1:]) for event, state in stream]
    assert len(kept) >= 10
    assert all((each == batch).all() for batch, shown in kept for each in shown)


@attrs.frozen(eq=False, kw_only=True)
class Summing(pl.State):
    """A user's own State, with a tensor and a mapping."""

    total: Any = None
    seen: Any = None


@attrs.frozen(eq=False, kw_only=True, slots=False)
class Roomy(pl.State):
    """The same without slots."""

    total: Any = None
    seen: Any = None


@pl.algorithm(Event.AFTER_TRAIN_BATCH, name="sums")
def sums(state: Any) -> Any:
    return state.replace(total=state.total + state.loss, seen=FrozenDict(batches=state.seen["batches"] + 1))


@pytest.mark.parametrize("cls", [Summing, Roomy])
def test_memory_in_fields_of_a_users_own_is_reused_where_it_was_not_kept(cls: Any, copied: list[bool]) -> None:
    def summing() -> Any:
        return cls.create(norm()).replace(total=torch.zeros(()), seen=FrozenDict(batches=torch.zeros(2)))

    assert pl.run(fit(summing(), algorithms=[sums])).seen["batches"].tolist() == [15, 15]
    if cls is Summing:
        assert copied == ONCE
    for read in (lambda state: state.total, lambda state: state.seen, lambda state: state.seen["batches"]):
        kept = Kept()
        for _, state in fit(summing(), algorithms=[sums]):
            kept.keep("a field", read(state))
        kept.check()


@pl.algorithm(Event.BATCH_END, when="3ba", init=lambda state: torch.zeros(2))
def now_and_then(state: pl.State) -> pl.State:
    return state.remember("now_and_then", state.algorithm_state["now_and_then"] + 1)


@pytest.mark.parametrize("steps", [1, 4])
def test_memory_that_only_some_graphs_write_to_is_theirs_first(steps: int) -> None:
    """The first graphs read it, so that it is still the State's that the user was shown."""
    kept = Kept()
    stream = fit(watch={Event.EPOCH_START, Event.FIT_END}, algorithms=[now_and_then], steps_per_call=steps)
    for _, state in stream:
        kept.keep("memory", state, lambda state: [state.algorithm_state["now_and_then"]])
    kept.check()
    assert state.algorithm_state["now_and_then"].tolist() == [5, 5]


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_what_was_noted_for_a_graph_that_there_is_not_is_not_used_in_the_next_step(microbatch_size: Any) -> None:
    """The update can't be traced, and runs eagerly."""

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        if float(sum(tensor.sum() for tensor in params.values())) > 1e9:
            raise ArithmeticError
        return {name: tensor - 0.1 * grads[name] for name, tensor in params.items()}, memory

    mine = pl.optim.Optimizer(name="mine", init=lambda params: {}, update=update, lr=lambda timestamp: 0.1)
    kept = Kept()
    options = {"optimizer": mine, "compile": "where possible", "microbatch_size": microbatch_size}
    for event, state in fit(watch=INSIDE[1], **options):
        if event is Event.AFTER_BACKWARD:
            kept.keep("gradients", state, lambda state: list(state.grads.values()))
    kept.check()


def test_the_live_state_can_be_evaluated_and_gone_on_from() -> None:
    rest: Any = None
    for _, state in fit(norm()):
        if state.timestamp.batch == 4:
            evaluated = pl.run(pl.evaluate(state, DATA, loss=cross_entropy))
            assert torch.isfinite(evaluated.metrics["eval"]["loss"])
            rest = pl.run(fit(state))
    assert_same(rest, state, "resumed from a live State")


# What a step that failed had overwritten.


class Looking(pl.Callback):
    def before_forward(self, state: Any, logger: Any) -> None:
        pass


def failed(**options: Any) -> tuple[Any, Any]:
    """The State whose memory a step that failed had taken, and one that was kept before."""
    kept: Any = None
    state: Any = None
    with pytest.raises(pl.NonFiniteError, match="batch 3"):  # noqa: PT012 - it is the loop that fails
        for event, state in fit(data=NAN, **options):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                kept = state
    return state, kept


READS: tuple[Callable[[Any], Any], ...] = (
    lambda state: state.params["0.weight"],
    lambda state: list(state.opt_state.values()),
    lambda state: state.grads["0.weight"],
    lambda state: state.params != {},
    lambda state: float(state.loss_scale),
    lambda state: state.loss_scale.scale,
    lambda state: int(state.skipped),
    lambda state: state.skipped.item(),
    lambda state: state.skipped + 1,
    lambda state: torch.ones(()) + state.skipped,
    lambda state: state.skipped > 0,
    lambda state: bool(state.skipped),
    lambda state: divmod(7, state.skipped),
    lambda state: 1 & state.skipped,
    lambda state: round(state.skipped),
    lambda state: f"{state.skipped:.2f}",
    lambda state: numpy.asarray(state.skipped),
    lambda state: state.skipped == 0,
    lambda state: torch.stack([state.skipped]),
    lambda state: copy.deepcopy(state.skipped),
    pickle.dumps,
)


def test_to_read_what_a_step_that_failed_had_overwritten_is_an_error() -> None:
    state, kept = failed(precision="amp_fp16")
    for number, read in enumerate(READS):
        with pytest.raises(pl.errors.DonatedStateError, match=r"overwritten by (a|the) step|let go when batch 3"):
            pytest.fail(f"{number}: {read(state)!r}")
    assert "overwritten" in f"{state} {state.skipped}"
    assert kept.grads["0.weight"].any()


@pytest.mark.parametrize("callbacks", [[], [Looking()]], ids=["one graph", "pieces"])
def test_gradients_of_the_batch_before_are_given_up_when_a_step_begins(callbacks: Any) -> None:
    """What is read after a step that failed says so; what was kept stays."""
    state, kept = failed(watch={Event.EPOCH_START, *BATCHES}, callbacks=callbacks)
    assert state.timestamp.batch == 3
    for read in READS[:3]:
        with pytest.raises(pl.errors.DonatedStateError):
            read(state)
    assert state.loss.item() > 0
    assert kept.grads["0.weight"].any()
