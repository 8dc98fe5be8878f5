"""Layers that algorithms put into a model, against their formulas and torch's own layers."""

from __future__ import annotations

import copy
import itertools
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
from tests.algorithms.layers import Attention, Plus, Positions, plus
from tests.support.problem import close, fit, noise, points, run

same = torch.testing.assert_close
CONVS: list[Any] = [
    nn.Conv1d(2, 4, 3, stride=2, padding=1),
    nn.Conv2d(2, 4, 3, padding="same", dilation=2, padding_mode="reflect"),
    nn.Conv3d(4, 4, 2, padding=1),
    nn.Conv2d(4, 4, (3, 2), padding=(2, 1), groups=2, padding_mode="circular"),
    nn.Conv2d(2, 4, 3, padding="valid", padding_mode="replicate", bias=False),
]


def inputs_of(layer: Any) -> Tensor:
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    return torch.randn(2, channels, *(9, 10, 11)[: layer.weight.ndim - 2], generator=noise())


# Attention with linear biases


def biases(heads: int, queries: int, keys: int, causal: bool) -> Tensor:
    """Powers of 2 to the distance of a key; other numbers of heads take every second one of twice as many."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)] + [2 ** (-4 * h / power) for h in range(1, heads, 2)]
    distances = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    bias = -torch.tensor(slopes)[:heads, None, None] * distances.abs()
    return bias.masked_fill(distances < 0, -math.inf) if causal else bias


def attended(model: Attention, x: Tensor, causal: bool) -> Tensor:
    query, key, value = model.heads(x)
    weights = (query @ key.transpose(-1, -2) / 2**0.5 + biases(4, 7, 7, causal)).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(-2)


class Again(nn.Module):
    """Computes its activations again in the backward."""

    def __init__(self, attention: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.attention, self.reentrant = attention, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attention, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def test_attention_has_the_biases_of_the_paper_beside_its_mask() -> None:
    for heads, queries, causal in itertools.product(range(1, 13), (1, 3), (False, True)):
        same(A.alibi_bias(A.alibi_slopes(heads), queries, 3, causal=causal), biases(heads, queries, 3, causal))
    x = torch.randn(3, 7, 8, generator=noise(), requires_grad=True)
    for how in ("causal", "bool", "float", "none"):
        model = Attention(how)
        same(A.apply_alibi(model, 7, causal=True)(x), attended(model, x, True))
        wanted = attended(model, x, how != "none")
        gradients = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
        for module in (model, Again(model, True), Again(model, False)):
            changed = A.apply_alibi(module, 7)
            found = changed(x)
            same(found, wanted)
            found.square().sum().backward()
            same([p.grad for p in changed.parameters()], list(gradients))


@pytest.mark.parametrize("mask", ["none", "bool", "causal", "padding"])
def test_layers_of_torch_have_biases(mask: str) -> None:
    """In training and in evaluation, with and without ``batch_first``: a layer whose mask is the biases."""
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    given: dict[str, Any] = {
        "none": {},
        "bool": {"src_mask": hidden},
        "causal": {"src_mask": torch.zeros(5, 5).masked_fill(hidden, -math.inf), "is_causal": True},
        "padding": {"src_key_padding_mask": padding},
    }[mask]
    bias = biases(4, 5, 5, mask in ("bool", "causal")).repeat(3, 1, 1)
    rest = {"src_key_padding_mask": torch.zeros(3, 5).masked_fill(padding, -math.inf)} if mask == "padding" else {}
    keep = ~padding if mask == "padding" else torch.ones(3, 5, dtype=torch.bool)
    for training in (True, False):
        layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=training).train(training)
        x = torch.randn(3, 5, 8, generator=noise()).transpose(0, int(not training))
        with torch.set_grad_enabled(training):
            found = A.apply_alibi(layer, 5)(x, **given)
        # In train mode: the fused kernel of evaluation takes masks of heads for something else.
        wanted = layer.train()(x, src_mask=bias, **rest)
        same(found.transpose(0, int(not training))[keep], wanted.transpose(0, int(not training))[keep])
    decoder = nn.TransformerDecoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    x, memory = torch.randn(3, 5, 8, generator=noise()), torch.randn(3, 7, 8)  # another sequence has no distances
    same(A.apply_alibi(decoder, 7)(x, memory), decoder(x, memory, tgt_mask=biases(4, 5, 5, False).repeat(3, 1, 1)))


def test_embeddings_of_positions_are_zero_longer_and_not_trained() -> None:
    words = torch.arange(20).view(2, 10) % 9
    algorithm = A.alibi(10, position_embeddings=("positions", "learned"))
    state = run(Positions(), [(words[:, :-1], words[:, 1:])] * 3, [algorithm])
    assert (state.params["positions.weight"].shape, state.params["learned"].shape) == ((10, 8), (1, 10, 8))
    assert not any(state.params[name].any() for name in ("positions.weight", "learned"))
    assert state.module()(words).shape == (2, 9, 10), "longer than what it was trained on"


@pytest.mark.slow
def test_models_of_transformers_have_biases() -> None:
    """A model that others wrote, whose import takes seconds."""
    transformers = pytest.importorskip("transformers")
    words = torch.randint(17, (2, 8), generator=noise())
    sizes = {"vocab_size": 17, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "use_cache": False}
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_implementation="sdpa")).eval()
    changed = A.apply_alibi(gpt, 16, position_embeddings=["transformer.wpe"])
    assert not torch.allclose(changed(words).logits, gpt(words).logits)
    same(changed(torch.cat([words, words], 1)).logits[:, :8], changed(words).logits)


# BlurPool


def smooth(x: Tensor, filtered: Any, steps: Any) -> Tensor:
    """[1 2 1] / 4 along what is filtered, edges repeated; then every value of so many."""
    for dim, (filters, step) in enumerate(zip(filtered, steps, strict=True), 2):
        places = torch.arange(x.shape[dim])
        before, after = places.sub(1).clamp(min=0), places.add(1).clamp(max=len(places) - 1)
        if filters > 1:
            x = (x.index_select(dim, before) + 2 * x + x.index_select(dim, after)) / 4
        x = x.index_select(dim, places[::step])
    return x


def test_what_is_strided_is_dense_and_filtered() -> None:
    """In sequences, images and volumes; constant images keep their value."""
    convs: list[Any] = [nn.Conv2d(16, 8, 3, 2, 1), nn.Conv2d(16, 8, 1, 2), nn.Conv2d(16, 8, (3, 5), (2, 1), (0, 2))]
    convs += [nn.Conv2d(16, 8, 3, 3, 2, 2, 4, padding_mode="reflect"), nn.Conv1d(16, 8, 3, 2), nn.Conv3d(16, 8, 2, 2)]
    pools: list[Any] = [nn.MaxPool1d(3, 2, 1), nn.MaxPool2d(3, (2, 1), 1), nn.MaxPool3d(3, (1, 2, 3), 1)]
    for conv in convs:
        x, dense = inputs_of(conv), copy.deepcopy(conv)
        dense.stride = (1,) * (x.ndim - 2)
        first, after = A.apply_blurpool(conv), A.apply_blurpool(conv, blur_first=False)
        same(first(x), conv(smooth(x, conv.stride, dense.stride)))
        same(after(x), smooth(dense(x), conv.stride, conv.stride))
        assert first(x).shape == after(x).shape == conv(x).shape
    for pool, of in zip(pools, (convs[4], convs[0], convs[5]), strict=True):
        x, new = inputs_of(of), A.apply_blurpool(pool)
        steps = pool.stride if isinstance(pool.stride, tuple) else (pool.stride,) * (x.ndim - 2)
        same(new(x), smooth(type(pool)(3, 1, 1)(x), steps, steps))
        assert new(x[0]).shape == pool(x[0]).shape
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = torch.full((1, 2, 7, 5), 0.3, dtype=dtype)
        assert torch.equal(A.apply_blurpool(nn.MaxPool2d(3, 2, 1))(flat), flat[..., :4, :3])


# Factors of weights


def changed_at(model: nn.Module, changed: nn.Module) -> list[int]:
    pairs = zip(model.children(), changed.children(), strict=True)
    return [index for index, (old, new) in enumerate(pairs) if str(old) != str(new)]


def test_which_layers_are_changed() -> None:
    """By the kind, the number of channels and the place; shared ones stay shared, and what is frozen stays so."""
    shared = nn.MaxPool2d(2)
    strided = nn.Sequential(shared, nn.Conv2d(16, 4, 3, stride=2), nn.Sequential(shared), nn.Conv2d(3, 4, 3, 2))
    strided[1].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    new: Any = A.apply_blurpool(strided)
    assert new[0] is new[2][0]
    assert not new[1].weight.requires_grad
    wide = nn.Sequential(nn.Conv2d(3, 128, 3), nn.Conv2d(128, 128, 3, groups=2), nn.Conv2d(128, 10, 3), nn.Linear(9, 9))
    small = {"min_features": 8}
    for model, change, options, indices in (
        (strided, A.apply_blurpool, {}, [0, 1, 2]),
        (strided, A.apply_blurpool, {"min_channels": 3}, [0, 1, 2, 3]),
        (strided, A.apply_blurpool, {"replace_convs": False}, [0, 2]),
        (strided, A.apply_blurpool, {"replace_maxpools": False}, [1]),
        (wide, A.apply_factorize, {"rank": 0.25, **small}, [2, 3]),
        (wide, A.apply_factorize, {"rank": 0.25, **small, "linears": False}, [2]),
        (wide, A.apply_factorize, {"rank": 5, **small, "strict": False}, [2]),
        (wide, A.apply_squeeze_excite, {}, [1]),
        (wide, A.apply_weight_standardization, {"skip_last": 1}, [0, 1]),
    ):
        assert changed_at(model, change(model, **options)) == indices  # type: ignore[operator]


# Factors of weights


def test_a_factorized_layer_has_the_nearest_weight_of_its_rank() -> None:
    """And after ``set_rank`` that of the product of both factors."""
    layers: list[Any] = [nn.Linear(6, 5), nn.Linear(6, 5, bias=False), *CONVS[:3]]
    for layer in layers:
        pair: Any = A.apply_factorize(nn.Sequential(layer), 2, min_features=1)
        assert (pair[0].up.bias is None) == (layer.bias is None)
        assert next(name for name, _ in pair.named_parameters()) == "0.down.weight"
        left, values, right = torch.linalg.svd(layer.weight.detach().flatten(1), full_matrices=False)
        for factorized, rank in ((pair, 2), (A.set_rank(pair, 1), 1)):
            nearest = (left[:, :rank] * values[:rank]) @ right[:rank]
            given = {**dict(layer.named_parameters()), "weight": nearest.view_as(layer.weight)}
            wanted = torch.func.functional_call(layer, given, inputs_of(layer))
            same(factorized(inputs_of(layer)), wanted, atol=1e-5, rtol=1e-5)
    assert [part.dtype for part in A.factors(torch.eye(2).bfloat16(), 1)] == [torch.bfloat16] * 2
    for rows, columns in ((512, 512), (64, 576), (10, 784)):
        rank = A.break_even(rows, columns)
        assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


def test_no_fused_kernel_takes_the_place_of_factors() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net, x = A.apply_factorize(nn.TransformerEncoder(layer, 2), 2, min_features=8), torch.randn(1, 3, 8)
    with torch.no_grad():
        same(net.eval()(x), net.train()(x))


# Gated linear units


def test_gates_multiply_what_is_activated() -> None:
    x, y = torch.randn(2, 5, generator=noise())
    functions: dict[Any, Any] = {"silu": functional.silu, "gelu": functional.gelu, "sigmoid": torch.sigmoid}
    for activation, function in {**functions, None: lambda x: x}.items():
        same(A.gated(x, y, activation), function(x) * y)
    block = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3)).eval()
    changed: Any = A.apply_gated_linear_units(block, torch.tanh, bias=True).eval()
    x, up, value = torch.randn(5, 4, generator=noise()), changed[0], changed[0].value
    same(changed(x), changed[3](torch.tanh(x @ up.weight.T + up.bias) * (x @ value.weight.T + value.bias)))
    wide: Any = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False))
    thirds: Any = A.apply_gated_linear_units(wide, hidden="two_thirds")
    assert sum(p.numel() for p in thirds.parameters()) == sum(p.numel() for p in wide.parameters())
    assert torch.equal(thirds[0].weight, wide[0].weight[:128])
    assert thirds(torch.ones(2, 64)).shape == (2, 64)
    layer: Any = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, activation="gelu").eval()
    old: Any = A.apply_gated_linear_units(layer, functional.gelu, bias=True, init="old").eval()
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        same(old(x, x), layer(x, x))
    nested = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Sequential(nn.Linear(16, 8)))
    where = lambda name, _: None if name else A.FeedForward("0.0", "0.1", "1.0")  # noqa: E731 - as in a BERT
    same(A.apply_gated_linear_units(nested, "gelu", bias=True, init="old", blocks=where)(x), nested(x))
    assert not torch.equal(A.apply_gated_linear_units(nested, "gelu", blocks=where)(x), nested(x))


# Normalization, and gates of channels


@pytest.mark.parametrize(("momentum", "affine"), [(0.1, True), (None, False)])
def test_a_ghost_is_batch_normalization_of_each_chunk(momentum: Any, affine: bool) -> None:
    for chunks in ([4, 4], [4, 4, 2], [4, 5], [5], [3]):
        layer: Any = A.apply_ghost_batchnorm(nn.BatchNorm2d(3, momentum=momentum, affine=affine), 4)
        x = torch.randn(sum(chunks), 3, 2, 5, generator=noise(), requires_grad=True)
        twins: list[Any] = [nn.BatchNorm2d(3, momentum=1.0, affine=affine) for _ in chunks]
        wanted = torch.cat([twin(part) for twin, part in zip(twins, x.split(chunks), strict=True)])
        result, seed = layer(x), torch.randn(x.shape, generator=noise(1))
        same(result, wanted)
        same(torch.autograd.grad(result, x, seed), torch.autograd.grad(wanted, x, seed))
        rate = 1.0 if momentum is None else momentum
        same(layer.running_mean, rate * torch.stack([twin.running_mean for twin in twins]).mean(0))
        same(layer.running_var, (1 - rate) + rate * torch.stack([twin.running_var for twin in twins]).mean(0))
        assert layer.num_batches_tracked == 1


def test_norms_have_the_precision_of_autocast() -> None:
    x = torch.arange(16.0).view(4, 4)
    layers: list[Any] = [nn.LayerNorm(4), nn.LayerNorm(4, bias=False), nn.RMSNorm(4), nn.RMSNorm(4, 1e-5)]
    for layer in (*layers, nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, affine=False)):
        groups = isinstance(layer, nn.GroupNorm)
        low = (A.apply_low_precision_groupnorm if groups else A.apply_low_precision_layernorm)(layer)
        assert torch.equal(low(x), layer(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert (low(x).dtype, layer(x).dtype) == (torch.bfloat16, torch.float32)
            same(low(x).float(), layer(x), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("layer", CONVS, ids=str)
def test_a_standardized_convolution_is_that_of_other_weights(layer: Any) -> None:
    changed = A.apply_weight_standardization(nn.Sequential(layer))
    weight, dims = layer.weight.detach(), tuple(range(1, layer.weight.ndim))
    wanted = (weight - weight.mean(dims, keepdim=True)) / weight.std(dims, unbiased=False, keepdim=True)
    plain: Any = A.bake(changed)
    assert type(plain[0]) is type(layer)
    same(plain[0].weight.detach(), wanted)
    same(changed(inputs_of(layer)), plain(inputs_of(layer)))


def test_squeeze_and_excitation_is_its_formula() -> None:
    conv, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5, generator=noise())
    gated: Any
    for init, factor in (("random", 1), ("identity", 2)):
        gated = A.apply_squeeze_excite(conv, 3, min_channels=1, init=init)  # type: ignore[arg-type]
        down, up = gated.squeeze_excite.down.weight, gated.squeeze_excite.up.weight
        scores = (torch.relu(conv(x).mean((2, 3)) @ down.T) @ up.T)[:, :, None, None]
        same(gated(x), conv(x) * factor * torch.sigmoid(scores))
    for latent, size in {3: 3, 0.5: 4, 0.01: 1, 64: 64}.items():
        gated = A.apply_squeeze_excite(nn.Conv2d(8, 8, 1, dtype=torch.float64), latent, min_channels=8)
        weight = gated.squeeze_excite.down.weight
        assert (weight.shape, weight.dtype) == ((size, 8), torch.float64)


# Layers that are left out


def test_a_block_is_kept_and_scaled_or_left_out() -> None:
    assert A.rates(4, 0.2) == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert A.rates(4, 0.2, "uniform") == [0.2] * 4
    zeros = torch.zeros(20_000, 1)
    with pl.random.seeded(0):
        for scale, kept, later in ((True, 1 / 0.75, 1.0), (False, 1.0, 0.75)):
            block = A.apply_stochastic_depth(nn.Sequential(Plus()), Plus, 0.25, scale=scale)
            found = block(zeros)
            same(found.unique(), torch.tensor([0.0, kept]))
            assert abs((found > 0).double().mean() - 0.75) < 0.015  # five standard deviations
            assert torch.equal(block.eval()(zeros[:2]), torch.full((2, 1), later))
        for mode, most in {"batch": 1, "sample": 2}.items():
            block = A.apply_stochastic_depth(nn.Sequential(Plus()), Plus, 0.5, mode=mode)  # type: ignore[arg-type]
            assert max(len(block(torch.zeros(50, 4)).unique()) for _ in range(10)) == most


def test_blocks_that_change_the_shape_are_never_left_out_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Of zeros the first and the last add 1, scaled by 1 / 0.9 and 1 / 0.7, or nothing; the second sums four."""
    summing = nn.Linear(4, 2, bias=False)
    nn.init.ones_(summing.weight)
    net = A.apply_stochastic_depth(nn.Sequential(Plus(), summing, Plus()), (Plus, nn.Linear), 0.3)
    with torch.no_grad(), pl.random.seeded(0):
        found = torch.cat([net(torch.zeros(100, 4)) for _ in range(2)])
    wanted = [first + last for first in (0.0, 4 / 0.9) for last in (0.0, 1 / 0.7)]
    assert sorted({round(number, 4) for number in found.flatten().tolist()}) == pytest.approx(wanted, abs=1e-4)
    assert [record.message for record in caplog.records] == [
        "stochastic_depth: block '1' returns another shape than that of its input, and is never left out; of 3 blocks "
        "these are 1 so far"
    ]
    blocks = nn.Sequential(Plus(), nn.Linear(4, 3))
    state = run(blocks, points(), [A.stochastic_depth((Plus, nn.Linear), 0.5)])
    assert len(caplog.records) == 2
    assert torch.equal(state.module(training=False)(torch.zeros(1, 4)), state.module().eval()(torch.zeros(1, 4)))


def test_rates_of_depth_follow_a_schedule_a_warmup_and_what_a_resumed_run_says() -> None:
    def rates(start: Any, algorithm: pl.Algorithm, event: Event, **options: Any) -> list[float]:
        pairs = fit(start, points(6), [algorithm], **{"max_duration": "1ep", **options})
        names = ("0.stochastic_depth_rate", "1.stochastic_depth_rate")
        return [float(state.buffers[name]) for at, state in pairs if at is event for name in names]

    wanted = [rate for last in (0.0, 0.1, 0.2, 0.3, 0.4, 0.4) for rate in (last / 2, last)]
    schedule = A.stochastic_depth(Plus, pl.schedules.linear(0.0, 0.4, "4ba"))
    for algorithm in (schedule, A.stochastic_depth(Plus, 0.4, warmup="4ba")):
        assert rates(plus(2), algorithm, Event.BEFORE_FORWARD) == pytest.approx(wanted)
    state = run(plus(2), points(6), [A.stochastic_depth(Plus, 0.2)], max_duration="1ep")
    found = rates(state, A.stochastic_depth(Plus, 0.4), Event.BATCH_END, max_duration="2ep")
    assert found[:2] == pytest.approx([0.2, 0.4])


def test_masks_of_gyro_dropout_are_fair_coins_and_samples_take_them_in_turn() -> None:
    kept, other = (A.masks(seed, torch.arange(256), 512, 0.2).double() for seed in (7, 8))
    assert abs(kept.mean() - 0.8) < 0.006  # four standard deviations
    assert kept.T.corrcoef().triu(1).abs().max() < 0.4
    assert not torch.equal(kept, other)
    layer, x = A.apply_gyro_dropout(nn.Sequential(nn.Dropout(0.5)), concurrent=3), torch.randn(2, 3)
    y = layer(torch.ones(8, 2, 5, 5))
    assert torch.equal(y[:5], y[3:])
    assert not torch.equal(y[0], y[1])
    assert y.unique().tolist() == [0.0, 2.0]
    assert layer.eval()(x) is x
    assert not A.apply_gyro_dropout(nn.Sequential(nn.Dropout(1.0)))(torch.ones(2, 3)).any()
    assert A.apply_gyro_dropout(nn.Sequential(nn.Dropout()))(torch.ones(0, 3)).shape == (0, 3)
    several: Any = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.6))
    for given, rates in (((), [0.3, 0.6]), ((0.2,), [0.2, 0.2])):
        assert [each.p for each in A.apply_gyro_dropout(several, *given)] == rates  # type: ignore[attr-defined]


def test_subnetworks_are_trained_for_a_period() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    for algorithm, duration, length in (
        (A.gyro_dropout(subnetworks=8, concurrent=2), "16ba", 4),
        (A.gyro_dropout(subnetworks=8, concurrent=2), "64sp", 4),
        (A.gyro_dropout(subnetworks=256, concurrent=1), "2ep", 1),
        (A.gyro_dropout(period="0.5dur"), "2ep", 8),
    ):
        pairs = fit(model, points(8), [algorithm], max_duration=duration)
        buffers = [state.buffers for event, state in pairs if event is Event.BEFORE_FORWARD]
        found = [tuple(each["1.gyro_dropout_subnetworks"].tolist()) for each in buffers]
        assert found == [each for each in found[::length] for _ in range(length)]
        assert len(set(found)) > 1
        assert all(len(set(chosen)) == len(chosen) for chosen in found)


@pytest.mark.parametrize("algorithm", [A.ghost_batchnorm(4), A.gyro_dropout(subnetworks=8, concurrent=4)], ids=str)
def test_microbatches_of_whole_chunks_do_not_change_the_gradient(algorithm: pl.Algorithm) -> None:
    """They do with batch normalization, and where they part a chunk."""
    layer = nn.BatchNorm1d(6) if algorithm.name == "ghost_batchnorm" else nn.Dropout()
    model = nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 3)).double()
    data = [(x.double(), y) for x, y in points(1, size=8)]
    whole, chunks, parts = (
        run(model, data, [algorithm], microbatch_size=size, max_duration="1ba").params for size in (None, 4, 3)
    )
    close(chunks, whole)
    with pytest.raises(AssertionError):
        close(parts, whole)
