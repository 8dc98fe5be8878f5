"""Which buffers a module has: those that it came with, and what its forwards have made of them since.

A forward may register a buffer, set one that was None, set one to None, delete one, or give one another shape or
dtype. The module in a ``ModelDef`` stays as it came; what has become of its buffers is written
down beside it, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from pure_loop.frozendict import FrozenDict

Kind = Literal["tensor", "reshaped", "none", "deleted"]


class Slot(NamedTuple):
    """What is registered under the name of a buffer.

    Attributes:
        kind: a tensor of any shape and dtype, the tensor that it came with (or the one under several names) with
            another shape or dtype, None, or nothing.
        persistent: whether it is part of ``state_dict()``.
    """

    kind: Kind
    persistent: bool = True


Altered = FrozenDict[str, Slot]
"""By name: the buffers that are not as the module came with them, or whose shape or dtype changed."""

UNALTERED: Altered = FrozenDict()


def slot_of(module: nn.Module, path: str) -> Slot:
    """What is registered in the module under this name.

    >>> slot_of(nn.BatchNorm1d(3), "running_mean"), slot_of(nn.BatchNorm1d(3), "mean")
    (Slot(kind='tensor', persistent=True), Slot(kind='deleted', persistent=True))
    """
    submodule, key = _place(module, path)
    if key not in submodule._buffers:
        return Slot("deleted")
    kind: Kind = "none" if submodule._buffers[key] is None else "tensor"
    return Slot(kind, key not in submodule._non_persistent_buffers_set)


def put_slots(module: nn.Module, slots: Mapping[str, Slot]) -> None:
    """Register buffers in a module, or remove them; what stands for their tensors is to be replaced."""
    for path, slot in slots.items():
        submodule, key = _place(module, path)
        hidden: set[str] = submodule._non_persistent_buffers_set
        if slot.kind == "deleted":
            submodule._buffers.pop(key, None)
        elif slot.kind == "none":
            submodule._buffers[key] = None
        elif submodule._buffers.get(key) is None:
            submodule._buffers[key] = torch.empty(0, device="meta")
        if slot.kind == "deleted" or slot.persistent:
            hidden.discard(key)
        else:
            hidden.add(key)


def places_of(module: nn.Module, altered: Altered) -> dict[str, list[str]]:
    """By the name of each buffer that is a tensor the names under which it is registered: several where it is tied.

    Args:
        module: as it came.
        altered: what has become of its buffers.
    """
    late: dict[str, list[str]] = {}
    for path in altered:
        prefix, _, key = path.rpartition(".")
        late.setdefault(prefix, []).append(key)
    first: dict[int, str] = {}
    places: dict[str, list[str]] = {}
    for prefix, submodule in module.named_modules():
        for key in dict.fromkeys([*submodule._buffers, *late.get(prefix, ())]):
            path = f"{prefix}.{key}" if prefix else key
            slot = altered.get(path)
            if slot is None or slot.kind == "reshaped":
                tensor = submodule._buffers[key]
                if tensor is not None:
                    places.setdefault(first.setdefault(id(tensor), path), []).append(path)
            elif slot.kind == "tensor":
                places[path] = [path]
    return places


def alterations(module: nn.Module, came: nn.Module, before: Altered) -> Altered:
    """What has become of the buffers of ``came`` in its copy ``module``, after ``before``."""
    first, was = _registered(came)
    tensors, slots = _registered(module)
    groups = places_of(came, UNALTERED)
    torn = {
        path
        for paths in groups.values()
        if len({id(tensors.get(path)) for path in paths}) > 1
        or any(before[path].kind != "reshaped" for path in paths if path in before)
        for path in paths
        if len(paths) > 1
    }
    altered = {}
    for path in dict.fromkeys([*slots, *before, *was]):
        slot, old = slots.get(path, Slot("deleted")), was.get(path, Slot("deleted"))
        if path in torn:
            altered[path] = slot
        elif slot.kind == "tensor" == old.kind:
            # A buffer that once was of another shape may be so again, and that is no news.
            if path in before or not _alike(tensors[path], first[path]) or slot != old:
                altered[path] = Slot("reshaped", slot.persistent)
        elif slot != old:
            altered[path] = slot
    return before if altered == before else FrozenDict(altered)


def _registered(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Slot]]:
    """By name, buffers that are tensors, and what each of them all is."""
    tensors, slots = {}, {}
    for prefix, submodule in module.named_modules():
        for key, tensor in submodule._buffers.items():
            path = f"{prefix}.{key}" if prefix else key
            persistent = key not in submodule._non_persistent_buffers_set
            slots[path] = Slot("none" if tensor is None else "tensor", persistent)
            if tensor is not None:
                tensors[path] = tensor
    return tensors, slots


def read_altered(value: Any) -> Altered:
    """Altered buffers as a file says them: names to ``[kind, persistent]``.

    Raises:
        ValueError: it is no such mapping.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where buffers are listed")
    for path, slot in value.items():
        if (
            not isinstance(slot, list)
            or len(slot) != 2
            or slot[0] not in get_args(Kind)
            or type(slot[1]) is not bool
            or not path.rpartition(".")[2]
        ):
            raise ValueError(f"buffer {path[:80]!r} is described by {str(slot)[:80]}")
    return FrozenDict((path, Slot(*slot)) for path, slot in value.items()) if value else UNALTERED


def refuse_misplaced(altered: Altered, module: nn.Module) -> None:
    """
    Raises:
        LookupError: a name has no place in the module; says why.
    """
    submodules = dict(module.named_modules())
    for path, slot in altered.items():
        prefix, _, key = path.rpartition(".")
        if prefix not in submodules:
            raise LookupError(f"there is no submodule {prefix!r} for the buffer {path!r}")
        submodule = submodules[prefix]
        if key not in submodule._buffers and hasattr(submodule, key):
            raise LookupError(f"{path!r} is no buffer there")
        if slot.kind == "reshaped" and submodule._buffers.get(key) is None:
            raise LookupError(f"the buffer {path!r} is no tensor there")


def _alike(tensor: Tensor, reference: Tensor) -> bool:
    return tensor.shape == reference.shape and tensor.dtype is reference.dtype


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, key = path.rpartition(".")
    return module.get_submodule(prefix), key
