"""Training methods, one file each: pure functions ``State -> State`` made by a factory with its settings.

Each method's arithmetic is a function of tensors, mappings or modules as well, to use without the loop; it is imported
from here by its name, as ``averaged`` is, while ``dir`` and ``__all__`` have algorithms alone. Whatever a
method keeps from event to event is in ``state.algorithm_state``, and not in a closure or an attribute, so that training
resumes bitwise. A handler returns a new State and writes to no tensor of the one that it received.

May import ``stages`` and what is below, and of the loop the type of its stages; only ``entry`` and ``testing`` import
it. Begin with ``gradient_clipping.py``; ``make new-algorithm NAME=...`` writes the skeletons of a method and its test,
and lists it here.
"""

# Generated from the modules by docs/generate.py (make docs); only the docstring is written by hand.

from __future__ import annotations

from typing import TYPE_CHECKING

from pure_loop._internal.lazy import lazily as _lazily

if TYPE_CHECKING:
    from pure_loop.algorithms.alibi import alibi, alibi_bias, alibi_slopes, apply_alibi
    from pure_loop.algorithms.augmix import augmix, augmix_images, jensen_shannon
    from pure_loop.algorithms.blurpool import apply_blurpool, blurpool
    from pure_loop.algorithms.channels_last import apply_channels_last, channels_last, in_channels_last
    from pure_loop.algorithms.colout import colout, with_lines
    from pure_loop.algorithms.cutmix import cutmix, paste
    from pure_loop.algorithms.cutout import cutout, fill
    from pure_loop.algorithms.early_stopping import early_stopping, restored
    from pure_loop.algorithms.ema import averaged, ema, moving_average
    from pure_loop.algorithms.factorize import (
        apply_factorize,
        break_even,
        factorize,
        factorize_module,
        factors,
        set_rank,
    )
    from pure_loop.algorithms.gated_linear_units import FeedForward, apply_gated_linear_units, gated, gated_linear_units
    from pure_loop.algorithms.ghost_batchnorm import apply_ghost_batchnorm, ghost_batchnorm
    from pure_loop.algorithms.gradient_clipping import gradient_clipping
    from pure_loop.algorithms.gradient_noise import gradient_noise
    from pure_loop.algorithms.gyro_dropout import apply_gyro_dropout, gyro_dropout, masks
    from pure_loop.algorithms.label_smoothing import label_smoothing, smooth_labels
    from pure_loop.algorithms.layer_freezing import freezable, frozen_count, layer_freezing
    from pure_loop.algorithms.lookahead import lookahead, step_towards
    from pure_loop.algorithms.low_precision_groupnorm import apply_low_precision_groupnorm, low_precision_groupnorm
    from pure_loop.algorithms.low_precision_layernorm import apply_low_precision_layernorm, low_precision_layernorm
    from pure_loop.algorithms.mixup import mix, mixup
    from pure_loop.algorithms.no_op_model import NoOp, apply_no_op_model, no_op_model
    from pure_loop.algorithms.population_based import Round, population_based, rounds
    from pure_loop.algorithms.progressive_resizing import progressive_resizing, resized, side_of
    from pure_loop.algorithms.randaugment import randaugment, randaugment_images
    from pure_loop.algorithms.reduce_on_plateau import reduce_on_plateau
    from pure_loop.algorithms.sam import orthogonal_part, perturb, sam
    from pure_loop.algorithms.selective_backprop import hardest, probabilities, selective_backprop
    from pure_loop.algorithms.sequence_length_warmup import sequence_length_warmup, with_length
    from pure_loop.algorithms.squeeze_excite import SqueezeExcite, apply_squeeze_excite, squeeze_excite
    from pure_loop.algorithms.stochastic_depth import apply_stochastic_depth, rates, stochastic_depth
    from pure_loop.algorithms.successive_halving import successive_halving
    from pure_loop.algorithms.swa import running_mean, swa, update_batchnorm
    from pure_loop.algorithms.threshold_stopping import threshold_stopping
    from pure_loop.algorithms.transform import transform
    from pure_loop.algorithms.weight_standardization import (
        apply_weight_standardization,
        bake,
        standardized,
        weight_standardization,
    )

__all__ = [
    "alibi",
    "augmix",
    "blurpool",
    "channels_last",
    "colout",
    "cutmix",
    "cutout",
    "early_stopping",
    "ema",
    "factorize",
    "gated_linear_units",
    "ghost_batchnorm",
    "gradient_clipping",
    "gradient_noise",
    "gyro_dropout",
    "label_smoothing",
    "layer_freezing",
    "lookahead",
    "low_precision_groupnorm",
    "low_precision_layernorm",
    "mixup",
    "no_op_model",
    "population_based",
    "progressive_resizing",
    "randaugment",
    "reduce_on_plateau",
    "sam",
    "selective_backprop",
    "sequence_length_warmup",
    "squeeze_excite",
    "stochastic_depth",
    "successive_halving",
    "swa",
    "threshold_stopping",
    "transform",
    "weight_standardization",
]

if TYPE_CHECKING:  # importable from here, and listed beside their algorithms in the reference alone
    __all__ += [
        "FeedForward",
        "NoOp",
        "Round",
        "SqueezeExcite",
        "alibi_bias",
        "alibi_slopes",
        "apply_alibi",
        "apply_blurpool",
        "apply_channels_last",
        "apply_factorize",
        "apply_gated_linear_units",
        "apply_ghost_batchnorm",
        "apply_gyro_dropout",
        "apply_low_precision_groupnorm",
        "apply_low_precision_layernorm",
        "apply_no_op_model",
        "apply_squeeze_excite",
        "apply_stochastic_depth",
        "apply_weight_standardization",
        "augmix_images",
        "averaged",
        "bake",
        "break_even",
        "factorize_module",
        "factors",
        "fill",
        "freezable",
        "frozen_count",
        "gated",
        "hardest",
        "in_channels_last",
        "jensen_shannon",
        "masks",
        "mix",
        "moving_average",
        "orthogonal_part",
        "paste",
        "perturb",
        "probabilities",
        "randaugment_images",
        "rates",
        "resized",
        "restored",
        "rounds",
        "running_mean",
        "set_rank",
        "side_of",
        "smooth_labels",
        "standardized",
        "step_towards",
        "update_batchnorm",
        "with_length",
        "with_lines",
    ]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "alibi": ("alibi_bias", "alibi_slopes", "apply_alibi"),
            "augmix": ("augmix_images", "jensen_shannon"),
            "blurpool": ("apply_blurpool",),
            "channels_last": ("apply_channels_last", "in_channels_last"),
            "colout": ("with_lines",),
            "cutmix": ("paste",),
            "cutout": ("fill",),
            "early_stopping": ("restored",),
            "ema": ("averaged", "moving_average"),
            "factorize": ("apply_factorize", "break_even", "factorize_module", "factors", "set_rank"),
            "gated_linear_units": ("FeedForward", "apply_gated_linear_units", "gated"),
            "ghost_batchnorm": ("apply_ghost_batchnorm",),
            "gyro_dropout": ("apply_gyro_dropout", "masks"),
            "label_smoothing": ("smooth_labels",),
            "layer_freezing": ("freezable", "frozen_count"),
            "lookahead": ("step_towards",),
            "low_precision_groupnorm": ("apply_low_precision_groupnorm",),
            "low_precision_layernorm": ("apply_low_precision_layernorm",),
            "mixup": ("mix",),
            "no_op_model": ("NoOp", "apply_no_op_model"),
            "population_based": ("Round", "rounds"),
            "progressive_resizing": ("resized", "side_of"),
            "randaugment": ("randaugment_images",),
            "sam": ("orthogonal_part", "perturb"),
            "selective_backprop": ("hardest", "probabilities"),
            "sequence_length_warmup": ("with_length",),
            "squeeze_excite": ("SqueezeExcite", "apply_squeeze_excite"),
            "stochastic_depth": ("apply_stochastic_depth", "rates"),
            "swa": ("running_mean", "update_batchnorm"),
            "weight_standardization": ("apply_weight_standardization", "bake", "standardized"),
        },
        __all__,
    )


def __dir__() -> list[str]:
    return __all__
