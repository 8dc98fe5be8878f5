"""What callbacks see of an ensemble, each member where they ask for it; and what is recorded: mean, spread and best."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import optree
import torch
from torch import Tensor, nn

from pure_loop._internal.closing import call_all
from pure_loop._internal.members import best_of, of_float
from pure_loop._internal.pytree import NAMESPACE, PyTree
from pure_loop._internal.recordable import Table, recordable_metrics
from pure_loop.callback import Callback, CallbackLike, LoggerGroup, Run
from pure_loop.entry.settings import listed_callbacks
from pure_loop.event import Event
from pure_loop.members import turns
from pure_loop.members.ensemble import Ensemble
from pure_loop.members.stacking import split
from pure_loop.membership import MemberValues
from pure_loop.observer import observers
from pure_loop.recorder import Recorder
from pure_loop.state import State, raw_loss, with_fields

# Members of whose numbers each is recorded; of more, mean, spread and best alone.
MOST_EACH = 64


def member_count(model_or_state: nn.Module | State | Ensemble) -> int:
    """How many members are in fit's model or State; 0: it is one model."""
    if isinstance(model_or_state, Ensemble):
        return len(model_or_state.seeds)
    return int(model_or_state.members) if isinstance(model_or_state, State) else 0


def member_callbacks(callbacks: Iterable[CallbackLike], count: int) -> list[CallbackLike]:
    """The callbacks, those with ``each_member`` as ones that see each of so many members.

    Raises:
        ArgumentError, ArgumentTypeError: as :func:`pure_loop.observer.observers`.
    """
    listed = listed_callbacks(callbacks)
    observers(listed, ())  # refuses what would not be called, by its own name
    return [
        _of_each(callback, count) if isinstance(callback, Callback) and callback.each_member else callback
        for callback in listed
    ]


# What is recorded.


def summary(values: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """What is recorded of a number of each member, by name.

    ``<name>/mean``; ``<name>/spread``, the standard deviation over members (with n - 1), where there are two or more;
    ``<name>/best``, where the name tells whether less or more is better; and ``<name>/member/<number>``, where there
    are at most 64. Tensors stay on their device.

    >>> numbers = summary({"val/loss": {0: 0.5, 1: 0.75, 2: 0.25}})
    >>> [numbers[f"val/loss/{name}"] for name in ("mean", "spread", "best", "member/1")]
    [0.5, 0.25, 0.25, 0.75]
    """
    from pure_loop.algorithms._monitored import known_mode  # one model doesn't need it

    numbers: dict[str, Any] = {}
    for name, by_number in values.items():
        of_members = list(by_number.values())
        device = next((value.device for value in of_members if isinstance(value, Tensor)), None)
        if device is None:
            stacked = torch.tensor([float(value) for value in of_members], dtype=torch.float64)
        else:
            stacked = torch.stack([torch.as_tensor(value, device=device).detach().reshape(()) for value in of_members])
            stacked = of_float(stacked)
        statistics = {"mean": stacked.mean()}
        if len(of_members) > 1:
            statistics["spread"] = stacked.std()
        mode = known_mode(name.partition("/")[2])
        if mode is not None:
            statistics["best"] = best_of(stacked, mode)
        numbers |= {f"{name}/{key}": value.item() if device is None else value for key, value in statistics.items()}
        if len(of_members) <= MOST_EACH:
            numbers |= {f"{name}/member/{number}": value for number, value in by_number.items()}
    return numbers


class _Collected:
    """What members record at one event."""

    def __init__(self, logger: LoggerGroup, state: State) -> None:
        self._logger, self._state = logger, state
        self._values: dict[str, dict[int, Any]] = {}

    def of(self, number: int) -> LoggerGroup:
        """The logger that the callback of a member is handed."""
        return _MemberLogger(self, self._logger, self._state, number)

    def add(self, metrics: Mapping[str, object], number: int) -> None:
        numbers, tables = recordable_metrics(metrics)
        for name, value in numbers.items():
            self._values.setdefault(name, {})[number] = value
        self.add_tables(tables, number)

    def add_tables(self, tables: Mapping[str, Table], number: int) -> None:
        for name, (columns, rows) in tables.items():
            self._logger.log_table(f"{name}/member/{number}", columns, rows, self._state)

    def record(self) -> None:
        """Record the numbers of all members."""
        if self._values:
            self._logger.log_metrics(summary(self._values), self._state)


class _MemberLogger(LoggerGroup):
    """Collects numbers of a member, and records what else there is under its number."""

    def __init__(self, collected: _Collected, logger: LoggerGroup, state: State, number: int) -> None:
        super().__init__(logger.loggers)
        self._collected, self._logger, self._state, self._number = collected, logger, state, number

    def _name(self, name: str) -> str:
        return f"{name}/member/{self._number}"

    def log_hyperparameters(self, hyperparameters: Mapping[str, object]) -> None:
        if not self._number:  # they are those of the run
            self._logger.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, object], state: State) -> None:
        self._collected.add(metrics, self._number)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], state: State) -> None:
        self._collected.add_tables({name: (list(columns), [list(row) for row in rows])}, self._number)

    def log_text(self, name: str, text: str, state: State) -> None:
        self._logger.log_text(self._name(name), text, self._state)

    def log_images(self, name: str, images: object, state: State, *, masks: object = None) -> None:
        self._logger.log_images(self._name(name), images, self._state, masks=masks)

    def log_file(self, name: str, path: str) -> None:
        self._logger.log_file(self._name(name), path)

    def __getattr__(self, name: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self._logger, name)
        return method


# Callbacks.


class MemberRecorder(Recorder):
    """The recorder of an ensemble: of each number what :func:`summary` says.

    A member that has stopped counts with its last metrics, and with the loss that its weights have of the batch.
    """

    def fit_start(self, state: State, logger: LoggerGroup) -> None:
        super().fit_start(state.member(0), logger)
        seeds = [] if state.ensemble is None else list(state.ensemble.seeds)
        logger.log_hyperparameters({"members": len(seeds), "seed": str(seeds)})

    def batch_end(self, state: State, logger: LoggerGroup) -> None:
        self._of_members(super().batch_end, state, logger)

    def eval_end(self, state: State, logger: LoggerGroup) -> None:
        self._of_members(super().eval_end, state, logger)

    def _of_members(self, method: Callable[[State, LoggerGroup], None], state: State, logger: LoggerGroup) -> None:
        collected = _Collected(logger, state)
        for number, one in enumerate(_recorded(state)):
            with turns.turn(number):
                method(one, collected.of(number))
        collected.record()


def _recorded(state: State) -> Iterator[State]:
    """Of each member what a recorder reads: loss, metrics and times; the rest is not taken apart."""
    assert state.ensemble is not None
    seen: PyTree = (raw_loss(state), state.metrics, state.lr_scale)
    fields, structure = optree.tree_flatten(seen, namespace=NAMESPACE)
    columns: list[Sequence[Any]] = []
    for leaf in fields:
        values = leaf.values if isinstance(leaf, MemberValues) else [leaf] * len(state.ensemble)
        columns.append(leaf.unbind() if isinstance(leaf, Tensor) else values)
    times = ((state.timestamp, state.previous_timestamp) if stop is None else stop for stop in state.ensemble.stopped)
    names = ("loss", "metrics", "lr_scale", "timestamp", "previous_timestamp")
    for row, pair in zip(zip(*columns, strict=True) if columns else repeat(()), times, strict=False):
        yield with_fields(state, **dict(zip(names, (*structure.unflatten(row), *pair), strict=True)), ensemble=None)


class _EachMember(Callback):
    """Copies of a callback, each of which sees the State of one member."""

    def __init__(self, callback: Callback, count: int) -> None:
        self._copies = [copy.deepcopy(callback) for _ in range(count)]
        self.made_with = callback.made_with
        for name in ("all_ranks", "needs_grad_norm", "records"):
            setattr(self, name, getattr(callback, name))
        by_event = type(callback).run_event is Callback.run_event
        for event in Event:
            if not by_event or callable(getattr(callback, event.value, None)):
                setattr(self, event.value, partial(self._observe, event, by_event))

    def bind(self, run: Run) -> None:
        for callback in self._copies:
            callback.bind(run)

    def saves_to(self, folder: Any) -> bool:
        return any(callback.saves_to(folder) for callback in self._copies)

    def close(self) -> None:
        call_all(callback.close for callback in self._copies)

    def _observe(self, event: Event, by_event: bool, state: State, logger: LoggerGroup) -> object:
        collected = _Collected(logger, state)
        for number, (callback, one) in enumerate(zip(self._copies, split(state), strict=True)):
            method: Callable[..., object] = getattr(callback, event.value if by_event else "run_event")
            with turns.turn(number):
                result = method(*(() if by_event else (event,)), one, collected.of(number))
            if result is not None:
                return result  # which is refused, as that of any callback
        collected.record()
        return None


def _of_each(callback: Callback, count: int) -> Callback:
    cls = type(callback)
    # By the name and the module of the callback's own class errors name it, and seeds know it.
    kind: Any = type(cls.__name__, (_EachMember,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    result: Callback = kind(callback, count)
    return result
