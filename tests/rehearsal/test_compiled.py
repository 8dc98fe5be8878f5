"""Steps that are to be compiled are traced, without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl

pytestmark = pytest.mark.slow  # torch's compiler is imported

E = pl.Event
DATA = [(torch.full((4, 3), 1.0), torch.tensor([0, 1, 1, 0]))] * 4


def rehearse(*args: Any, **options: Any) -> Any:
    plain = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "max_duration": "3ep"}
    return pl.rehearse(*(args or (torch.nn.Linear(3, 2), DATA)), **{**plain, **options})


@pl.algorithm(E.AFTER_LOSS)
def branching(state: pl.State) -> pl.State:
    return state.replace(loss=state.loss * 2) if state.loss > 1e9 else state


@pytest.mark.parametrize(
    "options", [{}, {"steps_per_call": 2}, {"evaluators": {"val": DATA}}], ids=["one", "several", "evaluators"]
)
def test_a_step_that_can_be_traced_passes(options: dict[str, Any]) -> None:
    stopping = [pl.algorithms.early_stopping("val/loss")] if "evaluators" in options else []
    report = rehearse(compile=True, algorithms=[pl.algorithms.ema(half_life="4ba"), *stopping], **options)
    assert report.phases[-1].name == "compile"


def test_a_step_that_can_not_be_traced_is_found() -> None:
    with pytest.raises(pl.RehearsalError) as caught:
        rehearse(compile=True, algorithms=[branching], watch={E.BATCH_END})
    ((phase, error),) = caught.value.failures
    assert phase == "compile=, tracing of a step"
    assert isinstance(error, pl.errors.CompileError)
    assert rehearse(compile="where possible", algorithms=[branching], watch={E.BATCH_END}).phases[-1].name == "compile"
    assert "compile=: the steps were not traced." in rehearse(compile=True, fake=True).skipped


def test_a_state_is_traced_by_its_module() -> None:
    options = {"loss": cross_entropy, "optimizer": pl.optim.adamw(lr=0.1), "compile": True}
    stream = pl.fit(torch.nn.Linear(3, 2), DATA, **{**options, "compile": False}, max_duration="1ep", seed=7)
    state = pl.run(stream)
    assert rehearse(state, DATA, **options, seed=7).phases[-1].name == "compile"
