"""Ghost batch normalization: statistics of chunks of a batch, and not of all of it.

A batch of n samples is normalized as chunks of ``size`` samples, each by its own mean and variance. With the momentum
``m`` and the statistics of K chunks, the running ones move once in a forward::

    running' = (1 - m) running + m (statistic_1 + ... + statistic_K) / K         https://arxiv.org/abs/1705.08741

The paper moves them K times, one after the other. Evaluation is that of batch normalization.
"""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.records import set_class
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import LayerFilter, surgery, with_layers
from pure_loop.ranges import AtLeast, checked

__all__ = ["apply_ghost_batchnorm", "ghost_batchnorm"]

SERVES = "images"


def _normalized(
    features: Tensor, chunks: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks of equal size, each normalized by itself, and the mean and variance of each.

    All in one kernel: the channels of K chunks are K times as many channels of one.

    Args:
        features: (n, C, ...), with ``n`` a multiple of ``chunks``.

    Returns:
        The features, of the same shape; means and unbiased variances, (chunks, C).
    """
    size, channels = features.shape[0] // chunks, features.shape[1]
    stacked = features.reshape(chunks, size, *features.shape[1:]).transpose(0, 1)
    stacked = stacked.reshape(size, chunks * channels, *features.shape[2:])
    dtype = torch.promote_types(features.dtype, torch.float32)
    mean = torch.zeros(chunks * channels, dtype=dtype, device=features.device)
    variance = torch.ones_like(mean)
    scale = None if weight is None else weight.repeat(chunks)
    shift = None if bias is None else bias.repeat(chunks)
    normalized = functional.batch_norm(stacked, mean, variance, scale, shift, True, 1.0, eps)
    normalized = normalized.reshape(size, chunks, *features.shape[1:]).transpose(0, 1).reshape(features.shape)
    return normalized, mean.view(chunks, channels), variance.view(chunks, channels)


class _Ghost(nn.Module):
    """The forward of a batch normalization of chunks; parameters, buffers and evaluation as they were."""

    ghost_size: int

    def forward(self, input: Tensor) -> Tensor:
        """(n, C, ...) to what the layer gave before it was changed, in shape and dtype."""
        layer = cast("nn.BatchNorm2d", self)
        n, size = len(input), self.ghost_size
        if not layer.training or n <= size:
            result: Tensor = super().forward(input)
            return result
        # A last chunk of one sample has no variance: that sample joins the chunk before it.
        rest = n % size if n % size != 1 else size + 1
        full_chunks = (n - rest) // size
        parts: list[Tensor] = []
        means: list[Tensor] = []
        variances: list[Tensor] = []
        for features, chunks in ((input[: n - rest], full_chunks), (input[n - rest :], 1 if rest else 0)):
            if chunks:
                part, mean, variance = _normalized(features, chunks, layer.weight, layer.bias, layer.eps)
                parts.append(part)
                means.append(mean)
                variances.append(variance)
        if layer.running_mean is not None and layer.running_var is not None:
            momentum: Any = layer.momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.add_(1)
                if momentum is None:  # the mean over all forwards
                    momentum = 1.0 / layer.num_batches_tracked.to(layer.running_mean.dtype)
            with torch.no_grad():
                for running, statistics in ((layer.running_mean, means), (layer.running_var, variances)):
                    running.lerp_(torch.cat(statistics).mean(0).to(running.dtype), momentum)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"


class GhostBatchNorm1d(_Ghost, nn.BatchNorm1d):
    """``nn.BatchNorm1d`` of chunks."""


class GhostBatchNorm2d(_Ghost, nn.BatchNorm2d):
    """``nn.BatchNorm2d`` of chunks."""


class GhostBatchNorm3d(_Ghost, nn.BatchNorm3d):
    """``nn.BatchNorm3d`` of chunks."""


_CLASSES: dict[type[nn.Module], type[_Ghost]] = {
    nn.BatchNorm1d: GhostBatchNorm1d,
    nn.BatchNorm2d: GhostBatchNorm2d,
    nn.BatchNorm3d: GhostBatchNorm3d,
}


@checked
def apply_ghost_batchnorm(
    module: nn.Module,
    size: Annotated[int, AtLeast(2)] = 32,
    *,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
) -> nn.Module:
    """A copy of a module with batch normalizations that see chunks of a batch; the module stays as it was.

    Names and values of parameters and buffers stay. Changed are layers of the class ``nn.BatchNorm1d``,
    ``nn.BatchNorm2d`` or ``nn.BatchNorm3d`` itself. Layers that see chunks already stay.

    Args:
        size: the samples of a chunk. What is left of a batch is a smaller one; a single sample joins the one before it.
        only, exclude: functions of (name, layer): which layers are changed, and which are not.

    Raises:
        ModelError: there is no such layer; says what there is.
        ArgumentError: a number out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> net = apply_ghost_batchnorm(nn.Sequential(nn.BatchNorm1d(1)), 2)
    >>> net(torch.tensor([[1.0], [3.0], [5.0], [9.0]])).flatten().round().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """

    def change(name: str, layer: nn.Module) -> bool | str:
        if isinstance(layer, nn.SyncBatchNorm):
            return f"{name} is a SyncBatchNorm, which has one statistic of all ranks: that is the opposite"
        if isinstance(layer, _Ghost):
            return f"{name} is a {type(layer).__name__} already"
        if type(layer) not in _CLASSES:
            return False
        set_class(layer, _CLASSES[type(layer)]).ghost_size = size
        return True

    serves = "nn.BatchNorm1d, nn.BatchNorm2d and nn.BatchNorm3d"
    return with_layers(module, change, "ghost_batchnorm", serves, only, exclude)


@checked
def ghost_batchnorm(
    size: Annotated[int, AtLeast(2, typical=(2, 3))] = 32,
    *,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    name: str = "ghost_batchnorm",
) -> Algorithm:
    """Batch normalization of chunks of a batch, put into the model at INIT.

    A chunk lies in one microbatch and on one rank. With a ``microbatch_size`` that is a multiple of ``size``, and parts
    of a batch on ranks that are, the gradient does not depend on microbatches and ranks, which it does with batch
    normalization. The module given to ``fit`` stays as it was; :func:`apply_ghost_batchnorm` is the same for a module
    of your own.

    Args:
        size, only, exclude: as in :func:`apply_ghost_batchnorm`.
        name: another one, if there are several.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no batch normalization that can be changed.

    >>> import pure_loop as pl
    >>> net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
    >>> state = pl.run(pl.fit(net, data, loss=functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[ghost_batchnorm(4)]))
    >>> type(state.module()[0]).__name__
    'GhostBatchNorm1d'
    """
    return surgery(apply_ghost_batchnorm, **locals())
