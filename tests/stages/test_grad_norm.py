"""``state.grad_norm``: the global norm of the gradients of the whole batch, unscaled, before clipping."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from tests.support.runs import mlp, points
from tests.support.worlds import KINDS, pool

cross_entropy = nn.functional.cross_entropy
HAS_ONE = {Event.AFTER_TRAIN_BATCH, Event.BATCH_END}
DATA = points(batches=3, size=4)


def by_hand(limit: float, data: Any = DATA) -> list[float]:
    """Norms of a plain loop that clips."""
    module, norms = mlp(), []
    for inputs, targets in data:
        cross_entropy(module(inputs), targets).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm()))
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad * min(1.0, limit / (norms[-1] + 1e-6))
        module.zero_grad()
    return norms


def states(**options: Any) -> list[tuple[Event, pl.State]]:
    settings = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep", **options}
    return list(pl.fit(mlp(), DATA, **settings))


WAYS: dict[str, dict[str, Any]] = {
    "all watched": {},
    "one watched": {"watch": {Event.BATCH_END}},
    "one watched, microbatches": {"watch": {Event.BATCH_END}, "microbatch_size": 3},
    "strict": {"strict": True},
    "no donation": {"donate": False},
    "microbatches": {"microbatch_size": 1},
    "loss scale": {"precision": "amp_fp16", "microbatch_size": 2},
    "order 2021": {"order": "2021"},
    "compiled": {"compile": True},
    "compiled, one watched": {"compile": True, "watch": {Event.BATCH_END}},
    "compiled, two watched": {"compile": True, "watch": HAS_ONE, "microbatch_size": 2},
    "clipped by an algorithm": {"clip_grad": None, "algorithms": [pl.algorithms.gradient_clipping("norm", 0.05)]},
    "clipped twice": {"algorithms": [pl.algorithms.gradient_clipping("norm", 0.2)]},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_that_of_a_plain_loop(way: str, interpreted: None) -> None:
    expected = by_hand(0.05)
    found = states(**{"clip_grad": 0.05, **WAYS[way]})
    norms = [state.grad_norm for event, state in found if event is Event.BATCH_END]
    tolerance = {"rtol": 2e-2, "atol": 0.0} if way == "loss scale" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(torch.stack(norms), torch.tensor(expected), **tolerance)
    for event, state in found:
        assert (state.grad_norm is not None) is (event in HAS_ONE), event
        assert state.grad_norm is None or state.grad_norm.shape == ()


@pytest.mark.parametrize("large", [False, True])
def test_large_gradients(large: bool) -> None:
    """Those are clipped where they are."""
    width = 2**17 if large else 8
    model, g = nn.Linear(width, 3), torch.Generator().manual_seed(0)
    data = [(torch.randn(4, width, generator=g), torch.randn(4, 3, generator=g))] * 2
    options = {"loss": nn.functional.mse_loss, "optimizer": pl.optim.sgd(lr=0.0), "max_duration": "1ep"}
    wanted = [pl.gradients.global_norm(s.grads) for e, s in pl.fit(model, data, **options) if e is Event.BATCH_END]
    for watch in (None, {Event.BATCH_END}):
        for size in (None, 2):
            stream = pl.fit(model, data, clip_grad=1.0, microbatch_size=size, watch=watch, **options)
            norms = [state.grad_norm for event, state in stream if event is Event.BATCH_END]
            torch.testing.assert_close(norms, wanted, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("options", [{}, {"watch": {Event.BATCH_END}}, {"clip_grad": lambda grads, params: grads}])
def test_nothing_is_computed_where_nothing_needs_it(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch, "_foreach_norm", lambda *given: calls.append(given))
    assert all(state.grad_norm is None for _, state in states(**options))
    assert not calls


def test_it_belongs_to_the_batch() -> None:
    """It is no part of a checkpoint, and training resumes without it."""
    kept = [state for event, state in states(clip_grad=0.05) if event is Event.BATCH_END]
    resumed = pl.run(pl.fit(kept[1], DATA, loss=cross_entropy, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep"))
    assert resumed.grad_norm is None
    assert "grad_norm" not in pl.checkpoint.document.durable_fields(pl.State)


def test_in_a_script_it_is_that_of_the_batch() -> None:
    """A script that sets the gradients of the batch before to None needn't know of their norm."""
    task = pl.Task(loss=lambda outputs, batch: cross_entropy(outputs, batch[1]))
    stages = pl.Stages(task=task, optimizer=pl.optim.sgd(lr=0.1))

    def script(state: pl.State) -> Any:
        for batch in DATA:
            state = stages.forward(state.replace(batch=batch, microbatch=batch, grads=None))
            state = stages.finish_gradients(stages.backward(stages.loss(state)))
            state = yield Event.AFTER_TRAIN_BATCH, state
            state = yield Event.BATCH_END, stages.update(state).count_batch(samples=4)
        return state

    start = pl.State.create(mlp())
    start = start.replace(opt_state=stages.optimizer.init(start.params))
    stream = pl.drive(script(start), algorithms=[pl.algorithms.gradient_clipping("norm", 0.05)], stages=stages)
    norms = [state.grad_norm for event, state in stream if event is Event.BATCH_END]
    torch.testing.assert_close(torch.stack(norms), torch.tensor(by_hand(0.05)), rtol=1e-4, atol=1e-6)


def test_with_sam_it_is_of_the_gradients_that_step() -> None:
    found = states(clip_grad=1e6, algorithms=[pl.algorithms.sam(rho=0.5)])
    for event, state in found:
        if event is Event.BATCH_END:
            torch.testing.assert_close(state.grad_norm, pl.gradients.global_norm(state.grads))


def test_stages_measure_it_where_it_is_wanted() -> None:
    """The switch for monitors, which works without clipping."""
    from pure_loop.entry.assembly import start

    assembly = _assembled()
    measuring = attrs.evolve(assembly, fit=_measuring(assembly.fit))
    norms = [state.grad_norm for event, state in start(measuring) if event is Event.BATCH_END]
    torch.testing.assert_close(torch.stack(norms), torch.tensor(by_hand(1e9)), rtol=1e-4, atol=1e-6)


def _assembled() -> Any:
    from pure_loop._internal.suggestions import arguments_of_call
    from pure_loop.entry.assembly import assemble
    from pure_loop.entry.settings import Settings

    own = {"loss": cross_entropy, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "1ep"}
    return assemble(Settings.of(arguments_of_call(pl.fit, (mlp(), DATA), own)))


def _measuring(fit: Any) -> Any:
    return attrs.evolve(fit, stages=attrs.evolve(fit.stages, measures_norm=True))


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks_it_is_that_of_the_whole_batch(kind: str) -> None:
    expected = by_hand(0.05)

    def program(rank: int) -> list[float]:
        found = states(clip_grad=0.05, parallel=kind)
        return [float(state.grad_norm) for event, state in found if event is Event.BATCH_END]

    for norms in pool(kind=kind).run(program):
        assert norms == pytest.approx(expected, rel=1e-4)


def test_results_come_in_the_dtypes_of_tensors_by_name() -> None:
    half = torch.tensor(1.0, dtype=torch.bfloat16)
    (result,) = pl.gradients.in_dtypes_of(tensors=[half], new=[torch.tensor(2.0)])
    assert result.dtype is torch.bfloat16
