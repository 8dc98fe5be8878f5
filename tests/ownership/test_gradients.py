"""Gradients: a backward adds to those of the microbatches before, where they are not aliased."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pure_loop as pl
from bench.performance.memory import peaks
from bench.performance.turns import OfGenerator
from pure_loop import Event
from pure_loop.stages.references import can_count
from pure_loop.stages.workspace import Workspace
from tests.support.tiers import tiers

pytestmark = pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter")

WIDTH = 512
ONE, SOME = {Event.BATCH_END}, {Event.AFTER_BACKWARD, Event.BATCH_END}
WATCHED: dict[str, Any] = {"every event": None, "one": ONE, "some": SOME}


class Failing(torch.autograd.Function):
    """Its backward fails when its turn has come."""

    left = -1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Failing.left -= 1
        if Failing.left == 0:
            raise ArithmeticError("on purpose")
        return grads[0]


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers[0](x)
        out: Tensor = self.layers[1:](Failing.apply(hidden))  # type: ignore[no-untyped-call]
        return out


def stream(model: Any = None, batches: int = 4, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(2, 7, WIDTH, generator=generator).unbind() for _ in range(batches)]
    torch.manual_seed(0)
    options = {"optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", "loss": mse_loss, **options}
    return pl.fit(Model() if model is None else model, data, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    tiers(
        itertools.product(WATCHED, [{}, {"microbatch_size": 2}, {"clip_grad": 0.1}]),
        [
            *(("every event", {}), ("every event", {"microbatch_size": 2})),
            *(("one", {"clip_grad": 0.1}), ("some", {"microbatch_size": 2})),
        ],
    ),
    ids=str,
)
def test_memory_is_that_of_one_set_of_gradients(name: str, options: Any) -> None:
    """Of seven samples, by which the sum over microbatches is divided."""
    watch = WATCHED[name]
    depth = 8
    model = Model(depth)  # the user's own, which is not counted

    def begin(**more: Any) -> OfGenerator:
        return OfGenerator(steps(stream(model, batches=8, watch=watch, **options, **more)))

    def steps(stream: Any) -> Any:
        for event, _state in stream:
            if event is Event.BATCH_END:
                yield 1

    size = depth * 4 * (WIDTH * WIDTH + WIDTH)
    # Parameters and gradients, those of one layer while they are added, and what the layers gave.
    assert peaks(begin)[1] < (2 + 1.5 / depth) * size
    assert peaks(partial(begin, donate=False))[1] > (3 - 0.5 / depth) * size


def unchanged(events: set[Event], **options: Any) -> bool:
    """Whether gradients that were kept at these events are what they were."""
    kept = []
    for event, state in stream(microbatch_size=2, **options):
        if state.grads is not None and event in events:
            kept.append((state, {name: tensor.clone() for name, tensor in state.grads.items()}))
    assert kept
    return all(torch.equal(state.grads[name], before[name]) for state, before in kept for name in before)


GRADIENTS = [Event.BEFORE_FORWARD, Event.BEFORE_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.BATCH_END]


@pytest.mark.parametrize("event", GRADIENTS, ids=lambda event: event.value)
@pytest.mark.parametrize("watch", [None, set(GRADIENTS)], ids=["every event", "some"])
def test_gradients_that_were_kept_stay_what_they_were(event: Event, watch: Any) -> None:
    assert unchanged({event}, watch=watch)


def test_gradients_of_the_batch_before_that_were_kept_stay() -> None:
    assert unchanged(ONE, watch=ONE)


@pytest.mark.parametrize("clip_grad", [None, 0.1], ids=["divided", "clipped"])
def test_gradients_that_were_kept_before_they_are_divided_and_clipped_stay(clip_grad: Any) -> None:
    kept = []
    for event, state in stream(clip_grad=clip_grad):
        if event in (Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH):
            kept.append((state, state.grads["layers.0.weight"].clone()))
    for state, before in kept:
        assert torch.equal(state.grads["layers.0.weight"], before)
    # The sum over seven samples was divided by seven eighths, or clipped.
    assert not torch.equal(kept[0][1], kept[1][1])


@pytest.mark.parametrize("watch", [None, ONE, SOME], ids=["every event", "one", "some"])
@pytest.mark.parametrize("clip_grad", [None, 0.1], ids=["divided", "clipped"])
def test_they_are_divided_and_clipped_in_place_as_in_a_copy(watch: Any, clip_grad: Any) -> None:
    one, other = (pl.run(stream(watch=watch, clip_grad=clip_grad, donate=donate)) for donate in ("auto", False))
    for name, tensor in one.params.items():
        assert torch.equal(tensor, other.params[name])


@pytest.mark.parametrize("event", [Event.BEFORE_FORWARD, Event.AFTER_BACKWARD])
def test_gradients_that_an_algorithm_adds_to_its_state_stay_the_loops(event: Event) -> None:
    """It has the stages, and what was found out about the loop's State doesn't hold for it."""

    @pl.algorithm(event)
    def adds(state: pl.State, stages: Any) -> pl.State:
        if isinstance(state._grads, dict):
            stages.finish_gradients(state, divisor=2.0)
        stages.backward(stages.loss(stages.forward(state)))
        return state

    one, other = (pl.run(stream(microbatch_size=2, algorithms=found)).params for found in ([adds], []))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name])


def test_gradients_that_an_algorithm_began_with_stay() -> None:
    """What it gives the State before the first microbatch is added to as well, and may have been observed."""

    @pl.algorithm(Event.BATCH_START)
    def begins(state: pl.State) -> pl.State:
        return state.replace(grads={name: torch.ones_like(tensor) for name, tensor in state.params.items()})

    kept = []
    for event, state in stream(algorithms=[begins], watch={Event.BATCH_START, Event.BATCH_END}, microbatch_size=2):
        if event is Event.BATCH_START:
            kept.append(state)
    assert all((each == 1).all() for state in kept for each in state.grads.values())


def test_writing_to_gradients_that_were_kept_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "take_gradients", lambda self, state: True)
    assert not unchanged({Event.BEFORE_BACKWARD})


@pytest.mark.parametrize("watch", [None, SOME], ids=["every event", "some"])
def test_a_backward_that_fails_half_way_leaves_no_wrong_gradients(watch: Any) -> None:
    Failing.left, kept = 7, None
    with pytest.raises(ArithmeticError):  # noqa: PT012 - it is the loop that fails
        for event, state in stream(microbatch_size=2, watch=watch):
            if event is Event.BATCH_END:
                kept = state
    assert kept.grads["layers.0.weight"].any()
    assert state.timestamp.batch == 1
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.grads .* batch "):
        state.grads["layers.0.weight"]


def of_the_state(state: pl.State, path: Path) -> Any:
    return state


def of_a_checkpoint(state: pl.State, path: Path) -> Any:
    pl.save(state, path)
    return pl.load(path, model=Model())


@pytest.mark.parametrize("start", [of_the_state, of_a_checkpoint])
def test_where_a_step_fails_training_resumes_from_the_state_before(
    tmp_path: Path, start: Callable[[pl.State, Path], Any]
) -> None:
    """With nothing watched but BATCH_END that State gave up its gradients when the step began, and nothing else."""
    whole = pl.run(stream())
    Failing.left = 3
    with pytest.raises(ArithmeticError):
        for _, state in stream(watch=ONE):  # noqa: B007
            pass
    assert state.timestamp.batch == 2
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.grads .* batch "):
        state.grads["layers.0.weight"]
    went_on = pl.run(stream(start(state, tmp_path / "state.safetensors")))
    for name, tensor in whole.params.items():
        assert torch.equal(tensor, went_on.params[name])


def test_the_last_state_has_its_gradients() -> None:
    for _, state in stream(watch=ONE):  # noqa: B007
        pass
    assert state.timestamp.batch == 4
    assert state.grads["layers.0.weight"].any()
