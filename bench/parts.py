"""Optimizers, schedules, algorithms, callbacks and metrics of golden streams, by the names that plans have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import pure_loop as pl
from pure_loop import Event, State
from pure_loop.time import Timestamp

__all__ = ["algorithm_of", "callback_of", "clip_function", "metrics_of", "optimizer_of"]

A, O, S = pl.algorithms, pl.optim, pl.schedules  # noqa: E741


def _own(timestamp: Timestamp) -> float:
    return 0.02 / (1 + timestamp.batch)


def rate_of(name: str, unit: str, base: float) -> Any:
    """A learning rate of about this size."""
    long, short = {"ba": ("8ba", "2ba"), "ep": ("3ep", "1ep"), "dur": ("1dur", "0.25dur")}[unit]
    rates: dict[str, Callable[[], Any]] = {
        "constant": lambda: base,
        "linear": lambda: S.linear(base, base / 10, long),
        "cosine": lambda: S.cosine(long, base, warmup=short),
        "warmup": lambda: S.warmup(short, base),
        "step": lambda: S.step(short, 0.5, base),
        "multistep": lambda: S.multistep([short, "5ba"], 0.5, base),
        "one_cycle": lambda: S.one_cycle(long, base),
        "piecewise": lambda: S.piecewise({"0ba": base, "2ba": base / 2}),
        "inverse_sqrt": lambda: S.inverse_sqrt(short, base),
        "exponential": lambda: S.exponential(short, 0.7, base),
        "polynomial": lambda: S.polynomial(long, 2.0, base),
        "chain": lambda: S.chain(base, ("2ba", S.linear(base, 0.0, "9ba"))),
        "product": lambda: S.product((S.constant(base), S.cosine(long))),
        "cyclic": lambda: S.cyclic(short, base / 10, base),
        "own": lambda: _own,
    }
    return rates[name]()


def optimizer_of(name: str, rate: str, unit: str) -> Any:
    """The optimizer of this name, with a learning rate that suits it."""

    def lr(base: float = 0.02) -> Any:
        return rate_of(rate, unit, base)

    optimizers: dict[str, Callable[[], Any]] = {
        "adamw": lambda: O.adamw(lr()),
        "adamw_amsgrad": lambda: O.adamw(lr(), amsgrad=True, betas=(0.8, 0.95)),
        "adamw_independent": lambda: O.adamw(lr(), weight_decay=0.02, independent_decay=True),
        "adamw_scheduled": lambda: O.adamw(
            lr(), betas=(S.linear(0.8, 0.9, "4ba"), 0.99), weight_decay=S.linear(0.1, 0.0, "4ba")
        ),
        "adam": lambda: O.adam(lr()),
        "adam_decay": lambda: O.adam(lr(), weight_decay=0.1),
        "sgd": lambda: O.sgd(lr(0.1)),
        "sgd_momentum": lambda: O.sgd(lr(0.1), momentum=0.9, weight_decay=0.01),
        "sgd_nesterov": lambda: O.sgd(lr(0.1), momentum=0.8, nesterov=True),
        "sgd_dampened": lambda: O.sgd(lr(0.1), momentum=S.linear(0.5, 0.9, "4ba"), dampening=0.2),
        "sgd_maximize": lambda: O.sgd(lr(0.01), maximize=True, weight_decay=0.1, independent_decay=True),
        "lamb": lambda: O.lamb(lr(), weight_decay=0.1),
        "lion": lambda: O.lion(lr(0.005), weight_decay=0.1),
        "muon": lambda: O.partition(
            {"matrices": O.muon(lr()), "others": O.adamw(lr())},
            lambda name, tensor: "matrices" if tensor.ndim == 2 else "others",
        ),
        "rmsprop": lambda: O.from_torch(torch.optim.RMSprop, lr=lr(0.01), momentum=0.5),
        "adagrad": lambda: O.from_torch(torch.optim.Adagrad, lr=lr(0.05)),
        "radam": lambda: O.from_torch(torch.optim.RAdam, lr=lr()),
        "partition": lambda: O.partition(
            {"decay": O.adamw(lr(), weight_decay=0.1), "no_decay": O.sgd(lr(), momentum=0.5)},
            lambda name, tensor: "no_decay" if tensor.ndim < 2 else "decay",
        ),
        "partition_of_torch": lambda: O.partition(
            {"torch": O.from_torch(torch.optim.NAdam, lr=lr()), "own": O.lion(lr(0.005))},
            lambda name, tensor: "own" if tensor.ndim < 2 else "torch",
        ),
        "sparse_adam": lambda: O.partition(
            {"sparse": O.from_torch(torch.optim.SparseAdam, lr=lr()), "dense": O.sgd(lr(), momentum=0.5)},
            lambda name, tensor: "sparse" if name.startswith("embed") else "dense",
        ),
        "master_weights": lambda: O.master_weights(O.adamw(lr())),
    }
    return optimizers[name]()


def clip_function(grads: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> Any:
    """A clipping of the user's own."""
    return pl.gradients.clip_by_value(grads, 0.3)


@pl.algorithm(Event.AFTER_LOSS)
def penalty(state: State) -> State:
    """A term of the loss that parameters are in."""
    added = 0.01 * sum(tensor.square().sum() for tensor in state.params.values())
    loss: Any = state.loss
    if isinstance(loss, dict):
        return state.replace(loss={**loss, "total": loss["total"] + added})
    return state.replace(loss=loss + added)


@pl.algorithm(Event.BATCH_START, when="2ba")
def lr_scale(state: State) -> State:
    """Halves learning rates as training goes on."""
    return state.replace(lr_scale=torch.tensor(0.5 ** (state.timestamp.batch // 2), dtype=torch.float64))


@pl.algorithm(Event.BATCH_END)
def stop(state: State) -> State:
    """Ends training after the fourth batch."""
    return state.replace(stop=True) if state.timestamp.batch >= 4 else state


@pl.algorithm(Event.BATCH_END)
def freeze(state: State) -> State:
    """Freezes the first parameter from the second batch on, and frees it after the third."""
    first = frozenset(list(state.params)[:1]) if state.timestamp.batch == 2 else frozenset()
    return state.replace(frozen=first)


def algorithm_of(name: str, model: str) -> Any:
    """The algorithm of this name."""
    factories: dict[str, Callable[[], Any]] = {
        "gradient_clipping_norm": lambda: A.gradient_clipping("norm", 0.3),
        "gradient_clipping_value": lambda: A.gradient_clipping("value", 0.05, name="by_value"),
        "gradient_clipping_adaptive": lambda: A.gradient_clipping("adaptive", 0.05, name="adaptively"),
        "gradient_noise": lambda: A.gradient_noise(0.01),
        "ema": lambda: A.ema(half_life="2ba", buffers="*"),
        "ema_smoothing": lambda: A.ema(smoothing=0.8, interval="1ba", start="1ba", name="smoothed"),
        "lookahead": lambda: A.lookahead(2, 0.5),
        "sam": lambda: A.sam(0.1),
        "sam_adaptive": lambda: A.sam(0.2, interval=2, adaptive=True, name="asam"),
        "swa": lambda: A.swa("0.5dur", end="1dur", interval="1ba", replace=True),
        "layer_freezing": lambda: A.layer_freezing("0.3dur", at="1ba"),
        "early_stopping": lambda: A.early_stopping("val/loss", patience=1, interval="1ba"),
        "reduce_on_plateau": lambda: A.reduce_on_plateau("val/loss", factor=0.5, patience=0),
        "threshold_stopping": lambda: A.threshold_stopping("val/loss", 0.9, "min"),
        "penalty": lambda: penalty,
        "lr_scale": lambda: lr_scale,
        "stop": lambda: stop,
        "freeze": lambda: freeze,
        "selective_backprop": lambda: A.selective_backprop(0.5, start="0dur", end="1dur"),
        "label_smoothing": lambda: A.label_smoothing(0.1),
        "mixup": lambda: A.mixup(0.4),
        "cutout": lambda: A.cutout(1, 0.5),
        "cutmix": lambda: A.cutmix(1.0),
        "colout": lambda: A.colout(0.2, 0.2),
        "progressive_resizing": lambda: A.progressive_resizing(0.8, delay="0dur", finetune="0dur", increment=1),
        "blurpool": lambda: A.blurpool(min_channels=1),
        "squeeze_excite": lambda: A.squeeze_excite(2, min_channels=1),
        "channels_last": lambda: A.channels_last(),
        "ghost_batchnorm": lambda: A.ghost_batchnorm(2),
        "weight_standardization": lambda: A.weight_standardization(),
        "factorize": lambda: A.factorize(0.25, min_features=2, strict=False),
        "augmix": lambda: A.augmix(),
        "randaugment": lambda: A.randaugment(),
        "gyro_dropout": lambda: A.gyro_dropout(subnetworks=4, concurrent=2),
        "low_precision_layernorm": lambda: A.low_precision_layernorm(),
        "sequence_length_warmup": lambda: A.sequence_length_warmup("1dur", min_length=2, max_length=5, increment=1),
        "alibi": lambda: A.alibi(5),
    }
    return factories[name]()


class _Reader(pl.Callback):
    """Reads parameters and gradients at the end of each batch, and keeps a number of them."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        self.seen.append(sum(float(tensor.detach().double().sum()) for tensor in state.params.values()))


def callback_of(name: str) -> Any:
    """The callback of this name."""
    C = pl.callbacks
    factories: dict[str, Callable[[], Any]] = {
        "grad_monitor": lambda: C.GradMonitor("1ba"),
        "lr_monitor": lambda: C.LRMonitor(),
        "speed_monitor": lambda: C.SpeedMonitor(2),
        "reader": _Reader,
    }
    return factories[name]()


def metrics_of(name: str | None, loss: str, model: str) -> Any:
    """Metrics of an evaluator or of training; None: those that the library chooses."""
    if name is None:
        return None
    if name == "loss" or model in ("double", "named") or loss in ("task", "counted"):
        return [pl.metrics.loss()]
    return {"loss": pl.metrics.loss(), "accuracy": pl.metrics.accuracy(), "second": pl.metrics.top_k(2)}
