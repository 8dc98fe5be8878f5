"""Gated linear units: the first layer of a feed-forward block has a gate.

With the weights ``W_g`` that the block had, new ones ``W_v``, and an activation ``act``::

    before   W_o act(W_g x)
    after    W_o (act(W_g x) * W_v x)         https://arxiv.org/abs/1612.08083, https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from pure_loop._internal.records import set_class
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import surgery, with_layers
from pure_loop.errors import ArgumentError, ArgumentTypeError, ModelError
from pure_loop.ranges import checked

__all__ = ["FeedForward", "apply_gated_linear_units", "gated", "gated_linear_units"]

SERVES = "feed-forward blocks"

Activation: TypeAlias = "Literal['gelu', 'silu', 'sigmoid'] | Callable[[Tensor], Tensor] | None"

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}

# Layers that may have no parameters, and compute no activation.
_NO_ACTIVATIONS = (nn.Flatten, nn.Unflatten, nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@attrs.frozen
class FeedForward:
    """Where the parts of a feed-forward block are, as dotted names within it.

    Args:
        up: the first linear layer.
        activation: what follows it: a module, or an attribute that holds a function.
        down: the last linear layer.

    >>> FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense").down
    'output.dense'
    """

    up: str
    activation: str
    down: str


def gated(gate: Tensor, value: Tensor, activation: Activation = "gelu") -> Tensor:
    """``act(gate) * value``.

    Args:
        gate, value: tensors of one shape.
        activation: ``"gelu"``, ``"silu"``, ``"sigmoid"``, or a function of a tensor; None: the gate as it is.

    >>> gated(torch.tensor(1.0), torch.tensor(2.0), "silu")
    tensor(1.4621)
    """
    return _function(activation)(gate) * value


def _function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """
    Raises:
        ArgumentError, ArgumentTypeError: it is no name of an activation, or function.
    """
    if activation is None:
        return _identity
    if isinstance(activation, str):
        if activation not in _ACTIVATIONS:
            names = ", ".join(map(repr, _ACTIVATIONS))
            raise ArgumentError(
                f"gated_linear_units: activation={activation!r} is none of {names}: give one of them, or a function of "
                "a tensor, such as torch.relu."
            )
        return _ACTIVATIONS[activation]
    if not callable(activation):
        raise ArgumentTypeError(
            f"gated_linear_units: activation={activation!r} is no function of a tensor, such as torch.relu."
        )
    return activation


def _identity(tensor: Tensor) -> Tensor:
    return tensor


class GatedLinear(nn.Linear):
    """A linear layer; its activated output is multiplied by that of another one, ``value``."""

    value: nn.Linear
    gate_activation: Activation

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features)."""
        return gated(super().forward(input), self.value(input), self.gate_activation)


@checked
def apply_gated_linear_units(
    module: nn.Module,
    activation: Activation = "gelu",
    *,
    hidden: Literal["same", "two_thirds"] = "same",
    bias: bool = False,
    init: Literal["random", "old"] = "random",
    blocks: Callable[[str, nn.Module], FeedForward | None] | None = None,
) -> nn.Module:
    """A copy of a module with gates in its feed-forward blocks; the module stays as it was.

    A block is an ``nn.TransformerEncoderLayer`` or ``nn.TransformerDecoderLayer``; an ``nn.Sequential`` of a linear
    layer, an activation, at most one dropout, and a linear layer; or what ``blocks`` says. Its layers keep their names
    and weights; the first one gets a submodule ``value``. Blocks with gates stay.

    Args:
        activation: of the gate: ``"gelu"``, ``"silu"``, ``"sigmoid"``, or a function of a tensor; None: none.
        hidden: ``"two_thirds"``: two thirds of the features between the layers, so that there are as many parameters as
            before; the first ones of the weights stay.
        bias: whether ``value`` has a bias.
        init: of ``value``: ``"random"``: as torch draws weights; ``"old"``: weights of 0 and a bias of 1, so that a
            block with the activation that it had computes what it did; it needs ``bias=True``.
        blocks: ``(name, layer) -> FeedForward`` for a layer that is a block, else None.

    Raises:
        ModelError: there is no block, or ``blocks`` names what is no linear layer.
        ArgumentError: an activation that there is not, or ``init="old"`` without a bias.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> sorted(name for name, _ in apply_gated_linear_units(net).named_parameters())
    ['0.bias', '0.value.weight', '0.weight', '2.bias', '2.weight']
    """
    _refuse_misfits(activation, bias, init)
    if blocks is not None and not callable(blocks):
        raise ArgumentTypeError(
            f"gated_linear_units: blocks={blocks!r} is not a function of (name, layer) that returns a FeedForward, or "
            "None."
        )

    def change(name: str, block: nn.Module) -> bool | str:
        parts = _parts_of(block) if blocks is None else blocks(name, block)
        if parts is None:
            return False
        up, down = (_linear(block, path, name) for path in (parts.up, parts.down))
        if isinstance(up, GatedLinear):
            return f"{name or 'it'} has a gate already"
        if hidden == "two_thirds":
            _shorten(up, down, max(1, up.out_features * 2 // 3))
        _gate(up, activation, bias, init)
        _replace_activation(block, parts.activation)
        return True

    serves = (
        "nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Sequential of two linear layers with an "
        "activation between them, and what blocks= says"
    )
    return with_layers(module, change, "gated_linear_units", serves)


def _refuse_misfits(activation: Activation, bias: bool, init: str) -> None:
    """
    Raises:
        ArgumentError, ArgumentTypeError: an activation that there is not, or ``init="old"`` without a bias.
    """
    _function(activation)
    if init == "old" and not bias:
        raise ArgumentError(
            'gated_linear_units: init="old" is a bias of 1 and weights of 0: write bias=True, or init="random".'
        )


def _parts_of(block: nn.Module) -> FeedForward | None:
    """The parts of a block that is known."""
    if isinstance(block, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return FeedForward("linear1", "activation", "linear2")
    if type(block) is not nn.Sequential:
        return None
    names, layers = [name for name, _ in block.named_children()], list(block)
    dropout = (nn.Dropout, nn.AlphaDropout)
    kinds = [layer for layer in layers if not isinstance(layer, dropout)]
    is_block = (
        len(kinds) == 3
        and len(layers) <= 4
        and all(isinstance(kinds[number], nn.Linear) for number in (0, 2))
        and layers[0] is kinds[0]
        and layers[1] is kinds[1]
        and not isinstance(kinds[1], _NO_ACTIVATIONS)
        and not list(kinds[1].parameters())
    )
    return FeedForward(names[0], names[1], names[-1]) if is_block else None


def _linear(block: nn.Module, path: str, name: str) -> nn.Linear:
    """
    Raises:
        ModelError: there is no linear layer.
    """
    try:
        layer = block.get_submodule(path)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.Linear):
        there = "nothing" if layer is None else f"a {type(layer).__name__}"
        raise ModelError(
            f"gated_linear_units: {path!r} in {name or 'the model'}, {type(block).__name__}, is {there}, and has to be "
            "an nn.Linear: name its layers in FeedForward(up=, activation=, down=)."
        )
    return layer


def _shorten(up: nn.Linear, down: nn.Linear, size: int) -> None:
    """Fewer features between two layers, the first ones."""
    up.weight = nn.Parameter(up.weight.detach()[:size].clone(), up.weight.requires_grad)
    if up.bias is not None:
        up.bias = nn.Parameter(up.bias.detach()[:size].clone(), up.bias.requires_grad)
    down.weight = nn.Parameter(down.weight.detach()[:, :size].clone(), down.weight.requires_grad)
    up.out_features = down.in_features = size


def _gate(up: nn.Linear, activation: Activation, bias: bool, init: str) -> None:
    value = nn.Linear(up.in_features, up.out_features, bias, up.weight.device, up.weight.dtype)
    if init == "old":
        nn.init.zeros_(value.weight)
        nn.init.ones_(value.bias)
    layer = set_class(up, GatedLinear)
    layer.gate_activation = activation
    layer.value = value.train(up.training)


def _replace_activation(block: nn.Module, path: str) -> None:
    """The activation is computed with the gate; in its place nothing is."""
    parent, _, name = path.rpartition(".")
    holder: Any = block.get_submodule(parent)
    nothing = nn.Identity()
    if not isinstance(getattr(holder, name, None), nn.Module) and name in vars(holder):
        delattr(holder, name)
    setattr(holder, name, nothing)
    if isinstance(block, nn.TransformerEncoderLayer):
        block.activation_relu_or_gelu = 0  # which otherwise says that a fused kernel may compute the block


@checked
def gated_linear_units(
    activation: Activation = "gelu",
    *,
    hidden: Literal["same", "two_thirds"] = "same",
    bias: bool = False,
    init: Literal["random", "old"] = "random",
    blocks: Callable[[str, nn.Module], FeedForward | None] | None = None,
    name: str = "gated_linear_units",
) -> Algorithm:
    """Gates in the feed-forward blocks of the model, put there at INIT.

    The module given to ``fit`` stays as it was; :func:`apply_gated_linear_units` is the same for a module of your own.

    Args:
        activation, hidden, bias, init, blocks: as in :func:`apply_gated_linear_units`.
        name: another one, if there are several; new weights are drawn by it.

    Raises:
        ArgumentError: an activation that there is not, or ``init="old"`` without a bias.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no feed-forward block.

    >>> import pure_loop as pl
    >>> net, data = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), [(torch.ones(4, 2), torch.zeros(4, 1))]
    >>> state = pl.run(pl.fit(net, data, loss=functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1), max_duration="1ep",
    ...                       algorithms=[gated_linear_units("silu")]))
    >>> state.params["0.value.weight"].shape
    torch.Size([4, 2])
    """
    _refuse_misfits(activation, bias, init)
    return surgery(apply_gated_linear_units, **locals())
