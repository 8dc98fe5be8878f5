"""Gradients that are added up in place, and steps that fail or are left out."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.random import seeded
from pure_loop.stages.references import can_count
from tests.ownership.programs import OPTIMIZERS
from tests.support.donating import Count, assert_same, fit

pytestmark = [
    pytest.mark.skipif(not can_count(), reason="references can't be counted in this interpreter"),
    pytest.mark.usefixtures("every_gradient_is_large"),
]
ONE, SOME = {Event.BATCH_END}, {Event.AFTER_BACKWARD, Event.BATCH_END}
ON_A_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)
Donated = pl.errors.DonatedStateError


class Model(nn.Module):
    """With batch normalisation, and a layer that has gradients in some microbatches alone.

    Args:
        fails_at: the backward that fails, from 1 on; 0: none.
    """

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        with seeded(0):
            self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
            self.sometimes = nn.Linear(4, 3)
        self.backwards, self.fails_at = itertools.count(1), fails_at

    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.first(x))
        if self.fails_at:
            hidden.register_hook(self.count)
        return self.last(hidden) + self.sometimes(x) if x.sum() > 0 else self.last(hidden)

    def count(self, gradient: Tensor) -> None:
        if next(self.backwards) == self.fails_at:
            raise ArithmeticError("on purpose")


def test_a_backward_that_fails_half_way_leaves_no_wrong_gradients(tmp_path: Path) -> None:
    """Training resumes from the State before, which gave up its gradients when the step began, and nothing else."""
    for watch in (None, SOME):
        kept = None
        with pytest.raises(ArithmeticError):  # noqa: PT012 - it is the loop that fails
            for event, state in fit(Model(8), microbatch_size=2, watch=watch):
                if event is Event.BATCH_END:
                    kept = state
        assert kept.grads["first.weight"].any()
        with pytest.raises(Donated, match=r"state\.grads .* batch "):
            state.grads["first.weight"]
    with pytest.raises(ArithmeticError):
        for _, state in fit(Model(3), watch=ONE):  # noqa: B007
            pass
    assert state.timestamp.batch == 2
    with pytest.raises(Donated, match=r"state\.grads .* batch "):
        state.grads["first.weight"]
    pl.save(state, tmp_path / "state.safetensors")
    whole = pl.run(fit(Model()))
    for start in (state, pl.load(tmp_path / "state.safetensors", model=Model())):
        assert_same(pl.run(fit(start)).params, whole.params)


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
    for optimizer in (*map(OPTIMIZERS.get, ("adamw", "partition", "RAdam")), DAMPENED):
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


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("device", ["cpu", ON_A_DEVICE])
def test_an_update_that_overflows_by_itself_is_an_error(device: str) -> None:
    """Loss and gradients are finite, so no batch is to blame: left out, every later one would be, too."""
    says = r"batch \d+ .*the optimizer's step made" if device == "cpu" else r"of batch \d+ was NaN or infinite"
    for options in ({}, {"donate": False}, {"compile": True, "watch": {"epoch_end"}}, *SETTINGS):
        with pytest.raises(pl.errors.NonFiniteError, match=says):
            pl.run(fit(optimizer=pl.optim.sgd(lr=1e39), device=device, **options))
