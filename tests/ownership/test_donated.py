"""What is not kept is written to: the addresses of parameters, and the memory that a step needs at most."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from torch import nn
from torch.nn import functional

import pure_loop as pl
from bench.performance.memory import peaks
from pure_loop import Event
from tests.ownership.judge import Judge
from tests.ownership.programs import CONSUMERS, DATA, Keep, Program, addresses, judge, programs
from tests.ownership.ways import of_tree

IN_PLACE = ["for event, state", "event, state = next", "yield from", "pl.progress", "map"]
WATCHES = {"all": None, "one": frozenset({Event.BATCH_END})}


def moves(program: Program, donate: Any = "auto") -> list[int]:
    """After which steps, from 1 on, a parameter lies elsewhere than before."""
    places = addresses(program, donate)
    assert len(places) == program.batches
    return [batch for batch, (one, other) in enumerate(itertools.pairwise(places), 1) if one != other]


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("consumer", IN_PLACE)
@pytest.mark.parametrize("strict", [None, False], ids=["strict at first", "never strict"])
def test_parameters_stay_where_they_are_while_nothing_is_kept(consumer: str, watch: str, strict: Any) -> None:
    options = {"strict": strict}
    program = Program(model="telling", consumer=consumer, watch=WATCHES[watch], options=options, batches=8)
    assert moves(program) == []


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize(
    ("optimizer", "first"),
    [("sgd", []), ("momentum", []), ("lion", []), ("RAdam", [1]), ("telling adamw", [])],
)
def test_parameters_stay_with_each_optimizer(optimizer: str, first: list[int], watch: str) -> None:
    """The first step of an optimizer of torch lays its tensors out."""
    assert moves(Program(model="telling", optimizer=optimizer, watch=WATCHES[watch], batches=8)) in (first, [])


@pytest.mark.parametrize("way", ["the State", "params", "parameter: itself", "parameter: an array", "moment: itself"])
def test_what_is_kept_for_one_event_at_each_batch_costs_no_copy(way: str) -> None:
    """It is let go before the next step."""
    keeps = tuple(Keep(batch=batch, way=way, left=0) for batch in range(1, 9))
    assert moves(Program(model="telling", keeps=keeps, batches=8)) == []


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("read", ["params", "opt_state", "all"])
def test_a_body_that_reads_costs_no_copy(read: str, watch: str) -> None:
    places: list[list[int]] = []

    def body(event: Event, state: pl.State) -> None:
        if event is not Event.BATCH_END:
            return
        if read in ("params", "all"):
            places.append([each.data_ptr() for each in state.params.values()])
        if read in ("opt_state", "all"):
            places.append([each.data_ptr() for each in of_tree(state.opt_state) if each.ndim])
        if read == "all":
            assert all(torch.isfinite(each).all() for each in of_tree(state.params))

    stream = pl.fit(
        nn.Linear(4, 3),
        DATA,
        loss=functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=0.1),
        max_duration="8ba",
        watch=WATCHES[watch],
    )
    for _ in CONSUMERS["for event, state"](stream, body):
        pass
    assert len({tuple(place) for place in places}) == (2 if read == "all" else 1)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize(
    ("attached", "copies"),
    [
        ({"callbacks": ("GradMonitor",)}, 0),
        ({"algorithms": ("ema",)}, 1),
        ({"algorithms": ("reads",)}, 0),
        ({"callbacks": ("CheckpointSaver",)}, 4),
    ],
    ids=["GradMonitor", "ema", "reads", "CheckpointSaver"],
)
def test_what_the_library_reads_costs_no_copy(attached: dict[str, Any], copies: int, watch: str) -> None:
    """The step after a save may copy: the file is written meanwhile. The first average is the parameters themselves."""
    assert len(moves(Program(model="telling", watch=WATCHES[watch], batches=8, **attached))) <= copies


def test_addresses_say_whether_a_step_copies() -> None:
    program = Program(model="telling", batches=8)
    assert moves(program, donate=False) == list(range(1, 8))
    kept = Keep(batch=3)
    assert moves(Program(model="telling", batches=8, keeps=(kept,))) == [4]


@pytest.mark.parametrize("watch", WATCHES)
def test_donate_true_takes_what_is_kept_and_says_so(watch: str) -> None:
    kept: dict[int, pl.State] = {}
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
    stream = pl.fit(
        nn.Linear(4, 3),
        DATA,
        loss=functional.cross_entropy,
        optimizer=pl.optim.adamw(lr=0.1),
        max_duration="6ba",
        watch=WATCHES[watch],
        donate=True,
    )
    for event, state in stream:
        if event is Event.BATCH_END:
            kept[state.timestamp.batch] = state
            if state.timestamp.batch == 4:
                tensors += [(each, each.clone()) for each in of_tree((state.params, state.opt_state))]
    for batch in (1, 2, 3, 5):
        with pytest.raises(pl.errors.DonatedStateError, match="parameters") as caught:
            kept[batch].params["weight"]
        assert "donate" in str(caught.value)
        with pytest.raises(pl.errors.DonatedStateError, match="optimizer state"):
            of_tree(kept[batch].opt_state)
        loss = kept[batch].loss
        assert isinstance(loss, torch.Tensor)
        assert torch.isfinite(loss)
        assert kept[batch].timestamp.batch == batch
    assert of_tree(state.params)
    assert all(torch.equal(one, other) for one, other in tensors), "a tensor that was kept by itself changed"


# Of what they keep themselves they read the numbers.
_READ_THE_PAST = {"the one before", "a deque", "list", "two at a time", "pairwise", "swapped", "tee"}


def _never_reads_the_past(program: Program) -> bool:
    return (
        program.consumer not in _READ_THE_PAST
        and not any(name.startswith("returns") for name in program.algorithms)
        and not program.forks
    )


@given(program=programs())
@settings(max_examples=25)
def test_with_donate_true_what_is_kept_has_its_numbers_or_says_that_it_has_none(program: Program) -> None:
    assume(_never_reads_the_past(program))
    judge(program, donate=True)


@pytest.mark.slow
@given(program=programs())
@settings(max_examples=200)
def test_with_donate_true_more_is_kept(program: Program) -> None:
    assume(_never_reads_the_past(program))
    judge(program, donate=True)


SIDE = 1000
SIZE = 4 * (SIDE * SIDE + SIDE)
"""Bytes of a million parameters."""
BATCHES = [(torch.zeros(2, SIDE), torch.zeros(2, dtype=torch.int64))] * 2
Body = Callable[[Event, pl.State], None]


def _nothing(event: Event, state: pl.State) -> None:
    """A body that keeps nothing."""


def _reads(event: Event, state: pl.State) -> None:
    if event is Event.BATCH_END:
        assert len(of_tree((state.params, state.opt_state))) > 4


class _Steps:
    """A run, batch by batch, as the measurement of peaks asks for it."""

    def __init__(self, consumer: str, body: Body, options: dict[str, Any]) -> None:
        self.done = 0
        algorithms = [make() for make in options.get("algorithms", ())]
        stream = pl.fit(
            nn.Linear(SIDE, SIDE),
            BATCHES,
            loss=functional.cross_entropy,
            optimizer=pl.optim.adamw(lr=0.1),
            max_duration="20ba",
            strict=False,
            **{**options, "algorithms": algorithms},
        )

        def counting(event: Event, state: pl.State) -> None:
            self.done += event is Event.BATCH_END
            body(event, state)

        self.consumer: Iterator[None] = CONSUMERS[consumer](stream, counting)

    def run(self, steps: int) -> None:
        end = self.done + steps
        while self.done < end:
            next(self.consumer)

    def close(self) -> None:
        del self.consumer


def most(consumer: str = "for event, state", body: Body = _nothing, **options: Any) -> float:
    """The memory that steps need at most, from the third on, in sizes of the parameters."""
    _, later = peaks(partial(_Steps, consumer, body, options))  # type: ignore[arg-type]
    return later / SIZE


# Parameters, two moments, gradients, and batches and activations, which are small beside them.
BY_HAND = 4.05


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("consumer", IN_PLACE)
def test_a_step_needs_the_memory_of_a_loop_by_hand(consumer: str, watch: str) -> None:
    assert most(consumer, watch=WATCHES[watch]) < BY_HAND


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize(
    ("extra", "body", "options"),
    [
        (0, _reads, {}),
        (1, _nothing, {"microbatch_size": 1}),
        (0, _nothing, {"clip_grad": 1.0}),
        (0, _nothing, {"nonfinite": "skip"}),
        (2, _nothing, {"algorithms": (partial(pl.algorithms.ema, half_life="3ba"),)}),
        (0, _nothing, {"callbacks": (pl.callbacks.GradMonitor(),)}),
    ],
    ids=["a body that reads", "microbatches", "clip_grad", "nonfinite", "ema", "GradMonitor"],
)
def test_so_do_these(extra: int, body: Body, options: dict[str, Any], watch: str) -> None:
    """Autograd's gradient of a microbatch is there beside the sum, as by hand, and the next average beside the last."""
    assert most(body=body, watch=WATCHES[watch], **options) < BY_HAND + extra


def test_copies_show_in_that_memory() -> None:
    assert most(donate=False) > BY_HAND + 2
    assert most("for pair", donate=False) > BY_HAND + 2


def test_the_judge_of_donate_true_still_finds_other_numbers() -> None:
    twin = Judge()
    twin.keep("a", "a tensor", _itself(), torch.ones(2), 0)
    judged = Judge(twin, lenient=True)
    judged.keep("a", "a tensor", _itself(), torch.zeros(2), 0)
    with pytest.raises(AssertionError, match="a tensor changed"):
        judged.finish()


def _itself() -> Any:
    from tests.ownership.ways import Way

    return Way(lambda given, which: given, of_tree)


def _fit(start: Any, duration: str, **settings: Any) -> Any:
    optimizer = pl.optim.adamw(lr=0.1)
    loss = functional.cross_entropy
    return pl.fit(start, DATA, loss=loss, optimizer=optimizer, max_duration=duration, **settings)


def test_donate_true_takes_nothing_of_the_state_that_training_starts_from() -> None:
    """Nor of a stream that copies, and began with that State, too: numbers on the host are in both."""
    start = pl.run(_fit(nn.Linear(4, 3), "2ba"))
    other = _fit(start, "6ba", donate=False)
    for event, _ in other:
        if event is Event.BATCH_END:
            break
    kept = [state for event, state in _fit(start, "6ba", donate=True) if event is Event.BATCH_END]
    with pytest.raises(pl.errors.DonatedStateError):
        _ = kept[0].params["weight"]
    assert start.opt_state["skipped"] == {"weight": 0, "bias": 0}
    assert pl.run(other).timestamp.batch == 6
    assert pl.run(_fit(start, "6ba")).timestamp.batch == 6


def _uses(mapping: Any, name: str = "") -> dict[str, Callable[[], Any]]:
    """What was kept of a mapping, and a later use of it, or of what it has by this name."""
    values, items, get, copy = mapping.values(), mapping.items(), mapping.get, mapping.copy
    iterator = iter(items)
    return {
        "values()": lambda: [value + 1 for value in values],
        "items()": lambda: [value + 1 for _, value in items],
        "an iterator": lambda: [value + 1 for _, value in iterator],
        "get": lambda: get(name) + 1,
        "copy": lambda: copy()[name] + 1,
        "dict.get": lambda: dict.get(mapping, name) + 1,
        "dict.values": lambda: [value + 1 for value in dict.values(mapping)],
        "optree": lambda: of_tree(mapping),
        "torch's pytree": lambda: torch.utils._pytree.tree_leaves(mapping),
        "the mapping": lambda: mapping[name],
    }


@pytest.mark.parametrize(("field", "name"), [("params", "weight"), ("opt_state", "exp_avg")])
@pytest.mark.parametrize("use", _uses(pl.FrozenDict()))
def test_what_is_kept_of_a_mapping_says_that_it_was_overwritten(field: str, name: str, use: str) -> None:
    uses = []
    for event, state in _fit(nn.Linear(4, 3), "4ba", donate=True):
        if event is Event.BATCH_END and state.timestamp.batch < 4:
            uses.append(_uses(getattr(state, field), name)[use])
    for later in uses:
        with pytest.raises(pl.errors.DonatedStateError, match="overwritten by the step of batch"):
            later()


@pytest.mark.parametrize("event", [Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END])
def test_an_update_that_an_algorithm_tries_takes_nothing(event: Event) -> None:
    """It is a function of States, also where the loop's own step takes what is kept."""

    @pl.algorithm(event)
    def ahead(state: pl.State, stages: pl.Stages) -> pl.State:
        new = stages.update(state)
        steps = [(new.params[name] - tensor).norm() for name, tensor in state.params.items()]
        return state.remember("ahead", sum(steps, torch.zeros(())))

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    lasts = [pl.run(_fit(model, "6ba", algorithms=[ahead], donate=donate)) for donate in (False, "auto", True)]
    for last in lasts[1:]:
        assert torch.equal(last.algorithm_state["ahead"], lasts[0].algorithm_state["ahead"])
        assert torch.equal(last.params["weight"], lasts[0].params["weight"])
