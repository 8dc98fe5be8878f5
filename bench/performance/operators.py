"""Importing a torchvision that was built for another build of torch."""

from __future__ import annotations

import importlib
from functools import cache

import torch

__all__ = ["let_torchvision_be_imported"]


@cache
def let_torchvision_be_imported() -> None:
    """Composer imports torchvision, and others do where it is installed; its operators in C++ need CUDA.

    Without them it stops at the two that it describes in Python, unless they are there. Training calls none.
    """
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
