"""A State as a document and tensors, and back: what the format's version, checks and older files are about.

The document is JSON in the metadata of the file, under ``"pure_loop"``:

* ``format``: the version of what follows. A newer one than :data:`FORMAT` is refused; an older one is brought up to
  date by :data:`UPGRADES`. tests/golden has a file of each.
* ``made_by``: the versions of pure_loop and torch that wrote it; ``saved_at``: nanoseconds since 1970.
* ``state``: the registered name of the State's class; ``model``: that of the module, for messages.
* ``fields``: the State's durable fields, as :mod:`pure_loop.checkpoint.tree` writes values.
* ``notes``: what the writer wants to remember of it.
"""

from __future__ import annotations

import json
import reprlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from pure_loop.checkpoint.registry import named, registered
from pure_loop.checkpoint.tree import Reader, Writer
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, ResumeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model import ModelDef
from pure_loop.precision import LossScale
from pure_loop.state import State
from pure_loop.time import Time, Timestamp

__all__ = [
    "FORMAT",
    "UPGRADES",
    "Document",
    "durable_fields",
    "refuse_another_model",
    "read_document",
    "write_document",
]

FORMAT = 1
"""The version of the format that is written."""

UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""For each older version, what makes of its document one of the next."""

METADATA_KEY = "pure_loop"

# What belongs to the batch under way, or is of the model and comes with it.
_NOT_SAVED = frozenset({"model", "evaluator", "batch", "microbatch", "outputs", "loss", "_grads", "grad_norm"})


def durable_fields(cls: type[State]) -> tuple[str, ...]:
    """The fields of a State that a checkpoint holds."""
    return tuple(field.name for field in attrs.fields(cls) if field.name not in _NOT_SAVED)


@attrs.frozen
class Document:
    """What a checkpoint says besides its tensors.

    Attributes:
        made_by: versions by package.
        saved_at: nanoseconds since 1970.
        state_class: the registered name of the State's class.
        model: the class of the module, for messages.
        fields: the fields as JSON.
        notes: what the writer noted.
    """

    made_by: dict[str, str]
    saved_at: int
    state_class: str
    model: str
    fields: dict[str, Any]
    notes: dict[str, Any]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.fields["seed"])

    @property
    def event(self) -> Event | None:
        """Where the State was kept."""
        saved = self.fields["event"]
        return None if saved is None else Event[saved["enum"][1]]

    @property
    def batch(self) -> int:
        """How many batches were finished."""
        return int(self.fields["timestamp"]["fields"]["batch"])

    def state(self, model: ModelDef, tensors: Mapping[str, Tensor], device: torch.device, path: object) -> State:
        """The State.

        Raises:
            CheckpointError: it holds what this program doesn't know.
            ResumeError: it is another model's; names the leaf.
        """
        kind = named(self.state_class)
        if kind is None or not issubclass(kind.cls, State):
            raise CheckpointError(
                f"{path} holds a State of the class {self.state_class}, which this program doesn't know: import the "
                "module that defines it before you load."
            )
        reader = Reader(tensors, device, path)
        values = {name: reader.read(value) for name, value in self.fields.items()}
        _refuse_nonsense(values, path)
        known = {field.name: field for field in attrs.fields(kind.cls)}
        unknown = [name for name in values if name not in known or name in _NOT_SAVED]
        lacking = [
            name for name in durable_fields(kind.cls) if name not in values and known[name].default is attrs.NOTHING
        ]
        if unknown or lacking:
            raise CheckpointError(
                f"{path} can't be read: its {kind.cls.__name__} has the fields {sorted(values)}"
                + "".join(f"; {what} {some}" for what, some in (("unknown", unknown), ("missing", lacking)) if some)
                + ". Was the class changed since? Give new fields a default."
            )
        refuse_another_model(values["params"], values["buffers"], model, self.model, path)
        public = {known[name].alias or name: value for name, value in values.items()}
        return kind.cls(model=model, **public)


def write_document(
    state: State, notes: Mapping[str, Any] | None = None, *, parts: bool = False, after: int = 0
) -> tuple[str, dict[str, Tensor]]:
    """The document of a State as text, and its tensors by name.

    Args:
        notes: JSON to remember with it.
        parts: whether some of the tensors may be in parts.
        after: the time of another one that this one is newer than, whatever the clock says.

    Raises:
        ArgumentTypeError: it holds a value that a checkpoint can't hold; names its place.
    """
    _refuse_no_notes(notes)
    from pure_loop import __version__

    cls = type(state)
    kind = registered(cls)
    assert kind is not None
    writer = Writer(state.device, parts=parts)
    fields = {name: writer.write(getattr(state, name), (name,)) for name in durable_fields(cls)}
    module = type(state.model._skeleton)
    document = {
        "format": FORMAT,
        "made_by": {"pure_loop": __version__, "torch": str(torch.__version__)},
        "saved_at": max(time.time_ns(), after + 1),
        "state": kind.name,
        "model": f"{module.__module__}.{module.__qualname__}",
        "fields": fields,
        "notes": dict(notes or {}),
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")), writer.tensors


def _refuse_no_notes(notes: Any) -> None:
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


def read_document(metadata: Mapping[str, str], path: object) -> Document | None:
    """The document in the metadata of a file; None where there is none: plain weights.

    Raises:
        CheckpointError: it can't be read, or a newer version of pure_loop wrote it.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return None
    try:
        document = json.loads(text)
        version = document["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"its format is {reprlib.repr(version)}")
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, and this version of pure_loop reads up to {FORMAT}: it was written by "
                f"pure_loop {str(document.get('made_by'))[:80]}; install that one or a newer one."
            )
        for older in range(version, FORMAT):
            document = UPGRADES[older](document)
        found = Document(
            made_by=document["made_by"],
            saved_at=document["saved_at"],
            state_class=document["state"],
            model=document["model"],
            fields=document["fields"],
            notes=document["notes"],
        )
        texts = (found.state_class, found.model)
        mappings = (found.made_by, found.fields, found.notes)
        if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, dict) for each in mappings):
            raise ValueError("a part of it is of another kind than it should be")
        _ = found.event  # which has to be one
        if type(found.saved_at) is not int or type(found.fields["seed"]) is not int or type(found.batch) is not int:
            raise ValueError("its counts are no whole numbers")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} can't be read: its description is no checkpoint's: {repr(error)[:300]}."
        ) from error
    return found


def _refuse_nonsense(values: Mapping[str, Any], path: object) -> None:
    """Refuse values that no State has, before something far away stumbles over them."""
    for name, wanted in _KINDS.items():
        if name not in values:
            raise CheckpointError(f"{path} can't be read: it has no {name}.")
        if not isinstance(values[name], wanted) or isinstance(values[name], bool):
            raise CheckpointError(f"{path} can't be read: its {name} is a {type(values[name]).__name__}.")
    for name in ("params", "buffers"):
        for key, tensor in values[name].items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise CheckpointError(f"{path} can't be read: {name}[{key!r}] is a {type(tensor).__name__}.")
    for name in ("timestamp", "previous_timestamp"):
        _refuse_no_time(name, values[name], path)
    scale = values["loss_scale"]
    if scale is not None and not all(isinstance(each, Tensor) for each in (scale.scale, scale.growth_tracker)):
        raise CheckpointError(f"{path} can't be read: its loss_scale holds no tensors.")


def _refuse_no_time(name: str, timestamp: Timestamp, path: object) -> None:
    for field in attrs.fields(Timestamp):
        value = getattr(timestamp, field.name)
        if field.name == "max_duration":
            right = value is None or (isinstance(value, Time) and _is_time(value))
        elif field.name.endswith("_seconds"):
            right = type(value) in (int, float) and abs(value) <= _LARGEST
        else:
            right = type(value) is int and 0 <= value <= _LARGEST_COUNT
            right = right or (value is None and field.name == "batches_per_epoch")
        if not right:
            # Not its text: that of a Time is made for those that are one.
            shown = attrs.astuple(value, recurse=False) if isinstance(value, Time) else value
            raise CheckpointError(f"{path} can't be read: its {name}.{field.name} is {reprlib.repr(shown)}.")


_LARGEST = sys.float_info.max
_LARGEST_COUNT = (1 << 63) - 1


def _is_time(given: Time) -> bool:
    if type(given.value) not in (int, float) or not abs(given.value) <= _LARGEST:
        return False
    try:
        return Time(given.value, given.unit) == given
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


def refuse_another_model(
    params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], model: ModelDef, saved: str, path: object
) -> None:
    """Refuse tensors that are another model's.

    Raises:
        ResumeError: names the leaf, what the model has and what the file has.
    """
    given = type(model._skeleton)
    skeleton = model._skeleton
    whose = f"{path} was saved with a {saved.rpartition('.')[2]}, and doesn't fit the {given.__name__} given"
    advice = "Build the model as it was built then; for its weights alone, pl.load(path, model=..., weights_only=True)."
    for kind, wanted, found in (
        ("params", dict(skeleton.named_parameters()), params),
        ("buffers", dict(skeleton.named_buffers()), buffers),
    ):
        missing = [name for name in wanted if name not in found]
        unknown = [name for name in found if name not in wanted]
        if missing or unknown:
            says = (("the file lacks", missing), ("the model lacks", unknown))
            raise ResumeError(
                f"{whose}: of {kind}, "
                + "; ".join(f"{what} {names[:3]}{' ...' if len(names) > 3 else ''}" for what, names in says if names)
                + f". {advice}"
            )
        for name, tensor in wanted.items():
            if tensor.shape != found[name].shape or tensor.dtype != found[name].dtype:
                raise ResumeError(
                    f"{whose}: {kind}[{name!r}] is {_kind(found[name])} in the file and {_kind(tensor)} in the model. "
                    f"{advice}"
                )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
