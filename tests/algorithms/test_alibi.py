"""ALiBi, against attention by hand, on torch's layers and a model of transformers."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop.algorithms import alibi, alibi_bias, alibi_slopes, apply_alibi
from tests.support.runs import noise, train


def test_slopes() -> None:
    torch.testing.assert_close(alibi_slopes(4), torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]))
    torch.testing.assert_close(alibi_slopes(6), torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]))
    torch.testing.assert_close(alibi_slopes(8), torch.tensor([2.0**-h for h in range(1, 9)]))
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert len(set(alibi_slopes(12).tolist())) == 12


def test_attention_of_equal_keys() -> None:
    weights = alibi_bias(alibi_slopes(8), 3, 3, causal=True).softmax(-1)
    torch.testing.assert_close(weights[0, 2], torch.tensor([0.186324, 0.307196, 0.506480]), atol=1e-6, rtol=0)
    # Queries are the last positions.
    torch.testing.assert_close(alibi_bias(alibi_slopes(8), 1, 3), alibi_bias(alibi_slopes(8), 3, 3)[:, 2:])


class Attention(nn.Module):
    """Scaled dot product attention of 4 heads over (n, length, 8)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(8, 24)

    def heads(self, x: Tensor) -> Any:
        return [part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]

    def mask(self, length: int) -> Tensor | None:
        lower = torch.ones(length, length, dtype=torch.bool).tril()
        floats = torch.zeros(length, length).masked_fill(~lower, -math.inf)
        return {"bool": lower, "float": floats}.get(self.how)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        is_causal = self.how == "causal"
        mask = self.mask(x.shape[1])
        out = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        return out.transpose(1, 2).flatten(-2)

    def by_hand(self, x: Tensor, causal: bool) -> Tensor:
        query, key, value = self.heads(x)
        bias = alibi_bias(alibi_slopes(4), x.shape[1], x.shape[1], causal=causal)
        weights = (query @ key.transpose(-1, -2) / 2**0.5 + bias).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("how", ["causal", "bool", "float", "none"])
def test_attention_by_hand(how: str) -> None:
    model, x = Attention(how), torch.randn(3, 7, 8, generator=noise())
    changed = apply_alibi(model, 7)
    torch.testing.assert_close(changed(x), model.by_hand(x, how != "none"))
    torch.testing.assert_close(apply_alibi(model, 7, causal=True)(x), model.by_hand(x, True))
    for twin in (copy.deepcopy(changed), pickle.loads(pickle.dumps(changed))):
        assert torch.equal(twin(x), changed(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "causal", "padding"])
def test_layers_of_torch(training: bool, batch_first: bool, mask: str) -> None:
    """That of a layer whose mask is the biases."""
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=batch_first).train(training)
    x = torch.randn(3, 5, 8, generator=noise())
    x = x if batch_first else x.transpose(0, 1)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    floats = torch.zeros(5, 5).masked_fill(hidden, -math.inf)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    given = {
        "none": {},
        "bool": {"src_mask": hidden},
        "float": {"src_mask": floats},
        "causal": {"src_mask": floats, "is_causal": True},
        "padding": {"src_key_padding_mask": padding},
    }[mask]
    bias = alibi_bias(alibi_slopes(4), 5, 5, causal=mask in ("bool", "float", "causal")).repeat(3, 1, 1)
    rest: Any = {}
    if mask == "padding":
        rest = {"src_key_padding_mask": torch.zeros(3, 5).masked_fill(padding, -math.inf)}
    with torch.set_grad_enabled(training):
        found = apply_alibi(layer, 5)(x, **given)
    # In train mode: the fused kernel of evaluation takes masks of heads for something else.
    wanted = layer.train()(x, src_mask=bias, **rest)
    keep = ~padding if mask == "padding" else torch.ones(3, 5, dtype=torch.bool)
    keep = keep if batch_first else keep.T
    torch.testing.assert_close(found[keep], wanted[keep])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = Attention("causal"), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(checkpoint(self.attention, self.head(x), use_reentrant=use_reentrant))
            return out

    changed = apply_alibi(Checkpointed(), 7)
    x = torch.randn(3, 7, 8, generator=noise())
    loss = changed(x).square().sum()
    gradient = torch.autograd.grad(loss, list(changed.parameters())) if not use_reentrant else None
    if gradient is None:
        loss.backward()
        gradient = tuple(parameter.grad for parameter in changed.parameters())
    by_hand = changed.head(changed.attention.by_hand(changed.head(x), True)).square().sum()
    wanted = torch.autograd.grad(by_hand, list(changed.parameters()))
    for one, two in zip(gradient, wanted, strict=True):
        torch.testing.assert_close(one, two)


def test_the_attention_to_another_sequence_has_no_biases() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 3, 8, generator=noise()), torch.randn(2, 7, 8, generator=noise(1))
    changed = apply_alibi(layer, 7)
    bias = alibi_bias(alibi_slopes(2), 3, 3).repeat(2, 1, 1)
    torch.testing.assert_close(changed(x, memory), layer(x, memory, tgt_mask=bias))


def test_nothing_stays_active_after_an_error() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("x")

    with pytest.raises(KeyError):
        apply_alibi(Wrong(), 3)(torch.ones(1))
    query = torch.randn(1, 2, 3, 4, generator=noise())
    plain = functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(plain, (query @ query.mT / 2).softmax(-1) @ query)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 8), nn.Embedding(6, 8)
        self.attention, self.head = Attention("causal"), nn.Linear(8, 9)
        self.learned = nn.Parameter(torch.ones(1, 6, 8))

    def forward(self, words: Tensor) -> Tensor:
        length = words.shape[1]
        x = self.words(words) + self.positions(torch.arange(length)) + self.learned[:, :length]
        out: Tensor = self.head(self.attention(x)).transpose(1, 2)
        return out


def test_position_embeddings() -> None:
    changed = apply_alibi(Positions(), 10, position_embeddings=("positions", "learned"))
    assert changed.positions.weight.shape == (10, 8)
    assert changed.learned.shape == (1, 10, 8)
    assert not changed.positions.weight.any()
    assert not changed.learned.any()
    assert not changed.positions.weight.requires_grad
    words = torch.arange(20).view(2, 10) % 9
    data = [(words[:, :-1], words[:, 1:])] * 3
    state = train(Positions(), data, [alibi(10, position_embeddings=["positions", "learned"])])
    assert not state.params["positions.weight"].any()
    assert state.module()(words).shape == (2, 9, 10)  # longer than what it was trained on


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda: apply_alibi(Positions(), 5, position_embeddings=["positions"]), pl.ArgumentError, "less than the 6"),
        (lambda: apply_alibi(Positions(), 9, position_embeddings=["place"]), pl.ModelError, "'words', 'positions'"),
        (lambda: apply_alibi(apply_alibi(Attention("none"), 5), 5), pl.ModelError, "already"),
        (lambda: apply_alibi(nn.Linear(2, 2), 5)(torch.ones(1, 2)), pl.ModelError, "no attention to add biases to"),
        (lambda: apply_alibi(Attention("none"), 5, heads=2)(torch.ones(1, 5, 8)), pl.ModelError, "has 4 heads"),
        (lambda: apply_alibi(Attention("none"), 5, slopes=[0.5])(torch.ones(1, 5, 8)), pl.ModelError, "1 slopes"),
        (lambda: alibi(5, slopes=[math.inf]), pl.ArgumentError, "slopes"),
        (lambda: alibi(0), pl.ArgumentError, "max_length"),
    ],
)
def test_what_is_refused(change: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        change()


@pytest.mark.slow
def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_implementation="sdpa", use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    words = torch.randint(17, (2, 8), generator=noise())
    changed = apply_alibi(model, 16, position_embeddings=["transformer.wpe"])
    assert not torch.allclose(changed(words).logits, model(words).logits)
    assert changed(torch.cat([words, words], 1)).logits.shape == (2, 16, 17)
    # Causal still: the last word does not change what comes before it.
    later = words.clone()
    later[:, -1] = (later[:, -1] + 1) % 17
    torch.testing.assert_close(changed(later).logits[:, :-1], changed(words).logits[:, :-1])
