"""A State as a document and tensors, and back: what the format's version, checks and older files are about.

The document is JSON in the metadata of the file, under ``"pure_loop"``:

* ``format``: the version of what follows. A newer one than :data:`FORMAT` is refused; an older one is brought up to
  date by :data:`UPGRADES`. tests/golden has a file of each.
* ``made_by``: the versions of pure_loop and torch that wrote it; ``saved_at``: nanoseconds since 1970, or before.
* ``state``: the registered name of the State's class; ``model``: that of the module, for messages.
* ``fields``: the State's durable fields, as :mod:`pure_loop.checkpoint.tree` writes values.
* ``buffers``: only where forwards have registered, removed or reshaped buffers: their names, each with what it is
  (``"tensor"``, ``"reshaped"``, ``"none"`` or ``"deleted"``) and whether it is persistent, ``["tensor", true]``.
* ``base``: only where frozen parameters are left out: dtype, shape and digest of each, ``["F32", [2, 3], "..."]``.
* ``hidden``: only where there are some: the names of buffers that ``state_dict()`` leaves out.
* ``notes``: JSON of the writer.

A file of weights alone, with the names of ``state_dict()`` for its tensors, has such a document under
``"pure_loop.weights"``, with those fields alone that say where the run was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping

import attrs
import torch
from torch import Tensor

from pure_loop._internal.pytree import PyTree
from pure_loop._internal.registry import named, registered
from pure_loop._internal.reprs import Shaped
from pure_loop.checkpoint.digests import Base, read_base, take_out_base
from pure_loop.checkpoint.migration import all_names, fitting, migrated, not_in_state_dict, refuse_another_model
from pure_loop.checkpoint.selection import ALL, Selection, refuse_left_out
from pure_loop.checkpoint.tree import Reader, UnknownClassError, Writer
from pure_loop.checkpoint.validation import (
    LARGEST_COUNT,
    PROGRESS_FIELDS,
    Json,
    first_names,
    parse,
    refuse_invalid,
    refuse_no_notes,
    refuse_no_time,
    refuse_other_kinds,
    shortened,
)
from pure_loop.errors import CheckpointError, ResumeError
from pure_loop.event import Event
from pure_loop.frozendict import FrozenDict
from pure_loop.model.buffers import UNALTERED, Altered, read_altered, refuse_misplaced
from pure_loop.model.model import ModelDef
from pure_loop.model.names import places, reordered
from pure_loop.state import State, order_of
from pure_loop.time import Timestamp

FORMAT = 1
"""The version of the format that is written."""

UPGRADES: dict[int, Callable[[dict[str, Json]], dict[str, Json]]] = {}
"""For each older version, what makes of its document one of the next."""

METADATA_KEY = "pure_loop"

WEIGHTS_KEY = "pure_loop.weights"

# What belongs to the batch under way, or is of the model and comes with it.
_NOT_SAVED = frozenset({"model", "evaluator", "batch", "microbatch", "outputs", "loss", "_grads", "grad_norm"})


# What has mappings by the names of parameters and buffers, which the model may have in another order by now.
_KNOWN_BY_NAME = ("params", "buffers", "opt_state", "algorithm_state")


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
        seed: of the run.
        timestamp: how far the run was.
        event: where the State was kept.
        position: the last boundary before it.
        altered: what forwards have made of the model's buffers.
        base: the frozen parameters that the file leaves out.
        is_whole: whether ``fields`` are all that the file has.
        hidden: the names of buffers that ``state_dict()`` leaves out.
    """

    made_by: dict[str, str]
    saved_at: int
    state_class: str
    model: str
    fields: dict[str, Json]
    notes: dict[str, Json]
    seed: int
    timestamp: Timestamp
    event: Event | None
    position: Event | None
    altered: Altered = UNALTERED
    base: Base = attrs.field(factory=dict)
    is_whole: bool = True
    hidden: frozenset[str] = frozenset()

    @property
    def batch(self) -> int:
        """How many batches were finished."""
        return self.timestamp.batch

    @property
    def progress(self) -> tuple[int, ...]:
        """How far the run was: of two States of a run the later one has the larger, whatever a clock said.

        The counts of finished batches, epochs and iterations, and where these are equal the boundary.
        """
        t = self.timestamp
        place = _ORDER.index(self.position) if self.position in _ORDER else -1
        evaluated = self.event is Event.EVAL_STANDALONE_END
        return t.batch, t.epoch, t.iteration, place, evaluated, t.sample, t.token

    def state(
        self,
        model: ModelDef,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        path: object,
        *,
        start: State | None = None,
        selection: Selection = ALL,
    ) -> State:
        """The State.

        Args:
            tensors: those of the file by name; they go to ``device``.
            start: the State of this model into which it is read; None: there are no numbers that it could keep.
            selection: which parameters and buffers are renamed, and which stay those of ``start``.

        Raises:
            CheckpointError: it holds what this program doesn't know.
            ResumeError: it is another model's; names the leaves.
            ArgumentError: the selection matches nothing.
        """
        refuse_left_out(self.notes, path)
        cls, values = self._values(Reader(tensors, device, path), path)
        saved = {**values["params"], **values["buffers"]}
        names = selection.renamed(dict.fromkeys([*saved, *self.altered]), path)
        slots = {names[name]: slot for name, slot in self.altered.items() if not selection.excludes(names[name])}
        model = attrs.evolve(self, altered=FrozenDict(slots)).altered_model(model, path)
        like = (*model.skeleton.named_parameters(), *model.skeleton.named_buffers()) if start is None else ()
        own = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in like}
        own = fitting(values, own) if start is None else {**start.params, **start.buffers}
        own = own if start is None or start.members else fitting(values, own)
        selection.refuse_unmatched([*names.values(), *all_names(model)], path)
        values = migrated(values, names, selection, model, own, self.hidden, str(path).rpartition("/")[2])
        refuse_another_model(values, saved, model, self.model, path, () if start is None else start.notes)
        wanted, saved = order_of(model), places(values["params"], values["buffers"])
        values |= {name: reordered(values[name], wanted, saved) for name in _KNOWN_BY_NAME if name in values}
        seen: set[int] = set()
        for name in ("params", "buffers"):
            values[name] = FrozenDict((key, apart(tensor, seen)) for key, tensor in values[name].items())
        attributes = {field.name: field for field in attrs.fields(cls)}
        public = {attributes[name].alias or name: value for name, value in values.items()}
        return cls(model=model, **public)

    def altered_model(self, model: ModelDef, path: object) -> ModelDef:
        """The structure of this model with the buffers that forwards had made before the State was saved.

        Raises:
            ResumeError: the model has no place for one.
        """
        try:
            refuse_misplaced(self.altered, model.skeleton)
        except LookupError as error:
            raise ResumeError(
                f"{path} was saved with a {self.model.rpartition('.')[2]} that had registered buffers in its forward, "
                f"and doesn't fit the {type(model.skeleton).__name__} given: {error.args[0]}. Build the model as it "
                "was built then."
            ) from error
        return model.with_altered(self.altered)

    def refuse_contradiction(self, tensors: Mapping[str, Shaped], path: object, *, complete: bool = False) -> None:
        """Refuse a description from which no State can be made, whatever the model.

        Args:
            tensors: those of the file by name.
            path: for errors.
            complete: whether it has to name all of them.

        Raises:
            UnknownClassError: it names a class that this program hasn't registered.
            CheckpointError: it contradicts itself or the tensors.
        """
        meta = torch.device("meta")
        shapes: dict[str, Shaped] = {**self.base, **tensors}
        empty = {name: torch.empty(like.shape, dtype=like.dtype, device=meta) for name, like in shapes.items()}
        reader = Reader(empty, meta, path)
        self._values(reader, path)
        unnamed = [name for name in shapes if name not in reader.tensors_read]
        if complete and unnamed and self.is_whole:
            raise CheckpointError(f"{path} can't be read: no field refers to its tensors {first_names(unnamed)}.")

    def _values(self, reader: Reader, path: object) -> tuple[type[State], dict[str, PyTree]]:
        """The State's class, and the values of its fields."""
        kind = named(self.state_class)
        if kind is None:
            raise UnknownClassError(
                f"{path} holds a State of the class {shortened(self.state_class)}, which this program doesn't know: "
                "import the module that defines it before you load."
            )
        if not issubclass(kind.cls, State):
            raise CheckpointError(f"{path} can't be read: it says that {kind.name} is the class of a State.")
        values = {name: reader.read(value) for name, value in self.fields.items()}
        refuse_invalid(values, path)
        slots = {field.name: field for field in attrs.fields(kind.cls)}
        unknown = [name for name in values if name not in slots or name in _NOT_SAVED]
        lacking = [
            name for name in durable_fields(kind.cls) if name not in values and slots[name].default is attrs.NOTHING
        ]
        if unknown or lacking:
            raise CheckpointError(
                f"{path} can't be read: its {kind.cls.__name__} has {len(values)} fields"
                + "".join(
                    f"; {what} {first_names(some)}"
                    for what, some in (("unknown", unknown), ("missing", lacking))
                    if some
                )
                + ". Was the class changed since? Give new fields a default."
            )
        return kind.cls, values


# The boundaries in the order in which a run passes those at which it has finished equally much.
_ORDER = (
    Event.AFTER_LOAD,
    Event.BATCH_END,
    Event.BATCH_CHECKPOINT,
    Event.EPOCH_END,
    Event.EPOCH_CHECKPOINT,
    Event.ITERATION_END,
    Event.ITERATION_CHECKPOINT,
    Event.ITERATION_START,
    Event.EPOCH_START,
    Event.FIT_END,
)


def write_document(
    state: State, notes: Mapping[str, object] | None = None, *, parts: bool = False, trained_only: bool = False
) -> tuple[str, dict[str, Tensor]]:
    """The document of a State as text, and its tensors by name.

    Args:
        notes: JSON to store with it.
        parts: whether some of the tensors may be in parts.
        trained_only: whether frozen parameters are left out.

    Raises:
        ArgumentTypeError: it holds a value that a checkpoint can't hold; names its place.
    """
    writer = Writer(state.device, parts=parts)
    fields = {name: writer.write(getattr(state, name), (name,)) for name in durable_fields(type(state))}
    base: Base = {}
    if trained_only:
        keys = {name: writer.name_of(tensor) for name, tensor in state.params.items()}
        base = take_out_base(state, keys, writer.tensors)
    return _as_text(state, fields, notes, base, state.model.altered, not_in_state_dict(state.model)), writer.tensors


def describe_weights(state: State, notes: Mapping[str, object] | None = None, base: Base | None = None) -> str:
    """The document of a file of weights alone."""
    writer = Writer(state.device)
    fields = {name: writer.write(getattr(state, name), (name,)) for name in PROGRESS_FIELDS}
    # Buffers that state_dict() leaves out are not in the file, so a forward makes them anew.
    altered = FrozenDict((name, slot) for name, slot in state.model.altered.items() if slot.persistent)
    return _as_text(state, fields, notes, base or {}, altered)


def _as_text(
    state: State,
    fields: dict[str, Json],
    notes: Mapping[str, object] | None,
    base: Base,
    altered: Altered,
    hidden: Collection[str] = (),
) -> str:
    refuse_no_notes(notes)
    from pure_loop._internal.version import __version__

    kind, module = registered(type(state)), type(state.model.skeleton)
    assert kind is not None
    document = {
        "format": FORMAT,
        "made_by": {"pure_loop": __version__, "torch": str(torch.__version__)},
        "saved_at": _now(),
        "state": kind.name,
        "model": f"{module.__module__}.{module.__qualname__}",
        "fields": fields,
        "notes": dict(notes or {}),
    }
    if hidden:
        document["hidden"] = sorted(hidden)
    if altered:
        document["buffers"] = {name: list(slot) for name, slot in altered.items()}
    if base:
        document["base"] = {key: tensor.described() for key, tensor in base.items()}
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


# Nanoseconds; clocks that are wrong by millennia are right, too: nothing goes by them.
_LARGEST_TIME = 1 << 80


def _now() -> int:
    try:
        return time.time_ns()
    except OverflowError:  # from 2262 on
        return LARGEST_COUNT


def read_document(metadata: Mapping[str, str], path: object, key: str = METADATA_KEY) -> Document | None:
    """The document in the metadata of a file; None where there is none: plain weights.

    Args:
        key: under which it lies, that of States or that of weights.

    Raises:
        CheckpointError: it can't be read, or a newer version of pure_loop wrote it.
    """
    if (text := metadata.get(key)) is None:
        return None
    try:
        document = parse(text)
        version = document["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"its format is {shortened(version)}")
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has format {shortened(version)}, and this version of pure_loop reads up to {FORMAT}: it was "
                f"written by pure_loop {shortened(document.get('made_by'))}; install that one or a newer one."
            )
        for older in range(version, FORMAT):
            document = UPGRADES[older](document)
        fields, saved_at = document["fields"], document["saved_at"]
        texts, mappings = ("state", "model"), ("made_by", "fields", "notes")
        wrong = [name for name in texts if not isinstance(document[name], str)]
        wrong += [name for name in mappings if not isinstance(document[name], dict)]
        altered, base = read_altered(document.get("buffers", {})), read_base(document.get("base", {}))
        hidden = document.get("hidden", [])
        wrong += [] if isinstance(hidden, list) and all(type(name) is str for name in hidden) else ["hidden"]
        wrong += [] if type(saved_at) is int and abs(saved_at) <= _LARGEST_TIME else ["saved_at"]
        if wrong:
            raise ValueError(f"its {wrong[0]} is {shortened(document[wrong[0]])}")
        reader = Reader({}, torch.device("cpu"), path)
        # All that is asked of a file before its tensors are read: where among others it stands.
        values = {name: reader.read(fields[name]) for name in PROGRESS_FIELDS}
        refuse_other_kinds(values, PROGRESS_FIELDS, path)
        for name in ("timestamp", "previous_timestamp"):
            refuse_no_time(name, values[name], path)
        if values["position"] not in (None, *_ORDER):
            raise ValueError(f"its position is {values['position'].name}, which is no boundary")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} can't be read: its description is no checkpoint's: {repr(error)[:300]}."
        ) from error
    return Document(
        made_by=document["made_by"],
        saved_at=saved_at,
        state_class=document["state"],
        model=document["model"],
        fields=fields,
        notes=document["notes"],
        seed=values["seed"],
        timestamp=values["timestamp"],
        event=values["event"],
        position=values["position"],
        altered=altered,
        base=base,
        hidden=frozenset(hidden),
    )


def apart(tensor: Tensor, seen: set[int]) -> Tensor:
    """The tensor, or a copy of it if it was seen: tied parameters have one name, and those of two names are two."""
    tensor = tensor.clone() if id(tensor) in seen else tensor
    seen.add(id(tensor))
    return tensor
