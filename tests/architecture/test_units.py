"""A number without a unit is no time: every public function that takes a time refuses it, and says what to write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import pure_loop as pl

PLACES = (pl, pl.algorithms, pl.callbacks, pl.distributed, pl.loggers, pl.optim, pl.order, pl.schedules)
# A count of evaluations beside a time; read by the loop alone; left out of a sweep; a moment, of a recorded run.
OTHERWISE = {"early_stopping patience", "Timestamp max_duration", "rewind when"}
# Refused as a number, whatever it counts.
NO_NUMBER = {"fit verify": '"100ba"', "Recipe verify": '"100ba"'}
# What is passed where a time is one of several.
SHAPED: dict[str, Any] = {"rest": (3, 0.5), "milestones": [3], "values": {0: 0.1, 3: 0.2}}
DATA = [(torch.ones(2, 1), torch.ones(2, 1))]
CONSTANT = pl.schedules.constant(1.0)
REQUIRED: dict[str, Any] = (
    {"model_or_state": torch.nn.Linear(1, 1), "model": torch.nn.Linear(1, 1), "train_dataloader": DATA}
    | {"dataloader": DATA, "optimizer": pl.optim.sgd(lr=0.1), "max_duration": "9ep", "batches": (2,)}
    | {"name": "mine", "handlers": {"batch_end": lambda state: state}, "events": "fit_start", "blocks": ["0"]}
    | {"first": 0.1, "gamma": 0.5}
    | {"start": 0.1, "end": 0.2, "time": "9ep", "warmup": "1ep", "decay": "1ep", "schedule": CONSTANT}
    | {"schedules": {"constant": CONSTANT}, "prompts": "a", "generate": lambda model, text: text}
    | {"url": "s3://bucket/runs", "channel": "#runs", "algorithms": [pl.algorithms.ema("2ba")]}
)


# What these are given of fit's own is read by fit.
PASSING_ON = (pl.lr_find, pl.ablate, pl.explain, pl.rehearse, pl.rewind, pl.largest_microbatch, pl.inspect)
OF_FIT = inspect.signature(pl.fit).parameters.keys()
LOOP = {"optimizer": REQUIRED["optimizer"], "max_duration": "9ep", "loss": torch.nn.functional.mse_loss}
BESIDES: dict[Any, dict[str, Any]] = {
    **dict.fromkeys((pl.fit, *PASSING_ON), LOOP),
    pl.ablate: LOOP | {"algorithms": [pl.algorithms.ema("9ba")]},
    pl.algorithms.ema: {"half_life": "9ba"},
}


def times() -> Iterator[tuple[str, Callable[..., Any], inspect.Parameter]]:
    """The parameters of public functions and classes that take a time, by their annotations."""
    for place in PLACES:
        for name in place.__all__:
            value = getattr(place, name)
            with suppress(TypeError, ValueError):  # no function, or none of Python's
                for parameter in inspect.signature(value).parameters.values():
                    if value in PASSING_ON and parameter.name in OF_FIT:
                        continue
                    if re.search(r"\b(Time|TimeLike|CadenceLike)\b", str(parameter.annotation)):
                        yield f"{name} {parameter.name}", value, parameter


ALL = {label: (value, parameter) for label, value, parameter in times()}


def test_a_number_without_a_unit_is_refused(tmp_path: Path) -> None:
    assert len(ALL) >= 75
    wrong = {}
    for label in ALL.keys() - OTHERWISE:
        call, taken = ALL[label]
        keywords: dict[str, Any] = {}
        positional: list[Any] = []
        parameters = inspect.signature(call).parameters.values()
        by_position = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        for parameter in parameters:
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            optional = (variadic and parameter.name != "events") or parameter.default is not parameter.empty
            is_taken = parameter.name == taken.name
            if optional and not is_taken:
                continue
            value = SHAPED.get(taken.name, 3) if is_taken else REQUIRED.get(parameter.name, tmp_path)
            if by_position and parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(value)
            else:
                keywords[parameter.name] = value
        keywords |= BESIDES.get(call, {}) | keywords
        said = "nothing"
        try:
            result = call(*positional, **keywords)
            if call is pl.algorithm:
                result(lambda state: state)
        except pl.PureLoopError as error:
            said = str(error)
        if not re.search(NO_NUMBER.get(label, r'\b3 of what\? Write "3(ep|ba|s)" \('), said):
            wrong[label] = said
    assert not wrong
