"""Donation to compiled steps: where only the loop variable holds the State, the graph writes where its numbers are.

Law 2 decides, as in test_donation: what was kept has the bits of a copy that was made when it was kept.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any
from weakref import ref

import attrs
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event, FrozenDict
from pure_loop.algorithms import ema
from pure_loop.stages.ownership import Ownership
from pure_loop.stages.references import can_count
from pure_loop.state import raw_opt_state, raw_params
from tests.support.donating import (
    CONSUMERS,
    DATA,
    WAYS,
    Kept,
    a_comprehension,
    a_for_loop,
    a_while_loop,
    consume,
    plain,
    tensors_of,
    through_a_generator,
    with_progress,
)
from tests.support.streams import assert_same
from tests.support.tiers import examples, tiers

pytestmark = [
    pytest.mark.usefixtures("interpreted", "every_gradient_is_large"),
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
]

BATCHES = {Event.BATCH_END}
INSIDE = [{Event.AFTER_TRAIN_BATCH, *BATCHES}, {Event.AFTER_BACKWARD, *BATCHES}, None]


class Copied:
    """Which of the times that a graph asked for memory it was given copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[bool] = []
        real = Ownership.writable_or_copies

        def own(this: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
            given = real(this, tensors, alone)
            self.asked.append(given is not tensors)
            return given

        monkeypatch.setattr(Ownership, "writable_or_copies", own)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Copied:
    return Copied(monkeypatch)


def norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def fit(model: Any = None, **arguments: Any) -> Any:
    arguments.setdefault("max_duration", "3ep")
    arguments.setdefault("optimizer", pl.optim.adamw(lr=0.1))
    arguments.setdefault("watch", BATCHES)
    arguments.setdefault("compile", True)
    model = plain() if model is None else model
    return pl.fit(model, arguments.pop("data", DATA), loss=functional.cross_entropy, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "watch",
    tiers([BATCHES, {Event.BATCH_START, *BATCHES}, {*BATCHES, Event.EPOCH_END}, *INSIDE], [BATCHES, *INSIDE[1:]]),
    ids=["batches", "starts", "epochs", "after train batch", "after backward", "all"],
)
def test_memory_is_reused_where_it_was_not_kept(copied: Copied, watch: Any) -> None:
    for consumer in (a_for_loop, a_while_loop, a_comprehension, through_a_generator, with_progress, pl.run):
        copied.asked.clear()
        consumer(fit(norm(), watch=watch))
        # The first step is given the memory of the model.
        assert copied.asked == [True] + [False] * 14, consumer


@pytest.mark.slow
def test_what_a_graph_reads_is_not_noted_as_read_by_the_consumer() -> None:
    noted = []
    for event, state in fit(norm(), watch=None, microbatch_size=3, strict=False):
        if state.timestamp.batch >= 2:  # what the run began with counts as read
            noted += [event for raw in (raw_params, raw_opt_state) if getattr(raw(state), "lent", None)]
    assert not noted


@pytest.mark.slow
@pytest.mark.parametrize("watch", [{Event.EPOCH_END}, BATCHES], ids=["epochs", "batches"])
def test_references_are_counted_at_all_events_of_the_first_batch_alone(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Ownership] = []
    real = Ownership.__init__

    def init(this: Ownership, *arguments: Any, **settings: Any) -> None:
        real(this, *arguments, **settings)
        made.append(this)

    monkeypatch.setattr(Ownership, "__init__", init)
    pl.run(fit(norm(), watch=watch))
    assert Event.BATCH_END not in made[0].counted


# What these write to besides is no mapping: counts that are fields themselves, and a loss scale.
SCALED: dict[str, Any] = {"nonfinite": "skip", "precision": "amp_fp16"}


@pytest.mark.slow
@pytest.mark.parametrize("watch", [BATCHES, *INSIDE], ids=["batches", "after train batch", "after backward", "all"])
@pytest.mark.parametrize(
    "settings", tiers([{"nonfinite": "skip"}, {"precision": "amp_fp16"}, SCALED], [SCALED]), ids=str
)
def test_memory_is_reused_with_counts_and_scales(copied: Copied, settings: Any, watch: Any) -> None:
    # What a forward writes to, a step that may be skipped writes to as well, in another graph, and that copies.
    a_for_loop(fit(norm() if watch == BATCHES else plain(), watch=watch, **settings))
    assert copied.asked == [True] + [False] * 14


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


def summing(cls: Any) -> pl.State:
    state: pl.State = cls.create(norm()).replace(total=torch.zeros(()), seen=FrozenDict(batches=torch.zeros(2)))
    return state


def test_memory_in_fields_of_a_users_own_is_reused(copied: Copied) -> None:
    last: Any = pl.run(fit(summing(Summing), algorithms=[sums]))
    assert copied.asked == [True] + [False] * 14
    assert last.seen["batches"].tolist() == [15, 15]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "what"),
    [*itertools.product([Summing, Roomy], ["total", "seen", "batches"]), (Roomy, "all fields")],
)
def test_fields_of_a_users_own_that_were_kept_never_change(cls: Any, what: str) -> None:
    kept = Kept()
    for _, state in fit(summing(cls), algorithms=[sums]):
        if what == "all fields":
            kept.keep(what, vars(state), lambda fields: tensors_of(list(fields.values())))
        else:
            kept.keep(what, state.seen["batches"] if what == "batches" else getattr(state, what))
    kept.check()


READS: dict[str, Callable[[Any], Any]] = {
    "a mapping": lambda state: state.params["0.weight"],
    "a loss scale": lambda state: float(state.loss_scale),
    "a part of it": lambda state: state.loss_scale.scale,
    "a count": lambda state: int(state.skipped),
    "its item": lambda state: state.skipped.item(),
    "a sum": lambda state: state.skipped + 1,
    "a sum with a tensor": lambda state: torch.ones(()) + state.skipped,
    "a comparison": lambda state: state.skipped > 0,
    "a truth": lambda state: bool(state.skipped),
    "a quotient with a rest": lambda state: divmod(7, state.skipped),
    "a bit": lambda state: 1 & state.skipped,
    "a rounded number": lambda state: round(state.skipped),
    "a number written out": lambda state: f"{state.skipped:.2f}",
    "an array": lambda state: numpy.asarray(state.skipped),
    "a mapping's difference": lambda state: state.params != {},
    "an equality": lambda state: state.skipped == 0,
    "a function of torch": lambda state: torch.stack([state.skipped]),
    "a copy": lambda state: copy.deepcopy(state.skipped),
    "all of it": pickle.dumps,
}


@pytest.fixture(scope="module")
def overwritten(interpreted: None) -> Any:
    """A State whose memory a step that failed had taken."""
    state: Any = None
    data = [*DATA[:3], (DATA[3][0] * float("nan"), DATA[3][1])]
    with pytest.raises(pl.NonFiniteError, match="batch 3"):
        for _, state in fit(data=data, precision="amp_fp16"):  # noqa: B007
            pass
    return state


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_to_read_what_a_step_that_failed_had_overwritten_is_an_error(overwritten: Any, read: Any) -> None:
    with pytest.raises(pl.errors.DonatedStateError, match=r"overwritten by (a|the) step"):
        read(overwritten)
    assert "overwritten" in f"{overwritten} {overwritten.skipped}"


@pytest.mark.parametrize(
    "optimizer", [pl.optim.adamw(lr=0.1), pl.optim.sgd(lr=0.1, momentum=0.9)], ids=lambda optimizer: optimizer.name
)
def test_a_step_in_place_trains_as_one_that_copies(copied: Copied, optimizer: Any) -> None:
    one, other = (
        pl.run(fit(norm(), optimizer=optimizer, donate=donate, microbatch_size=4)) for donate in ("auto", False)
    )
    assert copied.asked == [True] + [False] * 14
    assert_same(one, other, "with donation and without")


@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_what_was_noted_for_a_graph_that_there_is_not_is_not_used_in_the_next_step(microbatch_size: Any) -> None:
    """The update can't be traced, and runs eagerly."""

    def update(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        if float(sum(tensor.sum() for tensor in params.values())) > 1e9:
            raise ArithmeticError
        return {name: tensor - 0.1 * grads[name] for name, tensor in params.items()}, memory

    mine = pl.optim.Optimizer(name="mine", init=lambda params: {}, update=update, lr=pl.optim.sgd(lr=0.1).lr)
    kept = Kept()
    watch = {Event.AFTER_BACKWARD, *BATCHES}
    options = {"optimizer": mine, "watch": watch, "compile": "where possible", "microbatch_size": microbatch_size}
    for event, state in fit(**options):
        if event is Event.AFTER_BACKWARD:
            kept.keep("gradients", state, lambda state: list(state.grads.values()))
    kept.check()


class Looking(pl.Callback):
    def before_forward(self, state: Any, logger: Any) -> None:
        pass


@pytest.mark.parametrize("watch", [BATCHES, {Event.EPOCH_START, *BATCHES}], ids=["batches", "epochs"])
@pytest.mark.parametrize("callbacks", [[], [Looking()]], ids=["one graph", "pieces"])
def test_gradients_of_the_batch_before_are_given_up_when_a_step_begins(watch: Any, callbacks: Any) -> None:
    """What is read after a step that failed says so; what was kept stays."""
    data = [*DATA[:3], (torch.full_like(DATA[3][0], float("nan")), DATA[3][1])]
    states = []
    with pytest.raises(pl.NonFiniteError):  # noqa: PT012 - it is the loop that fails
        for event, state in fit(data=data, watch=watch, callbacks=callbacks):
            if event is Event.BATCH_END and state.timestamp.batch == 2:
                states.append(state)
    assert state.timestamp.batch == 3
    with pytest.raises(pl.errors.DonatedStateError):
        state.grads["0.weight"]
    assert states[0].grads["0.weight"].any()


def test_gradients_of_the_batch_before_are_gone_when_the_next_ones_are_computed() -> None:
    gradients: list[Any] = []
    alive: list[bool] = []

    class Looks(pl.Callback):
        def before_forward(self, state: pl.State, logger: Any) -> None:
            if len(gradients) > 1:  # in the second batch the loop has yet to see how large they are
                alive.append(gradients[-1]() is not None)

    for _event, state in fit(watch=BATCHES, callbacks=[Looks()]):
        gradients.append(ref(state.grads["0.weight"]))
    assert alive
    assert not any(alive)


def average_of(state: pl.State) -> Any:
    return state.algorithm_state["ema"]


def numbers_of(scale: Any) -> list[Tensor]:
    return [] if scale is None else [scale.growth_tracker, scale.scale]


MORE: dict[str, Callable[[Kept, pl.State, int], None]] = {
    "an average": lambda kept, state, _: kept.keep("an average", average_of(state)),
    "all memory of algorithms": lambda kept, state, _: kept.keep("algorithms", state.algorithm_state),
    "a tensor of an average": lambda kept, state, i: kept.keep(
        "a tensor of an average", (found := tensors_of(average_of(state)))[i % len(found)]
    ),
    "buffers": lambda kept, state, _: kept.keep("buffers", state.buffers),
    "a buffer": lambda kept, state, _: kept.keep("a buffer", state.buffers["1.running_mean"][:1]),
    "a count": lambda kept, state, _: kept.keep("a count", state.skipped),
    "a view of a count": lambda kept, state, _: kept.keep("a view of a count", state.skipped.view(1)),
    "a loss scale": lambda kept, state, _: kept.keep("a loss scale", state.loss_scale, numbers_of),
    "a number of a loss scale": lambda kept, state, i: kept.keep("a number", numbers_of(state.loss_scale)[i % 2 :][:1]),
}

# Graphs that are kept go through a layer of another shape there.
ALL = {name: way for name, way in {**WAYS, **MORE}.items() if not name.startswith("a graph")}


@pytest.mark.parametrize("settings", [{}, SCALED], ids=str)
def test_each_way_of_keeping_keeps(settings: Any) -> None:
    """One after the other, in one run."""
    kept = Kept()
    ways = sorted(ALL)
    for event, state in fit(norm(), max_duration="12ep", algorithms=[ema(half_life="3ba")], **settings):
        assert event is Event.BATCH_END
        index, which = divmod(state.timestamp.batch - 1, 2)
        if which == 0 and index < len(ways):
            ALL[ways[index]](kept, state, index)
    assert len(kept.things) == len(ways)
    kept.check()


@pytest.mark.slow
@examples(7, 200)
@given(
    keepings=st.lists(
        st.tuples(
            st.sampled_from(["body", "callback", "algorithm"]),
            st.sampled_from(sorted(ALL)),
            st.sampled_from([Event.BATCH_START, Event.BATCH_END, Event.EPOCH_END, Event.EVAL_END, *INSIDE[0]]),
            st.integers(0, 14),
            st.integers(0, 11),
        ),
        min_size=1,
        max_size=4,
    ),
    watch=st.sampled_from(
        [BATCHES, {Event.EPOCH_END}, {Event.BATCH_START, *BATCHES}, {Event.EVAL_END, *BATCHES}, *INSIDE]
    ),
    consumer=st.sampled_from(CONSUMERS),
    evaluators=st.booleans(),
    steps=st.sampled_from([1, 3]),
    settings=st.sampled_from([{}, {"nonfinite": "skip"}, SCALED]),
)
def test_what_was_kept_never_changes(
    keepings: Any, watch: Any, consumer: str, evaluators: bool, steps: int, settings: Any
) -> None:
    kept = Kept()

    def keeps(who: str, event: Event, state: pl.State) -> None:
        for holder, way, when, batch, which in keepings:
            if holder == who and when is event and state.timestamp.batch == batch:
                ALL[way](kept, state, which)

    def callback(event: Event, state: pl.State) -> None:
        if watch is None or event in watch:
            keeps("callback", event, state)

    def handler(state: pl.State) -> pl.State:
        keeps("algorithm", Event.EPOCH_END, state)  # an event that is never inside a graph
        return state

    class Watching(pl.Callback):
        def epoch_end(self, state: pl.State, _: Any) -> None:
            callback(Event.EPOCH_END, state)

        def batch_end(self, state: pl.State, _: Any) -> None:
            callback(Event.BATCH_END, state)

    stream = fit(
        norm(),
        watch=watch,
        callbacks=[Watching()] if any(each[0] == "callback" for each in keepings) else [],
        algorithms=[ema(half_life="3ba"), pl.algorithm(Event.EPOCH_END, name="keeper")(handler)],
        evaluators={"val": DATA[:1]} if evaluators else None,
        eval_interval="4ba",
        steps_per_call=steps,
        **settings,
    )
    consume(stream, consumer, keeps, kept)
    kept.check()


def test_counting_that_sees_no_reference_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from pure_loop.compile.trees import Memory

    monkeypatch.setattr(Memory, "alone", lambda *_: True)
    kept = Kept()
    for _, state in fit(norm()):
        kept.keep("a tensor", state.params["0.weight"])
    with pytest.raises(AssertionError, match="a tensor changed"):
        kept.check()


@pytest.mark.parametrize("stop", [6, 9])
def test_a_step_that_fails_half_way_leaves_no_wrong_numbers(stop: int) -> None:
    data = [(x * float("nan") if i == 1 else x, y) for i, (x, y) in enumerate(DATA)]
    state: Any = None
    with pytest.raises(pl.NonFiniteError, match=f"batch {stop} "):
        for _, state in fit(norm(), data=[*[*DATA, *DATA][:stop], data[1]]):  # noqa: B007
            pass
    for field in ("params", "opt_state", "buffers"):
        with pytest.raises(pl.errors.DonatedStateError):
            list(getattr(state, field).values())
    assert state.loss.item() > 0


@pytest.mark.parametrize(
    "pick",
    [
        lambda stream: filter(lambda pair: pair[1].timestamp.batch % 2, stream),
        lambda stream: islice(stream, 6, None, 5),
        enumerate,
        lambda stream: zip(stream, stream, strict=False),
    ],
    ids=["filter", "islice", "enumerate", "zip"],
)
def test_pairs_that_are_picked_out_stay_what_they_were(pick: Callable[[Any], Any]) -> None:
    for last in pick(fit(norm(), max_duration="4ep")):
        found = tensors_of(last if isinstance(last, tuple) else (last,))
        assert all(torch.isfinite(each).all() for each in found if each.is_floating_point())
    assert found


def test_the_live_state_can_be_evaluated_and_gone_on_from() -> None:
    rest: Any = None
    for _, state in fit(norm()):
        if state.timestamp.batch == 4:
            assert torch.isfinite(
                pl.run(pl.evaluate(state, DATA, loss=functional.cross_entropy)).metrics["eval"]["loss"]
            )
            rest = pl.run(fit(state))
    assert_same(rest, state, "resumed from a live State")


@pl.algorithm(Event.BATCH_END, when="3ba", init=lambda state: torch.zeros(2))
def now_and_then(state: pl.State) -> pl.State:
    return state.remember("now_and_then", state.algorithm_state["now_and_then"] + 1)


@pytest.mark.parametrize("steps", [1, 4])
def test_memory_that_only_some_graphs_write_to_is_theirs_first(steps: int) -> None:
    """The first graphs read it, so that it is still the State's that the user was shown."""
    watch = {Event.EPOCH_START, Event.FIT_END}
    kept = [
        (state, state.algorithm_state["now_and_then"].clone())
        for _, state in fit(watch=watch, algorithms=[now_and_then], steps_per_call=steps)
    ]
    for state, numbers in kept:
        assert torch.equal(state.algorithm_state["now_and_then"], numbers)
    assert kept[-1][1].tolist() == [5, 5]
