"""Stages made by hand refuse what fit refuses, where they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl

TASK = pl.Task(loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]))


def made(**changes: Any) -> pl.Stages:
    return pl.Stages(**{"task": TASK, "optimizer": pl.optim.sgd(lr=0.1), **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": functional.mse_loss}, ["task", "pl.Task(loss=...)", "function"]),
        ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=0.1)}, ["optimizer", "pl.optim.adamw(lr=1e-3)", "SGD"]),
        ({"clip_grad": -1.0}, ["clip_grad", "above 0", "-1.0"]),
        ({"clip_grad": "x"}, ["clip_grad", "'x'"]),
        ({"nonfinite": "ignore"}, ["nonfinite", "skip", "'ignore'"]),
        ({"microbatch_size": "auto"}, ["microbatch_size", "at least 1", "'auto'"]),
        ({"microbatch_size": 0}, ["microbatch_size", "at least 1", "0"]),
        ({"precision": "fp4"}, ["precision", "amp_bf16", "'fp4'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_stages_are_not_made_with(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((pl.ArgumentError, pl.ArgumentTypeError)) as caught:
        made(**changes)
    assert all(word in str(caught.value) for word in words)


def test_a_precision_is_given_by_its_name() -> None:
    batch = torch.ones(2, 4), torch.zeros(2, 1)
    state = pl.State.create(nn.Linear(4, 1)).replace(batch=batch, microbatch=batch)
    assert made(precision="amp_bf16").forward(state).outputs.dtype is torch.bfloat16


@pytest.mark.parametrize("missing", ["loss", "grads"])
def test_an_update_says_what_it_lacks(missing: str) -> None:
    optimizer = pl.optim.sgd(lr=0.1)
    state = pl.State.create(nn.Linear(4, 1))
    state = state.replace(opt_state=optimizer.init(state.params))
    if missing == "grads":
        state = state.replace(loss=torch.tensor(1.0))
    with pytest.raises(pl.ArgumentError, match=rf"state\.{missing} is None.*stages\.backward"):
        made().update(state)
