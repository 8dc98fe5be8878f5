"""Factorize, against singular values and the layers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pure_loop as pl
from pure_loop.algorithms import apply_factorize, break_even, factorize, factors, set_rank
from tests.support.runs import convnet, images, noise, train


def test_products_of_a_rank() -> None:
    matrix = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    torch.testing.assert_close(torch.linalg.matmul(*factors(matrix, 1)[::-1]), matrix)
    diagonal = torch.diag(torch.tensor([3.0, 4.0]))
    down, up = factors(diagonal, 1)
    torch.testing.assert_close(up @ down, torch.diag(torch.tensor([0.0, 4.0])))
    torch.testing.assert_close((up @ down - diagonal).norm() / diagonal.norm(), torch.tensor(0.6))
    assert [part.dtype for part in factors(diagonal.bfloat16(), 1)] == [torch.bfloat16] * 2


@pytest.mark.parametrize(("rows", "columns", "rank"), [(512, 512, 255), (64, 576, 57), (10, 784, 9)])
def test_the_largest_rank_that_saves_weights(rows: int, columns: int, rank: int) -> None:
    assert break_even(rows, columns) == rank
    assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


LAYERS: list[Any] = [
    nn.Linear(6, 5),
    nn.Linear(6, 5, bias=False),
    nn.Conv1d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, 3, padding="same", dilation=2, padding_mode="reflect"),
    nn.Conv3d(4, 4, 2, bias=False),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_it_computes_the_layer_with_the_nearest_weight(layer: Any) -> None:
    new: Any = apply_factorize(nn.Sequential(layer), 2, min_features=1)[0]
    shape = (3, 6) if isinstance(layer, nn.Linear) else (2, 4, *(9, 8, 7)[: layer.weight.ndim - 2])
    x = torch.randn(shape, generator=noise())
    down, up = factors(layer.weight.detach().flatten(1), 2)
    twin = apply_factorize(nn.Sequential(layer), 2, min_features=1)
    with torch.no_grad():
        layer.weight.copy_((up @ down).view_as(layer.weight))
        torch.testing.assert_close(new(x), layer(x))
    assert (new.up.bias is None) == (layer.bias is None)
    assert next(name for name, _ in twin.named_parameters()) == "0.down.weight"


def test_what_stays() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=2), nn.Conv2d(16, 16, 3), nn.Linear(16, 20))
    changed = apply_factorize(model, 0.25, min_features=8)
    assert [type(layer).__name__ for layer in changed] == ["Conv2d", "Conv2d", "Sequential", "Sequential"]
    assert changed[2].down.out_channels == 4
    only = apply_factorize(model, 0.25, min_features=8, linears=False)
    assert [type(layer).__name__ for layer in only] == ["Conv2d", "Conv2d", "Sequential", "Linear"]
    with pytest.raises(pl.ModelError, match=r"0 has 3 inputs and 16 outputs; 1 has 2 groups"):
        apply_factorize(model[:2], 0.25, min_features=8)
    with pytest.raises(pl.ModelError, match="finds nothing to change"):
        apply_factorize(apply_factorize(model, 0.25, min_features=8), 0.25, min_features=8)


def test_ranks_that_save_nothing() -> None:
    with pytest.raises(pl.ArgumentError, match=r"rank 10 of 0, 16 x 16, saves nothing: at most 7 does"):
        apply_factorize(nn.Sequential(nn.Linear(16, 16)), 10, min_features=8)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(64, 64))
    changed = apply_factorize(model, 10, min_features=8, strict=False)
    assert [type(layer).__name__ for layer in changed] == ["Linear", "Sequential"]
    with pytest.raises(pl.ArgumentError, match="both False"):
        factorize(convs=False, linears=False)
    with pytest.raises(pl.ArgumentError, match="rank"):
        factorize(0)


def test_training() -> None:
    state = train(convnet(), images(), [factorize(2, min_features=8)])
    assert state.params["4.down.weight"].shape == (2, 16, 3, 3)
    assert state.params["4.up.weight"].shape == (8, 2, 1, 1)
    drawn = [train(convnet(), images(), [factorize(2, min_features=8, init="random")], seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0].params["4.down.weight"], drawn[1].params["4.down.weight"])
    assert not torch.equal(drawn[0].params["4.down.weight"], drawn[2].params["4.down.weight"])


def test_tied_weights_stay_tied() -> None:
    net = nn.ModuleDict({"embedding": nn.Embedding(16, 16), "head": nn.Linear(16, 16)})
    net["head"].weight = net["embedding"].weight
    with pytest.raises(pl.ModelError, match="head shares its weight with another layer"):
        apply_factorize(net, 2, min_features=8)
    layer = nn.Linear(16, 16)
    with pytest.raises(pl.ModelError, match="0 shares its weight"):
        apply_factorize(nn.Sequential(layer, layer), 2, min_features=8)


def test_layers_of_a_transformer_evaluate() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = apply_factorize(nn.TransformerEncoder(layer, 2), 2, min_features=8).eval()
    x = torch.ones(1, 3, 8)
    with torch.no_grad():
        fused = net(x)
    torch.testing.assert_close(fused, net(x))


def test_a_rank_is_a_whole_number_or_a_share() -> None:
    with pytest.raises(pl.ArgumentError, match=r"rank=2.5 is no number of values"):
        factorize(2.5)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_smaller_rank_later(layer: Any) -> None:
    """That of the product of both factors."""
    pair = apply_factorize(nn.Sequential(layer), 2, min_features=1)
    thin: Any = set_rank(pair, 1)[0]
    product = pair[0].up.weight.detach().flatten(1) @ pair[0].down.weight.detach().flatten(1)
    down, up = factors(product, 1)
    torch.testing.assert_close(thin.up.weight.detach().flatten(1) @ thin.down.weight.detach().flatten(1), up @ down)
    shape = (3, 6) if isinstance(layer, nn.Linear) else (2, 4, *(9, 8, 7)[: layer.weight.ndim - 2])
    assert thin(torch.randn(shape, generator=noise())).shape == layer(torch.randn(shape, generator=noise())).shape
    assert set_rank(pair, 2)[0].down.weight.shape == pair[0].down.weight.shape
    with pytest.raises(pl.ModelError, match="modules that apply_factorize has made"):
        set_rank(nn.Sequential(layer), 2)
