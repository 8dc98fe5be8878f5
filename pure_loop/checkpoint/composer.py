"""What checkpoints of Composer have, and plain files of ``torch.save``, as a State."""

from __future__ import annotations

import datetime
import pickle
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, overload

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from pure_loop._internal.arguments import check_flag, is_path
from pure_loop._internal.devices import read_device
from pure_loop._internal.logs import get_logger
from pure_loop._internal.names import COUNTS
from pure_loop._internal.suggestions import teaching
from pure_loop._text import one_line
from pure_loop.checkpoint.checkpoint import Checkpoint
from pure_loop.checkpoint.paths import PathLike
from pure_loop.checkpoint.selection import Rename, Selection
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.validation import first_names, shortened
from pure_loop.errors import ArgumentError, ArgumentTypeError, CheckpointError, PureLoopError, ResumeError
from pure_loop.optim.optimizer import Optimizer
from pure_loop.optim.state_dicts import load_state_dict
from pure_loop.state import State
from pure_loop.time import Timestamp

_log = get_logger("pure_loop.checkpoint")


class _Remains:
    """Stands for an object of Composer's, which needn't be installed."""

    def __new__(cls, *args: object) -> _Remains:
        return object.__new__(cls)

    def __init__(self, *args: object) -> None:
        """Nothing is kept of it."""


# What a file may have besides tensors and plain values; none of it runs code. States of generators are arrays.
_HARMLESS: list[Any] = [
    *(np.ndarray, np.dtype, datetime.timedelta, datetime.datetime, datetime.date),
    *(defaultdict, deque, dict, list, int, float),
    *(value for name, value in vars(np.dtypes).items() if name.endswith("DType")),
    *((np.zeros(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_Remains, f"composer.core.time.{name}") for name in ("Time", "TimeUnit", "Timestamp")),
]

# Where a file has the weights, and where the optimizers' state; the first that is there counts.
_MODELS = ("state/model", "model", "model_state_dict", "state_dict", "module", "")
_OPTIMIZERS = ("state/optimizers", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states")
_TIMESTAMP = "state/timestamp"

_COUNTS = [name for name in COUNTS if not name.endswith("seconds")]


@attrs.frozen
class ComposerCheckpoint:
    """What a checkpoint of Composer, or a file of ``torch.save``, has for a State.

    Attributes:
        path: of the file.
        weights: parameters and buffers, on the CPU, by the names of the file.
        optimizers: state dicts of ``torch.optim``, by the names of their classes where the file has these.
        timestamp: how much training was finished.
        rest: the places in the file, ``"state/schedulers"``, of what has no counterpart in a State.
    """

    path: str
    weights: dict[str, Tensor] = attrs.field(repr=lambda value: f"<{len(value)}: {first_names([*value])}>")
    optimizers: dict[str, dict[str, Any]] = attrs.field(repr=lambda value: str([*value]))
    timestamp: Timestamp
    rest: tuple[str, ...]


@overload
def from_composer(path: PathLike | Mapping[str, Any] | nn.Module) -> ComposerCheckpoint: ...


@overload
def from_composer(
    path: PathLike | Mapping[str, Any] | nn.Module,
    model: nn.Module,
    *,
    optimizer: Optimizer | None = ...,
    weights_only: bool = ...,
    strict: bool = ...,
    exclude: str | Iterable[str] = ...,
    rename: Rename | None = ...,
    device: torch.device | str | None = ...,
) -> State: ...


@teaching
def from_composer(
    path: PathLike | Mapping[str, Any] | nn.Module,
    model: nn.Module | None = None,
    *,
    optimizer: Optimizer | None = None,
    weights_only: bool = False,
    strict: bool = True,
    exclude: str | Iterable[str] = (),
    rename: Rename | None = None,
    device: torch.device | str | None = None,
) -> State | ComposerCheckpoint:
    """A State from a checkpoint of Composer, or from a file that ``torch.save`` wrote: what ``fit`` begins with.

    The file is read by ``torch.load(weights_only=True)``, which runs none of its code, with NumPy's arrays, dates and
    Composer's times allowed besides tensors and plain values. What the State doesn't take from it is logged as one
    warning (``pure_loop.checkpoint``): schedulers, algorithms, callbacks and states of random generators have no
    counterpart, because schedules are functions of the timestamp and seeds are derived.

    Args:
        path: of the file, or a URL; or what ``torch.load`` has returned, ``saved``. Weights are looked for under
            ``["state"]["model"]``, ``["model"]``, ``["model_state_dict"]``, ``["state_dict"]``, and in the file itself.
        model: the module of the State; None: say what the file has, as a record.
        optimizer: what ``fit`` is going to be given, for its moments: ``adamw``, ``adam``, ``sgd``, ``from_torch``, a
            ``partition`` with a part for each parameter group. For ``DecoupledAdamW`` and ``DecoupledSGDW`` write
            ``independent_decay=True``. None: it begins anew.
        weights_only: take the weights alone, into a State that has not been trained.
        strict, exclude, device: as of :func:`pure_loop.load`.
        rename: as of :func:`pure_loop.load`. Names of a ``HuggingFaceModel`` begin with ``model.``, those of a
            ``ComposerClassifier`` with ``module.``: ``rename={"module.": ""}``.

    Returns:
        With ``model`` a State with weights, optimizer state, and a timestamp of the same counts of epochs, batches,
        samples, tokens and iterations, and the same seconds; its seed is 0. In the middle of an epoch, the batches of
        its first part are left out in the order of this run, which is another one.

    Raises:
        CheckpointError: (a ValueError) it can't be read, has no weights, or has an object that isn't allowed: says what
            to write for a file that is trusted.
        CheckpointNotFoundError: (a FileNotFoundError) there is no such file.
        ResumeError: weights or moments are of another model or optimizer; names them.
        ArgumentError, ArgumentTypeError: an argument is wrong; the optimizer has other options.

    >>> import tempfile, torch, pure_loop as pl
    >>> trained = {"state": {"model": {"module.weight": torch.ones(1, 2), "module.bias": torch.zeros(1)},
    ...     "timestamp": {"Timestamp": {"epoch": 1, "batch": 10, "sample": 40}}}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(trained, f"{folder}/ep1-ba10-rank0.pt")
    ...     state = pl.from_composer(f"{folder}/ep1-ba10-rank0.pt", torch.nn.Linear(2, 1), rename={"module.": ""})
    >>> state.params["weight"], state.timestamp.batch
    (tensor([[1., 1.]]), 10)
    """
    if isinstance(path, nn.Module) and is_path(model):
        raise ArgumentTypeError(f"from_composer: the path comes first: pl.from_composer({str(model)!r}, model).")
    source = _read(path)
    if model is None:
        return source
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"from_composer: optimizer= is a {type(optimizer).__name__}: write that of fit, pl.optim.adamw(lr=3e-4)."
        )
    if weights_only and optimizer is not None:
        raise ArgumentError("optimizer= takes the moments, which weights_only=True leaves out: write one of them.")
    selection = Selection(exclude, rename)
    strict, weights_only = check_flag("strict", strict), check_flag("weights_only", weights_only)
    fresh = State.create(model, device=read_device(device))
    names = selection.renamed(source.weights, source.path)
    call = f"pl.from_composer({repr(source.path) if is_path(path) else 'saved'}, model"
    call += "" if optimizer is None else ", optimizer=optimizer"
    checkpoint = Checkpoint(source.path, None, source.weights)
    state = checkpoint.weights_into(fresh, strict=strict, selection=selection, call=call)
    state = state.replace(notes=tuple(attrs.evolve(note, batch=source.timestamp.batch) for note in state.notes))
    rest = list(source.rest)
    if not weights_only:
        state = state.replace(timestamp=source.timestamp, previous_timestamp=source.timestamp)
    if optimizer is not None:
        state = _with_moments(state, source, optimizer, selection, names)
    elif source.optimizers:
        rest.append(f"the state of {', '.join(source.optimizers)}" + ("" if weights_only else " (for it, optimizer=)"))
    if rest:
        _log.warning("%s: not taken over: %s", source.path, ", ".join(rest))
    return state


def _read(path: PathLike | Mapping[str, Any] | nn.Module) -> ComposerCheckpoint:
    if isinstance(path, nn.Module):  # as torch.load returns one that was saved as a whole
        path = path.state_dict()
    where, content = ("the dict given", path) if isinstance(path, Mapping) else _loaded(path)
    model, optimizers = _at(content, _MODELS, _has_tensors), _at(content, _OPTIMIZERS, lambda value: bool(value))
    if model is None:
        raise CheckpointError(
            f"{where} has no weights that are known: it has {first_names([*map(str, content)])}. Pass the "
            "part that holds tensors by name, pl.from_composer(torch.load(path)[...], model)."
        )
    taken = {place for place, _ in filter(None, (model, optimizers))} | {_TIMESTAMP}
    weights = {str(name): value for name, value in model[1].items() if isinstance(value, Tensor)}
    places = [name for name in content if name != "state"] if model[0] else []
    if isinstance(content.get("state"), Mapping):
        places += [f"state/{name}" for name in content["state"]]
    places += [f"{model[0]}/{name}".lstrip("/") for name in model[1] if str(name) not in weights]
    return ComposerCheckpoint(
        path=where,
        weights=weights,
        optimizers={} if optimizers is None else _by_class(optimizers[1]),
        timestamp=_timestamp(content, where),
        rest=tuple(dict.fromkeys(str(place) for place in places if place not in taken)),
    )


def _loaded(path: object) -> tuple[str, Mapping[str, Any]]:
    """The path as text, and what ``torch.load`` returns for it.

    Raises:
        CheckpointError: it can't be read, or needs objects that aren't allowed.
    """
    if not is_path(path):
        raise ArgumentTypeError(f"from_composer({path!r:.60}): write a path, or the dict that torch.load returns.")
    where = storage_of(path)
    if where.is_folder():
        raise CheckpointError(
            f"{where.path} is a folder: a sharded checkpoint becomes one file, of which the path is passed, by "
            f"torch.distributed.checkpoint.format_utils.dcp_to_torch_save({where.path!r}, 'whole.pt')."
        )
    try:
        with where.open() as file, torch.serialization.safe_globals(_HARMLESS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except PureLoopError:
        raise
    except Exception as error:  # of any kind, where a file is damaged
        named = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named is None:
            reason = one_line(str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0])
            raise CheckpointError(
                f"{where.path} can't be read: it is damaged, or no file of torch.save: {shortened(reason)}."
            ) from error
        if named[1].startswith("pure_loop."):
            raise CheckpointError(
                f"{where.path} isn't opened: it has a pickled State, which fit takes as it is. Of a trusted origin "
                f"alone: torch.load({where.path!r}, weights_only=False). Keep it by pl.save(state, path)."
            ) from error
        raise CheckpointError(
            f"{where.path} isn't opened: it needs {one_line(named[1])[:200]}, which could run any code. For a file of "
            f"a trusted origin alone: pl.from_composer(torch.load({where.path!r}, map_location='cpu', "
            "weights_only=False), model)"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where.path} has a {type(content).__name__}, and no dict with weights by name.")
    return where.path, content


def _at(content: Mapping[str, Any], places: Iterable[str], fits: Any) -> tuple[str, Any] | None:
    """The first of these places in nested dicts whose value fits, and that value."""
    for place in places:
        value: Any = content
        for key in filter(None, place.split("/")):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None and fits(value):
            return place, value
    return None


def _has_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(item, Tensor) for item in value.values())


def _is_state_dict(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list | tuple) and all(isinstance(group, Mapping) for group in groups)


def _by_class(saved: Any) -> dict[str, dict[str, Any]]:
    """State dicts of optimizers by the names of their classes, as far as a file says these."""
    if _is_state_dict(saved):
        return {"an optimizer": dict(saved)}
    items = saved.items() if isinstance(saved, Mapping) else enumerate(saved) if isinstance(saved, list | tuple) else ()
    return {str(name): dict(value) for name, value in items if _is_state_dict(value)}


def _timestamp(content: Mapping[str, Any], path: str) -> Timestamp:
    """
    Raises:
        CheckpointError: it has counts that are none.
    """
    found = _at(content, (_TIMESTAMP + "/Timestamp", _TIMESTAMP), lambda value: isinstance(value, Mapping))
    saved = {} if found is None else found[1]
    fields = {name: saved[name] for name in _COUNTS if name in saved}
    for unit in ("total", "epoch", "batch"):
        if isinstance(time := saved.get(f"{unit}_wct"), datetime.timedelta):
            fields[f"{unit}_seconds"] = time.total_seconds()
    try:
        return Timestamp(**fields)
    except PureLoopError as error:
        raise CheckpointError(f"{path} can't be read: its timestamp is none: {error}") from error


def _with_moments(
    state: State, source: ComposerCheckpoint, optimizer: Optimizer, selection: Selection, names: dict[str, str]
) -> State:
    """
    Raises:
        ResumeError, ArgumentError, ArgumentTypeError: the file has none, or another optimizer's; names what differs.
    """
    if len(source.optimizers) != 1:
        raise ResumeError(
            f"{source.path} has the state of {', '.join(source.optimizers) or 'no optimizer'}, and optimizer= "
            "takes that of one: leave it out, and the optimizer begins anew."
        )
    ((name, saved),) = source.optimizers.items()
    memory, groups = dict(saved["state"]), []
    for group in saved["param_groups"]:
        group = dict(group)
        if name.startswith("Decoupled"):
            group["independent_decay"] = True
        listed = list(group.get("params", ()))
        if any(isinstance(key, str) for key in listed):  # as FSDP names them
            group["param_names"] = [names.get(key, key) for key in listed]
        elif len(listed) == len(state.params):  # of one group, in the order of parameters()
            group["param_names"] = [*state.params]
        pairs = zip(listed, group.get("param_names", ()), strict=False)
        memory |= {key: {} for key, new in pairs if selection.excludes(new)}
        groups.append(group)
    try:
        return load_state_dict(state, optimizer, {"state": memory, "param_groups": groups})
    except PureLoopError as error:
        error.add_note(f"That is of {name} in {source.path}; without optimizer= its weights alone are taken.")
        raise
