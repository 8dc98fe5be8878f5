"""Mixed precision against a loop written by hand with torch.autocast and torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from tests.support import problem
from tests.support.streams import assert_same, assert_same_stream, leaves

# Batches of 2**k samples: there weighing by samples is exact, so even half precision rounds as the loop by hand does.
DATA = problem.points(size=(8, 4, 8, 8), seed=3)
STEPS, AT = 8, 3
DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def fit(model: Any = None, **changes: Any) -> Any:
    momentum = pl.optim.sgd(lr=0.1, momentum=0.9)
    return problem.fit(model, DATA, **{"optimizer": momentum, "max_duration": f"{STEPS}ba", "strict": None, **changes})


def by_hand(precision: str, overflow_at: int | None = None) -> tuple[nn.Module, list[float]]:
    """The loop of torch's documentation; the scale after every step."""
    model = problem.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp_fp16", init_scale=2.0**16)
    scales = []
    for step in range(STEPS):
        inputs, targets = DATA[step % len(DATA)]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPES[precision]):
            loss = problem.cross_entropy(model(inputs), targets)
        if step == overflow_at:
            loss = loss + 1e36 * sum((p * p).sum() for p in model.parameters())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def assert_trained_alike(state: pl.State, model: nn.Module) -> None:
    assert {tensor.dtype for tensor in state.params.values()} == {torch.float32}
    problem.close(dict(state.params), {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("precision", DTYPES)
def test_training_is_that_of_the_loop_by_hand(precision: str) -> None:
    """Forwards and losses alone run in this precision; autocast is off in the loop's body."""
    for event, state in fit(precision=precision, evaluators=DATA[:1]):
        if event in (Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD):
            assert state.outputs.dtype is DTYPES[precision]
            assert not torch.is_autocast_enabled("cpu")
        if event is Event.AFTER_TRAIN_BATCH:
            assert {g.dtype for g in state.grads.values()} == {torch.float32}
    model, scales = by_hand(precision)
    assert_trained_alike(state, model)
    full = pl.run(fit())
    assert any(not torch.equal(state.params[name], full.params[name]) for name in full.params), "nothing was rounded"
    if precision == "amp_fp16":
        assert float(state.loss_scale) == scales[-1]
        assert int(state.loss_scale.growth_tracker) == STEPS
    else:
        assert state.loss_scale is None


def test_gradients_are_unscaled_before_they_are_clipped_and_shown() -> None:
    def grads(precision: str, **options: Any) -> Any:
        pairs = fit(precision=precision, max_duration="1ba", **options)
        return next(state.grads for event, state in pairs if event is Event.AFTER_TRAIN_BATCH)

    for size in (None, 4):
        problem.close(dict(grads("amp_fp16", microbatch_size=size)), dict(grads("fp32")), 1e-2)
    clipped = pl.gradients.global_norm(grads("amp_fp16", clip_grad=1e-3))
    torch.testing.assert_close(clipped, torch.tensor(1e-3), rtol=1e-2, atol=0)


def overflowing(state: pl.State) -> pl.State:
    """The loss of one batch gets a term whose gradient doesn't fit into float32 once it is scaled."""
    if state.timestamp.batch != AT:
        return state
    return state.replace(loss=state.loss + 1e36 * sum((p * p).sum() for p in state.params.values()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_overflow_skips_the_step_and_halves_the_scale(device: str) -> None:
    """And training resumes around it."""
    options = {"algorithms": [pl.algorithm(Event.AFTER_LOSS, name="explode")(overflowing)], "precision": "amp_fp16"}
    pairs = list(fit(**options, device=device))
    assert [event for event, _ in pairs] == [event for event, _ in fit()], "a skipped step yields every event"
    ends = [i for i, (event, _) in enumerate(pairs) if event is Event.BATCH_END]
    states = [pairs[i][1] for i in ends]
    model, scales = by_hand("amp_fp16", overflow_at=AT)
    assert [float(state.loss_scale) for state in states] == scales
    assert scales[AT] == scales[AT - 1] / 2
    assert [int(state.skipped) for state in states] == [0] * AT + [1] * (STEPS - AT)
    for field in ("params", "opt_state"):
        assert_same(leaves(getattr(states[AT], field)), leaves(getattr(states[AT - 1], field)), field)
    if device == "cpu":
        assert_trained_alike(states[-1], model)
        for index in ends[AT - 1 : AT + 2]:
            assert_same_stream(list(fit(pairs[index][1], **options))[1:], pairs[index + 1 :], f"from {index}")


def test_the_scale_grows_after_enough_good_steps_and_comes_and_goes_with_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The precision is a setting, not part of the State."""
    half, full = (pl.run(fit(precision=precision, max_duration="2ba")) for precision in ("amp_fp16", "fp32"))
    assert pl.run(fit(half, precision="fp32")).loss_scale is None
    assert pl.run(fit(full, precision="amp_fp16")).loss_scale is not None
    monkeypatch.setattr(type(half.loss_scale), "GROWTH_INTERVAL", 3)
    ends = [state for event, state in fit(precision="amp_fp16", max_duration="5ba") if event is Event.BATCH_END]
    assert [float(state.loss_scale) / 2**16 for state in ends] == [1, 1, 2, 2, 2]
