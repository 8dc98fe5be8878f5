"""Reduction on a plateau in real training loops, against torch's ReduceLROnPlateau."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import reduce_on_plateau
from pure_loop.compile import interpreted
from pure_loop.state import POSITIONS
from pure_loop.testing.comparison import differences
from tests.algorithms.test_early_stopping import DATA, scores, stream
from tests.support.tiers import examples


@given(
    values=st.lists(st.sampled_from([0.2, 0.4, 0.40001, 0.5, 0.9]), min_size=1, max_size=12),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
    threshold=st.sampled_from([(1e-4, "rel"), (0.0, "abs"), (0.15, "abs"), (0.3, "rel")]),
    min_scale=st.sampled_from([0.0, 0.03]),
)
@examples(15, 300)
def test_it_reduces_where_torch_reduces(
    values: list[float], patience: int, cooldown: int, mode: Any, threshold: Any, min_scale: float
) -> None:
    settings: dict[str, Any] = {"patience": patience, "cooldown": cooldown, "threshold": threshold[0], "mode": mode}
    algorithm = reduce_on_plateau("val/accuracy", threshold_mode=threshold[1], min_scale=min_scale, **settings)
    parameter = torch.zeros(1, requires_grad=True)
    theirs = torch.optim.SGD([parameter], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs, threshold_mode=threshold[1], min_lr=min_scale, eps=0.0, **settings
    )
    evaluators = {"val": scores(values)}
    duration = f"{len(values)}ep"
    watched = {Event.EPOCH_CHECKPOINT}
    scales = [
        1.0 if state.lr_scale is None else float(state.lr_scale)
        for _, state in stream([algorithm], evaluators=evaluators, max_duration=duration, watch=watched)
    ]
    wanted = []
    for value in values:
        plateau.step(torch.tensor(value))
        wanted.append(theirs.param_groups[0]["lr"])
    assert scales == pytest.approx(wanted, rel=1e-12)


def test_a_run_is_that_of_torch_s_scheduler_in_a_loop_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    data, val = ([(torch.randn(4, 3, generator=g), torch.randn(4, 2, generator=g)) for _ in range(2)] for _ in range(2))
    model = torch.nn.Linear(3, 2)
    by_hand, mse = copy.deepcopy(model), torch.nn.functional.mse_loss
    reference = torch.optim.SGD(by_hand.parameters(), lr=0.8, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(reference, factor=0.5, patience=1)
    for _ in range(12):
        for inputs, targets in data:
            reference.zero_grad()
            mse(by_hand(inputs), targets).backward()
            reference.step()
        with torch.no_grad():
            scheduler.step(sum(mse(by_hand(inputs), targets) for inputs, targets in val) / 2)
    assert scheduler.get_last_lr()[0] < 0.3, "the case reduces the rate"
    options: dict[str, Any] = {"evaluators": {"val": pl.Evaluator(val, metrics=[pl.metrics.loss()])}, "loss": mse}
    options |= {"optimizer": pl.optim.sgd(lr=0.8, momentum=0.5), "max_duration": "12ep"}
    plateau = reduce_on_plateau("val/loss", factor=0.5, patience=1)
    end = pl.run(pl.fit(model, data, algorithms=[plateau], **options))
    for name, param in by_hand.named_parameters():
        torch.testing.assert_close(end.params[name], param.detach(), rtol=1e-5, atol=1e-6)


RUNS: dict[str, dict[str, Any]] = {
    "evaluations": {
        "algorithms": [reduce_on_plateau("val/loss", patience=1, threshold=0.5)],
        "evaluators": {"val": DATA},
    },
    "training": {"algorithms": [reduce_on_plateau("train/loss", patience=1, threshold=0.5)]},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_reduces_where_it_would_have_reduced(name: str) -> None:
    whole = list(stream(max_duration="8ep", **RUNS[name]))
    assert whole[-1][1].lr_scale is not None
    for event, state in whole:
        if event in POSITIONS:
            rest = pl.run(stream(start=state, max_duration="8ep", **RUNS[name]))
            assert not differences(rest, whole[-1][1]), state


def test_compiled_steps_use_the_reduced_rate() -> None:
    run: dict[str, Any] = {**RUNS["training"], "max_duration": "8ep"}
    with interpreted():
        compiled = pl.run(stream(compile=True, **run))
    assert torch.equal(compiled.lr_scale, pl.run(stream(**run)).lr_scale)  # type: ignore[arg-type]
