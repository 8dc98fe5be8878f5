"""Factorize: large layers become two thin ones, whose product is nearest to what they were.

A weight ``W`` of o rows and i columns is the product of ``B``, (o, k), and ``A``, (k, i), by its singular values::

    W = U S V^T,   A = sqrt(S_k) V_k^T,   B = U_k sqrt(S_k)

of which the k largest are kept: of all products of rank k it is the nearest to W. A convolution is factorized as the
matrix of its filters. https://arxiv.org/abs/1405.3866, https://arxiv.org/abs/1404.0736
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import LayerFilter, chosen, copied, nothing_fits, surgery
from pure_loop.errors import ArgumentError
from pure_loop.ranges import Above, AtLeast, checked

__all__ = ["apply_factorize", "break_even", "factorize", "factorize_module", "factors", "set_rank"]

SERVES = "images"


@torch.no_grad()
def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two matrices with the product that is the nearest of this rank to a matrix.

    Args:
        weight: (o, i); those in half precision are factorized in float32.
        rank: k, at most the smaller of o and i.

    Returns:
        (k, i) and (o, k), of the dtype of ``weight``: the second times the first.

    >>> down, up = factors(torch.tensor([[1.0, 2.0], [2.0, 4.0]]), 1)
    >>> torch.allclose(up @ down, torch.tensor([[1.0, 2.0], [2.0, 4.0]]))
    True
    """
    precise = weight.to(torch.promote_types(weight.dtype, torch.float32))
    left, values, right = torch.linalg.svd(precise, full_matrices=False)
    root = values[:rank].sqrt()
    return (root[:, None] * right[:rank]).to(weight.dtype), (left[:, :rank] * root).to(weight.dtype)


def break_even(rows: int, columns: int) -> int:
    """The largest rank with which two matrices have fewer weights than the one of ``rows`` and ``columns``.

    >>> break_even(512, 512), break_even(64, 64 * 9), break_even(10, 784)
    (255, 57, 9)
    """
    return math.ceil(rows * columns / (rows + columns)) - 1


def _rank_of(rank: float, rows: int, columns: int) -> int:
    """A rank, or a share of the smaller side of a matrix."""
    return max(1, round(rank * min(rows, columns))) if rank < 1 else int(rank)


def _drawn(down: nn.Module, up: nn.Module) -> None:
    """New weights, as torch draws those of layers; the bias stays."""
    for layer in (down, up):
        nn.init.kaiming_uniform_(cast("nn.Linear", layer).weight, a=math.sqrt(5))


def _factorized(layer: Any, rank: int, init: str) -> nn.Module:
    """Two layers in the place of one: ``down``, without a bias, and ``up``."""
    place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    bias = layer.bias is not None
    down: Any
    up: Any
    if isinstance(layer, nn.Linear):
        down = nn.Linear(layer.in_features, rank, bias=False, **place)
        up = nn.Linear(rank, layer.out_features, bias=bias, **place)
    else:
        window = {
            "stride": layer.stride,
            "padding": layer.padding,
            "dilation": layer.dilation,
            "padding_mode": layer.padding_mode,
        }
        down = type(layer)(layer.in_channels, rank, layer.kernel_size, bias=False, **window, **place)
        up = type(layer)(rank, layer.out_channels, 1, bias=bias, **place)
    pair = nn.Sequential()
    pair.add_module("down", down)
    pair.add_module("up", up)
    if init == "random":
        _drawn(down, up)
    with torch.no_grad():
        if init == "svd":
            inner, outer = factors(layer.weight.flatten(1), rank)
            down.weight.copy_(inner.view_as(down.weight))
            up.weight.copy_(outer.view_as(up.weight))
        if bias:
            up.bias.copy_(layer.bias)
    for part in (down, up):
        part.weight.requires_grad_(layer.weight.requires_grad)
    if bias:
        up.bias.requires_grad_(layer.bias.requires_grad)
    return pair.train(layer.training)


@checked
def apply_factorize(
    module: nn.Module,
    rank: Annotated[float, Above(0)] = 0.25,
    *,
    convs: bool = True,
    linears: bool = True,
    min_features: Annotated[int, AtLeast(1)] = 256,
    init: Literal["svd", "random"] = "svd",
    strict: bool = True,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
) -> nn.Module:
    """A copy of a module in which each large layer is two thin ones; the module stays as it was.

    ``fc.weight`` becomes ``fc.down.weight`` and ``fc.up.weight``, and ``fc.bias`` ``fc.up.bias``. Changed are layers
    of the class ``nn.Linear``, ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` itself, without groups and not shared by
    two modules. What it made is not factorized again.

    Args:
        rank: the number of values between the two; below 1: a share of the smaller side of the weight's matrix.
        convs, linears: factorize convolutions, and linear layers.
        min_features: layers with fewer input or output features, or channels, stay.
        init: ``"svd"``: the product is the nearest to the weight, so that a pretrained network stays near to what it
            was; ``"random"``: new weights.
        strict: refuse a rank with which a layer would have no fewer weights. False: such layers stay.
        only, exclude: functions of (name, layer): which layers are factorized, and which are not.

    Raises:
        ModelError: there is no such layer; says what there is.
        ArgumentError: a number out of range, a rank that saves nothing, or both kinds switched off.
        ArgumentTypeError: not a module, or a setting of another type.

    >>> apply_factorize(nn.Sequential(nn.Linear(300, 300)), 16)[0].up
    Linear(in_features=16, out_features=300, bias=True)
    """
    _refuse_misfits(rank, convs, linears)
    clone, reasons = copied(module, "apply_factorize"), []
    kinds = (*((nn.Linear,) if linears else ()), *((nn.Conv1d, nn.Conv2d, nn.Conv3d) if convs else ()))
    changed: list[tuple[str, nn.Module]] = []
    # A weight that several layers own would be theirs alone afterwards, and no longer tied.
    owners = Counter(id(weight) for _, weight in clone.named_parameters(remove_duplicate=False))
    parts = {id(part) for pair in clone.modules() if _is_pair(pair) for part in pair.children()}
    for name, layer in chosen(clone, only, exclude, "factorize"):
        if type(layer) not in kinds or id(layer) in parts:
            continue
        conv: Any = layer
        weight: Tensor = conv.weight
        rows, columns = weight.shape[0], weight[0].numel()
        sides = weight.shape[0], conv.in_channels if type(layer) is not nn.Linear else columns
        size = _rank_of(rank, rows, columns)
        if owners[id(weight)] > 1:
            reasons.append(f"{name} shares its weight with another layer")
        elif getattr(layer, "groups", 1) > 1:
            reasons.append(f"{name} has {conv.groups} groups")
        elif min(sides) < min_features:
            reasons.append(f"{name} has {sides[1]} inputs and {sides[0]} outputs")
        elif size > break_even(rows, columns):
            text = f"rank {size} of {name}, {rows} x {columns}, saves nothing: at most {break_even(rows, columns)} does"
            if strict:
                raise ArgumentError(f"factorize: {text}. Write a smaller rank, or strict=False to leave such layers.")
            reasons.append(text)
        else:
            changed.append((name, _factorized(layer, size, init)))
    if not changed:
        raise nothing_fits(
            "factorize",
            module,
            reasons,
            f"nn.Linear and convolutions with at least min_features={min_features} inputs and outputs: lower it",
        )
    for name, pair in changed:
        if not name:
            return pair
        clone.set_submodule(name, pair)
        parent = clone.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            # In evaluation its fused kernel reads weights of linear layers, which are no longer there.
            parent.activation_relu_or_gelu = 0
    return clone


factorize_module = apply_factorize
""":func:`apply_factorize`, by the name that it has beside :func:`set_rank`."""


@checked
def set_rank(module: nn.Module, rank: Annotated[int, AtLeast(1)]) -> nn.Module:
    """A copy of a module with a smaller rank of its factorized layers: the one that is nearest to their product.

    Layers of no larger rank stay. The module stays as it was.

    Args:
        rank: the number of values between two layers.

    Raises:
        ModelError: the module has no factorized layer.
        ArgumentError: the rank is below 1.
        ArgumentTypeError: not a module.

    >>> net = apply_factorize(nn.Sequential(nn.Linear(300, 300)), 16)
    >>> set_rank(net, 4)[0].down
    Linear(in_features=300, out_features=4, bias=False)
    """
    clone = copied(module, "set_rank")
    pairs: list[Any] = [pair for pair in clone.modules() if _is_pair(pair)]
    if not pairs:
        raise nothing_fits("set_rank", module, [], "modules that apply_factorize has made")
    for pair in pairs:
        down, up = pair.down, pair.up
        inner, outer = factors(up.weight.flatten(1) @ down.weight.flatten(1), rank)
        if len(inner) >= len(down.weight):
            continue
        trained = down.weight.requires_grad
        down.weight = nn.Parameter(inner.view(-1, *down.weight.shape[1:]), trained)
        up.weight = nn.Parameter(outer.view(len(outer), -1, *up.weight.shape[2:]), trained)
        if isinstance(down, nn.Linear):
            down.out_features = up.in_features = len(inner)
        else:
            down.out_channels = up.in_channels = len(inner)
    return clone


def _is_pair(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and [name for name, _ in module.named_children()] == ["down", "up"]


def _refuse_misfits(rank: float, convs: bool, linears: bool) -> None:
    """
    Raises:
        ArgumentError: both kinds are switched off, or a rank above 1 that is no whole number.
    """
    if not (convs or linears):
        raise ArgumentError("factorize: convs and linears are both False, so that it would do nothing.")
    if rank >= 1 and rank != int(rank):
        raise ArgumentError(
            f"factorize: rank={rank} is no number of values; below 1 it is a share: rank={int(rank)}, or rank=0.25."
        )


@checked
def factorize(
    rank: Annotated[float, Above(0, typical=(0.1, 0.3))] = 0.25,
    *,
    convs: bool = True,
    linears: bool = True,
    min_features: Annotated[int, AtLeast(1, typical=(2, 2))] = 256,
    init: Literal["svd", "random"] = "svd",
    strict: bool = True,
    only: LayerFilter | None = None,
    exclude: LayerFilter | None = None,
    name: str = "factorize",
) -> Algorithm:
    """Large layers of the model as two thin ones each, made at INIT.

    The names of their parameters change. The module given to ``fit`` stays as it was; :func:`apply_factorize` is the
    same for a module of your own.

    Args:
        rank, convs, linears, min_features, init, strict, only, exclude: as in :func:`apply_factorize`.
        name: another one, if there are several; new weights are drawn by it.

    Raises:
        ArgumentError: a number out of range, or both kinds switched off; in training, at INIT: a rank that saves
            nothing.
        ArgumentTypeError: a setting of another type.
        ModelError: in training, at INIT: there is no such layer.

    >>> import pure_loop as pl
    >>> data = [(torch.ones(4, 8), torch.zeros(4, 8))]
    >>> state = pl.run(pl.fit(nn.Linear(8, 8), data, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[factorize(2, min_features=8)]))
    >>> {name: tuple(tensor.shape) for name, tensor in state.params.items()}
    {'down.weight': (2, 8), 'up.weight': (8, 2), 'up.bias': (8,)}
    """
    _refuse_misfits(rank, convs, linears)
    return surgery(apply_factorize, **locals())
