"""Training methods, one file each: pure functions ``State -> State`` made by a factory with its settings.

Each method's arithmetic is a function of tensors, mappings or modules as well, to use without the loop. Whatever a
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
    from pure_loop.algorithms.progressive_resizing import progressive_resizing, resized, side_of
    from pure_loop.algorithms.randaugment import randaugment, randaugment_images
    from pure_loop.algorithms.reduce_on_plateau import reduce_on_plateau
    from pure_loop.algorithms.sam import orthogonal_part, perturb, sam
    from pure_loop.algorithms.selective_backprop import hardest, probabilities, selective_backprop
    from pure_loop.algorithms.sequence_length_warmup import sequence_length_warmup, with_length
    from pure_loop.algorithms.squeeze_excite import SqueezeExcite, apply_squeeze_excite, squeeze_excite
    from pure_loop.algorithms.stochastic_depth import apply_stochastic_depth, rates, stochastic_depth
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
    "FeedForward",
    "NoOp",
    "SqueezeExcite",
    "alibi",
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
    "augmix",
    "augmix_images",
    "averaged",
    "bake",
    "blurpool",
    "break_even",
    "channels_last",
    "colout",
    "cutmix",
    "cutout",
    "early_stopping",
    "ema",
    "factorize",
    "factorize_module",
    "factors",
    "fill",
    "freezable",
    "frozen_count",
    "gated",
    "gated_linear_units",
    "ghost_batchnorm",
    "gradient_clipping",
    "gradient_noise",
    "gyro_dropout",
    "hardest",
    "in_channels_last",
    "jensen_shannon",
    "label_smoothing",
    "layer_freezing",
    "lookahead",
    "low_precision_groupnorm",
    "low_precision_layernorm",
    "masks",
    "mix",
    "mixup",
    "moving_average",
    "no_op_model",
    "orthogonal_part",
    "paste",
    "perturb",
    "probabilities",
    "progressive_resizing",
    "randaugment",
    "randaugment_images",
    "rates",
    "reduce_on_plateau",
    "resized",
    "restored",
    "running_mean",
    "sam",
    "selective_backprop",
    "sequence_length_warmup",
    "set_rank",
    "side_of",
    "smooth_labels",
    "squeeze_excite",
    "standardized",
    "step_towards",
    "stochastic_depth",
    "swa",
    "threshold_stopping",
    "transform",
    "update_batchnorm",
    "weight_standardization",
    "with_length",
    "with_lines",
]

if not TYPE_CHECKING:
    __getattr__ = _lazily(
        __name__,
        {
            "FeedForward": "pure_loop.algorithms.gated_linear_units",
            "NoOp": "pure_loop.algorithms.no_op_model",
            "SqueezeExcite": "pure_loop.algorithms.squeeze_excite",
            "alibi": "pure_loop.algorithms.alibi",
            "alibi_bias": "pure_loop.algorithms.alibi",
            "alibi_slopes": "pure_loop.algorithms.alibi",
            "apply_alibi": "pure_loop.algorithms.alibi",
            "apply_blurpool": "pure_loop.algorithms.blurpool",
            "apply_channels_last": "pure_loop.algorithms.channels_last",
            "apply_factorize": "pure_loop.algorithms.factorize",
            "apply_gated_linear_units": "pure_loop.algorithms.gated_linear_units",
            "apply_ghost_batchnorm": "pure_loop.algorithms.ghost_batchnorm",
            "apply_gyro_dropout": "pure_loop.algorithms.gyro_dropout",
            "apply_low_precision_groupnorm": "pure_loop.algorithms.low_precision_groupnorm",
            "apply_low_precision_layernorm": "pure_loop.algorithms.low_precision_layernorm",
            "apply_no_op_model": "pure_loop.algorithms.no_op_model",
            "apply_squeeze_excite": "pure_loop.algorithms.squeeze_excite",
            "apply_stochastic_depth": "pure_loop.algorithms.stochastic_depth",
            "apply_weight_standardization": "pure_loop.algorithms.weight_standardization",
            "augmix": "pure_loop.algorithms.augmix",
            "augmix_images": "pure_loop.algorithms.augmix",
            "averaged": "pure_loop.algorithms.ema",
            "bake": "pure_loop.algorithms.weight_standardization",
            "blurpool": "pure_loop.algorithms.blurpool",
            "break_even": "pure_loop.algorithms.factorize",
            "channels_last": "pure_loop.algorithms.channels_last",
            "colout": "pure_loop.algorithms.colout",
            "cutmix": "pure_loop.algorithms.cutmix",
            "cutout": "pure_loop.algorithms.cutout",
            "early_stopping": "pure_loop.algorithms.early_stopping",
            "ema": "pure_loop.algorithms.ema",
            "factorize": "pure_loop.algorithms.factorize",
            "factorize_module": "pure_loop.algorithms.factorize",
            "factors": "pure_loop.algorithms.factorize",
            "fill": "pure_loop.algorithms.cutout",
            "freezable": "pure_loop.algorithms.layer_freezing",
            "frozen_count": "pure_loop.algorithms.layer_freezing",
            "gated": "pure_loop.algorithms.gated_linear_units",
            "gated_linear_units": "pure_loop.algorithms.gated_linear_units",
            "ghost_batchnorm": "pure_loop.algorithms.ghost_batchnorm",
            "gradient_clipping": "pure_loop.algorithms.gradient_clipping",
            "gradient_noise": "pure_loop.algorithms.gradient_noise",
            "gyro_dropout": "pure_loop.algorithms.gyro_dropout",
            "hardest": "pure_loop.algorithms.selective_backprop",
            "in_channels_last": "pure_loop.algorithms.channels_last",
            "jensen_shannon": "pure_loop.algorithms.augmix",
            "label_smoothing": "pure_loop.algorithms.label_smoothing",
            "layer_freezing": "pure_loop.algorithms.layer_freezing",
            "lookahead": "pure_loop.algorithms.lookahead",
            "low_precision_groupnorm": "pure_loop.algorithms.low_precision_groupnorm",
            "low_precision_layernorm": "pure_loop.algorithms.low_precision_layernorm",
            "masks": "pure_loop.algorithms.gyro_dropout",
            "mix": "pure_loop.algorithms.mixup",
            "mixup": "pure_loop.algorithms.mixup",
            "moving_average": "pure_loop.algorithms.ema",
            "no_op_model": "pure_loop.algorithms.no_op_model",
            "orthogonal_part": "pure_loop.algorithms.sam",
            "paste": "pure_loop.algorithms.cutmix",
            "perturb": "pure_loop.algorithms.sam",
            "probabilities": "pure_loop.algorithms.selective_backprop",
            "progressive_resizing": "pure_loop.algorithms.progressive_resizing",
            "randaugment": "pure_loop.algorithms.randaugment",
            "randaugment_images": "pure_loop.algorithms.randaugment",
            "rates": "pure_loop.algorithms.stochastic_depth",
            "reduce_on_plateau": "pure_loop.algorithms.reduce_on_plateau",
            "resized": "pure_loop.algorithms.progressive_resizing",
            "restored": "pure_loop.algorithms.early_stopping",
            "running_mean": "pure_loop.algorithms.swa",
            "sam": "pure_loop.algorithms.sam",
            "selective_backprop": "pure_loop.algorithms.selective_backprop",
            "sequence_length_warmup": "pure_loop.algorithms.sequence_length_warmup",
            "set_rank": "pure_loop.algorithms.factorize",
            "side_of": "pure_loop.algorithms.progressive_resizing",
            "smooth_labels": "pure_loop.algorithms.label_smoothing",
            "squeeze_excite": "pure_loop.algorithms.squeeze_excite",
            "standardized": "pure_loop.algorithms.weight_standardization",
            "step_towards": "pure_loop.algorithms.lookahead",
            "stochastic_depth": "pure_loop.algorithms.stochastic_depth",
            "swa": "pure_loop.algorithms.swa",
            "threshold_stopping": "pure_loop.algorithms.threshold_stopping",
            "transform": "pure_loop.algorithms.transform",
            "update_batchnorm": "pure_loop.algorithms.swa",
            "weight_standardization": "pure_loop.algorithms.weight_standardization",
            "with_length": "pure_loop.algorithms.sequence_length_warmup",
            "with_lines": "pure_loop.algorithms.colout",
        },
    )


def __dir__() -> list[str]:
    return __all__
