"""``Optimizer``, learning rates and hyperparameters as an update reads them.

An optimizer is a pair of pure functions, ``init(params) -> opt_state`` and
``update(grads, opt_state, params, timestamp) -> (params, opt_state)``. Both return new mappings and
don't write to their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, cast

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import check_number, converted, is_number, is_scheduler, name_of, refuse_no_schedule
from pure_loop._internal.reprs import brief, call
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.frozendict import FrozenDict
from pure_loop.random.authors import runs_users_code
from pure_loop.time import Timestamp

__all__ = [
    *("Grads", "InTorch", "LearningRate", "OptState", "Optimizer", "Params", "RateFunction", "TorchGroup"),
    "rate_at",
]

Params: TypeAlias = FrozenDict[str, Tensor]
Grads: TypeAlias = Mapping[str, Tensor | None]
OptState: TypeAlias = FrozenDict[str, Any]
RateFunction: TypeAlias = Callable[[Timestamp], float]
LearningRate: TypeAlias = float | RateFunction


@attrs.frozen(kw_only=True)
class TorchGroup:
    """One parameter group of a class of ``torch.optim``.

    Attributes:
        options: what the group holds besides its parameters.
        memory: what is kept for each parameter, in their order; empty for one without a step.
        rest: what the optimizer keeps for no parameter.
    """

    options: Mapping[str, Any]
    memory: Mapping[str, Mapping[str, Any]]
    rest: Mapping[Any, Any] = attrs.field(factory=dict)


class InTorch(Protocol):
    """An optimizer state as that of a class of torch."""

    def cls(self) -> type[torch.optim.Optimizer]:
        """The class."""

    def names(self, params: Params) -> list[list[str]]:
        """The parameters of each group, in their order."""

    def write(self, opt_state: OptState, params: Params, timestamp: Timestamp) -> list[TorchGroup]:
        """The groups. Their tensors may be those of ``opt_state``.

        Raises:
            ArgumentError: the class has no place for what this optimizer does or keeps.
        """

    def read(self, groups: Sequence[TorchGroup], params: Params) -> OptState:
        """The optimizer state. Its tensors may be those of the groups.

        Raises:
            ArgumentError: the groups were made with other options.
            ResumeError: they hold something else, or other shapes.
        """


def _callable(instance: Optimizer, attribute: attrs.Attribute[Any], value: object) -> None:
    if not callable(value):
        raise ArgumentTypeError(f"Optimizer {instance.name!r}: {attribute.name} must be a function, got {value!r}")


@attrs.frozen(kw_only=True, repr=False)
class Optimizer:
    """Two pure functions and their names.

    Args:
        name: in reprs and logs.
        init: ``params -> opt_state``. The structure, shapes and dtypes of ``opt_state`` are those
            that every later ``update`` returns.
        update: ``(grads, opt_state, params, timestamp) -> (params, opt_state)``. ``grads`` has the
            keys of ``params``; None stands for a parameter that this batch didn't use, which stays as it is.
        lr: the learning rate at a timestamp, which loggers record.
        overwrite: ``(grads, opt_state, params, timestamp, *, found_inf=None) -> (params, opt_state)``, the same numbers
            as ``update``, written to all tensors of ``params`` and ``opt_state``, to which nothing else may refer. It
            gives back the mapping ``params``; and ``opt_state``, or another mapping of its tensors where other values
            in it change. What it refuses it refuses before it writes. None: each step copies.
        fits: ``(opt_state, params) -> bool``: asked once for mappings that stay from step to step. If it is True,
            ``overwrite`` is given ``fits=True``, and need not look again how their tensors lie in memory. None: it is
            not asked.
        takes_found_inf: whether ``overwrite`` takes ``found_inf``: a float32 tensor of shape (1,) on the parameters'
            device, which is an accelerator, if each of them has a gradient. If it is 1, everything stays as it is.
        options: the other hyperparameters, for the repr.
        spreads_nonfinite: whether a gradient that is NaN or infinite makes its parameter so, where the loop finds it;
            if not, the loop checks the gradients themselves.
        takes_lr_scale: whether ``update`` reads each learning rate as ``rate_at(name, lr, timestamp)``
            (:func:`rate_at`), so that ``state.lr_scale`` multiplies it.
        elementwise: whether each element's update depends only on that element's gradient and optimizer state, so that
            a rank can update its shard of a parameter alone.
        parts: the optimizers this one is made of, by label (see :func:`partition`).
        draws: whether ``update`` or ``overwrite`` may draw random numbers from the global generators of torch, NumPy or
            Python: ``fit`` seeds them, by its seed and the number of the batch, alike on all ranks. It is True of
            functions that are neither torch's nor the library's.
        check: ``(opt_state, params) -> None``, where params may be on the meta device: raises
            :class:`~pure_loop.errors.ResumeError` if training can't resume from ``opt_state``. None: it is compared
            with the result of ``init``.
        seeing: ``(view) -> optimizer``: this optimizer with a label function that receives ``view(name, tensor)``: the
            parameter as the user declared it, with its class and attributes (see :func:`partition`).
        in_torch: how the optimizer state is that of a class of ``torch.optim`` (see :func:`to_state_dict`). None: no
            class has it.

    An optimizer of your own needs nothing else:

    >>> import torch
    >>> from pure_loop.frozendict import FrozenDict
    >>> from pure_loop.time import Timestamp
    >>> def signs(grads, opt_state, params, timestamp):
    ...     return FrozenDict({name: p - 0.5 * grads[name].sign() for name, p in params.items()}), opt_state
    >>> sign_sgd = Optimizer(name="sign_sgd", init=lambda params: FrozenDict(), update=signs, lr=lambda timestamp: 0.5)
    >>> params = FrozenDict(w=torch.zeros(2))
    >>> sign_sgd.update(FrozenDict(w=torch.tensor([3.0, -4.0])), sign_sgd.init(params), params, Timestamp())
    (FrozenDict({'w': tensor (2,) float32}), FrozenDict({}))
    """

    name: str
    init: Callable[[Params], OptState] = attrs.field(validator=_callable)
    update: Callable[[Grads, OptState, Params, Timestamp], tuple[Params, OptState]] = attrs.field(validator=_callable)
    lr: RateFunction = attrs.field(validator=_callable)
    overwrite: Callable[..., tuple[Params, OptState]] | None = None
    fits: Callable[[OptState, Params], bool] | None = None
    takes_found_inf: bool = False
    options: Mapping[str, Any] = attrs.field(factory=FrozenDict)
    spreads_nonfinite: bool = False
    takes_lr_scale: bool = False
    elementwise: bool = False
    parts: Mapping[str, Optimizer] = attrs.field(factory=FrozenDict)
    draws: bool = False
    check: Callable[[Any, Params], None] | None = None
    seeing: Callable[[Callable[[str, Tensor], Tensor]], Optimizer] | None = None
    in_torch: InTorch | None = None

    def __attrs_post_init__(self) -> None:
        if runs_users_code((self.update, self.overwrite)):
            object.__setattr__(self, "draws", True)
        # Another `overwrite`, put in by attrs.evolve, need not take what `fits` says.
        if getattr(self.fits, "__self__", None) is not getattr(self.overwrite, "__self__", None):
            object.__setattr__(self, "fits", None)

    def __repr__(self) -> str:
        fixed = fixed_rate(self.lr)
        rate = {} if self.parts else {"lr": self.lr if fixed is None else fixed}
        return call(self.name, {**rate, **self.options})


# Hyperparameters, at the door.


def as_schedule(where: str, lr: LearningRate) -> RateFunction:
    """A learning rate as a function of the timestamp."""
    if isinstance(lr, torch.nn.Module | Iterable) and not isinstance(lr, str | Tensor):
        raise ArgumentTypeError(f"{where} is given the parameters by fit: {where}(lr=3e-4), or lr=pl.each(rates).")
    if callable(lr) or is_scheduler(lr):
        refuse_no_schedule(f"{where}: lr", lr)
        return lr  # type: ignore[return-value]
    if not is_number(lr):
        number = "lr=3e-4" if isinstance(lr, str) else converted("lr", lr, float) or "lr=3e-4"
        text = brief(lr) if lr is None or isinstance(lr, str | bool | complex | Tensor) else "an object"
        raise ArgumentTypeError(
            f"{where}: lr must be a number, got {text} of type {type(lr).__name__}; write "
            f"{where}({number}), or a "
            f'function of the timestamp: {where}(lr=pl.schedules.cosine("3ep", peak=3e-4))'
        )
    from pure_loop.schedules import constant  # not before it is needed: importing pure_loop is to be quick

    return constant(check_number("lr", lr, where=where, least=0))


def fixed_rate(lr: RateFunction) -> float | None:
    """The learning rate, where it is always the same: schedules have it as ``fixed_value``."""
    value = getattr(lr, "fixed_value", None)
    return value if isinstance(value, float) and 0.0 <= value < math.inf else None


class ScaledTimestamp:
    """The timestamp of a step with learning rates that are multiplied by ``state.lr_scale``: what ``update`` is given.

    Attributes:
        timestamp: that of the State; all else is read from it.
        lr_scale: the factor, shape ().
    """

    __slots__ = ("lr_scale", "timestamp")

    def __init__(self, timestamp: Timestamp, lr_scale: Tensor) -> None:
        self.timestamp, self.lr_scale = timestamp, lr_scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.timestamp, name)

    def rate(self, where: str, lr: RateFunction) -> Any:
        """The learning rate of a schedule, scaled: a number, or of a compiled step a float64 tensor."""
        rate: Any = rate_at(where, lr, self.timestamp)
        if isinstance(rate, Tensor):
            return rate * self.lr_scale.to(rate)
        rate *= float(self.lr_scale)
        if not 0.0 <= rate < math.inf:
            raise ArgumentError(
                f"{where}: the learning rate must be finite and at least 0, and state.lr_scale={float(self.lr_scale)} "
                f"makes it {rate}"
            )
        return rate


def time_of_step(optimizer: Optimizer, timestamp: Timestamp, lr_scale: Tensor | None) -> Timestamp:
    """The timestamp that an update is given.

    Raises:
        ArgumentError: the learning rates are to be scaled, and this optimizer reads its own.
    """
    if lr_scale is None:
        return timestamp
    if not optimizer.takes_lr_scale:
        raise ArgumentError(
            f"state.lr_scale is set, and optimizer {optimizer.name!r} doesn't take it: read the learning rate as "
            "pl.optim.rate_at(name, lr, timestamp) in update, and write Optimizer(..., takes_lr_scale=True)."
        )
    return cast(Timestamp, ScaledTimestamp(timestamp, lr_scale))


def rate_at(where: str, lr: RateFunction, timestamp: Timestamp) -> float:
    """The learning rate for the batch that starts at ``timestamp``, as an update reads it.

    Args:
        where: the optimizer's name, for errors.
        lr: the schedule.
        timestamp: what ``update`` is given; it knows ``state.lr_scale``, by which the rate is multiplied.

    Raises:
        ArgumentError: a rate that is negative or not finite.
        ArgumentTypeError: a schedule that gives no number.

    >>> from pure_loop.schedules import linear
    >>> from pure_loop.time import Timestamp
    >>> rate_at("mine", linear(1.0, 0.0, "4ba"), Timestamp(batch=1))
    0.75
    """
    traced = getattr(timestamp, "rate", None)
    if traced is not None:  # a compiled step takes it as an input, because it is another one in each
        rate: float = traced(where, lr)
        return rate
    value: Any = lr(timestamp)
    if type(value) is not float and not isinstance(value, str | bytes):
        with suppress(TypeError, ValueError, RuntimeError):  # as tensors of several numbers say it
            value = float(value)
    if type(value) is not float:
        raise ArgumentTypeError(
            f"{where}: the learning rate must be a number, and {_shown(lr)} gave {value!r:.60} of type "
            f"{type(value).__name__}: a schedule is a function of the timestamp that returns one float"
        )
    if not 0.0 <= value < math.inf:
        raise ArgumentError(
            f"{where}: the learning rate must be finite and at least 0; {_shown(lr)} gave {value} at {timestamp!r}"
        )
    return value


def options_in_step(options: Mapping[str, Any], timestamp: Timestamp) -> dict[str, Any]:
    """Hyperparameters for the step of the batch that starts at ``timestamp``, as an update reads them.

    Args:
        options: by name; those that are functions, or pairs in which there are some, are schedules.
        timestamp: what ``update`` is given.

    Returns:
        Of schedules floats; in a step that is compiled float64 tensors of shape (), inputs of the graph.
    """
    passed: Any = timestamp
    plain: Any = passed.timestamp if isinstance(passed, ScaledTimestamp) else passed
    as_input = getattr(plain, "as_input", None)

    def read(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(read, value))
        if not callable(value):
            return value
        return value(plain) if as_input is None else as_input(value)

    return {name: read(value) for name, value in options.items()}


def _shown(lr: RateFunction) -> str:
    """A schedule of ours by what it does, and a function by its name."""
    return repr(lr) if attrs.has(type(lr)) else name_of(lr)
