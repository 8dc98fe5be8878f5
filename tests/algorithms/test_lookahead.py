"""Lookahead, in real training loops, against a loop written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.algorithms import lookahead, step_towards
from tests.support.runs import LR, close, equal, mlp, points, train


@pytest.mark.parametrize(("interval", "rate"), [(1, 0.5), (2, 0.8), (4, 0.1)])
def test_lookahead_is_the_loop_written_by_hand(interval: int, rate: float) -> None:
    model, data = mlp(), points(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for number, (inputs, targets) in enumerate(data * 2):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if (number + 1) % interval == 0:
            with torch.no_grad():
                for old, parameter in zip(slow, model.parameters(), strict=True):
                    old += rate * (parameter - old)
                    parameter.copy_(old)
    trained = train(mlp(), data, [lookahead(interval, rate)], optimizer=pl.optim.sgd(lr=LR, momentum=0.9))
    close(trained.params, dict(model.named_parameters()))


def test_a_rate_of_1_changes_nothing() -> None:
    equal(train(mlp(), points(), [lookahead(2, 1.0)]).params, train(mlp(), points()).params)


def test_what_is_not_trained_stays_the_very_tensor() -> None:
    kept, counts = torch.ones(2), torch.tensor([1])
    slow: dict[str, Any] = {"kept": kept, "counts": torch.tensor([0]), "w": torch.zeros(2)}
    new = step_towards(slow, {"kept": kept, "counts": counts, "w": torch.ones(2)})
    assert new["kept"] is kept
    assert new["counts"] is counts
    equal(new["w"], torch.full((2,), 0.5))
    assert step_towards({"kept": kept}, {"kept": kept})["kept"] is kept
