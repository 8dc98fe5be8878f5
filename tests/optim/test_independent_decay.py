"""Weight decay that is independent of the learning rate: torch's step after ``params *= 1 - weight_decay``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import pure_loop as pl
from pure_loop.optim import Optimizer, adamw, lion, sgd
from tests.support import models
from tests.support.optimizing import DTYPES, Step, assert_equal, batches, named, ours, tensors

DECAY = 0.1
Reference = Callable[[list[Tensor]], torch.optim.Optimizer]
MADE: dict[str, tuple[Callable[..., Optimizer], Reference]] = {
    "adamw": (
        lambda **options: adamw(0.1, **options),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0, fused=True),
    ),
    "adamw with amsgrad": (
        lambda **options: adamw(0.1, amsgrad=True, maximize=True, **options),
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.0, amsgrad=True, maximize=True, fused=True),
    ),
    "sgd": (lambda **options: sgd(0.1, **options), lambda p: torch.optim.SGD(p, 0.1, fused=True)),
    "sgd with momentum": (
        lambda **options: sgd(0.1, momentum=0.9, nesterov=True, **options),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True),
    ),
    "sgd with dampening": (
        lambda **options: sgd(0.1, momentum=0.9, dampening=0.5, **options),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, fused=True),
    ),
}


def by_hand(make: Reference, start: Sequence[Tensor], steps: Sequence[Step]) -> list[list[Tensor]]:
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = make(params)
    results = [list(start)]
    for gradients in steps:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
            if gradient is not None:
                param.data *= 1 - DECAY
        optimizer.step()
        results.append([param.detach().clone() for param in params])
    return results


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", MADE)
def test_it_is_torch_after_the_decay(name: str, dtype: torch.dtype) -> None:
    make, reference = MADE[name]
    start = tensors(0, dtype)
    steps: list[list[Tensor | None]] = [[*gradients] for gradients in batches(0, dtype, 6)]
    for step in steps[1:4]:  # a parameter that a batch doesn't use doesn't decay either
        step[1] = None
    optimizer = make(weight_decay=DECAY, independent_decay=True)
    assert_equal(ours(optimizer, start, steps), by_hand(reference, start, steps))


@pytest.mark.parametrize("make", [adamw, sgd, lion])
@pytest.mark.parametrize("lr", [0.0, 0.5])
def test_only_the_decay_that_depends_on_the_rate_is_scaled_by_it(make: Callable[..., Optimizer], lr: float) -> None:
    start, still = (named([torch.full((2,), value, dtype=torch.float64)]) for value in (1.0, 0.0))

    def kept(**options: Any) -> float:
        optimizer = make(lr, weight_decay=0.01, **options)
        params, _ = optimizer.update(still, optimizer.init(start), start, pl.Timestamp())
        return params["p0"][0].item()

    assert kept(independent_decay=True) == 0.99
    assert kept() == pytest.approx(1 - 0.01 * lr, abs=1e-15)


def test_decay_in_proportion_to_the_schedule_of_the_rate() -> None:
    """Loshchilov and Hutter's ``weight_decay * lr(t) / peak``: at half the peak 0.005 of a decay of 0.01."""
    rate = pl.schedules.linear(0.2, 0.0, "4ba")
    optimizer = sgd(rate, weight_decay=0.01 / 0.2 * rate, independent_decay=True)
    start, still = (named([torch.full((2,), value, dtype=torch.float64)]) for value in (1.0, 0.0))
    params, _ = optimizer.update(still, optimizer.init(start), start, pl.Timestamp(batch=2))
    assert params["p0"][0].item() == pytest.approx(0.995, abs=1e-15)


@pytest.mark.parametrize("name", ["adamw", "sgd with momentum"])
def test_donated_and_resumed_training(name: str) -> None:
    model, data = models.plain(), models.batches((8,) * 4, 1)
    optimizer = MADE[name][0](weight_decay=DECAY, independent_decay=True)
    options: dict[str, Any] = {"loss": cross_entropy, "optimizer": optimizer, "max_duration": "2ep"}
    kept = [state for event, state in pl.fit(model, data, **options) if event is pl.Event.BATCH_END]
    for start in (model, kept[2], kept[5]):
        for more in ({}, {"donate": False}):
            state = pl.run(pl.fit(start, data, **options, **more))
            for key, expected in kept[-1].params.items():
                assert torch.equal(state.params[key], expected), key
