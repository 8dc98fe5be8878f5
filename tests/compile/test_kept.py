"""States of compiled steps that were kept stay what they were, on every combination of fast paths."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import ema, gradient_clipping
from pure_loop.optim.optimizer import rate_at
from pure_loop.stages.ownership import Ownership
from tests.support.compiling import BATCHES, EPOCHS, MICROBATCHES, SHORT, fit, stream
from tests.support.models import batches, plain
from tests.support.streams import assert_same, frozen_copy, leaves
from tests.support.tiers import pairwise, tiers

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.slow
def test_states_stay_what_they_were() -> None:
    kept = []
    for _, state in stream(compile=True, watch=BATCHES, algorithms=[ema(half_life="2ba")]):
        kept.append((state, frozen_copy(state)))
    for state, before in kept:
        assert_same(state, before, "a State that was kept")


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "as the graph takes it": lambda t: rate_at("a rate", lambda t: float(t.batch), t),
    "many times": lambda t: rate_at("a rate", lambda t: float(t.batch), t).expand(2),
    "added to nothing": lambda t: torch.zeros(()) + t.batch,
    "chosen": lambda t: torch.where(torch.tensor(True), t.batch, 0),
    "filled in": lambda t: torch.zeros(2).fill_(t.batch),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", [Event.AFTER_FORWARD, Event.AFTER_TRAIN_BATCH], ids=lambda event: event.name)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_number_of_the_step_as_an_output_stays_what_it_was(way: Callable[[Any], Tensor], where: Event) -> None:
    """The graph takes numbers from memory that is written anew for the next step."""

    @pl.algorithm(where, name="shows its batch")
    def shown(state: pl.State) -> pl.State:
        outputs = state.outputs[0] if isinstance(state.outputs, tuple) else state.outputs
        return state.replace(outputs=(outputs, way(state.timestamp)))

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[0] if isinstance(outputs, tuple) else outputs, targets)

    seen = {Event.BEFORE_LOSS, Event.BATCH_END} if where is Event.AFTER_FORWARD else BATCHES
    settings: dict[str, Any] = {**SHORT, "watch": seen, "algorithms": [shown], "loss": loss}
    kept = [
        (state.timestamp.batch - (event is Event.BATCH_END), state.outputs[1])
        for event, state in stream(**settings, compile=True)
    ]
    assert len(kept) >= 5
    assert all((shown == batch).all() for batch, shown in kept), kept


ALGORITHMS: tuple[Any, ...] = (ema(half_life="3ba"), gradient_clipping("norm", 1.0))


WATCHED: dict[str, Any] = {
    "all": None,
    "batches": BATCHES,
    "epochs": EPOCHS,
    "after backward": {Event.AFTER_BACKWARD},
    "after forward": {Event.AFTER_FORWARD, Event.EPOCH_END},
    "after train batch": {Event.AFTER_TRAIN_BATCH},
    "before forward": {Event.BEFORE_FORWARD, Event.EPOCH_END},
}


REST = [
    *itertools.product(WATCHED.values(), [False], [False, True]),
    *itertools.product(WATCHED.values(), [False, "auto", True], ["where possible"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("watch", "donate", "compile"),
    [
        *pairwise(WATCHED, {"auto": "auto", "donated": True}, {"eager": False, "compiled": True}),
        *[pytest.param(*each, marks=pytest.mark.thorough) for each in REST],
    ],
)
def test_every_combination_of_fast_paths_gives_the_same_states(watch: Any, donate: Any, compile: Any) -> None:
    """Law 9. Copies are compared, so that memory may be reused; and what was kept stays what it was."""
    settings: dict[str, Any] = {"watch": watch, "algorithms": ALGORITHMS, **MICROBATCHES}
    settings["evaluators"] = batches((4,), 2)
    wanted = fit(**settings, donate=False)
    given, kept = [], []
    for _, state in stream(**settings, donate=donate, compile=compile):
        given.append(frozen_copy(state))
        if donate is not True:
            kept.append((state, given[-1]))
    assert len(given) == len(wanted)
    for index, (one, (event, other)) in enumerate(zip(given, wanted, strict=True)):
        for path, value in leaves(other).items():
            where = f"{path} at {event.name}, position {index}"
            if isinstance(value, Tensor):
                torch.testing.assert_close(one[path], value, rtol=2e-6, atol=2e-6, equal_nan=True, msg=where)
            else:
                assert one[path] == value or one[path] == pytest.approx(value), where
    for state, numbers in kept:
        assert_same(leaves(state), numbers, "kept")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        (1, [True, False, False] * 3),
        # Those that follow the first one in a call do not ask.
        (3, [True, False] * 3),
    ],
)
def test_memory_is_copied_after_a_state_was_observed_and_only_then(
    monkeypatch: pytest.MonkeyPatch, steps: int, wanted: list[bool]
) -> None:
    asked: list[bool] = []
    real = Ownership.writable_or_copies

    def own(self: Any, tensors: list[Tensor], alone: Any) -> list[Tensor]:
        given = real(self, tensors, alone)
        asked.append(given is not tensors)
        return given

    monkeypatch.setattr(Ownership, "writable_or_copies", own)
    fit(compile=True, steps_per_call=steps, max_duration="3ep")
    assert asked == wanted
    asked.clear()
    fit(compile=True, steps_per_call=steps, watch=BATCHES)
    assert asked
    assert all(asked)
    asked.clear()
    fit(compile=True, steps_per_call=steps, donate=False)
    assert not asked


@pytest.mark.parametrize("old_kept", [1, 2, 3])
@pytest.mark.parametrize("new_kept", [1, 2])
def test_weights_that_an_algorithm_puts_in_are_not_the_memory_of_a_graph(old_kept: int, new_kept: int) -> None:
    """Whoever keeps the old ones, too, may make up for the references that were lost when they were replaced."""
    kept = []

    @pl.algorithm(Event.BATCH_START)
    def puts_in(state: pl.State) -> pl.State:
        new = state.replace(params={name: tensor.clone() for name, tensor in state.params.items()})
        old = [list(state.params.values()) for _ in range(old_kept)]
        kept.append((old, [new.params] * new_kept, frozen_copy(new.params)))
        return new

    settings: dict[str, Any] = {"optimizer": pl.optim.sgd(lr=0.1), "data": batches((8, 8), 1)}
    for _, _ in stream(plain, compile=True, watch={Event.BATCH_START, *BATCHES}, algorithms=[puts_in], **settings):
        pass
    for _, new, numbers in kept:
        assert_same(leaves(new[0]), numbers, "kept")


def test_a_compiled_step_that_never_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ownership, "writable_or_copies", lambda self, tensors, alone: tensors)
    kept = [(state, frozen_copy(state)) for _, state in stream(compile=True, max_duration="3ep")]
    assert not all(
        torch.equal(state.params[name], numbers[f"params.{name}"]) for state, numbers in kept for name in state.params
    )


@pytest.mark.slow
@pytest.mark.parametrize("steps", tiers([1, 2, 3, 8], [3]))
@pytest.mark.parametrize("watch", [EPOCHS, {Event.EPOCH_START, Event.EVAL_END}], ids=["epochs", "evaluations"])
def test_what_was_kept_never_changes_whatever_goes_through_in_one_call(steps: int, watch: Any) -> None:
    settings: dict[str, Any] = {"watch": watch, "max_duration": "5ep", "evaluators": batches((4,), 2)}
    kept = [(state, frozen_copy(state)) for _, state in stream(**settings, compile=True, steps_per_call=steps)]
    for state, numbers in kept:
        assert_same(leaves(state), numbers, "kept")
