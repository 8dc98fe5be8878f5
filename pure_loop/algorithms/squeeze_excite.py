"""Squeeze-and-excitation: each channel of a convolution's output is scaled by a gate that sees all channels.

With the output ``x`` of a convolution, (n, C, height, width), and two matrices without biases::

    y = x sigmoid(W2 relu(W1 mean(x over height and width)))        https://arxiv.org/abs/1709.01507
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import LayerFilter, surgery, with_layers
from pure_loop.ranges import Above, AtLeast, checked

__all__ = ["SqueezeExcite", "apply_squeeze_excite", "squeeze_excite"]

SERVES = "images"


class SqueezeExcite(nn.Module):
    """The gates of a convolution's channels.

    Args:
        channels: C.
        latent: the number of values between the two matrices.
        identity: whether the gates are 1 at the beginning: twice the sigmoid, of a second matrix of zeros.

    >>> SqueezeExcite(8, 2, identity=True)(torch.ones(1, 8, 3, 3)).shape
    torch.Size([1, 8, 1, 1])
    """

    def __init__(
        self,
        channels: int,
        latent: int,
        *,
        identity: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.down = nn.Linear(channels, latent, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(latent, channels, bias=False, device=device, dtype=dtype)
        self.scale = 2.0 if identity else 1.0
        if identity:
            nn.init.zeros_(self.up.weight)

    def forward(self, features: Tensor) -> Tensor:
        """(n, C, height, width) to gates of (n, C, 1, 1), of the same dtype."""
        gates = torch.sigmoid(self.up(torch.relu(self.down(features.mean((-2, -1))))))
        return (self.scale * gates).to(features.dtype).unsqueeze(-1).unsqueeze(-1)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class _Gated:
    """The hook of a convolution: its output, scaled by its gates. An object of a module, so that it can be pickled."""

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        gates: Tensor = layer.get_submodule("squeeze_excite")(output)
        return output * gates


@checked
def apply_squeeze_excite(
    module: nn.Module,
    latent: Annotated[float, Above(0)] = 64,
    *,
    min_channels: Annotated[int, AtLeast(1)] = 128,
    init: Literal["random", "identity"] = "random",
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
) -> nn.Module:
    """A copy of a module with gates on its convolutions; the module stays as it was.

    A convolution gets a submodule ``squeeze_excite`` and a forward hook. Names and values of parameters that were there
    stay. Weights of the gates are drawn from torch's global generator. Convolutions that have gates already stay.

    Args:
        latent: the number of values between the two matrices; below 1: a share of the channels, at least 1.
        min_channels: convolutions with fewer input or output channels stay.
        init: ``"random"``: as in the paper; ``"identity"``: gates of 1 at the beginning, so that a pretrained network
            starts as what it was.
        only, exclude: functions of (name, layer): which convolutions get gates, and which don't.

    Raises:
        ModelError: there is no convolution of so many channels; says what there is.
        ArgumentError: a number out of range.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> net = apply_squeeze_excite(nn.Sequential(nn.Conv2d(8, 8, 3)), 0.25, min_channels=8)
    >>> net[0].squeeze_excite.down
    Linear(in_features=8, out_features=2, bias=False)
    """

    def change(name: str, layer: nn.Module) -> bool | str:
        if not isinstance(layer, nn.Conv2d):
            return False
        if hasattr(layer, "squeeze_excite"):
            return f"{name} has gates already"
        if min(layer.in_channels, layer.out_channels) < min_channels:
            return f"{name} has {layer.in_channels} input and {layer.out_channels} output channels"
        channels, weight = layer.out_channels, layer.weight
        size = max(1, round(latent * channels)) if latent < 1 else int(latent)
        gates = SqueezeExcite(channels, size, identity=init == "identity", device=weight.device, dtype=weight.dtype)
        layer.squeeze_excite = gates.train(layer.training)
        layer.register_forward_hook(_Gated())
        return True

    serves = f"nn.Conv2d with at least min_channels={min_channels} input and output channels: lower min_channels"
    return with_layers(module, change, "squeeze_excite", serves, only, exclude)


@checked
def squeeze_excite(
    latent: Annotated[float, Above(0, typical=(0.5, 2.0))] = 64,
    *,
    min_channels: Annotated[int, AtLeast(1, typical=(1, 1))] = 128,
    init: Literal["random", "identity"] = "random",
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    name: str = "squeeze_excite",
) -> Algorithm:
    """Squeeze-and-excitation gates after convolutions, put into the model at INIT.

    The module given to ``fit`` stays as it was; :func:`apply_squeeze_excite` is the same for a module of your own.

    Args:
        latent, min_channels, init, only, exclude: as in :func:`apply_squeeze_excite`.
        name: another one, if there are several; the weights of the gates are drawn by it.

    Raises:
        ArgumentError: a number out of range.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no convolution of so many channels.

    >>> import pure_loop as pl
    >>> net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    >>> data = [(torch.ones(2, 4, 3, 3), torch.tensor([0, 1]))]
    >>> state = pl.run(pl.fit(net, data, loss=nn.functional.cross_entropy, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[squeeze_excite(2, min_channels=4)]))
    >>> sorted(name for name in state.params if name.startswith("0."))
    ['0.bias', '0.squeeze_excite.down.weight', '0.squeeze_excite.up.weight', '0.weight']
    """
    return surgery(apply_squeeze_excite, **locals())
