"""Gated linear units, against their formula, in torch's blocks and in one of transformers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pure_loop as pl
from pure_loop.algorithms import FeedForward, apply_gated_linear_units, gated, gated_linear_units
from tests.support.runs import noise, points, train


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("activation", "wanted"), [("silu", 1.462117), ("gelu", 1.682689), ("sigmoid", 1.462117), (None, 2.0)]
)
def test_one_number(activation: Any, wanted: float) -> None:
    found = gated(torch.tensor(1.0), torch.tensor(2.0), activation)
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-6, rtol=0)


def test_the_formula() -> None:
    model = block().eval()
    changed = apply_gated_linear_units(model, torch.tanh, bias=True).eval()
    x = torch.randn(5, 4, generator=noise())
    up, value = changed[0], changed[0].value
    wanted = changed[3](torch.tanh(x @ up.weight.T + up.bias) * (x @ value.weight.T + value.bias))
    torch.testing.assert_close(changed(x), wanted)
    assert torch.equal(up.weight, model[0].weight)
    assert isinstance(model[1], nn.ReLU)
    assert type(model[0]) is nn.Linear
    for twin in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert torch.equal(twin(x), changed(x))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("function", ["relu", "gelu"])
def test_a_pretrained_block_starts_as_it_was(kind: Any, function: str) -> None:
    layer = kind(8, 2, 16, batch_first=True, activation=function).eval()
    act = getattr(functional, function)
    changed = apply_gated_linear_units(layer, act, bias=True, init="old").eval()
    x = torch.randn(3, 5, 8, generator=noise())
    inputs = (x, x) if kind is nn.TransformerDecoderLayer else (x,)
    with torch.no_grad():
        torch.testing.assert_close(changed(*inputs), layer(*inputs))
        changed.linear1.value.bias.fill_(3.0)
        assert not torch.allclose(changed(*inputs), layer(*inputs))
    missing, unexpected = changed.load_state_dict(layer.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) == {"linear1.value.weight", "linear1.value.bias"}


def test_two_thirds_have_as_many_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False))
    changed = apply_gated_linear_units(model, hidden="two_thirds")
    assert changed[0].out_features == 128
    assert sum(p.numel() for p in changed.parameters()) == sum(p.numel() for p in model.parameters())
    assert torch.equal(changed[0].weight, model[0].weight[:128])
    assert changed(torch.ones(2, 64)).shape == (2, 64)


def test_training() -> None:
    state = train(block(), points(), [gated_linear_units("silu")])
    assert state.params["0.value.weight"].shape == (6, 4)
    assert state.params["0.value.weight"].isfinite().all()


@pytest.mark.parametrize(
    ("model", "settings", "error", "text"),
    [
        (nn.Linear(2, 2), {}, pl.ModelError, "finds nothing to change in Linear"),
        (block(), {"init": "old"}, pl.ArgumentError, "write bias=True"),
        (block(), {"activation": "relu"}, pl.ArgumentError, "is none of 'gelu', 'silu', 'sigmoid'"),
        (block(), {"activation": 3}, pl.ArgumentTypeError, "is no function of a tensor"),
        (block(), {"blocks": 3}, pl.ArgumentTypeError, "is not a function of"),
        (
            block(),
            {"blocks": lambda name, layer: None if name else FeedForward("0", "1", "2")},
            pl.ModelError,
            "'2' in the model, Sequential, is a Dropout, and has to be an nn.Linear",
        ),
        (apply_gated_linear_units(block()), {}, pl.ModelError, "finds nothing"),
    ],
)
def test_what_is_refused(model: Any, settings: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        apply_gated_linear_units(model, **settings)


@pytest.mark.slow
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=17, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()

    def blocks(name: str, layer: nn.Module) -> FeedForward | None:
        if type(layer).__name__ != "BertLayer":
            return None
        return FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")

    words = torch.randint(17, (2, 8), generator=noise())
    same = apply_gated_linear_units(model, "gelu", bias=True, init="old", blocks=blocks)
    torch.testing.assert_close(same(words).last_hidden_state, model(words).last_hidden_state)
    other = apply_gated_linear_units(model, "gelu", blocks=blocks)
    assert not torch.allclose(other(words).last_hidden_state, model(words).last_hidden_state)


def test_what_is_between_linear_layers_and_no_activation_stays() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(pl.ModelError, match="finds nothing"):
        apply_gated_linear_units(net)
