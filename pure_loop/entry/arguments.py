"""Readers of single arguments: each gives what the loop uses, or refuses it and says what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from pure_loop import optim
from pure_loop._internal.arguments import (
    accepts,
    check_callable,
    check_choice,
    check_flag,
    check_integer,
    is_number,
    is_path,
    name_of,
    positive_or_none,
    refusal,
)
from pure_loop.algorithm import Algorithm, flatten
from pure_loop.callback import Callback
from pure_loop.entry.parallel import Together
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event, as_event
from pure_loop.frozendict import FrozenDict
from pure_loop.metrics._base import Metric, as_metrics
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.state import State
from pure_loop.time import Time, TimeUnit, read_time

__all__ = [
    "read_algorithms",
    "read_autoresume",
    "read_batches_per_epoch",
    "read_batches_per_step",
    "read_clip",
    "read_clock",
    "read_compile",
    "read_deterministic",
    "read_donate",
    "read_duration",
    "read_iteration_length",
    "read_microbatch_size",
    "read_nonfinite",
    "read_optimizer",
    "read_order",
    "read_parallel",
    "read_precision",
    "read_seed",
    "read_steps_per_call",
    "read_strict",
    "read_train_dataloader",
    "read_train_metrics",
    "read_verify",
    "read_watch",
]


# In what either may be written.
_OF_A_DURATION = tuple(unit for unit in TimeUnit if unit is not TimeUnit.DURATION)
_OF_AN_ITERATION = (TimeUnit.EPOCH, TimeUnit.TOKEN)


def read_duration(value: Any) -> Time:
    duration = read_time(value, "max_duration", _OF_A_DURATION)
    if duration.unit is TimeUnit.DURATION:
        raise ArgumentError(f'max_duration={value!r} is a fraction of itself; write "3ep", "1000ba" or "90m".')
    return duration


def read_iteration_length(value: Any) -> Time | None:
    if value is None:
        return None
    length = read_time(value, "iteration_length", _OF_AN_ITERATION)
    if length.unit not in _OF_AN_ITERATION or not length:
        raise ArgumentError(
            f'iteration_length={value!r}: an iteration lasts epochs or tokens, such as "2ep" or "1e6tok".'
        )
    return length


def read_batches_per_epoch(value: Any) -> int | None:
    return positive_or_none("batches_per_epoch", value)


def read_batches_per_step(value: Any) -> int:
    return check_integer("batches_per_step", value, least=1)


def read_microbatch_size(value: Any) -> int | Literal["auto"] | None:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if value is None:
        return None
    return check_integer("microbatch_size", value, least=1, wanted='a whole number of at least 1, "auto", or None')


def read_train_dataloader(value: Any) -> Any:
    if isinstance(value, nn.Module | State):
        raise ArgumentTypeError(
            f"train_dataloader is a {type(value).__name__}; the model comes first, then the data: "
            "fit(model, train_dataloader, ...)."
        )
    return value


def read_algorithms(value: Any) -> tuple[Algorithm, ...]:
    return flatten(value)


def read_train_metrics(value: Any) -> tuple[Metric, ...]:
    return as_metrics(value, "train_metrics") or ()


def read_precision(value: Any) -> Precision:
    return Precision.parse(value)


def read_parallel(value: Any) -> Together:
    return Together.of(value)


def read_seed(value: Any) -> int:
    return check_integer("seed", value)


def read_deterministic(value: Any) -> bool:
    return check_flag("deterministic", value)


def read_strict(value: Any) -> bool | None:
    return None if value is None else check_flag("strict", value)


def read_compile(value: Any) -> bool | Literal["where possible"]:
    return check_choice("compile", value, (True, False, "where possible"))


def read_steps_per_call(value: Any) -> int:
    return check_integer("steps_per_call", value, least=1)


def read_donate(value: Any) -> bool | Literal["auto"]:
    return check_choice("donate", value, ("auto", True, False))


def read_nonfinite(value: Any) -> Literal["error", "skip"]:
    return check_choice("nonfinite", value, ("error", "skip"))


def read_verify(value: Any) -> Time | None:
    if value is None:
        return None
    if not isinstance(value, str | Time):
        raise refusal("verify", value, 'an interval in batches, such as "100ba", or None')
    interval = read_time(value, "verify", (TimeUnit.BATCH,))
    if not interval:
        raise ArgumentError(
            f"verify={str(interval)!r}: an interval is longer than 0; to verify no batch, leave verify= out."
        )
    if interval.unit is not TimeUnit.BATCH:
        raise ArgumentError(
            f'verify={str(interval)!r}: single batches are computed twice, every so many: write "100ba", for every '
            "100th."
        )
    return interval


def read_autoresume(value: Any) -> Any:
    """A folder, or the callback that saves to it; ``Settings`` has the folder then."""
    if value is None or is_path(value):
        return value
    wanted = 'the folder of the checkpoints, autoresume="runs/1"; or what saves there, autoresume=CheckpointSaver(...)'
    folder = getattr(value, "folder", None)
    if not isinstance(value, Callback) or not is_path(folder):
        raise refusal("autoresume", value, wanted)
    if not value.saves_to(folder):
        raise ArgumentError(
            f"autoresume={value!r}: it saves nothing that training resumes from; write a CheckpointSaver of whole "
            "States, and this one in callbacks=."
        )
    return value


def read_order(value: Any) -> Literal["current", "2021"]:
    return check_choice("order", value, ("current", "2021"))


def read_clock(value: Any) -> Callable[[], float]:
    return check_callable("clock", value, "a function that returns seconds, such as time.monotonic")


def read_watch(value: Any) -> frozenset[Event] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"watch={value!r}: give a set of events, such as watch={{Event.BATCH_END}}.")
    return frozenset(as_event(event, "watch") for event in value)


def read_clip(clip_grad: Any) -> Any:
    if clip_grad is None:
        return None
    if callable(clip_grad):
        if not accepts(clip_grad, 2):
            raise ArgumentTypeError(
                f"clip_grad is the function {name_of(clip_grad)}, which can't be called with two arguments: it is "
                f"called as {name_of(clip_grad)}(grads, params)."
            )
        return _Clip(clip_grad)
    if not is_number(clip_grad):
        raise refusal("clip_grad", clip_grad, "a norm such as 1.0, or a function (grads, params) -> grads")
    if not clip_grad > 0:
        raise ArgumentError(f"clip_grad={clip_grad!r}: a norm is above 0; None switches clipping off.")
    return clip_grad


@attrs.frozen(repr=False)
class _Clip:
    """A user's clipping function, held to what it must return."""

    function: Callable[[Any, Any], Any]

    def __repr__(self) -> str:
        return repr(self.function)

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    @property
    def parts_of_code(self) -> tuple[Any, ...]:
        return (self.function,)

    def __call__(self, grads: FrozenDict[str, Any], params: FrozenDict[str, Tensor]) -> FrozenDict[str, Any]:
        clipped = self.function(grads, params)
        name = name_of(self.function)
        if not isinstance(clipped, Mapping):
            raise ArgumentTypeError(
                f"clip_grad={name} returned {type(clipped).__name__}; it returns the clipped gradients by name: "
                "{name: gradient for each of grads}."
            )
        if clipped.keys() != grads.keys():
            missing, unknown = sorted(grads.keys() - clipped.keys())[:3], sorted(clipped.keys() - grads.keys())[:3]
            raise ArgumentError(
                f"clip_grad={name} returned gradients of other names: missing {missing}, unknown {unknown}."
            )
        for key in grads:
            self._refuse_misfit(key, clipped[key], params[key])
        return FrozenDict((key, clipped[key]) for key in grads)

    def _refuse_misfit(self, key: str, gradient: Any, param: Tensor) -> None:
        """Here, because an update in place has taken the old parameters when the optimizer notices, if it does."""
        if gradient is None:
            return
        name = name_of(self.function)
        if not isinstance(gradient, Tensor):
            raise ArgumentTypeError(
                f"clip_grad={name} returned {type(gradient).__name__} for {key!r}; a gradient is a tensor, or None."
            )
        for what in ("shape", "dtype", "device"):
            value, needed = getattr(gradient, what), getattr(param, what)
            if value != needed:
                value, needed = (tuple(item) if what == "shape" else item for item in (value, needed))
                raise ArgumentError(
                    f"clip_grad={name} returned a gradient of {what} {value} for {key!r}, whose {what} is {needed}; "
                    "shapes, dtypes and devices stay as they are."
                )


def read_optimizer(value: Any) -> Optimizer:
    if isinstance(value, Optimizer):
        return value
    raise ArgumentTypeError(_about_optimizer(value))


def _about_optimizer(value: Any) -> str:
    if isinstance(value, torch.optim.Optimizer):
        cls = type(value)
        return f"optimizer= is a torch.optim.{cls.__name__}, which changes a module in place. {_ours(cls)}"
    if isinstance(value, type):
        return f"optimizer= is the class {value.__name__}. {_ours(value)}"
    if isinstance(value, list | tuple | dict):
        return (
            f"optimizer= is a {type(value).__name__}; give one optimizer. pl.optim.partition gives groups of "
            "parameters optimizers of their own; a GAN's two optimizers belong into a script of your own (pl.drive)."
        )
    if callable(value):
        name = name_of(value)
        ours = name if hasattr(optim, name) else "adamw"
        return f"optimizer= is the function {name!r}; call it: pl.optim.{ours}(lr=3e-4)."
    return f"optimizer={value!r}: give one of pl.optim, such as pl.optim.adamw(lr=3e-4)."


def _ours(cls: type) -> str:
    name = cls.__name__
    same = f"pl.optim.{name.lower()}(lr=...) or " if hasattr(optim, name.lower()) else ""
    return f"Write {same}pl.optim.from_torch(torch.optim.{name}, lr=...)."
