"""The arguments of a call, read once: each is checked where its field stands, and turned into what the loop uses.

``pl.drive`` reads :class:`StreamSettings`, ``pl.evaluate`` and ``pl.predict`` :class:`ModelSettings`, ``pl.fit`` and
``pl.explain`` :class:`Settings`. Nothing is opened here: what needs the model, the data or other ranks is checked where
the call is assembled.
"""

# ruff: noqa: RUF009 - the fields of a class of attrs are made by a function of this file
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self, TypeVar

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
from pure_loop._internal.names import check_run_name
from pure_loop._internal.reprs import brief
from pure_loop.algorithm import Algorithm, flatten
from pure_loop.cadence import CadenceLike
from pure_loop.callback import Callback, CallbackLike, Logger
from pure_loop.entry.parallel import Together, algorithm_described
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import EvaluatorsLike
from pure_loop.event import Event, as_event
from pure_loop.frozendict import FrozenDict
from pure_loop.members.each import Each, read_seed
from pure_loop.members.ensemble import Ensemble
from pure_loop.metrics._base import Metric, as_metrics
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.stages.settings import ClipGrad
from pure_loop.state import Loss, State
from pure_loop.task import Task
from pure_loop.time import Time, TimeUnit, read_time

T = TypeVar("T")
_CLOCK = "a function that returns seconds, such as time.monotonic"
# Units in which a duration, and the length of an iteration, may be written.
_DURATION_UNITS = tuple(unit for unit in TimeUnit if unit is not TimeUnit.DURATION)
_ITERATION_UNITS = (TimeUnit.EPOCH, TimeUnit.TOKEN)


def read_duration(value: object) -> Time:
    duration = read_time(value, "max_duration", _DURATION_UNITS)
    if duration.unit is TimeUnit.DURATION:
        raise ArgumentError(f'max_duration={value!r} is a fraction of itself; write "3ep", "1000ba" or "90m".')
    return duration


def read_iteration_length(value: object) -> Time | None:
    if value is None:
        return None
    length = read_time(value, "iteration_length", _ITERATION_UNITS)
    if length.unit not in _ITERATION_UNITS or not length:
        raise ArgumentError(
            f'iteration_length={value!r}: an iteration lasts epochs or tokens, such as "2ep" or "1e6tok".'
        )
    return length


def read_batches_per_step(value: object) -> int:
    return check_integer("batches_per_step", value, least=1)


def read_microbatch_size(value: object) -> int | Literal["auto"] | None:
    if isinstance(value, str) and value == "auto":
        return "auto"
    if value is None:
        return None
    return check_integer("microbatch_size", value, least=1, wanted='a whole number of at least 1, "auto", or None')


def read_train_dataloader(value: Iterable[object]) -> Iterable[object]:
    if isinstance(value, nn.Module | State | Ensemble):
        raise ArgumentTypeError(
            f"train_dataloader is a {type(value).__name__}; the model comes first, then the data: "
            "fit(model, train_dataloader, ...)."
        )
    return value


def read_run_name(name: object) -> str | None:
    """
    Raises:
        ArgumentTypeError: it is no text.
        ArgumentError: a folder can't be named so.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ArgumentTypeError(f'run_name={brief(name)}: write a text, such as "baseline-1", or None for a new name.')
    return check_run_name(name)


def read_verify(value: object) -> Time | None:
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


def read_watch(value: object) -> frozenset[Event] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ArgumentTypeError(f"watch={value!r}: give a set of events, such as watch={{Event.BATCH_END}}.")
    return frozenset(as_event(event, "watch") for event in value)


def read_clip(clip_grad: object) -> float | ClipGrad | None:
    if isinstance(clip_grad, Each):
        wanted = 'algorithms=[pl.algorithms.gradient_clipping("norm", pl.each([...]))] in its place'
        raise refusal("clip_grad", clip_grad, wanted, verb="write")
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

    function: Callable[..., object]

    def __repr__(self) -> str:
        return repr(self.function)

    @property
    def __name__(self) -> str:
        return name_of(self.function)

    @property
    def parts_of_code(self) -> tuple[object, ...]:
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

    def _refuse_misfit(self, key: str, gradient: object, param: Tensor) -> None:
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


def read_optimizer(value: object) -> Optimizer:
    if isinstance(value, Optimizer):
        return value
    raise ArgumentTypeError(_about_optimizer(value))


def _about_optimizer(value: object) -> str:
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


def listed_callbacks(callbacks: object) -> list[Any]:
    """What was written as callbacks: several, or one."""
    return [callbacks] if callable(callbacks) or not hasattr(callbacks, "__iter__") else list(callbacks)


def _read_by(reader: Callable[[Any], T]) -> T:
    """A field with what the reader makes of an argument."""
    field: T = attrs.field(converter=reader)
    return field


@attrs.frozen(kw_only=True)
class StreamSettings:
    """What runs at the events of a stream, and what the stream yields."""

    algorithms: tuple[Algorithm, ...] = _read_by(flatten)
    callbacks: Iterable[CallbackLike]
    loggers: Iterable[Logger]
    watch: frozenset[Event] | None = _read_by(read_watch)
    strict: bool | None = _read_by(lambda value: None if value is None else check_flag("strict", value))
    deterministic: bool = _read_by(lambda value: check_flag("deterministic", value))

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> Self:
        """Read those of a function's arguments that are fields here.

        Args:
            arguments: by name; further ones are passed over.
        """
        read: dict[str, Any] = {field.name: arguments[field.name] for field in attrs.fields(cls)}
        return cls(**read)


@attrs.frozen(kw_only=True)
class ModelSettings(StreamSettings):
    """What ``fit``, ``evaluate`` and ``predict`` have in common: a model, and how and where it is computed."""

    model_or_state: nn.Module | State | Ensemble
    precision: Precision = _read_by(Precision.parse)
    seed: int | Each = _read_by(read_seed)
    device: torch.device | str | None
    compile: bool | Literal["where possible"] = _read_by(
        lambda value: check_choice("compile", value, (True, False, "where possible"))
    )
    parallel: Together = _read_by(Together.of)

    @property
    def seeds(self) -> tuple[int, list[int] | None]:
        """That of the run, and those of members where ``seed=pl.each(...)`` gives each its own: it is the default."""
        seeds = [int(seed) for seed in getattr(self.seed, "values", ()) if not callable(seed)]
        return (0, seeds) if isinstance(self.seed, Each) else (self.seed, None)

    @property
    def algorithms_described(self) -> list[str]:
        """What has to be equal on all ranks of the algorithms."""
        return list(map(algorithm_described, self.algorithms))


@attrs.frozen(kw_only=True)
class Settings(ModelSettings):
    """The arguments of ``fit``."""

    train_dataloader: Iterable[object] = _read_by(read_train_dataloader)
    loss: Callable[..., Loss] | Task | None
    optimizer: Optimizer = _read_by(read_optimizer)
    max_duration: Time = _read_by(read_duration)
    iteration_length: Time | None = _read_by(read_iteration_length)
    batches_per_epoch: int | None = _read_by(lambda value: positive_or_none("batches_per_epoch", value))
    batches_per_step: int = _read_by(read_batches_per_step)
    microbatch_size: int | Literal["auto"] | None = _read_by(read_microbatch_size)
    evaluators: EvaluatorsLike
    eval_interval: CadenceLike
    train_metrics: tuple[Metric, ...] = _read_by(lambda value: as_metrics(value, "train_metrics") or ())
    run_name: str | None = _read_by(read_run_name)
    clip_grad: float | ClipGrad | None = _read_by(read_clip)
    nonfinite: Literal["error", "skip"] = _read_by(lambda value: check_choice("nonfinite", value, ("error", "skip")))
    load_path: str | os.PathLike[str] | None
    autoresume: str | os.PathLike[str] | None = _read_by(read_autoresume)
    donate: bool | Literal["auto"] = _read_by(lambda value: check_choice("donate", value, ("auto", True, False)))
    steps_per_call: int = _read_by(lambda value: check_integer("steps_per_call", value, least=1))
    order: Literal["current", "2021"] = _read_by(lambda value: check_choice("order", value, ("current", "2021")))
    verify: Time | None = _read_by(read_verify)
    clock: Callable[[], float] = _read_by(lambda value: check_callable("clock", value, _CLOCK))

    @property
    def fixed_size(self) -> int | None:
        """The samples of a forward, at most; None: the whole batch, or a size that is tried."""
        return None if self.microbatch_size == "auto" else self.microbatch_size

    def __attrs_post_init__(self) -> None:
        """
        Raises:
            ArgumentError: two arguments that contradict each other.
        """
        steps, order = self.steps_per_call, self.order
        saver: Any = self.autoresume  # a folder, or a callback that has one
        if not (saver is None or is_path(saver)):
            callbacks = listed_callbacks(self.callbacks)
            if all(callback is not saver for callback in callbacks):
                callbacks.append(saver)
            object.__setattr__(self, "callbacks", callbacks)
            object.__setattr__(self, "autoresume", saver.folder)
        if self.train_metrics:
            from pure_loop.entry.train_metrics import measuring  # no other run needs it

            # At BATCH_END before the others, which may read the values.
            algorithms = (measuring(self.train_metrics, self.parallel.ranks), *self.algorithms)
            object.__setattr__(self, "algorithms", flatten(algorithms))
        if self.microbatch_size == "auto":
            if any(algorithm.name == "microbatch_size" for algorithm in self.algorithms):
                raise ArgumentError(
                    'an algorithm is called "microbatch_size", under which microbatch_size="auto" keeps the size that '
                    "it has found in algorithm_state: give the algorithm another name."
                )
            parallel = self.parallel.parallel
            if parallel is not None and parallel.in_parts:
                raise ArgumentError(
                    'microbatch_size="auto" with parallel="shard" or parallelize=: ranks exchange in every forward, so '
                    "that one that runs out of memory would leave the others waiting. Give a number, or write "
                    'parallel="replicate".'
                )
        if self.precision.float8:
            from pure_loop.entry.float8 import converting  # no other run needs it

            # The last one, so that it converts what others put into the model.
            object.__setattr__(self, "algorithms", flatten((*self.algorithms, converting(self.precision))))
        if self.iteration_length is None and self.max_duration.unit is TimeUnit.ITERATION:
            raise ArgumentError(
                f"max_duration={str(self.max_duration)!r} counts iterations, and iteration_length is not given."
            )
        if self.iteration_length is not None and order == "2021":
            raise ArgumentError('order="2021" has no events for iterations; leave iteration_length out.')
        if self.verify is not None and self.compile:
            raise ArgumentError(
                f"verify={str(self.verify)!r} with compile={self.compile!r}: a verified batch is compared stage by "
                "stage, and a graph has no stages. Leave out one of the two: compiled steps differ by rounding alone."
            )
        if steps > 1 and not self.compile:
            raise ArgumentError(f"steps_per_call={steps}: only compiled steps go several to a call: add compile=True.")
        if steps > 1 and order != "current":
            raise ArgumentError(
                f'steps_per_call={steps} with order={order!r}: several steps go in the order "current" only.'
            )
