"""The arguments of a call, read once: each is checked where its field stands, and turned into what the loop uses.

``pl.drive`` reads :class:`StreamSettings`, ``pl.evaluate`` and ``pl.predict`` :class:`ModelSettings`, ``pl.fit`` and
``pl.explain`` :class:`Settings`. Nothing is opened here: what needs the model, the data or other ranks is checked where
the call is assembled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import attrs

from pure_loop.algorithm import Algorithm
from pure_loop.callback import Callback
from pure_loop.entry.arguments import (
    read_algorithms,
    read_autoresume,
    read_batches_per_epoch,
    read_batches_per_step,
    read_clip,
    read_clock,
    read_compile,
    read_deterministic,
    read_donate,
    read_duration,
    read_iteration_length,
    read_microbatch_size,
    read_nonfinite,
    read_optimizer,
    read_order,
    read_parallel,
    read_precision,
    read_run_name,
    read_seed,
    read_steps_per_call,
    read_strict,
    read_train_dataloader,
    read_train_metrics,
    read_verify,
    read_watch,
)
from pure_loop.entry.parallel import Together, algorithm_described
from pure_loop.entry.resume import folder_of, with_callback
from pure_loop.errors import ArgumentError
from pure_loop.event import Event
from pure_loop.metrics import Metric
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.time import Time, TimeUnit

__all__ = ["ModelSettings", "Settings", "StreamSettings"]


@attrs.frozen(kw_only=True)
class StreamSettings:
    """What runs at the events of a stream, and what the stream yields."""

    algorithms: tuple[Algorithm, ...] = attrs.field(converter=read_algorithms)
    callbacks: Any
    loggers: Any
    watch: frozenset[Event] | None = attrs.field(converter=read_watch)
    strict: bool | None = attrs.field(converter=read_strict)
    deterministic: bool = attrs.field(default=False, converter=read_deterministic)


@attrs.frozen(kw_only=True)
class ModelSettings(StreamSettings):
    """What ``fit``, ``evaluate`` and ``predict`` have in common: a model, and how and where it is computed."""

    model_or_state: Any
    precision: Precision = attrs.field(converter=read_precision)
    seed: int = attrs.field(converter=read_seed)
    device: Any
    compile: bool | Literal["where possible"] = attrs.field(converter=read_compile)
    parallel: Together = attrs.field(converter=read_parallel)

    @property
    def algorithms_described(self) -> list[str]:
        """What has to be equal on all ranks of the algorithms."""
        return list(map(algorithm_described, self.algorithms))


@attrs.frozen(kw_only=True)
class Settings(ModelSettings):
    """The arguments of ``fit``."""

    train_dataloader: Any = attrs.field(converter=read_train_dataloader)
    loss: Any
    task: Any
    optimizer: Optimizer = attrs.field(converter=read_optimizer)
    max_duration: Time = attrs.field(converter=read_duration)
    iteration_length: Time | None = attrs.field(converter=read_iteration_length)
    batches_per_epoch: int | None = attrs.field(converter=read_batches_per_epoch)
    batches_per_step: int = attrs.field(converter=read_batches_per_step)
    microbatch_size: int | Literal["auto"] | None = attrs.field(converter=read_microbatch_size)
    evaluators: Any
    eval_interval: Any
    train_metrics: tuple[Metric, ...] = attrs.field(converter=read_train_metrics)
    run_name: str | None = attrs.field(converter=read_run_name)
    clip_grad: Any = attrs.field(converter=read_clip)
    nonfinite: Literal["error", "skip"] = attrs.field(converter=read_nonfinite)
    load_path: Any
    autoresume: str | os.PathLike[str] | None = attrs.field(converter=read_autoresume)
    donate: bool | Literal["auto"] = attrs.field(converter=read_donate)
    steps_per_call: int = attrs.field(converter=read_steps_per_call)
    order: Literal["current", "2021"] = attrs.field(converter=read_order)
    verify: Time | None = attrs.field(converter=read_verify)
    clock: Callable[[], float] = attrs.field(converter=read_clock)

    def __attrs_post_init__(self) -> None:
        """
        Raises:
            ArgumentError: two arguments that contradict each other.
        """
        steps, order = self.steps_per_call, self.order
        saver: Any = self.autoresume
        if isinstance(saver, Callback):
            object.__setattr__(self, "callbacks", with_callback(self.callbacks, saver))
            object.__setattr__(self, "autoresume", folder_of(saver))
        if self.train_metrics:
            from pure_loop.entry.train_metrics import measuring  # no other run needs it

            # At BATCH_END before the others, which may read the values.
            algorithms = (measuring(self.train_metrics, self.parallel.ranks), *self.algorithms)
            object.__setattr__(self, "algorithms", read_algorithms(algorithms))
        if self.microbatch_size == "auto":
            if any(algorithm.name == "microbatch_size" for algorithm in self.algorithms):
                raise ArgumentError(
                    'an algorithm is called "microbatch_size", under which microbatch_size="auto" keeps the size that '
                    "it has found in algorithm_state: give the algorithm another name."
                )
            parallel = self.parallel.parallel
            if parallel is not None and parallel.kind == "shard":
                raise ArgumentError(
                    'microbatch_size="auto" with parallel="shard": ranks exchange parameters in every forward, so that '
                    "one that runs out of memory would leave the others waiting. Give a number, or write "
                    'parallel="replicate".'
                )
        if self.precision.float8:
            from pure_loop.entry.float8 import converting  # no other run needs it

            # The last one, so that it converts what others put into the model.
            object.__setattr__(self, "algorithms", read_algorithms((*self.algorithms, converting(self.precision))))
        if self.iteration_length is None and self.max_duration.unit is TimeUnit.ITERATION:
            raise ArgumentError(
                f"max_duration={str(self.max_duration)!r} counts iterations, and iteration_length is not given."
            )
        if self.iteration_length is not None and order == "2021":
            raise ArgumentError('order="2021" has no events for iterations; leave iteration_length out.')
        if self.verify is not None and self.compile:
            raise ArgumentError(
                f"verify={str(self.verify)!r} with compile={self.compile!r}: a verified batch is compared stage by "
                "stage, and a graph has no stages. Leave out compile=, which trains the same up to rounding, or leave "
                "out verify=."
            )
        if steps > 1 and not self.compile:
            raise ArgumentError(f"steps_per_call={steps}: only compiled steps go several to a call: add compile=True.")
        if steps > 1 and order != "current":
            raise ArgumentError(
                f'steps_per_call={steps} with order={order!r}: several steps go in the order "current" only.'
            )
