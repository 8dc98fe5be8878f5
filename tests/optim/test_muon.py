"""Muon against torch's class, and Adafactor, which is torch's own: 20 steps are those of a loop by hand, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pure_loop as pl
from tests.support.models import batches, plain
from tests.support.optimizing import assert_equal, named, ours, tensors, theirs

DATA = batches((8,) * 5, 1)
RATE = pl.schedules.linear(0.05, 0.01, "20ba")
STEPS = 20
SHAPES = [(3, 5), (5, 3), (4, 4), (1, 6), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"nesterov": False, "momentum": 0.8, "weight_decay": 0.3}, None),
        ({"adjust_lr": "match_rms_adamw"}, {"adjust_lr_fn": "match_rms_adamw"}),
    ],
    ids=str,
)
def test_it_is_torch_muon(options: dict[str, Any], reference: dict[str, Any] | None, dtype: torch.dtype) -> None:
    start = tensors(0, dtype, SHAPES)
    steps: list[list[torch.Tensor | None]] = [[*tensors(1 + step, dtype, SHAPES)] for step in range(STEPS)]
    steps[3][1] = steps[4][0] = None
    reference = options if reference is None else reference
    expected = theirs(lambda p: torch.optim.Muon(p, 0.02, **reference), start, steps)  # type: ignore[arg-type]
    assert_equal(ours(pl.optim.muon(0.02, **options), start, steps), expected)


def test_steps_are_near_orthogonal_matrices() -> None:
    start, gradients = tensors(0, torch.float64, [(8, 8)]), tensors(1, torch.float64, [(8, 8)])
    (_, (params, _)) = ours(pl.optim.muon(1.0, weight_decay=0.01, independent_decay=True), start, [gradients])
    values = torch.linalg.svdvals(0.99 * start[0] - params["p0"])
    assert values.min() > 0.3 and values.max() < 1.3  # noqa: PT018


def is_hidden(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and name.startswith("0.")


def muon(**options: Any) -> pl.optim.Optimizer:
    return pl.optim.partition(
        {"hidden": pl.optim.muon(RATE, **options), "others": pl.optim.adamw(lr=0.01)},
        label=lambda name, tensor: "hidden" if is_hidden(name, tensor) else "others",
    )


def adafactor() -> pl.optim.Optimizer:
    return pl.optim.from_torch(torch.optim.Adafactor, lr=RATE)


def stream(optimizer: pl.optim.Optimizer, start: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    start = plain() if start is None else start
    return pl.fit(start, DATA, loss=cross_entropy, optimizer=optimizer, max_duration=f"{STEPS}ba", **options)


def trained(optimizer: pl.optim.Optimizer, start: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    return dict(pl.run(stream(optimizer, start, **options)).params)


def by_hand(kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = plain()
    params = dict(model.named_parameters())
    optimizers: list[torch.optim.Optimizer]
    if kind == "muon":
        hidden = [param for name, param in params.items() if is_hidden(name, param)]
        others = [param for name, param in params.items() if not is_hidden(name, param)]
        optimizers = [torch.optim.Muon(hidden), torch.optim.AdamW(others, 0.01, fused=True)]
    else:
        optimizers = [torch.optim.Adafactor(model.parameters())]
    for batch in range(STEPS):
        inputs, targets = DATA[batch % len(DATA)]
        cross_entropy(model(inputs), targets).backward()
        optimizers[0].param_groups[0]["lr"] = RATE(pl.Timestamp(batch=batch))
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: param.detach() for name, param in params.items()}


@pytest.mark.parametrize(("kind", "make"), [("muon", muon), ("adafactor", adafactor)])
def test_runs_are_those_by_hand_and_resume(kind: str, make: Callable[[], pl.optim.Optimizer]) -> None:
    expected = by_hand(kind)
    kept = [state for event, state in stream(make()) if event is pl.Event.BATCH_END]
    runs = [trained(make()), trained(make(), donate=False), trained(make(), kept[0]), trained(make(), kept[13])]
    for params in (*runs, kept[-1].params):
        assert all(torch.equal(params[name], value) for name, value in expected.items())


@pytest.mark.usefixtures("interpreted")
def test_compiled_steps() -> None:
    """Of a schedule of the momentum too; a sum in another order may be another number of bfloat16."""
    momentum = pl.schedules.linear(0.8, 0.95, "20ba")
    compiled = trained(muon(momentum=momentum), compile=True)
    torch.testing.assert_close(compiled, trained(muon(momentum=momentum)), rtol=1e-2, atol=1e-3)


def test_adafactor_runs_between_compiled_graphs() -> None:
    with pytest.raises(pl.errors.CompileError, match=r"Adafactor.* can't be compiled.*where possible"):
        trained(adafactor(), compile=True)


def test_their_names_are_answered() -> None:
    for name, advice in (("Muon", r"muon\(lr=0\.02\)"), ("adafactor", r"from_torch\(torch\.optim\.Adafactor")):
        with pytest.raises(AttributeError, match=advice):
            getattr(pl.optim, name)


def test_muon_takes_matrices_alone() -> None:
    with pytest.raises(pl.errors.ArgumentError, match=r"parameter '0\.bias' has shape \(5,\) .*pl\.optim\.partition"):
        trained(pl.optim.muon())
    with pytest.raises(pl.errors.ArgumentError, match="matrices of real numbers"):
        pl.optim.muon().init(named([torch.ones(2, 2, dtype=torch.complex64)]))
    with pytest.raises(pl.errors.ArgumentError, match="muon: adjust_lr must be"):
        pl.optim.muon(adjust_lr="adamw")  # type: ignore[arg-type]
