"""Training methods, one file each: pure functions ``State -> State`` made by a factory with its settings.

Each method's arithmetic is a function of tensors, mappings or modules as well, to use without the loop. What
a method remembers lives in ``state.algorithm_state``, so that going on from a State is exact.
"""

from __future__ import annotations

from pure_loop.algorithms.blurpool import apply_blurpool, blurpool
from pure_loop.algorithms.ema import averaged, ema, moving_average
from pure_loop.algorithms.gradient_clipping import gradient_clipping
from pure_loop.algorithms.label_smoothing import label_smoothing, smooth_labels
from pure_loop.algorithms.sam import perturb, sam

__all__ = [
    "apply_blurpool",
    "averaged",
    "blurpool",
    "ema",
    "gradient_clipping",
    "label_smoothing",
    "moving_average",
    "perturb",
    "sam",
    "smooth_labels",
]
