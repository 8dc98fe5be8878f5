"""``state.grad_norm``: the global norm of the gradients of the whole batch, unscaled, before clipping."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event
from pure_loop._internal.suggestions import arguments_of_call
from pure_loop.entry.assembly import assemble, start
from pure_loop.entry.settings import Settings
from tests.support import problem
from tests.support.worlds import KINDS, pool

HAS_ONE = {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
DATA = problem.points()


def by_hand(limit: float) -> Tensor:
    """Norms of a plain loop that clips."""
    norms = []

    def gradient(model: Any, inputs: Tensor, targets: Tensor) -> None:
        problem.cross_entropy(model(inputs), targets).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))

    problem.by_hand(problem.mlp(), DATA, gradient, epochs=1)
    return torch.stack(norms)


def states(**options: Any) -> list[tuple[Event, pl.State]]:
    return list(problem.fit(None, DATA, **{"max_duration": "1ep", "strict": None, **options}))


def check(pairs: Any, wanted: Tensor, rtol: float = 1e-4) -> None:
    norms = [state.grad_norm for event, state in pairs if event is Event.BATCH_END]
    torch.testing.assert_close(torch.stack(norms), wanted, rtol=rtol, atol=1e-6)


def clipping(threshold: float) -> pl.Algorithm:
    return pl.algorithms.gradient_clipping("norm", threshold)


WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched, microbatches": {"watch": {Event.BATCH_END}, "microbatch_size": 3},
    "strict": {"strict": True, "donate": False},
    "loss scale": {"precision": "amp_fp16", "microbatch_size": 2},
    "compiled, two watched": {"compile": True, "watch": HAS_ONE, "microbatch_size": 2},
    "clipped by an algorithm": {"clip_grad": None, "algorithms": [clipping(0.05)]},
    "clipped twice": {"algorithms": [clipping(0.2)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_that_of_a_plain_loop(way: str, interpreted: None) -> None:
    found = states(**{"clip_grad": 0.05, **WAYS[way]})
    check(found, by_hand(0.05), 2e-2 if way == "loss scale" else 1e-4)
    for event, state in found:
        assert (state.grad_norm is not None) is (event in HAS_ONE), event
        assert state.grad_norm is None or state.grad_norm.shape == ()


@pytest.mark.usefixtures("every_gradient_is_large")
def test_large_gradients_are_clipped_where_they_are() -> None:
    for watch in (None, {Event.BATCH_END}):
        for size in (None, 2):
            check(states(clip_grad=0.05, microbatch_size=size, watch=watch), by_hand(0.05))


def test_nothing_is_computed_where_nothing_needs_it_and_it_belongs_to_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no part of a checkpoint, and training resumes without it."""
    calls: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_norm", lambda *given: calls.append(given))
        for options in ({}, {"watch": {Event.BATCH_END}}, {"clip_grad": lambda grads, params: grads}):
            assert all(state.grad_norm is None for _, state in states(**options))
    assert not calls
    kept = [state for event, state in states(clip_grad=0.05) if event is Event.BATCH_END]
    assert problem.run(kept[1], DATA, max_duration="1ep").grad_norm is None
    assert "grad_norm" not in pl.checkpoint.document.durable_fields(pl.State)


def test_in_a_script_it_is_that_of_the_batch() -> None:
    """A script that sets the gradients of the batch before to None needn't know of their norm."""
    task = pl.Task(loss=lambda outputs, batch: problem.cross_entropy(outputs, batch[1]))
    stages = pl.Stages(task=task, optimizer=pl.optim.sgd(lr=0.1))

    def script(state: pl.State) -> Any:
        for batch in DATA:
            state = stages.forward(state.replace(batch=batch, microbatch=batch, grads=None))
            state = stages.finish_gradients(stages.backward(stages.loss(state)))
            state = yield Event.AFTER_TRAIN_BATCH, state
            state = yield Event.BATCH_END, stages.update(state).count_batch(samples=4)
        return state

    state = pl.State.create(problem.mlp())
    state = state.replace(opt_state=stages.optimizer.init(state.params))
    check(pl.drive(script(state), algorithms=[clipping(0.05)], stages=stages), by_hand(0.05))


def test_stages_measure_it_where_it_is_wanted_and_with_sam_it_is_of_the_gradients_that_step() -> None:
    """The switch for monitors, which works without clipping."""
    own = {"loss": problem.cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    assembly = assemble(Settings.of(arguments_of_call(pl.fit, (problem.mlp(), DATA), own)))
    stages = attrs.evolve(assembly.fit.stages, measures_norm=True)
    check(start(attrs.evolve(assembly, fit=attrs.evolve(assembly.fit, stages=stages))), by_hand(1e9))
    for event, state in states(clip_grad=1e6, algorithms=[pl.algorithms.sam(rho=0.5)]):
        if event is Event.BATCH_END:
            torch.testing.assert_close(state.grad_norm, pl.gradients.global_norm(state.grads))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_it_is_that_of_the_whole_batch(kind: str) -> None:
    """Two processes."""

    def program(rank: int) -> list[Any]:
        return [state.grad_norm for event, state in states(clip_grad=0.05, parallel=kind) if event is Event.BATCH_END]

    for norms in pool(kind=kind).run(program):
        torch.testing.assert_close(torch.stack(norms), by_hand(0.05), rtol=1e-4, atol=1e-6)
