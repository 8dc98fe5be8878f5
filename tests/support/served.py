"""What methods of the library need to be tried: arguments without a range, and the problem that serves each."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.ranges import alternatives_in, settings_of
from pure_loop.testing._compositions import values
from pure_loop.testing.problems import PROBLEMS, Problem
from tests.support.samples import simplest

__all__ = ["NEEDED", "SERVED", "module_of", "required", "served"]

# Arguments that have to be given and that no range says how to draw, by their names.
NEEDED: dict[str, Any] = {
    "milestones": ["1ba", "3ba"],
    "first": 1.0,
    "values": {"0ba": 1.0, "2ba": 0.5},
    "factors": (pl.schedules.constant(2.0), pl.schedules.linear(1.0, 0.0, "4ba")),
    "function": lambda outputs, batch: outputs.detach().exp().sum(dim=1),
    "name": "measured",
    "channel": "#training",
    "url": "memory://uploaded",
    "benchmark": "linear",
    "prompts": ["a"],
    "blocks": nn.ReLU,
    "generate": lambda module, prompt: f"{prompt} {torch.rand(())}",
}
# Tests that are about no method of it run without it.
if importlib.util.find_spec("torchmetrics") is not None:
    import torchmetrics

    NEEDED["metric"] = torchmetrics.classification.MulticlassF1Score(6, average="macro")

# The same of one method alone.
NEEDED_OF: dict[str, dict[str, Any]] = {"transform": {"function": lambda sample: sample + torch.rand(())}}

# A problem for each thing that an algorithm may need, as ``SERVES`` of its module says.
SERVED: dict[str | None, Problem | str] = {
    "images": "convolution",
    "images of any size": Problem(
        name="images of any size",
        make_model=lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)),
        make_batch=PROBLEMS["convolution"].make_batch,
        loss=functional.cross_entropy,
    ),
    "images from 0 to 1": Problem(
        name="images from 0 to 1",
        make_model=lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        make_batch=lambda samples, random: (
            torch.rand(samples, 1, 4, 4, generator=random),
            torch.randint(2, (samples,), generator=random),
        ),
        loss=functional.cross_entropy,
    ),
    "several layers": "mlp",
    "dropout": "mlp",
    "feed-forward blocks": "mlp",
    "no model": "mlp",
    "attention": Problem(
        name="attention",
        make_model=lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(16, 2)
        ),
        make_batch=lambda samples, random: (
            torch.randn(samples, 4, 4, generator=random),
            torch.randint(2, (samples,), generator=random),
        ),
        loss=functional.cross_entropy,
    ),
    "tokens": "transformer",
    "group norms": Problem(
        name="group norms",
        make_model=lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)),
        make_batch=PROBLEMS["linear"].make_batch,
        loss=functional.cross_entropy,
    ),
}


def module_of(made: Any) -> ModuleType:
    return sys.modules[made.__module__]


def served(factory: Any) -> Problem | str | None:
    """The problem that has what an algorithm needs, as ``SERVES`` of its module says; None: any will do."""
    return SERVED.get(getattr(module_of(factory), "SERVES", None))


def required(method: Any, folder: Path | None = None) -> dict[str, Any]:
    """The arguments that a method needs: the simplest that its ranges allow."""
    settings = settings_of(method)
    needed = {**NEEDED, **NEEDED_OF.get(method.__name__, {})}
    chosen = {way[0].name for way in alternatives_in(settings)}
    given = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is not parameter.VAR_POSITIONAL and (parameter.default is parameter.empty or name in chosen):
            if name == "folder":
                given[name] = folder
            elif name == "path":
                given[name] = "record.pt" if folder is None else folder / "record.pt"
            else:
                typical = name in settings and settings[name].range.typical
                given[name] = needed[name] if name in needed and not typical else simplest(values(settings[name]))
    return given
