"""What algorithms refuse beyond the ranges of their settings, with what each says to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pure_loop as pl
from pure_loop import Event
from pure_loop import algorithms as A
from pure_loop.algorithms._images import as_pixels
from tests.algorithms.layers import Attention, Pixels, Positions, pictures, plus, pooled
from tests.support.problem import convnet, fit, mlp, points, run
from tests.support.refused import Refusal, check, rows

ARG, TYPE, MODEL, DATA = pl.errors.ArgumentError, pl.errors.ArgumentTypeError, pl.errors.ModelError, pl.errors.DataError
PIXELS = [(torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0)), torch.zeros(4).long())]
VECTORS = [(torch.ones(4, 4), torch.zeros(4).long())]
LISTS: Any = [(["a", "b"], torch.zeros(2).long())]
TOKENS = [(torch.ones(4, 3).long(), torch.zeros(4).long())]
MAPS = [(torch.ones(3, 1, 6, 6), torch.zeros(3, 3, 6).long())]
BLOCK = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3))
WIDE = nn.Sequential(nn.Linear(16, 16))
TIED = nn.ModuleDict({"embedding": nn.Embedding(16, 16), "head": nn.Linear(16, 16)})
TIED["head"].weight = TIED["embedding"].weight
NARROW = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=2))
CONVS = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 1, groups=2))
POINTS = [(torch.ones(2, 4), torch.ones(2, 3))]
NO_CLASSES: dict[str, Any] = {"model": nn.Linear(4, 3), "data": POINTS, "loss": nn.functional.mse_loss}
NO_CLASSES["evaluators"] = {"val": POINTS}
WORDS = {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 4).long()}
F1 = pl.metrics.f1(3)
BY_LOSS = A.mixup(0.5, interpolate="loss", name="mine")


def made(make: Callable[..., Any], error: type[Exception], *says: str, **settings: Any) -> Refusal:
    """Where it is made: the settings are the row's name."""
    name = " ".join([make.__name__, *(f"{key}={str(value)[:20]}" for key, value in settings.items())])
    return Refusal(name, lambda: make(**settings), error, says)


def of(call: Callable[[], Any], error: type[Exception], *says: str, at_once: bool = True) -> Refusal:
    return Refusal(says[0], call, error, says, at_once)


def runs(algorithm: Any, error: type[Exception], *says: str, model: Any = None, data: Any = None, **o: Any) -> Refusal:
    """Where it shows in the data or the model: the run is refused."""
    listed = algorithm if isinstance(algorithm, list) else [algorithm]
    return of(lambda: fit(model, data, listed, **o), error, *says, at_once=False)


def monitors(metric: str, *says: str, make: Any = A.early_stopping, **evaluators: Any) -> Refusal:
    """A metric that there is not is refused by the call of ``fit``."""
    return of(lambda: fit(None, None, [make(metric)], evaluators=evaluators or {"val": points(1)}), ARG, *says)


def growing(sample: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006 - counts its calls
    seen.append(1)
    return sample.repeat(len(seen))


def begun(targets: Any) -> pl.State:
    return pl.State.create(mlp()).replace(batch=(torch.ones(5, 4), targets), event=Event.BEFORE_TRAIN_BATCH)


def dropped(name: str, layer: nn.Module) -> A.FeedForward | None:
    return None if name else A.FeedForward("0", "1", "2")


def wrong_shape(outputs: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def smooth(outputs: Any, targets: Any) -> Callable[[], Any]:
    return lambda: A.smooth_labels(outputs, targets, 0.1)


OWN = pl.optim.Optimizer(name="own", init=lambda p: {}, update=lambda g, o, p, t: (p, o), lr=lambda timestamp: 0.1)
ENDS = {Event.BATCH_END: lambda state: state}
MSE = pl.Evaluator(points(1), metrics=[pl.metrics.loss("mse")])

REFUSALS = [
    # Averages
    made(A.ema, ARG, "neither"),
    made(A.ema, ARG, "both", half_life="1ba", smoothing=0.9),
    made(A.ema, ARG, "no time at all", half_life="0ba"),
    made(A.ema, ARG, "half_life='soon'", half_life="soon"),
    made(A.ema, TYPE, "half_life=0.5", half_life=0.5),
    made(A.ema, ARG, "goes by the clock", smoothing=0.9, start="10s"),
    made(A.ema, ARG, 'interval="1ep"', half_life="1ep", interval="1ba"),
    made(A.ema, TYPE, "ema: buffers must be a glob of names of buffers", smoothing=0.9, buffers=[""]),
    runs(A.ema("0.1dur"), ARG, "clock", max_duration="1h"),
    runs(A.ema("0.1dur"), ARG, "go", data=iter(points())),
    runs(A.ema(smoothing=0.9, buffers="1.lost"), ARG, "matches no floating point", model=convnet()),
    made(A.swa, ARG, "comes before start='3ep'", start="3ep", end="2ep"),
    made(A.swa, ARG, "needs an end", replace=True),
    made(A.swa, ARG, "without replace=True", reset_optimizer=True),
    made(A.swa, ARG, "an iterator", batchnorm_data=iter([])),
    made(A.swa, ARG, "evaluate is False", batchnorm_data=[], evaluate=False),
    of(lambda: A.update_batchnorm(run(), points()), MODEL, "has no BatchNorm that keeps running"),
    of(lambda: A.update_batchnorm(pl.State.create(convnet()), []), ARG, "the dataloader gave no batch"),
    of(lambda: A.restored(run(None, None, [A.ema("2ba")]), "ema"), ARG, "no best parameters under 'ema'"),
    # Gradients
    made(A.gradient_clipping, TYPE, "is not a function of a parameter's name", kind="norm", threshold=1, exclude=3),
    runs(A.gradient_clipping("quantile", pl.schedules.constant(2.0)), ARG, "the part of the norms"),
    made(A.sam, ARG, "reuse is for the batches between those of interval", reuse=0.7),
    # Targets
    made(A.label_smoothing, ARG, "their sum is 0.9, and has to be 1", prior=[0.5, 0.4]),
    runs(A.label_smoothing(prior=[0.5, 0.5]), ARG, "prior has 2 probabilities"),
    runs(A.label_smoothing(target_key="labels"), DATA, "target_key"),
    of(smooth(torch.zeros(2, 3), torch.zeros(2)), ARG, "class indices, integers of shape"),
    of(smooth(torch.zeros(2, 5, 3), torch.zeros(2, 5).long()), ARG, "movedim"),
    of(smooth({"logits": torch.zeros(2, 3)}, torch.zeros(2)), TYPE, "outputs is dict"),
    made(A.mixup, ARG, 'Write interpolate="targets"', per_sample=True, interpolate="loss"),
    of(lambda: fit(None, None, [A.mixup(), A.cutmix()]), ARG, "mixes targets", "pl.one_of(mixup(...), cutmix(...), pr"),
    of(lambda: fit(None, None, [pl.one_of(A.mixup(), A.cutmix()), A.mixup(name="b")]), ARG, "'mixup' and 'b' both"),
    of(lambda: pl.one_of(), ARG, "of 0 alternatives"),
    of(lambda: pl.one_of(A.mixup(), A.cutmix(), probabilities=[0.5]), ARG, "[0.5] of 2 alternatives"),
    of(lambda: pl.one_of(A.mixup(), A.cutmix(), probabilities=[0.5, 0.6]), ARG, "a sum of at most 1"),
    of(lambda: pl.one_of(A.mixup(), A.cutmix(), probabilities=0.5), ARG, "0.5 of 2"),  # type: ignore[arg-type]
    of(lambda: pl.one_of(A.mixup(), A.gradient_noise(), A.lookahead()), ARG, "'lookahead' acts at BATCH_END"),
    runs([BY_LOSS, A.label_smoothing()], ARG, "'mine'", "Write label_smoothing before"),
    runs(A.mixup(), DATA, "the inputs are list, not a tensor", "input_key", data=LISTS),
    of(lambda: A.mixup()(begun({})), DATA, "mixup: the targets are", "of 5 samples", "target_key="),
    of(lambda: A.mix(torch.ones(2, 2).long(), torch.tensor([1, 0]), 0.3), ARG, "torch.int64 have no mean"),
    runs(A.cutmix(), DATA, "shape (4, 4), and images are (n, channels", model=nn.Linear(4, 3), data=VECTORS),
    runs(A.cutmix(), DATA, "their last two dimensions have to be 6 and 6", model=nn.Conv2d(1, 3, 1), data=MAPS),
    # Images and other inputs
    runs(A.cutout(length=0.05), DATA, "Give a length of at least 1/9", model=Pixels(), data=PIXELS),
    runs(A.cutout(value=(0.0, 1.0)), ARG, "value has 2 numbers, and images", model=Pixels(), data=PIXELS),
    runs(A.colout(0.95, 0), DATA, "rows=0.95 leaves none of the 9 rows", model=pooled(3), data=PIXELS),
    runs(A.randaugment(), DATA, "randaugment(mean=, std=)", model=Pixels(), data=PIXELS),
    of(lambda: as_pixels(torch.zeros(3, 4, 4), None, None, "f", checks=True), DATA, "of uint8, or of floats"),
    runs(A.augmix(consistency=1.0), ARG, "write a multiple of 3", model=Pixels(), data=pictures(), microbatch_size=4),
    made(A.progressive_resizing, ARG, "would have no time to grow", delay="0.5dur", finetune="0.5dur"),
    runs(A.progressive_resizing(delay="5ba"), ARG, "'5ba' is no part of", model=pooled(3), data=PIXELS),
    made(A.sequence_length_warmup, ARG, "leave keep_end out", mode="reshape", keep_end=True),
    of(lambda: A.with_length((TOKENS[0][0], torch.zeros(2)), 2, "reshape"), DATA, "has no 3 tokens a sample"),
    runs(A.transform(growing), DATA, "which are no samples of one batch"),
    made(A.transform, TYPE, "is not a function of an input", function=3),
    of(lambda: A.with_length(WORDS, 3, keys=["labels"]), DATA, "has no 'labels', which keys= names"),
    # Schedules of training
    runs(A.layer_freezing(), MODEL, "has 1 layer with parameters that are trained", model=nn.Linear(4, 3)),
    made(A.selective_backprop, ARG, "it would never run", interrupt=1),
    made(A.selective_backprop, ARG, "does not come after", start="0.5dur", end="0.5dur"),
    runs(A.selective_backprop(start=0, per_sample_loss=wrong_shape), DATA, "returned shape ()", "each of 4 samples"),
    made(A.early_stopping, ARG, 'amount of training such as "3ep"', patience="3"),
    made(A.early_stopping, ARG, "If 'val/accuracy' is meant", metric="val/acc"),
    made(A.early_stopping, ARG, '"max".', metric="val/reward"),
    made(A.threshold_stopping, ARG, "write ", metric="train/loss", threshold=1.0, at="eval"),
    made(A.threshold_stopping, ARG, 'write metric="train/loss", or "train/accuracy"', at="batch"),
    of(lambda: fit(None, None, [A.threshold_stopping("train/f1")], train_metrics=[F1]), ARG, 'write at="batch"'),
    of(lambda: fit(None, None, [A.early_stopping("train/f1")]), ARG, "'train/loss'", "fit(train_metrics=)"),
    runs(A.threshold_stopping("train/loss/kl", 0.1, at="batch"), ARG, "the loss has no part 'train/loss/kl'"),
    runs(A.reduce_on_plateau("train/loss"), ARG, "takes_lr_scale=True", optimizer=OWN),
    # Models
    of(lambda: A.apply_alibi(Positions(), 5, position_embeddings=["positions"]), ARG, "less than the 6"),
    of(lambda: A.apply_alibi(Positions(), 9, position_embeddings=["x"]), MODEL, "'words', 'positions'"),
    of(lambda: A.apply_alibi(nn.Linear(2, 2), 5)(torch.ones(1, 2)), MODEL, "no attention to add biases to"),
    of(lambda: A.apply_alibi(Attention(), 5, heads=2)(torch.ones(1, 5, 8)), MODEL, "has 4 heads"),
    made(A.blurpool, ARG, "would do nothing", replace_convs=False, replace_maxpools=False),
    of(lambda: A.apply_blurpool(nn.Sequential(nn.Conv2d(3, 4, 3, 2))), MODEL, "0 has 3 input channels"),
    of(lambda: A.apply_blurpool(nn.Conv2d(16, 4, 3, 2), replace_convs=False), MODEL, "replace_convs is False"),
    of(lambda: A.apply_blurpool(nn.MaxPool2d(2, ceil_mode=True)), MODEL, "ceil_mode or return_indices"),
    of(lambda: A.apply_blurpool(type("Own", (nn.MaxPool2d,), {})(2)), MODEL, "a subclass"),
    made(A.factorize, ARG, "rank=2.5 is no number of values", rank=2.5),
    made(A.factorize, ARG, "both False", convs=False, linears=False),
    of(lambda: A.set_rank(WIDE, 2), MODEL, "modules that apply_factorize has made"),
    of(lambda: A.apply_factorize(WIDE, 10, min_features=8), ARG, "rank 10 of 0, 16 x 16, saves nothing: at most 7"),
    of(lambda: A.apply_factorize(NARROW, 2, min_features=8), MODEL, "0 has 3 inputs", "1 has 2 groups"),
    of(lambda: A.apply_factorize(TIED, 2, min_features=8), MODEL, "head shares its weight with another layer"),
    made(A.gated_linear_units, ARG, "write bias=True", init="old"),
    made(A.gated_linear_units, ARG, "is none of 'gelu', 'silu', 'sigmoid'", activation="relu"),
    of(lambda: A.apply_gated_linear_units(BLOCK, blocks=dropped), MODEL, "'2' in the model, Sequential, is a Dropout"),
    of(lambda: A.apply_ghost_batchnorm(nn.SyncBatchNorm(3)), MODEL, "SyncBatchNorm, which has one statistic"),
    made(A.gyro_dropout, ARG, "no more can be trained together", subnetworks=4, concurrent=5),
    runs(A.gyro_dropout(), ARG, "write the period in batches", model=BLOCK, data=iter(points())),
    of(lambda: A.apply_squeeze_excite(NARROW, min_channels=129), MODEL, "0 has 3 input and 16 output"),
    of(lambda: A.apply_weight_standardization(CONVS, skip_last=2), MODEL, "each filter of 1 is one weight"),
    made(A.stochastic_depth, TYPE, "is no class of modules", blocks=(nn.Linear, 3)),
    runs(A.stochastic_depth(nn.Linear), MODEL, "of 1 blocks, such as '4', all return another shape", model=plus()),
    of(lambda: A.apply_stochastic_depth(nn.Sequential(nn.LSTM(2, 2)), nn.LSTM)(torch.ones(1, 2)), MODEL, "type tuple"),
    of(lambda: pl.Algorithm("mine", ENDS, claims="text"), TYPE, "'mine': claims="),  # type: ignore[arg-type]
    of(lambda: pl.Algorithm("mine", ENDS, bind=divmod), TYPE, "'mine': bind="),  # type: ignore[arg-type]
    # Metrics
    monitors("vall/loss", "early_stopping: there is no metric 'vall/loss'; did you mean 'val/loss'? there"),
    monitors("x/loss", "threshold_stopping: there", make=lambda metric: A.threshold_stopping(metric, 0.5)),
    monitors("y/loss", "reduce_on_plateau: there", make=A.reduce_on_plateau),
    monitors("val/loss", "there is 'train/loss', 'val/mse'", val=MSE),
    monitors("of/two/loss", "the label of its evaluator contains a slash", **{"of/two": points(1)}),
    runs(A.early_stopping("val/accuracy"), ARG, "no number 'val/accuracy'; there is 'val/loss'.", **NO_CLASSES),
    made(A.early_stopping, ARG, 'mode="min" or mode="max"', metric="val/mine"),
    made(A.early_stopping, ARG, "the evaluator's label", metric="loss"),
]


@rows(REFUSALS)
def test_what_cannot_be_done_is_refused(refusal: Refusal) -> None:
    check(refusal)
