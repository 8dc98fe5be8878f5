"""``each``: a value for each member of an ensemble, where a number or a schedule stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import attrs
import torch
from torch import Tensor

from pure_loop._internal.arguments import check_integer, is_number, refuse_no_schedule
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.members import turns
from pure_loop.schedules._base import End, Schedule, warmup_in
from pure_loop.time import Time, Timestamp

T = TypeVar("T")
EachValue: TypeAlias = float | Callable[[Timestamp], float]


@attrs.frozen
class Each(Schedule):
    """A number or a schedule for each member of an ensemble, in the order of its members; made by :func:`each`.

    Attributes:
        values: of the members, in order.
    """

    values: tuple[EachValue, ...]

    def __call__(self, timestamp: Timestamp) -> float:
        """The value of the member whose turn it is; where it is no member's, a float64 tensor of all, shape (members,).

        Raises:
            ArgumentError: there are fewer values than members.
        """
        number = turns.member()
        if number is None:
            values = [value(timestamp) if callable(value) else value for value in self.values]
            return torch.tensor(values, dtype=torch.float64)  # type: ignore[return-value]
        value = self.of(number)
        return value(timestamp) if callable(value) else value

    def of(self, number: int) -> EachValue:
        """The value of one member."""
        if number >= len(self.values):
            raise ArgumentError(f"pl.{self!r} has no value of member {number}: write one value a member.")
        return self.values[number]

    def endless_warmup(self, end: End) -> Time | None:
        return next(filter(None, (warmup_in(value, end) for value in self.values)), None)

    def __repr__(self) -> str:
        return f"each([{', '.join(map(repr, self.values))}])"


def listed_numbers(values: T) -> T | list[Any]:
    """The numbers of a tensor or an array, as Python's; anything else as it is."""
    tolist: Callable[[], list[Any]] | None = getattr(values, "tolist", None)
    return values if tolist is None else tolist()


def each(values: Iterable[EachValue] | Tensor) -> Each:
    """A value for each member of an ensemble: it stands wherever a number or a schedule stands.

    That is a learning rate, a decay, a momentum, a strength of an algorithm, or ``seed=`` of :func:`pure_loop.fit`.

    Args:
        values: numbers or functions of the timestamp, such as schedules, one a member; or a tensor of shape (members,).

    Raises:
        ArgumentTypeError: something else than numbers and functions of the timestamp.
        ArgumentError: there is no value.

    >>> import torch, pure_loop as pl
    >>> pl.each(torch.tensor([0.5, 0.25]))
    each([0.5, 0.25])
    >>> rates = pl.each([pl.schedules.linear(rate, 0.0, "2ba") for rate in (0.5, 0.25)])
    >>> data = [(torch.ones(4, 2), torch.zeros(4, 1))] * 2
    >>> state = pl.run(pl.fit(pl.ensemble(lambda: torch.nn.Linear(2, 1), seeds=[0, 1]), data,
    ...                       loss=torch.nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=rates), max_duration="2ba"))
    >>> state.members
    2
    """
    shape = tuple(getattr(values, "shape", (1,)))
    if len(shape) != 1:
        raise ArgumentError(f"pl.each: the {type(values).__name__} has shape {shape}; write one of shape (members,).")
    values = listed_numbers(values)
    passed: object = values
    if isinstance(passed, str | Mapping) or not isinstance(passed, Iterable):
        raise ArgumentTypeError(
            f"pl.each({values!r:.60}): write one value a member, pl.each([1e-3, 3e-3]); one that all members share "
            "needs no pl.each."
        )
    listed = tuple(values)
    if not listed:
        raise ArgumentError("pl.each([]): write one value a member, pl.each([1e-3, 3e-3]).")
    for number, value in enumerate(listed):
        if callable(value):
            refuse_no_schedule(f"pl.each: value {number}", value)
        elif not is_number(value):
            raise ArgumentTypeError(
                f"pl.each: value {number} is {value!r:.60} of type {type(value).__name__}: each value is a number, or "
                "a function of the timestamp such as a schedule."
            )
    return Each(listed)


def read_seed(value: object) -> int | Each:
    """A ``seed=``: an int, or one a member."""
    seeds = [check_integer("seed", seed) for seed in value.values] if isinstance(value, Each) else []
    return Each(tuple(seeds)) if seeds else check_integer("seed", value)
