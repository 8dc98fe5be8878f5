"""Mixed precision against a loop written by hand with torch.autocast and torch.amp.GradScaler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from tests.support.models import batches, plain
from tests.support.streams import assert_same, assert_same_stream, leaves

# Batches of 2**k samples: there weighing by samples is exact, so even half precision rounds as the loop by hand does.
DATA = batches((8, 4, 8, 8), seed=3)
STEPS = 8
DTYPES = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return plain()


def fit(start: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "loss": functional.cross_entropy,
        "optimizer": pl.optim.sgd(lr=0.1, momentum=0.9),
        "max_duration": f"{STEPS}ba",
        **changes,
    }
    return pl.fit(module() if start is None else start, DATA, **arguments)


def by_hand(precision: str, *, overflow_at: int | None = None, scale: float = 2.0**16) -> tuple[nn.Module, list[float]]:
    """The loop of torch's documentation; the scale after every step."""
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "amp_fp16", init_scale=scale)
    scales = []
    for step in range(STEPS):
        inputs, targets = DATA[step % len(DATA)]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPES[precision]):
            loss = functional.cross_entropy(model(inputs), targets)
        if step == overflow_at:
            loss = loss + 1e36 * sum((p * p).sum() for p in model.parameters())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def assert_trained_alike(state: pl.State, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert state.params[name].dtype is torch.float32
        torch.testing.assert_close(state.params[name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_training_is_that_of_the_loop_by_hand(precision: str) -> None:
    state = pl.run(fit(precision=precision))
    model, scales = by_hand(precision)
    assert_trained_alike(state, model)
    full = pl.run(fit())
    assert any(not torch.equal(state.params[name], full.params[name]) for name in full.params), "nothing was rounded"
    if precision == "amp_fp16":
        assert float(state.loss_scale) == scales[-1]
        assert int(state.loss_scale.growth_tracker) == STEPS
    else:
        assert state.loss_scale is None


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_forward_and_loss_run_in_this_precision(precision: str) -> None:
    for event, state in fit(precision=precision, evaluators=DATA[:1]):
        if event in (Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD):
            assert state.outputs.dtype is DTYPES[precision]
            assert not torch.is_autocast_enabled("cpu"), "autocast is on in the loop's body"
        if event is Event.AFTER_TRAIN_BATCH:
            assert {g.dtype for g in state.grads.values()} == {torch.float32}


def test_gradients_are_unscaled_before_they_are_clipped_and_shown() -> None:
    def gradients(precision: str) -> Any:
        return next(s.grads for e, s in fit(precision=precision) if e is Event.AFTER_TRAIN_BATCH)

    full, scaled = gradients("fp32"), gradients("amp_fp16")
    for name in full:
        torch.testing.assert_close(scaled[name], full[name], rtol=2e-2, atol=2e-3)
    for event, state in fit(precision="amp_fp16", max_duration="1ba", clip_grad=1e-3):
        if event is Event.AFTER_TRAIN_BATCH:
            torch.testing.assert_close(pl.gradients.global_norm(state.grads), torch.tensor(1e-3), rtol=1e-2, atol=0)


def overflowing(at: int) -> pl.Algorithm:
    """The loss of one batch gets a term whose gradient doesn't fit into float32 once it is scaled."""

    def explode(state: pl.State) -> pl.State:
        if state.timestamp.batch != at:
            return state
        return state.replace(loss=state.loss + 1e36 * sum((p * p).sum() for p in state.params.values()))

    return pl.algorithm(Event.AFTER_LOSS, name="explode")(explode)


AT = 3


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    pairs = list(fit(precision="amp_fp16", algorithms=[overflowing(AT)]))
    assert [event for event, _ in pairs] == [event for event, _ in fit()], "a skipped step yields every event"
    ends = [state for event, state in pairs if event is Event.BATCH_END]
    model, scales = by_hand("amp_fp16", overflow_at=AT)
    assert [float(state.loss_scale) for state in ends] == scales
    assert scales[AT] == scales[AT - 1] / 2
    assert [int(state.skipped) for state in ends] == [0] * AT + [1] * (STEPS - AT)
    before, after = ends[AT - 1], ends[AT]
    for name in before.params:
        assert torch.equal(after.params[name], before.params[name])
    assert_same(leaves(after.opt_state), leaves(before.opt_state), "opt_state")
    assert after.timestamp.batch == AT + 1
    ends[-1].check_finite()
    assert_trained_alike(ends[-1], model)


def test_resumption_is_exact_around_an_overflow() -> None:
    explode = overflowing(AT)
    whole = list(fit(precision="amp_fp16", algorithms=[explode]))
    boundaries = [i for i, (event, _) in enumerate(whole) if event is Event.BATCH_END]
    for index in boundaries[AT - 1 : AT + 2]:
        again = list(fit(whole[index][1], precision="amp_fp16", algorithms=[explode]))
        assert_same_stream(again[1:], whole[index + 1 :], f"from {index}")


def test_the_scale_grows_after_enough_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(pl.run(fit(precision="amp_fp16", max_duration="1ba")).loss_scale), "GROWTH_INTERVAL", 3)
    ends = [state for event, state in fit(precision="amp_fp16", max_duration="5ba") if event is Event.BATCH_END]
    assert [float(state.loss_scale) / 2**16 for state in ends] == [1, 1, 2, 2, 2]


def test_microbatches_are_scaled_alike() -> None:
    whole, split = (pl.run(fit(precision="amp_fp16", max_duration="1ba", microbatch_size=size)) for size in (None, 4))
    for name in whole.params:
        torch.testing.assert_close(split.params[name], whole.params[name], rtol=1e-3, atol=1e-3)


def test_going_on_in_another_precision() -> None:
    """The precision is a setting, not part of the State; a loss scale comes and goes with it."""
    start = pl.run(fit(precision="amp_fp16", max_duration="2ba"))
    assert pl.run(fit(start, precision="fp32")).loss_scale is None
    assert pl.run(fit(pl.run(fit(max_duration="2ba")), precision="amp_fp16")).loss_scale is not None


def test_the_scaler_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pl.run(fit(precision="amp_fp16"))
