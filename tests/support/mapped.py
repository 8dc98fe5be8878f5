"""What an ensemble may be made of: one small run for each row of the table of what maps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias
from unittest import mock

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

import pure_loop as pl
from pure_loop import Event
from pure_loop.compile import _torch
from tests.support.members import TOLERANCE, Pick, Sweep, assert_alike
from tests.support.problem import noise

__all__ = ["ROWS", "Row", "verdict"]

# bfloat16 has 8 bits, and what is summed in another order rounds otherwise, some operations in a row: of one batch.
COARSE = 2**-6

Make: TypeAlias = Callable[[], nn.Module]
Settings: TypeAlias = Callable[[Pick], dict[str, Any]]


@attrs.frozen
class Row:
    """A run of two members.

    Attributes:
        sweep: the run.
        dtype: in which it computes.
        tolerance: how far members may be from their runs alone: in float64 as by law.
    """

    sweep: Sweep
    dtype: torch.dtype = torch.float64
    tolerance: float = TOLERANCE


def floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(4, *shape, generator=generator, dtype=torch.float64)


POINTS = floats(4)


def words(count: int = 6) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(7, (4, count), generator=generator)


def classes(generator: torch.Generator) -> Tensor:
    return torch.randint(3, (4,), generator=generator)


def batches(inputs: Callable[[torch.Generator], Tensor], targets: Callable[[torch.Generator], Tensor]) -> Any:
    generator = noise(1)
    return [(inputs(generator), targets(generator)) for _ in range(2)]


def row(
    make: Make,
    inputs: Callable[[torch.Generator], Tensor] = POINTS,
    settings: Settings = lambda pick: {},
    targets: Callable[[torch.Generator], Tensor] = classes,
) -> Row:
    def all_of(pick: Pick) -> dict[str, Any]:
        rates = pl.optim.sgd(lr=pick([0.1, 0.05]))
        return {"watch": {Event.BATCH_END, Event.FIT_END}, "max_duration": "2ba", "optimizer": rates} | settings(pick)

    return Row(Sweep(make, batches(inputs, targets), all_of, seeds=(3, 4)))


class Last(nn.Module):
    """What a recurrent layer gives for the last word."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][:, -1]  # type: ignore[no-any-return]


class Repeated(nn.Module):
    """A module that takes its input several times; the first result of those that give several."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.inner, self.count = inner, count

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(*[x] * self.count)
        return out[0] if isinstance(out, tuple) else out


class Unpooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pooled, places = functional.max_pool2d(x, 2, return_indices=True)
        return functional.max_unpool2d(pooled, places, [2, 2])


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Calls(nn.Module):
    """A function of torch's, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def head(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 3))


IMAGES, VOLUMES, SIGNAL = floats(2, 6, 6), floats(2, 4, 4, 4), floats(2, 6)


def of_images(layer: Callable[[], nn.Module], features: int = 72) -> Row:
    # Between a convolution and a head, so that both its inputs and its parameters have gradients.
    return row(lambda: head(nn.Conv2d(2, 2, 3, padding=1, bias=False), layer(), features=features), IMAGES)


def of_points(layer: Callable[[], nn.Module]) -> Row:
    return row(lambda: nn.Sequential(nn.Linear(4, 8, bias=False), layer(), nn.Linear(8, 3)))


def of_words(layer: Callable[[], nn.Module]) -> Row:
    return row(lambda: head(nn.Embedding(7, 8), layer(), features=48), words())


def attended(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return functional.scaled_dot_product_attention(parts, parts, parts, is_causal=True).transpose(1, 2).flatten(-2)


def rotated(x: Tensor) -> Tensor:
    turn = torch.tensor([[0.8, -0.6, 0.0], [0.6, 0.8, 0.0]], dtype=x.dtype).expand(len(x), 2, 3)
    return functional.grid_sample(x, functional.affine_grid(turn, list(x.shape), False), align_corners=False)


def solved(x: Tensor) -> Tensor:
    return torch.linalg.solve(x @ x.T + torch.eye(len(x), dtype=x.dtype), x)


MODULES: dict[str, Row] = {
    "Linear": row(lambda: nn.Linear(4, 3)),
    "Bilinear": of_points(lambda: Repeated(nn.Bilinear(8, 8, 8), 2)),
    "Conv1d": row(lambda: head(nn.Conv1d(2, 3, 3, padding=1), features=18), SIGNAL),
    "Conv2d": row(lambda: head(nn.Conv2d(2, 4, 3, stride=2, groups=2), features=16), IMAGES),
    "Conv3d": row(lambda: head(nn.Conv3d(2, 2, 3), features=16), VOLUMES),
    "ConvTranspose1d": row(lambda: head(nn.ConvTranspose1d(2, 2, 3), features=16), SIGNAL),
    "ConvTranspose2d": row(lambda: head(nn.ConvTranspose2d(2, 2, 3, stride=2), features=338), IMAGES),
    "ConvTranspose3d": row(lambda: head(nn.ConvTranspose3d(2, 2, 2), features=250), VOLUMES),
    "BatchNorm1d": of_points(lambda: nn.BatchNorm1d(8)),
    "BatchNorm2d": of_images(lambda: nn.BatchNorm2d(2)),
    "BatchNorm3d": row(lambda: head(nn.Conv3d(2, 2, 3, bias=False), nn.BatchNorm3d(2), features=16), VOLUMES),
    "BatchNorm (cumulative)": of_points(lambda: nn.BatchNorm1d(8, momentum=None)),
    "LayerNorm": of_points(lambda: nn.LayerNorm(8)),
    "GroupNorm": of_images(lambda: nn.GroupNorm(2, 2)),
    "InstanceNorm2d": of_images(lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
    "RMSNorm": of_points(lambda: nn.RMSNorm(8)),
    "LocalResponseNorm": of_images(lambda: nn.LocalResponseNorm(2)),
    "weight_norm": of_points(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "spectral_norm": of_points(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    "Embedding": of_words(nn.Identity),
    "Embedding (padding_idx)": row(lambda: head(nn.Embedding(7, 4, padding_idx=0), features=24), words()),
    "Embedding (max_norm)": row(lambda: head(nn.Embedding(7, 4, max_norm=1.0), features=24), words()),
    "EmbeddingBag": row(lambda: nn.Sequential(nn.EmbeddingBag(7, 8), nn.Linear(8, 3)), words()),
    "EmbeddingBag (max)": row(lambda: nn.Sequential(nn.EmbeddingBag(7, 8, mode="max"), nn.Linear(8, 3)), words()),
    "MultiheadAttention": of_words(lambda: Repeated(nn.MultiheadAttention(8, 2, batch_first=True), 3)),
    "MultiheadAttention (dropout)": of_words(
        lambda: Repeated(nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), 3)
    ),
    "TransformerEncoderLayer": of_words(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "TransformerDecoderLayer": of_words(lambda: Repeated(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)),
    "scaled_dot_product_attention": of_words(lambda: Calls(attended)),
    "Dropout": of_points(lambda: nn.Dropout(0.2)),
    "Dropout1d": row(lambda: head(nn.Conv1d(2, 2, 3), nn.Dropout1d(0.5), features=8), SIGNAL),
    "Dropout2d": of_images(lambda: nn.Dropout2d(0.5)),
    "AlphaDropout": of_points(lambda: nn.AlphaDropout(0.2)),
    "FeatureAlphaDropout": of_images(lambda: nn.FeatureAlphaDropout(0.2)),
    "LSTM": row(
        lambda: nn.Sequential(nn.Embedding(7, 8), Last(nn.LSTM(8, 8, batch_first=True)), nn.Linear(8, 3)), words()
    ),
    "GRU": row(
        lambda: nn.Sequential(nn.Embedding(7, 8), Last(nn.GRU(8, 8, batch_first=True)), nn.Linear(8, 3)), words()
    ),
    "RNN": row(
        lambda: nn.Sequential(nn.Embedding(7, 8), Last(nn.RNN(8, 8, batch_first=True)), nn.Linear(8, 3)), words()
    ),
    "LSTMCell": row(lambda: nn.Sequential(Repeated(nn.LSTMCell(4, 8), 1), nn.Linear(8, 3))),
    "GRUCell": row(lambda: nn.Sequential(nn.GRUCell(4, 8), nn.Linear(8, 3))),
    "MaxPool1d": row(lambda: head(nn.Conv1d(2, 2, 3, padding=1), nn.MaxPool1d(2), features=6), SIGNAL),
    "MaxPool2d": of_images(lambda: nn.MaxPool2d(2), 18),
    "MaxPool3d": row(lambda: head(nn.Conv3d(2, 2, 3, padding=1), nn.MaxPool3d(2), features=16), VOLUMES),
    "AvgPool1d": row(lambda: head(nn.Conv1d(2, 2, 3, padding=1), nn.AvgPool1d(2), features=6), SIGNAL),
    "AvgPool2d": of_images(lambda: nn.AvgPool2d(2), 18),
    "AvgPool3d": row(lambda: head(nn.Conv3d(2, 2, 3, padding=1), nn.AvgPool3d(2), features=16), VOLUMES),
    "AdaptiveAvgPool1d": row(lambda: head(nn.Conv1d(2, 2, 3), nn.AdaptiveAvgPool1d(3), features=6), SIGNAL),
    "AdaptiveAvgPool2d": of_images(lambda: nn.AdaptiveAvgPool2d(4), 32),
    "AdaptiveMaxPool2d": of_images(lambda: nn.AdaptiveMaxPool2d(4), 32),
    "FractionalMaxPool2d": of_images(lambda: nn.FractionalMaxPool2d(2, 3), 18),
    "LPPool2d": of_images(lambda: nn.LPPool2d(2, 2), 18),
    "MaxUnpool2d": of_images(lambda: Unpooled()),
    "Upsample (nearest)": of_images(lambda: nn.Upsample(scale_factor=2), 288),
    "Upsample (bilinear)": of_images(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), 288),
    "Upsample (bicubic)": of_images(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), 288),
    "PixelShuffle": row(lambda: head(nn.Conv2d(2, 4, 3, padding=1), nn.PixelShuffle(2), features=144), IMAGES),
    "grid_sample": of_images(lambda: Calls(rotated)),
    "Fold and Unfold": of_images(lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold(6, 2, stride=2))),
    "ReflectionPad2d": of_images(lambda: nn.ReflectionPad2d(1), 128),
    "ReplicationPad2d": of_images(lambda: nn.ReplicationPad2d(1), 128),
    "ZeroPad2d": of_images(lambda: nn.ZeroPad2d(1), 128),
    "CircularPad2d": of_images(lambda: nn.CircularPad2d(1), 128),
    "cumsum": of_points(lambda: Calls(lambda x: x.cumsum(-1))),
    "sort": of_points(lambda: Calls(lambda x: x.sort(-1).values)),
    "topk": row(lambda: nn.Sequential(nn.Linear(4, 8), Calls(lambda x: x.topk(4).values), nn.Linear(4, 3))),
    "cdist": of_points(lambda: Calls(lambda x: torch.cdist(x, x + 1) @ x)),
    "linalg.solve": of_points(lambda: Calls(solved)),
    "linalg.svd": of_points(lambda: Calls(lambda x: x + torch.linalg.svdvals(x).sum())),
    "fft": of_points(lambda: Calls(lambda x: torch.fft.rfft(x).abs().repeat(1, 2)[:, :8])),
    "einsum": of_points(lambda: Calls(lambda x: torch.einsum("ni,nj->ni", x, x))),
    "checkpoint": of_points(lambda: Recomputed(nn.Linear(8, 8))),
}


def loss_row(loss: Callable[[Tensor, Tensor], Tensor], targets: Callable[[torch.Generator], Tensor] = classes) -> Row:
    return row(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        floats(4),
        lambda pick: {"loss": loss},
        targets,
    )


def positive(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.rand(4, *shape, generator=generator, dtype=torch.float64)


def signs(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(2, (4, *shape), generator=generator).double() * 2 - 1


def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of a sequence of four words."""
    words = outputs.log_softmax(-1).unsqueeze(1)
    return functional.ctc_loss(words, targets[None, :2].clamp(min=1), torch.tensor([4]), torch.tensor([2]))


def triplet(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.triplet_margin_loss(outputs, outputs.roll(1, 0), outputs.roll(2, 0))


LOSSES: dict[str, Row] = {
    "cross_entropy": loss_row(functional.cross_entropy),
    "cross_entropy (label_smoothing, weight)": loss_row(
        lambda out, y: functional.cross_entropy(out, y, out.new_tensor([1.0, 2.0, 3.0]), label_smoothing=0.1)
    ),
    "cross_entropy (ignore_index)": loss_row(lambda out, y: functional.cross_entropy(out, y, ignore_index=0)),
    "cross_entropy (probabilities)": loss_row(functional.cross_entropy, lambda g: positive(3)(g).softmax(-1)),
    "nll_loss": loss_row(lambda out, y: functional.nll_loss(out.log_softmax(-1), y)),
    "mse_loss": loss_row(functional.mse_loss, floats(3)),
    "l1_loss": loss_row(functional.l1_loss, floats(3)),
    "smooth_l1_loss": loss_row(functional.smooth_l1_loss, floats(3)),
    "huber_loss": loss_row(functional.huber_loss, floats(3)),
    "binary_cross_entropy": loss_row(lambda out, y: functional.binary_cross_entropy(out.sigmoid(), y), positive(3)),
    "binary_cross_entropy_with_logits": loss_row(functional.binary_cross_entropy_with_logits, positive(3)),
    "kl_div": loss_row(lambda out, y: functional.kl_div(out.log_softmax(-1), y, reduction="batchmean"), positive(3)),
    "poisson_nll_loss": loss_row(functional.poisson_nll_loss, positive(3)),
    "gaussian_nll_loss": loss_row(lambda out, y: functional.gaussian_nll_loss(out, y, out.exp()), floats(3)),
    "hinge_embedding_loss": loss_row(functional.hinge_embedding_loss, signs(3)),
    "soft_margin_loss": loss_row(functional.soft_margin_loss, signs(3)),
    "multi_margin_loss": loss_row(functional.multi_margin_loss),
    # A class that is not there is -1, with which torch's own decomposition of it is wrong in every graph.
    "multilabel_soft_margin_loss": loss_row(functional.multilabel_soft_margin_loss, lambda g: (signs(3)(g) + 1) / 2),
    "cosine_embedding_loss": loss_row(lambda out, y: functional.cosine_embedding_loss(out, out.roll(1, 0), y), signs()),
    "margin_ranking_loss": loss_row(
        lambda out, y: functional.margin_ranking_loss(out[:, 0], out[:, 1], y, margin=0.1), signs()
    ),
    "triplet_margin_loss": loss_row(triplet),
    "ctc_loss": loss_row(ctc),
}

_ACTIVATIONS = (
    *(
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "PReLU",
        "RReLU",
        "ELU",
        "CELU",
        "SELU",
        "GELU",
        "SiLU",
        "Mish",
        "Hardswish",
        "Hardsigmoid",
    ),
    *("Hardtanh", "Hardshrink", "Softshrink", "Tanhshrink", "Softplus", "Softsign", "Sigmoid", "LogSigmoid", "Tanh"),
    *("Softmin", "Softmax", "LogSoftmax"),
)


def activation(name: str) -> Row:
    options = {"dim": -1} if "max" in name or name == "Softmin" else {}
    return of_points(lambda: getattr(nn, name)(**options))


ACTIVATIONS = {
    **{name: activation(name) for name in _ACTIVATIONS},
    "GLU": row(lambda: nn.Sequential(nn.Linear(4, 8), nn.GLU(), nn.Linear(4, 3))),
    "Threshold": of_points(lambda: nn.Threshold(0.1, 0.0)),
    "gumbel_softmax": of_points(lambda: Calls(functional.gumbel_softmax)),
}


def coarsely(result: Row) -> Row:
    """One batch, compared to the rounding of bfloat16."""
    settings = result.sweep.settings
    sweep = attrs.evolve(result.sweep, settings=lambda pick: {**settings(pick), "max_duration": "1ba"})
    return attrs.evolve(result, sweep=sweep, tolerance=COARSE)


def optimizer(make: Callable[[Pick], Any]) -> Row:
    return row(
        lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)),
        settings=lambda pick: {"optimizer": make(pick), "max_duration": "4ba"},
    )


o = pl.optim
OPTIMIZERS: dict[str, Row] = {
    "sgd": optimizer(
        lambda p: o.sgd(lr=p([0.1, 0.05]), momentum=p([0.9, 0.5]), weight_decay=p([0.0, 0.1]), nesterov=True)
    ),
    "sgd (dampening)": optimizer(lambda p: o.sgd(lr=p([0.1, 0.05]), momentum=p([0.9, 0.5]), dampening=0.1)),
    "adam": optimizer(
        lambda p: o.adam(lr=p([0.1, 0.05]), betas=(p([0.9, 0.8]), p([0.99, 0.9])), weight_decay=p([0.0, 0.1]))
    ),
    "adam (amsgrad)": optimizer(lambda p: o.adam(lr=p([0.1, 0.05]), amsgrad=True, maximize=True)),
    "adamw": optimizer(
        lambda p: o.adamw(lr=p([0.1, 0.05]), betas=(p([0.9, 0.8]), p([0.99, 0.9])), weight_decay=p([0.0, 0.1]))
    ),
    "adamw (independent_decay)": optimizer(
        lambda p: o.adamw(lr=p([0.1, 0.05]), weight_decay=p([0.01, 0.1]), independent_decay=True)
    ),
    "lamb": optimizer(lambda p: o.lamb(lr=p([0.1, 0.05]), betas=(p([0.9, 0.8]), 0.99), weight_decay=p([0.0, 0.1]))),
    "lion": optimizer(lambda p: o.lion(lr=p([0.1, 0.05]), betas=(p([0.9, 0.8]), 0.99), weight_decay=p([0.0, 0.1]))),
    "master_weights": optimizer(lambda p: o.master_weights(o.adamw(lr=p([0.1, 0.05])))),
    "partition": optimizer(
        lambda p: o.partition(
            {"first": o.adamw(lr=p([0.1, 0.05])), "rest": o.sgd(lr=p([0.2, 0.1]), momentum=0.9)},
            lambda name, tensor: "first" if name.startswith("0") else "rest",
        )
    ),
    "from_torch": optimizer(lambda p: o.from_torch(torch.optim.Adagrad, lr=0.1)),
}
# Of a gradient of full rank: it makes a step of the rounding in directions that have none, as after a softmax.
OPTIMIZERS["muon"] = coarsely(
    row(
        lambda: nn.Linear(4, 3, bias=False),
        floats(4),
        lambda pick: {
            "loss": functional.mse_loss,
            "optimizer": o.muon(lr=pick([0.1, 0.05]), momentum=pick([0.9, 0.8]), weight_decay=pick([0.0, 0.1])),
        },
        floats(3),
    )
)


def scheduled(make: Callable[[float], Any]) -> Row:
    """A schedule of each member."""
    return optimizer(lambda pick: o.sgd(lr=pick([make(0.1), make(0.05)])))


s = pl.schedules
SCHEDULES: dict[str, Row] = {
    "chain": scheduled(lambda rate: s.chain(s.constant(rate), ("2ba", s.exponential("1ba", 0.5, rate)))),
    "constant": scheduled(s.constant),
    "cosine": scheduled(lambda rate: s.cosine("4ba", rate, warmup="1ba")),
    "cosine_restarts": scheduled(lambda rate: s.cosine_restarts("2ba", rate)),
    "cyclic": scheduled(lambda rate: s.cyclic("2ba", rate / 10, rate)),
    "exponential": scheduled(lambda rate: s.exponential("1ba", 0.9, rate)),
    "inverse_sqrt": scheduled(lambda rate: s.inverse_sqrt("2ba", rate)),
    "linear": scheduled(lambda rate: s.linear(rate, 0.0, "1dur")),
    "multistep": scheduled(lambda rate: s.multistep(["1ba", "3ba"], 0.1, rate)),
    "one_cycle": scheduled(lambda rate: s.one_cycle("4ba", rate)),
    "piecewise": scheduled(lambda rate: s.piecewise({"0ba": rate, "2ba": rate / 2})),
    "polynomial": scheduled(lambda rate: s.polynomial("4ba", 2.0, rate)),
    "product": scheduled(lambda rate: s.product([s.constant(rate), s.linear(1.0, 0.5, "4ba")])),
    "scaled": scheduled(lambda rate: s.scaled(s.linear(1.0, 0.5, "4ba"), rate)),
    "step": scheduled(lambda rate: s.step("2ba", 0.1, rate)),
    "warmup": scheduled(lambda rate: s.warmup("2ba", rate)),
    "warmup_stable_decay": scheduled(lambda rate: s.warmup_stable_decay("1ba", "4ba", "1ba", rate)),
    "a function of the time": scheduled(lambda rate: lambda timestamp: rate / (1 + timestamp.batch)),
}


a = pl.algorithms


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def with_algorithm(
    make: Callable[[Pick], Any], model: Make = mlp, inputs: Callable[[torch.Generator], Tensor] = POINTS, **more: Any
) -> Row:
    result = row(
        model,
        inputs,
        lambda pick: {"algorithms": [make(pick)], "max_duration": "2ep", "watch": None} | more,
    )
    data = result.sweep.data
    if more.pop("evaluated", False):
        result = with_algorithm(make, model, inputs, evaluators={"val": data}, **more)
    return result


COLOURS = positive(3, 8, 8)


def residual() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Residual(nn.Linear(4, 4)), Residual(nn.Linear(4, 4)), nn.Linear(4, 3))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)  # type: ignore[no-any-return]


class Words(nn.Module):
    """A transformer with embeddings of positions; gives the classes of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 8), nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        return self.head(self.layer(x).mean(1))  # type: ignore[no-any-return]


def in_float32(result: Row) -> Row:
    data = [tuple(x.float() if x.is_floating_point() else x for x in batch) for batch in result.sweep.data]
    return coarsely(attrs.evolve(result, sweep=attrs.evolve(result.sweep, data=data), dtype=torch.float32))


def coarse(make: Callable[[Pick], Any], model: Make, inputs: Callable[[torch.Generator], Tensor]) -> Row:
    """In mixed precision."""
    return in_float32(with_algorithm(make, model, inputs, precision="amp_bf16"))


ALGORITHMS: dict[str, Row] = {
    "alibi": with_algorithm(lambda p: a.alibi(6, position_embeddings=["positions"]), Words, words()),
    "augmix": with_algorithm(lambda p: a.augmix(p([3.0, 2.0])), pooled, COLOURS),
    "blurpool": with_algorithm(lambda p: a.blurpool(min_channels=1), pooled, COLOURS),
    "channels_last": with_algorithm(lambda p: a.channels_last(), pooled, COLOURS),
    "colout": with_algorithm(lambda p: a.colout(0.3), pooled, COLOURS),
    "colout (strengths of each)": with_algorithm(lambda p: a.colout(p([0.3, 0.1])), pooled, COLOURS),
    "cutmix": with_algorithm(lambda p: a.cutmix(p([1.0, 0.5])), pooled, COLOURS),
    "cutout": with_algorithm(lambda p: a.cutout(1, 0.5), pooled, COLOURS),
    "cutout (lengths of each)": with_algorithm(lambda p: a.cutout(1, p([0.5, 0.3])), pooled, COLOURS),
    "early_stopping": with_algorithm(lambda p: a.early_stopping(patience=1), evaluated=True),
    "ema": with_algorithm(lambda p: a.ema(half_life="2ba"), evaluated=True),
    "factorize": with_algorithm(lambda p: a.factorize(0.5, min_features=2), mlp),
    "gated_linear_units": with_algorithm(lambda p: a.gated_linear_units(), Words, words()),
    "ghost_batchnorm": with_algorithm(lambda p: a.ghost_batchnorm(2), pooled, COLOURS),
    "gradient_clipping": with_algorithm(lambda p: a.gradient_clipping("norm", p([0.1, 0.05]))),
    "gradient_clipping (value)": with_algorithm(lambda p: a.gradient_clipping("value", p([0.1, 0.05]))),
    "gradient_clipping (adaptive)": with_algorithm(lambda p: a.gradient_clipping("adaptive", p([0.1, 0.05]))),
    "gradient_noise": with_algorithm(lambda p: a.gradient_noise(p([0.1, 0.05]))),
    "gyro_dropout": with_algorithm(lambda p: a.gyro_dropout(0.3, subnetworks=4, concurrent=2)),
    "label_smoothing": with_algorithm(lambda p: a.label_smoothing(p([0.1, 0.2]))),
    "layer_freezing": with_algorithm(lambda p: a.layer_freezing("1ep", p([1.0, 1.0])), max_duration="4ep"),
    "lookahead": with_algorithm(lambda p: a.lookahead(2, 0.5)),
    "low_precision_groupnorm": coarse(
        lambda p: a.low_precision_groupnorm(), lambda: head(nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2), features=32), IMAGES
    ),
    "low_precision_layernorm": coarse(lambda p: a.low_precision_layernorm(), Words, words()),
    "mixup": with_algorithm(lambda p: a.mixup(p([0.2, 0.5]))),
    "no_op_model": with_algorithm(lambda p: a.no_op_model()),
    "progressive_resizing": with_algorithm(lambda p: a.progressive_resizing(increment=2), pooled, COLOURS),
    "randaugment": with_algorithm(lambda p: a.randaugment(2, p([9, 5])), pooled, COLOURS),
    "reduce_on_plateau": with_algorithm(
        lambda p: a.reduce_on_plateau(patience=0, threshold=0.5, factor=0.5), evaluated=True, max_duration="3ep"
    ),
    "sam": with_algorithm(lambda p: a.sam(p([0.05, 0.1]))),
    "sam (interval)": with_algorithm(lambda p: a.sam(p([0.05, 0.1]), interval=2)),
    "selective_backprop": with_algorithm(lambda p: a.selective_backprop(0.5, start="0ba", end="1dur")),
    "sequence_length_warmup": with_algorithm(
        lambda p: a.sequence_length_warmup("2ba", min_length=2, max_length=6, increment=2), Words, words()
    ),
    "squeeze_excite": with_algorithm(lambda p: a.squeeze_excite(2, min_channels=1), pooled, COLOURS),
    # As schedules, because a number is in the buffers from INIT on.
    "stochastic_depth": with_algorithm(
        lambda p: a.stochastic_depth(Residual, p([s.constant(0.5), s.constant(0.2)])), residual
    ),
    "swa": with_algorithm(lambda p: a.swa("1ba", interval="1ba"), evaluated=True),
    "threshold_stopping": with_algorithm(
        lambda p: a.threshold_stopping("val/loss", 1.3), evaluated=True, max_duration="6ep", eval_interval="1ba"
    ),
    "transform": with_algorithm(lambda p: a.transform(lambda x: x * 2)),
    "transform (draws)": with_algorithm(lambda p: a.transform(lambda x: x + torch.randn(x.shape, dtype=x.dtype))),
    "weight_standardization": with_algorithm(lambda p: a.weight_standardization(), net, IMAGES),
}


def with_precision(name: str) -> Row:
    return in_float32(with_algorithm(lambda pick: a.ema("1ba"), net, IMAGES, precision=name))


PRECISIONS: dict[str, Row] = {name: with_precision(name) for name in ("fp32", "amp_bf16", "amp_fp16", "amp_fp8")}

ROWS = {
    "modules": MODULES,
    "activations": ACTIVATIONS,
    "losses": LOSSES,
    "algorithms": ALGORITHMS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "precisions": PRECISIONS,
}


# How a row is computed.
MAPPED, BY_MEMBER, LOOP, REFUSED = "mapped", "member by member", "loop", "refused"
_UNMAPPED = "not yet implemented the batching rule for aten::"


def verdict(row: Row, read_stderr: Callable[[], str]) -> str:
    """What becomes of a row; each member is what it is alone, mapped or in a loop.

    Args:
        row: the row.
        read_stderr: what torch has written there since.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(row.dtype)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.object(_torch, "mapping_in_silence", nullcontext),
        ):
            warnings.simplefilter("always")
            read_stderr()
            assert_alike(row.sweep, row.tolerance)
        looped = _UNMAPPED in read_stderr() or any(_UNMAPPED in str(item.message) for item in caught)
        return BY_MEMBER if looped else MAPPED
    except pl.PureLoopError as error:
        named = " ".join([str(error), *getattr(error, "__notes__", ())])
        if 'fallback="loop"' not in named:
            return REFUSED
        assert_alike(attrs.evolve(row.sweep, ensemble={"fallback": "loop"}), row.tolerance)
        return LOOP
    finally:
        torch.set_default_dtype(before)
