"""Mixup and CutMix on the same draws as timm's, where timm and torchvision are installed; CI has neither."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from pure_loop.algorithms import mix, paste
from tests.support.runs import noise

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("timm", "torchvision")), reason="needs timm and torchvision"
)


@pytest.fixture(scope="module")
def mixup_of_timm() -> Any:
    """Its class; torchvision's operators of another build of torch are declared, so that it can be imported."""
    if "torchvision" not in sys.modules and not torch.cuda.is_available():
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules[f"{__name__}.library"] = library  # type: ignore[assignment]
    from timm.data.mixup import Mixup

    return Mixup


@pytest.mark.parametrize("mode", ["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(5))
def test_batches_and_targets_are_those_of_timm(mixup_of_timm: Any, mode: str, seed: int) -> None:
    images = torch.rand(6, 3, 10, 12, generator=noise(seed))
    targets = torch.tensor([0, 1, 2, 3, 0, 1])
    alphas = {"mixup_alpha": 0.4} if mode == "mixup" else {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}
    theirs = mixup_of_timm(**alphas, label_smoothing=0.0, num_classes=4)
    numpy.random.seed(seed)
    wanted, wanted_targets = theirs(images.clone(), targets)
    partner = torch.arange(5, -1, -1)  # the batch, turned around
    kept = float(wanted_targets[0, 0])  # its partner is of another class
    if mode == "mixup":
        ours = mix(images, partner, 1 - kept)
    else:
        mask = (wanted != images).any(1).any(0)
        ours = paste(images, partner, mask)
        assert abs(float(mask.float().mean()) - (1 - kept)) < 1e-5
    torch.testing.assert_close(ours, wanted)
    one_hot = functional.one_hot(targets, 4).float()
    torch.testing.assert_close(mix(one_hot, partner, 1 - kept), wanted_targets)
