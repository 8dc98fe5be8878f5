"""Gradients that are added up in place, and steps that fail or are left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.stages.references import can_count
from pure_loop.stages.workspace import Workspace
from tests.ownership.programs import OPTIMIZERS
from tests.support.donating import Count, assert_same, fit

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("every_gradient_is_large"),
]
ONE, SOME = {Event.BATCH_END}, {Event.AFTER_BACKWARD, Event.BATCH_END}
ON_A_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)


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
    """With batch normalisation, and a layer that has gradients in some microbatches alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.sometimes = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.last(Failing.apply(self.norm(self.first(x))))  # type: ignore[no-untyped-call]
        return out + self.sometimes(x) if x.sum() > 0 else out


@pytest.mark.parametrize("watch", [None, SOME], ids=["every event", "some"])
def test_a_backward_that_fails_half_way_leaves_no_wrong_gradients(watch: Any) -> None:
    Failing.left, kept = 8, None
    with pytest.raises(ArithmeticError):  # noqa: PT012 - it is the loop that fails
        for event, state in fit(Model(), microbatch_size=2, watch=watch):
            if event is Event.BATCH_END:
                kept = state
    assert kept.grads["first.weight"].any()
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.grads .* batch "):
        state.grads["first.weight"]


@pytest.mark.parametrize("saves", [False, True], ids=["of the State", "of a checkpoint"])
def test_where_a_step_fails_training_resumes_from_the_state_before(tmp_path: Path, saves: bool) -> None:
    """With nothing watched but BATCH_END that State gave up its gradients when the step began, and nothing else."""
    whole = pl.run(fit(Model()))
    Failing.left = 3
    with pytest.raises(ArithmeticError):
        for _, state in fit(Model(), watch=ONE):  # noqa: B007
            pass
    assert state.timestamp.batch == 2
    with pytest.raises(pl.errors.DonatedStateError, match=r"state\.grads .* batch "):
        state.grads["first.weight"]
    if saves:
        pl.save(state, tmp_path / "state.safetensors")
        state = pl.load(tmp_path / "state.safetensors", model=Model())
    assert_same(pl.run(fit(state)).params, whole.params)


BAD = (0, 4, 9)
SETTINGS: list[dict[str, Any]] = [
    {"nonfinite": "skip"},
    {"precision": "amp_fp16"},
    {"precision": "amp_fp16", "nonfinite": "skip"},
]
DAMPENED = pl.optim.sgd(lr=0.1, momentum=0.9, dampening=0.1)


@pl.algorithm(Event.AFTER_TRAIN_BATCH)
def infinite_gradients(state: pl.State) -> pl.State:
    if state.timestamp.batch not in BAD:
        return state
    return state.replace(grads={k: None if g is None else g * math.inf for k, g in state.grads.items()})


@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_step_that_may_be_left_out_writes_in_place_as_others_do(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is left out writes nothing, counts nothing and undoes what the forward counted."""
    count = Count(monkeypatch)
    for optimizer in (*(make() for name, make in OPTIMIZERS.items() if name != "lion"), DAMPENED):
        settings = {"algorithms": [infinite_gradients], "optimizer": optimizer, "device": device, **options}
        expected = pl.run(fit(Model(), donate=False, **settings))
        count.reused = count.copied = 0
        assert_same(pl.run(fit(Model(), **settings)), expected)
        skipped = int(expected.skipped)
        assert skipped >= len(BAD)
        assert "nonfinite" not in options or int(expected.buffers["norm.num_batches_tracked"]) == 15 - skipped
        # On a CPU a step that is left out asks for no memory; on a device the host doesn't know that it is.
        assert device != "cpu" or (count.copied + count.reused, count.copied <= 1) == (15 - skipped, True)


def test_what_was_noted_for_a_step_that_is_left_out_holds_for_no_later_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small ones, whose references are not counted anew."""
    monkeypatch.setattr("pure_loop.stages.ownership.LARGE", 2**18)
    kept = []
    for event, state in fit(algorithms=[infinite_gradients], nonfinite="skip", clip_grad=1.0):
        if event is Event.AFTER_BACKWARD:  # clipping comes next
            kept.append((state, [each.clone() for each in state.grads.values()]))
    for state, numbers in kept:
        assert all(map(torch.equal, state.grads.values(), numbers))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "dampening"])
def test_where_steps_copy_nothing_of_the_start_is_kept(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = Workspace.made

    def made(this: Workspace, state: pl.State, *, lent: bool = False) -> None:
        real(this, state, lent=lent)
        assert this.ownership is not None
        kept.append((this.ownership._granted(), this.ownership._last()))

    monkeypatch.setattr(Workspace, "made", made)
    pl.run(
        fit(
            Model(),
            optimizer={"adamw": pl.optim.adamw(lr=0.1), "dampening": DAMPENED}[optimizer],
            nonfinite="skip",
            device="cuda",
        )
    )
    assert kept == [(None, None)] * 16  # at the start, and after 15 steps


HOW = [{}, {"donate": False}, {"compile": True}, {"compile": True, "watch": {"epoch_end"}}]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
def test_an_update_that_overflows_by_itself_is_an_error(device: str) -> None:
    """Loss and gradients are finite, so no batch is to blame: left out, every later one would be, too."""
    says = r"batch \d+ .*the optimizer's step made" if device == "cpu" else r"of batch \d+ was NaN or infinite"
    for options in ({}, *SETTINGS):
        for how in HOW[:2] if options else HOW:
            with pytest.raises(pl.NonFiniteError, match=says):
                pl.run(fit(optimizer=pl.optim.sgd(lr=1e39), device=device, **options, **how))
