"""Low precision group normalization: group norms compute in the precision of autocast.

::

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      over groups of channels; https://arxiv.org/abs/1803.08494

On a GPU autocast computes it in float32, and casts to that and back. Without autocast nothing changes.
"""

from __future__ import annotations

from torch import nn

from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._low_precision import with_low_precision
from pure_loop.algorithms._surgery import LayerFilter, surgery
from pure_loop.ranges import checked

__all__ = ["apply_low_precision_groupnorm", "low_precision_groupnorm"]

SERVES = "group norms"


@checked
def apply_low_precision_groupnorm(
    module: nn.Module, *, only: LayerFilter | None = None, exclude: LayerFilter | None = None
) -> nn.Module:
    """A copy of a module with ``nn.GroupNorm`` in the precision of autocast; the module stays as it was.

    Names, values, dtypes and devices of parameters stay. Changed are layers of that class itself, not of subclasses.
    Layers that are changed already stay.

    Args:
        only, exclude: functions of (name, layer): which layers are changed, and which are not.

    Raises:
        ModelError: there is no such layer; says what there is.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> type(apply_low_precision_groupnorm(nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4)))[1]).__name__
    'LowPrecisionGroupNorm'
    """
    return with_low_precision(module, "low_precision_groupnorm", only, exclude)


@checked
def low_precision_groupnorm(
    *, only: LayerFilter | None = None, exclude: LayerFilter | None = None, name: str = "low_precision_groupnorm"
) -> Algorithm:
    """Group norms in the precision of autocast, put into the model at INIT.

    It saves time and memory on a GPU with ``precision="amp_bf16"`` or ``"amp_fp16"``. With ``"fp32"`` nothing changes.
    On a CPU autocast leaves norms in the dtype of their inputs, so that only float32 inputs change. The module given to
    ``fit`` stays as it was; :func:`apply_low_precision_groupnorm` is the same for a module of your own.

    Args:
        only, exclude: as in :func:`apply_low_precision_groupnorm`.
        name: another one, if there are several.

    Raises:
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no such layer.

    >>> import torch, pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 4))]
    >>> state = pl.run(pl.fit(nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4)), data, precision="amp_bf16",
    ...                       loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
    ...                       algorithms=[low_precision_groupnorm()]))
    >>> type(state.module()[1]).__name__
    'LowPrecisionGroupNorm'
    """
    return surgery(apply_low_precision_groupnorm, **locals())
