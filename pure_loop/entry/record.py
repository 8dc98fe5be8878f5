"""What loggers record of a call of ``fit``: the name of its run, and its arguments as hyperparameters."""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from pure_loop._internal.reprs import data, shown
from pure_loop._text import without_secrets
from pure_loop.cadence import Cadence
from pure_loop.callback import Callback, Logger
from pure_loop.entry.parallel import Together
from pure_loop.entry.settings import Settings, read_run_name
from pure_loop.errors import ArgumentError, ArgumentTypeError
from pure_loop.evaluator import Evaluator
from pure_loop.event import Event
from pure_loop.optim import Optimizer
from pure_loop.precision import Precision
from pure_loop.time import Time

_QUALITIES = ("amber", "bold", "brisk", "calm", "clear", "crisp", "early", "gentle", "green", "keen", "lucid", "mellow")
_NOUNS = ("aspen", "birch", "brook", "cedar", "cliff", "dune", "fern", "harbor", "heron", "island", "maple", "river")
# Of the last second in which a run began, how often each name was drawn.
_names: dict[str, Counter[str]] = {}


def new_run_name() -> str:
    """A name that reads well, of the time and two words: ``20250131-142501-calm-river``; no two of a process are equal.

    Its words are drawn from the system's own generator, so that no seed of the run plays a part and none is moved.
    """
    moment = time.strftime("%Y%m%d-%H%M%S")
    if moment not in _names:
        _names.clear()
    names = _names.setdefault(moment, Counter())
    name = f"{moment}-{secrets.choice(_QUALITIES)}-{secrets.choice(_NOUNS)}"
    names[name] += 1
    return name if names[name] == 1 else f"{name}-{names[name]}"


def noted_run_name(notes: Mapping[str, object]) -> str | None:
    """The name of the run that a ``CheckpointSaver`` noted in a checkpoint; None: none, or one that no run can have."""
    try:
        return read_run_name(notes.get("run_name"))
    except (ArgumentError, ArgumentTypeError):
        return None


def recorded_run_name(callbacks: Iterable[Callback]) -> str | None:
    """The name of the run that loggers have a record of; None: none has one."""
    names = (callback.recorded_run_name for callback in callbacks if isinstance(callback, Logger))
    return next((name for name in names if name is not None), None)


def hyperparameters(settings: Settings) -> dict[str, object]:
    """Each argument of ``fit`` by its name, but the model and the seed, which the recorder reads from the State; and:

    * ``<algorithm>/<setting>`` for each setting of an algorithm of the library, such as ``sam/rho``;
    * ``optimizer/<option>`` for each option of the optimizer, and ``optimizer/<label>/<option>`` for those of a part;
    * ``batch_size``, where the dataloader has one; else the recorder adds it after the first batch.

    Values that are no numbers, flags or texts are described: tensors by shape, functions by name.
    """
    recorded: dict[str, object] = {}
    for field in attrs.fields(Settings):
        if field.name not in ("model_or_state", "seed"):
            recorded[field.name] = _described(getattr(settings, field.name))
    recorded["train_dataloader"] = data(settings.train_dataloader)
    recorded["evaluators"] = _evaluators(settings.evaluators)
    for algorithm in settings.algorithms:
        for name, value in algorithm.settings.items():
            if name != "name":
                recorded[f"{algorithm.name}/{name}"] = _described(value)
    recorded |= _options(settings.optimizer, "optimizer")
    batch_size = getattr(settings.train_dataloader, "batch_size", None)
    if isinstance(batch_size, int):
        recorded["batch_size"] = batch_size
    return recorded


def _evaluators(evaluators: object) -> str | None:
    if not isinstance(evaluators, Mapping):
        return None if evaluators is None else _evaluator(evaluators)
    return ", ".join(f"{label}: {_evaluator(evaluator)}" for label, evaluator in evaluators.items())


def _evaluator(evaluator: object) -> str:
    return shown(evaluator) if isinstance(evaluator, Evaluator) else data(evaluator)


def _options(optimizer: Optimizer, name: str) -> dict[str, object]:
    options = {f"{name}/{option}": _described(value) for option, value in optimizer.options.items()}
    for label, part in optimizer.parts.items():
        options |= _options(part, f"{name}/{label}")
    return options


def _described(value: object) -> object:
    if isinstance(value, str):
        return without_secrets(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Time):
        return str(value)
    if isinstance(value, Cadence):
        return str(value.interval)
    if isinstance(value, Precision):
        return value.name
    if isinstance(value, Together):
        return _described(value.parallel)
    if isinstance(value, os.PathLike):
        return without_secrets(os.fspath(value))
    if isinstance(value, frozenset) and all(isinstance(item, Event) for item in value):
        return ", ".join(event.name for event in Event if event in value)
    if isinstance(value, Mapping):
        return shown(dict(value))
    return shown(value)
