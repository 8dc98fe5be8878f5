"""Checks of the values that a file has for a State, before one is made of them."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from pure_loop.checkpoint.parsing import first_names, shortened
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, ResumeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model.model import ModelDef
from pure_loop.precision import LossScale
from pure_loop.time import Time, Timestamp

__all__ = [
    "LARGEST_COUNT",
    "OF_PROGRESS",
    "kind_of",
    "refuse_no_time",
    "refuse_invalid",
    "refuse_unregistered",
    "refuse_other_kinds",
    "refuse_another_model",
    "refuse_no_notes",
]


def refuse_invalid(values: Mapping[str, Any], path: object) -> None:
    """
    Raises:
        CheckpointError: a value that no State has; names the field.
    """
    refuse_other_kinds(values, _KINDS, path)
    for name in ("params", "buffers"):
        for key, tensor in values[name].items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise CheckpointError(f"{path} can't be read: {name}[{shortened(key)}] is a {type(tensor).__name__}.")
    for name in ("timestamp", "previous_timestamp"):
        refuse_no_time(name, values[name], path)
    _refuse_no_stop(values, path)
    scale = values["loss_scale"]
    scalars = {"skipped": (values["skipped"], torch.int64), "nonfinite": (values["nonfinite"], torch.int64)}
    if scale is not None:
        scalars["loss_scale.scale"] = scale.scale, torch.float32
        scalars["loss_scale.growth_tracker"] = scale.growth_tracker, torch.int32
    for name, (scalar, dtype) in scalars.items():
        if scalar is None and "." not in name:
            continue
        if not isinstance(scalar, Tensor) or scalar.shape != () or scalar.dtype is not dtype:
            kind = kind_of(scalar) if isinstance(scalar, Tensor) else f"a {type(scalar).__name__}"
            raise CheckpointError(
                f"{path} can't be read: its {name} is {kind}, and a State has () "
                f"{str(dtype).removeprefix('torch.')} there."
            )


def refuse_other_kinds(values: Mapping[str, Any], names: Iterable[str], path: object) -> None:
    """
    Raises:
        CheckpointError: one of these fields is missing, or of another class than a State has there.
    """
    for name in names:
        if name not in values:
            raise CheckpointError(f"{path} can't be read: it has no {name}.")
        if not isinstance(values[name], _KINDS[name]) or isinstance(values[name], bool):
            raise CheckpointError(f"{path} can't be read: its {name} is a {type(values[name]).__name__}.")


def _refuse_no_stop(values: Mapping[str, Any], path: object) -> None:
    """Refuse another kind of ``stop``, ``frozen`` or ``lr_scale``; a file that is older than they are has none."""
    frozen = values.get("frozen", frozenset())
    if not isinstance(frozen, frozenset) or not all(isinstance(name, str) for name in frozen):
        raise CheckpointError(f"{path} can't be read: its frozen is a {type(frozen).__name__}, and no set of names.")
    if type(values.get("stop", False)) is not bool:
        raise CheckpointError(f"{path} can't be read: its stop is a {type(values['stop']).__name__}.")
    scale = values.get("lr_scale")
    if scale is not None and not (isinstance(scale, Tensor) and scale.shape == () and scale.is_floating_point()):
        kind = kind_of(scale) if isinstance(scale, Tensor) else f"a {type(scale).__name__}"
        raise CheckpointError(f"{path} can't be read: its lr_scale is {kind}, and a State has () float64 there.")


def refuse_no_time(name: str, timestamp: Timestamp, path: object) -> None:
    """
    Raises:
        CheckpointError: a field of the timestamp is no number that it can have.
    """
    for field in attrs.fields(Timestamp):
        value = getattr(timestamp, field.name)
        if field.name == "max_duration":
            right = value is None or (isinstance(value, Time) and _is_time(value))
        elif field.name.endswith("_seconds"):
            right = type(value) in (int, float) and abs(value) <= _LARGEST
        else:
            right = type(value) is int and 0 <= value <= LARGEST_COUNT
            right = right or (value is None and field.name == "batches_per_epoch")
        if not right:
            # Not its text: that of a Time is made for those that are one.
            shown = attrs.astuple(value, recurse=False) if isinstance(value, Time) else value
            raise CheckpointError(f"{path} can't be read: its {name}.{field.name} is {shortened(shown)}.")


_LARGEST = sys.float_info.max
LARGEST_COUNT = (1 << 63) - 1


def _is_time(argument: Time) -> bool:
    if type(argument.value) not in (int, float) or not abs(argument.value) <= _LARGEST:
        return False
    try:
        return Time(argument.value, argument.unit) == argument
    except (ArgumentError, ArgumentTypeError):
        return False


_KINDS: dict[str, Any] = {
    "params": FrozenDict,
    "buffers": FrozenDict,
    "algorithm_state": FrozenDict,
    "metrics": FrozenDict,
    "timestamp": Timestamp,
    "previous_timestamp": Timestamp,
    "seed": int,
    "loss_scale": LossScale | None,
    "event": Event | None,
    "position": Event | None,
    "skipped": Tensor | None,
    "nonfinite": Tensor | None,
}
OF_PROGRESS = ("seed", "timestamp", "previous_timestamp", "event", "position")


def kind_of(tensor: Tensor) -> str:
    """Shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def refuse_another_model(
    params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], model: ModelDef, saved: str, path: object
) -> None:
    """Refuse tensors that are another model's.

    Raises:
        ResumeError: names the leaf, what the model has and what the file has.
    """
    value = type(model.skeleton)
    whose = f"{path} was saved with a {saved.rpartition('.')[2]}, and doesn't fit the {value.__name__} given"
    advice = "Build the model as it was built then; for its weights alone, pl.load(path, model=..., weights_only=True)."
    for kind, names, wanted, result in (
        ("params", model.parameter_names, dict(model.skeleton.named_parameters()), params),
        ("buffers", model.buffer_names, model.fixed_buffers(), buffers),
    ):
        missing = [name for name in names if name not in result]
        unknown = [name for name in result if name not in names]
        if missing or unknown:
            says = (("the file lacks", missing), ("the model lacks", unknown))
            raise ResumeError(
                f"{whose}: of {kind}, "
                + "; ".join(f"{what} {first_names(names)}" for what, names in says if names)
                + f". {advice}"
            )
        for name, tensor in wanted.items():
            if tensor.shape != result[name].shape or tensor.dtype != result[name].dtype:
                raise ResumeError(
                    f"{whose}: {kind}[{name!r}] is {kind_of(result[name])} in the file and {kind_of(tensor)} in the "
                    f"model. {advice}"
                )


def refuse_no_notes(notes: object) -> None:
    if notes is None:
        return
    try:
        same = isinstance(notes, Mapping) and json.loads(json.dumps(dict(notes), allow_nan=False)) == notes
    except (TypeError, ValueError):
        same = False
    if not same:
        raise ArgumentTypeError(
            f"notes={str(notes)[:80]}: a dict of what JSON has: texts as keys; None, bools, finite numbers, texts, "
            "lists and such dicts as values."
        )


_OF_RECORDS = ("__attrs_attrs__", "__dataclass_fields__", "_fields")


def refuse_unregistered(value: Any, path: tuple[str, ...]) -> NoReturn:
    kind = type(value)
    known = "a tensor, a number, a text, None, or a dict, list or tuple of such"
    if isinstance(value, enum.Enum) or any(hasattr(kind, item) for item in _OF_RECORDS):
        advice = f"register the class where it is defined, pl.checkpoint.register({kind.__name__})"
    else:
        advice = f"keep {known} in its place"
    raise ArgumentTypeError(
        f"state.{'.'.join(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold: {advice}."
    )
