"""How each algorithm is measured for its card: with which settings, on which problem, and what is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

import pure_loop as pl
from bench.cards.problems import PROBLEMS, Block, CardProblem

__all__ = ["ENTRIES", "Entry"]


@attrs.frozen
class Entry:
    """How an algorithm is measured.

    Attributes:
        code: the call that makes it, as the card shows it.
        problem: the name of the problem.
        picture: the name of a function of :mod:`bench.cards.pictures`; "": there is nothing to draw.
        options: other arguments of ``fit``, for both runs.
        note: what a reader of the numbers has to know.
        members: how many train together, for what compares them, at rates from 0.001 to 1; 0: one model alone.
        unkept: laws that it does not keep on some cases, with the reason, besides those that its module names.
    """

    code: str
    problem: str = "digits"
    picture: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    note: str = ""
    unkept: Mapping[str, str] = attrs.field(factory=dict)
    members: int = 0

    def make(self) -> Any:
        """The algorithm."""
        names = {name: getattr(pl.algorithms, name) for name in dir(pl.algorithms)}
        return eval(self.code, {**names, "Block": Block, "shifted": shifted, "rates": RATES})

    @property
    def on(self) -> CardProblem:
        return PROBLEMS[self.problem]


def shifted(image: torch.Tensor) -> torch.Tensor:
    """The image, moved by one pixel or by none."""
    return torch.roll(image, int(torch.randint(-1, 2, ())), dims=-1)


# Of the members of an ensemble, from bad to good to bad.
RATES = pl.each(torch.logspace(-3, 0, 8))
_EVALUATED: dict[str, Any] = {"eval_interval": "1ep"}
_STOPPED = "Stopping saves the time of the epochs that are left."
_BEST = "The accuracy is that of the best member."
_MASKED = f"{_BEST} Those that have stopped are masked: a State of the others alone is faster."
_SETTLED = "At the end of a cosine the weights hardly move, so that their mean is what they are."
_HALF: dict[str, Any] = {"precision": "amp_bf16"}

ENTRIES: dict[str, Entry] = {
    "alibi": Entry('alibi(64, position_embeddings=["positions"], causal=True)', "text", "biases"),
    "augmix": Entry("augmix(severity=2)", picture="batch"),
    "blurpool": Entry("blurpool()", picture="pooled"),
    "channels_last": Entry("channels_last()", note="A CPU has little of it; the layout is meant for GPUs."),
    "colout": Entry("colout(0.15, 0.15)", picture="batch"),
    "cutmix": Entry("cutmix()", picture="batch"),
    "cutout": Entry("cutout(length=0.4)", picture="batch"),
    "early_stopping": Entry(
        'early_stopping("val/accuracy", patience=3)', picture="metric", options=_EVALUATED, note=_STOPPED
    ),
    "ema": Entry('ema(half_life="20ba")', picture="average"),
    "factorize": Entry("factorize(0.5, min_features=32)"),
    "gated_linear_units": Entry('gated_linear_units(hidden="two_thirds")', "text"),
    "ghost_batchnorm": Entry("ghost_batchnorm(16)", picture="chunks"),
    "gradient_clipping": Entry('gradient_clipping("norm", 1.0)', "text", "norm"),
    "gradient_noise": Entry("gradient_noise(eta=0.001)", picture="noise"),
    "gyro_dropout": Entry("gyro_dropout(subnetworks=64, concurrent=8)", "text", "subnetworks"),
    "label_smoothing": Entry("label_smoothing(0.1)", picture="targets"),
    "layer_freezing": Entry('layer_freezing("0.3dur")', picture="frozen"),
    "lookahead": Entry("lookahead(interval=5, rate=0.5)", picture="slow"),
    "low_precision_groupnorm": Entry("low_precision_groupnorm()", "digits, group norms", options=_HALF),
    "low_precision_layernorm": Entry("low_precision_layernorm()", "text", options=_HALF),
    "mixup": Entry("mixup(alpha=0.2)", picture="batch"),
    "no_op_model": Entry("no_op_model()", note="It learns nothing: the time is what it measures."),
    "population_based": Entry(
        'population_based("val/accuracy", lr_scale=rates)',
        *("digits, an ensemble", "", _EVALUATED, _BEST),
        members=8,
    ),
    "progressive_resizing": Entry("progressive_resizing(0.5, increment=2)", picture="height"),
    "randaugment": Entry("randaugment(operations=1, magnitude=5)", picture="batch"),
    "reduce_on_plateau": Entry(
        'reduce_on_plateau("val/accuracy", patience=2, factor=0.3)', picture="rate", options=_EVALUATED
    ),
    "sam": Entry("sam(rho=0.05)", picture="nearby"),
    "selective_backprop": Entry(
        "selective_backprop(0.5)",
        picture="chances",
        unkept={"order": "fewer samples are fewer microbatches, where a batch is split"},
    ),
    "sequence_length_warmup": Entry("sequence_length_warmup(max_length=64)", "text", "length"),
    "squeeze_excite": Entry("squeeze_excite(8, min_channels=32)"),
    "stochastic_depth": Entry("stochastic_depth(Block, 0.2)", picture="depth"),
    "successive_halving": Entry(
        'successive_halving("val/accuracy", interval="4ep")',
        *("digits, an ensemble", "", _EVALUATED, _MASKED),
        members=8,
    ),
    "swa": Entry("swa()", picture="average", note=_SETTLED),
    "threshold_stopping": Entry(
        'threshold_stopping("val/accuracy", 0.97)', picture="metric", options=_EVALUATED, note=_STOPPED
    ),
    "transform": Entry("transform(shifted)", picture="batch", note="`shifted` moves an image by a pixel at most."),
    "weight_standardization": Entry("weight_standardization()", picture="filters"),
}
