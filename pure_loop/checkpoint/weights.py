"""Weights alone: of a checkpoint, or of a plain file of tensors by the names of ``state_dict()``, without a digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import attrs
import torch
from torch import Tensor

from pure_loop._internal.logs import get_logger
from pure_loop._internal.reprs import Shaped
from pure_loop._internal.tree_ops import box_of, from_local, full_tensor, is_sharded, local_tensor, meet
from pure_loop.checkpoint import container
from pure_loop.checkpoint.container import CODES, raw
from pure_loop.checkpoint.coordination import Coordinator
from pure_loop.checkpoint.digests import Base, refuse_no_base, take_out_base
from pure_loop.checkpoint.document import WEIGHTS_KEY, Document, apart, describe_weights
from pure_loop.checkpoint.migration import Shapes, all_names, lacking, not_in_state_dict, of_algorithms, remedy
from pure_loop.checkpoint.storage import storage_of
from pure_loop.checkpoint.tree import Reader
from pure_loop.checkpoint.validation import Json, first_names
from pure_loop.errors import ArgumentTypeError, CheckpointError, ResumeError
from pure_loop.state import State

_log = get_logger("pure_loop.checkpoint")

_CPU = torch.device("cpu")


def saved_weights(document: Document | None, tensors: Mapping[str, Tensor], path: object) -> dict[str, Tensor]:
    """Parameters and buffers by name: of a checkpoint, or all tensors of a plain file.

    Frozen parameters that the file leaves out are left out here, unless they are among the tensors.
    """
    if document is None:
        return dict(tensors)
    reader = Reader(tensors, _CPU, path)
    absent = document.base.keys() - tensors.keys()
    result: dict[str, Tensor] = {}
    for field in ("params", "buffers"):
        read = reader.read(_without(document.fields.get(field), absent))
        if not isinstance(read, dict) or not all(isinstance(item, Tensor) for item in read.values()):
            raise CheckpointError(f"{path} can't be read: its {field} are no tensors.")
        result |= read
    return result


def _without(described: Json, absent: Set[str]) -> Json:
    """A mapping of tensors as JSON, without those that aren't there."""
    if not absent or not isinstance(described, dict) or not isinstance(described.get("frozen"), dict):
        return described
    return {
        "frozen": {
            name: value
            for name, value in described["frozen"].items()
            if not (isinstance(value, dict) and isinstance(value.get("tensor"), str) and value["tensor"] in absent)
        }
    }


def with_buffers_of(document: Document, state: State, saved: Mapping[str, Tensor], path: object) -> State:
    """The State with the buffers that forwards had registered, removed or reshaped when these weights were saved."""
    model = document.altered_model(state.model, path)
    if model is state.model:
        return state
    changed = {name for name, slot in model.altered.items() if slot.kind in ("tensor", "reshaped")}
    buffers = {}
    for name in model.buffer_names:
        tensor = saved[name].to(state.device) if name in changed and name in saved else state.buffers.get(name)
        if tensor is None:
            raise CheckpointError(f"{path} can't be read: it lists the buffer {name!r}, and has no tensor of it.")
        buffers[name] = tensor
    return state.replace(model=model, buffers=buffers)


def with_weights(
    state: State,
    weights: Mapping[str, Tensor],
    path: object,
    *,
    strict: bool,
    excludes: Callable[[str], bool] = lambda name: False,
    saved: Shapes | None = None,
    call: str | None = None,
) -> State:
    """The State with these weights in the place of its own, in its dtypes and on its device.

    Tied weights may stand under any of their names, and under several if all say the same; buffers that
    ``state_dict()`` leaves out may be missing. A weight of which ``excludes`` is true of a name keeps its value.
    ``saved`` are the weights by the names of the file, for the call in an error; None: these are. ``call`` is how that
    begins; None: ``pl.load(path, model=model, weights_only=True``.

    Raises:
        ResumeError: they don't fit the model; names all leaves that don't, and the call that loads the others.
    """
    model = state.model.skeleton
    names = all_names(state.model)
    excluded = {first for name, first in names.items() if excludes(name)}
    weights = {name: weights[name] for name in weights if names.get(name) not in excluded and not excludes(name)}
    optional = not_in_state_dict(state.model) | excluded
    value: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in weights.items():
        if name in names:
            first_name, same = value.setdefault(names[name], (name, tensor))
            _refuse_untied(type(model).__name__, first_name, same, name, tensor, path)
    wanted = {**state.params, **state.buffers}
    unknown = [name for name in weights if name not in names]
    missing = [name for name in wanted if name not in value and name not in optional]
    shapes = [
        f"{theirs!r} has shape {tuple(tensor.shape)} in the file and {tuple(wanted[name].shape)} in the model"
        for name, (theirs, tensor) in value.items()
        if tensor.shape != wanted[name].shape
    ]
    shapes += [
        f"{theirs!r} has dtype {tensor.dtype} in the file and {wanted[name].dtype} in the model: other numbers than "
        "these, not other digits of them"
        for name, (theirs, tensor) in value.items()
        if tensor.shape == wanted[name].shape and _kind(tensor) != _kind(wanted[name])
    ]
    if not (value or missing or unknown):
        raise ResumeError(
            f"{path} has nothing to load into {type(model).__name__}: exclude= excludes all of its weights. Leave out "
            "globs of it, or train the model as it is."
        )
    if not value or shapes or (strict and (missing or unknown)):
        of_names = [lacking(missing, unknown)] if (strict or not value) and (missing or unknown) else []
        remaining = remedy(saved or weights, {n: t for n, t in wanted.items() if n not in optional}, names, fits=_fits)
        call = f"pl.load({str(path)!r}, model=model, weights_only=True" if call is None else call
        advice = 'Write rename={"name.in.file.": "name.in.model."} and exclude=["head.*"], of what keeps its values.'
        if remaining is not None:
            advice = f"Load what fits, {call}, {remaining}), and give fit that State in the place of the model."
        raise ResumeError(
            f"{path} has other weights than {type(model).__name__}: {'; '.join([*of_names, *shapes])}. "
            f"{of_algorithms((), state.notes, missing + unknown) or advice}"
        )
    if missing or unknown:
        says = (("the model's own values stay for", missing), ("the model has no", unknown))
        _log.warning("%s: %s", path, "; ".join(f"{what} {first_names(names)}" for what, names in says if names))
    # Not copy_: a State's tensors are never written to.
    seen: set[int] = set()
    tensors = {name: _as(wanted[name], apart(tensor, seen)) for name, (_, tensor) in value.items()}
    return state.replace(
        params={name: tensors.get(name, old) for name, old in state.params.items()},
        buffers={name: tensors.get(name, old) for name, old in state.buffers.items()},
    )


def _refuse_untied(model: str, first: str, tensor: Tensor, second: str, twin: Tensor, path: object) -> None:
    """Refuse two names of one weight that say different things of it."""
    if tensor is twin:
        return
    if tensor.shape == twin.shape and tensor.dtype is twin.dtype:
        # By their bytes: a NaN is what it is, and zeros have signs.
        if torch.equal(raw(tensor.contiguous()), raw(twin.contiguous())):
            return
        how = "other numbers"
    else:
        how = f"{tuple(tensor.shape)} {tensor.dtype} and {tuple(twin.shape)} {twin.dtype}"
    raise ResumeError(
        f"{path}: {first!r} and {second!r} are one tied weight of {model}, and the file has {how} under them: it is of "
        "a model in which they aren't tied. Untie them in the model, or leave one of them out of the file."
    )


def _as(like: Tensor, tensor: Tensor) -> Tensor:
    if not is_sharded(like):
        return tensor.to(like)
    shard = box_of(tensor, like).to(local_tensor(like), copy=True, memory_format=torch.contiguous_format)
    sharded: Tensor = from_local(like, shard)
    return sharded


def _kind(like: Shaped) -> str:
    """Floating-point numbers of one width become those of another; nothing else does."""
    return "floating point" if like.dtype.is_floating_point else str(like.dtype)


def _fits(saved: Shaped, like: Shaped) -> bool:
    return tuple(saved.shape) == tuple(like.shape) and _kind(saved) == _kind(like)


@attrs.frozen(eq=False)
class Weights:
    """The weights of a State, as a file has them.

    Attributes:
        state: the State that has them.
        tensors: parameters and those buffers that ``state_dict()`` has, of tied ones the first name.
        base: frozen parameters that are left out.
    """

    state: State
    tensors: dict[str, Tensor]
    base: Base

    @classmethod
    def of(cls, state: State, *, trained_only: bool = False) -> Weights:
        """The weights of a State; if it is sharded, unsharded, and all ranks call this together.

        Raises:
            ArgumentError: with ``trained_only``, nothing can be left out.
            ArgumentTypeError: a weight has a dtype that the format lacks; names it.
        """
        if trained_only:
            refuse_no_base(state)
        refuse_unwritable(state)
        hidden = not_in_state_dict(state.model)
        meet(state.params, "the weights of a State")
        tensors = {
            name: full_tensor(value.detach()).resolve_conj().resolve_neg()
            for name, value in (*state.params.items(), *state.buffers.items())
            if name not in hidden
        }
        base: Base = {}
        if trained_only:
            left = {f"params.{name}": tensors[name].contiguous() for name in state.params}
            base = take_out_base(state, {name: f"params.{name}" for name in state.params}, left)
            for key in base:
                del tensors[key.removeprefix("params.")]
        return cls(state, tensors, base)

    def write(
        self, path: str, notes: Mapping[str, object] | None = None, coordinator: Coordinator | None = None
    ) -> None:
        """Write the file, whole or not at all.

        With a coordinator all ranks call it, the first one writes, and when it returns, on any of them, the file is
        there.

        Raises:
            DistributedError: rank 0 couldn't write it.
        """
        if coordinator is not None:
            coordinator.together(path, lambda: self.write(path, notes) if coordinator.rank == 0 else None)
            return
        metadata = {WEIGHTS_KEY: describe_weights(self.state, notes, self.base), "format": "pt"}
        with storage_of(path).writing() as file:
            tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
            container.write(file, tensors, metadata, digested=False)


def refuse_unwritable(state: State) -> None:
    """
    Raises:
        ArgumentTypeError: a weight has a dtype that the format lacks; names it.
    """
    for field, values in (("params", state.params), ("buffers", state.buffers)):
        for name, value in values.items():
            if value.dtype not in CODES:
                raise ArgumentTypeError(
                    f"state.{field}[{name!r}] has dtype {value.dtype}, which the safetensors format lacks: save the "
                    "whole State, without weights_only."
                )
