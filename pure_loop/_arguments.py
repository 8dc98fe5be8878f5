"""Reading the arguments of ``fit``: each is turned into what the loop uses, or refused with what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop import optim
from pure_loop._signature import accepts, name_of
from pure_loop.donation import CAN_COUNT, Donation
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.optim import Optimizer
from pure_loop.time import Time, TimeUnit, read_time

__all__ = [
    "read_clip",
    "read_donate",
    "read_duration",
    "read_iteration_length",
    "read_watch",
    "refuse_auto",
    "refuse_no_optimizer",
]


# In what either may be written.
_OF_A_DURATION = tuple(unit for unit in TimeUnit if unit is not TimeUnit.DURATION)
_OF_AN_ITERATION = (TimeUnit.EPOCH, TimeUnit.TOKEN)


def read_duration(given: Any) -> Time:
    duration = read_time(given, "max_duration", _OF_A_DURATION)
    if duration.unit is TimeUnit.DURATION:
        raise ArgumentError(f'max_duration={given!r} is a fraction of itself; write "3ep", "1000ba" or "90m".')
    return duration


def read_iteration_length(given: Any, duration: Time) -> Time | None:
    if given is None:
        if duration.unit is TimeUnit.ITERATION:
            raise ArgumentError(f"max_duration={str(duration)!r} counts iterations, and iteration_length is not given.")
        return None
    length = read_time(given, "iteration_length", _OF_AN_ITERATION)
    if length.unit not in _OF_AN_ITERATION or not length:
        raise ArgumentError(
            f'iteration_length={given!r}: an iteration lasts epochs or tokens, such as "2ep" or "1e6tok".'
        )
    return length


def refuse_auto(microbatch_size: Any) -> Any:
    if microbatch_size == "auto":
        raise ArgumentError(
            'microbatch_size="auto": this version of pure_loop can\'t do that yet; give a number, or None.'
        )
    return microbatch_size


def read_watch(given: Any) -> frozenset[Event] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentTypeError(f"watch={given!r}: give a set of events, such as watch={{Event.BATCH_END}}.")
    return frozenset(_event(event) for event in given)


def _event(given: Any) -> Event:
    try:
        return Event(given)
    except ValueError as error:
        raise ArgumentError(f"watch: {error}") from None


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
    if isinstance(clip_grad, bool) or not isinstance(clip_grad, int | float):
        raise ArgumentTypeError(
            f"clip_grad={clip_grad!r}: give a norm such as 1.0, or a function (grads, params) -> grads."
        )
    if not clip_grad > 0:
        raise ArgumentError(f"clip_grad={clip_grad!r}: a norm is above 0; None switches clipping off.")
    return clip_grad


@attrs.frozen
class _Clip:
    """A user's clipping function, held to what it must return."""

    function: Callable[[Any, Any], Any]

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
            given, needed = getattr(gradient, what), getattr(param, what)
            if given != needed:
                given, needed = (tuple(each) if what == "shape" else each for each in (given, needed))
                raise ArgumentError(
                    f"clip_grad={name} returned a gradient of {what} {given} for {key!r}, whose {what} is {needed}; "
                    "shapes, dtypes and devices stay as they are."
                )


def refuse_no_optimizer(given: Any) -> None:
    """
    Raises:
        ArgumentTypeError: it is not one of ours; says what it is and what to write.
    """
    if not isinstance(given, Optimizer):
        raise ArgumentTypeError(_about_optimizer(given))


def _about_optimizer(given: Any) -> str:
    if isinstance(given, torch.optim.Optimizer):
        cls = type(given)
        return f"optimizer= is a torch.optim.{cls.__name__}, which changes a module in place. {_ours(cls)}"
    if isinstance(given, type):
        return f"optimizer= is the class {given.__name__}. {_ours(given)}"
    if isinstance(given, list | tuple | dict):
        return (
            f"optimizer= is a {type(given).__name__}; give one optimizer. pl.optim.partition gives groups of "
            "parameters optimizers of their own; a GAN's two optimizers belong into a script of your own (pl.drive)."
        )
    if callable(given):
        name = name_of(given)
        ours = name if hasattr(optim, name) else "adamw"
        return f"optimizer= is the function {name!r}; call it: pl.optim.{ours}(lr=3e-4)."
    return f"optimizer={given!r}: give one of pl.optim, such as pl.optim.adamw(lr=3e-4)."


def _ours(cls: type) -> str:
    name = cls.__name__
    same = f"pl.optim.{name.lower()}(lr=...) or " if hasattr(optim, name.lower()) else ""
    return f"Write {same}pl.optim.from_torch(torch.optim.{name}, lr=...)."


def read_donate(donate: Any, *, compiled: bool, useful: bool) -> Donation | None:
    """What ``donate=`` asks for.

    Args:
        donate: the argument.
        compiled: whether updates are graphs.
        useful: whether others can overwrite at all.

    Raises:
        ArgumentError: it is none of True, False and "auto".
    """
    if donate is not True and donate is not False and donate != "auto":
        raise ArgumentError(f'donate={donate!r}: write "auto", True or False.')
    if not donate or not CAN_COUNT or not (useful or compiled):
        return None
    return Donation(always=donate is True, compiled=compiled)
