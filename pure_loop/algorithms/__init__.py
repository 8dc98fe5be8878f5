"""Training methods, one file each: pure functions ``State -> State`` made by a factory with its settings.

Each method's arithmetic is a function of tensors, mappings or modules as well, to use without the loop. Whatever a
method keeps from event to event is in ``state.algorithm_state``, and not in a closure or an attribute, so that training
resumes bitwise. A handler returns a new State and writes to no tensor of the one that it received.

May import ``loop`` and what is below; only ``entry`` and ``testing`` import it. Begin with ``gradient_clipping.py``;
``make new-algorithm NAME=...`` writes the skeletons of a method and its test, and lists it here.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.algorithms.blurpool import apply_blurpool, blurpool
    from pure_loop.algorithms.cutmix import cutmix, paste
    from pure_loop.algorithms.cutout import cutout, fill
    from pure_loop.algorithms.early_stopping import early_stopping, restored
    from pure_loop.algorithms.ema import averaged, ema, moving_average
    from pure_loop.algorithms.gradient_clipping import gradient_clipping
    from pure_loop.algorithms.gradient_noise import gradient_noise
    from pure_loop.algorithms.label_smoothing import label_smoothing, smooth_labels
    from pure_loop.algorithms.lookahead import lookahead, step_towards
    from pure_loop.algorithms.mixup import mix, mixup
    from pure_loop.algorithms.reduce_on_plateau import reduce_on_plateau
    from pure_loop.algorithms.sam import perturb, sam
    from pure_loop.algorithms.threshold_stopping import threshold_stopping

__all__ = [
    "apply_blurpool",
    "averaged",
    "blurpool",
    "cutmix",
    "cutout",
    "early_stopping",
    "ema",
    "fill",
    "gradient_clipping",
    "gradient_noise",
    "label_smoothing",
    "lookahead",
    "mix",
    "mixup",
    "moving_average",
    "paste",
    "perturb",
    "reduce_on_plateau",
    "restored",
    "sam",
    "smooth_labels",
    "step_towards",
    "threshold_stopping",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "apply_blurpool": "pure_loop.algorithms.blurpool",
            "averaged": "pure_loop.algorithms.ema",
            "blurpool": "pure_loop.algorithms.blurpool",
            "cutmix": "pure_loop.algorithms.cutmix",
            "cutout": "pure_loop.algorithms.cutout",
            "early_stopping": "pure_loop.algorithms.early_stopping",
            "ema": "pure_loop.algorithms.ema",
            "fill": "pure_loop.algorithms.cutout",
            "gradient_clipping": "pure_loop.algorithms.gradient_clipping",
            "gradient_noise": "pure_loop.algorithms.gradient_noise",
            "label_smoothing": "pure_loop.algorithms.label_smoothing",
            "lookahead": "pure_loop.algorithms.lookahead",
            "mix": "pure_loop.algorithms.mixup",
            "mixup": "pure_loop.algorithms.mixup",
            "moving_average": "pure_loop.algorithms.ema",
            "paste": "pure_loop.algorithms.cutmix",
            "perturb": "pure_loop.algorithms.sam",
            "reduce_on_plateau": "pure_loop.algorithms.reduce_on_plateau",
            "restored": "pure_loop.algorithms.early_stopping",
            "sam": "pure_loop.algorithms.sam",
            "smooth_labels": "pure_loop.algorithms.label_smoothing",
            "step_towards": "pure_loop.algorithms.lookahead",
            "threshold_stopping": "pure_loop.algorithms.threshold_stopping",
        },
    )


def __dir__() -> list[str]:
    return __all__
