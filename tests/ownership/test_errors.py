"""Donation by force, and steps that fail half-way: no State has wrong numbers, but some say that they have none."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from weakref import ref

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.frozendict import FrozenDict, Overwritten
from pure_loop.stages.references import can_count
from pure_loop.state import raw_opt_state
from tests.support.donating import DATA, Count, Kept, assert_same, fit, tensors_of

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("gradients_of_each_size"),
]


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


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


def test_a_state_whose_memory_was_taken_does_not_keep_it() -> None:
    kept, tensors = [], []
    for event, state in fit(donate=True):
        if event is Event.BATCH_END and state.timestamp.batch == 6:
            kept.append(state)
            tensors += [ref(each) for each in tensors_of(raw_opt_state(state))]
    assert any(each() is not None for each in tensors)
    del state
    assert not any(each() is not None for each in tensors)
    with pytest.raises(pl.errors.DonatedStateError):
        len(kept[0].opt_state)


def test_donate_true_leaves_the_state_that_training_resumes_from(count: Count) -> None:
    first = next(state for event, state in fit(donate=False) if event is Event.EPOCH_CHECKPOINT)
    expected = pl.run(fit(first, donate=False))
    assert_same(pl.run(fit(first, donate=True)), expected)
    assert_same(pl.run(fit(first, donate=True)), expected)


def test_donate_true_leaves_tensors_that_were_kept_and_algorithm_state() -> None:
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


def poisoned() -> dict[str, Any]:
    """Gradients of one batch are NaN, and so are the parameters that the kernel has written; its loss isn't."""
    calls = itertools.count()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        poison = (0 * outputs.sum()).sqrt() if next(calls) == 6 else 0
        return functional.cross_entropy(outputs, targets) + poison

    return {"loss": loss, "strict": False}


def failing() -> dict[str, Any]:
    """An optimizer of one's own raises after it has written to the first parameter."""
    inner = pl.optim.sgd(lr=0.1, momentum=0.9)

    def overwrite(grads: Any, memory: Any, params: Any, timestamp: Any) -> Any:
        if timestamp.batch == 6:
            params["0.weight"].zero_()
            raise ArithmeticError("batch 6")
        assert inner.overwrite is not None
        return inner.overwrite(grads, memory, params, timestamp)

    return {"optimizer": attrs.evolve(inner, overwrite=overwrite)}


@pytest.mark.parametrize("watch", [None, {Event.BATCH_END}], ids=["every event", "one"])
@pytest.mark.parametrize("options", [poisoned, failing])
def test_a_step_that_fails_half_way_leaves_no_wrong_numbers(options: Callable[[], dict[str, Any]], watch: Any) -> None:
    """The State in the loop variable says that it has none; one that was kept has its own."""
    kept: Any = None
    numbers: list[Tensor] = []
    failed: Any = None
    try:
        for event, state in fit(watch=watch, **options()):
            if event is Event.BATCH_END and state.timestamp.batch == 4:
                kept = state
                numbers = [tensor.clone() for tensor in tensors_of(state)]
    except (pl.NonFiniteError, ArithmeticError) as error:
        failed = error
    assert "batch 6" in str(failed)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(kept), numbers, strict=True))
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.params .* the step of batch 6"):
        state.params["0.weight"]
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.opt_state .* the step of batch 6"):
        len(state.opt_state)
    assert "overwritten" in repr(state)


def of_parameters(state: pl.State) -> list[Tensor]:
    return [*tensors_of(state.params), *tensors_of(state.opt_state)]


@pytest.mark.parametrize("change", [Tensor.double, lambda each: each[None]], ids=["dtype", "shape"])
@pytest.mark.parametrize("clips", [False, True], ids=["an algorithm", "clip_grad"])
def test_gradients_that_do_not_fit_cost_no_state(clips: bool, change: Callable[[Tensor], Tensor]) -> None:
    """They are refused before the optimizer has what it would have overwritten."""

    def changed(grads: Any) -> FrozenDict[str, Tensor]:
        return FrozenDict((name, change(grad)) for name, grad in grads.items())

    def clip(grads: Any, _: Any) -> Any:
        return changed(grads) if now.batch == 6 else grads

    @pl.algorithm(Event.AFTER_TRAIN_BATCH)
    def put_in(state: pl.State) -> pl.State:
        return state.replace(grads=changed(state.grads)) if state.timestamp.batch == 6 else state

    options: dict[str, Any] = {"clip_grad": clip} if clips else {"algorithms": [put_in]}
    now, before, failed = pl.Timestamp(), [], None
    try:
        for event, state in fit(**options):
            now = state.timestamp
            if event is Event.BATCH_START:
                before = [tensor.clone() for tensor in of_parameters(state)]
    except (pl.ArgumentError, pl.errors.AlgorithmStructureError) as error:
        failed = error
    assert "0.weight" in str(failed)
    assert now.batch == 6
    assert all(torch.equal(a, b) for a, b in zip(of_parameters(state), before, strict=True))


@pytest.mark.parametrize("donate", ["yes", None, 1, "True"])
def test_other_values_are_refused(donate: Any) -> None:
    with pytest.raises(pl.ArgumentError, match="donate="):
        fit(donate=donate)


def test_mappings_that_were_overwritten_are_frozen_dicts_still() -> None:
    assert isinstance(Overwritten.by("params", "overwritten"), FrozenDict)
    assert "overwritten" in repr(Overwritten.by("params", "overwritten"))
