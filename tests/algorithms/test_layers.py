"""Layers that algorithms put into a model, against their formulas and torch's own layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms.blurpool import BlurConv2d, BlurMaxPool2d, blur
from tests.algorithms.layers import Attention, Plus, Positions, plus
from tests.support.problem import close, convnet, fit, images, noise, points, run

same = torch.testing.assert_close
CONVS: list[Any] = [
    nn.Conv1d(2, 4, 3, stride=2, padding=1),
    nn.Conv2d(2, 4, 3, padding="same", dilation=2, padding_mode="reflect"),
    nn.Conv2d(4, 4, (3, 2), padding=(2, 1), groups=2, padding_mode="circular"),
    nn.Conv2d(2, 4, 3, padding="valid", padding_mode="replicate", bias=False),
    nn.Conv3d(4, 4, 2, padding=1),
]


def inputs_of(layer: Any, count: int = 2) -> Tensor:
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    return torch.randn(count, channels, *(7, 8, 9)[: layer.weight.ndim - 2], generator=noise())


# Attention with linear biases


def test_slopes_and_biases_are_those_of_the_paper() -> None:
    same(A.alibi_slopes(6), torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]))
    same(A.alibi_slopes(8), torch.tensor([2.0**-h for h in range(1, 9)]))
    assert A.alibi_slopes(1).tolist() == [2.0**-8]
    weights = A.alibi_bias(A.alibi_slopes(8), 3, 3, causal=True).softmax(-1)
    same(weights[0, 2], torch.tensor([0.186324, 0.307196, 0.506480]), atol=1e-6, rtol=0)
    # Queries are the last positions.
    same(A.alibi_bias(A.alibi_slopes(8), 1, 3), A.alibi_bias(A.alibi_slopes(8), 3, 3)[:, 2:])


@pytest.mark.parametrize("how", ["causal", "bool", "float", "none"])
def test_attention_has_biases_beside_its_mask(how: str) -> None:
    """Activations that are computed again in the backward, too."""

    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.attention, self.head, self.reentrant = Attention(how), nn.Linear(8, 8), reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.attention, self.head(x), use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    model, x = Attention(how), torch.randn(3, 7, 8, generator=noise())
    same(A.apply_alibi(model, 7)(x), model.by_hand(x, how != "none"))
    same(A.apply_alibi(model, 7, causal=True)(x), model.by_hand(x, True))
    for reentrant in (True, False):
        changed: Any = A.apply_alibi(Checkpointed(reentrant), 7)
        changed(x).square().sum().backward()
        by_hand = changed.attention.by_hand(changed.head(x), how != "none").square().sum()
        parameters = list(changed.parameters())
        same([p.grad for p in parameters], list(torch.autograd.grad(by_hand, parameters)))


@pytest.mark.parametrize("mask", ["none", "bool", "causal", "padding"])
def test_encoders_of_torch_have_biases(mask: str) -> None:
    """In training and in evaluation, with and without ``batch_first``: a layer whose mask is the biases."""
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    floats = torch.zeros(5, 5).masked_fill(hidden, -math.inf)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    given: dict[str, Any] = {
        "none": {},
        "bool": {"src_mask": hidden},
        "causal": {"src_mask": floats, "is_causal": True},
        "padding": {"src_key_padding_mask": padding},
    }[mask]
    bias = A.alibi_bias(A.alibi_slopes(4), 5, 5, causal=mask in ("bool", "causal")).repeat(3, 1, 1)
    rest = {"src_key_padding_mask": torch.zeros(3, 5).masked_fill(padding, -math.inf)} if mask == "padding" else {}
    keep = ~padding if mask == "padding" else torch.ones(3, 5, dtype=torch.bool)
    for training in (True, False):
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=training).train(training)
        x = torch.randn(3, 5, 8, generator=noise())
        turned = (lambda t: t) if training else (lambda t: t.transpose(0, 1))
        with torch.set_grad_enabled(training):
            found = A.apply_alibi(layer, 5)(turned(x), **given)
        # In train mode: the fused kernel of evaluation takes masks of heads for something else.
        wanted = layer.train()(turned(x), src_mask=bias, **rest)
        same(turned(found)[keep], turned(wanted)[keep])


def test_attention_to_another_sequence_has_no_biases_and_nothing_stays_active() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("x")

    with pytest.raises(KeyError):
        A.apply_alibi(Wrong(), 3)(torch.ones(1))
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 3, 8, generator=noise()), torch.randn(2, 7, 8, generator=noise(1))
    bias = A.alibi_bias(A.alibi_slopes(2), 3, 3).repeat(2, 1, 1)
    same(A.apply_alibi(layer, 7)(x, memory), layer(x, memory, tgt_mask=bias))


def test_embeddings_of_positions_are_zero_longer_and_not_trained() -> None:
    names = ("positions", "learned")
    words = torch.arange(20).view(2, 10) % 9
    state = run(Positions(), [(words[:, :-1], words[:, 1:])] * 3, [A.alibi(10, position_embeddings=names)])
    assert (state.params["positions.weight"].shape, state.params["learned"].shape) == ((10, 8), (1, 10, 8))
    assert not state.params["positions.weight"].any()
    assert not state.params["learned"].any()
    assert state.module()(words).shape == (2, 9, 10), "longer than what it was trained on"


@pytest.mark.slow
def test_models_of_transformers_have_biases_and_gates() -> None:
    """Models that others wrote, whose import takes seconds."""
    transformers = pytest.importorskip("transformers")
    words = torch.randint(17, (2, 8), generator=noise())
    with pl.random.seeded(0):
        sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(**sizes, attn_implementation="sdpa", use_cache=False)
        gpt = transformers.GPT2LMHeadModel(config).eval()
        sizes = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        bert = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16)).eval()
    changed = A.apply_alibi(gpt, 16, position_embeddings=["transformer.wpe"])
    assert not torch.allclose(changed(words).logits, gpt(words).logits)
    assert changed(torch.cat([words, words], 1)).logits.shape == (2, 16, 17)
    later = words.clone()
    later[:, -1] = (later[:, -1] + 1) % 17
    same(changed(later).logits[:, :-1], changed(words).logits[:, :-1])

    def blocks(name: str, layer: nn.Module) -> A.FeedForward | None:
        if type(layer).__name__ != "BertLayer":
            return None
        return A.FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")

    gates = A.apply_gated_linear_units(bert, "gelu", bias=True, init="old", blocks=blocks)
    same(gates(words).last_hidden_state, bert(words).last_hidden_state)
    drawn = A.apply_gated_linear_units(bert, "gelu", blocks=blocks)
    assert not torch.allclose(drawn(words).last_hidden_state, bert(words).last_hidden_state)


# BlurPool


def blurred_by_hand(x: Tensor, stride: int) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype) / 4
    kernel = torch.outer(line, line).expand(x.shape[1], 1, 3, 3)
    padded = functional.pad(x, (1, 1, 1, 1), mode="replicate")
    return functional.conv2d(padded, kernel, stride=stride, groups=x.shape[1])


def test_blurring_is_the_binomial_filter_along_what_is_strided() -> None:
    for size in ((1, 1), (1, 5), (6, 7)):
        x = torch.randn(2, 3, *size, generator=noise(), dtype=torch.float64)
        for stride in (1, 2, 3):
            same(blur(x, (stride, stride), (2, 2)), blurred_by_hand(x, stride))
    rows = torch.cat([x[..., :1, :], x, x[..., -1:, :]], -2)
    same(blur(x, (2, 1)), ((rows[..., :-2, :] + 2 * rows[..., 1:-1, :] + rows[..., 2:, :]) / 4)[..., ::2, :])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.full((1, 2, 7, 5), 0.3, dtype=dtype)
        assert torch.equal(A.apply_blurpool(nn.Sequential(nn.MaxPool2d(3, 2, 1)))(flat), flat[..., :4, :3])


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 2)},
        {"kernel_size": 3, "stride": 3, "dilation": 2, "groups": 4, "padding": 2, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_strided_convolutions_are_dense_ones_that_are_filtered(options: Any) -> None:
    conv, dense = nn.Conv2d(16, 8, **options), nn.Conv2d(16, 8, **{**options, "stride": 1})
    dense.load_state_dict(conv.state_dict())
    first, after = A.apply_blurpool(conv), A.apply_blurpool(conv, blur_first=False)
    for size in (9, 10, 11):
        x = torch.randn(2, 16, size, size, generator=noise())
        same(first(x), conv(blur(x, (1, 1), conv.stride)))
        same(after(x), blur(dense(x), conv.stride))
        assert first(x).shape == conv(x).shape
        pool = nn.MaxPool2d(3, (2, 1), 1)
        new = A.apply_blurpool(pool)
        same(new(x), blur(functional.max_pool2d(x, 3, 1, 1), (2, 1)))
        assert new(x[0]).shape == pool(x[0]).shape


@pytest.mark.parametrize("dimensions", [1, 3])
def test_sequences_and_volumes_are_filtered_as_rows_of_images_are(dimensions: int) -> None:
    convs, pools = {1: nn.Conv1d, 3: nn.Conv3d}[dimensions], {1: nn.MaxPool1d, 3: nn.MaxPool3d}[dimensions]
    kernel, stride = (*[1] * (dimensions - 1), 3), (*[1] * (dimensions - 1), 2)
    conv, pool, image = convs(3, 16, kernel, stride), pools(kernel, stride), nn.Conv2d(3, 16, (1, 3), (1, 2))  # type: ignore[arg-type]
    with torch.no_grad():
        image.weight.copy_(conv.weight.reshape(image.weight.shape))
        image.bias.copy_(conv.bias)  # type: ignore[union-attr, arg-type]
    inputs = torch.randn(2, 3, *[1] * (dimensions - 1), 9)
    for first in (True, False):
        layers = A.apply_blurpool(nn.Sequential(conv, pool), blur_first=first, min_channels=1)
        rows = A.apply_blurpool(nn.Sequential(image, nn.MaxPool2d((1, 3), (1, 2))), blur_first=first, min_channels=1)
        same(layers(inputs).reshape(2, 16, 1, -1), rows(inputs.reshape(2, 3, 1, 9)))
        assert layers(inputs).shape == nn.Sequential(conv, pool)(inputs).shape


def test_which_layers_are_blurred_and_that_shared_ones_stay_shared() -> None:
    shared = nn.MaxPool2d(2)
    layers = {"a": shared, "b": nn.Conv2d(16, 4, 3, stride=2), "c": shared, "few": nn.Conv2d(3, 4, 3, 2)}
    layers["b"].weight.requires_grad_(False)
    before = torch.get_rng_state()
    new: Any = A.apply_blurpool(nn.ModuleDict(layers))
    assert torch.equal(torch.get_rng_state(), before)
    assert [type(module) for module in new.values()] == [BlurMaxPool2d, BlurConv2d, BlurMaxPool2d, nn.Conv2d]
    assert new["a"] is new["c"]
    assert not new["b"].weight.requires_grad
    assert "filtered=(2, 2)" in repr(new)
    model: Any = nn.ModuleDict(layers)
    assert type(A.apply_blurpool(model, min_channels=3)["few"]) is BlurConv2d  # type: ignore[index]
    assert type(A.apply_blurpool(model, replace_convs=False)["b"]) is nn.Conv2d  # type: ignore[index]
    assert type(A.apply_blurpool(model, replace_maxpools=False)["a"]) is nn.MaxPool2d  # type: ignore[index]


# Factors of weights


def test_factors_are_the_nearest_product_of_a_rank() -> None:
    matrix, diagonal = torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.diag(torch.tensor([3.0, 4.0]))
    down, up = A.factors(matrix, 1)
    same(up @ down, matrix)
    down, up = A.factors(diagonal, 1)
    same(up @ down, torch.diag(torch.tensor([0.0, 4.0])))
    assert [part.dtype for part in A.factors(diagonal.bfloat16(), 1)] == [torch.bfloat16] * 2
    for (rows, columns), rank in {(512, 512): 255, (64, 576): 57, (10, 784): 9}.items():
        assert A.break_even(rows, columns) == rank
        assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Linear(6, 5, bias=False), *CONVS[:2], CONVS[4]], ids=str)
def test_a_factorized_layer_has_the_nearest_weight(layer: Any) -> None:
    """And after ``set_rank`` that of the product of both factors."""
    pair: Any = A.apply_factorize(nn.Sequential(layer), 2, min_features=1)
    assert (pair[0].up.bias is None) == (layer.bias is None)
    assert next(name for name, _ in pair.named_parameters()) == "0.down.weight"
    thin: Any = A.set_rank(pair, 1)
    weight = layer.weight.detach()
    for factorized, rank in ((pair, 2), (thin, 1)):
        down, up = A.factors(weight.flatten(1), rank)
        nearest = {**dict(layer.named_parameters()), "weight": (up @ down).view_as(weight)}
        same(factorized(inputs_of(layer)), torch.func.functional_call(layer, nearest, inputs_of(layer)))


def test_which_layers_are_factorized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=2), nn.Conv2d(16, 16, 3), nn.Linear(16, 20))
    changed = A.apply_factorize(model, 0.25, min_features=8)
    assert [type(layer).__name__ for layer in changed] == ["Conv2d", "Conv2d", "Sequential", "Sequential"]  # type: ignore[attr-defined]
    assert changed[2].down.out_channels == 4  # type: ignore[index, union-attr]
    only = A.apply_factorize(model, 0.25, min_features=8, linears=False)
    assert [type(layer).__name__ for layer in only][2:] == ["Sequential", "Linear"]  # type: ignore[attr-defined]
    wide = nn.Sequential(nn.Linear(16, 16), nn.Linear(64, 64))
    thin = A.apply_factorize(wide, 10, min_features=8, strict=False)
    assert [type(layer).__name__ for layer in thin] == ["Linear", "Sequential"]  # type: ignore[attr-defined]
    random = [
        run(convnet(), images(), [A.factorize(2, min_features=8, init="random")], seed=s).params for s in (0, 0, 1)
    ]
    down = [params["4.down.weight"] for params in random]
    assert torch.equal(down[0], down[1])
    assert not torch.equal(down[0], down[2])
    assert random[0]["4.up.weight"].shape == (8, 2, 1, 1)


def test_factorized_layers_of_a_transformer_are_not_fused_in_evaluation() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = A.apply_factorize(nn.TransformerEncoder(layer, 2), 2, min_features=8)
    x = torch.randn(1, 3, 8, generator=noise())
    wanted = net.train()(x)
    with torch.no_grad():
        same(net.eval()(x), wanted)


# Gated linear units


def test_gates_multiply_what_is_activated() -> None:
    for activation, wanted in {"silu": 1.462117, "gelu": 1.682689, "sigmoid": 1.462117, None: 2.0}.items():
        found = A.gated(torch.tensor(1.0), torch.tensor(2.0), activation)  # type: ignore[arg-type]
        same(found, torch.tensor(wanted), atol=1e-6, rtol=0)
    block = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3)).eval()
    changed: Any = A.apply_gated_linear_units(block, torch.tanh, bias=True).eval()
    x, up, value = torch.randn(5, 4, generator=noise()), changed[0], changed[0].value
    same(changed(x), changed[3](torch.tanh(x @ up.weight.T + up.bias) * (x @ value.weight.T + value.bias)))
    wide = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False))
    thirds: Any = A.apply_gated_linear_units(wide, hidden="two_thirds")
    assert sum(p.numel() for p in thirds.parameters()) == sum(p.numel() for p in wide.parameters())
    assert torch.equal(thirds[0].weight, wide[0].weight[:128])  # type: ignore[index]
    assert thirds(torch.ones(2, 64)).shape == (2, 64)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_a_pretrained_block_with_gates_starts_as_it_was(kind: Any) -> None:
    for act in (functional.relu, functional.gelu):
        layer = kind(8, 2, 16, batch_first=True, activation=act).eval()
        changed = A.apply_gated_linear_units(layer, act, bias=True, init="old").eval()
        x = torch.randn(3, 5, 8, generator=noise())
        inputs = (x, x) if kind is nn.TransformerDecoderLayer else (x,)
        with torch.no_grad():
            same(changed(*inputs), layer(*inputs))
            changed.linear1.value.bias.fill_(3.0)  # type: ignore[union-attr, operator]
            assert not torch.allclose(changed(*inputs), layer(*inputs))


# Normalization


def test_ghosts_of_four_samples_in_two_chunks() -> None:
    layer = A.apply_ghost_batchnorm(nn.BatchNorm1d(1), 2)
    normalized = layer(torch.tensor([[1.0], [3.0], [5.0], [9.0]]))
    same(normalized.flatten(), torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-5, rtol=0)
    same((layer.running_mean, layer.running_var), (torch.tensor([0.45]), torch.tensor([1.4])))
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("chunks", [[4, 4], [4, 4, 2], [4, 5], [5], [3]], ids=str)
@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_a_ghost_is_batch_normalization_of_each_chunk(chunks: list[int], momentum: Any, affine: bool) -> None:
    layer: Any = A.apply_ghost_batchnorm(nn.BatchNorm2d(3, momentum=momentum, affine=affine), 4)
    x = torch.randn(sum(chunks), 3, 2, 5, generator=noise(), requires_grad=True)
    twins: list[Any] = [nn.BatchNorm2d(3, momentum=1.0, affine=affine) for _ in chunks]
    wanted = torch.cat([twin(part) for twin, part in zip(twins, x.split(chunks), strict=True)])
    result = layer(x)
    same(result, wanted)
    seed = torch.randn(result.shape, generator=noise(1))
    same(torch.autograd.grad(result, x, seed), torch.autograd.grad(wanted, x, seed))
    rate = 1.0 if momentum is None else momentum
    same(layer.running_mean, rate * torch.stack([twin.running_mean for twin in twins]).mean(0))
    same(layer.running_var, (1 - rate) + rate * torch.stack([twin.running_var for twin in twins]).mean(0))


@pytest.mark.parametrize("apply", [A.apply_low_precision_layernorm, A.apply_low_precision_groupnorm])
def test_norms_have_the_precision_of_autocast(apply: Any) -> None:
    groups = [nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False)]
    layers = [nn.LayerNorm(4), nn.LayerNorm(4, bias=False), nn.RMSNorm(4), nn.RMSNorm(4, 1e-5)]
    x = torch.arange(16.0).view(4, 4)
    for layer in groups if apply is A.apply_low_precision_groupnorm else layers:
        low = apply(layer)
        assert torch.equal(low(x), layer(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert (low(x).dtype, layer(x).dtype) == (torch.bfloat16, torch.float32)
            same(low(x).float(), layer(x), atol=0.02, rtol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        result = A.apply_low_precision_layernorm(nn.LayerNorm(4))(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert result.tolist() == [-1.34375, -0.447265625, 0.447265625, 1.34375]


@pytest.mark.parametrize("layer", CONVS, ids=str)
def test_a_standardized_convolution_is_that_of_other_weights(layer: Any) -> None:
    changed = A.apply_weight_standardization(nn.Sequential(layer))
    weight, dims = layer.weight.detach(), tuple(range(1, layer.weight.ndim))
    wanted = (weight - weight.mean(dims, keepdim=True)) / weight.std(dims, unbiased=False, keepdim=True)
    plain: Any = A.bake(changed)
    assert type(plain[0]) is type(layer)
    same(plain[0].weight.detach(), wanted)
    same(changed(inputs_of(layer)), plain(inputs_of(layer)))
    assert not A.standardized(torch.full((2, 5), 3.0)).any()
    four = [nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1, groups=2), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)]
    some = A.apply_weight_standardization(nn.Sequential(*four), skip_last=1)
    assert [type(each) is nn.Conv2d for each in some] == [False, True, False, True]  # type: ignore[attr-defined]


# Gates of channels


def test_squeeze_and_excitation_is_its_formula() -> None:
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5, generator=noise())
    gated: Any = A.apply_squeeze_excite(nn.Sequential(conv), 3, min_channels=1)[0]  # type: ignore[index]
    down, up = gated.squeeze_excite.down.weight, gated.squeeze_excite.up.weight
    same(gated(x), conv(x) * torch.sigmoid(torch.relu(conv(x).mean((2, 3)) @ down.T) @ up.T)[:, :, None, None])
    for init, factor in {"random": 0.5, "identity": 1.0}.items():
        gated = A.apply_squeeze_excite(conv, 2, min_channels=1, init=init)  # type: ignore[arg-type]
        nn.init.zeros_(gated.squeeze_excite.up.weight)
        same(gated(x), factor * conv(x))
    for latent, size in {3: 3, 0.5: 4, 0.01: 1, 64: 64}.items():
        gated = A.apply_squeeze_excite(nn.Conv2d(8, 8, 1, dtype=torch.float64), latent, min_channels=8)
        assert gated.squeeze_excite.down.weight.shape == (size, 8)
        assert gated.squeeze_excite.down.weight.dtype is torch.float64
    narrow: Any = A.apply_squeeze_excite(
        nn.Sequential(nn.Conv2d(3, 128, 3), nn.Conv2d(128, 128, 3), nn.Conv2d(128, 10, 3))
    )
    assert [hasattr(layer, "squeeze_excite") for layer in narrow] == [False, True, False]


# Layers that are left out


def test_a_block_is_kept_and_scaled_or_left_out() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor([[0.5, -0.5]]).expand_as(x)

    assert A.rates(4, 0.2) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert A.rates(4, 0.2, "uniform") == [0.2] * 4
    with pl.random.seeded(0):
        block, x = A.apply_stochastic_depth(nn.Sequential(Constant()), Constant, 0.2), torch.tensor([[1.0, 2.0]])
        found = block(x.expand(200, 2))
        kept = (found - torch.tensor([0.375, -1.125])).abs().amax(1) < 1e-6  # x + 1 / 0.8 (f - x)
        left_out = (found == x).all(1)
        assert torch.all(kept ^ left_out)
        assert 20 < left_out.sum() < 60
        assert torch.equal(block.eval()(x), Constant()(x))
        for mode, most in {"batch": 1, "sample": 2}.items():
            block = A.apply_stochastic_depth(nn.Sequential(Plus()), Plus, 0.5, mode=mode)  # type: ignore[arg-type]
            assert max(len(block(torch.zeros(50, 4)).unique()) for _ in range(10)) == most
        unscaled, zeros = (
            A.apply_stochastic_depth(nn.Sequential(Plus()), Plus, 0.25, scale=False),
            torch.zeros(20_000, 1),
        )
        assert set(unscaled(zeros).unique().tolist()) == {0.0, 1.0}
        assert abs(unscaled(zeros).mean() - 0.75) < 0.015
        assert torch.equal(unscaled.eval()(zeros[:2]), torch.full((2, 1), 0.75))


def test_rates_of_depth_follow_a_schedule_a_warmup_and_what_a_resumed_run_says() -> None:
    def rates(start: Any, algorithm: pl.Algorithm, event: Event, **options: Any) -> list[float]:
        pairs = fit(start, points(6), [algorithm], **{"max_duration": "1ep", **options})
        names = ("0.stochastic_depth_rate", "1.stochastic_depth_rate")
        return [round(float(state.buffers[name]), 6) for at, state in pairs if at is event for name in names]

    wanted = [rate for last in (0.0, 0.1, 0.2, 0.3, 0.4, 0.4) for rate in (last / 2, last)]
    for options in ({"rate": pl.schedules.linear(0.0, 0.4, "4ba")}, {"rate": 0.4, "warmup": "4ba"}):
        assert rates(plus(2), A.stochastic_depth(Plus, **options), Event.BEFORE_FORWARD) == pytest.approx(wanted)
    state = run(plus(2), points(6), [A.stochastic_depth(Plus, 0.2)], max_duration="1ep")
    found = rates(state, A.stochastic_depth(Plus, 0.4), Event.BATCH_END, max_duration="2ep")
    assert found[:2] == pytest.approx([0.2, 0.4])


def test_masks_of_gyro_dropout_are_fair_coins_and_samples_take_them_in_turn() -> None:
    kept = A.masks(7, torch.arange(256), 512, 0.5).double()
    assert abs(kept.mean() - 0.5) < 0.006  # four standard deviations
    assert abs(kept.mean(1).std() - 0.0221) < 0.004
    assert abs(kept.mean(0).std() - 0.03125) < 0.005
    assert kept.T.corrcoef().triu(1).abs().max() < 0.4
    assert abs(A.masks(7, torch.arange(256), 512, 0.2).double().mean() - 0.8) < 0.006
    assert not torch.equal(A.masks(8, torch.arange(2), 64, 0.5), A.masks(7, torch.arange(2), 64, 0.5))
    layer, x = A.apply_gyro_dropout(nn.Sequential(nn.Dropout(0.5)), concurrent=3), torch.randn(2, 3)
    y = layer(torch.ones(8, 2, 5, 5))
    assert torch.equal(y[:5], y[3:])
    assert not torch.equal(y[0], y[1])
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert layer.eval()(x) is x
    assert not A.apply_gyro_dropout(nn.Sequential(nn.Dropout(1.0)))(torch.ones(2, 3)).any()
    assert A.apply_gyro_dropout(nn.Sequential(nn.Dropout()))(torch.ones(0, 3)).shape == (0, 3)
    several = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.6))
    assert [each.p for each in A.apply_gyro_dropout(several)] == [0.3, 0.6]  # type: ignore[attr-defined]
    assert [each.p for each in A.apply_gyro_dropout(several, 0.2)] == [0.2, 0.2]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "duration", "length"),
    [
        ({"subnetworks": 8, "concurrent": 2}, "16ba", 4),
        ({"subnetworks": 8, "concurrent": 2}, "64sp", 4),
        ({"subnetworks": 256, "concurrent": 1}, "2ep", 1),
        ({"period": "0.5dur"}, "2ep", 8),
    ],
    ids=str,
)
def test_subnetworks_are_trained_for_a_period(settings: Any, duration: str, length: int) -> None:
    pairs = fit(
        nn.Sequential(nn.Linear(4, 3), nn.Dropout()), points(8), [A.gyro_dropout(**settings)], max_duration=duration
    )
    name = "1.gyro_dropout_subnetworks"
    found = [tuple(state.buffers[name].tolist()) for event, state in pairs if event is Event.BEFORE_FORWARD]
    assert len(found) == 16
    assert all(len(set(found[start : start + length])) == 1 for start in range(0, 16, length))
    assert len(set(found)) > 1
    assert all(len(set(chosen)) == len(chosen) for chosen in found)


@pytest.mark.parametrize("algorithm", [A.ghost_batchnorm(4), A.gyro_dropout(subnetworks=8, concurrent=4)], ids=str)
def test_microbatches_of_whole_chunks_do_not_change_the_gradient(algorithm: pl.Algorithm) -> None:
    """They do with batch normalization, and where they part a chunk."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)).double()
    if algorithm.name == "ghost_batchnorm":
        model[2] = nn.Identity()
    else:
        model[1] = nn.Identity()
    data = [(x.double(), y) for x, y in points(1, size=8)]

    def trained(algorithms: Any, size: int | None) -> Any:
        return run(model, data, algorithms, microbatch_size=size, max_duration="1ba").params

    close(trained([algorithm], 4), trained([algorithm], None))
    with pytest.raises(AssertionError):
        close(trained([algorithm], 3), trained([algorithm], None))


@pytest.mark.slow
def test_depth_of_a_schedule_is_the_same_in_a_compiled_step() -> None:
    """A real compiler: the rate is a buffer that the graph reads."""
    for rate in (0.4, pl.schedules.linear(0.0, 0.4, "4ba")):
        eager, compiled = (run(plus(), None, [A.stochastic_depth(Plus, rate)], compile=c) for c in (False, True))
        close(compiled.params, eager.params, 1e-5)
